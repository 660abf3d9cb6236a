"""Columns of numbers as a file gives them, and the one run that they are."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np

from ..log import LogError, Series

MOST_VALUES = 50_000_000  # 400 MB: more is refused, not swallowed
MOST_COLUMNS = 1_000
MOST_NAMES = 20_000  # a file that has a new name in every row is no log


def number(value) -> float | None:
    """A logged value as a float; None where nothing, or no number, was logged.

    "NaN" and "Infinity" are values (trackers write them as text), "" and null are not.
    """
    kind = type(value)
    if kind is float:
        return value
    if kind is int:
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    if kind is str and 0 < len(value) < 40 and "_" not in value:
        try:
            return float(value)
        except ValueError:
            return None
    return None


class Column:
    """The values of one column and the rows they stand in; rows are only kept where some lack."""

    __slots__ = ("name", "first", "rows", "values")

    def __init__(self, name: str, row: int):
        self.name = name
        self.first = row
        self.rows: array | None = None
        self.values = array("d")

    def add(self, row: int, value: float) -> None:
        """Add a value that does not stand in the row after the last."""
        if self.rows is None:
            self.rows = array("q", range(self.first, self.first + len(self.values)))
        if self.rows and self.rows[-1] == row:  # named twice in one row: the last counts
            self.values[-1] = value
            return
        self.rows.append(row)
        self.values.append(value)

    def row_numbers(self) -> np.ndarray:
        if self.rows is None:
            return np.arange(self.first, self.first + len(self.values))
        return np.frombuffer(self.rows, dtype=np.int64)


class Table:
    """Rows as a reader yields them: a step (NaN where the row names none) and named numbers.

    `wanted(name)` says whether a column can become a signal; of the others only the name is kept.
    `numbers` counts the rows that are no evaluation: the step where no row names one.
    """

    def __init__(self, wanted):
        self._wanted = wanted
        self.columns: dict[str, Column | None] = {}
        self.steps = array("d")
        self.numbers = array("d")
        self.axes = array("b")  # 1: the step counts rollouts, not updates
        self.bars = array("d")
        self._stored = 0

    def add(self, step: float, items, axis: int = 0, bar: float = math.nan) -> None:
        """Add a row; `items` are pairs of a name and a value that may be anything."""
        row, columns = len(self.steps), self.columns
        training = False
        for name, raw in items:
            column = columns.get(name, 0)
            if column is None:
                continue
            value = raw if type(raw) is float else number(raw)
            if value is None:
                continue
            if column == 0:
                column = self._new(name, row)
                if column is None:
                    continue
            values = column.values
            if column.rows is None and row == column.first + len(values):
                values.append(value)  # every row has had one: the common case, kept short
            else:
                column.add(row, value)
            if not training:
                training = not name.startswith("eval")
        self._count(step, training, axis, bar)

    def _count(self, step: float, training: bool, axis: int, bar: float) -> None:
        last = self.numbers[-1] if self.numbers else 0.0
        self.numbers.append(last + training)
        self.steps.append(step)
        self.axes.append(axis)
        self.bars.append(bar)
        if len(self.steps) % 4096 == 0 and self.size() > MOST_VALUES:
            raise LogError(
                f"more than {MOST_VALUES // 10**6} million values up to row {len(self.steps)}: "
                "keep every n-th row, or only the columns of interest"
            )

    def size(self) -> int:
        return sum(len(c.values) for c in self.columns.values() if c is not None)

    def _new(self, name: str, row: int) -> Column | None:
        if len(self.columns) >= MOST_NAMES:
            raise LogError(f"more than {MOST_NAMES} different column names: no table of signals")
        wanted = self._stored < MOST_COLUMNS and self._wanted(name)
        self._stored += wanted
        self.columns[name] = Column(name, row) if wanted else None
        return self.columns[name]

    def stored(self) -> list[Column]:
        return [c for c in self.columns.values() if c is not None]


def fill_steps(steps: np.ndarray) -> tuple[np.ndarray, int]:
    """Steps of all rows, and how many had none: those take the row before's (the first: after's).

    At least one row must have a step.
    """
    known = np.isfinite(steps)
    where = np.maximum.accumulate(np.where(known, np.arange(len(steps)), -1))
    where[where < 0] = int(np.argmax(known))
    return steps[where], int(len(steps) - known.sum())


@dataclass(frozen=True)
class Restart:
    """The log goes back: from `row` on, the run continues at `step`."""

    row: int
    step: float


def backs(rows: np.ndarray, steps: np.ndarray) -> list[Restart]:
    """Where the steps of a column fall."""
    where = np.flatnonzero(np.diff(steps) < 0) + 1
    return [Restart(int(rows[i]), float(steps[i])) for i in where]


def split_runs(rows: np.ndarray, steps: np.ndarray) -> list[tuple[int, list[Restart]]]:
    """The runs in a file: the first row of each, and its restarts.

    A log that goes back to a step after its first was resumed from a checkpoint; one that goes
    back to its first step, or before it, is another run.
    """
    runs: list[tuple[int, list[Restart]]] = [(0, [])]
    first = float(steps[0])
    for back in backs(rows, steps):
        if back.step <= first:
            runs.append((back.row, []))
            first = back.step
        else:
            runs[-1][1].append(back)
    return runs


def alive(rows: np.ndarray, steps: np.ndarray, restarts: list[Restart]) -> np.ndarray:
    """Which values belong to the run as it went on: those after a checkpoint were abandoned."""
    keep = np.ones(len(rows), bool)
    for restart in restarts:
        keep &= (rows >= restart.row) | (steps < restart.step)
    return keep


def distinct(steps: np.ndarray, values: np.ndarray, mean: bool) -> tuple[Series, int]:
    """Strictly increasing steps; of several values of one step the last, or their mean.

    Also returns how many values that merged away.
    """
    if len(steps) and not (np.diff(steps) > 0).all():
        order = np.argsort(steps, kind="stable")
        steps, values = steps[order], values[order]
    starts = np.flatnonzero(np.diff(steps, prepend=-np.inf) > 0)
    if len(starts) == len(steps):
        return Series(steps, values), 0
    ends = np.append(starts[1:], len(steps))
    kept = np.add.reduceat(values, starts) / (ends - starts) if mean else values[ends - 1]
    return Series(steps[starts], kept), len(steps) - len(starts)
