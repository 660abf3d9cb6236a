"""Reading repeated experiments: their curves over seeds, and intervals for what is claimed."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from ..runlog import SIGNALS

# Two-sided 95 % points of Student's t for 1 … 30 degrees of freedom.
T95 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Interval:
    """Mean of n seeds with its 95 % confidence interval (Student's t); NaN bounds for one seed."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} [{self.low:.2f}, {self.high:.2f}]"


def interval(values: Sequence[float]) -> Interval:
    """95 % interval of the mean of independent runs. Raises `ValueError` without a value."""
    n = len(values)
    if n == 0:
        raise ValueError("values is empty: an interval needs at least one run")
    mean = math.fsum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    spread = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)
    half = T95[min(n - 1, len(T95)) - 1] * spread
    return Interval(mean, mean - half, mean + half, n)


@dataclass(frozen=True)
class Results:
    """A results file: the experiment's name and prediction, how it was made, and its runs.

    `runs[arm][seed]` is the list of rows of one run: of a `RunLog`, or what an arm of a `Measured`
    experiment returned.
    """

    name: str
    prediction: str
    made: dict
    runs: dict[str, dict[str, list[dict]]]

    @property
    def arms(self) -> list[str]:
        return list(self.runs)

    def per_seed(
        self, arm: str, signal: str, first: int, last: int, reduce: Callable = fmean
    ) -> list[float]:
        """One number a seed: the mean (or `max`, `min` …) of a signal over steps first … last."""
        numbers = []
        for rows in self._runs(arm):
            values = [r[signal] for r in rows if signal in r and first <= r["step"] <= last]
            if not values:
                raise ValueError(f"signal={signal!r} has no value in steps {first} to {last}")
            numbers.append(reduce(values))
        return numbers

    def over(self, arm: str, signal: str, first: int, last: int) -> Interval:
        """Interval over seeds of a signal's mean over steps first … last."""
        return interval(self.per_seed(arm, signal, first, last))

    def change(self, arm: str, other: str, signal: str, first: int, last: int) -> Interval:
        """Interval of arm − other over the same steps, paired by seed."""
        pairs = zip(
            self.per_seed(arm, signal, first, last),
            self.per_seed(other, signal, first, last),
            strict=True,
        )
        return interval([a - b for a, b in pairs])

    def band(self, arm: str, signal: str) -> tuple[list[int], list[Interval]]:
        """Steps at which every seed has the signal, and its interval over seeds at each."""
        measured = {name for rows in self._runs(arm) for row in rows for name in row}
        if signal not in SIGNALS.keys() | measured:
            known = ", ".join(sorted(measured))
            raise ValueError(f"signal={signal!r} is unknown; {arm} measured: {known}")
        series = [{r["step"]: r[signal] for r in rows if signal in r} for rows in self._runs(arm)]
        steps = sorted(set.intersection(*(set(s) for s in series)))
        return steps, [interval([s[step] for s in series]) for step in steps]

    def _runs(self, arm: str) -> list[list[dict]]:
        if arm not in self.runs:
            raise ValueError(f"arm={arm!r} is not in {self.name}; arms: {', '.join(self.runs)}")
        return list(self.runs[arm].values())


def results_folder() -> Path:
    """`results/` of the clone, or the copy that an installed package carries."""
    package = Path(__file__).parents[1]
    return (
        package.parent if (package.parent / "pyproject.toml").is_file() else package
    ) / "results"


def load(name: str, scale: str | None = None) -> Results:
    """Read `results/<name>.json`, or `results/gpu/<name>.json` when the scale is `gpu`.

    `scale` None takes the environment variable `SCALE`, else `cpu`. Raises `FileNotFoundError`
    with the command that makes the file.
    """
    scale = scale or os.environ.get("SCALE", "cpu")
    path = results_folder() / ("gpu" if scale == "gpu" else "") / f"{name}.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no repeated runs at {path}; make them with: stablerl experiment {name} --seeds 5"
        )
    return Results(**json.loads(path.read_text()))
