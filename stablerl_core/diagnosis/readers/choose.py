"""Which column is which signal."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from ..log import LogError
from ..signals import signal_of
from . import fuzzy, vocabulary
from .csvs import listed
from .table import Column, Table
from .text import shown
from .vocabulary import DIALECTS, Dialect, Entry

# Two of these names in a file: it uses our own names, whatever program wrote it.
_OWN_MARKS = frozenset(
    "heldout_accuracy kl_ref kl_step logp_gap mismatch_kl nonfinite zero_variance_groups "
    "solved_groups update_norm positive_share prob_gap".split()
)


@dataclass
class Choice:
    """The column that a signal is read from, what it means, and whether that was guessed."""

    entry: Entry
    column: Column
    guessed: bool


def known(column: str) -> bool:
    """Whether a column may be a signal in any format."""
    if signal_of(column) is not None or fuzzy.guess(column) is not None:
        return True
    return any(dialect.lookup(column) is not None for dialect in DIALECTS.values())


class Chooser:
    """Finds the columns of a file in the names of its framework, or guesses.

    `own`: the file uses the names of `SIGNALS`.
    """

    def __init__(self, table: Table, dialect: Dialect | None, own: bool):
        self.table = table
        self.names = list(table.columns)
        self.dialect = dialect or vocabulary.recognise(self.names)
        self.own = dialect is None and (own or len(_OWN_MARKS & set(self.names)) > 1)
        bare = {vocabulary.tidy(name).removeprefix("train/") for name in self.names}
        self._asynchronous = bool(bare & {"weight_sync_time_s", "forward_time_s", "train_seq_len"})

    def choose(self, told: Mapping[str, str], warnings: list[str]) -> dict[str, Choice]:
        """The signals of the file. `told` maps signals to columns, before all else."""
        found: dict[str, list[Choice]] = {}
        for column in self.table.stored():
            entry, guessed = self.entry(column.name)
            if entry is not None:
                found.setdefault(entry.signal, []).append(Choice(entry, column, guessed))
        chosen = {}
        for signal, options in found.items():
            options.sort(key=lambda c: (c.guessed, c.entry.rank))
            chosen[signal] = best = options[0]
            doubt = [c.column.name for c in options[1:] if _as_good(c, best)]
            if doubt:
                warnings.append(
                    f"{signal}: {shown(best.column.name)} was taken, {listed(doubt, 3)} could be it"
                )
        self._obey(told, chosen)
        return chosen

    def entry(self, column: str) -> tuple[Entry | None, bool]:
        """What a column is, and whether that was guessed."""
        if self.own or self.dialect is None:
            signal = signal_of(column)
            if signal is not None:
                return Entry(column, column, signal.meaning, 1.0, 0.0, 0), False
        if self.dialect is not None:
            entry = self._sampler_of_trl(column) or self.dialect.lookup(column)
            if entry is not None:
                return entry, False
        return fuzzy.guess(column), True

    def _sampler_of_trl(self, column: str) -> Entry | None:
        """TRL's asynchronous trainer means the sampler where the others mean the reference."""
        if self.dialect.name != "trl" or not self._asynchronous:
            return None
        return vocabulary.TRL_ASYNC_ENTRIES.get(column.removeprefix("train/"))

    def _obey(self, told: Mapping[str, str], chosen: dict[str, Choice]) -> None:
        stored = {c.name: c for c in self.table.stored()}
        for signal, name in told.items():
            if name not in stored:
                near = difflib.get_close_matches(name, self.names, 3) or self.names
                raise LogError(
                    f"map: the log has no numbers named {shown(name)}; it has {listed(near)}"
                )
            for other in [s for s, c in chosen.items() if c.column.name == name]:
                del chosen[other]
            chosen[signal] = Choice(self._told(signal, name), stored[name], False)

    def _told(self, signal: str, name: str) -> Entry:
        """The caller says which signal a column is; how it is scaled we may still know."""
        entry, _ = self.entry(name)
        meaning = f"{signal_of(signal).meaning}; as told by the caller"
        if entry is not None and entry.signal == signal:
            return Entry(name, signal, meaning, entry.factor, entry.offset, 0)
        return Entry(name, signal, meaning, 1.0, 0.0, 0)

    def nothing(self) -> LogError:
        """The error of a file without a known column."""
        if not self.names:
            return LogError("no numbers in it")
        return LogError(
            f"no known column among {listed(self.names)}: name one with map, for example "
            f"reward={shown(self.names[0], 30)}"
        )


def _as_good(other: Choice, best: Choice) -> bool:
    """Whether nothing but the order says that the best is better."""
    if best.guessed:
        return other.guessed
    return not other.guessed and other.entry.rank == best.entry.rank
