"""Chapter 33's hot starts: rows that are packed, what the spy sees, and which bound does what."""

import math

import pytest
import torch

from stablerl_core.experiments.qk_clip import (
    HOT,
    QK_CLIP,
    Hot,
    Spy,
    _optimizer,
    _summary,
    hot_start,
    packed,
)
from stablerl_core.training import small_moe


def test_packed_rows_hold_the_same_tokens_one_after_the_other():
    ids = torch.tensor([[5, 6, 0, 0], [7, 8, 9, 0], [1, 2, 3, 4], [3, 0, 0, 0]])
    counted = torch.tensor([[0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]).bool()
    both, marks = packed(ids, counted, 2, pad=0)
    assert both.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 3]]
    assert marks.int().tolist() == [[0, 1, 0, 1, 1], [0, 0, 1, 1, 1]]
    alone, marks = packed(ids, counted, 1, pad=0)
    assert torch.equal(alone, ids) and torch.equal(marks, counted)


def test_the_spy_sees_what_a_query_may_see_and_no_padding():
    scores = torch.tensor([[[[0.0, 99.0, 99.0], [50.0, 50.0, 99.0], [0.0, 0.0, 0.0]]]])
    spy = Spy(lambda x: x.clamp(-30, 30), 30.0)
    assert torch.equal(spy(scores), scores.clamp(-30, 30)) and not spy.entropies
    spy.look_at(torch.tensor([[True, True, False]]))
    spy(scores)
    # the first query has one key to look at, the second two that are alike; the third is padding
    found = spy.found()
    assert found["attention_entropy"] == pytest.approx(math.log(2) / 2)
    assert found["beyond"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("preset", ["mixtral-cpu", "deepseek-v3-cpu"])
def test_queries_and_keys_alone_are_hot(preset):
    model, _ = small_moe(preset)
    optimizer, rates = _optimizer(Hot(preset=preset), model)
    hot, others = ({id(p) for p in g["params"]} for g in optimizer.param_groups)
    named = dict(model.named_parameters())
    assert rates == [0.1, 0.01] and len(hot) == 4 and len(hot) + len(others) == len(named)
    assert all((id(p) in hot) == name.endswith(HOT) for name, p in named.items())


def test_bounds_of_scores_leave_the_logits_and_those_of_weights_do_not():
    low = 1e-3  # so low that every bound acts from the first step
    rows = {
        bound: hot_start(Hot(bound, steps=2, limit=low), 0, every=1)
        for bound in ("none", "clamp", "soft_cap", "qk_clip", "qk_norm")
    }
    first = {bound: found[0]["attention_logit_max"] for bound, found in rows.items()}
    assert first["none"] == first["clamp"] == first["soft_cap"] == first["qk_clip"] > low
    assert first["qk_norm"] <= low * 1.001
    second = {bound: found[1]["attention_logit_max"] for bound, found in rows.items()}
    assert second["qk_clip"] < second["none"] and second["clamp"] > 10 * low
    assert rows["qk_clip"][0]["clipped_heads"] == 8 and rows["clamp"][0]["clipped_heads"] == 0
    assert min(rows[bound][0]["beyond"] for bound in ("none", "clamp")) > 0.5
    # a clamp near 0 leaves attention even and the queries nearly without gradient
    assert rows["clamp"][0]["query_grad"] < 0.2 * rows["none"][0]["query_grad"]
    assert rows["clamp"][0]["attention_entropy"] > rows["none"][0]["attention_entropy"]


def test_a_summary_takes_the_largest_of_what_is_a_maximum():
    row = {"loss": 1.0, "attention_logit_max": 1.0, "grad_peak": 5.0, "clipped_heads": 0}
    later = {"loss": 3.0, "attention_logit_max": 9.0, "grad_peak": 2.0, "clipped_heads": 8}
    found = _summary([row, later])
    assert found == {"loss": 2, "attention_logit_max": 9, "grad_peak": 5, "clipped_heads": 4}


def test_a_cooled_run_is_the_hot_one_until_it_cools():
    hot = hot_start(Hot(steps=3), 0, every=1)
    cooled = hot_start(Hot(steps=3, hot=1), 0, every=1)
    assert cooled[:2] == hot[:2] and cooled[2]["loss"] != hot[2]["loss"]
    assert QK_CLIP.arms["cooled"].args[0] == Hot(steps=60, hot=20)
