"""From a table of columns to the signals of one run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..log import EMPTY, LogError, MappedColumn, Series, SignalLog
from ..signals import SIGNALS, signal_of
from . import fuzzy, vocabulary
from .csvs import choose_run, listed
from .sources import Ask, Source
from .table import Column, Table, alive, distinct, fill_steps, split_runs
from .text import shown
from .vocabulary import DIALECTS, Dialect, Entry

_OWN_MARKS = {"heldout_accuracy", "kl_ref", "kl_step", "logp_gap", "mismatch_kl", "nonfinite"} | {
    "zero_variance_groups",
    "solved_groups",
    "update_norm",
    "positive_share",
    "prob_gap",
}
_LAYER_1 = ("reward", "heldout_accuracy")


def known(column: str) -> bool:
    """Whether a column may be a signal in any format."""
    if signal_of(column) is not None or fuzzy.guess(column) is not None:
        return True
    return any(dialect.lookup(column) is not None for dialect in DIALECTS.values())


@dataclass
class Clean:
    """A column as a series, with what had to be done to it."""

    column: Column
    series: Series
    merged: int = 0


class Assembly:
    """One file on its way to a `SignalLog`."""

    def __init__(self, source: Source, table: Table, dialect: Dialect | None, ask: Ask):
        self.source, self.table, self.ask = source, table, ask
        self.warnings: list[str] = []
        self.names = [name for name in table.columns]
        self.dialect = dialect or vocabulary.recognise(self.names)
        own = source.facts.get("header") is not None or len(_OWN_MARKS & set(self.names)) > 1
        self.own = own and dialect is None
        self.step_kind = source.step_kind

    def log(self, names: Mapping[str, str]) -> SignalLog:
        """The finished log; `names` maps signals to columns by order of the caller."""
        with np.errstate(invalid="ignore", over="ignore"):  # inf − inf is NaN, as it should be
            return self._log(names)

    def _log(self, names: Mapping[str, str]) -> SignalLog:
        self.source.finish(self.warnings)
        self._one_label()
        chosen = self._choose(names)
        if not chosen:
            raise LogError(self._nothing())
        rows, restarts = self._run([column for _, column, _ in chosen.values()])
        clean = {
            signal: self._series(entry, column, rows, restarts)
            for signal, (entry, column, _) in chosen.items()
        }
        clean = {signal: c for signal, c in clean.items() if len(c.series)}
        if not clean:
            raise LogError(self._nothing())
        self._report(clean, restarts)
        return self._build(chosen, clean, restarts)

    # --- which column is which signal ---

    def entry(self, column: str) -> tuple[Entry | None, bool]:
        """What a column is, and whether that was guessed."""
        if self.own or self.dialect is None:
            known_signal = signal_of(column)
            if known_signal is not None:
                return Entry(column, column, known_signal.meaning, 1.0, 0.0, 0), False
        if self.dialect is not None:
            entry = self._asynchronous(column) or self.dialect.lookup(column)
            if entry is not None:
                return entry, False
        return fuzzy.guess(column), True

    def _asynchronous(self, column: str) -> Entry | None:
        """TRL's asynchronous trainer means the sampler where the others mean the reference."""
        if self.dialect.name != "trl":
            return None
        bare = {name.removeprefix("train/") for name in self.names}
        if not bare & {"ratio", "weight_sync_time_s"}:
            return None
        return vocabulary.TRL_ASYNC_ENTRIES.get(column.removeprefix("train/"))

    def _choose(self, names: Mapping[str, str]) -> dict[str, tuple[Entry, Column, bool]]:
        found: dict[str, list[tuple[tuple, Entry, Column, bool]]] = {}
        for order, column in enumerate(self.table.stored()):
            entry, guessed = self.entry(column.name)
            if entry is not None:
                key = (guessed, entry.rank, order)
                found.setdefault(entry.signal, []).append((key, entry, column, guessed))
        chosen = {}
        for signal, options in found.items():
            options.sort(key=lambda option: option[0])
            (key, entry, column, guessed), others = options[0], options[1:]
            chosen[signal] = (entry, column, guessed)
            same = [o[2].name for o in others if o[0][:2] == key[:2] or guessed and o[3]]
            if same:
                self.warnings.append(
                    f"{signal}: {shown(column.name)} was taken, not {listed(same, 3)}, which could "
                    "be it as well"
                )
        self._by_order(names, chosen)
        return chosen

    def _by_order(self, names: Mapping[str, str], chosen: dict) -> None:
        """The caller's own mapping goes before every other."""
        stored = {c.name: c for c in self.table.stored()}
        for signal, name in names.items():
            if name not in stored:
                near = difflib.get_close_matches(name, self.names, 3) or self.names
                raise LogError(
                    f"map: the log has no numbers named {shown(name)}; it has {listed(near)}"
                )
            for other in [s for s, (_, c, _) in chosen.items() if c.name == name]:
                del chosen[other]
            entry, _ = self.entry(name)
            meaning = signal_of(signal).meaning
            factor, offset = (
                (entry.factor, entry.offset) if entry and entry.signal == signal else (1.0, 0.0)
            )
            entry = Entry(name, signal, f"{meaning}; as told by the caller", factor, offset, 0)
            chosen[signal] = (entry, stored[name], False)

    def _nothing(self) -> str:
        if not self.names:
            return "no numbers in it"
        return (
            f"no known column among {listed(self.names)}: name one with map, for example "
            f"reward={shown(self.names[0], 30)}"
        )

    # --- which rows are the run ---

    def _one_label(self) -> None:
        """A column that names runs must name one, or the one asked for."""
        by_name: dict[str, list[str]] = {}
        for label in self.ask.runs:
            by_name.setdefault(label.split("=", 1)[0], []).append(label)
        if self.ask.run is None:
            for labels in by_name.values():
                choose_run(labels, None)
        elif by_name and not self._labelled():
            choose_run(list(self.ask.runs), self.ask.run)

    def _labelled(self) -> bool:
        """Whether the run asked for was picked by its name, not by its place in the file."""
        labels = {part for label in self.ask.runs for part in (label, label.split("=", 1)[1])}
        return self.ask.run in labels or self.source.facts.get("run") == self.ask.run

    def _steps(self) -> np.ndarray:
        steps = np.array(self.table.steps)
        if not np.isfinite(steps).any():
            return self._without_steps()
        if self.dialect is not None and self.dialect.name == "slime":
            steps = self._slime_steps(steps)
        steps, filled = fill_steps(steps)
        if filled:
            self.warnings.append(
                f"{filled} rows name no step and were given that of the row before"
            )
        return steps

    def _without_steps(self) -> np.ndarray:
        """No row names a step: where a progress bar stood, or else the number of the row."""
        bars, numbers = np.array(self.table.bars), np.array(self.table.numbers)
        last = np.flatnonzero(np.diff(numbers, append=np.inf) > 0)
        if len(last) > 1 and np.isfinite(bars).all() and (np.diff(bars[last]) > 0).all():
            self.step_kind = "step of the progress bar"
            return bars
        self.step_kind = "row"
        self.warnings.append("no step is logged: rows are counted from 1")
        return np.maximum(numbers, 1.0)

    def _slime_steps(self, steps: np.ndarray) -> np.ndarray:
        """slime counts rollouts and updates apart: bring the rollouts to the updates' count."""
        axes = np.array(self.table.axes)
        before = np.flatnonzero((axes[:-1] == 1) & (axes[1:] == 0) & (steps[:-1] > 0))
        if not len(before):
            return steps
        each = np.median(steps[before + 1] / steps[before])
        if each > 1.5:
            self.warnings.append(
                f"rollout n is shown at update {each:.0f}·n: there are that many each"
            )
            steps = np.where(axes == 1, steps * round(each), steps)
        return steps

    def _run(self, columns: list[Column]):
        """Steps of the rows, the range of rows of the one run, and where it was resumed."""
        steps = self._steps()
        main = max(columns, key=lambda c: len(c.values))
        rows = main.row_numbers()
        runs = split_runs(rows, steps[rows])
        jumps = sum(len(r[1]) for r in runs) + len(runs) - 1
        if jumps > max(10, len(rows) / 10):
            raise LogError(
                f"the step goes back {jumps} times in {len(rows)} rows: not one run's steps"
            )
        starts = [start for start, _ in runs] + [len(steps)]
        at = self._place(starts)
        self._mean = self._several_values_a_step(steps, rows, starts[at], starts[at + 1])
        return (steps, starts[at], starts[at + 1]), runs[at][1]

    def _place(self, starts: list[int]) -> int:
        """Which of the runs that follow each other in the file is to be read."""
        asked = None if self._labelled() else self.ask.run
        numbers = [str(n + 1) for n in range(len(starts) - 1)]
        if asked is None and len(numbers) > 1:
            rows = listed([f"row {start + 1}" for start in starts[1:-1]])
            raise LogError(
                f"the file holds {len(numbers)} runs, its step goes back to the start at {rows}: "
                f"choose one with run=1 to {len(numbers)}"
            )
        return 0 if asked is None else numbers.index(choose_run(numbers, asked))

    def _several_values_a_step(self, steps, rows, start, end) -> bool:
        """Whether most steps are logged several times: then their mean is taken, not the last."""
        own = steps[rows[(rows >= start) & (rows < end)]]
        repeats = float((np.diff(own) == 0).mean()) if len(own) > 1 else 0.0
        return repeats > 0.2

    def _series(self, entry: Entry, column: Column, rows, restarts) -> Clean:
        steps, start, end = rows
        where, values = column.row_numbers(), np.frombuffer(column.values)
        if start > 0 or end < len(steps):
            inside = (where >= start) & (where < end)
            where, values = where[inside], values[inside]
        own = steps[where]
        if restarts:
            keep = alive(where, own, restarts)
            own, values = own[keep], values[keep]
        series, merged = distinct(own, values, self._mean)
        if self._mean and merged and entry.signal in _LAYER_1:
            self._refuse_a_mixture(entry, own, values, series)
        if entry.factor != 1.0 or entry.offset:
            series = Series(series.steps, series.values * entry.factor + entry.offset)
        return Clean(column, series, merged)

    def _refuse_a_mixture(self, entry: Entry, steps, values, mean: Series) -> None:
        """Several rewards a step that differ are several runs or ranks: no mean of those."""
        spread = np.abs(values - mean.values[np.searchsorted(mean.steps, steps)])
        scale = np.nanmax(np.abs(values)) if np.isfinite(values).any() else 0.0
        apart = np.unique(steps[spread > 1e-9 * max(scale, 1e-30)])
        if len(apart) > 0.2 * len(mean):
            raise LogError(
                f"{shown(entry.column)} has several different values at {len(apart)} of "
                f"{len(mean)} steps: several runs or ranks in one file; keep one of them"
            )

    # --- the answer ---

    def _report(self, clean: dict[str, Clean], restarts) -> None:
        if restarts:
            at = listed([f"{r.step:g}" for r in restarts]).replace("'", "")
            self.warnings.append(
                f"the run was resumed at step {at}; what came after it was dropped"
            )
        merged = max(c.merged for c in clean.values())
        if merged:
            how = "their mean" if self._mean else "the last value"
            self.warnings.append(f"up to {merged} values repeat a step: {how} was kept")
        if len({float(s) for c in clean.values() for s in c.series.steps[:2]}) == 1:
            self.warnings.append("only one step is logged")

    def _build(self, chosen, clean, restarts) -> SignalLog:
        signals, mapping, unmapped = {}, [], []
        for signal in clean:
            entry, column, guessed = chosen[signal]
            series, entry = self._checked(clean[signal].series, entry)
            if series is None:
                continue
            signals[signal] = series
            mapping.append(
                MappedColumn(
                    column.name, signal, entry.meaning, guessed, entry.factor, entry.offset
                )
            )
        if not any(signal_of(s).layer for s in signals):
            raise LogError(self._nothing())
        self._which_spread(signals, mapping)
        self._one_evaluation(signals, mapping)
        used = {m.column for m in mapping}
        unmapped = [name for name in self.names if name not in used]
        order = {name: n for n, name in enumerate(SIGNALS)}
        mapping.sort(key=lambda m: (order.get(m.signal, len(order)), m.signal))
        return SignalLog(
            signals={m.signal: signals[m.signal] for m in mapping},
            format=self._format(),
            mapping=tuple(mapping),
            unmapped=tuple(unmapped),
            warnings=tuple(self.warnings),
            notes=self.dialect.notes if self.dialect and not self.own else (),
            step_kind=self.step_kind,
            restarts=tuple(r.step for r in restarts),
            facts=self._facts(),
        )

    def _format(self) -> str:
        if self.own:
            return "stablerl"
        return self.dialect.name if self.dialect else self.source.kind

    def _facts(self) -> dict[str, object]:
        if self.own:
            return dict(self.source.facts.get("header") or {})
        facts = {k: v for k, v in self.source.facts.items() if k not in ("console", "header")}
        if self.ask.run is not None:
            facts["run"] = self.ask.run
        return {"container": self.source.kind, **facts}

    def _checked(self, series: Series, entry: Entry):
        """Is a share a share, and entropy not minus entropy? Repaired, or not used, with a word."""
        finite = series.finite().values
        if not len(finite) or self.own:
            return series, entry
        low, high = float(finite.min()), float(finite.max())
        if entry.signal == "entropy" and low < 0:
            return self._signed(series, entry, high)
        if signal_of(entry.signal).unit == "share" and high > 1.0 + 1e-6:
            return self._as_share(series, entry, low, high)
        return series, entry

    def _signed(self, series: Series, entry: Entry, high: float):
        if high > 0:
            self.warnings.append(f"{shown(entry.column)} has both signs, entropy has not: not used")
            return None, entry
        self.warnings.append(f"{shown(entry.column)} is negative: taken for minus the entropy")
        text = f"{entry.meaning}; minus entropy is logged"
        flipped = replace(entry, factor=-entry.factor, meaning=text)
        return Series(series.steps, -series.values), flipped

    def _as_share(self, series: Series, entry: Entry, low: float, high: float):
        told = set(fuzzy.words(entry.column).split()) & {"percent", "accuracy"}
        if told and low >= 0 and 1.5 < high <= 100.0:
            self.warnings.append(f"{shown(entry.column)} is up to {high:g}: taken for per cent")
            text = f"{entry.meaning}; logged in per cent"
            scaled = replace(entry, factor=0.01 * entry.factor, meaning=text)
            return Series(series.steps, 0.01 * series.values), scaled
        if entry.signal == "heldout_accuracy":
            return series, replace(entry, meaning=f"{entry.meaning}; a score, not a share")
        if entry.signal in ("weight_ess", "weight_ess_capped", "explained_variance"):
            return series, entry
        self.warnings.append(
            f"{shown(entry.column)} is up to {high:g}, which is no share: not used"
        )
        return None, entry

    def _which_spread(self, signals: dict, mapping: list) -> None:
        """TRL's reward_std: above 0 where every group is tied, it is the spread of the batch."""
        std, tied = signals.get("reward_std", EMPTY), signals.get("zero_variance_groups", EMPTY)
        both = np.intersect1d(std.steps, tied.steps[tied.values >= 1.0])
        if not len(both) or not (std.values[np.isin(std.steps, both)] > 1e-4).any():
            return
        signals["reward_spread"] = signals.pop("reward_std")
        text = signal_of("reward_spread").meaning
        mapping[:] = [
            replace(m, signal="reward_spread", meaning=text) if m.signal == "reward_std" else m
            for m in mapping
        ]

    def _one_evaluation(self, signals: dict, mapping: list) -> None:
        """`heldout_accuracy` is the evaluation with most points, an accuracy before a score."""
        scores = [m for m in mapping if m.signal.startswith("heldout:")]
        if "heldout_accuracy" in signals or not scores:
            return

        def worth(m: MappedColumn):
            return "acc" not in m.signal.lower(), -len(signals[m.signal])

        best = min(scores, key=worth)
        if len(scores) > 1:
            self.warnings.append(
                f"of {len(scores)} evaluations heldout_accuracy is {shown(best.column)}"
            )
        signals["heldout_accuracy"] = signals[best.signal]
        mapping.append(replace(best, signal="heldout_accuracy"))
