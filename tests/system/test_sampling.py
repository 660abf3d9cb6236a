"""Sampling: the kept set by its definition and by transformers' warpers, frequencies, scoring."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from stablerl_core.system import masked_log_probs, sample_tokens

INF = math.inf
FILTERS = {
    "top_p": dict(top_p=0.7),
    "top_k": dict(top_k=3),
    "min_p": dict(min_p=0.3),
    "top_k and top_p": dict(top_k=4, top_p=0.8),
    "top_p and min_p": dict(top_p=0.9, min_p=0.2),
    "all three": dict(top_k=5, top_p=0.85, min_p=0.25),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def random_logits(seed, *shape, spread=2.0, dtype=torch.float32):
    return (spread * torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)).to(dtype)


def kept_by_definition(logits, temperature, top_k=0, top_p=1.0, min_p=0.0, allowed=None):
    """Ids of one row that survive, written out in plain Python."""
    ids = [v for v in range(len(logits)) if allowed is None or allowed[v]]
    ids = [v for v in ids if logits[v] > -INF]

    def probabilities():
        weights = {
            v: math.exp((logits[v] - max(logits[w] for w in ids)) / temperature) for v in ids
        }
        return {v: w / sum(weights.values()) for v, w in weights.items()}

    if top_k:
        threshold = sorted((logits[v] for v in ids), reverse=True)[:top_k][-1]
        ids = [v for v in ids if logits[v] >= threshold]
    if top_p < 1:
        p, mass, likely = probabilities(), 0.0, []
        for v in sorted(ids, key=lambda v: -p[v]):
            if mass < top_p:
                likely.append(v)
            mass += p[v]
        ids = likely
    if min_p > 0:
        p = probabilities()
        ids = [v for v in ids if p[v] >= min_p * max(p.values())]
    return sorted(ids)


def kept_ids(sample):
    return [[v for v in row if v >= 0] for row in sample.kept.tolist()]


def assert_fits(counts, probabilities):
    """Pearson's chi-square below its 1 − 1e-5 quantile (Wilson–Hilferty); the seed is fixed."""
    expected = counts.sum() * probabilities
    statistic = float(((counts - expected) ** 2 / expected).sum())
    df = len(counts) - 1
    assert statistic < df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


# --- what is kept ----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_kept_set_and_logp_are_the_definition(options, temperature):
    logits = random_logits(1, 64, 9)
    sample = sample_tokens(logits, temperature=temperature, generator=seeded(), **options)
    for row, ids, token, logp in zip(
        logits.double().tolist(), kept_ids(sample), sample.tokens.tolist(), sample.logp, strict=True
    ):
        assert ids == kept_by_definition(row, temperature, **options)
        z = [row[v] / temperature for v in ids]
        exact = row[token] / temperature - math.log(sum(map(math.exp, z)))
        assert logp.item() == pytest.approx(exact, abs=2e-6)


@pytest.mark.parametrize("options", [*FILTERS.values(), {}], ids=[*FILTERS, "no other filter"])
def test_allowed_comes_first(options):
    """What is forbidden has no mass in top-p, no rank in top-k, and is not min-p's maximum."""
    logits, allowed = random_logits(2, 64, 9), torch.rand(64, 9, generator=seeded(3)) < 0.6
    allowed[:, 4] = True
    sample = sample_tokens(logits, allowed=allowed, generator=seeded(), **options)
    expected = [
        kept_by_definition(row, 1.0, allowed=ok, **options)
        for row, ok in zip(logits.double().tolist(), allowed.tolist(), strict=True)
    ]
    assert kept_ids(sample) == expected
    assert allowed.gather(1, sample.tokens[:, None]).all()


def test_one_row_of_allowed_serves_all_rows():
    logits, allowed = random_logits(4, 5, 6), torch.tensor([1, 0, 1, 1, 0, 0]).bool()
    one = sample_tokens(logits, allowed=allowed, generator=seeded())
    each = sample_tokens(logits, allowed=allowed.expand(5, 6), generator=seeded())
    assert kept_ids(one) == kept_ids(each) == [[0, 2, 3]] * 5
    assert torch.equal(one.tokens, each.tokens) and torch.equal(one.logp, each.logp)


