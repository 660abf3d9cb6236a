"""The data model of a diagnosis: series of canonical signals, missing and NaN told apart."""

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from stablerl_core import runlog
from stablerl_core.diagnosis import FAMILIES, SIGNALS, Series, SignalLog, signal_log, signal_of
from stablerl_core.diagnosis.signals import FOREIGN

ROOT = Path(__file__).resolve().parents[2]


def test_it_starts_without_torch_or_a_plot_library():
    code = (
        "import sys, stablerl_core.diagnosis\n"
        "print(sorted({'torch','transformers','matplotlib','pandas','tensorboard',"
        "'tensorboardX','scipy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_signals_of_other_logs_do_not_rename_ours():
    assert not set(FOREIGN) & set(runlog.SIGNALS)
    assert set(SIGNALS) == set(FOREIGN) | set(runlog.SIGNALS)
    assert all(s.layer in (0, 1, 2, 3, 4) and s.unit and s.meaning for s in SIGNALS.values())
    assert not any(":" in name for name in [*SIGNALS, *FAMILIES])


def test_members_of_a_family_are_signals():
    assert signal_of("reward_part:format") is FAMILIES["reward_part"]
    assert signal_of("heldout:aime:24").layer == 1
    assert signal_of("reward_part:") is None and signal_of("reward_part") is None
    assert signal_of("grad_norm:x") is None and signal_of("speed") is None


def test_our_own_log_becomes_series():
    own = runlog.RunLog(header={"config": {"seed": 1}})
    own.append({"step": 0, "heldout_accuracy": 0.5})
    own.append({"step": 1, "loss": math.nan, "grad_norm": math.inf})
    own.append({"step": 2, "loss": 0.5, "grad_norm": 1.0, "heldout_accuracy": 0.75})
    log = signal_log(own)
    assert signal_log(log) is log and log.format == "stablerl" and len(log) == 3
    assert log.facts == {"config": {"seed": 1}}
    steps, values = log.series("loss")
    assert steps.tolist() == [1, 2] and math.isnan(values[0]) and values[1] == 0.5
    assert log.series("loss").finite().steps.tolist() == [2]
    assert log.series("heldout_accuracy").steps.tolist() == [0, 2]
    assert log.last("heldout_accuracy", 2) == 0.625 and math.isnan(log.last("reward"))
    assert "reward" not in log and len(log.series("reward")) == 0
    assert log.column("loss").column == "loss" and log.column("reward") is None
    with pytest.raises(ValueError, match="'speed' is unknown"):
        log.series("speed")


def test_families_are_found_by_name():
    one = Series(np.array([1.0]), np.array([0.5]))
    log = SignalLog({"reward_part:format": one, "reward": one, "reward_part_std:x": one}, "csv")
    assert list(log.family("reward_part")) == ["format"]
