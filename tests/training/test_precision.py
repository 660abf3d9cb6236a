"""Casts of the sampler's weights: equal to torch's, bounded error, what is left alone."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stablerl_core.training import small_moe
from stablerl_core.training.config import PRECISIONS
from stablerl_core.training.precision import cast_and_back, round_weights


def weights(seed=0, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shape = shape or (16, 64)
    return (torch.randn(*shape, generator=g) * torch.rand(shape[-2], 1, generator=g)).to(dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_plain_casts_are_those_of_torch(name):
    w = weights()
    assert torch.equal(cast_and_back(w, name), w.to(getattr(torch, name)).float())
    assert torch.equal(cast_and_back(w, name), w) == (name == "float32")


def test_float8_scales_each_row_to_its_largest_value():
    w = weights()
    scale = w.abs().amax(-1, keepdim=True) / 448
    expected = (w / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(cast_and_back(w, "float8_e4m3"), expected)


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_float8_error_bound(seed, size):
    """Three mantissa bits: ≤ 2⁻⁴ relative, ≤ 2⁻¹⁰ · scale below the normal range."""
    w = weights(seed, 4, 32) * size
    rounded = cast_and_back(w, "float8_e4m3")
    scale = w.abs().amax(-1, keepdim=True) / 448
    assert torch.isfinite(rounded).all()
    assert ((rounded - w).abs() <= torch.maximum(w.abs() / 16, scale / 1024) * (1 + 1e-5)).all()


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_int4_has_fifteen_levels_a_row_and_errs_by_half_a_step(seed, size):
    w = weights(seed, 4, 64) * size
    rounded = cast_and_back(w, "int4")
    step = w.abs().amax(-1, keepdim=True) / 7
    assert max(len(row.unique()) for row in rounded) <= 15
    levels = rounded / step
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
    assert ((rounded - w).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["float8_e4m3", "int4"])
def test_the_largest_of_each_row_survives_and_expert_tensors_work(name):
    w = weights(1, 3, 8, 16)
    rounded = cast_and_back(w, name)
    torch.testing.assert_close(rounded.abs().amax(-1), w.abs().amax(-1), rtol=1e-6, atol=0)
    for expert, alone in zip(rounded, w, strict=True):
        assert torch.equal(expert, cast_and_back(alone, name))


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_stays_and_zeros_stay_zero(name, dtype):
    w = weights(2, 4, 8, dtype=dtype)
    w[1] = 0
    rounded = cast_and_back(w, name)
    assert rounded.dtype == dtype and torch.isfinite(rounded).all()
    assert (rounded[1] == 0).all()


@pytest.mark.parametrize("name", PRECISIONS)
def test_rounding_what_is_rounded_changes_next_to_nothing(name):
    once = cast_and_back(weights(3), name)
    torch.testing.assert_close(cast_and_back(once, name), once, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("preset", ["mixtral-cpu", "deepseek-v3-cpu"])
def test_round_weights_casts_matrices_and_copies_vectors_and_buffers(preset):
    source, _ = small_moe(preset, seed=1)
    target, _ = small_moe(preset, seed=2)
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(0.001 * torch.arange(tensor.numel()).view(tensor.shape) % 0.0137)
    before = {k: t.clone() for k, t in source.state_dict().items()}
    round_weights(source, target, "float8_e4m3")
    vectors = 0
    for name, tensor in target.state_dict().items():
        vectors += tensor.dim() < 2
        wanted = before[name] if tensor.dim() < 2 else cast_and_back(before[name], "float8_e4m3")
        assert torch.equal(tensor, wanted), name
        assert torch.equal(source.state_dict()[name], before[name]), name
    assert vectors >= 5
    assert all(p.requires_grad for p in target.parameters())


def test_skipped_tensors_keep_their_old_value():
    source, target = (
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    )
    old = copy.deepcopy(target.state_dict())
    with torch.no_grad():
        source[1].weight.fill_(3)
    round_weights(source, target, "float32", skip=("0.w", "1.bias"))
    new = target.state_dict()
    assert torch.equal(new["0.weight"], old["0.weight"])
    assert torch.equal(new["0.bias"], source[0].bias)
    assert torch.equal(new["1.weight"], source[1].weight)
