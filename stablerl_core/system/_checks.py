"""What every function of this layer asks of its inputs, and the words it refuses them with."""

from __future__ import annotations

import torch
from torch import Tensor


def boolean_mask(mask: Tensor) -> None:
    """Raise `ValueError` unless `mask` is boolean and (B, T)."""
    if mask.dtype != torch.bool or mask.dim() != 2:
        raise ValueError(
            f"mask has dtype {mask.dtype} and shape {tuple(mask.shape)}, expected torch.bool "
            "(B, T): pass mask.bool()"
        )


def finite_log_ratio(mask: Tensor, **pair: Tensor) -> tuple[Tensor, torch.dtype]:
    """First minus second of two log-probabilities: float64, detached, 0 where `mask` is False.

    `pair` holds the two under their argument names. What stands at positions that do not count,
    NaN included, is not read. Also returns the dtype of a result: the better of the two, and
    float32 at least. Raises `ValueError` for a wrong shape or dtype, or a counted value that is
    not finite.
    """
    boolean_mask(mask)
    dtype = torch.float32
    for name, x in pair.items():
        if x.shape != mask.shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected {tuple(mask.shape)}, the shape of "
                "mask: nothing is broadcast here"
            )
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, expected a floating-point tensor")
        _finite(name, x.detach(), mask)
        dtype = torch.promote_types(dtype, x.dtype)
    first, second = (x.detach().double().masked_fill(~mask, 0) for x in pair.values())
    return first - second, dtype


def _finite(name: str, x: Tensor, mask: Tensor) -> None:
    bad = mask & ~torch.isfinite(x)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} is {x[at].item()} at {list(at)} ({int(bad.sum())} of {int(mask.sum())} "
            "counted tokens are not finite): a token that was sampled has a finite "
            "log-probability; score it over the kept set that the sampler stored, or set mask "
            "to False"
        )


def token_advantages(advantages: Tensor, mask: Tensor) -> Tensor:
    """Advantages (B,) or (B, T) as (B, T), detached; `ValueError` for another shape or a NaN."""
    b, t = mask.shape
    if tuple(advantages.shape) not in {(b,), (b, t)}:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, expected ({b},) or ({b}, {t}): "
            "(B, 1) would be broadcast silently elsewhere"
        )
    advantages = advantages.detach()
    spread = advantages[:, None].expand(b, t) if advantages.dim() == 1 else advantages
    if torch.isnan(spread[mask]).any():
        raise ValueError("advantages has a NaN at a counted token; find the reward that made it")
    return spread
