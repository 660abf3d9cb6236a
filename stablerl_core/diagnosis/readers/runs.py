"""The steps of a table's rows, and which rows are the one run."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..log import LogError, Series
from .csvs import choose_run, listed
from .table import Column, Table

# Names under which a step may stand, best first: a trainer's own count before a tracker's.
STEP_NAMES = (
    "train/global_step",
    "trainer/global_step",
    "training/global_step",
    "global_step",
    "step",
    "eval/global_step",
    "train/step",
    "rollout/step",
    "eval/step",
    "global_step/max_steps",
    "progress/batch",
    "system/global_step",
    "time/total_timesteps",
    "train_step",
    "training_step",
    "iteration",
    "iter",
    "global_iter",
    "update",
    "episode",
    "_step",
)
_KINDS = {
    "episode": "episode",
    "time/total_timesteps": "environment step",
    "_step": "call of the tracker",
}
# slime counts its updates and its rollouts apart, in a tracker and on the console.
_ROLLOUTS = ("rollout/step", "eval/step", "rollout", "perf", "eval")
_SAME = {"eval/global_step": "train/global_step"}


@dataclass(frozen=True)
class Restart:
    """The log goes back: from `row` on, the run continues at `step`."""

    row: int
    step: float


@dataclass
class Rows:
    """The rows of one run: the step of every row of the table, the range that is the run's, where
    it was resumed, and whether most of its steps are logged several times."""

    steps: np.ndarray
    kind: str
    start: int = 0
    end: int = 0
    restarts: tuple[Restart, ...] = ()
    several: bool = False

    def values(self, column: Column) -> tuple[np.ndarray, np.ndarray]:
        """Steps and values of a column as they were logged, without what was abandoned."""
        rows, values = column.row_numbers(), np.frombuffer(column.values)
        if self.start > 0 or self.end < len(self.steps):
            inside = (rows >= self.start) & (rows < self.end)
            rows, values = rows[inside], values[inside]
        steps = self.steps[rows]
        if self.restarts:
            keep = self._kept(rows, steps)
            steps, values = steps[keep], values[keep]
        return steps, values

    def _kept(self, rows: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """Which values lie before every step to which the log later went back."""
        back = np.array([r.step for r in self.restarts])
        lowest = np.append(np.minimum.accumulate(back[::-1])[::-1], np.inf)
        later = np.searchsorted([r.row for r in self.restarts], rows, side="right")
        return steps < lowest[later]


def distinct(steps: np.ndarray, values: np.ndarray, mean: bool) -> Series:
    """Strictly increasing steps; of several values of one step the last, or their mean."""
    if len(steps) and not (np.diff(steps) > 0).all():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    starts = np.flatnonzero(np.diff(steps, prepend=-np.inf) > 0)
    if len(starts) == len(steps):
        return Series(steps, values)
    ends = np.append(starts[1:], len(steps))
    kept = np.add.reduceat(values, starts) / (ends - starts) if mean else values[ends - 1]
    return Series(steps[starts], kept)


# --- the steps of all rows --------------------------------------------------------------------


def steps_of(table: Table, slime: bool, warnings: list[str]) -> Rows:
    """The step of every row, all on one count."""
    steps = np.array(table.steps)
    if not np.isfinite(steps).any():
        return _without_steps(table, warnings)
    axis = np.array(table.axis)
    names = {code: name for name, code in table.axes.items()}
    counts = {code: int((axis[np.isfinite(steps)] == code).sum()) for code in names}
    rollouts = np.isin(axis, [c for c, name in names.items() if name in _ROLLOUTS])
    if slime and rollouts.any() and not rollouts.all():
        steps = _rollouts_as_updates(steps, rollouts, warnings)
        kind = "step"
    else:
        best = max(names, key=lambda c: (names[c] != "_step", counts[c], -_rank(names[c])))
        group = [c for c in names if _group(names[c]) == _group(names[best])]
        steps = np.where(np.isin(axis, group), steps, np.nan)
        kind = _KINDS.get(names[best], "step")
    return Rows(_filled(steps, warnings), kind, 0, len(steps))


def _rank(name: str) -> int:
    return STEP_NAMES.index(name) if name in STEP_NAMES else len(STEP_NAMES)


def _group(name: str) -> str:
    return "step" if name in _ROLLOUTS else _SAME.get(name, name)


def _filled(steps: np.ndarray, warnings: list[str]) -> np.ndarray:
    """A row without a step takes that of the row before, the first ones that of the row after."""
    known = np.isfinite(steps)
    where = np.maximum.accumulate(np.where(known, np.arange(len(steps)), -1))
    where[where < 0] = int(np.argmax(known))
    if not known.all():
        warnings.append(f"{int((~known).sum())} rows name no step and were given the row before's")
    return steps[where]


def _without_steps(table: Table, warnings: list[str]) -> Rows:
    """No row names a step: where a progress bar stood, or else the number of the row."""
    bars, numbers = np.array(table.bars), np.array(table.numbers)
    last = np.flatnonzero(np.diff(numbers, append=np.inf) > 0)
    if len(last) > 1 and np.isfinite(bars).all() and (np.diff(bars[last]) > 0).all():
        return Rows(bars, "step of the progress bar", 0, len(bars))
    warnings.append("no step is logged: rows are counted from 1")
    return Rows(np.maximum(numbers, 1.0), "row", 0, len(bars))


def _rollouts_as_updates(steps, rollouts: np.ndarray, warnings: list[str]) -> np.ndarray:
    """Rollout n comes before the updates r·n, r·n + 1 …: put it at r·n."""
    before = np.flatnonzero(rollouts[:-1] & ~rollouts[1:] & (steps[:-1] > 0))
    if not len(before):
        return steps
    each = round(float(np.median(steps[before + 1] / steps[before])))
    if each > 1:
        warnings.append(f"rollout n is shown at update {each}·n: there are {each} updates each")
    return np.where(rollouts, steps * max(each, 1), steps)


# --- the one run --------------------------------------------------------------------------------


def one_run(rows: Rows, columns: list[Column], run: str | None) -> Rows:
    """The rows of the run, by the steps of the column that is logged most often.

    `run` is the number of the run, from 1, where several follow each other in the file.
    """
    main = max(columns, key=lambda c: len(c.values))
    at = main.row_numbers()
    steps = rows.steps[at]
    fell = np.flatnonzero(np.diff(steps) < 0) + 1
    if len(fell) > max(10, len(steps) / 20):
        raise LogError(f"the step goes back {len(fell)} times in {len(steps)} rows: not one run")
    first, restarts = _split(at, steps, fell)
    chosen = _place([*first, len(rows.steps)], run)
    start, end = [*first, len(rows.steps)][chosen : chosen + 2]
    own = steps[(at >= start) & (at < end)]
    repeats = int((np.diff(own) == 0).sum())
    several = repeats > max(2, 0.2 * len(own))
    return Rows(rows.steps, rows.kind, start, end, tuple(restarts[chosen]), several)


def _split(at: np.ndarray, steps: np.ndarray, fell: np.ndarray):
    """The first row of each run, and its restarts.

    A log that goes back was resumed from a checkpoint; one that goes back to where a run begins,
    its first step, is another run. (A log that begins in the middle of a run is never at its
    first step: its steps are greater than one and than the distance between them.)
    """
    spacing = float(np.median(np.abs(np.diff(steps)))) if len(steps) > 1 else 1.0
    first, restarts, lowest = [0], [[]], steps[0]
    for i in fell:
        if steps[i] <= lowest and steps[i] <= max(1.0, spacing):
            first.append(int(at[i]))
            restarts.append([])
            lowest = steps[i]
        else:
            restarts[-1].append(Restart(int(at[i]), float(steps[i])))
    return first, restarts


def _place(starts: list[int], run: str | None) -> int:
    """Which of the runs that follow each other is to be read."""
    numbers = [str(n + 1) for n in range(len(starts) - 1)]
    if run is not None:
        return numbers.index(choose_run(numbers, run))
    if len(numbers) > 1:
        rows = listed([f"row {start + 1}" for start in starts[1:-1]])
        raise LogError(
            f"the file holds {len(numbers)} runs, its step goes back to the start at {rows}: "
            f"choose one with run=1 to {len(numbers)}"
        )
    return 0
