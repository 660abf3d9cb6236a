"""Newton-Schulz: the singular-value map, its symmetries, batches, tiny inputs, refusals."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.numerics import newton_schulz
from stablerl_core.numerics.newton_schulz import COEFFICIENTS, POLAR_EXPRESS, QUINTIC

SHAPES = [(1, 1), (1, 7), (6, 1), (5, 5), (8, 20), (20, 8)]
NAMES = tuple(COEFFICIENTS)


def gaussian(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)


def with_singular_values(values, rows=24, columns=40, seed=0):
    """A matrix of these singular values, the largest of which is what Frobenius must not hide."""
    u, _ = torch.linalg.qr(gaussian(rows, rows, seed=seed))
    v, _ = torch.linalg.qr(gaussian(columns, columns, seed=seed + 1))
    s = torch.as_tensor(values, dtype=torch.float64)
    return u[:, : len(s)] @ (s[:, None] * v[:, : len(s)].T)


def polynomial(x, name, steps):
    """The scalar iteration, written out."""
    for step in range(steps):
        table = COEFFICIENTS[name]
        a, b, c = table[min(step, len(table) - 1)]
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_it_maps_singular_values_by_the_polynomial_and_keeps_the_vectors(shape, name, steps):
    m = gaussian(*shape)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    expected = u @ (polynomial(s / m.norm(), name, steps)[:, None] * vh)
    found = newton_schulz(m, steps=steps, coefficients=name)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_five_quintic_steps_bring_two_decades_into_the_published_band():
    """Singular values of [.01, 1] land in [.68, 1.13]; the smallest of a square Gaussian lags."""
    spread = torch.logspace(-2, 0, 4001, dtype=torch.float64)
    mapped = polynomial(spread, "quintic", 5)
    assert mapped.min() == pytest.approx(0.682, abs=2e-3)
    assert mapped.max() == pytest.approx(1.134, abs=2e-3)
    values = torch.logspace(-1.9, 0, 24, dtype=torch.float64)
    found = torch.linalg.svdvals(newton_schulz(with_singular_values(values)))
    assert 0.68 < found.min() and found.max() < 1.14
    square = gaussian(64, 64)
    assert torch.linalg.svdvals(newton_schulz(square)).min() < 0.5


def test_the_norm_after_five_steps_is_about_87_hundredths_of_the_root():
    for shape in [(64, 64), (64, 128), (128, 32)]:
        norm = newton_schulz(gaussian(*shape)).norm()
        assert norm.item() == pytest.approx(0.87 * math.sqrt(min(shape)), rel=0.05)


def test_polar_express_is_closer_to_one_and_more_steps_arrive():
    """The paper's polynomials, without their cushion, converge from singular values ≥ 1e-3."""
    spread = torch.logspace(-3, 0, 4001, dtype=torch.float64)
    errors = [(polynomial(spread, name, 5) - 1).abs().max().item() for name in NAMES]
    assert errors[1] < 0.16 < 0.5 < errors[0]
    assert (polynomial(spread, "polar_express", 9) - 1).abs().max() < 0.01
    x = torch.logspace(-3, 0, 4001, dtype=torch.float64)
    for a, b, c in POLAR_EXPRESS:
        x = a * x + b * x**3 + c * x**5
    assert (x - 1).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_low_rank_is_not_filled_up(name):
    """Singular values of 0 stay 0: the missing directions are not invented."""
    found = torch.linalg.svdvals(newton_schulz(with_singular_values([1.0, 0.5]), coefficients=name))
    assert found[:2].min() > 0.6 and found[2:].max() < 1e-9


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("power", [-116, -60, -10, 16, 66, 122])  # of two: scaling is exact
def test_the_scale_has_no_influence(dtype, power):
    m = gaussian(6, 9).to(dtype)
    found, expected = newton_schulz(m * math.ldexp(1.0, power)), newton_schulz(m)
    assert torch.equal(found, expected) and expected.dtype == dtype


