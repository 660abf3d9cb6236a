"""KL estimates and exact KL: types, tails, masks, −inf logits, refusals.

Values and expected gradients are in tests/exact/test_enumerated_kl.py.
"""

import math

import pytest
import torch

from stablerl_core.policy import exact_kl, kl_estimate

ALL = ["k1", "k2", "k3", "unbiased"]
INF, NAN = math.inf, math.nan


def random_logp(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return -torch.rand(*shape, generator=generator, dtype=torch.float64) * 3


def estimate(name, logp, ref_logp, sampler_logp, **options):
    sampler = sampler_logp if name == "unbiased" else None
    return kl_estimate(logp, ref_logp, name, sampler, **options)


@pytest.mark.parametrize("name", ALL)
def test_one_value_a_token_and_gradient_through_logp_only(name):
    tensors = [random_logp(seed, 2, 3).requires_grad_() for seed in range(3)]
    value = estimate(name, *tensors)
    assert value.shape == (2, 3)
    value.sum().backward()
    assert (tensors[0].grad != 0).all()
    assert tensors[1].grad is None and tensors[2].grad is None


def test_each_formula_and_its_score_coefficient_at_one_token():
    """The derivative with respect to log π_θ is what each estimator multiplies the score by."""
    logp, ref, mu = -1.0, -1.5, -2.0
    log_delta, rho = ref - logp, math.exp(logp - mu)
    delta = math.exp(log_delta)
    k3 = delta - 1 - log_delta
    expected = {
        "k1": (0.5, 1),
        "k2": (0.125, -log_delta),
        "k3": (k3, 1 - delta),
        "unbiased": (rho * k3, -rho * log_delta),
    }
    for name, (value, coefficient) in expected.items():
        tokens = [torch.tensor([x], dtype=torch.float64) for x in (logp, ref, mu)]
        actual = estimate(name, tokens[0].requires_grad_(), *tokens[1:])
        actual.sum().backward()
        assert actual.item() == pytest.approx(value, rel=1e-12)
        assert tokens[0].grad.item() == pytest.approx(coefficient, rel=1e-12)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    half = [random_logp(seed, 8).to(dtype) for seed in range(3)]
    actual = estimate(name, *half)
    assert actual.dtype == torch.float32
    expected = estimate(name, *(x.double() for x in half))
    assert expected.dtype == torch.float64
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["k3", "unbiased"])
def test_float32_keeps_its_digits_near_the_reference(name):
    """Log-ratio 1e-3: the KL is 5e-7, where exp(x) − 1 − x in float32 is wrong by 10 %."""
    logp = random_logp(0, 100).float()
    ref = logp + 1e-3
    sampler = logp.clone()
    exact = estimate(name, logp.double(), ref.double(), sampler.double())
    torch.testing.assert_close(
        estimate(name, logp, ref, sampler).double(), exact, rtol=2e-3, atol=0
    )


def test_nothing_is_clamped():
    logp, ref = torch.tensor([-30.0]).double(), torch.tensor([-1.0]).double()
    assert kl_estimate(logp, ref, "k3").item() == pytest.approx(math.exp(29) - 30, rel=1e-12)
    assert kl_estimate(logp, ref, "k2").item() == pytest.approx(29**2 / 2, rel=1e-12)
    assert kl_estimate(logp, ref, "k1").item() == -29


def test_unbiased_stays_finite_where_the_policy_has_dropped_a_token():
    """δ = e^99 overflows float32 and ρ = e^−99 vanishes; their product is 1, the gradient 0."""
    logp = torch.tensor([-100.0], requires_grad=True)
    value = kl_estimate(logp, torch.tensor([-1.0]), "unbiased", torch.tensor([-1.0]))
    value.sum().backward()
    assert value.item() == pytest.approx(1.0, rel=1e-6)
    assert logp.grad.item() == pytest.approx(0.0, abs=1e-12)
    assert kl_estimate(logp, torch.tensor([-1.0]), "k3").item() == INF


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e30, -1e30])
def test_masked_positions_reach_neither_value_nor_gradient(name, garbage):
    clean = [random_logp(seed, 2, 3) for seed in range(3)]
    mask = torch.tensor([[True, True, False], [True, False, False]])
    dirty = [x.masked_fill(~mask, garbage) for x in clean]
    for tensors in (clean, dirty):
        tensors[0].requires_grad_()
    values = [estimate(name, *tensors, mask=mask) for tensors in (clean, dirty)]
    for value in values:
        value.sum().backward()
    assert torch.equal(values[0], values[1])
    assert torch.equal(values[1][~mask], torch.zeros(3, dtype=torch.float64))
    assert torch.equal(dirty[0].grad, clean[0].grad)
    assert torch.equal(values[0][mask], estimate(name, *clean)[mask])


