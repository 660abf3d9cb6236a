"""The safe vocabulary: its definition, the sampler's min-p, the trainer's score, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.system import masked_log_probs, safe_vocabulary, sample_tokens

INF, NAN = math.inf, math.nan


def random_logits(seed, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (2 * torch.randn(*shape, generator=g)).to(dtype)


def test_by_hand():
    probs = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.05, 0.05, 0.0, 0.9]])
    kept, mass = safe_vocabulary(probs.log(), 0.3)
    assert kept.dtype == torch.int32 and kept.tolist() == [[0, 1, 2], [3, -1, -1]]
    torch.testing.assert_close(mass, torch.tensor([0.95, 0.9]))
    kept, mass = safe_vocabulary(probs.log(), 0.0)  # all but what has no probability
    assert kept.tolist() == [[0, 1, 2, 3], [0, 1, 3, -1]]
    torch.testing.assert_close(mass, torch.ones(2))
    assert safe_vocabulary(probs.log(), 1.0).kept.tolist() == [[0], [3]]


@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from([0.7, 1.0, 1.5]))
def test_it_is_the_set_that_the_sampler_keeps_with_min_p(seed, threshold, temperature):
    logits = random_logits(seed, 4, 9)
    kept, _ = safe_vocabulary(logits, threshold, temperature)
    sample = sample_tokens(
        logits,
        temperature=temperature,
        min_p=threshold,
        generator=torch.Generator().manual_seed(seed),
    )
    if threshold > 0:
        assert torch.equal(kept, sample.kept)
        scored = masked_log_probs(logits, sample.tokens, kept, temperature)
        torch.testing.assert_close(scored, sample.logp)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_a_row_does_not_depend_on_the_others_and_the_shape_may_be_any(seed, threshold):
    logits = random_logits(seed, 2, 3, 9)
    kept, mass = safe_vocabulary(logits, threshold)
    assert kept.shape[:2] == mass.shape == (2, 3)
    for i in range(2):
        for t in range(3):
            alone = safe_vocabulary(logits[i, t], threshold)
            assert kept[i, t][kept[i, t] >= 0].tolist() == alone.kept.tolist()
            assert mass[i, t] == pytest.approx(alone.mass.item(), rel=1e-6)
    shifted, _ = safe_vocabulary(logits + 3, threshold)
    assert shifted.shape[-1] == kept.shape[-1] or threshold in (0, 1)


@given(st.integers(0, 1000))
def test_the_tail_is_not_kept_and_the_rest_has_the_mass(seed):
    logits = random_logits(seed, 3, 12).double()
    kept, mass = safe_vocabulary(logits, 0.1)
    probs = logits.softmax(-1)
    inside = torch.zeros(3, 12).bool()
    for row, ids in zip(inside, kept, strict=True):
        row[ids[ids >= 0].long()] = True
    edge = 0.1 * probs.amax(-1, keepdim=True)
    assert (probs[inside] >= edge.expand(3, 12)[inside]).all()
    assert (probs[~inside] < edge.expand(3, 12)[~inside]).all()
    torch.testing.assert_close(mass, (probs * inside).sum(-1), rtol=1e-12, atol=0)
    masses = [safe_vocabulary(logits, t).mass for t in (0.0, 0.01, 0.1, 0.5, 1.0)]
    assert all((a >= b - 1e-15).all() for a, b in zip(masses, masses[1:], strict=False))


def test_the_trainers_own_set_can_miss_the_sampled_token():
    """Near the edge a small change of the logits moves a token out; the stored set is safe."""
    sampler = torch.tensor([[0.0, -1.0, -5.0]])
    trainer = torch.tensor([[0.0, -1.02, -5.0]])
    threshold = math.exp(-1.01)
    stored = safe_vocabulary(sampler, threshold).kept
    again = safe_vocabulary(trainer, threshold).kept
    token = torch.tensor([1])
    assert torch.isfinite(masked_log_probs(trainer, token, stored)).all()
    with pytest.raises(ValueError, match="outside its kept set"):
        masked_log_probs(trainer, token, again)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logits = random_logits(0, 5, 9, dtype=dtype)
    kept, mass = safe_vocabulary(logits, 0.05)
    exact = safe_vocabulary(logits.double(), 0.05)
    assert mass.dtype == torch.float32 and torch.equal(kept, exact.kept)
    torch.testing.assert_close(mass.double(), exact.mass, rtol=1e-6, atol=0)


def test_nothing_keeps_a_gradient_and_an_empty_batch_is_fine():
    assert not safe_vocabulary(random_logits(0, 2, 5).requires_grad_()).mass.requires_grad
    kept, mass = safe_vocabulary(torch.zeros(0, 5))
    assert len(kept) == len(mass) == 0


@pytest.mark.parametrize(
    "logits, options, message",
    [
        (torch.zeros(2, 3), dict(threshold=1.1), "threshold=1.1"),
        (torch.zeros(2, 3), dict(threshold=NAN), "threshold=nan"),
        (torch.zeros(2, 3), dict(temperature=0.0), "temperature=0.0"),
        (torch.tensor([[0, NAN]]), {}, "without NaN"),
        (torch.tensor([[0, INF]]), {}, "without NaN or .inf"),
        (torch.tensor([[-INF, -INF]]), {}, "not all −inf"),
        (torch.tensor(1.0), {}, "logits must be"),
    ],
)
def test_bad_input(logits, options, message):
    with pytest.raises(ValueError, match=message):
        safe_vocabulary(logits, **options)
