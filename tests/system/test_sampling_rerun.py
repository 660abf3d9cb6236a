"""The re-run filter beside the stored set, and the kept mass, by enumeration in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.system import kept_mass, masked_log_probs, rerun_filter, sample_tokens

INF = math.inf
FILTERS = {
    "top_p": dict(top_p=0.7),
    "top_k": dict(top_k=3),
    "min_p": dict(min_p=0.3),
    "all three": dict(top_k=5, top_p=0.85, min_p=0.1),
}
SETTINGS = pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_logits(seed, *shape, spread=2.0, dtype=torch.float64):
    return (spread * torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)).to(dtype)


def every_token(logits, **options):
    """The kept set of one row and μ (V,) of every token, 0 outside: no sampling involved."""
    kept = sample_tokens(logits[None], generator=seeded(), **options).kept
    inside = kept[0][kept[0] >= 0].long()
    mu = torch.zeros_like(logits)
    mu[inside] = (logits[inside] / options.get("temperature", 1.0)).softmax(0)
    return kept[0], mu


# --- the mean of the ratio ---------------------------------------------------------------------


@SETTINGS
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
@pytest.mark.parametrize("moved", [0.0, 0.5, 3.0])
def test_the_mean_ratio_is_the_kept_mass(options, temperature, moved):
    """E_μ[π/μ] = Σ_kept π for any π, also one that is far from the sampler's logits."""
    ours = random_logits(1, 6)
    theirs = ours + moved * random_logits(2, 6, spread=1.0)
    kept, mu = every_token(theirs, temperature=temperature, **options)
    pi = (ours / temperature).softmax(0)
    inside = mu > 0
    mean = (mu[inside] * (pi[inside] / mu[inside])).sum()
    mass = kept_mass(ours, kept, temperature)
    assert mass.item() == pytest.approx(mean.item(), abs=1e-15)
    assert mass.item() == pytest.approx(pi[inside].sum().item(), abs=1e-15) and mass < 1


@SETTINGS
def test_on_the_samplers_own_logits_every_ratio_is_the_kept_mass(options):
    logits = random_logits(3, 400, 9)
    sample = sample_tokens(logits, generator=seeded(4), **options)
    ratio = (masked_log_probs(logits, sample.tokens, None) - sample.logp).exp()
    torch.testing.assert_close(ratio, kept_mass(logits, sample.kept), rtol=0, atol=1e-14)


@SETTINGS
def test_with_the_stored_set_the_mean_ratio_is_one(options):
    """Keep Sampling Mask: E_μ[π_kept/μ] = 1, whatever the trainer's logits are."""
    ours, theirs = random_logits(5, 6), random_logits(6, 6)
    kept, mu = every_token(theirs, **options)
    tokens = kept[kept >= 0].long()
    rows = ours.expand(len(tokens), -1)
    logp = masked_log_probs(rows, tokens, kept.expand(len(tokens), -1))
    assert (mu[tokens] * (logp.exp() / mu[tokens])).sum().item() == pytest.approx(1, abs=1e-15)


@SETTINGS
def test_without_the_set_the_mean_score_pulls_at_the_kept_mass(options):
    """E_μ[∇log π] = ∇log S over the vocabulary, 0 over the stored set: by enumeration.

    So an advantage that is the same for all tokens leaves a policy that knows its set where it
    is, and moves the other's mass across the border of the set.
    """
    logits = random_logits(31, 7)
    kept, mu = every_token(logits, **options)
    tokens = kept[kept >= 0].long()
    rows = logits.expand(len(tokens), -1)

    def mean_score(stored):
        z = rows.clone().requires_grad_()
        sets = kept.expand(len(tokens), -1) if stored else None
        (mu[tokens] * masked_log_probs(z, tokens, sets)).sum().backward()
        return z.grad.sum(0)

    z = logits.clone().requires_grad_()
    kept_mass(z, kept).log().backward()
    assert z.grad.norm() > 0.01
    torch.testing.assert_close(mean_score(False), z.grad, rtol=0, atol=1e-15)
    assert mean_score(True).abs().max() < 1e-15


def test_the_kept_mass_of_everything_is_one_and_of_the_filler_nothing():
    logits = random_logits(7, 2, 5)
    everything = torch.arange(5).expand(2, 5)
    torch.testing.assert_close(kept_mass(logits, everything), torch.ones(2).double())
    assert kept_mass(logits, None).tolist() == [1, 1]
    one = kept_mass(logits, torch.tensor([[3, -1], [0, -1]]))
    expected = logits.softmax(-1)[[0, 1], [3, 0]]
    torch.testing.assert_close(one, expected, rtol=0, atol=1e-15)


# --- the trainer's own filter ------------------------------------------------------------------


@SETTINGS
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_the_samplers_own_logits_nothing_is_lost(options, temperature):
    logits = random_logits(8, 300, 12)
    options = dict(options, temperature=temperature)
    sample = sample_tokens(logits, generator=seeded(9), **options)
    again = rerun_filter(logits, sample.tokens, **options)
    assert not again.lost.any()
    torch.testing.assert_close(again.logp, sample.logp, rtol=0, atol=1e-13)
    kept = torch.zeros_like(again.keep)
    for row, ids in enumerate(sample.kept.tolist()):
        kept[row, [v for v in ids if v >= 0]] = True
    assert torch.equal(again.keep, kept)


