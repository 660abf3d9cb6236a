"""Chapter 45: what the arms change, what each rule leaves of a gradient, and how data gets old."""

import copy
from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments import off_policy
from stablerl_core.experiments.off_policy import (
    ALL_MISTAKES,
    OPSM,
    STALENESS,
    Reweighted,
    Scored,
    gradient,
    gradient_by_age,
    rule_weights,
    scored,
    stale,
)
from stablerl_core.training import Rollout, Sampling, Trainer


def small(updates: int = 1, **system):
    (config,) = stale(1, updates=updates, **system)
    data = replace(config.data, prompts=8, eval_prompts=1)
    return replace(config, data=data, probe_every=100)


@pytest.fixture(scope="module")
def aged():
    """A trainer after six steps, and the policy with which it began."""
    trainer = Trainer(small())
    begun = copy.deepcopy(trainer.model)
    trainer.run(6, progress=False)
    return trainer, begun


def test_arms_differ_from_the_stale_run_in_what_their_name_says():
    (base,) = STALENESS.arms["trainer_16"]
    for experiment in (STALENESS, OPSM):
        for name, (config,) in experiment.arms.items():
            assert replace(config, system=base.system, policy=base.policy) == base or (
                "slow" in name and config.numerics.learning_rate < base.numerics.learning_rate
            )
    system = {name: arm[0].system for name, arm in (STALENESS.arms | OPSM.arms).items()}
    for name in ("trainer_4", "sampler_4", "tis_4", "0.1_4", "pos_4"):
        assert system[name].sync_every == 4
    assert system["sampler_0.1"] == replace(base.system, old_logp="sampler",
                                            off_policy_threshold=0.1)  # fmt: skip
    assert system["pos_16"] == replace(base.system, off_policy_threshold=ALL_MISTAKES)
    assert STALENESS.arms["once_1"][0].policy.minibatches == 1


def by_hand(logp, drawn, advantages, mask) -> Scored:
    batch = Rollout(*[None] * 2, tokens=None, mask=mask, sampler_logp=drawn, entropy=None,
                    finished=None, version=0, sampling=Sampling())  # fmt: skip
    return Scored(batch, advantages, logp)


def test_what_each_rule_leaves_of_four_answers():
    """Two tokens each: far and wrong, near and wrong, far and right, and grown more likely."""
    step = torch.tensor([[-0.3, -0.3], [-0.02, -0.02], [-0.3, -0.3], [0.2, 0.2]])
    mask = torch.tensor([[True, True], [True, True], [True, True], [True, False]])
    drawn = torch.full((4, 2), -1.0)
    found = by_hand(drawn + step, drawn, torch.tensor([-1.0, -1.0, 1.0, -1.0]), mask)
    assert found.distance.tolist() == pytest.approx([0.3, 0.02, 0.3, -0.2])
    weights = rule_weights(found)
    kept = {name: (w[:, 0] != 0).tolist() for name, w in weights.items()}
    assert kept["none"] == kept["0.5"] == kept["decay"] == kept["token"] == [True] * 4
    assert kept["0.0001"] == kept["0.01"] == [False, False, True, True]
    assert kept["0.1"] == [False, True, True, True]
    assert kept["all mistakes"] == [False, False, True, False]
    assert kept["threshold"] == [True, False, True, False], "what Eq. 9 drops, it keeps"
    assert all((w[3, 1] == 0) for w in weights.values()), "padding"
    assert weights["token"][0].tolist() == pytest.approx([0.7408, 0.7408], abs=1e-4)
    assert weights["sequence"][0].tolist() == pytest.approx([0.5488, 0.5488], abs=1e-4)
    assert weights["decay"][0].tolist() == pytest.approx([1, 0.9048], abs=1e-4)


def test_on_fresh_data_every_rule_is_none_but_the_two_that_are_not(aged):
    trainer, _ = aged
    fresh = scored(trainer, trainer.model, 16, 50)
    weights = rule_weights(fresh)
    for name in ("0.0001", "0.01", "0.1", "0.5"):
        assert torch.equal(weights[name], weights["none"])
    for name in ("token", "sequence"):
        assert weights[name] == pytest.approx(weights["none"], abs=1e-4)
    assert not weights["threshold"].any(), "a weight of 1 is not below 0.95"


def test_the_gradient_is_that_of_the_trainer_and_adds_up(aged):
    trainer, begun = aged
    old = scored(trainer, begun, 16, 51)
    weights = rule_weights(old)
    kept, whole = weights["all mistakes"], gradient(trainer, old)
    parts = gradient(trainer, old, kept) + gradient(trainer, old, weights["none"] - kept)
    assert torch.allclose(parts, whole, atol=1e-6) and whole.norm() > 0.1
    assert old.distance[old.advantages < 0].mean() > old.distance[old.advantages > 0].mean()
    twin = Trainer(replace(small(), numerics=replace(small().numerics, max_grad_norm=1e9)))
    same = scored(twin, twin.model, 8, 1)
    assert gradient(twin, same).norm() == pytest.approx(twin.step()["grad_norm"], rel=1e-4)


def test_rows_are_by_age_and_fresh_data_is_the_best_there_is():
    rows = gradient_by_age(0, 1, ages=(0, 3), prompts=16)
    assert [row["step"] for row in rows] == [0, 3]
    fresh, old = rows
    assert fresh["cos_none"] == fresh["cos_0.0001"] and fresh["kept_threshold"] == 0
    assert abs(fresh["distance_wrong"]) < 1e-5 < 1e-3 < abs(old["distance_wrong"])
    assert old["kept_0.0001"] < old["kept_0.1"] <= 1


@pytest.mark.parametrize("rule, moves", [("threshold", False), ("decay", True)])
def test_on_fresh_data_the_threshold_trains_nothing(rule, moves):
    trainer = Reweighted(small(updates=4), rule)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.run(2, progress=False)
    pairs = zip(before, trainer.model.parameters(), strict=True)
    assert any(not torch.equal(a, b) for a, b in pairs) is moves


def test_a_decayed_run_is_not_the_plain_one(monkeypatch):
    runs = [Reweighted(small(updates=4), "decay"), Trainer(small(updates=4))]
    decayed, plain = (run.run(1, progress=False).rows[1]["grad_norm"] for run in runs)
    assert decayed != plain
    monkeypatch.setattr(off_policy, "positional_decay", lambda mask: mask.float())
    undecayed = Reweighted(small(updates=4), "decay").run(1, progress=False).rows[1]["grad_norm"]
    assert undecayed == pytest.approx(plain)
