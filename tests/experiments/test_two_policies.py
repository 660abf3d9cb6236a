"""Six ways that must agree up to rounding, and measures checked on differences made by hand."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.experiments import two_policies
from stablerl_core.experiments.two_policies import (
    WAYS,
    against_bound,
    by_layer,
    engine,
    in_chunks,
    plain_kernels,
    routed,
    seen,
    split,
    whole,
)
from stablerl_core.training import PRESETS, rollout, small_moe
from stablerl_core.training.rollout import completion_logp, encode_prompts

FAMILIES = [preset for preset in PRESETS if preset.endswith("-cpu")]


def drawn(model, tokenizer, prompts=("S31=", "S314159=", "S2="), seed=0):
    """A rollout with prompts and completions of different lengths."""
    ids, mask = encode_prompts(tokenizer, prompts, "cpu")
    batch = rollout(
        model,
        ids,
        mask,
        group_size=3,
        max_new_tokens=7,
        eos_token_id=-1,
        generator=torch.Generator().manual_seed(seed),
    )
    lengths = torch.tensor([7, 1, 4, 2, 7, 6, 3, 5, 7])
    return replace(batch, mask=torch.arange(7) < lengths[:, None])


@pytest.fixture(scope="module")
def mixtral():
    model, tokenizer = small_moe("mixtral-cpu", seed=3)
    with torch.no_grad():  # sharper than at random, so that errors show
        model.lm_head.weight *= 20
    return model, drawn(model, tokenizer)


@pytest.mark.parametrize("preset", FAMILIES)
@torch.no_grad()
def test_the_ways_agree_with_the_trainers_own_log_probs(preset):
    model, tokenizer = small_moe(preset, seed=1)
    batch = drawn(model, tokenizer)
    own = completion_logp(model, batch)[batch.mask]
    for name, way in {**WAYS, "whole": whole}.items():
        scored = way(model, batch)
        assert scored.shape == batch.mask.shape and scored.dtype == torch.float32
        torch.testing.assert_close(scored[batch.mask], own, rtol=0, atol=2e-5, msg=name)


def test_padding_moves_to_the_left_and_takes_no_token_along(mixtral):
    _, batch = mixtral
    ids, known, counted = two_policies._columns(batch, left=True)
    assert known[:, -1].all() and not (known[:, :-1] & ~known[:, 1:]).any()
    assert ids[counted].tolist() == batch.tokens[batch.mask].tolist()
    assert ids[known & ~counted].tolist() == batch.prompt[batch.prompt_mask].tolist()


@pytest.mark.parametrize("width", [1, 3, 100])
@torch.no_grad()
def test_chunks_of_any_width_agree(mixtral, width):
    model, batch = mixtral
    scored, once = in_chunks(model, batch, width), whole(model, batch)
    torch.testing.assert_close(scored[batch.mask], once[batch.mask], rtol=0, atol=1e-4)


@torch.no_grad()
def test_a_forgotten_mask_shows_in_rows_with_padding_before_them(mixtral):
    model, batch = mixtral
    gap = (whole(model, batch, left=True, masked=False) - whole(model, batch)).abs()
    padded = batch.prompt_mask.sum(1) + batch.mask.sum(1)
    full = padded == batch.prompt.shape[1] + batch.tokens.shape[1]
    assert full.any() and not full.all()
    assert gap[full][batch.mask[full]].max() < 1e-4
    assert all(gap[row][batch.mask[row]].max() > 1e-3 for row in (~full).nonzero()[:, 0])


@torch.no_grad()
def test_the_ways_see_another_model(mixtral):
    model, batch = mixtral
    other = engine(model, "int4")
    for name, way in WAYS.items():
        if name != "cache":  # that one is what was logged
            gap = (way(other, batch) - way(model, batch))[batch.mask].abs().mean()
            assert gap > 1e-3, name


def test_other_kernels_are_other_kernels_and_are_put_back(mixtral):
    model, _ = mixtral
    names = model.config._attn_implementation, model.get_experts_implementation()
    with pytest.raises(RuntimeError, match="inside"), plain_kernels(model):
        assert model.config._attn_implementation == "eager"
        assert set(model.get_experts_implementation().values()) == {"eager"}
        raise RuntimeError("inside")
    assert (model.config._attn_implementation, model.get_experts_implementation()) == names


@torch.no_grad()
def test_engines_hold_what_they_say_and_leave_the_model_alone(mixtral):
    model, batch = mixtral
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float16", torch.float16)):
        held = engine(model, name)
        assert {p.dtype for p in held.parameters()} == {dtype}
        assert held(batch.prompt).logits.dtype == dtype
    head = engine(model, "bfloat16_head")
    assert head.lm_head.weight.dtype == torch.float32
    assert head.model.embed_tokens.weight.dtype == torch.bfloat16
    assert head(batch.prompt).logits.dtype == torch.float32
    rounded = engine(model, "bfloat16_weights").lm_head.weight
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, before["lm_head.weight"].bfloat16().float())
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    with pytest.raises(ValueError, match="float8"):
        engine(model, "float8")


def test_what_a_clip_sees(mixtral):
    _, batch = mixtral
    delta = torch.zeros(batch.mask.shape)
    rows, columns = batch.mask.nonzero(as_tuple=True)
    for i, value in enumerate((0.18, 0.19, math.log(0.79), -0.1)):  # ratios 1.197 1.21 .79 .90
        delta[rows[i], columns[i]] = value
    found, n = seen(batch.sampler_logp + delta, batch), len(rows)
    assert found["outside"] == pytest.approx(2 / n)
    assert found["at_least_0.19"] == pytest.approx(2 / n, abs=1.01 / n)
    rare = batch.sampler_logp[batch.mask].exp() <= 0.3
    assert found["rare_tokens"] == pytest.approx(float(rare.double().mean()))
    sizes = delta[batch.mask].abs()
    assert found["rare_gap"] == pytest.approx(float(sizes[rare].sum() / sizes.sum()), rel=1e-4)


@given(st.integers(0, 10_000), st.floats(1e-6, 3))
@settings(max_examples=50, deadline=None)
def test_no_error_of_the_logits_breaks_the_bound(seed, eps):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(20, 7, generator=generator, dtype=torch.float64)
    error = eps * (2 * torch.rand(20, 7, generator=generator, dtype=torch.float64) - 1)
    tokens = torch.randint(7, (20,), generator=generator)
    found = against_bound(logits + error + 5.0, logits, tokens)
    assert found["bound_broken"] == 0 and 0 < found["bound_used"] < 1
    without_the_shift = against_bound(logits + error, logits, tokens)["bound_used"]
    assert found["bound_used"] == pytest.approx(without_the_shift, rel=1e-6)


def test_the_worst_error_reaches_the_bound_and_a_wrong_one_breaks_it():
    logits = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    tokens = torch.tensor([1])
    worst = logits + 0.4 * torch.tensor([[1.0, -1.0, 1.0]], dtype=torch.float64)
    assert against_bound(worst, logits, tokens)["bound_used"] == pytest.approx(1)
    swapped = against_bound(logits, worst, tokens)  # p is that of the sampler, not the trainer
    assert swapped["bound_used"] < 1
    same = against_bound(logits, logits, tokens)
    assert same == {"bound_used": 0.0, "bound_broken": 0.0}


@torch.no_grad()
def test_the_layer_where_a_difference_begins(mixtral):
    model, batch = mixtral
    other = copy.deepcopy(model)
    other.model.layers[1].self_attn.o_proj.weight *= 1.1
    found = by_layer(model, other, batch)
    assert found["hidden_0"] == found["hidden_1"] == 0
    assert found["hidden_2"] > 1e-3 and found["logits"] > 1e-3
    doubled = copy.deepcopy(model)
    doubled.lm_head.weight *= 2
    assert by_layer(model, doubled, batch)["logits"] == pytest.approx(1, rel=1e-6)
    assert by_layer(model, doubled, batch)["hidden_2"] == 0
    shifted = copy.deepcopy(model)  # every logit by the same: the same distribution
    shifted.lm_head.weight += torch.randn(64, generator=torch.Generator().manual_seed(0))
    assert by_layer(model, shifted, batch)["logits"] < 1e-5


@torch.no_grad()
def test_a_flip_belongs_to_the_token_that_was_predicted_from_it(mixtral):
    model, batch = copy.deepcopy(mixtral[0]), mixtral[1]
    for layer in model.model.layers:  # without attention a column depends on its own token alone
        layer.self_attn.o_proj.weight.zero_()
    other, token = copy.deepcopy(model), int(batch.tokens[0, 0])
    generator = torch.Generator().manual_seed(0)
    other.model.embed_tokens.weight[token] = torch.randn(64, generator=generator)
    found = routed(model, other, batch)
    previous = torch.cat([batch.prompt[:, -1:], batch.tokens[:, :-1]], 1)
    assert found["flipped"] == pytest.approx(float((previous == token)[batch.mask].double().mean()))
    assert found["flipped"] > 0 and found["gap_flipped"] > 1e-2 and found["gap_kept"] < 1e-5


@torch.no_grad()
def test_no_flip_between_an_engine_and_itself(mixtral):
    model, batch = mixtral
    found = routed(model, model, batch)
    assert found["flipped"] == 0 and found["agree_0"] == found["agree_1"] == 1
    assert "gap_flipped" not in found and found["gap_kept"] == 0
    assert found["max_replayed"] < 1e-5


@torch.no_grad()
def test_replay_undoes_what_only_the_choice_of_experts_did(mixtral):
    model, batch = mixtral
    other = copy.deepcopy(model)
    for layer in other.model.layers:
        layer.mlp.gate.weight += 0.01 * torch.randn(
            layer.mlp.gate.weight.shape, generator=torch.Generator().manual_seed(0)
        )
    found = routed(model, other, batch)
    assert found["flipped"] > 0
    assert found["gap_replayed"] < found["gap_kept"] * (1 - found["flipped"]) + (
        found["gap_flipped"] * found["flipped"]
    )


def test_the_two_factors():
    stale = torch.tensor([0.0, 0.1, 0.3, 0.1], dtype=torch.float64)
    mismatch = torch.tensor([0.3, 0.1, -0.3, 0.0], dtype=torch.float64)
    found = two_policies._factors(stale, mismatch, stale + mismatch)
    assert found["outside_stale"] == 0.25 and found["outside_mismatch"] == 0.5
    assert found["outside_total"] == 0.5  # 0.3 and 0.2: ratios 1.35 and 1.22
    assert found["unseen"] == 0.5
    assert found["stale"] == pytest.approx(0.125) and found["total"] == pytest.approx(0.15)


def test_without_mismatch_nothing_is_unseen():
    (row,) = split(0, "float32", counts=(2,))
    assert row["step"] == 2 and row["mismatch"] < 1e-6 and row["unseen"] < 0.01
    assert row["stale"] > 0.01 and row["total"] == pytest.approx(row["stale"], rel=1e-3)


def test_arms():
    precisions = {arm.keywords["precision"] for arm in two_policies.WEIGHTS.arms.values()}
    assert precisions == set(two_policies.WEIGHTS.arms) == set(two_policies.PRECISIONS)
    presets = {arm.keywords["preset"] for arm in two_policies.OTHERS.arms.values()}
    assert presets == set(FAMILIES)
