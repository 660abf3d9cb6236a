"""Chapter 44's measurements: ratios of a small rollout by hand, answers that disturb nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments import EXPERIMENTS
from stablerl_core.experiments import keep_sampling_mask as chapter
from stablerl_core.experiments.experiment import Experiment
from stablerl_core.system import sample_tokens
from stablerl_core.training import completion_logits

FILTERS = list(chapter.FILTERS)


def small(name: str, mismatch: str):
    return chapter.sampled_and_scored(chapter.FILTERS[name], mismatch, 0, prompts=4)


@pytest.mark.parametrize("mismatch", ["int4", "updated"])
@pytest.mark.parametrize("name", FILTERS)
def test_the_ratios_are_those_of_each_set(name, mismatch):
    """Sets of the trainer's own logits by `sample_tokens`, sums over them by hand in float64."""
    trainer, batch, _ = small(name, mismatch)
    found = chapter.log_ratios(trainer.model, batch)
    with torch.no_grad():
        logits = completion_logits(trainer.model, batch)[batch.mask]
    options = batch.sampling.options(logits)
    own = sample_tokens(logits, generator=torch.Generator().manual_seed(0), **options).kept
    stored, tokens = batch.kept[batch.mask].tolist(), batch.tokens[batch.mask].tolist()
    z = logits.double() / batch.sampling.temperature
    flat = {key: values[batch.mask].double() for key, values in found.items()}
    drawn = batch.sampler_logp[batch.mask].double()
    for i, (row, token, kept) in enumerate(zip(z, tokens, stored, strict=True)):
        kept, ours = ({v for v in ids if v >= 0} for ids in (kept, own[i].tolist()))
        assert flat["differs"][i] == (kept != ours)
        sets = {"stored": kept, "rerun": ours, "none": range(len(row))}
        total = {key: row[list(ids)].logsumexp(0) for key, ids in sets.items()}
        for key, norm in total.items():
            if key == "rerun" and token not in ours:
                assert flat[key][i] == -torch.inf
            else:
                assert flat[key][i] == pytest.approx(float(row[token] - norm - drawn[i]), abs=2e-5)
        mass = (total["stored"] - total["none"]).exp()
        assert flat["kept_mass"][i] == pytest.approx(float(mass), abs=1e-5)


@pytest.mark.parametrize("name", FILTERS)
def test_on_the_samplers_own_logits_the_ratio_is_the_kept_mass(name):
    trainer, batch, advantages = small(name, "same")
    found = chapter.log_ratios(trainer.model, batch)
    row = chapter._about_tokens(found, batch) | chapter._readers(found, batch, advantages)
    assert row["lost"] == 0 == row["differs"] and row["kept_mass"] < 0.99
    assert row["ratio_none"] == pytest.approx(row["kept_mass"], abs=1e-5)
    for way in ("stored", "rerun"):
        assert row[f"ratio_{way}"] == pytest.approx(1, abs=1e-5)
    assert row["replaced_max"] == pytest.approx(1, abs=1e-3)
    assert row["band_none"] > 0.9 and row["band_stored"] == 0
    if (advantages < 0).any():
        assert row["gspo_none"] > 0.9 and row["gspo_stored"] == 0 == row["opsm_stored"]
    counts = (batch.kept[batch.mask] >= 0).sum(-1).double()
    assert row["kept_ids"] == pytest.approx(counts.mean().item())
    width = 1 if int(batch.kept.max()) < 256 else 2
    size = counts.sum().item() * width + 4 * batch.mask.numel()
    assert row["bytes"] == pytest.approx(size / len(counts))


def test_a_replaced_minus_infinity_is_one_over_mu():
    trainer, batch, advantages = small("top_p_7", "updated")
    found = chapter.log_ratios(trainer.model, batch)
    row = chapter._about_tokens(found, batch)
    lost = (found["rerun"] == -torch.inf) & batch.mask
    assert row["lost"] == pytest.approx(float(lost.sum() / batch.mask.sum())) and row["lost"] > 0
    kept = (found["rerun"] > -torch.inf) & batch.mask
    largest = max((-batch.sampler_logp[lost]).max(), found["rerun"][kept].max()).exp()
    assert row["replaced_max"] == pytest.approx(float(largest), rel=1e-5)


def test_one_row_a_mismatch():
    rows = EXPERIMENTS["mask_ratios"].arms.keys()
    assert list(rows) == FILTERS and chapter.MISMATCH[0] == "same"


@pytest.fixture(scope="module")
def short():
    """The experiment with runs of eleven steps of four prompts."""
    whole = EXPERIMENTS["mask_grammar"]
    (config,) = whole.arms["grammar_none"]
    data = replace(config.data, prompts=4, eval_prompts=8, eval_every=20)
    return replace(whole, arms={"grammar_none": (replace(config, steps=11, data=data),)})


def test_answering_does_not_disturb_the_run(short):
    rows = short.rows("grammar_none", 0)
    assert [row["step"] for row in rows] == [0, 1, 5, 10]
    assert [row["step"] for row in rows if "own_accuracy" in row] == [0, 10]
    plain = Experiment(short.name, "", short.arms)
    log = plain.train("grammar_none", plain.trainer("grammar_none", 0), progress=False)
    of = {row["step"]: row for row in log}
    for row in rows[1:]:
        assert row["reward"] == of[row["step"]]["reward"]
        assert row["grad_norm"] == of[row["step"]]["grad_norm"]


def test_own_answers_are_sampled_as_in_training(short):
    trainer = short.trainer("grammar_none", 0)
    batches, sample = [], trainer._sample
    trainer._sample = lambda *args: batches.append(sample(*args)) or batches[-1]
    own = trainer._sampling(trainer.config.policy)
    row = chapter.answers(trainer, own, problems=3, group_size=4)
    full, own = batches
    assert full.sampling.temperature == 1 and full.kept is None
    assert own.sampling.temperature == 1.5 and len(own.tokens) == 12
    allowed = set(own.sampling.allowed)
    assert set(own.tokens[own.mask].tolist()) <= allowed
    assert 1 <= row["own_distinct"] <= 4 and 0.5 < row["own_mass"] < 1
    with torch.no_grad():
        z = completion_logits(trainer.model, own)[own.mask].double() / 1.5
    p = z[:, sorted(allowed)].softmax(-1)
    assert row["own_entropy"] == pytest.approx(float(-(p * p.log()).sum(-1).mean()), rel=1e-4)
    mass = z.softmax(-1)[:, sorted(allowed)].sum(-1).mean()
    assert row["own_mass"] == pytest.approx(float(mass), rel=1e-4)


def test_own_answers_may_be_sampled_in_another_way(short, monkeypatch):
    seen = []
    monkeypatch.setattr(chapter, "answers", lambda trainer, own: seen.append(own) or {})
    (config,) = short.arms["grammar_none"]
    one = {"grammar_none": (replace(config, steps=1),)}
    replace(short, arms=one).rows("grammar_none", 0)
    replace(short, arms=one, own={"grammar_none": {"top_p": 0.9}}).rows("grammar_none", 0)
    assert [s.temperature for s in seen] == [1.5, 1] and [s.top_p for s in seen] == [1, 0.9]
    assert seen[0].allowed and not seen[1].allowed
