"""Whole matrices out of sharded parameters (FSDP2, DTensor) and back. Plain tensors pass through.

torch.distributed is imported only where a parameter really is sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def is_sharded(x: Tensor) -> bool:
    return hasattr(x, "placements") and hasattr(x, "device_mesh")


def local(x: Tensor) -> Tensor:
    """The part of `x` that this process holds, sharing its memory."""
    return x.to_local() if is_sharded(x) else x


def local_like(x: Tensor, like: Tensor) -> Tensor:
    """The part of `x` that goes with this process's part of `like`."""
    if is_sharded(like) and is_sharded(x) and x.placements != like.placements:
        x = x.redistribute(like.device_mesh, like.placements)
    return local(x)


def keeps_matrices_whole(x: Tensor) -> bool:
    """Whether each matrix of a batch (E, m, n) lies in one process; then nothing is gathered."""
    return x.dim() == 3 and all(p.is_replicate() or p.is_shard(0) for p in x.placements)


def whole(part: Tensor, like: Tensor) -> Tensor:
    """The matrices that `part`, shaped as the local part of `like`, belongs to; a collective."""
    if not is_sharded(like) or keeps_matrices_whole(like):
        return part
    from torch.distributed.tensor import DTensor

    mesh, placements = like.device_mesh, like.placements
    shape = {"shape": like.shape, "stride": like.stride()}
    return DTensor.from_local(part, mesh, placements, run_check=False, **shape).full_tensor()


def part_of(full: Tensor, like: Tensor) -> Tensor:
    """Inverse of `whole`: what of `full` goes with this process's part of `like`."""
    if not is_sharded(like) or keeps_matrices_whole(like):
        return full
    return _cut(full, like)


def _cut(full: Tensor, like: Tensor) -> Tensor:
    from torch.distributed.tensor import DTensor, Replicate

    mesh = like.device_mesh
    copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(mesh, like.placements).to_local()


@torch.no_grad()
def scale_rows(weight: Tensor, factors: Tensor) -> None:
    """Multiply row i of `weight` (rows, …), sharded or not, by factors[i], in place."""
    shape: Sequence[int] = (-1, *[1] * (weight.dim() - 1))
    factors = factors.to(weight.device, weight.dtype).view(shape)
    if is_sharded(weight):
        factors = _cut(factors.expand(weight.shape).contiguous(), weight)
    local(weight).mul_(factors)
