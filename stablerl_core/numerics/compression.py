"""Gradients on the wire: four bits, the largest entries, low rank; with and without memory.

Workers of a data-parallel run average their gradients. Here W workers live in one process: their
gradients are stacked, `average` returns what all of them end up with, what of each gradient its
message stood for, and the bytes that one worker sends for its own gradient, everything included
that the others need to read it. How often a network moves those bytes is another matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

LEVELS = 7  # four bits, symmetric: −7 … 7


@dataclass(frozen=True)
class Averaged:
    """What came of one average over W workers.

    `mean` (…) is what every worker has afterwards; `sent` (W, …) what each message stood for, so
    that gradient − sent is what was lost; `nbytes` is what one worker sends.
    """

    mean: Tensor
    sent: Tensor
    nbytes: int


class Codec(Protocol):
    """What averages gradients (W, …) of W workers."""

    def average(self, gradients: Tensor) -> Averaged:
        """Mean over W, what each message stood for, and bytes."""
        ...


class _Messages:
    """Each worker sends tensors that the others can read alone: `pack` and `unpack`."""

    def average(self, gradients: Tensor) -> Averaged:
        """Every gradient packed, unpacked, and the mean of what comes out."""
        packed = [self.pack(gradient) for gradient in gradients]
        sent = torch.stack([self.unpack(*parts, gradients[0]) for parts in packed])
        return Averaged(sent.mean(0), sent, sum(part.nbytes for part in packed[0]))


class Dense(_Messages):
    """No compression: every entry in the gradient's own format."""

    def pack(self, gradient: Tensor) -> tuple[Tensor]:
        """The gradient."""
        return (gradient,)

    def unpack(self, gradient: Tensor, like: Tensor) -> Tensor:
        """The gradient."""
        return gradient


