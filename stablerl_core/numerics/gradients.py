"""What the gradients of one update look like, before anything is done to them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """2-norm of all gradients together, in float32 or better; NaN and inf stay visible.

    ‖g‖ = √(Σ_p ‖∇_p‖²). Parameters without a gradient count as zero. Returns a 0-d tensor.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    if not grads:
        return torch.zeros(())
    wide = [g.to(torch.promote_types(g.dtype, torch.float32)) for g in grads]
    return torch.nn.utils.get_total_norm(wide)


def clip_gradients(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scale all gradients by min(1, max_norm/‖g‖) in place; returns ‖g‖ before the scaling.

    A non-finite norm leaves the gradients as they are: multiplying by 1/inf or NaN would turn a
    fault that can be found into zeros that cannot. `max_norm` = inf only measures. Raises
    `ValueError` when `max_norm` is not positive. Source: Pascanu et al., arXiv 1211.5063.
    """
    if not max_norm > 0:
        raise ValueError(f"max_norm={max_norm}: must be > 0 (inf only measures the norm)")
    parameters = [p for p in parameters if p.grad is not None]
    norm = gradient_norm(parameters)
    if torch.isfinite(norm) and norm > max_norm:
        for p in parameters:
            p.grad.mul_(max_norm / norm)
    return norm


@dataclass(frozen=True)
class GradientStatistics:
    """The gradients of one parameter, or of one layer.

    `norm` is their 2-norm and `largest` the largest |entry|, both NaN or inf if an entry is.
    `zeros` is the share of entries that are exactly 0, NaN without entries: much of it in float16
    is underflow. `nonfinite` entries are NaN or inf, of `size`. `missing` counts parameters that
    have no gradient at all; their entries are not in `size`.
    """

    norm: float
    largest: float
    zeros: float
    nonfinite: int
    size: int
    missing: int


@torch.no_grad()
def gradient_statistics(
    named_parameters: Iterable[tuple[str, Tensor]], *, by: str = "layer"
) -> dict[str, GradientStatistics]:
    """Statistics of the gradients of `model.named_parameters()`, for each layer or parameter.

    A layer is what is numbered first in a name ("model.layers.0"), else the module that holds the
    parameter ("lm_head"). Squares are summed in float32 or better. The squares of the norms of
    all layers add up to that of `gradient_norm`. Raises `ValueError` for another `by`.
    """
    if by not in ("layer", "parameter"):
        raise ValueError(f"by={by!r}: layer or parameter")
    groups: dict[str, list[Tensor]] = {}
    for name, parameter in named_parameters:
        groups.setdefault(_layer_of(name) if by == "layer" else name, []).append(parameter)
    return {name: _statistics(parameters) for name, parameters in groups.items()}


def _layer_of(name: str) -> str:
    parts = name.split(".")
    numbered = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return ".".join(parts[:-1] if numbered is None else parts[: numbered + 1]) or name


def _statistics(parameters: list[Tensor]) -> GradientStatistics:
    grads = [p.grad for p in parameters if p.grad is not None]
    size = sum(g.numel() for g in grads)
    filled = [g for g in grads if g.numel()]
    # torch's maximum carries NaN, Python's drops it
    largest = [g.abs().amax().double().cpu() for g in filled] or [torch.zeros(())]
    return GradientStatistics(
        norm=float(gradient_norm(parameters)),
        largest=float(torch.stack(largest).amax()),
        zeros=sum(int((g == 0).sum()) for g in grads) / size if size else math.nan,
        nonfinite=sum(int((~torch.isfinite(g)).sum()) for g in grads),
        size=size,
        missing=len(parameters) - len(grads),
    )