@SETTINGS
def test_it_is_the_set_that_the_trainer_would_have_sampled_from(options):
    ours, tokens = random_logits(10, 50, 9), torch.arange(50) % 9
    again = rerun_filter(ours, tokens, **options)
    own = sample_tokens(ours, generator=seeded(), **options).kept
    found = (own == tokens[:, None]).any(1)
    assert torch.equal(again.lost, ~found) and again.lost.any() and found.any()
    expected = masked_log_probs(ours[found], tokens[found], own[found])
    torch.testing.assert_close(again.logp[found], expected, rtol=0, atol=1e-14)
    assert (again.logp[again.lost] == -INF).all()


@SETTINGS
def test_perturbed_logits_lose_sampled_tokens_and_the_stored_set_none(options):
    """Methods 23; the more the logits differ, the more is lost."""
    logits = random_logits(11, 4000, 12)
    sample = sample_tokens(logits, generator=seeded(12), **options)
    lost = []
    for noise in (0.03, 0.3):
        ours = logits + noise * random_logits(13, 4000, 12, spread=1.0)
        again = rerun_filter(ours, sample.tokens, **options)
        lost.append(again.lost.double().mean().item())
        assert torch.isfinite(masked_log_probs(ours, sample.tokens, sample.kept)).all()
        assert torch.equal(torch.isinf(again.logp), again.lost)
    assert 0 < lost[0] < lost[1] < 0.2


def test_lost_tokens_have_no_gradient_and_the_others_that_of_their_set():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]] * 2, dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([1, 3])
    again = rerun_filter(logits, tokens, top_k=2)
    assert again.lost.tolist() == [False, True]
    again.logp[~again.lost].sum().backward()
    pi = torch.tensor([2.0, 1.0]).double().softmax(0)
    expected = torch.zeros(2, 4, dtype=torch.float64)
    expected[0, :2] = torch.tensor([0.0, 1.0]) - pi
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-15)
    logits.grad = None
    rerun_filter(logits, tokens, top_k=2).logp.masked_fill(again.lost, 0).sum().backward()
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-15)


def test_what_is_allowed_is_filtered_first_one_row_or_each():
    logits = torch.tensor([[[3.0, 2.0, 1.0, 0.0]] * 2])
    allowed = torch.tensor([False, True, True, True])
    tokens = torch.tensor([[1, 3]])
    one = rerun_filter(logits, tokens, top_k=2, allowed=allowed)
    each = rerun_filter(logits, tokens, top_k=2, allowed=allowed.expand(1, 2, 4))
    assert one.keep.tolist() == each.keep.tolist() == [[[False, True, True, False]] * 2]
    assert one.lost.tolist() == each.lost.tolist() == [[False, True]]


@given(st.integers(0, 10_000), st.sampled_from(list(FILTERS.values())), st.integers(1, 7))
def test_rows_do_not_see_each_other(seed, options, part):
    logits, tokens = random_logits(seed, 2, 4, 9), torch.arange(8).view(2, 4)
    whole = rerun_filter(logits, tokens, **options)
    flat, ids = logits.view(8, 9), tokens.view(8)
    parts = [rerun_filter(flat[s], ids[s], **options) for s in (slice(part), slice(part, 8))]
    assert torch.equal(whole.logp.view(8), torch.cat([p.logp for p in parts]))
    assert torch.equal(whole.lost.view(8), torch.cat([p.lost for p in parts]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_filtered_in_float32(dtype):
    half, tokens = random_logits(14, 6, 9, dtype=dtype), torch.arange(6)
    ours, wide = (rerun_filter(x, tokens, top_p=0.8) for x in (half, half.float()))
    assert ours.logp.dtype == torch.float32 and torch.equal(ours.logp, wide.logp)
    kept = torch.arange(4).expand(6, 4)
    assert torch.equal(kept_mass(half, kept), kept_mass(half.float(), kept))


@pytest.mark.parametrize("bad", [math.nan, INF])
@pytest.mark.parametrize("options", [{}, dict(top_p=0.8), dict(top_k=2), dict(min_p=0.1)])
def test_a_broken_row_is_nan_and_not_lost(bad, options):
    logits = torch.tensor([[0.0, bad, 1.0], [0.0, 1.0, 2.0]])
    again = rerun_filter(logits, torch.tensor([1, 2]), **options)
    assert again.logp[0].isnan() and torch.isfinite(again.logp[1]) and not again.lost.any()


LOGITS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "tokens, options, message",
    [
        (torch.zeros(3).long(), {}, r"tokens has shape \(3,\); expected \(2,\)"),
        (torch.zeros(2).long(), dict(top_p=0.0), "top_p=0.0"),
        (torch.zeros(2).long(), dict(temperature=0.0), "temperature=0.0"),
        (torch.zeros(2).long(), dict(allowed=torch.ones(3).bool()), r"allowed has shape \(3,\)"),
        (torch.zeros(2).long(), dict(allowed=torch.ones(4)), "dtype torch.float32"),
    ],
)
def test_bad_input_to_the_filter(tokens, options, message):
    with pytest.raises(ValueError, match=message):
        rerun_filter(LOGITS, tokens, **options)


@pytest.mark.parametrize(
    "kept, temperature, message",
    [
        (torch.zeros(1, 2).int(), 1.0, r"kept has shape \(1, 2\); expected \(2, 'K'\)"),
        (torch.zeros(2, 2).int(), math.nan, "temperature=nan"),
    ],
)
def test_bad_input_to_the_mass(kept, temperature, message):
    with pytest.raises(ValueError, match=message):
        kept_mass(LOGITS, kept, temperature)
