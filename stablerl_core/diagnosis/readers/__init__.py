"""`read_log`: anybody's run log as canonical signals."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from ..log import LogError, SignalLog
from ..signals import signal_of
from .assemble import assemble
from .choose import known
from .sources import CONTAINERS, Ask, open_folder, open_source
from .table import Table
from .text import shown
from .vocabulary import ALIASES, DIALECTS, columns_of

FORMATS = ("auto", "stablerl", *DIALECTS, *ALIASES, *CONTAINERS)

__all__ = ["FORMATS", "columns_of", "read_log"]


def read_log(
    path: str | os.PathLike,
    format: str = "auto",
    map: Mapping[str, str] | None = None,
    run: str | None = None,
) -> SignalLog:
    """Read the log of a training run, whoever wrote it, as canonical signals.

    `path`: a file, or the folder of a run (event files, `trainer_state.json`, `metrics.jsonl` …).
    `format`: "auto"; a framework ("trl", "unsloth", "ms-swift", "verl", "slime", "openrlhf",
    "prime-rl", "nemo-rl", "skyrl", "areal", "roll", "tinker", "sb3", "stablerl"), whose names are
    then used; or a kind of file ("json", "jsonl", "csv", "wandb", "tensorboard", "console").
    `map`: {"reward": "my_column"} overrides what a column is taken for; the key is a signal of
    `SIGNALS` or "step". `run`: which run, where the file holds several.

    Memory: 8 bytes a value of a column that can be a signal, at most 50 million values.
    Raises `LogError` (a `ValueError` of one line) for a file that is empty, binary, damaged, no
    log, or several runs, and for a column or signal that is not there.
    """
    where = Path(path)
    try:
        return _read(where, format, dict(map or {}), run)
    except LogError as error:
        name = shown(where, 200)[1:-1] if str(where).isprintable() else shown(where, 200)
        raise LogError(f"{name}: {' '.join(str(error).split())}") from None


def _read(path: Path, format: str, names: dict[str, str], run: str | None) -> SignalLog:
    if format not in FORMATS:
        raise LogError(f"format={shown(format)} is unknown; known: {', '.join(FORMATS)}")
    for signal in set(names) - {"step"}:
        if signal_of(signal) is None:
            raise LogError(
                f"map: {shown(signal)} is no signal; see stablerl_core.diagnosis.SIGNALS"
            )
    ask = Ask(format if format in CONTAINERS else None, names.pop("step", None), run)
    source = open_folder(path, ask) if path.is_dir() else open_source(path, ask)
    told = set(names.values())
    table = Table(lambda name: name in told or known(name))
    for row in source.rows:
        table.add(row)
    dialect = DIALECTS.get(ALIASES.get(format, format))
    return assemble(source, table, dialect, ask, names, own=format == "stablerl")
