"""Is a series what its name says? A share is at most 1, entropy at least 0."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..log import EMPTY, LogError, MappedColumn, Series
from ..signals import signal_of
from . import fuzzy
from .text import shown
from .vocabulary import Entry

_MAY_EXCEED_1 = ("weight_ess", "weight_ess_capped", "explained_variance")


def checked(series: Series, entry: Entry, warnings: list[str]) -> tuple[Series, Entry] | None:
    """A series and what it is, its sign or scale repaired; None where it cannot be that signal."""
    values = series.finite().values
    if not len(values):
        return series, entry
    low, high = float(values.min()), float(values.max())
    if entry.signal == "entropy" and low < 0:
        return _signed(series, entry, high, warnings)
    if signal_of(entry.signal).unit == "share" and high > 1.0 + 1e-6:
        return _as_share(series, entry, low, high, warnings)
    return series, entry


def _signed(series: Series, entry: Entry, high: float, warnings: list[str]):
    if high > 0:
        warnings.append(f"{shown(entry.column)} has both signs, entropy has not: not used")
        return None
    warnings.append(f"{shown(entry.column)} is negative: taken for minus the entropy")
    meaning = f"{entry.meaning}; minus entropy is logged"
    return Series(series.steps, -series.values), replace(
        entry, factor=-entry.factor, meaning=meaning
    )


def _as_share(series: Series, entry: Entry, low: float, high: float, warnings: list[str]):
    told = set(fuzzy.words(entry.column).split()) & {"percent", "accuracy"}
    if told and low >= 0 and 1.5 < high <= 100.0:
        warnings.append(f"{shown(entry.column)} is up to {high:g}: taken for per cent")
        meaning = f"{entry.meaning}; logged in per cent"
        scaled = replace(entry, factor=0.01 * entry.factor, meaning=meaning)
        return Series(series.steps, 0.01 * series.values), scaled
    if entry.signal == "heldout_accuracy":
        return series, replace(entry, meaning=f"{entry.meaning}; a score, not a share")
    if entry.signal in _MAY_EXCEED_1:
        return series, entry
    warnings.append(f"{shown(entry.column)} is up to {high:g}, which is no share: not used")
    return None


def refuse_a_mixture(entry: Entry, steps: np.ndarray, values: np.ndarray, mean: Series) -> None:
    """Several rewards a step that differ are several runs, ranks or samples: no mean of those."""
    apart = np.abs(values - mean.values[np.searchsorted(mean.steps, steps)])
    scale = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
    mixed = np.unique(steps[apart > 1e-9 * max(scale, 1e-30)])
    if len(mixed) > 0.2 * len(mean):
        raise LogError(
            f"{shown(entry.column)} has several different values at {len(mixed)} of {len(mean)} "
            "steps: several runs, ranks or samples in one file; give one row a step"
        )


def which_spread(signals: dict[str, Series], mapping: list[MappedColumn]) -> None:
    """TRL's reward_std: above 0 where every group is tied, it is the spread of the batch."""
    std, tied = signals.get("reward_std", EMPTY), signals.get("zero_variance_groups", EMPTY)
    both = np.intersect1d(std.steps, tied.steps[tied.values >= 1.0])
    if not len(both) or not (std.values[np.isin(std.steps, both)] > 1e-4).any():
        return
    signals["reward_spread"] = signals.pop("reward_std")
    meaning = signal_of("reward_spread").meaning
    for n, mapped in enumerate(mapping):
        if mapped.signal == "reward_std":
            mapping[n] = replace(mapped, signal="reward_spread", meaning=meaning)


def one_evaluation(
    signals: dict[str, Series], mapping: list[MappedColumn], warnings: list[str]
) -> None:
    """`heldout_accuracy` is the evaluation with most points, an accuracy before a score."""
    scores = [m for m in mapping if m.signal.startswith("heldout:")]
    if "heldout_accuracy" in signals or not scores:
        return

    def worth(mapped: MappedColumn):
        return "acc" not in mapped.signal.lower(), -len(signals[mapped.signal])

    best = min(scores, key=worth)
    if len(scores) > 1:
        warnings.append(f"of {len(scores)} evaluations heldout_accuracy is {shown(best.column)}")
    signals["heldout_accuracy"] = signals[best.signal]
    mapping.append(replace(best, signal="heldout_accuracy"))