@pytest.mark.parametrize("temperature", [0.6, 1.0])
@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_kept_set_is_that_of_transformers(options, temperature):
    """In the order of `generate`: temperature, top-k, top-p, min-p."""
    logits = random_logits(5, 256, 40)
    warpers = [TemperatureLogitsWarper(temperature)] if temperature != 1 else []
    if "top_k" in options:
        warpers.append(TopKLogitsWarper(options["top_k"]))
    if "top_p" in options:
        warpers.append(TopPLogitsWarper(options["top_p"]))
    if "min_p" in options:
        warpers.append(MinPLogitsWarper(options["min_p"]))
    scores = logits
    for warper in warpers:
        scores = warper(None, scores)
    sample = sample_tokens(logits, temperature=temperature, generator=seeded(), **options)
    assert kept_ids(sample) == [row.nonzero()[:, 0].tolist() for row in torch.isfinite(scores)]
    expected = scores.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
    torch.testing.assert_close(sample.logp, expected, rtol=0, atol=1e-6)


def test_ties_at_the_top_k_threshold_are_all_kept():
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0]])
    assert kept_ids(sample_tokens(logits, top_k=2, generator=seeded())) == [[1, 2, 3, 4]]


@pytest.mark.parametrize("options", [dict(top_p=1e-9), dict(top_k=1), dict(min_p=1.0)])
def test_the_most_likely_token_always_stays(options):
    logits = random_logits(6, 32, 7)
    sample = sample_tokens(logits, generator=seeded(), **options)
    assert torch.equal(sample.tokens, logits.argmax(-1))
    assert kept_ids(sample) == logits.argmax(-1, keepdim=True).tolist()
    assert (sample.logp == 0).all()


@pytest.mark.parametrize("options", [{}, dict(top_k=0), dict(top_p=1.0), dict(min_p=0.0)])
def test_without_truncation_nothing_is_stored(options):
    assert sample_tokens(random_logits(7, 2, 5), generator=seeded(), **options).kept is None


def test_a_top_k_beyond_the_vocabulary_keeps_all():
    sample = sample_tokens(random_logits(8, 3, 5), top_k=99, generator=seeded())
    assert kept_ids(sample) == [[0, 1, 2, 3, 4]] * 3


# --- what is drawn ---------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, *FILTERS.values()], ids=["no filter", *FILTERS])
@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_frequencies_are_the_probabilities(options, temperature):
    logits = random_logits(9, 8)
    n = 20_000
    sample = sample_tokens(
        logits.expand(n, 8), temperature=temperature, generator=seeded(10), **options
    )
    ids = kept_by_definition(logits.double().tolist(), temperature, **options)
    counts = sample.tokens.bincount(minlength=8)
    assert counts.nonzero()[:, 0].tolist() == ids
    exact = (logits.double()[ids] / temperature).softmax(0)
    if len(ids) > 1:
        assert_fits(counts[ids].double(), exact)
    # The stored log-probability is that of the distribution that was drawn from.
    first = torch.stack([(sample.tokens == v).nonzero()[0, 0] for v in ids])
    torch.testing.assert_close(sample.logp[first].double().exp(), exact, rtol=1e-5, atol=0)


def test_same_generator_state_same_tokens_and_the_global_stream_is_not_touched():
    logits = random_logits(11, 50, 30)
    before = torch.get_rng_state()
    first, again = (sample_tokens(logits, generator=seeded(12)).tokens for _ in range(2))
    other = sample_tokens(logits, generator=seeded(13)).tokens
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_row_does_not_depend_on_the_other_rows():
    logits = random_logits(14, 6, 10)
    whole = sample_tokens(logits, top_p=0.8, generator=seeded(15))
    logits[3:] = random_logits(16, 3, 10)
    changed = sample_tokens(logits, top_p=0.8, generator=seeded(15))
    assert torch.equal(whole.tokens[:3], changed.tokens[:3])
    assert torch.equal(whole.logp[:3], changed.logp[:3])


@pytest.mark.parametrize("at", [0, 3, 6])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_no_uniform_number_lands_on_a_token_of_probability_zero(monkeypatch, uniform, at):
    """The smallest and the largest number the generator can give, zeros at both ends."""
    logits = torch.full((1, 7), -INF)
    logits[0, [at, (at + 2) % 7]] = torch.tensor([0.3, -0.2])
    monkeypatch.setattr(torch, "rand", lambda *s, **_: torch.full(s, uniform, dtype=torch.double))
    sample = sample_tokens(logits)
    ends = sorted([at, (at + 2) % 7])
    assert sample.tokens.item() == ends[0 if uniform == 0 else 1]
    assert math.isfinite(sample.logp.item())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, dict(top_p=0.7), dict(top_k=3, min_p=0.2)])
def test_half_precision_logits_are_computed_in_float32(dtype, options):
    half = random_logits(17, 40, 12, dtype=dtype)
    drawn = sample_tokens(half, temperature=0.7, generator=seeded(18), **options)
    wide = sample_tokens(half.float(), temperature=0.7, generator=seeded(18), **options)
    assert drawn.logp.dtype == torch.float32
    assert torch.equal(drawn.tokens, wide.tokens) and torch.equal(drawn.logp, wide.logp)
    assert (drawn.kept is None) == (wide.kept is None) == (not options)


