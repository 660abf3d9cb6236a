"""The fault suite: names tell the truth, logs travel through other formats, verdicts are rows."""

import numpy as np
import pytest

from stablerl_core.diagnosis import diagnose, read_log
from stablerl_core.experiments import EXPERIMENTS
from stablerl_core.experiments.fault_suite import ARMS, NAMES, judged, write_as
from stablerl_core.runlog import RunLog


def log_with(gap: float) -> RunLog:
    noise = np.random.default_rng(0).normal(0, 0.02, 40)
    log = RunLog()
    log.append({"step": 0, "heldout_accuracy": 0.3})
    for n in range(1, 41):
        row = {"step": n, "reward": 0.3 + 0.01 * n + noise[n - 1], "entropy": 0.5, "loss": 0.0}
        row |= {"kl_ref": 0.0005 * n, "grad_norm": 0.4, "length": 12.0, "learning_rate": 5e-4}
        row |= {"logp_gap": gap * n, "mismatch_kl": gap * n / 4, "heldout_accuracy": 0.3 + n / 100}
        log.append(row)
    return log


def test_every_layer_has_faults_and_enough_runs_are_healthy():
    kinds = [arm.split("_")[0] for arm in ARMS]
    assert set(kinds) == {"healthy", "layer1", "layer2", "layer3", "layer4"}
    assert len(kinds) >= 30 and kinds.count("healthy") >= 5
    assert list(EXPERIMENTS["fault_suite"].arms) == list(ARMS)


@pytest.mark.parametrize("framework", NAMES)
def test_a_log_says_the_same_in_every_format(framework, tmp_path):
    log = log_with(0.0001)
    told = {"heldout_accuracy": "holdout", "length": "tokens_per_answer"}
    path = write_as(log, framework, tmp_path / f"log.{framework}")
    read = read_log(path, map=told if framework == "csv" else None)
    for signal in set(NAMES[framework]) & {"reward", "entropy", "grad_norm", "length"}:
        steps, values = log.series(signal)
        assert read.series(signal).steps.tolist() == steps
        assert read.series(signal).values == pytest.approx(values)
    assert diagnose(read).verdict == "healthy"


@pytest.mark.parametrize("framework", ["trl", "verl"])
def test_a_growing_gap_is_layer_4_in_every_format(framework, tmp_path):
    assert diagnose(read_log(write_as(log_with(0.005), framework, tmp_path / "log"))).layer == 4


def test_another_format_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="framework='tinker'"):
        write_as(log_with(0.0), "tinker", tmp_path / "log")


def test_one_arm_trains_and_is_judged():
    (row,) = judged("layer3_nan_applied", seed=100)
    assert row["truth"] == row["verdict"] == 3 and row["named"] == 25
