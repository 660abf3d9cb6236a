"""The sampling mask in the loop: stored, run again, none; what may be drawn; older logs."""

import json
import math
from dataclasses import make_dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import sharp_moe, step_gradients, tiny_config

from stablerl_core.system import masked_log_probs, rerun_filter
from stablerl_core.training import Sampling, SystemConfig, Trainer, TrainerConfig
from stablerl_core.training.loss import UpdateLoss
from stablerl_core.training.rollout import (
    completion_logits,
    completion_logp,
    encode_prompts,
    rollout,
)

TOP_P = {"policy__top_p": 0.8, "probe_every": 9}
COARSE = TOP_P | {"system__sampler_precision": "int4"}
RERUN = {"system__sampling_mask": "rerun"}


def spied(trainer):
    """The trainer, and a list that its rollouts and advantages go into."""
    collected, collect = [], trainer._collect
    trainer._collect = lambda n: collected.append(collect(n)) or collected[-1]
    return trainer, collected


def test_on_the_samplers_own_weights_the_filter_loses_nothing_and_learns_the_same(monkeypatch):
    stored = step_gradients(Trainer(tiny_config(**TOP_P)), monkeypatch)[0]
    trainer = Trainer(tiny_config(**TOP_P, **RERUN))
    again = step_gradients(trainer, monkeypatch)[0]
    assert (stored - again).norm() < 1e-5 * stored.norm()
    row = trainer.log.rows[-1]
    assert row["lost_tokens"] == 0 and row["logp_gap"] < 1e-5


