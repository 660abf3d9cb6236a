"""A diagnosis that goes along with a run: rows in, a word when the verdict changes."""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from .diagnose import diagnose
from .findings import HEALTHY, INSUFFICIENT, Diagnosis
from .log import LogError, SignalLog
from .readers import read_log

logger = logging.getLogger("stablerl")


def read_rows(rows: Iterable[Mapping[str, object]], format: str = "auto") -> SignalLog:
    """Logged rows of a framework, or of a loop of one's own, as canonical signals.

    Each row is a mapping from column to number, with its step in a column that `format` (as in
    `read_log`) calls a step. What is no number is left out. Raises `LogError` as `read_log` does.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in rows:
                numbers = {k: _number(v) for k, v in row.items()}
                file.write(json.dumps({k: v for k, v in numbers.items() if v is not None}) + "\n")
        return read_log(path, format)


def _number(value: object) -> float | None:
    try:
        return float(value)  # also a tensor or array of one element
    except (TypeError, ValueError):
        return None


class LiveDiagnosis:
    """Diagnose a run while it goes on: `add` each logged row.

    After `every` new rows, or a fiftieth of the rows so far if that is more (each diagnosis reads
    them all, so a long run would pay for its length squared), all rows are diagnosed; `diagnosis`
    is the last one. When a layer is
    named that was not named before, `tell` gets its text (by default a warning of the logger
    "stablerl"). A log that cannot be read yet, such as one without a known column, is no error.
    Raises `ValueError` for `every` below 1.
    """

    def __init__(
        self,
        every: int = 10,
        *,
        format: str = "auto",
        tell: Callable[[str], None] = logger.warning,
    ):
        if every < 1:
            raise ValueError(f"every={every}: must be ≥ 1")
        self.every, self.format, self.tell = every, format, tell
        self.rows: list[dict[str, object]] = []
        self.diagnosis: Diagnosis | None = None
        self._told = {HEALTHY, INSUFFICIENT}
        self._due = every

    def add(self, row: Mapping[str, object]) -> Diagnosis | None:
        """Take one row in; returns a new diagnosis when one was due and possible."""
        self.rows.append(dict(row))
        if len(self.rows) < self._due:
            return None
        self._due = len(self.rows) + max(self.every, len(self.rows) // 50)
        try:
            found = diagnose(read_rows(self.rows, self.format))
        except LogError:
            return None
        self.diagnosis = found
        if found.verdict not in self._told:
            self._told.add(found.verdict)
            self.tell(found.to_text())
        return found