@dataclass(frozen=True)
class FourBit(_Messages):
    """Each entry as one of 15 levels of its block: c = round(7 g / s), s = max|g| of the block.

    Blocks are `block` entries in memory order; two codes share a byte, and each block has its s
    in bfloat16, so n entries take n/2 + 2n/block bytes: 7.5 : 1 from float32 with 64, never 8 : 1.
    The error of an entry is at most s/14, up to the rounding of s. A block with a NaN or inf
    comes out as NaN, so that no fault is hidden. Compare qgZ (ZeRO++, arXiv 2306.10209, §3.3).
    Raises `ValueError` for a block that is odd or not positive.
    """

    block: int = 64

    def __post_init__(self):
        if self.block < 2 or self.block % 2:
            raise ValueError(f"block={self.block}: must be even and ≥ 2, two codes share a byte")

    def pack(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Codes, uint8 (blocks, block/2), and s, bfloat16 (blocks, 1)."""
        flat = gradient.flatten().float()
        rows = torch.nn.functional.pad(flat, (0, -len(flat) % self.block)).view(-1, self.block)
        scale = rows.abs().amax(1, keepdim=True).bfloat16()
        unit = (rows / scale.float()).nan_to_num(0, 0, 0)  # 0/0 where a block is empty
        codes = ((unit * LEVELS).round().clamp(-LEVELS, LEVELS) + 8).to(torch.uint8)
        return codes[:, ::2] << 4 | codes[:, 1::2], scale

    def unpack(self, codes: Tensor, scale: Tensor, like: Tensor) -> Tensor:
        """The gradient that the codes stand for, with the shape and format of `like`."""
        pairs = torch.stack([codes >> 4, codes & 15], -1).flatten(1)
        flat = (pairs.float() - 8) / LEVELS * scale.float()
        return flat.flatten()[: like.numel()].view_as(like).to(like.dtype)


@dataclass(frozen=True)
class TopK(_Messages):
    """The share of entries that are largest in magnitude, as values and positions.

    A position is an int32, so in float32 an entry costs twice what it costs without compression:
    8 : 1 needs share 1/16. At least one entry is sent; NaN and inf count as largest. Deep gradient
    compression (arXiv 1712.01887) sends 0.1 % with error feedback, momentum correction and a
    warm-up. Raises `ValueError` for a share outside (0, 1].
    """

    share: float = 1 / 16

    def __post_init__(self):
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share}: must lie in (0, 1]")

    def pack(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Values (k,) and int32 positions (k,) in memory order."""
        flat = gradient.flatten()
        count = max(1, round(self.share * len(flat)))
        positions = flat.abs().topk(count).indices
        return flat[positions], positions.int()

    def unpack(self, values: Tensor, positions: Tensor, like: Tensor) -> Tensor:
        """The entries that were sent, and zeros."""
        flat = torch.zeros(like.numel(), dtype=like.dtype, device=like.device)
        return flat.scatter(0, positions.long(), values).view_as(like)


class PowerSGD:
    """The mean gradient as P Qᵀ of rank r, one power iteration a step, warm-started.

        P ← orthonormal columns of mean_w(M_w) Q,   Q ← mean_w(M_wᵀ P)

    Q starts from `generator` and then from the last step's Q, whose columns are made orthonormal,
    so one object serves one parameter. `gradients` (W, …, m, n) are batches of matrices; one
    matrix sends r (m + n) numbers. Both products are averaged over workers, so messages of the
    same size travel however many there are, and `sent` is the mean for all. Raises `ValueError`
    for rank < 1 and for gradients that are vectors. Source: arXiv 1905.13727, Algorithm 1; as
    torch's DDP hook.
    """

    def __init__(self, rank: int = 4, *, generator: torch.Generator):
        if rank < 1:
            raise ValueError(f"rank={rank}: must be ≥ 1")
        self.rank, self.generator, self.q = rank, generator, None

    def average(self, gradients: Tensor) -> Averaged:
        """One power iteration on the mean over W."""
        if gradients.dim() < 3:
            shape = tuple(gradients.shape)
            raise ValueError(f"gradients has shape {shape}; expected (W, …, m, n): send it Dense()")
        dtype = gradients.dtype  # of what is sent; torch decomposes float32 or wider
        matrix = gradients.to(torch.promote_types(dtype, torch.float32)).mean(0)
        if self.q is None:
            size = *matrix.shape[:-2], matrix.shape[-1], min(self.rank, *matrix.shape[-2:])
            drawn = torch.randn(size, generator=self.generator, dtype=matrix.dtype)
            self.q = drawn.to(matrix.device)
        p = torch.linalg.qr(matrix @ torch.linalg.qr(self.q).Q).Q.to(dtype)
        q = (matrix.mT @ p.to(matrix.dtype)).to(dtype)
        if q.isfinite().all():  # a faulty gradient must not stay in the next start
            self.q = q.to(matrix.dtype)
        mean = p @ q.mT
        return Averaged(mean, mean.expand_as(gradients), p.nbytes + q.nbytes)


class ErrorFeedback:
    """Adds to each gradient what all messages before it have lost: e ← (g + e) − sent.

    One object serves one parameter and holds `residual` (W, …), as many bytes as the gradients
    of all workers (each worker holds its own). A residual that is not finite is not kept: the
    fault would be sent for ever. Sources: arXiv 1901.09847, Algorithm 2; 1905.13727, Algorithm 2.
    """

    def __init__(self, codec: Codec):
        self.codec, self.residual = codec, None

    def average(self, gradients: Tensor) -> Averaged:
        """The codec's average of gradient + residual."""
        given = gradients if self.residual is None else gradients + self.residual
        found = self.codec.average(given)
        lost = given - found.sent
        if lost.isfinite().all():
            self.residual = lost
        return found


class GradientCompression:
    """Averages the gradients of a whole model, each parameter by its own codec.

    `codec` makes one for a parameter's shape (without W), or returns None where it shall be sent
    as it is. `sent_bytes` and `dense_bytes` of one worker add up over all calls; their ratio is
    the compression that took place.
    """

    def __init__(self, codec: Callable[[torch.Size], Codec | None]):
        self._make, self._codecs = codec, {}
        self.sent_bytes = self.dense_bytes = 0

    def average(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Means (…) by name of gradients (W, …) by name."""
        means = {}
        for name, stacked in gradients.items():
            if name not in self._codecs:
                self._codecs[name] = self._make(stacked.shape[1:]) or Dense()
            found = self._codecs[name].average(stacked)
            means[name] = found.mean
            self.sent_bytes += found.nbytes
            self.dense_bytes += stacked[0].nbytes
        return means
