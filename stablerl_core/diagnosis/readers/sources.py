"""Which kind of file it is, and its rows."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..log import LogError
from . import console, jsons, tensorboard
from .csvs import TB_NAME, delimiter_of, listed, open_csv
from .runs import STEP_NAMES
from .table import Row, number
from .text import Lines, encoding_of, head_of, shown

CONTAINERS = ("json", "jsonl", "csv", "wandb", "tensorboard", "console")
_LARGEST_DOCUMENT = 1 << 26  # bytes of a JSON document that must be read whole

LABELS = ("run", "run_id", "run_name", "experiment", "experiment_name", "trial", "seed")


@dataclass
class Source:
    """The rows of a file; `finish` adds the warnings that only its end shows."""

    kind: str
    rows: Iterator[Row]
    finish: Callable[[list[str]], None] = lambda warnings: None
    facts: dict[str, object] = field(default_factory=dict)


@dataclass
class Ask:
    """What the caller wants: a container, the column of the step, one of several runs."""

    container: str | None = None
    step: str | None = None
    run: str | None = None
    runs: dict[str, None] = field(default_factory=dict)  # labels met in the file


def open_source(path: Path, ask: Ask) -> Source:
    """The rows of a log file. Raises `LogError` for what is none."""
    head = head_of(path)
    if not head.strip():
        raise LogError("the file is empty")
    if tensorboard.is_record(head[:12]):
        return _events([path], ask)
    encoding = encoding_of(head)
    if encoding is None or ask.container == "tensorboard":
        raise LogError(_binary(head))
    text = head.decode(encoding, errors="replace")
    if sum(not (c.isprintable() or c in "\t\r\n\x1b\b") for c in text) > len(text) / 10:
        raise LogError(_binary(head))
    lines = Lines(path, encoding)
    kind = ask.container or sniff(text.lstrip("\ufeff \t\r\n"), len(head) < 1 << 18)
    return _OPENERS[kind](lines, path, ask, text)


def _binary(head: bytes) -> str:
    known = {
        b"\x1f\x8b": "is compressed (gzip): unpack it first",
        b"PK\x03\x04": "is a zip archive: unpack it first",
        b"BZh": "is compressed (bzip2): unpack it first",
        b"\x28\xb5\x2f\xfd": "is compressed (zstd): unpack it first",
        b"PAR1": "is a Parquet file: export it as CSV",
        b":W&B": "is a Weights & Biases transaction log: export its history as CSV",
        b"SQLite format 3": "is an SQLite database: export it as CSV",
    }
    told = next((text for magic, text in known.items() if head.startswith(magic)), None)
    return f"the file {told or 'holds binary data, which is no log'}"


def sniff(text: str, whole: bool) -> str:
    """The container that the beginning of a text shows."""
    first = text.split("\n", 1)[0]
    if text.startswith("{") and not text.startswith("{'"):
        if '"log_history"' in text[:100_000] or not _is_object(first):
            return "json" if re.match(r'\{\s*(?:"|\}|$)', text) else "console"
        single = whole and "\n" not in text.strip()
        return "json" if single and jsons.holds_columns(jsons.parse(first)) else "jsonl"
    if re.match(r'\[\s*(?:\{\s*["}]|\[\s*[-\d])', text):
        return "json"
    return "csv" if _is_csv(text) else "console"


def _is_object(line: str) -> bool:
    try:
        return type(jsons.parse(line)) is dict
    except ValueError:
        return False


def _is_csv(text: str) -> bool:
    """A header of names, and under it as many cells of which one is a number."""
    lines = [line for line in text.splitlines()[:50] if line.strip()][:2]
    mark = delimiter_of(lines[0]) if lines else None
    if mark is None or max(map(len, lines)) > 100_000:
        return False
    try:
        cells = list(csv.reader(lines, delimiter=mark, skipinitialspace=True))
    except csv.Error:
        return False
    header = cells[0]
    if any(len(name) > 300 or number(name) is not None for name in header):
        return False
    if len(cells) == 1:
        return all(re.fullmatch(r"[\w /.@:()%-]+", name) for name in header if name)
    row = [cell.replace(",", ".") if mark == ";" else cell for cell in cells[1]]
    return len(row) == len(header) and any(number(cell) is not None for cell in row)


# --- the row's step, and whether it is of the run asked for ----------------------------------


def _step_of(record: dict, ask: Ask) -> tuple[float, str]:
    """A record's step, taken out of it, and the name under which it stood."""
    for name in (ask.step,) if ask.step else STEP_NAMES:
        raw = record.get(name)
        if raw is None or raw == "":
            continue
        if type(raw) is str and "/" in raw:  # ms-swift: "5/100"
            raw = raw.split("/", 1)[0]
        value = number(raw)
        if value is not None and math.isfinite(value):
            del record[name]
            return value, name
    return math.nan, ""


