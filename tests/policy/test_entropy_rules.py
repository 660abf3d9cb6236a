"""Sampled entropy, Clip-Cov, KL-Cov and the prediction of ΔH: masks, types, choice, refusals.

The prediction is compared with measured entropies in tests/exact/test_enumerated_entropy.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.policy import clip_cov, entropy_change, kl_cov, sampled_entropy

INF, NAN = math.inf, math.nan


def batch(seed=0, rows=6, columns=20):
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    advantages = 2 * torch.randn(rows, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([columns, 1, 0, columns - 5, columns, 9])[:rows]
    return advantages, logp, torch.arange(columns) < lengths[:, None]


def covariances(advantages, logp, mask):
    """The terms of the counted tokens as {(row, column): value}, one by one."""
    at = [tuple(x) for x in mask.nonzero().tolist()]
    mean_a = sum(advantages[i].item() for i, _ in at) / len(at)
    mean_l = sum(logp[i, t].item() for i, t in at) / len(at)
    return {(i, t): (advantages[i].item() - mean_a) * (logp[i, t].item() - mean_l) for i, t in at}


def zeroed(before, after, mask):
    return {tuple(x) for x in (mask & (before[:, None] != 0) & (after == 0)).nonzero().tolist()}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_sampled_entropy_is_the_mean_surprise():
    logp = torch.tensor([[-1.0, -2.0, NAN], [-6.0, INF, NAN]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    assert sampled_entropy(logp, mask).item() == 3.0
    assert sampled_entropy(logp, torch.zeros_like(mask)).item() == 0.0
    assert not sampled_entropy(logp.requires_grad_(), mask).requires_grad


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sampled_entropy_is_summed_in_float32(dtype):
    logp = (-torch.rand(1, 4000, generator=generator())).to(dtype)
    mask = torch.ones_like(logp, dtype=torch.bool)
    actual = sampled_entropy(logp, mask)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(actual.double(), sampled_entropy(logp.double(), mask))


def test_clip_cov_chooses_among_the_tokens_between_the_bounds():
    advantages, logp, mask = batch()
    terms = covariances(advantages, logp, mask)
    between = {at for at, value in terms.items() if 0.5 < value < 2.0}
    beyond = {at for at, value in terms.items() if value >= 2.0}
    assert len(between) > 6 and beyond  # else this test shows nothing
    options = dict(low=0.5, high=2.0)
    seen = set()
    for seed in range(60):
        after = clip_cov(advantages, logp, mask, ratio=0.05, generator=generator(seed), **options)
        chosen = zeroed(advantages, after, mask)
        assert len(chosen) == int(0.05 * mask.sum()) == 3 and chosen <= between
        seen |= chosen
    assert seen == between  # none is out of reach of the draw
    everyone = clip_cov(advantages, logp, mask, ratio=1.0, generator=generator(), **options)
    assert zeroed(advantages, everyone, mask) == between


def test_clip_cov_leaves_the_other_advantages_and_the_inputs_alone():
    advantages, logp, mask = batch()
    copies = advantages.clone(), logp.clone(), mask.clone()
    wide = advantages[:, None].expand(logp.shape).clone()
    kept = wide.clone()
    after = clip_cov(wide, logp, mask, ratio=0.05, low=0.5, high=2.0, generator=generator())
    assert torch.equal(wide, kept)
    assert torch.equal(
        after,
        clip_cov(advantages, logp, mask, ratio=0.05, low=0.5, high=2.0, generator=generator()),
    )
    untouched = after != 0
    assert torch.equal(after[untouched], wide[untouched]) and untouched.sum() == mask.sum() - 3
    assert not after[~mask].any()
    assert all(torch.equal(x, y) for x, y in zip(copies, (advantages, logp, mask), strict=True))
    assert not clip_cov(advantages.requires_grad_(), logp, mask).requires_grad


def test_clip_cov_with_its_defaults_takes_one_token_of_a_small_batch():
    advantages, logp, mask = batch()
    terms = covariances(advantages, logp, mask)
    chosen = zeroed(advantages, clip_cov(advantages, logp, mask, generator=generator()), mask)
    assert len(chosen) == 1 and 1 < terms[chosen.pop()] < 5


def test_clip_cov_does_not_choose_a_clipped_token_again():
    """Their covariance still counts in the means; only the choice skips them."""
    advantages, logp, mask = batch()
    options = dict(ratio=1.0, low=0.5, high=2.0)
    everyone = zeroed(advantages, clip_cov(advantages, logp, mask, **options), mask)
    clipped = torch.zeros_like(mask)
    gone = sorted(everyone)[:4]
    for at in gone:
        clipped[at] = True
    rest = zeroed(advantages, clip_cov(advantages, logp, mask, clipped=clipped, **options), mask)
    assert rest == everyone - set(gone)


def test_no_candidate_no_change():
    advantages, logp, mask = batch()
    after = clip_cov(advantages, logp, mask, low=100.0, high=200.0)
    assert torch.equal(after, torch.where(mask, advantages[:, None], 0.0))


def test_kl_cov_takes_the_largest_terms():
    advantages, logp, mask = batch()
    terms = covariances(advantages, logp, mask)
    ranked = sorted(terms, key=terms.get, reverse=True)
    for ratio, count in ((0.2, int(0.2 * mask.sum())), (1.0, int(mask.sum())), (2e-4, 1)):
        chosen = kl_cov(advantages, logp, mask, ratio=ratio)
        assert {tuple(x) for x in chosen.nonzero().tolist()} == set(ranked[:count])
    assert kl_cov(advantages, logp, mask).sum() == 1


@pytest.mark.parametrize("garbage", [NAN, INF, -INF])
def test_what_does_not_count_is_not_read(garbage):
    advantages, logp, mask = batch()
    wide = advantages[:, None].expand(logp.shape)
    dirty = wide.masked_fill(~mask, garbage), logp.masked_fill(~mask, garbage), mask
    options = dict(ratio=0.05, low=0.5, high=2.0)
    assert torch.equal(
        clip_cov(*dirty, generator=generator(), **options),
        clip_cov(wide, logp, mask, generator=generator(), **options),
    )
    assert torch.equal(kl_cov(*dirty, ratio=0.2), kl_cov(wide, logp, mask, ratio=0.2))
    assert torch.equal(sampled_entropy(dirty[1], mask), sampled_entropy(logp, mask))


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.permutations(range(6)))
def test_padding_and_order_change_nothing(seed, after, order):
    """The choice by rank is that of the batch whatever the layout; all candidates likewise."""
    advantages, logp, mask = batch(seed)
    padded = [torch.nn.functional.pad(x, (0, after)) for x in (logp, mask)]
    options = dict(ratio=1.0, low=0.5, high=2.0)
    for function, given_options in ((kl_cov, dict(ratio=0.2)), (clip_cov, options)):
        expected = function(advantages, logp, mask, **given_options)
        assert torch.equal(function(advantages, *padded, **given_options)[:, :20], expected)
        moved = function(advantages[order], logp[order], mask[order], **given_options)
        assert torch.equal(moved, expected[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_smaller_types_are_computed_in_float32(dtype):
    advantages, logp, mask = batch()
    small = advantages.to(dtype), logp.to(dtype), mask
    wide = small[0].double(), small[1].double(), mask
    options = dict(ratio=1.0, low=0.5, high=2.0)
    assert clip_cov(*small).dtype == torch.float32
    assert torch.equal(clip_cov(*small, **options).double(), clip_cov(*wide, **options))
    assert torch.equal(kl_cov(*small, ratio=0.2), kl_cov(*wide, ratio=0.2))


def test_nothing_and_one_token_that_count():
    advantages, logp, mask = batch()
    for shape in ((6, 20), (6, 0), (0, 5)):
        none = torch.zeros(shape, dtype=torch.bool)
        arguments = torch.ones(shape[0]), torch.zeros(shape), none
        assert not clip_cov(*arguments).any() and not kl_cov(*arguments).any()
    one = torch.zeros_like(mask)
    one[3, 2] = True  # its covariance with itself is 0: no outlier, but the largest of all
    assert clip_cov(advantages, logp, one)[3, 2] == advantages[3]
    assert kl_cov(advantages, logp, one).nonzero().tolist() == [[3, 2]]


def test_entropy_change_shapes_types_and_absent_tokens():
    logits = torch.tensor([[[0.3, -INF, 1.0], [2.0, 0.0, -1.0]]])
    tokens, advantages = torch.tensor([[2, 0]]), torch.tensor([[1.0, -2.0]])
    for gradient in ("natural", "softmax"):
        options = dict(step_size=0.1, gradient=gradient)
        value = entropy_change(logits.requires_grad_(), tokens, advantages, **options)
        assert value.shape == (1, 2) and value.dtype == torch.float32 and not value.requires_grad
        small = entropy_change(
            logits[:, :1, [0, 2]].double(), torch.tensor([[1]]), advantages[:, :1], **options
        )
        torch.testing.assert_close(value[:, :1].double(), small, rtol=1e-5, atol=1e-7)
        half = entropy_change(logits.half(), tokens, advantages.half(), **options)
        assert half.dtype == torch.float32
        torch.testing.assert_close(half, value, rtol=1e-2, atol=1e-3)


def test_entropy_change_with_each_clip_bound_alone():
    """Without a bound that side is open; an advantage of 0 moves nothing."""
    logits = torch.zeros(5, 2).double()
    tokens = torch.zeros(5, dtype=torch.long)
    logits[:, 0] = 1.0
    logp = torch.log_softmax(logits, -1)[:, 0]
    old_logp = logp - torch.tensor([0.5, 0.5, -0.5, -0.5, 0.5]).double()
    advantages = torch.tensor([1.0, -1.0, 1.0, -1.0, 0.0]).double()

    def moved(**clip):
        change = entropy_change(
            logits, tokens, advantages, step_size=1.0, old_logp=old_logp, **clip
        )
        return (change != 0).tolist()

    assert moved() == [True, True, True, True, False]
    assert moved(clip_high=0.2) == [False, True, True, True, False]
    assert moved(clip_low=0.2) == [True, True, True, False, False]
    assert moved(clip_low=0.2, clip_high=0.7) == [True, True, True, False, False]


two, ones = torch.full((2, 3), -1.0), torch.ones(2)
counted = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize("function", [clip_cov, kl_cov])
@pytest.mark.parametrize(
    "change, message",
    [
        (dict(advantages=torch.ones(3)), r"advantages has shape \(3,\), expected \(2, 3\)"),
        (dict(advantages=torch.ones(2, 1)), r"advantages has shape \(2, 1\)"),
        (dict(logp=two[0]), r"logp has shape \(3,\), expected \(B, T\)"),
        (dict(mask=counted[:, :1]), r"mask has shape \(2, 1\)"),
        (dict(mask=counted.long()), "mask has dtype torch.int64"),
        (dict(logp=two * NAN), r"logp is nan at \[0, 0\]"),
        (dict(advantages=ones * INF), r"advantages is inf at \[0, 0\]"),
        (dict(ratio=0.0), r"ratio is 0.0, expected a share in \(0, 1\]"),
        (dict(ratio=1.5), "ratio is 1.5"),
    ],
)
def test_bad_input_is_named(function, change, message):
    with pytest.raises(ValueError, match=message):
        function(**(dict(advantages=ones, logp=two, mask=counted) | change))


def test_more_bad_input_is_named():
    with pytest.raises(ValueError, match="low is 3.0 and high 2.0"):
        clip_cov(ones, two, counted, low=3.0, high=2.0)
    with pytest.raises(ValueError, match=r"clipped has shape \(2, 1\)"):
        clip_cov(ones, two, counted, clipped=counted[:, :1])
    with pytest.raises(ValueError, match="clipped has dtype torch.int64"):
        clip_cov(ones, two, counted, clipped=counted.long())
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\)"):
        sampled_entropy(two, counted[:, :1])
    with pytest.raises(ValueError, match=r"logp is nan at \[0, 0\]"):
        sampled_entropy(two * NAN, counted)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(logits=torch.zeros(3, 4)), r"logits has shape \(3, 4\), expected \(2, 'V'\)"),
        (dict(logits=torch.zeros(())), r"logits has shape \(\)"),
        (dict(logits=torch.full((2, 4), -INF)), "logits has shape .* 2 rows"),
        (dict(advantages=torch.zeros(2, 1)), r"advantages has shape \(2, 1\), expected \(2,\)"),
        (dict(old_logp=torch.zeros(1)), r"old_logp has shape \(1,\), expected \(2,\)"),
        (dict(advantages=torch.tensor([NAN, 0])), r"advantages is nan at \[0\]"),
        (dict(old_logp=torch.tensor([0, INF])), r"old_logp is inf at \[1\]"),
        (dict(clip_low=0.2), "old_logp is missing"),
        (dict(clip_high=0.2), "old_logp is missing"),
        (dict(gradient="adam"), "gradient is 'adam', expected 'natural' or 'softmax'"),
        (dict(logits=torch.tensor([[0.0, -INF], [-INF, 0.0]])), "log π of tokens is -inf at"),
    ],
)
def test_entropy_change_names_bad_input(change, message):
    given = dict(logits=torch.zeros(2, 4), tokens=torch.tensor([0, 0]), advantages=torch.ones(2))
    with pytest.raises(ValueError, match=message):
        entropy_change(**(given | change), step_size=0.1)
