"""Mismatch report: values by hand, identities, the bound of logit noise, signs, refusals."""

import math
from dataclasses import fields, replace
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.system import logit_noise_bound, mismatch_report

log = math.log


def row(*probabilities):
    return torch.tensor([[log(p) for p in probabilities]], dtype=torch.float64)


def random_case(seed, b=5, t=7, gap=0.5, dtype=torch.float64):
    """Trainer and sampler log-probabilities with rows of unequal length, one of them empty."""
    g = torch.Generator().manual_seed(seed)
    mu = -3 * torch.rand(b, t, generator=g, dtype=torch.float64) - 0.01
    trainer = (mu + gap * torch.randn(b, t, generator=g, dtype=torch.float64)).clamp(max=-1e-3)
    lengths = torch.randint(1, t + 1, (b,), generator=g)
    lengths[-1] = 0
    mask = torch.arange(t) < lengths[:, None]
    return trainer.to(dtype), mu.to(dtype), mask


def test_two_sequences_by_hand():
    """Ratios 2 and 1/2 in the first sequence, 3/2 in the second; one position does not count."""
    trainer = torch.cat([row(0.8, 0.1), row(0.3, 0.9)])
    sampler = torch.cat([row(0.4, 0.2), row(0.2, 0.1)])
    mask = torch.tensor([[True, True], [True, False]])
    report = mismatch_report(trainer, sampler, mask, tau=1.9)
    ratios = [2, 0.5, 1.5]
    deltas = [log(r) for r in ratios]
    expected = {
        "tokens": 3,
        "mean_abs": sum(map(abs, deltas)) / 3,
        "max_abs": log(2),
        "k1": -log(1.5) / 3,
        "k3": sum(r - 1 - log(r) for r in ratios) / 3,
        "chi2_token": (4 + 0.25 + 2.25) / 3 - 1,
        "chi2_seq": (1 + 2.25) / 2 - 1,
        "ppl_ratio": (1 + 1 / 1.5) / 2,
        "ess_token": 16 / (3 * 6.5),
        "ess_seq": 2.5**2 / (2 * 3.25),
        "extreme": 2 / 3,
    }
    for name, value in expected.items():
        assert getattr(report, name) == pytest.approx(value, rel=1e-12), name
    a, b = torch.tensor([0.8, 0.1, 0.3]), torch.tensor([0.4, 0.2, 0.2])
    correlation = torch.corrcoef(torch.stack([a, b]).double())[0, 1]
    assert report.pearson == pytest.approx(correlation.item(), rel=1e-6)
    # By the sampler's probability: .2 and .2 lie in (.1, .3], .4 in (.3, .7].
    assert [b.tokens for b in report.bins] == [0, 0, 2, 1, 0]
    third = report.bins[2]
    assert third.mean_abs == pytest.approx((log(2) + log(1.5)) / 2, rel=1e-12)
    assert third.mean == pytest.approx((-log(2) + log(1.5)) / 2, rel=1e-12)
    assert third.tail == pytest.approx(0.8, rel=1e-12)
    assert third.logit_noise == pytest.approx(third.mean_abs / 1.6, rel=1e-12)
    assert third.bound(third.logit_noise) == pytest.approx(third.mean_abs, rel=1e-12)
    assert report.bins[3].mean_abs == pytest.approx(log(2), rel=1e-12)
    assert all(math.isnan(x) for x in report.bins[0][3:])


def test_the_same_policy_gives_zeros_and_ones():
    _, mu, mask = random_case(0)
    report = mismatch_report(mu, mu, mask)
    zeros = ("mean_abs", "max_abs", "k1", "k3", "chi2_token", "chi2_seq", "extreme")
    assert all(getattr(report, name) == 0 for name in zeros)
    for name in ("ppl_ratio", "ess_token", "ess_seq", "pearson"):
        assert getattr(report, name) == pytest.approx(1, abs=1e-12)


