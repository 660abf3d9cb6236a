"""Chapter 45's interrupted answers: tags, drops and resets act where they say, and only there."""

import copy
from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments.interruptions import (
    INTERRUPTIONS,
    PIECE,
    Interrupted,
    as_if_first,
    batch_in_pieces,
    estimates_by_tag,
    in_pieces,
    interrupted_rollout,
    interrupted_run,
)
from stablerl_core.experiments.off_policy import stale
from stablerl_core.training import Trainer, completion_logp


def few(config, prompts=8):
    data = replace(config.data, prompts=prompts, eval_prompts=1)
    return replace(config, data=data, probe_every=100)


@pytest.fixture(scope="module")
def two():
    """A trainer after six steps, and the policy with which it began."""
    trainer = Trainer(few(stale(1, updates=1)[0]))
    begun = copy.deepcopy(trainer.model)
    trainer.run(6, progress=False)
    return trainer, begun


def test_each_policy_draws_its_piece_and_is_written_down(two):
    trainer, begun = two
    problems = trainer._draw(9, 8)
    batch = interrupted_rollout(trainer, (begun, trainer.model), problems, 9)
    place = torch.arange(batch.tokens.shape[1]).expand_as(batch.mask)
    assert torch.equal(batch.versions[batch.mask], (place >= PIECE).long()[batch.mask])
    with torch.no_grad():
        old, new = (completion_logp(model, batch) for model in (begun, trainer.model))
    ended = batch.finished | (batch.mask.sum(1) == trainer.config.data.max_new_tokens)
    assert ended.all() and int(batch.mask.sum(1).max()) > 2 * PIECE
    drawn = torch.where(place < PIECE, old, new)
    assert (drawn - batch.sampler_logp)[batch.mask].abs().max() < 1e-4
    assert (old - new)[batch.mask].abs().max() > 1e-2
    first = as_if_first({0: begun, 1: trainer.model}, batch)
    assert (first - old)[batch.mask].abs().max() < 1e-5


def test_a_batch_in_pieces_is_what_the_step_would_train_on():
    batch, version = batch_in_pieces(0, step=3, prompts=4)
    config = few(in_pieces(old_logp="sampler")[0], 4)
    trainer = Trainer(config)
    trainer.run(2, progress=False)
    assert version == 2 and int(batch.versions.max()) == 2
    assert torch.equal(batch.tokens, trainer._collect(3)[0].tokens)


def test_the_first_version_is_that_of_each_row(two):
    trainer, begun = two
    batch = interrupted_rollout(trainer, (begun, trainer.model), trainer._draw(9, 4), 9)
    later = batch.versions.clone()
    later[::2] = 1
    mixed = as_if_first({0: begun, 1: trainer.model}, replace(batch, versions=later))
    one = as_if_first({0: begun}, replace(batch, versions=torch.zeros_like(later)))
    differs = ((mixed - one) * batch.mask).abs().amax(1) > 1e-3
    assert not differs[1::2].any() and differs[::2].all()


def test_with_equal_policies_every_tag_says_the_same(monkeypatch):
    trainer = Interrupted(few(stale(1)[0]))
    monkeypatch.setattr("stablerl_core.experiments.interruptions.Trainer", lambda config: trainer)
    monkeypatch.setattr(trainer, "step", lambda: None)
    (row,) = estimates_by_tag(0, (1,), prompts=8)
    for tag in ("each", "first", "last"):
        assert row[f"weight_{tag}"] == pytest.approx(1, abs=1e-3)
        assert row[f"pass_{tag}"] == pytest.approx(row["pass_last"], abs=1e-3)
        assert row[f"ess_{tag}"] == pytest.approx(1, abs=1e-3)


def test_a_wrong_tag_has_wrong_weights():
    (row,) = estimates_by_tag(1, (4,), prompts=64)
    assert row["weight_each"] == pytest.approx(1, abs=0.2) and row["weight_last"] == 1
    assert row["ess_first"] < row["ess_each"] < 1
    assert 0 < row["true"] < 1


def test_what_is_too_old_gets_no_advantage_and_the_rest_keeps_its_own():
    config = few(in_pieces(old_logp="sampler")[0])
    plain, dropping = Interrupted(config), Interrupted(config, max_age=1)
    plain.run(3, progress=False)
    dropping.version, dropping.sampler_version = 3, 3
    dropping.model, dropping.sampler = plain.model, plain.sampler
    dropping._in_flight = copy.deepcopy(plain._in_flight)
    batch, _, kept = dropping._collect(4)
    _, _, whole = plain._collect(4)
    old = ((3 - batch.versions) * batch.mask).amax(1) > 1
    assert old.any() and whole[~old].any() and not kept[old].any()
    assert torch.equal(kept[~old], whole[~old])
    assert dropping.ages["dropped"] == pytest.approx(float(old.float().mean()))
    length = batch.mask.sum(1).float()
    assert dropping.ages["length_dropped"] == pytest.approx(float(length[old].mean()))
    assert dropping.ages["oldest"] == plain.ages["oldest"] > 0


def test_at_random_as_many_are_dropped_and_not_the_old():
    config = few(in_pieces(old_logp="sampler")[0])
    old, anybody = Interrupted(config, max_age=1), Interrupted(config, max_age=1, at_random=True)
    for trainer in (old, anybody):
        trainer.run(3, progress=False)  # nothing is older yet: both are the same
    (batch, _, kept), (same, _, others) = (t._collect(4) for t in (old, anybody))
    assert torch.equal(batch.tokens, same.tokens) and 0 < old.ages["dropped"] < 1
    assert old.ages["dropped"] == anybody.ages["dropped"] and not torch.equal(kept, others)


def test_the_optimizer_forgets_after_a_push_and_not_between():
    trainer = Interrupted(few(stale(2, updates=1)[0]), reset=True)
    states = []
    for _ in range(4):
        trainer.step()
        states.append(len(trainer._optimizer.state))
    assert states[0] == states[2] > 0 == states[1] == states[3]
    plain = Interrupted(few(stale(2, updates=1)[0]))
    plain.run(2, progress=False)
    assert len(plain._optimizer.state) == states[0]


def test_old_policies_are_kept_as_long_as_they_are_asked_for():
    trainer = Interrupted(few(in_pieces(correction="tis")[0], 12), tag="first")
    log = trainer.run(12, progress=False)
    assert len(trainer.past) == 24 // PIECE + 1 and max(trainer.past) == 12
    assert trainer.ages["oldest"] > 0 and log.last("weight_ess") < 1


def test_rows_hold_the_log_and_the_ages():
    config = replace(few(in_pieces()[0]), steps=6)
    rows = interrupted_run(2, (config,))
    assert [row["step"] for row in rows] == [0, 1, 5]
    assert "heldout_accuracy" in rows[0] and {"reward", "oldest", "mixed"} <= set(rows[2])
    trainer = Interrupted(replace(config, seed=2))
    for _ in range(5):
        last = trainer.step()
    assert rows[2]["reward"] == last["reward"] and rows[2]["oldest"] == trainer.ages["oldest"]


def test_arms_are_what_their_names_say():
    given = {name: arm.keywords for name, arm in INTERRUPTIONS.arms.items()}
    for name, kept in given.items():
        (config,) = kept["configs"]
        assert bool(config.system.partial_tokens) is name.startswith("part")
        assert bool(kept.get("reset")) is name.startswith("reset")
    assert given["part_first"]["configs"] == given["part_tis"]["configs"]
    assert given["part_drop"]["configs"] == given["part_sampler"]["configs"]
    assert given["reset_16"]["configs"] == stale(16, old_logp="sampler")
