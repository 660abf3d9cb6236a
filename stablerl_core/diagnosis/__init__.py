"""Reads a run log, ours or anybody's, and names the layer that broke. Imports no torch."""

from .log import LogError, MappedColumn, Series, SignalLog, signal_log
from .signals import FAMILIES, SIGNALS, signal_of

__all__ = [
    "FAMILIES",
    "SIGNALS",
    "LogError",
    "MappedColumn",
    "Series",
    "SignalLog",
    "signal_log",
    "signal_of",
]
