"""Layer 2 in the loop: every objective, penalties, bonuses, bounds searched on a whole update."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tiny import step_gradients, tiny_config

from stablerl_core.policy import (
    OBJECTIVES,
    AdaptiveKL,
    Linear,
    Piecewise,
    balance_bounds,
    entropy,
    exact_kl,
)
from stablerl_core.training import Trainer, TrainerConfig
from stablerl_core.training import loss as loss_module
from stablerl_core.training import trainer as trainer_module
from stablerl_core.training.rollout import completion_logits, completion_logp

TWO = {"policy__minibatches": 2, "numerics__warmup": 0, "probe_every": 9}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_gives_the_same_gradient_however_the_batch_is_split(objective, monkeypatch):
    options = dict(TWO, policy__objective=objective, numerics__learning_rate=2e-3)
    whole = step_gradients(Trainer(tiny_config(**options)), monkeypatch)
    split = step_gradients(Trainer(tiny_config(numerics__micro_batch=2, **options)), monkeypatch)
    assert len(whole) == 2
    assert whole[0].norm() > 1e-3 and (whole[0] - split[0]).norm() < 1e-5 * whole[0].norm()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_defaults_are_those_of_the_source(objective, monkeypatch):
    seen = {}
    plain = loss_module.policy_objective

    def spy(name, *args, **options):
        seen[name] = options
        return plain(name, *args, **options)

    monkeypatch.setattr(loss_module, "policy_objective", spy)
    trainer = Trainer(tiny_config(policy__objective=objective))
    scales = []
    advantages = trainer_module.group_advantages
    monkeypatch.setattr(
        trainer_module,
        "group_advantages",
        lambda *a, **k: scales.append(k.get("scale")) or advantages(*a, **k),
    )
    trainer.step()
    assert scales[-1] == OBJECTIVES[objective].scale
    given = seen[objective]
    assert given["aggregation"] == OBJECTIVES[objective].aggregation
    if objective != "bapo":
        assert given["clip_low"] is None and given["clip_high"] is None
    assert (given["sampler_logp"] is not None) == (objective == "minirl")


def test_bapo_searches_its_bounds_on_the_rows_of_the_update(monkeypatch):
    asked = []

    def spy(logp, *args, **options):
        asked.append((len(logp), options))
        return balance_bounds(logp, *args, **options)

    monkeypatch.setattr(loss_module, "balance_bounds", spy)
    options = {"order": "code", "statistic": "gradient", "target": 0.99, "dual_clip": 3.0}
    trainer = Trainer(
        tiny_config(
            policy__objective="bapo",
            policy__options=options,
            policy__minibatches=2,
            numerics__micro_batch=2,
        )
    )
    row = trainer.step()
    assert len(asked) == 2 and all(2 < rows <= 12 for rows, _ in asked)
    assert asked[0][1]["target"] == 0.99 and "dual_clip" not in asked[0][1]
    assert asked[0][1]["sampler_logp"] is not None
    assert row["clip_low"] == pytest.approx(0.1, abs=0.02)  # the target is out of reach
    assert row["clip_high"] == pytest.approx(2.0, abs=0.05)


def test_positive_share_is_that_of_the_scores_of_the_sampled_tokens():
    """On-policy, sequence means: every completion pulls with |Â|, whatever its length."""
    trainer = Trainer(tiny_config(probe_every=9))
    collected = []
    plain = trainer._collect
    trainer._collect = lambda n: collected.append(plain(n)) or collected[-1]
    row = trainer.step()
    advantages = collected[0][2]
    share = advantages.clamp(min=0).sum() / advantages.abs().sum()
    assert row["positive_share"] == pytest.approx(float(share), rel=1e-5)


def test_kl_in_the_reward_changes_what_is_compared_and_not_what_is_logged(monkeypatch):
    options = dict(policy__kl_estimator="k1", policy__kl_coef=0.5, numerics__warmup=0)
    trainer = Trainer(tiny_config(policy__kl_in="reward", policy__scale="none", **options))
    trainer.step()  # away from the reference, so that there is a penalty
    judged, collected = [], []
    judge, collect = trainer._judge, trainer._collect
    monkeypatch.setattr(trainer, "_judge", lambda *a: judged.append(judge(*a)) or judged[-1])
    monkeypatch.setattr(
        trainer, "_collect", lambda n: collected.append(collect(n)) or collected[-1]
    )
    reference = trainer.reference
    row = trainer.step()
    batch, _, advantages = collected[0]
    with torch.no_grad():
        log_ratio = batch.sampler_logp - completion_logp(reference, batch)
    penalised = judged[0] - 0.5 * torch.where(batch.mask, log_ratio, 0.0).sum(1)
    groups = penalised.view(4, 6)
    expected = (groups - groups.mean(1, keepdim=True)).flatten()
    assert row["reward"] == pytest.approx(float(judged[0].mean()))
    assert torch.allclose(advantages, expected, atol=1e-6)
    assert (advantages - (judged[0] - judged[0].view(4, 6).mean(1).repeat_interleave(6))).any()


def test_an_entropy_bonus_is_the_gradient_of_the_entropy(monkeypatch):
    """The difference to a run without it is coef · ∇ of the aggregated exact entropy."""
    with_bonus = Trainer(tiny_config(probe_every=9, policy__entropy_coef=0.3))
    without = Trainer(tiny_config(probe_every=9))
    collected = []
    plain = with_bonus._collect
    monkeypatch.setattr(
        with_bonus, "_collect", lambda n: collected.append(plain(n)) or collected[-1]
    )
    model = Trainer(tiny_config(probe_every=9)).model
    a = step_gradients(with_bonus, monkeypatch)[0]
    b = step_gradients(without, monkeypatch)[0]
    batch = collected[0][0]
    each = torch.where(batch.mask, entropy(completion_logits(model, batch)), 0.0)
    (each.sum(1) / batch.mask.sum(1)).mean().mul(-0.3).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert expected.norm() > 1e-3 and (a - b - expected).norm() < 1e-4 * expected.norm()


def test_clip_cov_takes_the_gradient_from_the_share_it_was_given():
    options = dict(TWO, policy__covariance_share=1.0)
    plain = Trainer(tiny_config(**TWO)).step()
    clipped = Trainer(tiny_config(policy__covariance="clip_cov", **options)).step()
    assert clipped["grad_norm"] != plain["grad_norm"]
    trainer = Trainer(tiny_config(policy__covariance="clip_cov", **options))
    batch, _, advantages = trainer._collect(1)
    loss = loss_module.UpdateLoss(
        trainer.config.policy, trainer.config.system, trainer.reference, 24, None, advantages, {}
    )
    generator = torch.Generator().manual_seed(0)
    loss_module.decide_together(loss, trainer.model, batch, torch.arange(24), generator)
    changed = loss.advantages != advantages[:, None]
    assert (loss.advantages[changed & batch.mask] == 0).all() and (changed & batch.mask).any()


def test_kl_cov_pulls_back_only_after_the_policy_moved():
    options = dict(TWO, policy__covariance_share=0.5, numerics__learning_rate=2e-3)
    plain = Trainer(tiny_config(**options))
    pulled = Trainer(tiny_config(policy__covariance="kl_cov", **options))
    a, b = plain.step(), pulled.step()
    assert a["loss"] != b["loss"]  # of the second update
    one = dict(options, policy__minibatches=1)
    a = Trainer(tiny_config(**one)).step()
    b = Trainer(tiny_config(policy__covariance="kl_cov", **one)).step()
    assert a["grad_norm"] == b["grad_norm"]


def test_a_refreshed_reference_is_the_policy_of_that_step(tmp_path):
    config = tiny_config(
        steps=4, policy__reference_every=2, policy__kl_coef=0.1, out=str(tmp_path / "run")
    )
    trainer = Trainer(config)
    trainer.step()
    assert any(
        (a != b).any()
        for a, b in zip(trainer.reference.parameters(), trainer.model.parameters(), strict=True)
    )
    trainer.step()
    batch, _, _ = trainer._collect(9)
    with torch.no_grad():
        now, anchor = (completion_logits(m, batch) for m in (trainer.model, trainer.reference))
    assert float(exact_kl(now, anchor).abs().max()) < 1e-6
    trainer.step()
    resumed = Trainer.resume(tmp_path / "run")  # from the checkpoint of step 2
    assert resumed.version == 2
    for a, b in zip(resumed.reference.parameters(), trainer.reference.parameters(), strict=True):
        assert torch.equal(a, b)


def test_schedules_set_what_the_step_uses_and_are_logged():
    config = tiny_config(
        steps=4,
        probe_every=1,
        policy__kl_coef=0.5,
        schedules={
            "policy.kl_coef": Linear(0.4, 0.1, 4),
            "data.group_size": Piecewise(((1, 6), (3, 3))),
            "data.prompts": Piecewise(((1, 4), (3, 8))),
            "policy.clip_high": Linear(0.2, 0.3, 4),
        },
    )
    trainer = Trainer(config)
    rows = trainer.run(progress=False).rows[1:]
    assert [row["kl_coef"] for row in rows] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [row["group_size"] for row in rows] == [6, 6, 3, 3]
    assert [row["prompts"] * row["group_size"] for row in rows] == [24] * 4
    assert [row["clip_high"] for row in rows] == pytest.approx([0.2, 0.2333, 0.2667, 0.3], abs=1e-3)
    assert trainer.config == config


def test_a_schedule_that_reads_the_log_survives_a_resume(tmp_path):
    def config(name):
        return tiny_config(
            steps=6,
            probe_every=1,
            policy__kl_coef=0.1,
            schedules={"policy.kl_coef": AdaptiveKL(start=0.1, target=1e-3)},
            out=str(tmp_path / name),
        )

    whole = Trainer(config("a")).run(progress=False)
    part = Trainer(config("b"))
    part.run(5, progress=False)
    resumed = Trainer.resume(tmp_path / "b")
    resumed.run(progress=False)
    assert resumed.version == 6
    values = [row["kl_coef"] for row in whole.rows[1:]]
    assert len(set(values)) > 2
    assert values == [row["kl_coef"] for row in resumed.log.rows[1:]]
    losses = [[row["loss"] for row in log.rows[1:]] for log in (whole, resumed.log)]
    assert losses[0] == losses[1]


def test_config_with_schedules_survives_json():
    config = tiny_config(
        schedules={
            "policy.kl_coef": AdaptiveKL(start=0.1, target=0.01),
            "data.group_size": Piecewise(((1, 6), (3, 3))),
        },
        policy__options={"dual_clip": 3.0},
        policy__clip_high=math.inf,
    )
    assert TrainerConfig.from_json(config.to_json()) == config
    old = json.loads(config.to_json())
    del old["schedules"], old["policy"]["kl_in"], old["policy"]["options"]  # an earlier version's
    assert TrainerConfig.from_json(json.dumps(old)).schedules == {}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"schedules": {"policy.epochs": Linear(1, 2, 3)}}, "schedules has 'policy.epochs'"),
        ({"policy__kl_in": "both"}, "policy.kl_in='both'"),
        ({"policy__covariance": "cov"}, "policy.covariance='cov'"),
        ({"policy__baseline": "median"}, "policy.baseline='median'"),
        ({"policy__reference_every": -1}, "policy.reference_every=-1"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**change)
