"""CSV: a row a step, Weights & Biases' two exports, one scalar of TensorBoard."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..log import LogError
from .table import number
from .text import Lines, shown

TB_NAME = re.compile(r"^(?:run-(?P<run>.+?)-)?tag-(?P<tag>.+)$")


_LONG = ({"tag", "value"}, {"metric", "value"}, {"key", "value"}, {"name", "value"})


@dataclass
class CsvTable:
    """Header and rows. `kind`: "csv", "wandb chart", "wandb history" or "tensorboard scalar"."""

    kind: str
    header: list[str]
    rows: Iterator[list[str]]
    run: str | None = None
    ragged: int = 0
    decimal_comma: bool = False

    def records(self) -> Iterator[list[tuple[str, object]]]:
        """The cells of each row with the names of their columns; empty cells are left out."""
        width = len(self.header)
        for row in self.rows:
            if len(row) != width:
                if not any(cell.strip() for cell in row):
                    continue
                self.ragged += 1
                if len(row) > width:
                    continue
            if self.decimal_comma:
                row = [cell.replace(",", ".") for cell in row]
            cells = [(n, c) for n, c in zip(self.header, row, strict=False) if c and n]
            yield self._unfolded(cells) if self.kind == "csv long" else cells

    def _unfolded(self, cells: list[tuple[str, object]]) -> list[tuple[str, object]]:
        """A row of a long table, one number with its name in another column: as if it were wide."""
        by_name = {name.lower(): cell for name, cell in cells}
        label = next((by_name[n] for n in ("tag", "metric", "key", "name") if n in by_name), "")
        rest = [
            (n, c) for n, c in cells if n.lower() not in ("value", "tag", "metric", "key", "name")
        ]
        return [*rest, (label, by_name["value"])] if label and "value" in by_name else rest


def delimiter_of(line: str) -> str | None:
    """The separator of a header line; None where it holds none."""
    counts = {mark: line.count(mark) for mark in (",", "\t", ";")}
    best = max(counts, key=counts.get)
    return best if counts[best] else None


def open_csv(lines: Lines, path: Path, run: str | None) -> CsvTable:
    """Read the header of a CSV file and tell its kind."""
    feed = (line for line in lines if not line.isspace())
    first = next(feed, "")
    delimiter = delimiter_of(first) or ","
    rows = _rows(first, feed, delimiter)
    header = [cell.strip() for cell in next(rows, [])]
    if not any(header) or all(number(cell) is not None for cell in header if cell):
        raise LogError("the first line of the CSV is no header: it names no columns")
    comma = delimiter == ";"
    if any(name.endswith("__MIN") for name in header):
        return _chart(header, rows, run, comma)
    if [name.lower() for name in header] == ["wall time", "step", "value"]:
        return _scalar(header, rows, path)
    kind = "wandb history" if {"_step", "_runtime"} <= set(header) else "csv"
    lower = {name.lower() for name in header}
    if len(header) <= 6 and any(pair <= lower for pair in _LONG):
        kind = "csv long"
    return CsvTable(kind, _unique(header), rows, decimal_comma=comma)


def _rows(first: str, feed: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    def text():
        yield first
        yield from feed

    reader = csv.reader(text(), delimiter=delimiter, skipinitialspace=True)
    try:
        yield from reader
    except csv.Error as error:
        raise LogError(f"CSV, line {reader.line_num}: {error}") from None


def _unique(header: list[str]) -> list[str]:
    """A name that comes twice is used once: the second column cannot be told from the first."""
    twice = sorted({n for n in header if n and header.count(n) > 1})
    if twice:
        raise LogError(f"the CSV has two columns named {shown(twice[0])}")
    return header


def _chart(header: list[str], rows, run: str | None, comma: bool) -> CsvTable:
    """A chart export: "Step", then "RUN - METRIC" with its __MIN and __MAX."""
    split = [name.rsplit(" - ", 1) if " - " in name else ["", name] for name in header]
    extremes = [name.endswith(("__MIN", "__MAX")) for name in header]
    runs = list(dict.fromkeys(s[0] for s, e in zip(split, extremes, strict=True) if s[0] and not e))
    chosen = choose_run(runs, run)
    names = [
        "" if extreme or s[0] not in ("", chosen) else s[1]
        for s, extreme in zip(split, extremes, strict=True)
    ]
    return CsvTable("wandb chart", _unique(names), rows, chosen, decimal_comma=comma)


def _scalar(header: list[str], rows, path: Path) -> CsvTable:
    """TensorBoard's download of one scalar, whose name is in the file's: run-R-tag-T.csv."""
    found = TB_NAME.match(path.stem)
    tag = found["tag"] if found else "Value"
    return CsvTable("tensorboard scalar", ["", "step", tag], rows, found["run"] if found else None)


def choose_run(runs: list[str], run: str | None) -> str | None:
    """The run to read: the one asked for, or the only one. Several are never mixed."""
    if run is not None:
        if run in runs:
            return run
        raise LogError(f"run={shown(run)} is not in the file; it has {listed(runs)}")
    if len(runs) > 1:
        raise LogError(f"the file holds {len(runs)} runs, {listed(runs)}: choose one with run=")
    return runs[0] if runs else None


def listed(names, most: int = 5) -> str:
    """Names for a message: the first few, and how many more."""
    names = list(names)
    text = ", ".join(shown(n, 40) for n in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text or "none"
