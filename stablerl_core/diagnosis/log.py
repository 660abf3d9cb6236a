"""Somebody's run log as series of canonical signals, with what each column was taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from ..runlog import RunLog
from .signals import SIGNALS, signal_of


class LogError(ValueError):
    """A file that cannot be read as a run log; its text is one line that says why."""


@dataclass(frozen=True, eq=False)
class Series:
    """One signal: the steps at which it was logged, strictly increasing, and its values there.

    A logged NaN or infinity is a value like any other; a step at which nothing was logged is not
    in `steps`. Unpacks like `RunLog.series`: `steps, values = log.series("reward")`.
    """

    steps: np.ndarray  # (N,) float64
    values: np.ndarray  # (N,) float64

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[np.ndarray]:
        return iter((self.steps, self.values))

    def finite(self) -> Series:
        """The same without the steps whose value is NaN or infinite."""
        keep = np.isfinite(self.values)
        return Series(self.steps[keep], self.values[keep])


EMPTY = Series(np.empty(0), np.empty(0))


@dataclass(frozen=True)
class MappedColumn:
    """What one column of the file was taken for.

    `meaning` says which of several possible numbers it is (KL to the reference or of the step,
    log-probability or probability, before or after masking). `fuzzy`: its name is not one that
    the format is known to write, it was guessed from the words in it. The value here is the file's
    times `factor` plus `offset`: factor −1 where minus entropy was logged, 0.01 for per cent,
    −1 and 1 where the kept share was logged and the masked one is meant.
    """

    column: str
    signal: str
    meaning: str
    fuzzy: bool = False
    factor: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, eq=False)
class SignalLog:
    """A run log of any origin, as `read_log` returns it and `diagnose` takes it.

    signals    canonical name → `Series`; the names and what they mean are in `signals.SIGNALS`,
               and `reward_part:NAME`, `heldout:NAME` for what a run names itself
    format     the format it was read as, for example "trl", "verl", "csv"
    mapping    what each used column was taken for
    unmapped   columns with numbers that were not used
    warnings   one sentence each: what was repaired, dropped or doubtful in this file
    notes      one sentence each: what no file of this format can show (TRL drops NaN metrics …)
    step_kind  what `steps` counts: "optimizer step", "rollout step", "row" (no step was logged) …
    restarts   steps from which the run was resumed: the log went back to them, the last value
               of each step was kept
    facts      what else the file says: the header of our own log, the name of the run
    """

    signals: Mapping[str, Series]
    format: str
    mapping: tuple[MappedColumn, ...] = ()
    unmapped: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step_kind: str = "optimizer step"
    restarts: tuple[float, ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def steps(self) -> np.ndarray:
        """Every step at which anything was logged, increasing."""
        series = [s.steps for s in self.signals.values()]
        return np.unique(np.concatenate(series)) if series else np.empty(0)

    def __len__(self) -> int:
        return len(self.steps)

    def __contains__(self, signal: str) -> bool:
        return signal in self.signals

    def series(self, signal: str) -> Series:
        """Steps and values of a signal, empty where it was never logged."""
        if signal_of(signal) is None:
            raise ValueError(f"signal={signal!r} is unknown; see stablerl_core.diagnosis.SIGNALS")
        return self.signals.get(signal, EMPTY)

    def family(self, name: str) -> dict[str, Series]:
        """The members of a family: {"format": …} for name="reward_part"."""
        prefix = f"{name}:"
        found = {s: v for s, v in self.signals.items() if s.startswith(prefix)}
        return {s.removeprefix(prefix): v for s, v in found.items()}

    def column(self, signal: str) -> MappedColumn | None:
        """The column of the file that a signal was read from."""
        return next((m for m in self.mapping if m.signal == signal), None)

    def last(self, signal: str, n: int = 1) -> float:
        """Mean of the last `n` logged values of a signal; NaN when it was never logged."""
        values = self.series(signal).values[-n:]
        return float(values.mean()) if len(values) else math.nan


def signal_log(log: RunLog | SignalLog) -> SignalLog:
    """Our own `RunLog` as a `SignalLog`; one that already is passes through."""
    if isinstance(log, SignalLog):
        return log
    logged = {name for row in log for name in row} - {"step"}
    names = [name for name in SIGNALS if name in logged] + sorted(logged - SIGNALS.keys())
    signals = {}
    for name in names:
        steps, values = log.series(name)
        signals[name] = Series(np.asarray(steps, float), np.asarray(values, float))
    mapping = tuple(MappedColumn(n, n, signal_of(n).meaning) for n in names)
    return SignalLog(signals, "stablerl", mapping, facts=dict(log.header))
