"""Layer 4 in the loop: corrections, off-policy masks, Keep Routing, Keep Sampling Mask."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny import FAMILIES, sharp_moe, step_gradients, tiny_config

from stablerl_core.rewards import task_by_name
from stablerl_core.system import (
    CORRECTIONS,
    geometric_rejection,
    importance_weights,
    off_policy_sequence_mask,
)
from stablerl_core.training import Trainer
from stablerl_core.training.loss import correction_weights
from stablerl_core.training.rollout import (
    Sampling,
    completion_logits,
    completion_logp,
    encode_prompts,
    rollout,
    select_rows,
    with_own_routing,
)

COARSE = {"system__sampler_precision": "int4", "probe_every": 9}


def sampled(model, tokenizer, digits=(6, 3), **options):
    problems = [task_by_name("sort", {"digits": d}).sample("train", 1, seed=0)[0] for d in digits]
    prompt, mask = encode_prompts(tokenizer, [p.prompt for p in problems], "cpu")
    return rollout(
        model,
        prompt,
        mask,
        group_size=3,
        max_new_tokens=8,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator().manual_seed(0),
        **options,
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_the_samplers_experts_are_the_trainers_where_the_weights_are_equal(family):
    """Left padding, shared prompts, ended rows: the record must meet the right tokens."""
    model, tokenizer = sharp_moe(family)
    batch = sampled(model, tokenizer, record_routing=True)
    own = with_own_routing(model, batch)
    read = torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1)
    ours, theirs = (r.routing.long().sort(-1).values[read] for r in (own, batch))
    assert torch.equal(ours, theirs)
    with torch.no_grad():
        plain, replayed = (
            completion_logits(model, b)[batch.mask] for b in (replace(batch, routing=None), own)
        )
    assert torch.equal(plain, replayed)


def test_foreign_experts_are_obeyed_in_whole_and_in_parts():
    model, tokenizer = sharp_moe()
    batch = sampled(model, tokenizer, record_routing=True)
    foreign = replace(batch, routing=(batch.routing + 1) % 8)
    with torch.no_grad():
        plain = completion_logp(model, replace(batch, routing=None))
        moved = completion_logp(model, foreign)
        rows = torch.tensor([1, 4, 5])
        part = completion_logp(model, select_rows(foreign, rows))
    assert (plain - moved)[batch.mask].abs().max() > 0.1
    inside = select_rows(batch, rows).mask
    assert (part - moved[rows][:, : part.shape[1]])[inside].abs().max() < 1e-4


@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_the_loop_replays_and_its_router_keeps_a_gradient(replay, monkeypatch):
    options = dict(COARSE, system__replay_routing=replay, policy__minibatches=2)
    trainer = Trainer(tiny_config(**options))
    gradient = step_gradients(trainer, monkeypatch)[0]
    plain = step_gradients(
        Trainer(tiny_config(**(options | {"system__replay_routing": None}))), monkeypatch
    )[0]
    routers = [p.grad for n, p in trainer.model.named_parameters() if n.endswith("gate.weight")]
    assert routers and all(g.abs().max() > 0 for g in routers)
    same = (gradient - plain).norm() < 1e-6 * plain.norm()
    assert same == (replay == "R2")  # at the first update R2 changes nothing


def test_corrections_weigh_the_advantages(monkeypatch):
    """REINFORCE with TIS by hand: −Σ min(π_old/μ, cap) Â log π / (B · longest allowed)."""
    trainer = Trainer(
        tiny_config(
            **COARSE,
            policy__objective="reinforce",
            system__correction="tis",
            system__correction_cap=1.1,
        )
    )
    collected = []
    collect = trainer._collect
    trainer._collect = lambda n: collected.append(collect(n)) or collected[-1]
    model = Trainer(tiny_config()).model
    actual = step_gradients(trainer, monkeypatch)[0]
    batch, _, advantages = collected[0]
    logp = completion_logp(model, batch)
    weights = (logp.detach() - batch.sampler_logp).exp().clamp(max=1.1)
    assert (weights[batch.mask] < 1.1).any() and (weights[batch.mask] == 1.1).any()
    terms = torch.where(batch.mask, weights * advantages[:, None] * logp, 0.0)
    (-terms.sum() / (24 * 10)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (actual - expected).norm() < 1e-4 * expected.norm()
    ess = importance_weights(logp.detach(), batch.sampler_logp, batch.mask, cap=1.1).ess
    assert trainer.log.rows[-1]["weight_ess"] == pytest.approx(ess, rel=1e-4)
    assert trainer.log.rows[-1]["masked_tokens"] == 0


@pytest.mark.parametrize("correction", [*CORRECTIONS, "minimum_prefix", "geometric_rejection"])
def test_every_correction_survives_a_split_into_micro_batches(correction, monkeypatch):
    options = dict(COARSE, system__correction=correction, policy__minibatches=2)
    options |= dict(system__off_policy_threshold=0.02, system__replay_routing="R3")
    whole = step_gradients(Trainer(tiny_config(**options)), monkeypatch)
    split = step_gradients(Trainer(tiny_config(numerics__micro_batch=2, **options)), monkeypatch)
    assert whole[0].norm() > 1e-3 and (whole[0] - split[0]).norm() < 1e-5 * whole[0].norm()


def test_geometric_rejection_drops_whole_sequences_and_keeps_the_weight_of_the_others():
    options = dict(COARSE, system__correction="geometric_rejection", system__correction_cap=1.05)
    trainer = Trainer(tiny_config(**options))
    batch, _, advantages = trainer._collect(1)
    with torch.no_grad():
        logp = completion_logp(trainer.model, batch)
    values, ess = correction_weights(trainer.config.system, logp, batch)
    keep = geometric_rejection(logp, batch.sampler_logp, batch.mask, low=1 / 1.05, high=1.05)
    assert keep.any() and not keep.all() and 0 < ess < 1
    assert torch.equal(values, keep.to(logp.dtype).expand_as(logp))
    narrow = replace(trainer.config.system, correction_cap=None)
    assert correction_weights(narrow, logp, batch)[0].sum() < values.sum()
    had = (advantages[:, None] != 0) & batch.mask
    row = Trainer(tiny_config(**options)).step()
    assert row["masked_tokens"] == pytest.approx(float((had & ~keep).sum() / had.sum()))


def test_min_p_truncates_what_is_sampled_and_scored():
    options = {"policy__min_p": 0.3, "probe_every": 9}
    trainer = Trainer(tiny_config(**options))
    batch, _, _ = trainer._collect(1)
    with torch.no_grad():
        probs = completion_logits(trainer.model, batch).softmax(-1)
    drawn = probs.gather(-1, batch.tokens[..., None])[..., 0]
    assert (drawn >= 0.3 * probs.amax(-1) - 1e-6)[batch.mask].all()
    assert (drawn < 0.999 * probs.amax(-1))[batch.mask].any()
    kept = Trainer(tiny_config(**options)).step()
    lost = Trainer(tiny_config(**options, system__sampling_mask="none")).step()
    assert kept["logp_gap"] < 1e-5 and lost["logp_gap"] > 0.01


def test_the_off_policy_mask_silences_negative_sequences_that_moved():
    trainer = Trainer(tiny_config(**COARSE, system__off_policy_threshold=0.05))
    collected = []
    collect = trainer._collect
    trainer._collect = lambda n: collected.append(collect(n)) or collected[-1]
    model = Trainer(tiny_config()).model
    row = trainer.step()
    batch, _, advantages = collected[0]
    with torch.no_grad():
        logp = completion_logp(model, batch)
    keep = off_policy_sequence_mask(logp, batch.sampler_logp, advantages, batch.mask, 0.05)
    had = (advantages[:, None] != 0) & batch.mask
    share = (had & ~keep).sum() / had.sum()
    assert 0 < share < 0.6 and row["masked_tokens"] == pytest.approx(float(share))


def test_without_the_kept_sets_the_trainer_scores_another_distribution():
    options = {"policy__top_p": 0.7, "probe_every": 9}
    kept = Trainer(tiny_config(**options)).step()
    lost = Trainer(tiny_config(**options, system__sampling_mask="none")).step()
    assert kept["logp_gap"] < 1e-5 and lost["logp_gap"] > 0.01


def test_a_rollout_that_recorded_its_experts_knows_its_sampling():
    model, tokenizer = sharp_moe()
    batch = sampled(model, tokenizer, sampling=Sampling(top_p=0.9), record_routing=True)
    with torch.no_grad():
        logp = completion_logp(model, batch)
    assert (logp - batch.sampler_logp)[batch.mask].abs().max() < 1e-4


@pytest.mark.parametrize(
    "change, words",
    [
        ({"system__correction": "tiss"}, "system.correction='tiss'"),
        ({"system__correction": "tis", "system__old_logp": "sampler"}, "count the mismatch twice"),
        ({"system__correction_cap": 0.0}, "system.correction_cap=0.0"),
        (
            {"system__correction_cap": 0.9, "system__correction": "geometric_rejection"},
            "system.correction_cap=0.9: the band",
        ),
        ({"system__replay_routing": "R4"}, "system.replay_routing='R4'"),
        ({"system__partial_tokens": 5, "system__replay_routing": "R3"}, "no routing record"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        tiny_config(**change)


def test_noise_on_the_logits_is_another_policy_whose_weights_average_to_one():
    """E_μ[π/μ] = 1 for every draw of the noise: the recorded log μ is the noised distribution's."""
    model, tokenizer = sharp_moe()
    digits = (6, 3) * 40
    quiet, noisy = (sampled(model, tokenizer, digits, logit_noise=s) for s in (0.0, 0.4))
    with torch.no_grad():
        gaps = [(completion_logp(model, b) - b.sampler_logp)[b.mask] for b in (quiet, noisy)]
    assert gaps[0].abs().max() < 1e-5
    ratio = gaps[1].exp()
    assert ratio.std() > 0.2
    assert abs(ratio.mean() - 1) < 3 * ratio.std() / len(ratio) ** 0.5
    with pytest.raises(ValueError, match="logit_noise"):
        sampled(model, tokenizer, logit_noise=-1.0)


def test_noise_reaches_training_and_not_evaluation():
    logs = [
        Trainer(tiny_config(steps=1, probe_every=9, system__logit_noise=s)).run(progress=False).rows
        for s in (0.0, 0.5)
    ]
    assert logs[0][0]["heldout_accuracy"] == logs[1][0]["heldout_accuracy"]
    assert logs[0][1]["logp_gap"] < 1e-5 < 0.05 < logs[1][1]["logp_gap"]