def test_lost_tokens_leave_the_loss(monkeypatch):
    """REINFORCE by hand over the tokens that the trainer's filter keeps, the others at 0."""
    objective = {"policy__objective": "reinforce"}
    trainer, collected = spied(Trainer(tiny_config(**COARSE, **RERUN, **objective)))
    model = Trainer(tiny_config()).model
    actual = step_gradients(trainer, monkeypatch)[0]
    batch, _, advantages = collected[0]
    logits = completion_logits(model, batch)
    found = rerun_filter(logits, batch.tokens, top_p=0.8)
    counted = batch.mask & ~found.lost
    trained = batch.mask & (advantages != 0)[:, None]
    share = (found.lost & trained).sum() / trained.sum()
    assert 0 < share < 0.2
    terms = torch.where(counted, advantages[:, None] * found.logp.masked_fill(found.lost, 0), 0.0)
    (-terms.sum() / (24 * 10)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (actual - expected).norm() < 1e-4 * expected.norm()
    row = trainer.log.rows[-1]
    assert row["lost_tokens"] == pytest.approx(float(share)) and row["nonfinite"] == 0
    assert 0 < row["logp_gap"] < 1


def test_the_stored_set_loses_none_of_the_same_tokens(monkeypatch):
    trainer, collected = spied(Trainer(tiny_config(**COARSE)))
    row = trainer.step()
    batch = collected[0][0]
    logp = completion_logp(trainer.model, batch)
    assert torch.isfinite(logp).all() and "lost_tokens" not in row and row["nonfinite"] == 0


@pytest.mark.parametrize(
    "options", [{}, {"system__correction": "tis"}, {"system__old_logp": "sampler"}]
)
def test_what_is_lost_does_not_depend_on_the_split(options, monkeypatch):
    """Four updates: later ones lose tokens at the start of the step or at the moment."""
    options = COARSE | RERUN | {"policy__minibatches": 2, "policy__epochs": 2} | options
    runs = [Trainer(tiny_config(numerics__micro_batch=part, **options)) for part in (0, 2)]
    whole, split = (step_gradients(run, monkeypatch) for run in runs)
    assert len(whole) == 4 and whole[0].norm() > 1e-3
    assert (whole[0] - split[0]).norm() < 1e-5 * whole[0].norm()
    ours, theirs = (run.log.rows[-1] for run in runs)
    assert ours["lost_tokens"] > 0 and ours["nonfinite"] == 0 == theirs["nonfinite"]
    assert ours["lost_tokens"] == pytest.approx(theirs["lost_tokens"], abs=0.01)
    if "system__correction" in options:
        assert 0 < ours["weight_ess"] < 1


def test_a_token_is_lost_if_either_policy_has_lost_it():
    """At the start of the step or now; neither leaves a gradient, and padding is not counted."""
    mask = torch.tensor([[True, True, True, True, False]])
    logp = torch.tensor([[-1.0, -math.inf, -2.0, -3.0, -math.inf]], requires_grad=True)
    old_logp = torch.tensor([[-1.0, -1.0, -math.inf, -3.5, 0.0]])
    counter = SimpleNamespace(lost=torch.zeros(2, dtype=torch.float64))
    Piece = make_dataclass("Piece", ["mask"])
    given = (counter, logp, old_logp, Piece(mask))
    now, then, piece = UpdateLoss._without_lost(*given)
    assert piece.mask.tolist() == [[True, False, False, True, False]]
    assert now.tolist() == [[-1, 0, 0, -3, 0]] and then.tolist() == [[-1, 0, 0, -3.5, 0]]
    now.sum().backward()
    assert logp.grad.tolist() == [[1, 0, 0, 1, 0]]
    assert counter.lost.tolist() == [2, 4]
    _, then, piece = UpdateLoss._without_lost(counter, logp, None, Piece(mask))
    assert then is None and piece.mask.tolist() == [[True, False, True, True, False]]


def test_a_model_of_nan_is_not_taken_for_lost_tokens():
    trainer = Trainer(tiny_config(**TOP_P, **RERUN, system__sync_every=2))
    with torch.no_grad():
        trainer.model.lm_head.weight[5] = math.nan
    row = trainer.step()
    assert row["nonfinite"] == 1 and row["lost_tokens"] == 0 and "logp_gap" not in row


def test_only_allowed_characters_and_the_end_are_drawn():
    options = {"policy__allowed": "#0123456789", "policy__temperature": 1.5, "probe_every": 9}
    trainer, collected = spied(Trainer(tiny_config(**options)))
    row = trainer.step()
    batch = collected[0][0]
    expected = {trainer.tokenizer.eos_token_id, *trainer.tokenizer("#0123456789").input_ids}
    assert set(batch.tokens[batch.mask].tolist()) <= expected
    assert set(batch.kept[batch.mask].flatten().tolist()) == expected
    assert row["logp_gap"] < 1e-5
    lost = Trainer(tiny_config(**options, system__sampling_mask="none")).step()
    assert lost["logp_gap"] > 0.01
    again = Trainer(tiny_config(**options, **RERUN)).step()
    assert again["logp_gap"] < 1e-5 and again["lost_tokens"] == 0


def test_min_p_reaches_the_sampler():
    trainer, collected = spied(Trainer(tiny_config(policy__min_p=0.3, probe_every=9)))
    trainer.step()
    batch = collected[0][0]
    assert batch.sampling == Sampling(min_p=0.3) and (batch.kept >= 0).sum(-1).max() <= 3


def test_whoever_scores_a_rollout_filters_its_own_logits():
    model, tokenizer = sharp_moe()
    sampling = Sampling(top_p=0.7, temperature=1.3, allowed=tuple(range(1, 60)))
    prompt, mask = encode_prompts(tokenizer, ["S31=", "S2718="], "cpu")
    batch = rollout(
        model, prompt, mask, group_size=3, max_new_tokens=8, eos_token_id=1,
        generator=torch.Generator().manual_seed(0), sampling=sampling,
    )  # fmt: skip
    assert int(batch.kept.max()) < 60
    with torch.no_grad():
        stored = completion_logp(model, batch)
        again = completion_logp(model, replace(batch, kept=None, refilter=True))
        logits = completion_logits(model, batch)
    torch.testing.assert_close(stored[batch.mask], again[batch.mask], rtol=0, atol=1e-5)
    assert torch.isfinite(again).all() and (~batch.mask).any()
    by_hand = masked_log_probs(logits, batch.tokens, batch.kept, 1.3)
    assert torch.equal(by_hand[batch.mask], stored[batch.mask])


@pytest.mark.parametrize("kept, mask", [(True, "stored"), (False, "none")])
def test_a_log_from_before_is_still_read(kept, mask):
    told = json.loads(TrainerConfig().to_json())
    del told["system"]["sampling_mask"], told["policy"]["min_p"], told["policy"]["allowed"]
    told["system"]["keep_sampling_mask"] = kept
    config = TrainerConfig.from_json(json.dumps(told))
    assert config == TrainerConfig(system=SystemConfig(sampling_mask=mask))


@pytest.mark.parametrize(
    "change, words",
    [
        ({"system__sampling_mask": "kept"}, "system.sampling_mask='kept'"),
        ({"policy__min_p": 1.5}, "policy.min_p=1.5"),
        (RERUN | {"policy__kl_coef": 0.1}, "different supports"),
        (RERUN | {"policy__objective": "bapo"}, "BAPO"),
        (RERUN | {"policy__covariance": "kl_cov"}, "covariance rules"),
        ({"system__partial_tokens": 5, "policy__min_p": 0.1}, "policy.min_p 0"),
        ({"system__partial_tokens": 5, "policy__allowed": "01"}, "policy.allowed empty"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**change)
