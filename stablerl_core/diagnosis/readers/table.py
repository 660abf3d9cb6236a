"""Columns of numbers as a file gives them, and the one run that they are."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..log import LogError

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


@dataclass(slots=True)
class Row:
    """A row as a reader yields it.

    step   NaN where the row names none
    items  pairs of a name and a value that may be anything: only numbers are kept
    axis   the name under which the step stood: different names may count different things
    bar    where a progress bar stood when the row was printed
    """

    step: float
    items: Iterable[tuple[str, object]]
    axis: str = ""
    bar: float = math.nan


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
        self.rows.append(row)
        self.values.append(value)

    def row_numbers(self) -> np.ndarray:
        if self.rows is None:
            return np.arange(self.first, self.first + len(self.values))
        return np.frombuffer(self.rows, dtype=np.int64)


class Table:
    """Rows as a reader yields them, held as columns.

    `wanted(name)` says whether a column can become a signal; of the others only the name is kept.
    `numbers` counts the rows that are no evaluation: the step where no row names one.
    """

    def __init__(self, wanted):
        self._wanted = wanted
        self.columns: dict[str, Column | None] = {}
        self.steps = array("d")
        self.numbers = array("d")
        self.axes: dict[str, int] = {}
        self.axis = array("b")  # of each row, a value of `axes`
        self.bars = array("d")
        self._stored = 0

    def add(self, row: Row) -> None:
        """Add a row."""
        self._add(row.items)
        self.steps.append(row.step)
        self.axis.append(self.axes.setdefault(row.axis, len(self.axes)))
        self.bars.append(row.bar)
        if len(self.steps) % 4096 == 0 and self.size() > MOST_VALUES:
            raise LogError(
                f"more than {MOST_VALUES // 10**6} million values up to row {len(self.steps)}: "
                "keep every n-th row, or only the columns of interest"
            )

    def _add(self, items: Iterable[tuple[str, object]]) -> None:
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
        self.numbers.append((self.numbers[-1] if self.numbers else 0.0) + training)

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
