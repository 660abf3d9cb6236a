"""Chapter 32's warm starts: who moves how far, what an outlier is, what counts as a spike."""

import math
import random

import pytest
import torch

from stablerl_core.experiments.muon import (
    OUTLIER_STEP,
    RECIPE,
    RL,
    SWEEP,
    Warm,
    outlier_rows,
    scrambled,
    spikes,
    sweep_rows,
    warm_start,
)
from stablerl_core.numerics import QKClip
from stablerl_core.rewards import task_by_name
from stablerl_core.training import small_moe
from stablerl_core.training.base import demonstrations


def test_the_cap_makes_every_step_the_rate_and_without_it_steps_are_longer():
    capped = warm_start(Warm("norm_cap", 1e-2), 0, steps=2)
    assert [row["moved"] for row in capped] == pytest.approx([1e-3, 2e-3], rel=1e-3)
    same_size = warm_start(Warm("norm_cap", 1e-2, matrix_rate=0.11), 0, steps=1)
    assert same_size[0]["moved"] == pytest.approx(1.1e-2, rel=1e-3)
    (row,) = warm_start(Warm("muon", 1e-2), 0, steps=1)
    # 0.2 √64 ‖O‖_F at a tenth of the rate; the first gradient has few directions
    assert 1e-3 * 1.6 * 2 < row["moved"] < 1e-3 * 1.6 * 1.2 * 8


def test_a_matrix_rate_leaves_the_embeddings_their_own():
    model, _ = small_moe(RECIPE.preset)
    arm = Warm("muon", 1e-3, matrix_rate=0.5)
    rates = {g["muon"]: g["lr"] for g in arm.make(model, QKClip(model)).param_groups}
    assert rates == {True: 0.5, False: 1e-3}


def test_muon_clip_is_muon_until_a_logit_passes_tau():
    muon = warm_start(Warm("muon", 1e-2), 0, steps=2)
    assert warm_start(Warm("muon_clip", 1e-2), 0, steps=2) == muon
    low = muon[0]["attention_logit_max"] / 2
    clipped = warm_start(Warm("muon_clip", 1e-2, tau=low), 0, steps=2)
    assert clipped[0]["clipped_heads"] > 0 and muon[0]["clipped_heads"] == 0
    assert clipped[1]["attention_logit_max"] < muon[1]["attention_logit_max"]


def test_an_outlier_touches_its_own_step_and_those_after():
    plain, hurt = (
        warm_start(Warm("muon", 1e-2, max_grad_norm=math.inf, outlier=out), 0, OUTLIER_STEP + 1)
        for out in (False, True)
    )
    assert plain[: OUTLIER_STEP - 1] == hurt[: OUTLIER_STEP - 1]
    at = OUTLIER_STEP - 1
    assert hurt[at]["grad_norm"] > 100 * plain[at]["grad_norm"]
    assert hurt[at]["loss"] < 10 and hurt[at + 1]["downhill"] < 0 < plain[at + 1]["downhill"]


def test_a_scrambled_batch_has_the_same_tokens_in_other_places():
    _, tokenizer = small_moe(RECIPE.preset)
    task = task_by_name(RECIPE.task, RECIPE.task_options)
    ids, counted = demonstrations(tokenizer, task, RECIPE, random.Random(0), 0)
    found = scrambled(ids, counted, 0)
    assert torch.equal(found[~counted], ids[~counted]) and not torch.equal(found, ids)
    assert torch.equal(found[counted].sort().values, ids[counted].sort().values)


def test_spikes_by_hand():
    assert spikes([1.0] * 5 + [1.5, 1.0]) == 0
    assert spikes([1.0] * 5 + [1.51, 1.0]) == 1
    assert spikes([9.0, 1.0, 9.0]) == 0


def test_rows_of_five_steps_and_of_one(monkeypatch):
    made = [
        {"step": i, "loss": float(i), "grad_norm": 1.0, "moved": 1.0, "downhill": 0.5}
        | {"attention_logit_max": -float(i), "clipped_heads": i % 2}
        for i in range(1, 11)
    ]
    monkeypatch.setattr("stablerl_core.experiments.muon.warm_start", lambda arm, seed: made)
    first, second = sweep_rows(Warm("muon", 1.0), 0)
    assert (first["step"], first["loss"], first["attention_logit_max"]) == (5, 3.0, -1.0)
    assert second["step"] == 10 and second["clipped_heads"] == 0.4 and second["spikes"] == 3
    rows = outlier_rows(Warm("muon", 1.0), 0)
    assert len(rows) == 10 and set(rows[0]) == {"step", "loss", "grad_norm", "moved", "downhill"}


def test_arms_are_what_their_names_say():
    for name, arm in SWEEP.arms.items():
        given = arm.args[0]
        assert name.startswith(f"{given.optimizer} ") and given.max_grad_norm == 1
        assert name.split()[1] in ("same", f"{given.rate:g},", f"{given.rate:g}")
    for name, (phase,) in RL.arms.items():
        optimizer, rate = name.split()
        assert phase.numerics.learning_rate == float(rate)
        assert phase.numerics.optimizer == {"norm_cap": "update_norm_cap"}.get(optimizer, optimizer)
