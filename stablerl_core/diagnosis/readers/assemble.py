"""From a table of columns to the signals of one run."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..log import LogError, MappedColumn, Series, SignalLog
from ..signals import SIGNALS, signal_of
from .check import checked, one_evaluation, refuse_a_mixture, which_spread
from .choose import Choice, Chooser
from .csvs import choose_run, listed
from .runs import Rows, distinct, one_run, steps_of
from .sources import Ask, Source
from .table import Table
from .text import shown
from .vocabulary import Dialect

_ONE_A_STEP = ("reward", "heldout_accuracy")  # of these there is one value a step in one run


def assemble(
    source: Source,
    table: Table,
    dialect: Dialect | None,
    ask: Ask,
    told: Mapping[str, str],
    *,
    own: bool = False,
) -> SignalLog:
    """The log of the run in a table that was read. `told` maps signals to columns.

    `own`: the caller says that the names are those of `SIGNALS`.
    """
    warnings: list[str] = []
    source.finish(warnings)
    numbered = _number_of_the_run(source, ask)
    chooser = Chooser(table, dialect, own=own or "header" in source.facts)
    chosen = chooser.choose(told, warnings)
    if not chosen:
        raise chooser.nothing()
    if ask.step and ask.step not in table.axes:
        raise LogError(f"map: the log has no steps in a column named {shown(ask.step)}")
    slime = chooser.dialect is not None and chooser.dialect.name == "slime"
    rows = steps_of(table, slime, warnings)
    rows = one_run(rows, [choice.column for choice in chosen.values()], numbered)
    with np.errstate(invalid="ignore", over="ignore"):  # inf − inf is NaN, as it should be
        signals, mapping = _signals(chosen, rows, chooser.own, warnings)
    if not any(signal_of(name).layer for name in signals):
        raise chooser.nothing()
    _tell(signals, rows, warnings)
    return _log(source, ask, chooser, rows, signals, mapping, warnings)


def _number_of_the_run(source: Source, ask: Ask) -> str | None:
    """The run asked for, if by its place in the file: None where it was found by its name.

    A column that names runs must name one, or the one asked for.
    """
    by_name: dict[str, list[str]] = {}
    for label in ask.runs:
        by_name.setdefault(label.split("=", 1)[0], []).append(label)
    if ask.run is None:
        for labels in by_name.values():
            choose_run(labels, None)
        return None
    known = {part for label in ask.runs for part in (label, label.split("=", 1)[1])}
    if ask.run in known or source.facts.get("run") == ask.run:
        return None
    if by_name:
        choose_run(list(ask.runs), ask.run)
    return ask.run


def _signals(
    chosen: dict[str, Choice], rows: Rows, own: bool, warnings: list[str]
) -> tuple[dict[str, Series], list[MappedColumn]]:
    signals: dict[str, Series] = {}
    mapping: list[MappedColumn] = []
    repeated = 0
    for signal, choice in chosen.items():
        entry = choice.entry
        steps, values = rows.values(choice.column)
        series = distinct(steps, values, rows.several)
        if not len(series):
            continue
        repeated = max(repeated, len(steps) - len(series))
        if rows.several and signal in _ONE_A_STEP:
            refuse_a_mixture(entry, steps, values, series)
        if entry.factor != 1.0 or entry.offset:
            series = Series(series.steps, series.values * entry.factor + entry.offset)
        right = (series, entry) if own else checked(series, entry, warnings)
        if right is not None:
            signals[signal], entry = right
            guessed, scale = choice.guessed, (entry.factor, entry.offset)
            mapping.append(MappedColumn(entry.column, signal, entry.meaning, guessed, *scale))
    if repeated:
        how = "their mean" if rows.several else "the last value"
        warnings.append(f"up to {repeated} values repeat a step: {how} was kept")
    which_spread(signals, mapping)
    one_evaluation(signals, mapping, warnings)
    return signals, mapping


def _tell(signals: Mapping[str, Series], rows: Rows, warnings: list[str]) -> None:
    if rows.restarts:
        steps = listed([f"{r.step:g}" for r in rows.restarts]).replace("'", "")
        warnings.append(f"the run was resumed at step {steps}; what was abandoned is left out")
    if len({float(step) for s in signals.values() for step in s.steps[:2]}) == 1:
        warnings.append("only one step is logged")


def _log(source, ask, chooser: Chooser, rows: Rows, signals, mapping, warnings) -> SignalLog:
    order = {name: n for n, name in enumerate(SIGNALS)}
    mapping.sort(key=lambda m: (order.get(m.signal, len(order)), m.signal))
    used = {m.column for m in mapping}
    dialect = None if chooser.own else chooser.dialect
    facts = {"container": source.kind} | ({"run": ask.run} if ask.run else {}) | source.facts
    return SignalLog(
        signals={m.signal: signals[m.signal] for m in mapping},
        format="stablerl" if chooser.own else dialect.name if dialect else source.kind,
        mapping=tuple(mapping),
        unmapped=tuple(name for name in chooser.names if name not in used),
        warnings=tuple(warnings),
        notes=dialect.notes if dialect else (),
        step_kind=rows.kind,
        restarts=tuple(r.step for r in rows.restarts),
        facts=dict(source.facts.get("header") or {}) if chooser.own else facts,
    )