@pytest.mark.parametrize("name", ALL)
def test_no_position_at_all(name):
    empty = torch.zeros(2, 0, requires_grad=True)
    assert estimate(name, empty, empty.detach(), empty.detach()).shape == (2, 0)


two = torch.full((2, 2), -1.0)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((two, two, "k4"), "estimator is 'k4', expected one of"),
        ((two, two, "unbiased"), "sampler_logp is missing with estimator 'unbiased'"),
        ((two, two, "k3", two), "sampler_logp is given with estimator 'k3'"),
        ((two, two[:1], "k3"), r"ref_logp has shape \(1, 2\), expected \(2, 2\)"),
        ((two, two, "unbiased", two[:, :1]), r"sampler_logp has shape \(2, 1\), expected"),
        ((two.long(), two, "k3"), "logp has dtype torch.int64"),
        ((two * NAN, two, "k3"), r"logp is nan at \[0, 0\] \(4 of 4"),
        ((two, two * INF, "k3"), r"ref_logp is -inf at \[0, 0\]"),
        ((two, two, "unbiased", -INF * two), r"sampler_logp is inf at \[0, 0\]"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        kl_estimate(*arguments)


def test_bad_masks_are_named():
    with pytest.raises(ValueError, match=r"mask has shape \(2, 1\), expected \(2, 2\)"):
        kl_estimate(two, two, "k3", mask=torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask has dtype torch.int64, expected torch.bool"):
        kl_estimate(two, two, "k3", mask=torch.ones(2, 2, dtype=torch.int64))


def test_exact_kl_with_inf_logits_is_that_of_the_smaller_vocabulary():
    """Tokens excluded by both: value and gradient as if they did not exist."""
    small = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.1, 0.2]], dtype=torch.float64)
    ref_small = torch.tensor([[1.0, 0.5, -0.2], [3.0, 0.0, 0.0]], dtype=torch.float64)
    hole = torch.full((2, 2), -INF, dtype=torch.float64)
    wide, ref_wide = torch.cat([small, hole], -1), torch.cat([ref_small, hole], -1)
    for tensor in (small, wide, ref_small, ref_wide):
        tensor.requires_grad_()
    values = exact_kl(small, ref_small), exact_kl(wide, ref_wide)
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)
    for value in values:
        value.sum().backward()
    for narrow, full in ((small, wide), (ref_small, ref_wide)):
        torch.testing.assert_close(full.grad[:, :3], narrow.grad, rtol=1e-12, atol=1e-15)
        assert torch.equal(full.grad[:, 3:], torch.zeros(2, 2, dtype=torch.float64))


def test_exact_kl_where_only_one_side_has_mass():
    """π has none: 0 log 0 = 0, finite. π_ref has none: the KL is infinite, and says so."""
    full = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    cut = torch.tensor([0.0, 0.0, -INF], dtype=torch.float64, requires_grad=True)
    value = exact_kl(cut, full)
    value.backward()
    assert value.item() == pytest.approx(math.log(3 / 2))
    assert torch.isfinite(cut.grad).all() and torch.isfinite(full.grad).all()
    assert exact_kl(full.detach(), cut.detach()).item() == INF


def test_exact_kl_with_a_probability_that_underflows():
    """p = e^−200 is 0 in float32; with −inf in the reference its product must not become NaN."""
    sharp = torch.tensor([0.0, -200.0], requires_grad=True)
    value = exact_kl(sharp, torch.tensor([0.0, -INF]))
    value.backward()
    assert value.item() == 0 and torch.isfinite(sharp.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_kl_of_half_precision_logits_is_summed_in_float32(dtype):
    generator = torch.Generator().manual_seed(0)
    logits, ref = (torch.randn(2, 1000, generator=generator).to(dtype) for _ in range(2))
    actual = exact_kl(logits, ref)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double(), exact_kl(logits.double(), ref.double()), rtol=1e-5, atol=0
    )


@pytest.mark.parametrize(
    "logits, ref, message",
    [
        (torch.zeros(2, 3), torch.zeros(3), r"ref_logits has shape \(3,\), expected \(2, 3\)"),
        (torch.tensor([[0.0, NAN]]), torch.zeros(1, 2), "logits has shape .* 1 rows"),
        (torch.zeros(1, 2), torch.full((1, 2), -INF), "ref_logits has shape .* 1 rows"),
        (torch.zeros(1, 0), torch.zeros(1, 0), "logits has shape"),
        (torch.zeros(1, 2).long(), torch.zeros(1, 2), "logits has dtype torch.int64"),
    ],
)
def test_exact_kl_names_bad_input(logits, ref, message):
    with pytest.raises(ValueError, match=message):
        exact_kl(logits, ref)
