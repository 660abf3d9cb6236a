"""Keep Sampling Mask inside Hugging Face `generate`: truncate, and remember what was kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessor

from .sampling import _check, _compact, _filtered

AllowedTokens = Callable[[int, Tensor], Sequence[int]]


@dataclass(frozen=True)
class Recorded:
    """What `generate` sampled: `tokens` (B, T), `mask` (B, T) True up to the end token, log μ of
    each token `sampler_logp` (B, T) under the distribution that was sampled, 0 at padding, and
    `kept` (B, T, K) int32, −1 as filler, or None when nothing was truncated."""

    tokens: Tensor
    mask: Tensor
    sampler_logp: Tensor
    kept: Tensor | None


class SamplingRecorder(LogitsProcessor):
    """Filters as `sample_tokens` does, inside `generate`, and records the kept ids.

        recorder = SamplingRecorder(top_p=0.9)
        out = model.generate(ids, logits_processor=[recorder], **recorder.options, …)
        recorded = recorder.recorded(out, eos_token_id)

    The processor truncates itself, because `generate` runs those it is given before its own
    temperature and top-k, top-p, min-p: it would not see what they remove. `options` turn its own
    off; by default it keeps the 50 likeliest tokens. `allowed` is a bool mask (V,), or a grammar:
    a function of the row and its ids so far (prompt included) that returns the allowed ids, as
    `prefix_allowed_tokens_fn` of `generate`. One recorder serves one call, without beam search
    and without an assistant. The caller is the sampler; gradients are not needed.

    Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1 (Keep Sampling Mask).
    """

    def __init__(
        self,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        allowed: Tensor | AllowedTokens | None = None,
    ):
        self._filters = (temperature, top_p, top_k, min_p)
        self._allowed = allowed
        self._truncates = allowed is not None or top_k > 0 or top_p < 1 or min_p > 0
        self._seen: Tensor | None = None  # ids at the last call
        self._kept: list[Tensor] = []
        self._logp: list[Tensor] = []
        self._open: Tensor | None = None  # log μ of everything that the last call kept

    @property
    def options(self) -> dict:
        """What `generate` has to be called with: sampling on, its own truncation off."""
        return {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": None}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self._seen is not None:
            self._logp.append(self._drawn(input_ids))
        allowed = self._allowed_mask(input_ids, scores)
        options = (*self._filters, allowed)
        _check(scores, *options)
        filtered = _filtered(scores.detach(), *options)
        if not torch.isfinite(filtered.amax(-1)).all():
            raise ValueError("scores have a row with NaN, +inf or no allowed token")
        logp = filtered.log_softmax(-1)
        if self._truncates:
            self._kept.append(_compact(torch.isfinite(filtered)))
            logp = logp.gather(-1, self._kept[-1].long().clamp(min=0))
        self._seen, self._open = input_ids, logp
        return filtered.to(scores.dtype)

    def _allowed_mask(self, input_ids: Tensor, scores: Tensor) -> Tensor | None:
        if not callable(self._allowed):
            return self._allowed
        mask = torch.zeros_like(scores, dtype=torch.bool)
        for row, ids in enumerate(input_ids):
            mask[row, list(self._allowed(row, ids))] = True
        return mask

    def _drawn(self, input_ids: Tensor) -> Tensor:
        """log μ (B,) of the tokens drawn since the last call, −inf where they were not kept."""
        before, width = self._seen, self._seen.shape[1]
        if input_ids.shape != (len(before), width + 1) or (input_ids[:, :-1] != before).any():
            raise ValueError(
                f"input_ids went from {tuple(before.shape)} to {tuple(input_ids.shape)} and must "
                "grow by one token a call in rows that stay: use a new recorder for each call of "
                "generate, without beam search and without an assistant"
            )
        token = input_ids[:, -1:]
        if not self._truncates:
            return self._open.gather(-1, token)[:, 0]
        found = self._kept[-1] == token  # nowhere for the padding that follows an end token
        logp = self._open.gather(-1, found.int().argmax(-1, keepdim=True))[:, 0]
        return logp.masked_fill(~found.any(-1), -torch.inf)

    def recorded(self, sequences: Tensor, eos_token_id: int | Sequence[int]) -> Recorded:
        """The record of the call that returned `sequences` (B, S + T), ids with the prompt.

        `eos_token_id` is the end token of that call, or its end tokens, or () for none.
        Raises `ValueError` when they are not the rows that were recorded, or when a token was
        drawn that the record does not have.
        """
        if self._seen is None:
            raise ValueError("sequences were not recorded: give generate this recorder first")
        logp = torch.stack([*self._logp, self._drawn(sequences)], 1)
        tokens = sequences[:, -logp.shape[1] :]
        ends = torch.isin(tokens, torch.tensor(eos_token_id, device=tokens.device))
        mask = ends.cumsum(-1) - ends.long() == 0  # no end token before this one
        if not torch.isfinite(logp[mask]).all():
            raise ValueError("sequences has a token outside its kept set: was it changed?")
        return Recorded(tokens, mask, logp.masked_fill(~mask, 0), self._stacked(tokens, mask))

    def _stacked(self, tokens: Tensor, mask: Tensor) -> Tensor | None:
        if not self._truncates:
            return None
        width = max(ids.shape[1] for ids in self._kept)
        kept = self._kept[0].new_full((*tokens.shape, width), -1)
        for t, ids in enumerate(self._kept):
            kept[:, t, : ids.shape[1]] = ids
        kept[~mask] = -1  # padding is the one token of its set: scorable, log-probability 0
        kept[..., 0] = torch.where(mask, kept[..., 0], tokens.int())
        return kept
