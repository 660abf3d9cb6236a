"""Sampling that keeps what is needed to score the same distribution later."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Sample(NamedTuple):
    """Sampled `tokens` (B,), their log-probability `logp` (B,) under the distribution that was
    really sampled, and `kept` (B, K) int32: the ids left by truncation, −1 as filler, or None
    when nothing was truncated."""

    tokens: Tensor
    logp: Tensor
    kept: Tensor | None


def sample_tokens(
    logits: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    allowed: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Sample:
    """Draw one token a row from temperature-scaled, truncated and renormalised logits.

    μ(a) = exp(z_a/T) / Σ_{b ∈ kept} exp(z_b/T) for a in the kept set. Filters apply in the
    order of Hugging Face `generate`: `allowed` (B, V) or (V,) bool, temperature, `top_k`
    (0 = off), `top_p`, `min_p`; each keeps at least the most likely token, and ties at the
    top-k threshold are all kept.

    `logits` (B, V) in any precision, computed in float32 or better; the caller is the sampler,
    so `logp` is log μ. Raises `ValueError` for options out of range, NaN logits, or a row with
    no allowed token. Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1 (Keep Sampling Mask).
    """
    options = (temperature, top_p, top_k, min_p, allowed)
    _check(logits, *options)
    scores = _filtered(logits.detach(), *options)
    if not torch.isfinite(scores.amax(-1)).all():  # the maximum of a row with NaN is NaN
        raise ValueError("logits have a row with NaN, +inf or no allowed token; check the model")
    logp = scores.log_softmax(-1)
    # Inverse CDF in float64: a uniform below 1 cannot land on a token of probability zero.
    cdf = logp.exp().double().cumsum(-1)
    uniform = torch.rand(len(cdf), 1, dtype=torch.float64, device=cdf.device, generator=generator)
    tokens = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0]
    truncates = allowed is not None or top_k > 0 or top_p < 1 or min_p > 0
    kept = _compact(torch.isfinite(scores)) if truncates else None
    return Sample(tokens, logp.gather(-1, tokens[:, None])[:, 0], kept)


def _filtered(logits, temperature, top_p, top_k, min_p, allowed) -> Tensor:
    """Scores z/T (B, V) in float32 or better, −inf where a filter removed the token."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    scores = scores / temperature
    if top_k > 0 or top_p < 1 or min_p > 0:
        keep = _kept_mask(scores, top_p, top_k, min_p)
        broken = ~torch.isfinite(scores.amax(-1, keepdim=True))  # NaN must stay NaN
        scores = scores.masked_fill(~(keep | broken), -torch.inf)
    return scores


def _check(logits, temperature, top_p, top_k, min_p, allowed) -> None:
    if logits.dim() != 2:
        raise ValueError(f"logits has shape {tuple(logits.shape)}; expected (B, V)")
    _check_temperature(temperature)
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p}: must lie in (0, 1]")
    if not 0 <= min_p <= 1:
        raise ValueError(f"min_p={min_p}: must lie in [0, 1]")
    if top_k < 0:
        raise ValueError(f"top_k={top_k}: must be ≥ 0 (0 turns it off)")
    if allowed is not None and (
        allowed.dtype != torch.bool or allowed.shape not in (logits.shape, logits.shape[-1:])
    ):
        raise ValueError(
            f"allowed has shape {tuple(allowed.shape)} and dtype {allowed.dtype}; "
            f"expected bool {tuple(logits.shape)} or {tuple(logits.shape[-1:])}"
        )


def _check_temperature(temperature: float) -> None:
    if not 0 < temperature < float("inf"):
        raise ValueError(f"temperature={temperature}: must be > 0 and finite (argmax is greedy)")


def _kept_mask(scores: Tensor, top_p: float, top_k: int, min_p: float) -> Tensor:
    """Bool (B, V): tokens that survive top-k, then top-p, then min-p."""
    keep = torch.isfinite(scores)
    if 0 < top_k < scores.shape[-1]:
        keep &= scores >= scores.topk(top_k, dim=-1).values[:, -1:]
    if top_p < 1:
        probs, order = scores.masked_fill(~keep, -torch.inf).softmax(-1).sort(-1, descending=True)
        before = probs.cumsum(-1) - probs  # mass of strictly likelier tokens: < top_p keeps it
        keep &= torch.zeros_like(keep).scatter(-1, order, before < top_p)
    if min_p > 0:
        probs = scores.masked_fill(~keep, -torch.inf).softmax(-1)
        keep &= probs >= min_p * probs.amax(-1, keepdim=True)
    return keep