def _wanted_run(record: dict, ask: Ask) -> bool:
    """Whether a record belongs to the run asked for, by the columns that name one.

    The Hugging Face Trainer's summary of the whole run, its last row, belongs to no step.
    """
    if "train_runtime" in record:
        return False
    for name in LABELS:
        value = record.get(name)
        if value is None or value == "" or type(value) in (dict, list, float):
            continue
        label = str(value)
        if len(ask.runs) < 1000:
            ask.runs[f"{name}={label}"] = None
        if ask.run is not None:
            return ask.run in (label, f"{name}={label}")
    return True


def _row(record: dict, ask: Ask, bar: float = math.nan) -> Row:
    step, axis = _step_of(record, ask)
    nested = dict in set(map(type, record.values()))
    return Row(step, jsons.flat(record) if nested else record.items(), axis, bar)


# --- the containers ---------------------------------------------------------------------------


def _jsonl(lines: Lines, path: Path, ask: Ask, text: str) -> Source:
    records = jsons.JsonLines(lines)

    def finish(warnings: list[str]) -> None:
        bad = records.bad - records.torn
        if bad > records.good:
            raise LogError(f"{bad} of {bad + records.good} lines are no JSON objects")
        if bad:
            warnings.append(f"{bad} lines are no JSON objects and were left out")
        _text_warnings(lines, records.torn, warnings)

    source = Source("jsonl", iter(()), finish)
    source.rows = _jsonl_rows(records, source, ask)
    return source


def _jsonl_rows(records: jsons.JsonLines, source: Source, ask: Ask) -> Iterator[Row]:
    state = console.Console()
    for record in records:
        if type(record.get("header")) is dict:  # our own log
            source.facts["header"] = record["header"]
            continue
        told = next((record[k] for k in ("message", "log") if type(record.get(k)) is str), "")
        wrapped = list(console.rows(told.splitlines(), state)) if told else []
        if wrapped:  # a line of a console log, wrapped by a logger or a container
            yield from (_labelled(row, ask) for row in wrapped)
            continue
        if record.keys() == {"step", "data"} and type(record["data"]) is dict:
            record = {"step": record["step"], **jsons.verl_data(record["data"])}
        if _wanted_run(record, ask):
            yield _row(record, ask)


def _labelled(row: Row, ask: Ask) -> Row:
    """A row of a console log; one that names no step itself may have it among its items."""
    return row if math.isfinite(row.step) else _row(dict(row.items), ask, row.bar)


def _json(lines: Lines, path: Path, ask: Ask, text: str) -> Source:
    start = text.lstrip("\ufeff \t\r\n")
    if re.match(r"\[\s*\[", start):
        return _scalar_json(lines, path)
    key = None if start.startswith("[") else _list_key(start)
    if key is None and not start.startswith("["):
        return _document(lines, path, ask)
    records = jsons.JsonList(lines, key)
    source = Source("trainer_state" if key == "log_history" else "json", iter(()))
    source.finish = lambda warnings: _text_warnings(lines, records.torn, warnings)
    source.rows = (_row(r, ask) for r in records if _wanted_run(r, ask))
    return source


def _list_key(text: str) -> str | None:
    """The key under which a document holds its list of rows."""
    if '"log_history"' in text:
        return "log_history"
    found = re.search(r'"(history|logs?|metrics|rows|data)"\s*:\s*\[\s*\{', text)
    return found[1] if found else None


def _read_document(lines: Lines, path: Path) -> object:
    if path.stat().st_size > _LARGEST_DOCUMENT:
        raise LogError("a JSON document of this form may have at most 64 MB: use JSONL")
    try:
        return jsons.parse("".join(lines.chunks()))
    except ValueError as error:
        raise LogError(f"damaged JSON: {str(error)[:80]}") from None


def _document(lines: Lines, path: Path, ask: Ask) -> Source:
    document = _read_document(lines, path)
    if not jsons.holds_columns(document):
        raise LogError("the JSON document holds no list of rows and no columns of numbers")
    source = Source("json columns", iter(()))

    def rows():
        for step, items in jsons.document_rows(document):
            row = _row(dict(items), ask)
            yield row if math.isfinite(row.step) else Row(step, row.items)

    source.rows = rows()
    return source


