"""Rows in, a word when the verdict changes; and the same as a callback of the trainer."""

import math

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainerState

from stablerl_core.diagnosis import LiveDiagnosis, LogError, read_rows
from stablerl_core.integrations.trl import DiagnosisCallback


def rows(n=40, gap=lambda t: 0.012):
    noise = np.random.default_rng(0).normal(0, 0.02, n)
    for t in range(n):
        yield {
            "reward": 0.3 + 0.4 * t / n + noise[t],
            "entropy": torch.tensor(0.5 - 0.2 * t / n),
            "grad_norm": np.float32(0.4 + noise[t]),
            "kl": 0.02 * t / n,
            "sampling/sampling_logp_difference/mean": gap(t),
            "learning_rate": 1e-6,
            "note": "text",
        }


def test_rows_become_the_signals_of_their_framework():
    log = read_rows(({"step": t + 1} | row for t, row in enumerate(rows(5))), "trl")
    assert {"reward", "entropy", "kl_ref", "grad_norm", "logp_gap"} <= set(log.signals)
    assert log.series("entropy").values[0] == pytest.approx(0.5)
    assert log.steps.tolist() == [1, 2, 3, 4, 5]


def test_our_own_names_are_ours_when_the_caller_says_so():
    rows = [{"step": t, "reward_part:format": 0.5, "learning_rate": 1e-6} for t in (1, 2, 3)]
    assert "reward_part:format" in read_rows(rows, "stablerl").signals


def test_nan_stays_nan_and_no_column_is_an_error():
    log = read_rows([{"step": t, "loss": math.nan, "reward": 0.5} for t in range(1, 4)], "trl")
    assert np.isnan(log.series("loss").values).all()
    with pytest.raises(LogError):
        read_rows([{"step": 1, "tree": 2}])


def test_a_verdict_is_told_once_when_it_is_new():
    told = []
    live = LiveDiagnosis(10, format="trl", tell=told.append)
    answers = [live.add({"step": t} | row) for t, row in enumerate(rows(60), 1)]
    assert [t for t, a in enumerate(answers, 1) if a] == [10, 20, 30, 40, 50, 60]
    assert not told and live.diagnosis.verdict == "healthy"
    growing = LiveDiagnosis(10, format="trl", tell=told.append)
    for t, row in enumerate(rows(60, lambda t: 0.012 if t < 15 else 0.01 * (t - 10)), 1):
        growing.add({"step": t} | row)
    assert growing.diagnosis.layer == 4 and len(told) == 1 and "layer 4" in told[0]


def test_a_log_that_cannot_be_read_yet_is_no_error():
    live = LiveDiagnosis(1)
    assert live.add({"step": 1, "tree": 3.0}) is None and live.diagnosis is None
    with pytest.raises(ValueError, match="every=0"):
        LiveDiagnosis(0)


def test_the_callback_sees_what_a_trainer_logs(caplog):
    callback, state = DiagnosisCallback(every=5), TrainerState(is_world_process_zero=True)
    for t, row in enumerate(rows(30, lambda t: 1.3), 1):
        state.global_step = t
        callback.on_log(None, state, TrainerControl(), logs=row)
    assert callback.diagnosis.layer == 4
    assert sum("layer 4" in record.message for record in caplog.records) == 1
    other = DiagnosisCallback(every=1)
    other.on_log(
        None, TrainerState(is_world_process_zero=False), TrainerControl(), logs={"loss": 1}
    )
    assert not other.live.rows and other.diagnosis is None
