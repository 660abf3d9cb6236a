"""Settings that change during a run: small callables the trainer asks before every step.

A schedule is called as `schedule(step, previous, rows)` and returns the setting's value.

    step       the step about to run, from 1
    previous   the value this setting had in the last logged step, or None
    rows       the logged rows before this step, oldest first, each a mapping of signals

It keeps no state: the same log gives the same value, so a resumed run repeats the run that was
not interrupted. A signal that a row does not have (its probe was not due) or that is NaN is the
last one known; before there is one, an adaptive schedule returns its `start`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

Rows = Sequence[Mapping[str, float]]


class Schedule(Protocol):
    """What the trainer takes: a frozen dataclass of plain numbers that can be called."""

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float: ...


@dataclass(frozen=True)
class Constant:
    """`value` at every step."""

    value: float

    def __post_init__(self):
        _finite(self, "value")

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        return self.value


@dataclass(frozen=True)
class Linear:
    """A straight line from `start` at step 1 to `end` at step `steps`, and `end` from there on.

    With start > end on `policy.kl_coef` this is a "dynamic KL": strong early, weaker later.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self):
        _finite(self, "start", "end")
        _whole("steps", self.steps, 2)

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        if step >= self.steps:  # exactly `end`, not start + 1.0 · (end − start)
            return self.end
        return self.start + (self.end - self.start) * (step - 1) / (self.steps - 1)


@dataclass(frozen=True)
class Piecewise:
    """Steps in a staircase: `points` are (first step, value), the first of them at step 1.

    `Piecewise(((1, 8), (51, 16)))` is 8 up to step 50 and 16 from step 51. Values come back as
    they were given: whole numbers for a setting like `data.group_size`.
    """

    points: tuple[tuple[int, float], ...]

    def __post_init__(self):
        try:
            points = tuple((step, value) for step, value in self.points)
        except (TypeError, ValueError):
            raise ValueError(f"points is {self.points!r}, expected pairs (step, value)") from None
        object.__setattr__(self, "points", points)  # JSON gives lists
        for step, value in points:
            _whole("points", step, 1)
            _number("points", value)
        steps = [step for step, _ in points]
        if steps[:1] != [1] or steps != sorted(set(steps)):
            raise ValueError(f"points starts at steps {steps}, expected 1 and then rising steps")

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        return [value for first, value in self.points if first <= step][-1]


@dataclass(frozen=True)
class AdaptiveKL:
    """Raises the KL coefficient while the KL is above its target, lowers it below.

        β ← β · (1 + gain · clip(KL / target − 1, −limit, limit))

    start: β of step 1, > 0. target: in the signal's unit; nats a token for `kl_ref` (Ziegler's
    targets of 6 and more are nats a whole answer). A KL of infinity counts as far above.
    One update a step, also where the KL is the last known one because its probe was not due: a
    probe every n steps makes the controller n times as fast on each measurement.

    Source: arXiv 1909.08593 §2.2: gain .1, limit .2, an update a batch. verl writes the gain as
    n / horizon (`AdaptiveKLController`, horizon 10,000 by default), n the samples since the last
    update: a batch of 1,000 is Ziegler's .1.
    """

    start: float
    target: float
    gain: float = 0.1
    limit: float = 0.2
    signal: str = "kl_ref"

    def __post_init__(self):
        _positive(self, "start", "target", "gain", "limit")
        _named(self.signal)
        if self.gain * self.limit >= 1:
            raise ValueError(
                f"gain · limit is {self.gain * self.limit}, expected < 1: one step could make "
                "the coefficient negative"
            )

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        kl = _known(rows, self.signal)
        if previous is None or not kl:
            return self.start
        error = min(max(kl[-1] / self.target - 1, -self.limit), self.limit)
        return previous * (1 + self.gain * error)


@dataclass(frozen=True)
class AdaptiveEntropy:
    """An entropy bonus that is on only below a target entropy, and grows while it stays there.

        c ← clip(c + delta, minimum, maximum)  where H < target,  c − delta where H > target
        coefficient = c where H ≤ target, else 0

    H is the entropy of the last logged step, in nats a token; c begins at `start` and is
    followed through all rows, because the logged coefficient, 0 above the target, forgets it.

    Source: arXiv 2505.22312; the defaults are those of the authors' scripts. TRL's
    `use_adaptive_entropy` is the same rule with delta .005 and maximum 1.0.
    """

    start: float = 0.0
    target: float = 0.2
    delta: float = 1e-4
    minimum: float = 0.0
    maximum: float = 0.005
    signal: str = "entropy"

    def __post_init__(self):
        _finite(self, "start", "target", "minimum", "maximum")
        _positive(self, "delta")
        _named(self.signal)
        _ordered(self)

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        coefficient, seen = self.start, _known(rows, self.signal)
        for value in seen:
            direction = (value < self.target) - (value > self.target)
            coefficient = _clip(self, coefficient + direction * self.delta)
        return 0.0 if seen and seen[-1] > self.target else coefficient


