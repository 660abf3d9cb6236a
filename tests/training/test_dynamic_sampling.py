"""Dynamic sampling: silent groups leave, refills come, everything drawn is counted."""

from __future__ import annotations

import pytest
import torch
from tiny import sharp_moe, tiny_config

from stablerl_core.rewards import task_by_name
from stablerl_core.training import Sampling, Trainer, completion_logp
from stablerl_core.training.rollout import encode_prompts, joined, rollout


def paying(share):
    """A reward that makes the given share of problems mixed, and all others silent."""

    def reward(texts, problems, cut):
        mixed = [sum(map(int, p.gold)) % 10 < 10 * share for p in problems]
        return [float(i % 2 == 0 and m) for i, m in enumerate(mixed)]

    return reward


def collected(share, **changes):
    trainer = Trainer(tiny_config(**changes), reward=paying(share))
    return trainer, *trainer._collect(1)


def test_silent_groups_are_replaced_and_all_draws_counted():
    trainer, batch, row, advantages = collected(
        0.8, data__dynamic_sampling=True, data__max_refills=30
    )
    groups = advantages.view(-1, 6)
    assert len(groups) == 4 and (groups != 0).any(1).all()
    assert row["drawn_groups"] > 4 and row["drawn_groups"] % 4 == 0
    assert len(batch.tokens) == 24
    silent = round(row["zero_variance_groups"] * row["drawn_groups"])
    assert row["drawn_groups"] - silent >= 4
    assert row["reward"] == pytest.approx(0.5 * (1 - row["zero_variance_groups"]))


def test_refills_bring_new_prompts_and_new_noise():
    trainer = Trainer(
        tiny_config(data__dynamic_sampling=True, data__max_refills=2), reward=paying(0)
    )
    batch, rewards = trainer._drawn(1)
    first, second, third = batch.prompt.view(3, 24, -1)
    assert not torch.equal(first, second) and not torch.equal(second, third)
    again, _ = trainer._drawn(1)
    assert torch.equal(batch.tokens, again.tokens)


def test_the_number_of_refills_is_bounded_and_a_silent_step_moves_nothing():
    trainer, batch, row, advantages = collected(
        0.0, data__dynamic_sampling=True, data__max_refills=2
    )
    assert row["drawn_groups"] == 12 and row["zero_variance_groups"] == 1
    assert len(advantages) == 24 and not advantages.any()
    assert trainer.step()["grad_norm"] == 0


def test_a_batch_that_is_not_filled_keeps_what_it_has():
    _, batch, row, advantages = collected(0.6, data__dynamic_sampling=True, data__max_refills=0)
    assert row["drawn_groups"] == 4 and 0 < len(advantages) < 24
    assert (advantages.view(-1, 6) != 0).any(1).all()


def test_a_full_first_batch_is_the_one_without_dynamic_sampling():
    """Where every group has a signal, the run is the same bit for bit."""
    plain = Trainer(tiny_config(), reward=paying(1)).run(2, progress=False)
    dynamic = tiny_config(data__dynamic_sampling=True)
    filled = Trainer(dynamic, reward=paying(1)).run(2, progress=False)
    for a, b in zip(plain, filled, strict=True):
        assert {k: v for k, v in b.items() if k not in ("seconds", "drawn_groups")} == {
            k: v for k, v in a.items() if k != "seconds"
        }


def test_it_trains_with_everything_a_rollout_can_carry():
    options = {"policy__top_k": 20, "system__replay_routing": "R3", "policy__minibatches": 2}
    config = tiny_config(data__dynamic_sampling=True, data__max_refills=8, **options)
    trainer = Trainer(config, reward=paying(0.5))
    row = trainer.step()
    assert row["drawn_groups"] > 4 and row["grad_norm"] > 0 and row["nonfinite"] == 0
    assert row["logp_gap"] < 1e-4


def test_joined_rollouts_are_scored_as_each_alone():
    model, tokenizer = sharp_moe()
    problems = task_by_name("sort").sample("train", 4, seed=0)
    prompts = [problems[0].prompt, problems[1].prompt, problems[2].prompt[2:], "S1="]
    parts = []
    for seed, (texts, limit) in enumerate(((prompts[:2], 3), (prompts[2:], 9))):
        ids, mask = encode_prompts(tokenizer, texts, "cpu")
        parts.append(
            rollout(
                model,
                ids,
                mask,
                group_size=2,
                max_new_tokens=limit,
                eos_token_id=tokenizer.eos_token_id,
                generator=torch.Generator().manual_seed(seed),
                sampling=Sampling(top_p=0.9),
                record_routing=True,
            )
        )
    assert parts[0].prompt.shape != parts[1].prompt.shape
    whole = joined(parts)
    with torch.no_grad():
        apart = torch.cat([completion_logp(model, p)[p.mask] for p in parts])
        together = completion_logp(model, whole)[whole.mask]
    assert torch.equal(
        whole.sampler_logp[whole.mask], torch.cat([p.sampler_logp[p.mask] for p in parts])
    )
    assert (together - apart).abs().max() < 1e-4


def test_what_cannot_be_refilled_is_refused():
    with pytest.raises(ValueError, match="dynamic_sampling must be False"):
        tiny_config(data__dynamic_sampling=True, data__max_new_tokens=12, system__partial_tokens=4)
    with pytest.raises(ValueError, match="max_refills=-1"):
        tiny_config(data__max_refills=-1)
