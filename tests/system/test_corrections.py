"""Importance weights: values by hand, what is measured before the cap, properties, refusals.

Expected gradients are in tests/exact/test_enumerated_corrections.py.
"""

import math
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.system import (
    CORRECTIONS,
    catastrophic_veto,
    geometric_rejection,
    importance_weights,
    minimum_prefix_weights,
    mismatch_report,
    prefix_weights,
)

INF, NAN = math.inf, math.nan
OPTIONS = {
    **CORRECTIONS,
    "geometric": dict(level="geometric", cap=1.1, floor=0.9),
    "none": dict(cap=INF),
}
WEIGHTS = {
    **{name: (importance_weights, options) for name, options in OPTIONS.items()},
    "prefix": (prefix_weights, dict(cap=3.0)),
    "minimum prefix": (minimum_prefix_weights, dict(cap=3.0)),
}
KEEPS = {
    "geometric rejection": (geometric_rejection, dict(low=0.9, high=1.2)),
    "veto": (catastrophic_veto, dict(threshold=0.5)),
}
each_weight = pytest.mark.parametrize("name", WEIGHTS)
each_keep = pytest.mark.parametrize("name", KEEPS)


def run(name, *tensors, **more):
    function, options = (WEIGHTS | KEEPS)[name]
    result = function(*tensors, **options, **more)
    return result if torch.is_tensor(result) else result.values


def random_case(seed, b=5, t=7, gap=0.6, dtype=torch.float64):
    """π_old and μ with rows of unequal length, the last of them without a token."""
    g = torch.Generator().manual_seed(seed)
    mu = -3 * torch.rand(b, t, generator=g, dtype=torch.float64)
    old = mu + gap * torch.randn(b, t, generator=g, dtype=torch.float64)
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    lengths[-1] = 0
    return old.to(dtype), mu.to(dtype), torch.arange(t) < lengths[:, None]


def ratios(*rows):
    """Log-probabilities whose ratios are these; μ is 1/4 everywhere."""
    rho = torch.tensor(rows, dtype=torch.float64)
    mu = torch.full_like(rho, 0.25).log()
    return rho.log() + mu, mu


def close(actual, *rows):
    expected = torch.tensor(rows, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)


HALF = torch.tensor([[True, True, True], [True, True, False]])


def test_levels_by_hand():
    """Products 6 and 1/8; the last ratio of the second row does not count."""
    old, mu = ratios([2, 1, 3], [0.5, 0.25, 100])
    close(importance_weights(old, mu, HALF, cap=INF).values, [2, 1, 3], [0.5, 0.25, 0])
    sequence = importance_weights(old, mu, HALF, level="sequence", cap=INF)
    close(sequence.values, [6, 6, 6], [1 / 8, 1 / 8, 0])
    geometric = importance_weights(old, mu, HALF, level="geometric", cap=INF)
    third, root = 6 ** (1 / 3), 8**-0.5
    close(geometric.values, [third] * 3, [root, root, 0])
    close(prefix_weights(old, mu, HALF).values, [2, 2, 6], [0.5, 0.125, 0])


def test_modes_by_hand():
    old, mu = ratios([2, 1, 3], [0.5, 0.25, 100])
    for options, expected in [
        (dict(cap=2.0), ([2, 1, 2], [0.5, 0.25, 0])),
        (dict(cap=2.0, floor=0.4), ([2, 1, 2], [0.5, 0.4, 0])),
        (dict(mode="mask", cap=2.5), ([2, 1, 0], [0.5, 0.25, 0])),
        (dict(mode="mask", cap=2.5, floor=0.4), ([2, 1, 0], [0.5, 0, 0])),
    ]:
        close(importance_weights(old, mu, HALF, **options).values, *expected)