def test_double_precision_stays_double():
    logits = random_logits(19, 4, 6, dtype=torch.float64)
    sample = sample_tokens(logits, generator=seeded())
    expected = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
    assert sample.logp.dtype == torch.float64
    torch.testing.assert_close(sample.logp, expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("options", [{}, dict(top_p=0.9), dict(top_k=4), dict(min_p=0.01)])
def test_a_logit_of_minus_infinity_is_never_drawn_nor_kept(options):
    logits = random_logits(20, 200, 6)
    logits[:, [0, 5]] = -INF
    sample = sample_tokens(logits, generator=seeded(21), **options)
    assert not torch.isin(sample.tokens, torch.tensor([0, 5])).any()
    assert torch.isfinite(sample.logp).all()
    if options:
        assert not {0, 5} & set(itertools.chain(*kept_ids(sample)))


def test_sampling_leaves_no_gradient():
    logits = random_logits(22, 2, 5).requires_grad_()
    assert not sample_tokens(logits, top_k=2, generator=seeded()).logp.requires_grad


@given(st.integers(0, 10_000), st.sampled_from(list(FILTERS.values())), st.floats(0.3, 3))
def test_every_sampled_token_can_be_scored(seed, options, temperature):
    """Keep Sampling Mask (methods 23): finite, and equal to what the sampler stored."""
    logits = random_logits(seed, 6, 11, spread=4.0)
    sample = sample_tokens(logits, temperature=temperature, generator=seeded(seed), **options)
    scored = masked_log_probs(logits, sample.tokens, sample.kept, temperature)
    torch.testing.assert_close(scored, sample.logp, rtol=0, atol=3e-6)
    assert (sample.kept == sample.tokens[:, None]).any(1).all()
    assert (sample.kept.diff(dim=1)[sample.kept[:, 1:] >= 0] > 0).all()  # ascending, each id once


# --- scoring ---------------------------------------------------------------------------------


def test_masked_probabilities_sum_to_one_over_the_kept_set():
    logits = random_logits(23, 9, dtype=torch.float64)
    kept = torch.tensor([1, 4, 5, 8, -1, -1], dtype=torch.int32)
    tokens = torch.tensor([1, 4, 5, 8])
    logp = masked_log_probs(logits.expand(4, 9), tokens, kept.expand(4, 6), 0.8)
    exact = (logits[tokens] / 0.8).log_softmax(0)
    torch.testing.assert_close(logp, exact, rtol=0, atol=1e-15)
    assert logp.exp().sum().item() == pytest.approx(1, abs=1e-15)


def test_the_gradient_stays_within_the_kept_set():
    """∇ log π(a) = (1[v = a] − π(v)) / T on the kept set, nothing elsewhere."""
    logits = random_logits(24, 1, 7, dtype=torch.float64).requires_grad_()
    kept, token, temperature = torch.tensor([[0, 2, 3, -1]]), torch.tensor([2]), 1.3
    masked_log_probs(logits, token, kept, temperature).sum().backward()
    pi = (logits[0, [0, 2, 3]].detach() / temperature).softmax(0)
    expected = torch.zeros(1, 7, dtype=torch.float64)
    expected[0, [0, 2, 3]] = (torch.tensor([0.0, 1.0, 0.0]) - pi) / temperature
    torch.testing.assert_close(logits.grad, expected, rtol=0, atol=1e-14)


def test_forbidden_logits_do_not_reach_the_score():
    kept, tokens = torch.tensor([[1, 2]]), torch.tensor([2])
    clean = torch.tensor([[0.0, 1.0, 2.0, 0.0]], requires_grad=True)
    dirty = torch.tensor([[INF, 1.0, 2.0, -INF]], requires_grad=True)
    scores = [masked_log_probs(x, tokens, kept) for x in (clean, dirty)]
    assert torch.equal(*scores)
    scores[1].sum().backward()
    assert dirty.grad[0, [0, 3]].tolist() == [0, 0] and torch.isfinite(dirty.grad[0, 1:3]).all()


def test_the_filler_is_not_a_token():
    """Filler −1 must not pick up the logit of the first (clamped) or last id."""
    logits = torch.tensor([[50.0, 0.0, 0.0, 50.0]])
    logp = masked_log_probs(logits, torch.tensor([1]), torch.tensor([[1, 2, -1, -1]]))
    assert logp.item() == pytest.approx(-math.log(2), abs=1e-7)


def test_without_a_kept_set_the_whole_vocabulary_counts():
    logits, tokens = random_logits(25, 2, 3, 8), torch.tensor([[0, 7, 3], [1, 1, 5]])
    expected = (logits / 0.9).log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    scored = masked_log_probs(logits, tokens, None, 0.9)
    torch.testing.assert_close(scored, expected, rtol=0, atol=1e-6)


def test_running_top_p_again_on_other_logits_loses_sampled_tokens():
    """Why the set is stored (methods 23): the trainer's own top-p would exclude some tokens."""
    logits = random_logits(26, 2000, 12)
    noisy = logits + 0.1 * random_logits(27, 2000, 12, spread=1.0)
    sample = sample_tokens(logits, top_p=0.8, generator=seeded(28))
    again = sample_tokens(noisy, top_p=0.8, generator=seeded(28))
    outside = ~(again.kept == sample.tokens[:, None]).any(1)
    assert 0 < outside.float().mean() < 0.1
    assert torch.isfinite(masked_log_probs(noisy, sample.tokens, sample.kept)).all()
    with pytest.raises(ValueError, match="outside its kept set"):
        masked_log_probs(noisy, sample.tokens, again.kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    logits = random_logits(29, 5, 9, dtype=dtype)
    tokens, kept = torch.zeros(5, dtype=torch.long), torch.tensor([[0, 4]]).expand(5, 2)
    scored = masked_log_probs(logits, tokens, kept, 0.7)
    assert scored.dtype == torch.float32
    assert torch.equal(scored, masked_log_probs(logits.float(), tokens, kept, 0.7))


# --- bad input -------------------------------------------------------------------------------

LOGITS = torch.zeros(2, 4)


@pytest.mark.parametrize(
    "logits, options, message",
    [
        (torch.zeros(4), {}, r"logits has shape \(4,\).*\(B, V\)"),
        (torch.zeros(2, 3, 4), {}, r"logits has shape \(2, 3, 4\)"),
        (LOGITS, dict(temperature=0), "temperature=0"),
        (LOGITS, dict(temperature=-1.0), "temperature=-1.0"),
        (LOGITS, dict(temperature=math.nan), "temperature=nan"),
        (LOGITS, dict(temperature=INF), "temperature=inf"),
        (LOGITS, dict(top_p=0.0), "top_p=0.0"),
        (LOGITS, dict(top_p=1.1), "top_p=1.1"),
        (LOGITS, dict(top_p=math.nan), "top_p=nan"),
        (LOGITS, dict(min_p=-0.1), "min_p=-0.1"),
        (LOGITS, dict(min_p=1.5), "min_p=1.5"),
        (LOGITS, dict(top_k=-1), "top_k=-1"),
        (LOGITS, dict(allowed=torch.ones(2, 4)), "allowed has .* dtype torch.float32"),
        (LOGITS, dict(allowed=torch.ones(2).bool()), r"allowed has shape \(2,\)"),
        (LOGITS, dict(allowed=torch.ones(3, 4).bool()), r"allowed has shape \(3, 4\)"),
        (LOGITS, dict(allowed=torch.zeros(4).bool()), "no allowed token"),
        (torch.tensor([[0.0, math.nan]]), {}, "NaN"),
        (torch.tensor([[0.0, INF]]), {}, r"\+inf"),
        (torch.tensor([[-INF, -INF], [0.0, 0.0]]), {}, "no allowed token"),
        (torch.tensor([[0.0, 1.0]]), dict(temperature=1e-42), r"logits .*\+inf"),
    ],
)
def test_bad_input_to_the_sampler(logits, options, message):
    with pytest.raises(ValueError, match=message):
        sample_tokens(logits, generator=seeded(), **options)


@pytest.mark.parametrize(
    "tokens, kept, temperature, message",
    [
        (torch.zeros(3).long(), None, 1.0, r"tokens has shape \(3,\); expected \(2,\)"),
        (torch.zeros(2, 1).long(), None, 1.0, r"tokens has shape \(2, 1\)"),
        (torch.zeros(2).long(), torch.zeros(1, 2).int(), 1.0, r"kept has shape \(1, 2\)"),
        (torch.zeros(2).long(), torch.tensor([[0], [1]]), 1.0, "outside its kept set"),
        (torch.zeros(2).long(), None, 0.0, "temperature=0.0"),
        (torch.zeros(2).long(), None, INF, "temperature=inf"),
    ],
)
def test_bad_input_to_the_score(tokens, kept, temperature, message):
    with pytest.raises(ValueError, match=message):
        masked_log_probs(LOGITS, tokens, kept, temperature)
