"""Robust statistics of one series: its scatter, where it leaves its own baseline, where it ends."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .log import Series


@dataclass(frozen=True)
class Departure:
    """A series leaves its own baseline and stays away: from `step` on, `before` → `after`."""

    step: float
    before: float
    after: float

    @property
    def factor(self) -> float:
        """How many times the baseline the later level is; infinite from a baseline of 0."""
        return abs(self.after) / abs(self.before) if self.before else float("inf")


def scatter(values: np.ndarray) -> float:
    """Standard deviation of the noise around a slow curve, from how neighbours differ.

    1.4826 · median|x_{t+1} − x_t| / √2, or with second differences in place of the first and √6,
    whichever is less: a slope raises the one, a single step the other.
    """
    if len(values) < 2:
        return 0.0
    orders = {1: 2.0, 2: 6.0} if len(values) > 3 else {1: 2.0}
    jumps = {n: np.median(np.abs(np.diff(values, n))) for n in orders}
    return float(min(1.4826 * jumps[n] / np.sqrt(orders[n]) for n in orders))


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Running median over `window` values, centred; shorter at the ends."""
    if window <= 1 or len(values) < 3:
        return values
    half = window // 2
    padded = np.concatenate([values[:half][::-1], values, values[-half:][::-1]])
    return np.median(np.lib.stride_tricks.sliding_window_view(padded, 2 * half + 1), axis=-1)


def window_of(count: int) -> int:
    """Odd width of the running median: 1 below 8 values, at most 15."""
    return 1 if count < 8 else min(15, 2 * (count // 16) + 3)


def baseline_of(count: int) -> int:
    """How many of the first values are the run's own baseline: a tenth, from 1 to 50."""
    return max(1, min(50, count // 10)) if count < 30 else max(3, min(50, count // 10))


def level(series: Series, part: str) -> float:
    """Median of the first or the last fifth of the finite values; NaN where there are none."""
    values = series.finite().values
    if not len(values):
        return float("nan")
    count = max(1, len(values) // 5)
    return float(np.median(values[:count] if part == "first" else values[-count:]))


def departure(
    series: Series, *, up: bool, least: float, factor: float = 1.0, noises: float = 5.0
) -> Departure | None:
    """Where the series leaves its baseline by more than noise, upwards or downwards, for good.

    The running median must stay at least `noises` scatters, `least` units, and a `factor` away
    from the median of the first tenth, in at least two thirds of all that follows the step it
    returns. None where it does not. Below six values there is no noise to measure, and `least`
    and `factor` decide alone.
    """
    series = series.finite()
    if len(series) < 2:
        return None
    curve = smooth(series.values, window_of(len(series)))
    count = baseline_of(len(series))
    before = float(np.median(series.values[:count]))
    noise = scatter(series.values[: max(3, 2 * count)]) if len(series) >= 6 else 0.0
    away = max(noises * noise, least)
    gone = curve - before > away if up else before - curve > away
    if factor > 1:
        gone &= curve > factor * before if up else curve < before / factor
    gone[:count] &= count == 1
    gone[0] = False
    later = np.cumsum(gone[::-1])[::-1] / np.arange(len(gone), 0, -1)
    starts = np.flatnonzero(gone & (later >= 2 / 3))
    # One last value has nothing after it that could show it to stay, unless it is far out.
    if len(series) >= 6 and gone[-1] and not gone[-2] and abs(curve[-1]) < 10 * abs(before):
        starts = starts[:-1]
    if not len(starts):
        return None
    after = float(np.median(curve[starts[0] :]))
    return Departure(float(series.steps[starts[0]]), before, after)


def monotone(series: Series) -> float:
    """Kendall's τ of value against step, −1 to 1, on at most 60 medians of blocks."""
    values = series.finite().values
    if len(values) < 3:
        return 0.0
    blocks = np.array([np.median(b) for b in np.array_split(values, min(60, len(values)))])
    above = np.sign(blocks[None, :] - blocks[:, None])[np.triu_indices(len(blocks), 1)]
    return float(above.mean())


def fall_from_peak(series: Series) -> Departure | None:
    """The last fall of a smoothed curve from its highest point that is larger than noise.

    It ends below the peak by 4 scatters, and by a quarter of the height above the lowest value
    (40 % below 20 values, where a median still moves with single rows). A steep fall of few
    values looks like noise, so below 20 it is also one where the last third lies below half of
    the whole first third. `step` is where the curve last stood in the upper half of that fall.
    """
    series = series.finite()
    if len(series) < 3:
        return None
    curve = smooth(series.values, window_of(len(series)))
    top = int(np.argmax(curve))
    end = float(np.median(series.values[-max(1, len(series) // 5) :]))
    floor = min(0.0, float(curve.min()))
    drop, height = curve[top] - end, curve[top] - floor
    share = 0.25 if len(series) >= 20 else 0.4
    # The noise of the time before the fall: a collapse is noisier than what it ends.
    noise = scatter(series.values[: max(top + 1, 5)]) / np.sqrt(max(1, window_of(len(series)) / 2))
    least = share * height if halved(series) else max(4 * noise, share * height)
    if top >= len(curve) - 1 or drop < least or drop <= 0:
        return None
    upper = np.flatnonzero(curve[top:] > curve[top] - drop / 2)
    onset = min(top + int(upper[-1]) + 1, len(series) - 1)
    return Departure(float(series.steps[onset]), float(curve[top]), end)


def halved(series: Series) -> bool:
    """Whether 5 to 19 values end, the last third, below half of the lowest of the first third."""
    values, third = series.finite().values, len(series.finite()) // 3
    if not 5 <= len(values) < 20:
        return False
    lowest = float(values[: max(2, third)].min())
    return lowest > 0 and bool(values[-max(2, third) :].max() < 0.5 * lowest)


def spikes(series: Series, factor: float, least: float) -> Series:
    """Single values that stand `factor` times above their neighbours' median and above `least`."""
    series = series.finite()
    if len(series) < 5:
        return Series(series.steps[:0], series.values[:0])
    around = smooth(series.values, 5)
    found = (series.values > factor * np.abs(around)) & (series.values > least)
    return Series(series.steps[found], series.values[found])


def period(series: Series) -> int | None:
    """The lag, in rows, at which a sawtooth repeats itself; None where it does not.

    The autocorrelation of the curve without its slow part has its first peak there, above 0.5.
    """
    values = series.finite().values
    if len(values) < 16:
        return None
    slow = smooth(values, 2 * (len(values) // 8) + 1)
    rest = values - slow
    power = float(rest @ rest)
    if power == 0:
        return None
    lags = range(2, len(values) // 3)
    auto = np.array([float(rest[k:] @ rest[:-k]) / power for k in lags])
    peaks = [
        k
        for k in range(len(auto))
        if auto[k] > 0.5 and auto[k] == auto[max(0, k - 1) : k + 2].max()
    ]
    return lags[peaks[0]] if peaks else None