def _scalar_json(lines: Lines, path: Path) -> Source:
    """TensorBoard's download of one scalar: [[wall time, step, value], …]."""
    document = _read_document(lines, path)
    found = TB_NAME.match(path.stem)
    tag = found["tag"] if found else "Value"
    points = [p for p in document if type(p) is list and len(p) == 3]
    steps = [number(p[1]) for p in points]
    pairs = zip(steps, points, strict=True)
    rows = (Row(s, [(tag, p[2])], "step") for s, p in pairs if s is not None)
    return Source("tensorboard scalar", rows)


def _csv(lines: Lines, path: Path, ask: Ask, text: str) -> Source:
    opened = open_csv(lines, path, ask.run)
    chart = opened.kind == "wandb chart"
    steps = {name.lower(): name for name in opened.header if name}
    fallback = next((steps[n] for n in STEP_NAMES if n in steps), None)

    def finish(warnings: list[str]) -> None:
        if opened.ragged:
            warnings.append(f"{opened.ragged} lines have another number of cells than the header")
        _text_warnings(lines, False, warnings)

    source = Source(opened.kind, iter(()), finish)
    if opened.run:
        source.facts["run"] = opened.run

    def rows():
        for cells in opened.records():
            record = dict(cells)
            if fallback and not ask.step and fallback not in STEP_NAMES and fallback in record:
                record[fallback.lower()] = record.pop(fallback)
            if chart or _wanted_run(record, ask):
                yield _row(record, ask)

    source.rows = rows()
    return source


def _console(lines: Lines, path: Path, ask: Ask, text: str) -> Source:
    state = console.Console()

    def finish(warnings: list[str]) -> None:
        if not state.seen:
            raise LogError("no line of it looks like the log of a known framework, CSV or JSON")
        _text_warnings(lines, False, warnings)

    source = Source("console", iter(()), finish)

    def rows():
        for row in console.rows(lines, state):
            if math.isfinite(row.step) or _wanted_run(dict(row.items), ask):
                yield _labelled(row, ask)

    source.rows = rows()
    return source


def _events(paths: list[Path], ask: Ask) -> Source:
    files = [tensorboard.EventFile(path) for path in paths]

    def finish(warnings: list[str]) -> None:
        torn = [f.path.name for f in files if f.torn]
        if torn:
            warnings.append(f"damaged or unfinished at the end: {listed(torn)}")

    rows = (Row(step, items, "step") for file in files for step, items in file)
    return Source("tensorboard", rows, finish)


def _text_warnings(lines: Lines, torn: bool, warnings: list[str]) -> None:
    if lines.replaced:
        warnings.append(f"{lines.replaced} lines hold bytes that are not {lines.encoding}")
    if lines.cut:
        warnings.append(f"{lines.cut} lines are longer than 4 million characters and were cut")
    if torn:
        warnings.append("the file ends in the middle of a record, which was left out")


_OPENERS = {"jsonl": _jsonl, "json": _json, "csv": _csv, "wandb": _csv, "console": _console}


# --- folders ----------------------------------------------------------------------------------

_FILES = ("run.jsonl", "trainer_state.json", "metrics.jsonl", "logging.jsonl", "progress.csv")


def open_folder(folder: Path, ask: Ask) -> Source:
    """The log in a run's folder: one of the usual names, or its event files."""
    found = [folder / name for name in _FILES if (folder / name).is_file()]
    events = tensorboard.event_files(folder)
    if len(found) + bool(events) > 1:
        names = [p.name for p in found] + (["event files"] if events else [])
        raise LogError(f"the folder holds several logs, {listed(names)}: name the file")
    if found:
        return open_source(found[0], ask)
    if events:
        return _events(events, ask)
    inner = {
        p.name: p for p in sorted(folder.iterdir()) if p.is_dir() and tensorboard.event_files(p)
    }
    if ask.run in inner:
        source = _events(tensorboard.event_files(inner[ask.run]), ask)
        source.facts["run"] = ask.run
        return source
    if len(inner) == 1:
        return _events(tensorboard.event_files(*inner.values()), ask)
    if inner:
        raise LogError(f"the folder holds {len(inner)} runs, {listed(inner)}: choose one with run=")
    raise LogError(f"the folder {shown(folder)} holds no log that is known by its name")
