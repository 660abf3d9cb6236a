"""JSON: a row a line, a list of rows, `trainer_state.json`, a tag's steps."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator

from ..log import LogError
from .text import Lines

_DEEPEST = 4
_BLOCK = 1 << 16
_LONGEST_RECORD = 1 << 24  # characters of one object of a list
_NEXT = re.compile(r"[\s,]*")


def flat(record: dict, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Names and values of a nested object: {"train": {"loss": 1}} is "train/loss"."""
    for key, value in record.items():
        if type(value) is dict:
            if depth < _DEEPEST:
                yield from flat(value, f"{prefix}{key}/", depth + 1)
        else:
            yield prefix + key, value


def verl_data(data: dict) -> dict:
    """verl's file logger writes {"step": …, "data": {…}}, and NaN and infinity as null."""
    return {name: math.nan if value is None else value for name, value in data.items()}


def parse(text: str) -> object:
    """One JSON value; `ValueError` also for one nested too deep for the parser."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


class JsonLines:
    """The objects of a JSONL file; lines that hold none are counted in `bad`."""

    def __init__(self, lines: Lines):
        self.lines = lines
        self.bad = self.good = 0
        self.torn = False

    def __iter__(self) -> Iterator[dict]:
        for line in self.lines:
            if line.isspace():
                continue
            try:
                record = parse(line)
            except ValueError:
                record = None
            if type(record) is not dict:
                self.bad += 1
                self.torn = self.lines.torn
                continue
            self.good += 1
            self.torn = False
            yield record


class JsonList:
    """The objects of a list in a JSON document, read piece by piece.

    The list is the document, or stands under `key` as in `trainer_state.json`. A document that
    ends early gives what it has, and `torn` is true.
    """

    def __init__(self, lines: Lines, key: str | None):
        self.lines, self.key = lines, key
        self.torn = False

    def __iter__(self) -> Iterator[dict]:
        decode = json.JSONDecoder().raw_decode
        pieces = self.lines.chunks()
        text, at = self._start(pieces), 0
        while True:
            at = _NEXT.match(text, at).end()
            if text[at : at + 1] == "]":
                return
            try:
                record, at = decode(text, at)
            except RecursionError:
                raise LogError("JSON nested too deep") from None
            except ValueError:
                more = next(pieces, "")
                if not more or len(text) - at > _LONGEST_RECORD:
                    self.torn = True
                    return
                text, at = text[at:] + more, 0
                continue
            if type(record) is dict:
                yield record

    def _start(self, pieces: Iterator[str]) -> str:
        """The text after the list's bracket."""
        opening = re.compile(rf'"{self.key}"\s*:\s*\[' if self.key else r"\[")
        text = ""
        for piece in pieces:
            text = text[-_BLOCK:] + piece
            found = opening.search(text)
            if found:
                return text[found.end() :]
        return "]"


def document_rows(document: dict) -> Iterator[tuple[float, list[tuple[str, object]]]]:
    """Rows of a document that holds columns: {"loss": {"1": 0.5, …}} or {"loss": [0.5, …]}.

    The first is how NeMo-RL dumps its TensorBoard files, keyed by step, and how pandas writes a
    table, keyed by row.
    """
    rows: dict[str, list[tuple[str, object]]] = {}
    for name, column in document.items():
        pairs = column.items() if type(column) is dict else _numbered(column)
        for key, value in pairs:
            rows.setdefault(key, []).append((name, value))
    for key, items in rows.items():
        yield (float(key) if type(key) is str and _digits(key) else math.nan), items


def _numbered(column: object) -> Iterator[tuple[int, object]]:
    return iter(enumerate(column)) if type(column) is list else iter(())


def holds_columns(document: object) -> bool:
    """Whether most values of a document are columns: lists, or objects keyed by whole numbers."""
    if type(document) is not dict or not document:
        return False
    columns = [v for v in document.values() if type(v) is list and v and type(v[0]) is not dict]
    columns += [v for v in document.values() if type(v) is dict and v and all(map(_digits, v))]
    return 2 * len(columns) > len(document)


def _digits(text: str) -> bool:
    return text.isascii() and text.removeprefix("-").isdigit() and len(text) < 20