def test_diagnostics_are_of_the_ratios_before_the_cap():
    old, mu = ratios([2, 1, 3], [0.5, 0.25, 100])
    advantages = torch.tensor([1.0, -1.0])
    for mode, after in (("truncate", 2 + 1 + 2.5 + 0.5 + 0.4), ("mask", 2 + 1 + 0.5)):
        seen = importance_weights(
            old, mu, HALF, mode=mode, cap=2.5, floor=0.4, advantages=advantages
        )
        assert seen.units == 5
        assert seen.mean == pytest.approx(6.75 / 5)
        assert (seen.minimum, seen.maximum) == pytest.approx((0.25, 3))
        assert seen.ess == pytest.approx(6.75**2 / (5 * (4 + 1 + 9 + 0.25 + 0.0625)))
        assert (seen.above_cap, seen.below_floor) == pytest.approx((1 / 5, 1 / 5))
        assert seen.mass_kept == pytest.approx(after / 6.75)
        masked = (2 / 5, 1 / 3, 1 / 2) if mode == "mask" else (0, 0, 0)
        assert (seen.masked, seen.masked_positive, seen.masked_negative) == pytest.approx(masked)


def test_sequence_statistics_count_sequences_and_the_masked_share_counts_tokens():
    old, mu = ratios([2, 1, 3], [0.5, 0.25, 100], [1, 1, 1])
    mask = torch.cat([HALF, torch.zeros(1, 3).bool()])
    seen = importance_weights(
        old, mu, mask, level="sequence", mode="mask", cap=2.0, advantages=torch.tensor([1, -1, 1.0])
    )
    assert seen.units == 2 and seen.mean == pytest.approx((6 + 1 / 8) / 2)
    assert (seen.above_cap, seen.masked) == pytest.approx((1 / 2, 3 / 5))
    assert (seen.masked_positive, seen.masked_negative) == (1, 0)
    assert seen.mass_kept == pytest.approx(0.125 / 6.125)


def test_without_advantages_the_shares_by_sign_are_absent():
    seen = importance_weights(*random_case(0), cap=2.0)
    assert seen.masked_positive is None and seen.masked_negative is None


def test_tokens_without_a_sign_are_in_neither_share():
    old, mu = ratios([9, 1, 9], [9, 1, 1])
    advantages = torch.tensor([[1.0, 1, 0], [-1, -1, 1]])
    seen = importance_weights(old, mu, HALF, mode="mask", cap=2.0, advantages=advantages)
    assert (seen.masked, seen.masked_positive, seen.masked_negative) == (3 / 5, 1 / 2, 1 / 2)


def test_minimum_prefix_by_hand():
    """min of nothing is 1; a small ratio early keeps the rest of its row small."""
    old, mu = ratios([0.1, 2, 3, 0.5, 2], [3, 2, 4, 5, 1])
    mask = torch.ones(2, 5).bool()
    close(
        minimum_prefix_weights(old, mu, mask).values,
        [0.1, 0.2, 0.3, 0.05, 0.2],
        [3, 6, 8, 10, 2],
    )
    holes = torch.tensor([[False, True, False, True, True], [False, False, False, False, True]])
    close(minimum_prefix_weights(old, mu, holes).values, [0, 2, 0, 1, 1], [0, 0, 0, 0, 1])
    close(prefix_weights(old, mu, holes).values, [0, 2, 0, 1, 2], [0, 0, 0, 0, 1])
    capped = minimum_prefix_weights(old, mu, mask, cap=7.0)
    close(capped.values[1:], [3, 6, 7, 7, 2])
    assert capped.maximum == pytest.approx(10)


@settings(max_examples=50)
@given(st.integers(0, 1000))
def test_minimum_prefix_weights_stay_between_the_smallest_and_largest_ratio(seed):
    """One ratio times one ratio: min ρ² ≤ w ≤ max(ρ, ρ²), where the product has no bound."""
    old, mu, mask = random_case(seed, b=3, t=40, gap=1.0)
    rho = (old - mu).exp()[mask]
    weights = minimum_prefix_weights(old, mu, mask).values[mask]
    low, high = rho.min(), rho.max()
    assert weights.min() >= min(low, low**2) * (1 - 1e-12)
    assert weights.max() <= max(high, high**2) * (1 + 1e-12)


