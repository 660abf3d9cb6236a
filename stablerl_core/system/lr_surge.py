"""A learning rate that comes down after the answers have suddenly become long."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Rows = Sequence[Mapping[str, float]]


def length_surge(rows: Rows, *, window: int = 50, factor: float = 3.0) -> int | None:
    """The step at which the completion length first exceeded `factor` × its first average.

    rows: logged rows, oldest first, each with "step" and the signal "length" (mean tokens a
    completion; rows without it, or with a NaN, are passed over). The average is over the first
    `window` rows; a surge inside them is not looked for. Returns None before there is one.
    Raises `ValueError` for a window below 1 or a factor that is not above 1.
    Source: arXiv 2602.01826 names the surge as the early warning; window and factor are those
    of a public reproduction, not verified against the paper.
    """
    if window < 1 or not factor > 1:
        raise ValueError(f"window={window}, factor={factor}: expected window ≥ 1 and factor > 1")
    known = [row for row in rows if not math.isnan(row.get("length", math.nan))]
    first = [row["length"] for row in known[:window]]
    for row in known[window:]:
        if row["length"] > factor * sum(first) / window:
            return int(row["step"])
    return None


@dataclass(frozen=True)
class LengthSurgeDecay:
    """Learning rate `base`, halved every 1.8 × surge step once the length has surged.

        lr(step) = base · max(0.5^⌊step / (period_factor · surge step)⌋, lowest)

    A schedule like those of `stablerl_core.policy`: `schedule(step, previous, rows)`, stateless,
    so a resumed run repeats itself. `warmup`: steps of a straight line up to `base`.
    `window`, `factor`: see `length_surge`. `lowest`: the end, as a share of `base`.
    `count_from`: "start" counts the periods from the first step, so that the first halving comes
    at 1.8 × surge step; "surge" counts them from the surge. Raises `ValueError` for a setting out
    of range.
    Source: arXiv 2602.01826: period 1.8 × surge step, halved down to 0.1 ×, 10 warm-up steps
    (its base is 1e-6). Where the periods start could not be verified; "start" is our reading.
    """

    base: float
    warmup: int = 10
    window: int = 50
    factor: float = 3.0
    period_factor: float = 1.8
    lowest: float = 0.1
    count_from: Literal["start", "surge"] = "start"

    def __post_init__(self):
        length_surge((), window=self.window, factor=self.factor)
        for name in ("base", "period_factor", "lowest"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ValueError(f"{name}={value}: must be > 0 and finite")
        if self.lowest > 1 or self.warmup < 0:
            raise ValueError(f"lowest={self.lowest}, warmup={self.warmup}: at most 1, at least 0")
        if self.count_from not in ("start", "surge"):
            raise ValueError(f"count_from is {self.count_from!r}, expected 'start' or 'surge'")

    def __call__(self, step: int, previous: float | None, rows: Rows) -> float:
        if step < 1:
            raise ValueError(f"step={step}: steps count from 1")
        if step < self.warmup:
            return self.base * step / self.warmup
        surge = length_surge(rows, window=self.window, factor=self.factor)
        if surge is None:
            return self.base
        elapsed = step - (surge if self.count_from == "surge" else 0)
        halvings = math.floor(elapsed / (self.period_factor * surge))
        return self.base * max(0.5**halvings, self.lowest)
