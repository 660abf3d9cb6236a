"""Partial rollouts: interrupted, continued by newer weights, and nothing lost in between."""

from __future__ import annotations

import pytest
import torch
from tiny import sharp_moe, tiny_config

from stablerl_core.rewards import task_by_name
from stablerl_core.training import Trainer
from stablerl_core.training.partial import InFlight
from stablerl_core.training.rollout import completion_logp


def partial_config(**changes):
    options = dict(
        steps=6, system__partial_tokens=4, data__max_new_tokens=12, system__old_logp="sampler"
    )
    return tiny_config(**(options | changes))


def grown(model, tokenizer, parts, limit=12, group_size=3, seed=0):
    problems = task_by_name("sort").sample("train", 4, seed=0)
    origins = [(1, 4, i) for i in range(4)]
    flight = InFlight.begin(problems, origins, group_size, limit, "cpu")
    generator = torch.Generator().manual_seed(seed)
    for version, tokens in enumerate(parts):
        flight.grow(model, tokenizer, tokens, generator, 1.0, version)
    return flight


def test_every_token_keeps_the_log_probability_of_the_policy_that_drew_it():
    """Same weights throughout: what was recorded in pieces is what one pass over all says."""
    model, tokenizer = sharp_moe()
    flight = grown(model, tokenizer, (4, 4, 4))
    assert len(set(flight.length.tolist())) > 2 and flight.finished.any()
    batch = flight.rollout(tokenizer, 1.0)
    with torch.no_grad():
        logp = completion_logp(model, batch)
    assert (logp - batch.sampler_logp)[batch.mask].abs().max() < 1e-4
    assert batch.mask.sum(1).tolist() == flight.length.tolist()


def test_versions_change_at_the_interruption_and_nothing_is_drawn_after_the_end():
    model, tokenizer = sharp_moe()
    flight = grown(model, tokenizer, (4, 4, 4))
    batch = flight.rollout(tokenizer, 1.0)
    steps = torch.arange(batch.tokens.shape[1]) // 4
    assert torch.equal(batch.versions[batch.mask], steps.expand_as(batch.mask)[batch.mask])
    ends = batch.tokens == tokenizer.eos_token_id
    for row in range(len(ends)):
        at = ends[row, : int(flight.length[row])].nonzero()[:, 0].tolist()
        assert at == ([int(flight.length[row]) - 1] if flight.finished[row] else [])


def test_prompts_of_different_length_continue_where_they_stopped():
    model, tokenizer = sharp_moe()
    task = task_by_name("sort")
    problems = [
        task.sample("train", 1, seed=0)[0],
        task_by_name("sort", {"digits": 3}).sample("train", 1, seed=0)[0],
    ]
    flight = InFlight.begin(problems, [(1, 2, 0), (1, 2, 1)], 4, 8, "cpu")
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        flight.grow(model, tokenizer, 4, generator, 1.0, 0)
    batch = flight.rollout(tokenizer, 1.0)
    with torch.no_grad():
        logp = completion_logp(model, batch)
    assert (logp - batch.sampler_logp)[batch.mask].abs().max() < 1e-4


def test_split_gives_whole_groups_and_keeps_the_rest():
    model, tokenizer = sharp_moe()
    flight = grown(model, tokenizer, (4,))
    whole, rest = flight.split()
    assert len(whole.problems) + len(rest.problems) == 4
    assert bool(whole.done.all()) and not bool(rest.done.view(-1, 3).all(1).any())
    joined = whole.plus(rest)
    assert sorted(joined.length.tolist()) == sorted(flight.length.tolist())


def test_the_loop_trains_on_whole_groups_and_logs_the_age_of_their_tokens():
    trainer = Trainer(partial_config(numerics__learning_rate=2e-3))
    rows = trainer.run(progress=False).rows[1:]
    assert all(1 <= row["prompts"] <= 4 for row in rows)
    assert max(row["staleness"] for row in rows) > 0
    assert any(row["staleness"] % 1 for row in rows)  # a mean over tokens of several versions
    assert any(row["ratio_max"] > 1.001 for row in rows)  # against the policy that drew the token
    whole = Trainer(tiny_config(steps=2)).run(progress=False).rows[1:]
    assert all(row["staleness"] == 0 and "prompts" not in row for row in whole)


def test_a_resume_finds_the_completions_that_were_in_flight(tmp_path):
    whole = Trainer(partial_config(out=str(tmp_path / "a"))).run(progress=False)
    part = Trainer(partial_config(out=str(tmp_path / "b")))
    part.run(5, progress=False)
    assert part._in_flight is not None
    resumed = Trainer.resume(tmp_path / "b")
    assert resumed.version == 5 and resumed._in_flight is not None
    resumed.run(progress=False)
    kept = ("loss", "reward", "staleness", "prompts", "length")
    for a, b in zip(whole.rows[1:], resumed.log.rows[1:], strict=True):
        assert [a[k] for k in kept] == [b[k] for k in kept]


@pytest.mark.parametrize(
    "change, words",
    [
        ({"system__partial_tokens": 5}, "does not divide data.max_new_tokens=12"),
        ({"policy__top_p": 0.9}, "policy.top_p must be 1"),
        ({"policy__min_p": 0.1}, "policy.top_p must be 1"),
        ({"system__partial_tokens": -1}, "system.partial_tokens=-1"),
    ],
)
def test_bad_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        partial_config(**change)