@dataclass(frozen=True)
class AdaptiveClip:
    """Raises the upper clip bound while the entropy is below its target, lowers it above.

        clip_high ← clip(clip_high + gain · (target − H), minimum, maximum)

    An integral controller of our own, the simplest there is: clip-higher (arXiv 2503.14476)
    raises entropy, so the bound is the handle and the entropy is what is held. H in nats a
    token, of the last logged step. It sums up errors only within [minimum, maximum], so it
    turns round as soon as the entropy has crossed the target.

    The idea is reported of MAI-Thinking-1, which we know from secondary texts only; nothing here
    is copied from it. All defaults are ours.
    """

    target: float
    start: float = 0.2
    gain: float = 0.02
    minimum: float = 0.1
    maximum: float = 0.5
    signal: str = "entropy"

    def __post_init__(self):
        _finite(self, "target", "start", "minimum", "maximum")
        _positive(self, "gain")
        _named(self.signal)
        _ordered(self)

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        _check_step(step)
        seen = _known(rows, self.signal)
        if previous is None or not seen:
            return self.start
        return _clip(self, previous + self.gain * (self.target - seen[-1]))


SCHEDULES: dict[str, type] = {
    kind.__name__: kind
    for kind in (Constant, Linear, Piecewise, AdaptiveKL, AdaptiveEntropy, AdaptiveClip)
}


def schedule_to_dict(schedule: Schedule) -> dict[str, Any]:
    """The schedule as plain values for JSON: its class name under "kind", and its fields.

    Raises `ValueError`: not one of `SCHEDULES`.
    """
    kind = type(schedule).__name__
    if SCHEDULES.get(kind) is not type(schedule):
        raise ValueError(f"schedule is {schedule!r}, expected one of {sorted(SCHEDULES)}")
    return {"kind": kind, **asdict(schedule)}


def schedule_from_dict(values: Mapping[str, Any]) -> Schedule:
    """The schedule that `schedule_to_dict` wrote.

    Raises `ValueError`: an unknown kind, an unknown or missing field, a value out of range.
    """
    fields = dict(values)
    kind = fields.pop("kind", None)
    if kind not in SCHEDULES:
        raise ValueError(f"kind is {kind!r}, expected one of {sorted(SCHEDULES)}")
    try:
        return SCHEDULES[kind](**fields)
    except TypeError as error:
        raise ValueError(f"values has not the fields of {kind}: {error}") from None


def _known(rows: Rows, signal: str) -> list[float]:
    """The signal at each row from its first value on, the last known where a row has none."""
    seen: list[float] = []
    for row in rows:
        value = row.get(signal, math.nan)
        if not math.isnan(value):
            seen.append(value)
        elif seen:
            seen.append(seen[-1])
    return seen


def _clip(bounds: AdaptiveEntropy | AdaptiveClip, value: float) -> float:
    return min(max(value, bounds.minimum), bounds.maximum)


def _ordered(bounds: AdaptiveEntropy | AdaptiveClip) -> None:
    if not bounds.minimum <= bounds.start <= bounds.maximum:
        raise ValueError(
            f"start is {bounds.start}, expected a value between minimum {bounds.minimum} and "
            f"maximum {bounds.maximum}"
        )


def _check_step(step: int) -> None:
    if step < 1:
        raise ValueError(f"step is {step}, expected ≥ 1: the first step of a run is 1")


def _number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} is {value!r}, expected a finite number")


def _finite(schedule: object, *names: str) -> None:
    for name in names:
        _number(name, getattr(schedule, name))


def _positive(schedule: object, *names: str) -> None:
    _finite(schedule, *names)
    for name in names:
        if getattr(schedule, name) <= 0:
            raise ValueError(f"{name} is {getattr(schedule, name)}, expected > 0")


def _whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} has {value!r}, expected a whole number ≥ {least}")


def _named(signal: Any) -> None:
    if not isinstance(signal, str) or not signal:
        raise ValueError(f"signal is {signal!r}, expected the name of a logged signal")
