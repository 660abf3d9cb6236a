"""Off-policy sequence masking by hand and as a geometric ratio; the rules of the seed text."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.system import (
    importance_weights,
    off_policy_sequence_mask,
    positional_decay,
    weight_threshold_mask,
)

INF, NAN = math.inf, math.nan


def case(seed, b=6, t=5, gap=0.3):
    """log π_θ, log μ, advantages of both signs and zero, rows of unequal length, one empty."""
    g = torch.Generator().manual_seed(seed)
    mu = -3 * torch.rand(b, t, generator=g, dtype=torch.float64)
    logp = mu + gap * torch.randn(b, t, generator=g, dtype=torch.float64)
    advantages = torch.randint(-1, 2, (b,), generator=g).double()
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    lengths[0] = 0
    return logp, mu, advantages, torch.arange(t) < lengths[:, None]


@pytest.mark.parametrize(
    "advantage, threshold, kept",
    [(-1, 0.01, False), (-1, 0.03, True), (1, 0.01, True), (0, 0.01, True), (-1e-9, 0.01, False)],
)
def test_vector_4_a_sequence_at_a_distance_of_002(advantage, threshold, kept):
    """Mean log(μ/π_θ) = .02 over the three tokens that count; the fourth is far away."""
    mu = torch.full((1, 4), -2.0, dtype=torch.float64)
    logp = mu - torch.tensor([[0.05, -0.02, 0.03, 7.0]])
    mask = torch.tensor([[True, True, True, False]])
    keep = off_policy_sequence_mask(logp, mu, torch.tensor([float(advantage)]), mask, threshold)
    assert keep.dtype == torch.bool and keep.tolist() == [[kept]]


def test_the_policy_that_has_moved_towards_a_mistake_is_not_masked():
    """The hole: r ≫ 1 with Â < 0 is caught neither here nor by PPO's minimum."""
    mu = torch.full((1, 3), -2.0)
    mask = torch.ones(1, 3).bool()
    assert off_policy_sequence_mask(mu + 2, mu, torch.tensor([-1.0]), mask, 1e-4).item()


@given(st.integers(0, 2000), st.floats(-0.2, 0.5))
def test_vector_5_masked_iff_negative_and_the_geometric_ratio_is_below(seed, threshold):
    logp, mu, advantages, mask = case(seed)
    keep = off_policy_sequence_mask(logp, mu, advantages, mask, threshold)
    ratio = importance_weights(logp, mu, mask, level="geometric", cap=INF).values.amax(1)
    dropped = (advantages < 0) & (ratio < math.exp(-threshold)) & mask.any(1)
    close = ((ratio.log() + threshold).abs() < 1e-12) & mask.any(1)
    assert torch.equal(keep[:, 0] | close, ~dropped | close)


def test_on_policy_data_is_kept_also_at_a_threshold_of_zero():
    """The condition is >, not ≥: a distance of exactly 0 is no distance."""
    _, mu, _, mask = case(0)
    assert off_policy_sequence_mask(mu, mu, -torch.ones(6), mask, 0.0).all()


@given(st.integers(0, 2000))
def test_the_more_is_allowed_the_more_is_kept(seed):
    tensors = case(seed)
    counts = [int(off_policy_sequence_mask(*tensors, d).sum()) for d in (-INF, 0, 0.1, 0.5, INF)]
    assert counts == sorted(counts) and counts[-1] == 6
    negative = (tensors[2] < 0) & tensors[3].any(1)
    assert counts[0] == 6 - int(negative.sum())


def test_advantages_of_tokens_follow_the_equation_token_by_token():
    """Eq. 9 has Â_{i,t}: the distance is the sequence's, the sign the token's."""
    mu = torch.full((2, 3), -2.0)
    logp = mu - torch.tensor([[0.5], [0.0]])
    advantages = torch.tensor([[-1.0, 0.0, 2.0], [-1.0, -1.0, -1.0]])
    keep = off_policy_sequence_mask(logp, mu, advantages, torch.ones(2, 3).bool(), 0.1)
    assert keep.tolist() == [[False, True, True], [True, True, True]]


@given(st.integers(0, 500))
def test_rows_padding_and_precision(seed):
    logp, mu, advantages, mask = tensors = case(seed)
    keep = off_policy_sequence_mask(*tensors, 0.05)
    assert keep[0]  # the row without a token
    for garbage in (NAN, INF, -INF):
        dirty = [x.masked_fill(~mask, garbage) for x in (logp, mu)]
        assert torch.equal(off_policy_sequence_mask(*dirty, advantages, mask, 0.05), keep)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(off_policy_sequence_mask(*(x[order] for x in tensors), 0.05), keep[order])
    parts = [off_policy_sequence_mask(*(x[rows] for x in tensors), 0.05) for rows in ([0, 1], [2])]
    assert torch.equal(torch.cat(parts), keep[:3])
    half = [x.bfloat16() for x in (logp, mu)]
    exact = [x.double() for x in half]
    assert torch.equal(
        off_policy_sequence_mask(*half, advantages, mask, 0.05),
        off_policy_sequence_mask(*exact, advantages, mask, 0.05),
    )