@given(st.integers(0, 10_000), st.floats(0.01, 3))
def test_identities(seed, gap):
    trainer, mu, mask = random_case(seed, gap=gap)
    report = mismatch_report(trainer, mu, mask)
    assert report.tokens == int(mask.sum())
    assert report.k3 >= 0 and report.max_abs >= report.mean_abs >= abs(report.k1)
    assert 0 < report.ess_token <= 1 + 1e-12 and 0 < report.ess_seq <= 1 + 1e-12
    assert report.chi2_token >= (1 + report.k3 - report.k1) ** 2 - 1 - 1e-9  # E ρ² ≥ (E ρ)²
    assert sum(b.tokens for b in report.bins) == report.tokens
    for name, whole in (("mean_abs", report.mean_abs), ("mean", -report.k1)):
        total = sum(b.tokens * getattr(b, name) for b in report.bins if b.tokens)
        assert total / report.tokens == pytest.approx(whole, rel=1e-9, abs=1e-12)
    shares = [mismatch_report(trainer, mu, mask, tau=t).extreme for t in (1.0, 1.5, 2, 4, 64)]
    assert shares == sorted(shares, reverse=True)


@given(st.integers(0, 10_000))
def test_for_one_sequence_perplexity_ratio_is_the_inverse_geometric_ratio(seed):
    trainer, mu, mask = random_case(seed, b=2)
    report = mismatch_report(trainer, mu, mask)  # the second row is empty
    geometric = ((trainer - mu)[mask].sum() / mask.sum()).exp().item()
    assert report.ppl_ratio * geometric == pytest.approx(1, rel=1e-12)
    assert report.ess_seq == pytest.approx(1, rel=1e-12)


def test_exchanging_the_policies_turns_the_ratios_over():
    trainer, mu, mask = random_case(3)
    there, back = mismatch_report(trainer, mu, mask), mismatch_report(mu, trainer, mask)
    assert there.k1 == pytest.approx(-back.k1, rel=1e-12)
    assert there.mean_abs == pytest.approx(back.mean_abs, rel=1e-12)
    assert there.extreme == back.extreme
    assert there.pearson == pytest.approx(back.pearson, rel=1e-12)
    assert there.k3 != pytest.approx(back.k3, rel=0.01)


def test_effective_sample_size_of_gaussian_log_ratios():
    """ESS of a token is e^{−σ²}, of a sequence of T tokens e^{−Tσ²}."""
    n, t, sigma = 200_000, 8, 0.2
    g = torch.Generator().manual_seed(0)
    delta = sigma * torch.randn(n, t, generator=g, dtype=torch.float64) - sigma**2 / 2
    mu = torch.full((n, t), -5.0, dtype=torch.float64)
    report = mismatch_report(mu + delta, mu, torch.ones(n, t).bool())
    assert report.ess_token == pytest.approx(math.exp(-(sigma**2)), rel=1e-3)
    assert report.ess_seq == pytest.approx(math.exp(-t * sigma**2), rel=5e-3)
    assert report.chi2_token == pytest.approx(math.exp(sigma**2) - 1, rel=1e-2)
    assert report.chi2_seq == pytest.approx(math.exp(t * sigma**2) - 1, rel=2e-2)
    assert report.k1 == pytest.approx(sigma**2 / 2, rel=1e-2)
    assert report.k3 == pytest.approx(sigma**2 / 2, rel=1e-2)  # E ρ = 1 here


