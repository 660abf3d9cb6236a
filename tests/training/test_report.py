"""The table of the four layers that a run prints."""

import math

from stablerl_core.runlog import RunLog
from stablerl_core.training.report import signal_table


def table(rows, **options):
    log = RunLog()
    for row in rows:
        log.append(row)
    return signal_table(log, **options).splitlines()


def test_first_and_last_values_stand_under_their_layer():
    rows = [{"step": 0, "heldout_accuracy": 0.25}] + [
        {"step": n, "reward": n / 10, "loss": 1e-8, "logp_gap": 2e-7} for n in range(1, 5)
    ]
    lines = table(rows, window=2)
    assert lines[0].split() == ["first", "last", "unit"]
    assert [line for line in lines if line.startswith("Layer")] == [
        "Layer 1: data and rewards",
        "Layer 2: policy change",
        "Layer 3: numerical updates",
        "Layer 4: training system",
    ]
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:] if line.startswith("  ")}
    assert cells["reward"][:2] == ["0.1", "0.35"]  # the mean of the last two
    assert cells["heldout_accuracy"][:2] == ["0.25", "0.25"]
    assert cells["loss"][:2] == ["1e-08", "1e-08"]
    assert set(cells) == {"reward", "heldout_accuracy", "loss", "logp_gap"}
    order = [line.split()[0] for line in lines]
    assert order.index("reward") < order.index("loss") < order.index("logp_gap")


def test_faults_are_shown_as_they_are():
    cells = {
        line.split()[0]: line.split()[1:3]
        for line in table([{"step": 1, "loss": math.nan, "grad_norm": math.inf}])
    }
    assert cells["loss"] == ["nan", "nan"] and cells["grad_norm"] == ["inf", "inf"]


def test_an_empty_log_has_only_headings():
    assert len(table([])) == 5
