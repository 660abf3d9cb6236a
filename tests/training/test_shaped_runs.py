"""Shaping in a run: off it changes nothing, on it is logged part by part, cut rows can leave."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import step_gradients, tiny_config

from stablerl_core.diagnosis import diagnose
from stablerl_core.diagnosis.log import signal_log
from stablerl_core.training import DataConfig, RunLog, Trainer, TrainerConfig

SHAPING = {"overlong": {"weight": 0.5, "buffer": 4}, "format": {"pattern": "#[^#]+"}}


def run(config):
    return Trainer(config).run(progress=False)


def rows(log):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in log]


def test_components_of_weight_zero_log_themselves_and_change_nothing():
    silent = {"length": {"weight": 0.0}}
    plain, told = run(tiny_config(steps=3)), run(tiny_config(steps=3, data__shaping=silent))
    parts = [{k for k in row if ":" in k} for row in told]
    assert parts == [set()] + [{"reward_part:answer", "reward_part:length"}] * 3
    assert rows(plain) == [{k: v for k, v in row.items() if ":" not in k} for row in rows(told)]


def test_the_reward_is_the_weighted_sum_of_the_parts():
    log = run(tiny_config(steps=2, data__shaping=SHAPING))
    for row in log.rows[1:]:
        part = {k.partition(":")[2]: v for k, v in row.items() if ":" in k}
        total = part["answer"] + 0.5 * part["overlong"] + part["format"]
        assert row["reward"] == pytest.approx(total, abs=1e-6)
    assert log.series("reward_part:format")[0] == [1, 2]
    with pytest.raises(ValueError, match="unknown"):
        log.series("reward_parts:format")


def test_a_shaped_run_is_written_read_and_diagnosed(tmp_path):
    config = tiny_config(data__shaping=SHAPING, data__mask_truncated=True, out=str(tmp_path))
    log = run(config)
    assert rows(RunLog.read(tmp_path / "run.jsonl")) == rows(log)
    assert TrainerConfig.from_json(config.to_json()) == config
    assert set(signal_log(log).family("reward_part")) == {"answer", "overlong", "format"}
    assert diagnose(log).verdict
    again = Trainer.resume(tmp_path)
    assert rows(again.run(progress=False)) == rows(log)


def test_cut_completions_leave_the_loss_and_stay_in_the_group(monkeypatch):
    """Rewards that single out the cut rows: masked, they pull on nothing."""

    def pays_cut(texts, problems, truncated):
        return [float(cut) for cut in truncated]

    config = tiny_config(steps=1)
    kept = Trainer(config, reward=pays_cut)
    masked = Trainer(replace(config, data=replace(config.data, mask_truncated=True)),
                     reward=pays_cut)
    gradients = [step_gradients(trainer, monkeypatch) for trainer in (kept, masked)]
    same = ("reward", "length", "truncated", "zero_variance_groups")
    assert all(kept.log.rows[-1][k] == masked.log.rows[-1][k] for k in same)
    assert 0 < kept.log.rows[-1]["truncated"] < 1
    assert any(not torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert masked.log.rows[-1]["positive_share"] == 0  # all that was paid was cut


def test_a_wrong_component_is_an_error_before_the_run():
    with pytest.raises(ValueError, match="shaping has 'lenght'"):
        DataConfig(shaping={"lenght": {}})
    with pytest.raises(ValueError, match="buffer=40: expected 1 … max_length=24"):
        DataConfig(shaping={"overlong": {"buffer": 40}})


def test_a_step_in_which_every_completion_was_cut_updates_nothing():
    config = tiny_config(steps=1, data__max_new_tokens=4, data__mask_truncated=True)
    trainer = Trainer(config, reward=lambda texts, problems, cut: range(len(texts)))
    before = [p.clone() for p in trainer.model.parameters()]
    row = trainer.step()
    assert row["truncated"] == 1 and row["zero_variance_groups"] == 0
    assert row["grad_norm"] == 0 and row["nonfinite"] == 0
    assert all(map(torch.equal, before, trainer.model.parameters()))
