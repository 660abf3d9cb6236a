"""What `stablerl diagnose` and `stablerl explain` print."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .diagnose import diagnose
from .readers import DIALECTS, columns_of, read_log
from .signals import FAMILIES, SIGNALS, signal_of


def diagnose_file(options) -> int:
    """Read `options.file`, print the diagnosis, return its exit code.

    Raises `ValueError` or `OSError` where the file cannot be read as a log.
    """
    mapping = column_map(options.map)

    def told() -> int:
        answer = diagnose(read_log(options.file, options.format, mapping, options.run))
        print(answer.to_json() if options.json else answer.to_text(), flush=True)
        if options.html:
            Path(options.html).write_text(answer.to_html(), encoding="utf-8")
        return answer.exit_code

    return watch(options.file, told) if options.watch else told()


def column_map(given: Sequence[str]) -> dict[str, str] | None:
    """`["reward=my/score"]` as {signal: column}. Raises `ValueError` for any other form."""
    out = {}
    for item in given:
        signal, equals, column = item.partition("=")
        if not equals or not column or signal_of(signal) is None:
            raise ValueError(
                f"--map {item!r}: expected SIGNAL=COLUMN with a signal of `stablerl explain`"
            )
        out[signal] = column
    return out or None


def watch(path: str, told: Callable[[], int], *, seconds: float = 5.0, turns: int = -1) -> int:
    """Call `told` now and whenever the file has changed, until interrupted or after `turns`.

    A file that is half written when it is read is told in one line and read again later.
    """
    seen, code = None, 3
    while turns:
        now = Path(path).stat()
        if (now.st_size, now.st_mtime_ns) != seen:
            seen = (now.st_size, now.st_mtime_ns)
            try:
                code = told()
            except ValueError as error:
                print(f"stablerl diagnose: {error}", file=sys.stderr)
        turns -= 1
        if turns:
            try:
                time.sleep(seconds)
            except KeyboardInterrupt:
                break
    return code


def explain(name: str | None) -> str:
    """What a signal means, its layer and unit, and its names in the frameworks; without a name all.

    A name that a framework writes is explained as the signal that it is. Raises `ValueError` for
    a name that neither we nor any framework knows.
    """
    if name is None:
        width = max(map(len, SIGNALS))
        return "\n".join(
            f"{s:{width}}  {_layer(SIGNALS[s].layer)}  {SIGNALS[s].meaning}" for s in SIGNALS
        )
    if signal_of(name) is not None or name in FAMILIES:
        return _one(name)
    found = {d.name: e for d in DIALECTS.values() if (e := d.lookup(name)) is not None}
    if not found:
        raise ValueError(
            f"{name!r} is neither a signal nor a column of a known framework; "
            "`stablerl explain` lists the signals"
        )
    lines = [
        f"{framework} writes {name!r} for {entry.signal}"
        + (f" ({entry.meaning})" if entry.meaning else "")
        for framework, entry in found.items()
    ]
    signals = sorted({entry.signal for entry in found.values()})
    return "\n".join(lines + [""] + [_one(signal) for signal in signals])


def _layer(layer: int) -> str:
    return f"layer {layer}" if layer else "-      "


def _one(name: str) -> str:
    signal = signal_of(name) or FAMILIES[name]
    lines = [f"{name}  ({_layer(signal.layer).strip()}, {signal.unit})"]
    lines += textwrap.wrap(signal.meaning, 96, initial_indent="  ", subsequent_indent="  ")
    for framework in DIALECTS:
        columns = columns_of(framework, name)
        if columns:
            lines.append(f"  {framework:10}  {', '.join(columns)}")
    return "\n".join(lines)