def _compact(keep: Tensor) -> Tensor:
    """Bool (B, V) to ids (B, K) int32 in ascending order, filled with −1."""
    width = int(keep.sum(-1).max())
    order = keep.int().argsort(dim=-1, descending=True, stable=True)[:, :width]
    return order.masked_fill(~keep.gather(-1, order), -1).int()


def masked_log_probs(
    logits: Tensor, tokens: Tensor, kept: Tensor | None, temperature: float = 1.0
) -> Tensor:
    """log π(token) with π renormalised over the kept set that the sampler stored.

    log π(a) = z_a/T − log Σ_{b ∈ kept} exp(z_b/T). `logits` (…, V) carry the trainer's
    gradient, `tokens` (…) and `kept` (…, K; −1 filler, None = the whole vocabulary) come from
    `sample_tokens`. Returns (…) in float32 or better, finite for every sampled token.

    Raises `ValueError` when a token is not in its kept set, shapes disagree, or for a temperature
    that is not > 0 and finite.
    Source: DeepSeek-V3.2, arXiv 2512.02556 §3.1.
    """
    _same_shape(logits, tokens)
    _check_temperature(temperature)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    chosen = scores.gather(-1, tokens[..., None])[..., 0]
    if kept is None:
        return chosen - scores.logsumexp(-1)
    inside = _inside(scores, kept)
    if not (kept == tokens[..., None]).any(-1).all():
        raise ValueError("tokens has an entry outside its kept set; use the set stored with it")
    return chosen - inside.logsumexp(-1)


class Refiltered(NamedTuple):
    """`logp` (…) under the trainer's own filter, −inf where `lost` (…) bool says that the filter
    removed the token that was sampled; `keep` (…, V) bool is what it left."""

    logp: Tensor
    lost: Tensor
    keep: Tensor


def rerun_filter(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    allowed: Tensor | None = None,
) -> Refiltered:
    """log π(token) with π filtered anew, by the sampler's settings and the trainer's own logits.

    log π(a) = z_a/T − log Σ_{b ∈ keep(z)} exp(z_b/T), and −inf for a outside of keep(z): what a
    trainer computes that did not store the sampler's set. The sets differ as soon as the logits
    do, and a token that was sampled can be outside. `logits` (…, V) carry the gradient, which is
    0 for a lost token; `tokens` (…) were drawn by the sampler; options as in `sample_tokens`.
    Logits with NaN give NaN.

    Raises `ValueError` for shapes that disagree and options out of range.
    The error is described with DeepSeek-V3.2, arXiv 2512.02556 §3.1.
    """
    _same_shape(logits, tokens)
    if allowed is not None and allowed.dim() > 1:
        allowed = allowed.flatten(0, -2)
    options = (temperature, top_p, top_k, min_p, allowed)
    flat = logits.reshape(-1, logits.shape[-1])
    _check(flat, *options)
    keep = (_filtered(flat.detach(), *options) != -torch.inf).view(logits.shape)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    chosen = scores.gather(-1, tokens[..., None])[..., 0]
    logp = chosen - scores.masked_fill(~keep, -torch.inf).logsumexp(-1)
    lost = ~keep.gather(-1, tokens[..., None])[..., 0]
    return Refiltered(logp.masked_fill(lost, -torch.inf), lost, keep)


def kept_mass(logits: Tensor, kept: Tensor | None, temperature: float = 1.0) -> Tensor:
    """S = Σ_{b ∈ kept} π(b): how much of π lies in the sampler's set, between 0 and 1.

    It is the mean of the ratio when the trainer's log-probability is that of the whole
    vocabulary: E_{a ~ μ}[π(a)/μ(a)] = Σ_{a ∈ kept} π(a) = S, for any μ that is above 0 on the
    set and 0 outside. Where μ has π's own logits, the ratio of every single token is S.

    `logits` (…, V) of the trainer, `kept` (…, K) from the sampler (None: S = 1). Returns (…).
    """
    if kept is None:
        return torch.ones_like(logits[..., 0])
    _check_temperature(temperature)
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    return (_inside(scores, kept).logsumexp(-1) - scores.logsumexp(-1)).exp()


def _inside(scores: Tensor, kept: Tensor) -> Tensor:
    """Scores (…, K) of the kept ids, −inf at the filler."""
    if kept.shape[:-1] != scores.shape[:-1]:
        expected = (*scores.shape[:-1], "K")
        raise ValueError(f"kept has shape {tuple(kept.shape)}; expected {expected}")
    return scores.gather(-1, kept.long().clamp(min=0)).masked_fill(kept < 0, -torch.inf)


def _same_shape(logits: Tensor, tokens: Tensor) -> None:
    if logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"tokens has shape {tuple(tokens.shape)}; expected {tuple(logits.shape[:-1])}"
        )
