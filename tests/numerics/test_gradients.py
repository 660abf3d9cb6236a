"""Gradient norm and clipping: the vector norm, faults stay visible, refusals."""

import math

import pytest
import torch
from torch import nn

from stablerl_core.numerics import clip_gradients, gradient_norm


def parameters(*grads, dtype=torch.float32):
    """Parameters whose gradients are given; None is a parameter that took no part."""
    out = []
    for grad in grads:
        value = torch.zeros(1 if grad is None else len(grad), dtype=dtype)
        out.append(nn.Parameter(value))
        out[-1].grad = None if grad is None else torch.tensor(grad, dtype=dtype)
    return out


def test_norm_of_all_gradients_together():
    assert gradient_norm(parameters([3.0], [0.0, 4.0], None)).item() == 5.0


def test_no_gradient_at_all_is_zero():
    assert gradient_norm(parameters(None, None)).item() == 0
    assert clip_gradients([], 1.0).item() == 0


def test_a_generator_of_parameters_is_read_once():
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    before = gradient_norm(model.parameters())
    assert clip_gradients(model.parameters(), 0.1) == before
    assert gradient_norm(model.parameters()).item() == pytest.approx(0.1, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_summed_in_float32(dtype):
    """300² overflows float16; 4096 equal entries are lost one by one in bfloat16."""
    norm = gradient_norm(parameters([300.0] * 4096, dtype=dtype))
    assert norm.dtype == torch.float32
    exact = torch.tensor(300.0, dtype=dtype).item() * 64
    assert norm.item() == pytest.approx(exact, rel=1e-6)


def test_double_precision_stays_double():
    norm = gradient_norm(parameters([1.0, 1e-9], dtype=torch.float64))
    assert norm.dtype == torch.float64 and norm.item() == math.sqrt(1 + 1e-18)


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
def test_a_fault_is_reported_and_left_where_it_is(fault):
    ps = parameters([1.0, fault], [2.0])
    norm = clip_gradients(ps, 1.0)
    assert not math.isfinite(norm.item()) and math.isnan(norm.item()) == math.isnan(fault)
    assert torch.equal(ps[1].grad, torch.tensor([2.0]))
    assert ps[0].grad[0] == 1 and not math.isfinite(ps[0].grad[1])


def test_clipping_keeps_the_direction_and_returns_the_norm_before():
    ps = parameters([3.0], [0.0, 4.0])
    assert clip_gradients(ps, 2.0).item() == 5.0
    torch.testing.assert_close(ps[0].grad, torch.tensor([1.2]))
    torch.testing.assert_close(ps[1].grad, torch.tensor([0.0, 1.6]))


@pytest.mark.parametrize("max_norm", [5.0, 6.0, math.inf])
def test_a_gradient_within_the_bound_is_not_touched(max_norm):
    ps = parameters([3.0], [0.0, 4.0], None)
    clip_gradients(ps, max_norm)
    assert ps[0].grad.tolist() == [3] and ps[1].grad.tolist() == [0, 4] and ps[2].grad is None


def test_clipping_is_that_of_torch():
    g = torch.Generator().manual_seed(0)
    grads = [torch.randn(n, generator=g).tolist() for n in (3, 50, 7)]
    ours, theirs = parameters(*grads), parameters(*grads)
    norm = clip_gradients(ours, 1.0)
    assert norm == torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("max_norm", [0.0, -1.0, math.nan])
def test_a_bound_that_is_none_is_refused(max_norm):
    with pytest.raises(ValueError, match=f"max_norm={max_norm}"):
        clip_gradients(parameters([1.0]), max_norm)
