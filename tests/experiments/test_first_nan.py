"""Losses against the package's own, faults that keep what they say they keep, guards by hand."""

import math

import pytest
import torch
from torch import nn

from stablerl_core.experiments import EXPERIMENTS, first_nan
from stablerl_core.experiments.first_nan import (
    BASE,
    FAULTS,
    SETTINGS,
    aftermath,
    apply_guard,
    collect,
    found,
    guarded_mean,
    loud_expert,
    mean_of_means,
    planted,
    policy_loss,
    ratio_of_answers,
    scored,
    until_nan,
)
from stablerl_core.policy import policy_objective
from stablerl_core.rewards import task_by_name
from stablerl_core.training import load_base


@pytest.fixture(scope="module")
def drawn():
    model, tokenizer = load_base(BASE)
    batch, seen = collect(model, tokenizer, task_by_name("sort").sample("train", 2, seed=0), 0)
    return model, batch, seen


def gradient(model, loss):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def copied(batch):
    return {name: tensor.clone() for name, tensor in batch.items()}


def test_the_sampler_and_the_trainer_agree_and_the_seen_means_are_of_the_batch(drawn):
    model, batch, seen = drawn
    _, logp, sampler_logp = scored(model, batch)
    mask = batch["mask"][:, 1:]
    assert torch.allclose(logp[mask], sampler_logp[mask], atol=1e-5)
    assert not batch["mask"][:, :8].any() and (batch["sampler_logp"][~batch["mask"]] == 0).all()
    assert seen.length == pytest.approx(float(batch["mask"].sum(1).float().mean()))
    assert 0 < seen.reward < 1 and seen.entropy > 0


def test_the_losses_are_those_of_the_package(drawn):
    model, batch, _ = drawn
    _, logp, sampler_logp = scored(model, batch)
    mask, advantages = batch["mask"][:, 1:], batch["advantages"]
    for ours, aggregation in ((policy_loss, "token"), (mean_of_means, "sequence")):
        theirs, _ = policy_objective(
            "reinforce", logp, None, advantages, mask, aggregation=aggregation
        )
        same = gradient(model, ours(model, batch))
        assert torch.allclose(same, gradient(model, theirs + 0 * logp.sum()), atol=1e-5)
        logp = scored(model, batch)[1]


def test_where_changes_nothing_until_it_is_needed_and_then_only_the_loss(drawn):
    model, batch, _ = drawn
    plain, guarded = mean_of_means(model, batch), guarded_mean(model, batch)
    assert torch.equal(plain, guarded)
    assert torch.equal(gradient(model, plain), gradient(model, guarded))
    batch = copied(batch)
    batch["mask"][3] = False
    assert mean_of_means(model, batch).isnan()
    loss = guarded_mean(model, batch)
    assert loss.isfinite() and gradient(model, loss).isnan().any()
    others = torch.arange(16) != 3
    rest = {name: tensor[others] for name, tensor in batch.items()}
    assert torch.allclose(loss, mean_of_means(model, rest) * 15 / 16, atol=1e-6)


def test_one_ratio_an_answer_is_the_product_of_its_tokens(drawn):
    model, batch, _ = drawn
    batch = copied(batch)
    batch["sampler_logp"][2] -= 0.1 * batch["mask"][2]
    expected = math.exp(0.1 * int(batch["mask"][2].sum()))
    ratios = torch.ones(16)
    ratios[2] = expected
    assert torch.allclose(
        ratio_of_answers(model, batch), -(ratios * batch["advantages"]).mean(), atol=1e-4
    )


def test_the_loud_expert_is_the_same_function(drawn):
    _, batch, _ = drawn
    quiet, loud = load_base(BASE)[0], load_base(BASE)[0]
    loud_expert(loud, by=2.0**10)
    assert not torch.equal(
        quiet.model.layers[-1].mlp.experts.down_proj, loud.model.layers[-1].mlp.experts.down_proj
    )
    assert torch.equal(scored(quiet, batch)[0], scored(loud, batch)[0]), "powers of two are exact"


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_one(name):
    model, batch, row = planted(name, seed=2)
    loss = FAULTS[name].loss(model, batch)
    flat = gradient(model, loss)
    assert not flat.isfinite().all() and 0 <= row < 16
    assert bool(loss.isfinite()) == (name == "untaken_branch")


def test_a_fault_is_found_and_told_in_one_row():
    (row,) = found(2, "untaken_branch")
    assert row == {"step": 1, "named": 1, "repeats": 1, "wider": 0, "cause": 1, "row": 1}


def gradients(*values):
    parameters = [nn.Parameter(torch.zeros(1)) for _ in values]
    for p, value in zip(parameters, values, strict=True):
        p.grad = torch.tensor([value])
    return parameters, lambda: [float(p.grad) for p in parameters]


def test_the_guards_by_hand():
    for guard, taken in (("skip", True), ("apply", True), ("clip", True), ("replace", True)):
        parameters, now = gradients(3.0, 4.0)
        norm, took = apply_guard(guard, parameters)
        assert norm == pytest.approx(5) and took == taken
        assert now() == pytest.approx([3, 4] if guard == "apply" else [0.6, 0.8], rel=1e-5)
    parameters, now = gradients(math.nan, 4.0)
    assert apply_guard("skip", parameters)[1] is False and now()[1] == 4
    assert apply_guard("clip", parameters)[1] and all(map(math.isnan, now()))
    parameters, now = gradients(math.nan, 4.0)
    norm, taken = apply_guard("replace", parameters)
    assert norm == pytest.approx(4) and taken and now() == pytest.approx([0, 1], rel=1e-5)
    parameters, now = gradients(1e30, 4.0)
    norm, taken = apply_guard("clip", parameters)
    assert norm == math.inf and taken and now() == [0, 0]


def test_rows_end_alike_whether_or_not_there_was_a_nan(monkeypatch):
    monkeypatch.setattr(first_nan, "PROMPTS", 2)
    rows = until_nan(0, SETTINGS["sentinel"], steps=18)
    assert [r["step"] for r in rows] == list(range(1, 19))
    assert [r["nonfinite"] for r in rows] == [0] * 15 + [1] * 3
    assert math.isfinite(rows[15]["loss"]) and math.isnan(rows[15]["grad_norm"])
    assert rows[16] == {"step": 17, "nonfinite": 1}


def test_a_poisoned_policy_answers_nothing_and_an_infinite_moment_is_dead(monkeypatch):
    monkeypatch.setattr(first_nan, "PROMPTS", 2)
    monkeypatch.setattr(first_nan, "FAULT_AT", 1)
    monkeypatch.setattr(first_nan, "AFTER", 3)
    rows = aftermath(0, "nan", "clip")
    assert [r["sampled"] for r in rows] == [1, 0, 0] and "accuracy" not in rows[-1]
    rows = aftermath(0, "huge", "apply")
    assert rows[0]["dead"] == 0 and rows[2]["dead"] > 0.5 and rows[0]["logged_norm"] == math.inf
    assert 0 <= rows[-1]["accuracy"] <= 1


def test_the_arms_of_the_chapter():
    assert list(EXPERIMENTS["first_nan"].arms) == list(FAULTS) and len(FAULTS) == 6
    assert len(EXPERIMENTS["first_nan_aftermath"].arms) == 7
