"""What every function of this layer asks of its inputs, and the words it refuses them with."""

from functools import reduce

import torch
from torch import Tensor


def same_shape(**tensors: Tensor | None) -> None:
    """Raise `ValueError` unless all given tensors have the shape of the first one."""
    given = {name: x for name, x in tensors.items() if x is not None}
    first, shape = next((name, tuple(x.shape)) for name, x in given.items())
    for name, x in given.items():
        if tuple(x.shape) != shape:
            raise ValueError(
                f"{name} has shape {tuple(x.shape)}, expected {shape}, the shape of {first}: "
                "nothing is broadcast here"
            )


def boolean_mask(mask: Tensor) -> None:
    """Raise `ValueError` unless `mask` is boolean (an integer mask would index, not select)."""
    if mask.dtype != torch.bool:
        raise ValueError(f"mask has dtype {mask.dtype}, expected torch.bool: pass mask.bool()")


def at_least_float32(**tensors: Tensor | None) -> list[Tensor | None]:
    """Cast all to one dtype: float32, or float64 where one of them has it. `None` stays `None`."""
    given = {name: x for name, x in tensors.items() if x is not None}
    for name, x in given.items():
        if not x.is_floating_point():
            raise ValueError(f"{name} has dtype {x.dtype}, expected a floating-point tensor")
    dtype = reduce(torch.promote_types, (x.dtype for x in given.values()), torch.float32)
    return [None if x is None else x.to(dtype) for x in tensors.values()]


def finite_where(name: str, x: Tensor, mask: Tensor) -> Tensor:
    """Return `x` with 0 where `mask` is False; raise `ValueError` if a counted entry is not finite.

    `torch.where` (not multiplication by the mask) keeps a NaN or an infinity at a position that
    does not count out of the value and of the gradient.
    """
    bad = mask & ~torch.isfinite(x.detach())
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        raise ValueError(
            f"{name} is {x[at].item()} at {list(at)} ({int(bad.sum())} of {int(mask.sum())} "
            "counted tokens are not finite): a token that counts needs a finite log-probability "
            "or advantage; set mask to False where there is none"
        )
    return torch.where(mask, x, torch.zeros_like(x))
