"""Explorer of chapter 32: its curve is the polynomial, its matrix what the function returns."""

import pytest
import torch

from stablerl_core.explorers.newton_schulz import X, after, orthogonalize, spectrum
from stablerl_core.numerics import COEFFICIENTS, newton_schulz


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_the_curve_is_the_polynomial_applied_so_often(steps):
    x = torch.tensor([0.001, 0.02, 0.3, 0.9], dtype=torch.float64)
    for name in ("quintic", "polar express"):
        table, y = COEFFICIENTS[name.replace(" ", "_")], x
        for i in range(steps):
            a, b, c = table[min(i, len(table) - 1)]
            y = a * y + b * y**3 + c * y**5
        torch.testing.assert_close(after(x, steps, name), y)


def test_the_cubic_goes_to_one_and_stays():
    x = torch.tensor([0.3, 0.6, 1.0], dtype=torch.float64)
    torch.testing.assert_close(after(x, 10, "textbook cubic"), torch.ones_like(x))
    slow = after(torch.tensor([0.01], dtype=torch.float64), 5, "textbook cubic")
    assert slow.item() == pytest.approx(0.01 * 1.5**5, rel=1e-2)


def test_the_matrix_is_what_newton_schulz_returns_for_any_of_that_spectrum():
    torch.manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64)).Q for _ in range(2))
    matrix = u * spectrum(0.01) @ v
    found = torch.linalg.svdvals(newton_schulz(matrix)).sort().values
    _, (_, own) = orthogonalize(5, "quintic", 0.01)
    torch.testing.assert_close(torch.tensor(own.lines["after"]).double().sort().values, found)


def test_five_quintic_steps_land_in_the_band_that_is_named():
    text, (curve, _) = orthogonalize(5, "quintic", 0.1)
    inside = [y for x, y in zip(X, curve.lines["the iteration"], strict=True) if x >= 0.0099]
    assert 0.67 < min(inside) < 0.70 and 1.12 < max(inside) < 1.21
    assert f"[{min(inside):.2f}, {max(inside):.2f}]" in text