def test_multiplying_advantages_keeps_their_shape_and_the_others_gradient():
    """(B, 1) · (B, 1): the (B,) · (B, 1) that makes (B, B) is one slip away."""
    logp, mu, advantages, mask = case(1)
    keep = off_policy_sequence_mask(logp.requires_grad_(), mu, advantages, mask, 0.05)
    assert keep.shape == (6, 1) and not keep.requires_grad
    assert (advantages[:, None] * keep).shape == (6, 1)


A, MASK, SIGN = torch.zeros(2, 3), torch.ones(2, 3).bool(), torch.tensor([1.0, -1.0])


@pytest.mark.parametrize(
    "logp, mu, advantages, mask, threshold, message",
    [
        (A[:, :2], A, SIGN, MASK, 0.1, r"logp has shape \(2, 2\)"),
        (A, A[:1], SIGN, MASK, 0.1, r"sampler_logp has shape \(1, 3\)"),
        (A, A, SIGN[:, None], MASK, 0.1, r"advantages has shape \(2, 1\), expected \(2,\)"),
        (A, A, SIGN[:1], MASK, 0.1, r"advantages has shape \(1,\)"),
        (A, A, SIGN * NAN, MASK, 0.1, "advantages has a NaN"),
        (A, A, SIGN, MASK.float(), 0.1, "mask has dtype torch.float32"),
        (A - INF, A, SIGN, MASK, 0.1, r"logp is -inf at \[0, 0\]"),
        (A, A, SIGN, MASK, NAN, "threshold is NaN"),
    ],
)
def test_bad_input(logp, mu, advantages, mask, threshold, message):
    with pytest.raises(ValueError, match=message):
        off_policy_sequence_mask(logp, mu, advantages, mask, threshold)


def test_the_seeds_filter_keeps_weights_below_its_threshold():
    weights = torch.tensor([[0.2, 0.94, 0.95], [1.0, 3.0, 0.0]], requires_grad=True)
    kept = weight_threshold_mask(weights)
    torch.testing.assert_close(kept, torch.tensor([[0.2, 0.94, 0], [0, 0, 0]]))
    assert not kept.requires_grad
    assert torch.equal(weight_threshold_mask(weights, INF), weights.detach())
    for bad in (-0.1, NAN):
        with pytest.raises(ValueError, match="weights has a negative entry or a NaN"):
            weight_threshold_mask(torch.tensor([bad]))


def test_the_seeds_filter_keeps_four_in_a_hundred_on_policy_tokens():
    """Log-ratio noise of .03: P(w < .95) = 4 %; without noise, none."""
    place = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    weights = (0.03 * torch.special.ndtri(place)).exp()
    share = (weight_threshold_mask(weights) > 0).double().mean()
    assert share.item() == pytest.approx(0.044, abs=0.001)
    assert (weight_threshold_mask(torch.ones(5)) == 0).all()


def test_the_seeds_decay_counts_from_the_first_token_of_a_row():
    mask = torch.tensor([[False, True, True, False, True], [True, True, True, True, True]])
    decay = positional_decay(mask, 0.5)
    expected = torch.tensor([[0, 0, 0.5, 0, 1.0], [0, 0.5, 1, 1.5, 2]]).neg().exp() * mask
    torch.testing.assert_close(decay, expected)
    assert torch.equal(positional_decay(mask, 0), mask.float())
    for rate in (-0.1, INF, NAN):
        with pytest.raises(ValueError, match="rate="):
            positional_decay(mask, rate)
    with pytest.raises(ValueError, match="mask has dtype"):
        positional_decay(mask.float())


def test_the_seeds_decay_cuts_a_long_answer_to_its_first_tokens():
    """The weight is .0067 at position 50 and 4.5e-5 at 100; half the mass is in 7 tokens."""
    decay = positional_decay(torch.ones(1, 1000).bool())[0]
    assert decay[50].item() == pytest.approx(0.0067, abs=5e-5)
    assert decay[100].item() == pytest.approx(4.5e-5, abs=5e-7)
    assert decay[:7].sum() / decay.sum() > 0.5 and decay[:50].sum() / decay.sum() > 0.99
