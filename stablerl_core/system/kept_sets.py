"""The kept sets of many tokens without filler: to count their bytes, to save, to send."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


@dataclass(frozen=True, eq=False)
class KeptSets:
    """What truncation left to choose from at B × T tokens: their ids in one row.

    `ids` (N,) uint8, int16 or int32 hold the sets in order of row and position, each ascending;
    `counts` (B, T) int32 says how many ids each token has, 0 where nothing is known (padding).
    A bool for every word of the vocabulary would need V bytes a token, a table padded to the
    largest set K ids a token. `KeptSets.of` makes one from what `sample_tokens` returns.
    Raises `ValueError` where the two do not fit.
    """

    ids: Tensor
    counts: Tensor

    def __post_init__(self):
        ids, counts = self.ids, self.counts
        if ids.dim() != 1 or ids.dtype not in (torch.uint8, torch.int16, torch.int32):
            raise ValueError(
                f"ids has shape {tuple(ids.shape)} and dtype {ids.dtype}; expected (N,) uint8, "
                "int16 or int32, as KeptSets.of makes them"
            )
        if counts.dim() != 2 or counts.dtype != torch.int32:
            raise ValueError(
                f"counts has shape {tuple(counts.shape)} and dtype {counts.dtype}; expected "
                "(B, T) int32"
            )
        if (counts < 0).any() or int(counts.sum()) != len(ids):
            raise ValueError(f"counts add up to {int(counts.sum())}, ids holds {len(ids)}")

    @classmethod
    def of(cls, kept: Tensor, mask: Tensor) -> KeptSets:
        """From `kept` (B, T, K), −1 as filler, at the tokens where `mask` (B, T) is True."""
        if kept.dim() != 3 or kept.shape[:2] != mask.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"kept has shape {tuple(kept.shape)}, mask {tuple(mask.shape)} and dtype "
                f"{mask.dtype}; expected (B, T, K) and bool (B, T)"
            )
        real = (kept >= 0) & mask[..., None]
        ids = kept[real]
        largest = int(ids.max()) if len(ids) else 0
        fits = (torch.uint8, 255), (torch.int16, 32_767), (torch.int32, 2**31 - 1)
        dtype = next(dtype for dtype, limit in fits if largest <= limit)
        return cls(ids.to(dtype), real.sum(-1, dtype=torch.int32))

    def padded(self, tokens: Tensor) -> Tensor:
        """(B, T, K) int32 for `masked_log_probs`, −1 as filler.

        Where there is no set, it is the one token of `tokens` (B, T): a padding token that stays
        scorable, with log-probability 0.
        """
        if tokens.shape != self.counts.shape:
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}; expected {tuple(self.counts.shape)}"
            )
        width = max(1, int(self.counts.max()))
        place = torch.arange(width, device=self.ids.device)
        kept = self.ids.new_full((*tokens.shape, width), -1, dtype=torch.int32)
        kept[place < self.counts[..., None]] = self.ids.int()
        kept[..., 0] = torch.where(self.counts == 0, tokens.int(), kept[..., 0])
        return kept

    @property
    def bytes_per_token(self) -> float:
        """Bytes of ids and counts over the tokens that have a set; NaN when none has."""
        size = self.ids.numel() * self.ids.element_size()
        size += self.counts.numel() * self.counts.element_size()
        tokens = int((self.counts > 0).sum())
        return size / tokens if tokens else float("nan")

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        tensors = {"ids": self.ids.contiguous(), "counts": self.counts.contiguous()}
        save_file(tensors, path, metadata={"format": "kept sets 1"})

    @classmethod
    def load(cls, path: str | Path) -> KeptSets:
        """Read what `save` wrote; `ValueError` for a file that holds something else."""
        tensors = load_file(path)
        if set(tensors) != {"ids", "counts"}:
            raise ValueError(f"{path} holds {sorted(tensors)}; expected ids and counts")
        return cls(**tensors)
