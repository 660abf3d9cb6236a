"""Real casts of weights: what a sampler of lower precision holds. Computation stays as it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
}


def cast_and_back(weight: Tensor, precision: str) -> Tensor:
    """The nearest value that `precision` can hold, in the weight's own dtype.

    `float8_e4m3` and `int4` scale each row (last dimension) so that its largest magnitude maps
    to the largest value of the format (448 and 7); the others are plain casts.
    """
    if precision == "int4":
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        return (weight / scale).round() * scale
    if precision == "float8_e4m3":
        limit = torch.finfo(torch.float8_e4m3fn).max
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / limit
        return (weight / scale).to(torch.float8_e4m3fn).to(weight.dtype) * scale
    return weight.to(DTYPES[precision]).to(weight.dtype)


@torch.no_grad()
def round_weights(
    source: nn.Module, target: nn.Module, precision: str, skip: tuple[str, ...] = ()
) -> None:
    """Copy `source` into `target`, rounding matrices to `precision`.

    Vectors (norm gains) keep their precision, as quantised engines leave them. Parameters whose
    name contains a string of `skip` are not sent: that is the fault of a broken weight sync.
    """
    for name, tensor in source.state_dict().items():
        if any(part in name for part in skip):
            continue
        rounds = tensor.dim() >= 2 and tensor.is_floating_point()
        value = cast_and_back(tensor, precision) if rounds else tensor
        _slot(target, name).copy_(value)


def _slot(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)