def test_keep_masks_by_hand():
    old, mu = ratios([2, 1, 0.5], [1.2, 1.1, 1e-9])
    keep = geometric_rejection(old, mu, HALF, low=0.95, high=1.05)
    assert keep.tolist() == [[True], [False]]  # 1 and √1.32; the tiny ratio does not count
    assert geometric_rejection(old, mu, HALF, low=1.0, high=1.2).tolist() == [[True], [True]]
    empty = torch.zeros(2, 3).bool()  # nothing to reject, also where the band is not around 1
    assert geometric_rejection(old, mu, empty, low=1.1, high=1.2).tolist() == [[True], [True]]
    assert catastrophic_veto(old, mu, HALF).tolist() == [[True], [True]]
    assert catastrophic_veto(old, mu, ~HALF).tolist() == [[True], [False]]
    assert catastrophic_veto(old, mu, HALF, threshold=0.6).tolist() == [[False], [True]]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_the_same_policy_gives_ones(level):
    _, mu, mask = random_case(0)
    seen = importance_weights(
        mu, mu, mask, level=level, mode="mask", cap=1.0, floor=1.0, advantages=torch.ones(5)
    )
    assert torch.equal(seen.values, mask.double())
    for name in ("mean", "minimum", "maximum", "ess", "mass_kept"):
        assert getattr(seen, name) == pytest.approx(1, abs=1e-12)
    assert (seen.above_cap, seen.below_floor, seen.masked, seen.masked_positive) == (0, 0, 0, 0)


def lognormal(n, variance):
    """Log-weights N(−v/2, v) at n equally likely quantiles, so that E w = 1."""
    place = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return math.sqrt(variance) * torch.special.ndtri(place)[:, None] - variance / 2


@pytest.mark.parametrize("tokens, ess", [(100, 0.96), (1000, 0.67), (8192, 0.038)])
def test_vector_15_the_ess_of_sequences_falls_exponentially_with_their_length(tokens, ess):
    """σ = .02 a token: e^{−Tσ²}."""
    delta = lognormal(400_000, tokens * 0.02**2)
    mu = torch.full_like(delta, -1.0)
    seen = importance_weights(
        mu + delta, mu, torch.ones_like(delta).bool(), level="sequence", cap=INF
    )
    exact = math.exp(-tokens * 0.02**2)
    assert exact == pytest.approx(ess, abs=0.005)
    assert seen.ess == pytest.approx(exact, rel=0.01 if tokens < 8192 else 0.5)


def test_vector_16_a_mask_loses_the_mass_and_a_cap_loses_less():
    """σ = .02, T = 8,192, C = 3: 6.5 % of the sequences carry 62 % of the mass."""
    delta = lognormal(400_000, 8192 * 0.02**2)
    mu, mask = torch.full_like(delta, -1.0), torch.ones_like(delta).bool()
    seen = {
        mode: importance_weights(mu + delta, mu, mask, level="sequence", mode=mode, cap=3.0)
        for mode in ("truncate", "mask")
    }
    for one in seen.values():
        assert one.above_cap == pytest.approx(0.065, abs=0.001)
        assert one.mean == pytest.approx(1, abs=0.005)
    assert seen["mask"].mass_kept == pytest.approx(0.38, abs=0.005)
    assert seen["truncate"].mass_kept == pytest.approx(0.58, abs=0.005)


@given(st.integers(0, 1000), st.floats(0.01, 2))
def test_statistics_agree_with_the_mismatch_report(seed, gap):
    old, mu, mask = random_case(seed, gap=gap)
    report = mismatch_report(old, mu, mask)
    token = importance_weights(old, mu, mask, cap=2.0)
    sequence = importance_weights(old, mu, mask, level="sequence", cap=2.0)
    assert token.ess == pytest.approx(report.ess_token, rel=1e-12)
    assert sequence.ess == pytest.approx(report.ess_seq, rel=1e-12)
    assert token.units == report.tokens
    assert token.mean == pytest.approx(report.k3 - report.k1 + 1, rel=1e-9)
    assert 0 < token.mass_kept <= 1 + 1e-12