def test_k1_and_k3_estimate_the_kl_from_sampler_to_trainer():
    """The exact sum over a 4-action policy: weights of the rows are μ's own probabilities."""
    mu, pi = torch.tensor([0.5, 0.25, 0.125, 0.125]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    drawn = torch.tensor([0] * 4 + [1] * 2 + [2, 3])  # exactly μ
    report = mismatch_report(pi.log()[drawn, None], mu.log()[drawn, None], torch.ones(8, 1).bool())
    exact = (mu * (mu / pi).log()).sum().item()
    assert report.k1 == pytest.approx(exact, rel=1e-6)
    assert report.k3 == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_is_not_counted_does_not_matter(garbage):
    trainer, mu, mask = random_case(1)
    clean = mismatch_report(trainer, mu, mask)
    trainer[~mask], mu[~mask] = garbage, -garbage
    wide = [torch.cat([x, torch.full((5, 3), garbage)], 1) for x in (trainer, mu)]
    padded = mismatch_report(*wide, torch.cat([mask, torch.zeros(5, 3).bool()], 1))
    assert replace(padded, bins=()) == replace(clean, bins=())
    assert padded.bins[1:] == clean.bins[1:]  # the first bin is empty: its values are NaN
    order = torch.tensor([4, 2, 0, 3, 1])
    permuted = mismatch_report(trainer[order], mu[order], mask[order])
    for field in fields(clean):
        if field.name not in {"bins", "positive", "negative"}:
            expected = pytest.approx(getattr(clean, field.name), rel=1e-12)
            assert getattr(permuted, field.name) == expected


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_compared_in_double(dtype):
    trainer, mu, mask = random_case(2, dtype=dtype)
    assert mismatch_report(trainer, mu, mask).k3 == pytest.approx(
        mismatch_report(trainer.double(), mu.double(), mask).k3, rel=1e-12
    )


def test_tiny_gaps_keep_their_digits():
    """Δ = 1e-6: k3 is 5e-13, which e^Δ − 1 − Δ in float32 could not hold."""
    mu = torch.full((1, 4), -2.0, dtype=torch.float64)
    report = mismatch_report(mu + 1e-6, mu, torch.ones(1, 4).bool())
    assert report.k3 == pytest.approx(0.5e-12, rel=1e-3)


def test_long_sequences_do_not_break_the_effective_sample_size():
    """The product of 4,000 ratios overflows; the ESS is a ratio of sums and does not."""
    mu = torch.full((2, 4000), -2.0, dtype=torch.float64)
    report = mismatch_report(mu + 0.5, mu, torch.ones(2, 4000).bool())
    assert report.ess_seq == pytest.approx(1, rel=1e-9)
    assert math.isinf(report.chi2_seq)


def test_a_probability_rounded_above_one_is_in_the_last_bin():
    mu = torch.tensor([[1e-7, -1e-7, -5.0]])
    report = mismatch_report(mu, mu, torch.ones(1, 3).bool())
    assert [b.tokens for b in report.bins] == [1, 0, 0, 0, 2]


def test_without_variation_there_is_no_correlation():
    mu = torch.full((1, 3), -1.0)
    assert math.isnan(mismatch_report(mu, mu, torch.ones(1, 3).bool()).pearson)


def numbers(report):
    for field in fields(report):
        value = getattr(report, field.name)
        if hasattr(value, "tokens"):
            yield from numbers(value)
        elif field.name == "bins":
            yield from (x for b in value for x in b)
        elif value is not None:
            yield value


def test_nothing_keeps_a_gradient():
    trainer, mu, mask = random_case(4)
    report = mismatch_report(
        trainer.requires_grad_(), mu.requires_grad_(), mask, advantages=torch.arange(-2.0, 3.0)
    )
    assert report.positive and report.negative
    assert all(isinstance(x, (float, int)) for x in numbers(report))


def test_the_signs_of_the_advantage_are_reported_apart():
    """Each half is the report of its own tokens; Â = 0 is in neither."""
    trainer, mu, mask = random_case(5)
    advantages = torch.tensor([0.5, -0.5, 0.0, 2.0, -1.0])
    report = mismatch_report(trainer, mu, mask, tau=1.5, advantages=advantages)
    positive = mask & torch.tensor([[True], [False], [False], [True], [False]])
    assert str(report.positive) == str(mismatch_report(trainer, mu, positive, tau=1.5))
    negative = mask & torch.tensor([[False], [True], [False], [False], [True]])
    assert str(report.negative) == str(mismatch_report(trainer, mu, negative, tau=1.5))
    plain = mismatch_report(trainer, mu, mask, tau=1.5)
    assert str(replace(report, positive=None, negative=None)) == str(plain)
    assert plain.positive is None and plain.negative is None
    tokenwise = mismatch_report(
        trainer, mu, mask, tau=1.5, advantages=advantages[:, None].expand(5, 7)
    )
    assert str(tokenwise) == str(report)
    assert mismatch_report(trainer, mu, mask, advantages=torch.ones(5)).negative is None


def test_advantages_may_differ_between_tokens():
    trainer, mu, mask = random_case(6)
    advantages = torch.where(torch.arange(7) % 2 == 0, 1.0, -1.0).expand(5, 7)
    report = mismatch_report(trainer, mu, mask, advantages=advantages)
    even = mask & (torch.arange(7) % 2 == 0)
    assert str(report.positive) == str(mismatch_report(trainer, mu, even))
    assert report.positive.tokens + report.negative.tokens == report.tokens


@pytest.mark.parametrize("eps", [1e-3, 0.05, 0.5])
def test_vector_24_no_logit_noise_moves_a_token_by_more_than_the_bound(eps):
    """All 2^5 sign patterns: the exact bound is the worst one; 2ε(1−p) is it to first order."""
    logits = torch.tensor([3.0, 1.0, 0.5, -1.0, -4.0], dtype=torch.float64)
    logp = logits.log_softmax(-1)
    signs = torch.tensor(list(product([-1.0, 1.0], repeat=5)), dtype=torch.float64)
    worst = ((logits + eps * signs).log_softmax(-1) - logp).abs().amax(0)
    torch.testing.assert_close(
        worst, logit_noise_bound(logp, eps, exact=True), rtol=1e-9, atol=1e-13
    )
    first_order = logit_noise_bound(logp, eps)
    torch.testing.assert_close(first_order, 2 * eps * (1 - logp.exp()), rtol=1e-12, atol=0)
    assert (worst - first_order <= 2 * eps**2).all() and (worst >= first_order).all()


def test_the_bound_goes_from_nothing_at_p_1_to_twice_the_noise_at_p_0():
    logp = torch.tensor([1e-7, 0.0, -1e4])
    for exact in (False, True):
        bound = logit_noise_bound(logp, 0.25, exact=exact)
        torch.testing.assert_close(bound, torch.tensor([0, 0, 0.5]).double(), rtol=1e-12, atol=0)
    assert (logit_noise_bound(logp, 0.0) == 0).all()
    with pytest.raises(ValueError, match="eps=-0.1"):
        logit_noise_bound(logp, -0.1)


def test_logit_noise_looks_the_same_in_every_bin_and_another_temperature_does_not():
    """Enumerated over a 200-token policy: every token once, the gap is what the noise makes it."""
    g = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(400, 200, generator=g, dtype=torch.float64)
    mu, drawn = logits.log_softmax(-1), torch.multinomial(logits.softmax(-1), 20, generator=g)
    noise = 0.02 * (2 * torch.rand(400, 200, generator=g, dtype=torch.float64) - 1)
    mask = torch.ones(400, 20).bool()

    def implied(trainer):
        report = mismatch_report(trainer.gather(1, drawn), mu.gather(1, drawn), mask)
        return [b.logit_noise for b in report.bins]

    rounding = implied((logits + noise).log_softmax(-1))
    assert max(rounding) < 0.02 and max(rounding) / min(rounding) < 1.5
    temperature = implied((logits / 1.1).log_softmax(-1))
    assert max(temperature) / min(temperature) > 3


ONES, MASK = torch.zeros(2, 3), torch.ones(2, 3).bool()


@pytest.mark.parametrize(
    "trainer, sampler, mask, message",
    [
        (torch.zeros(2, 4), ONES, MASK, r"trainer_logp \(2, 4\), sampler_logp \(2, 3\)"),
        (ONES, torch.zeros(2, 1), MASK, r"sampler_logp \(2, 1\)"),
        (ONES, ONES, torch.ones(2, 1).bool(), r"mask \(2, 1\)"),
        (torch.zeros(6), torch.zeros(6), torch.ones(6).bool(), r"\(B, T\)"),
        (ONES, ONES, ~MASK, "mask counts no token"),
        (ONES * math.nan, ONES, MASK, "not finite"),
        (ONES, ONES - math.inf, MASK, "not finite"),
    ],
)
def test_bad_input(trainer, sampler, mask, message):
    with pytest.raises(ValueError, match=message):
        mismatch_report(trainer, sampler, mask)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(tau=0.5), "tau=0.5"),
        (dict(tau=math.nan), "tau=nan"),
        (dict(edges=(0, 0.5)), "edges=.0, 0.5."),
        (dict(edges=(0, 0.7, 0.3, 1)), "rise from 0 to 1"),
        (dict(advantages=torch.ones(2, 1)), r"advantages has shape \(2, 1\), expected \(2,\)"),
        (dict(advantages=torch.tensor([1, math.nan])), "advantages has a NaN"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        mismatch_report(ONES, ONES, MASK, **options)
