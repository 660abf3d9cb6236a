"""Reads a run log, ours or anybody's, and names the layer that broke. Imports no torch."""

from .diagnose import diagnose
from .findings import Diagnosis, Finding
from .live import LiveDiagnosis, read_rows
from .log import LogError, MappedColumn, Series, SignalLog, signal_log
from .readers import FORMATS, columns_of, read_log
from .signals import FAMILIES, SIGNALS, signal_of

__all__ = [
    "FAMILIES",
    "FORMATS",
    "SIGNALS",
    "Diagnosis",
    "Finding",
    "LiveDiagnosis",
    "LogError",
    "MappedColumn",
    "Series",
    "SignalLog",
    "columns_of",
    "read_log",
    "read_rows",
    "diagnose",
    "signal_log",
    "signal_of",
]