@each_weight
@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_what_is_not_counted_does_not_matter(name, seed):
    old, mu, mask = random_case(seed)
    clean = run(name, old, mu, mask)
    assert (clean[~mask] == 0).all() and (clean[mask] >= 0).all()
    for garbage in (NAN, INF, -INF, 1e30):
        dirty = [x.masked_fill(~mask, sign * garbage) for x, sign in ((old, 1), (mu, -1))]
        assert torch.equal(run(name, *dirty, mask), clean)
        wide = [torch.cat([x, torch.full((5, 3), garbage)], 1) for x in (old, mu)]
        padded = run(name, *wide, torch.cat([mask, torch.zeros(5, 3).bool()], 1))
        torch.testing.assert_close(padded[:, :7], clean, rtol=1e-12, atol=0)
    left = [torch.cat([torch.full((5, 2), NAN), x], 1) for x in (old, mu)]
    padded = run(name, *left, torch.cat([torch.zeros(5, 2).bool(), mask], 1))
    torch.testing.assert_close(padded[:, 2:], clean, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", [*WEIGHTS, *KEEPS])
@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_rows_do_not_see_each_other(name, seed):
    """In another order, and in micro-batches, every row gets the same."""
    tensors = random_case(seed)
    whole = run(name, *tensors)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(run(name, *(x[order] for x in tensors)), whole[order])
    parts = [run(name, *(x[rows] for x in tensors)) for rows in (slice(0, 2), slice(2, 5))]
    assert torch.equal(torch.cat(parts), whole)


@each_keep
@settings(max_examples=20)
@given(seed=st.integers(0, 1000))
def test_keep_masks_ignore_what_is_not_counted(name, seed):
    old, mu, mask = random_case(seed)
    keep = run(name, old, mu, mask)
    assert keep.dtype == torch.bool and keep.shape == (5, 1) and keep[-1]
    dirty = [x.masked_fill(~mask, NAN) for x in (old, mu)]
    assert torch.equal(run(name, *dirty, mask), keep)


@each_weight
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_double_and_returned_in_float32(name, dtype):
    old, mu, mask = random_case(3, dtype=dtype)
    values = run(name, old, mu, mask)
    assert values.dtype == torch.float32
    exact = run(name, old.double(), mu.double(), mask)
    assert exact.dtype == torch.float64
    torch.testing.assert_close(values, exact.float(), rtol=1e-6, atol=0)


def test_a_long_product_is_a_sum_of_logs():
    """4,000 ratios of e^{±.5}: the product overflows every format on the way to 1."""
    sign = torch.cat([torch.ones(2000), -torch.ones(2000)])
    mu = torch.full((1, 4000), -2.0)
    mask = torch.ones(1, 4000).bool()
    seen = importance_weights(mu + 0.5 * sign, mu, mask, level="sequence", cap=2.0)
    torch.testing.assert_close(seen.values, torch.ones(1, 4000))
    assert prefix_weights(mu + 0.5 * sign, mu, mask, cap=2.0).values.max() == 2
    far = importance_weights(mu - 0.5, mu, mask, level="sequence", cap=2.0, mode="mask")
    assert (far.values == 0).all() and far.mass_kept == pytest.approx(1) and far.masked == 0


def test_values_do_not_exceed_the_cap_by_rounding():
    mu = torch.full((1, 3), -2.0, dtype=torch.float64)
    for cap in (1.1, 2.0, 3.0, 5.0, 10.0):
        values = importance_weights(mu + 5, mu, torch.ones(1, 3).bool(), cap=cap).values
        assert values.max().item() <= cap


@each_weight
def test_nothing_keeps_a_gradient(name):
    old, mu, mask = random_case(4)
    function, options = WEIGHTS[name]
    advantages = torch.ones(5, requires_grad=True)
    seen = function(
        old.requires_grad_(), mu.requires_grad_(), mask, **options, advantages=advantages
    )
    assert not seen.values.requires_grad
    plain = [getattr(seen, f.name) for f in fields(seen) if f.name != "values"]
    assert all(isinstance(x, (int, float)) for x in plain)


@each_weight
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_without_a_counted_token(name, shape):
    nothing = torch.full(shape, NAN)
    function, options = WEIGHTS[name]
    mask = torch.zeros(shape).bool()
    seen = function(nothing, nothing, mask, **options, advantages=torch.zeros(shape[0]))
    assert torch.equal(seen.values, torch.zeros(shape))
    assert seen.units == 0 and (seen.mean, seen.ess, seen.mass_kept) == (1, 1, 1)
    assert (seen.masked, seen.above_cap, seen.masked_positive) == (0, 0, 0)


@each_weight
def test_one_token(name):
    old, mu = ratios([1.05])
    close(run(name, old, mu, torch.ones(1, 1).bool()), [1.05])


def test_the_settings_of_the_literature():
    """Level, mode and band as their sources have them."""
    assert {name: tuple(options.values()) for name, options in CORRECTIONS.items()} == {
        "tis": ("token", "truncate", 2.0),
        "sequence_tis": ("sequence", "truncate", 2.0),
        "mis": ("token", "mask", 2.0),
        "sequence_mis": ("sequence", "mask", 3.0),
        "icepop": ("token", "mask", 5.0, 0.5),
        "icepop_glm5": ("token", "mask", 2.0, 0.5),
    }
    for options in CORRECTIONS.values():
        importance_weights(*random_case(0), **options)
    with pytest.raises(TypeError):
        CORRECTIONS["tis"] = {}


A, MASK = torch.zeros(2, 3), torch.ones(2, 3).bool()
BAD = [
    (torch.zeros(2, 4), A, MASK, r"old_logp has shape \(2, 4\), expected \(2, 3\)"),
    (A, torch.zeros(2, 1), MASK, r"sampler_logp has shape \(2, 1\)"),
    (A, torch.zeros(3), MASK, r"sampler_logp has shape \(3,\)"),
    (A, A, MASK.long(), "mask has dtype torch.int64"),
    (A[0], A[0], MASK[0], r"shape \(3,\), expected torch.bool \(B, T\)"),
    (A.long(), A, MASK, "old_logp has dtype torch.int64"),
    (A * NAN, A, MASK, r"old_logp is nan at \[0, 0\] \(6 of 6"),
    (A, torch.tensor([[0, 0, 0], [0, -INF, 0.0]]), MASK, r"sampler_logp is -inf at \[1, 1\]"),
    (A + INF, A, MASK, "old_logp is inf"),
]


@pytest.mark.parametrize("old, mu, mask, message", BAD)
@pytest.mark.parametrize("function", [importance_weights, prefix_weights, catastrophic_veto])
def test_bad_tensors(old, mu, mask, message, function):
    options = {} if function is catastrophic_veto else dict(cap=2.0)
    with pytest.raises(ValueError, match=message):
        function(old, mu, mask, **options)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(cap=0.0), "cap=0.0"),
        (dict(cap=NAN), "cap=nan"),
        (dict(cap=2.0, floor=3.0), "floor=3.0"),
        (dict(cap=2.0, floor=-0.1), "floor=-0.1"),
        (dict(cap=2.0, floor=NAN), "floor=nan"),
        (dict(cap=2.0, level="word"), "level is 'word'"),
        (dict(cap=2.0, mode="clip"), "mode is 'clip'"),
        (dict(cap=2.0, advantages=torch.ones(2, 1)), r"advantages has shape \(2, 1\)"),
        (dict(cap=2.0, advantages=torch.ones(3)), r"advantages has shape \(3,\)"),
        (dict(cap=2.0, advantages=torch.tensor([1, NAN])), "advantages has a NaN"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        importance_weights(A, A, MASK, **options)


def test_bad_options_of_the_others():
    for options in (dict(low=1.2, high=1.1), dict(low=0.0), dict(high=INF), dict(low=NAN)):
        with pytest.raises(ValueError, match="expected 0 < low ≤ high"):
            geometric_rejection(A, A, MASK, **options)
    for threshold in (0.0, 1.0, NAN):
        with pytest.raises(ValueError, match="threshold="):
            catastrophic_veto(A, A, MASK, threshold=threshold)
    with pytest.raises(ValueError, match="cap=-1"):
        minimum_prefix_weights(A, A, MASK, cap=-1)
    with pytest.raises(ValueError, match="logp is nan"):
        minimum_prefix_weights(A * NAN, A, MASK)


def test_an_uncapped_weight_that_overflows_is_an_error_and_not_an_infinity():
    with pytest.raises(ValueError, match="beyond the range of torch.float32; give a finite cap"):
        importance_weights(A, A - 100, MASK, cap=INF)
    assert importance_weights(A, A - 100, MASK, cap=5.0).values.max() == 5
