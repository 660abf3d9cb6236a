"""Entropy at its known points, with −inf logits, in half precision."""

import math

import pytest
import torch

from stablerl_core.policy import entropy

INF = math.inf


def test_known_points():
    logits = torch.tensor([[0.0] * 4, [0.0, -INF, -INF, -INF], [5.0, 5.0, -INF, -INF]])
    expected = torch.tensor([math.log(4), 0.0, math.log(2)])
    torch.testing.assert_close(entropy(logits), expected)


def test_inf_logits_are_absent_in_value_and_gradient():
    small = torch.tensor([[0.3, -1.0, 2.0]], dtype=torch.float64)
    wide = torch.cat([small, torch.full((1, 2), -INF, dtype=torch.float64)], -1)
    small.requires_grad_()
    wide.requires_grad_()
    values = entropy(small), entropy(wide)
    torch.testing.assert_close(values[1], values[0], rtol=1e-12, atol=0)
    for value in values:
        value.sum().backward()
    torch.testing.assert_close(wide.grad[:, :3], small.grad, rtol=1e-12, atol=1e-15)
    assert wide.grad[:, 3:].tolist() == [[0.0, 0.0]]


def test_a_certain_token_has_a_finite_gradient():
    logits = torch.tensor([0.0, -200.0, -INF], requires_grad=True)
    value = entropy(logits)
    value.backward()
    assert value.item() == 0 and torch.isfinite(logits.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_float32(dtype):
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    actual = entropy(logits)
    assert actual.dtype == torch.float32 and actual.shape == (2,)
    torch.testing.assert_close(actual.double(), entropy(logits.double()), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    "logits", [torch.full((1, 2), -INF), torch.tensor([[0.0, INF]]), torch.zeros(3, 0)]
)
def test_a_row_that_is_no_distribution_is_named(logits):
    with pytest.raises(ValueError, match="logits has shape"):
        entropy(logits)