def test_even_the_smallest_number_is_orthogonalized():
    tiny = torch.full((3, 3), 0.0)
    tiny.fill_diagonal_(torch.finfo(torch.float32).smallest_normal / 2**22)
    assert 0 < tiny[0, 0] < 1e-44
    torch.testing.assert_close(newton_schulz(tiny), newton_schulz(torch.eye(3)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_zero_stays_zero_also_beside_others(dtype):
    batch = torch.stack([torch.zeros(4, 6), gaussian(4, 6).float(), torch.zeros(4, 6)]).to(dtype)
    found = newton_schulz(batch)
    assert not found[0].any() and not found[2].any() and found[1].norm() > 1
    assert torch.isfinite(found).all() and found.dtype == dtype


@given(
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    seed=st.integers(0, 99),
    name=st.sampled_from(NAMES),
)
def test_transposing_and_rotating_go_through(rows, columns, seed, name):
    m = gaussian(rows, columns, seed=seed)
    found = newton_schulz(m, coefficients=name)
    torch.testing.assert_close(newton_schulz(m.T, coefficients=name), found.T, rtol=1e-9, atol=1e-9)
    q, _ = torch.linalg.qr(gaussian(rows, rows, seed=seed + 100))
    torch.testing.assert_close(
        newton_schulz(q @ m, coefficients=name), q @ found, rtol=1e-8, atol=1e-8
    )
    assert torch.equal(newton_schulz(-m, coefficients=name), -found)


@pytest.mark.parametrize("lead", [(3,), (2, 3), (1, 1, 4), (0,)])
@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_a_batch_is_its_matrices_one_by_one(lead, shape):
    batch = gaussian(*lead, *shape) * torch.logspace(-3, 3, max(1, math.prod(lead)))[
        : math.prod(lead)
    ].view(*lead, 1, 1)
    found = newton_schulz(batch)
    assert found.shape == batch.shape
    for one, alone in zip(found.flatten(0, -3), batch.flatten(0, -3), strict=True):
        torch.testing.assert_close(one, newton_schulz(alone), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_stays_in_its_matrix_and_shows(fault):
    batch = gaussian(3, 4, 6)
    clean = newton_schulz(batch)
    batch[1, 2, 3] = fault
    found = newton_schulz(batch)
    assert torch.isnan(found[1]).any()
    assert torch.equal(found[::2], clean[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_computed_in_is_a_choice(dtype):
    m = gaussian(16, 24, dtype=torch.float32)
    exact, found = newton_schulz(m.double()), newton_schulz(m, dtype=dtype)
    assert found.dtype == torch.float32
    error = (found - exact).abs().max().item()
    assert error < {torch.bfloat16: 0.05, torch.float32: 1e-5, torch.float64: 1e-7}[dtype]
    assert (error > 1e-3) == (dtype == torch.bfloat16)


def test_half_precision_is_computed_in_float32():
    m = gaussian(16, 24, dtype=torch.bfloat16)
    assert torch.equal(newton_schulz(m), newton_schulz(m.float()).bfloat16())


def test_layout_in_memory_and_the_input_itself_do_not_matter():
    m = gaussian(12, 20)
    before, strided = m.clone(), gaussian(20, 12).T.copy_(m)
    torch.testing.assert_close(newton_schulz(strided), newton_schulz(m), rtol=1e-12, atol=1e-12)
    assert torch.equal(m, before)


def test_own_coefficients_one_triple_a_step():
    m = gaussian(5, 7)
    cubic = [(1.5, -0.5, 0.0)] * 20
    u, _, vh = torch.linalg.svd(m, full_matrices=False)
    torch.testing.assert_close(
        newton_schulz(m, steps=20, coefficients=cubic), u @ vh, rtol=1e-6, atol=1e-6
    )
    assert torch.equal(newton_schulz(m, coefficients=QUINTIC * 5), newton_schulz(m))


@pytest.mark.parametrize(
    "matrices, options, message",
    [
        (torch.ones(3), {}, r"matrices has shape \(3,\)"),
        (torch.ones(2, 2, dtype=torch.long), {}, "dtype torch.int64"),
        (torch.ones(2, 2, dtype=torch.complex64), {}, "dtype torch.complex64"),
        (torch.ones(2, 2), {"steps": 0}, "steps=0: must lie between 1 and 99"),
        (torch.ones(2, 2), {"steps": 100}, "steps=100"),
        (torch.ones(2, 2), {"coefficients": "cubic"}, "coefficients='cubic': one of quintic"),
        (torch.ones(2, 2), {"coefficients": [(1, 2, 3)]}, "expected steps=5 triples"),
        (torch.ones(2, 2), {"coefficients": [(1, 2)] * 5}, "expected steps=5 triples"),
    ],
)
def test_refusals(matrices, options, message):
    with pytest.raises(ValueError, match=message):
        newton_schulz(matrices, **options)
