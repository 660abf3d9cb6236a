"""What the gradients of one update look like, before anything is done to them."""

from __future__ import annotations

from collections.abc import Iterable

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
