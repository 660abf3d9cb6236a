"""What a token is worth to each objective: one small function each, and the table of them.

To add one, write a function (TokenBatch, **options) → TokenTerms and enter it in `OBJECTIVES`
with its paper's defaults.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ._batch import TokenBatch
from .advantages import AdvantageScale
from .balance import balance_bounds

Aggregation = Literal["token", "sequence", "constant"]


class TokenTerms(NamedTuple):
    """What an objective makes of each token, all (B, T)."""

    surrogate: Tensor  # to be maximised
    clipped_low: Tensor  # bool: the clip acts because the ratio is below its bound
    clipped_high: Tensor  # bool: … above its bound
    gate: Tensor  # share of the unclipped gradient that is left, 0 where the clip removes it


@dataclass(frozen=True)
class Objective:
    """An entry of `OBJECTIVES`: the per-token function and its source's defaults.

    `scale` is the advantage scale that the source uses with it; `sampler` says whether it reads
    sampler_logp. An option of None is found in the batch (bapo).
    """

    terms: Callable[..., TokenTerms]
    aggregation: Aggregation
    scale: AdvantageScale
    options: Mapping[str, float | None] = field(default_factory=dict)
    sampler: bool = False


def reinforce(batch: TokenBatch) -> TokenTerms:
    """Â · log π_θ. Source: Williams 1992; no ratio, nothing is clipped."""
    nothing = torch.zeros_like(batch.mask)
    return _terms(batch.advantages * batch.logp, nothing, nothing)


def grpo(batch: TokenBatch, clip_low: float, clip_high: float, dual_clip: float) -> TokenTerms:
    """min(r Â, clip(r, 1 − clip_low, 1 + clip_high) Â), per token. Source: arXiv 2402.03300 Eq. 3.

    Dr. GRPO (2503.20783) and DAPO (2503.14476) differ in aggregation, advantage scale and range.
    """
    return _clipped(batch.log_ratio, batch.advantages, clip_low, clip_high, dual_clip)


def gspo(batch: TokenBatch, clip_low: float, clip_high: float) -> TokenTerms:
    """min(s Â, clip(s) Â), s = (π_θ(o)/π_old(o))^(1/|o|): one ratio, one clip, a sequence.

    s is the geometric mean of the token ratios. Each token carries its sequence's term, so
    aggregation "sequence" gives the paper's mean over sequences. Needs one advantage a sequence.
    Source: arXiv 2507.18071 Eq. 5-7.
    """
    uneven = _uneven_rows(batch)
    if uneven:
        raise ValueError(
            f"advantages differ between the tokens of {uneven} sequences: gspo weighs a sequence "
            "as one; use gspo_token"
        )
    log_ratio = _sequence_log_ratio(batch).expand(batch.mask.shape)
    return _clipped(log_ratio, batch.advantages, clip_low, clip_high)


def gspo_token(batch: TokenBatch, clip_low: float, clip_high: float) -> TokenTerms:
    """min(s_t Â_t, clip(s_t) Â_t), s_t = sg[s] · π_θ(o_t)/sg[π_θ(o_t)]: s in value, Â per token.

    Source: arXiv 2507.18071 Eq. 13-14.
    """
    log_ratio = _sequence_log_ratio(batch).detach() + (batch.logp - batch.logp.detach())
    return _clipped(log_ratio, batch.advantages, clip_low, clip_high)


def cispo(batch: TokenBatch, clip_low: float, clip_high: float) -> TokenTerms:
    """sg[clip(r, 1 − clip_low, 1 + clip_high)] Â log π_θ: every token keeps a gradient.

    "Clipped" tokens here have their weight held at a bound. Source: arXiv 2506.13585 Eq. 4-5.
    """
    log_ratio, matters = batch.log_ratio.detach(), batch.advantages != 0
    weight = log_ratio.clamp(min=_log(1 - clip_low), max=_log(1 + clip_high))
    low, high = matters & (weight > log_ratio), matters & (weight < log_ratio)
    surrogate = _weighted(weight, batch.advantages) * batch.logp
    return TokenTerms(surrogate, low, high, (weight - log_ratio).exp())


def sapo(batch: TokenBatch, tau_positive: float, tau_negative: float) -> TokenTerms:
    """4/τ · σ(τ (r − 1)) · Â, τ by the sign of Â: a soft gate in the clip's place.

    The gate on the gradient r Â is 4 σ (1 − σ): 1 at r = 1, never quite 0, so nothing is
    "clipped". At r = 1 the value is 2/τ · Â: only the slope is that of the ratio.
    Source: arXiv 2511.20347 (the soft gate f of its objective).
    """
    tau = torch.full_like(batch.advantages, tau_negative)
    tau = tau.masked_fill(batch.advantages > 0, tau_positive)
    seen = torch.sigmoid(tau * (batch.log_ratio.detach().exp() - 1))
    saturated = seen == 1  # σ' is 0 here; times a ratio that overflowed it would be NaN
    ratio = batch.log_ratio.masked_fill(saturated, 0).exp()
    soft = torch.where(saturated, seen, torch.sigmoid(tau * (ratio - 1)))
    nothing = torch.zeros_like(batch.mask)
    return TokenTerms(4 / tau * soft * batch.advantages, nothing, nothing, 4 * seen * (1 - seen))


def bapo(
    batch: TokenBatch, clip_low: float | None, clip_high: float | None, dual_clip: float
) -> TokenTerms:
    """GRPO's term with bounds from `balance_bounds`, searched on this batch if both are None.

    Source: arXiv 2510.18927 Algorithm 1.
    """
    if (clip_low is None) != (clip_high is None):
        raise ValueError(
            f"bapo got clip_low={clip_low} and clip_high={clip_high}: pass both of "
            "balance_bounds, or neither"
        )
    if clip_low is None:
        logp, _, old_logp, sampler_logp, advantages, mask = batch
        found = balance_bounds(logp, old_logp, advantages, mask, sampler_logp=sampler_logp)
        clip_low, clip_high = found.clip_low, found.clip_high
    return _clipped(batch.log_ratio, batch.advantages, clip_low, clip_high, dual_clip)


def minirl(batch: TokenBatch, clip_low: float, clip_high: float, ratio_cap: float) -> TokenTerms:
    """M · sg[min(π_θ/μ, ratio_cap)] Â log π_θ: mask on π_θ/π_old, weight on π_θ/μ.

    M = 0 where GRPO's clip has no gradient. Source: arXiv 2512.01374 (its MiniRL objective).
    """
    ratio = batch.log_ratio.detach().exp()
    high = (batch.advantages > 0) & (ratio > 1 + clip_high)
    low = (batch.advantages < 0) & (ratio < 1 - clip_low)
    full = batch.logp.detach() - batch.sampler_logp
    weight = full.clamp(max=_log(ratio_cap))
    surrogate = _weighted(weight, batch.advantages.masked_fill(low | high, 0)) * batch.logp
    return TokenTerms(surrogate, low, high, (weight - full).exp().masked_fill(low | high, 0))


OBJECTIVES: dict[str, Objective] = {
    "reinforce": Objective(reinforce, "constant", "none"),
    "grpo": Objective(
        grpo, "sequence", "std", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}
    ),
    "dr_grpo": Objective(
        grpo, "constant", "none", {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": math.inf}
    ),
    "dapo": Objective(
        grpo, "token", "std", {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": math.inf}
    ),
    "gspo": Objective(gspo, "sequence", "std", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": Objective(gspo_token, "sequence", "std", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": Objective(cispo, "token", "std", {"clip_low": math.inf, "clip_high": 4.0}),
    "sapo": Objective(sapo, "sequence", "std", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "bapo": Objective(
        bapo,
        "sequence",
        "std",
        {"clip_low": None, "clip_high": None, "dual_clip": math.inf},
        sampler=True,
    ),
    "minirl": Objective(
        minirl,
        "constant",
        "none",
        {"clip_low": 0.2, "clip_high": 0.27, "ratio_cap": 5.0},
        sampler=True,
    ),
}


def _clipped(
    log_ratio: Tensor,
    advantages: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float = math.inf,
) -> TokenTerms:
    """min(r Â, clip(r, 1 − clip_low, 1 + clip_high) Â), for Â < 0 never below dual_clip · Â.

    The minimum is r Â except on two flat sides: Â > 0 with r above the range, Â < 0 with r below;
    a dual clip (arXiv 1912.09729) makes a third of Â < 0 with r above it. Written so, a
    ratio that overflows on a flat side gives no 0 · inf in the gradient. Without a dual clip the
    term falls without limit as r grows and Â < 0.
    """
    ratio = log_ratio.detach().exp()
    low = (advantages < 0) & (ratio < 1 - clip_low)
    dual = (advantages < 0) & (ratio > dual_clip)
    above = (advantages > 0) & (ratio > 1 + clip_high)
    no_gradient = low | dual | above | (advantages == 0)
    surrogate = log_ratio.masked_fill(no_gradient, 0).exp() * advantages
    for flat, bound in ((low, 1 - clip_low), (above, 1 + clip_high), (dual, dual_clip)):
        surrogate = torch.where(flat, bound * advantages, surrogate)
    return _terms(surrogate, low, above | dual)


def _terms(surrogate: Tensor, low: Tensor, high: Tensor) -> TokenTerms:
    """Terms of an objective that lets the gradient of a token through, or does not."""
    return TokenTerms(surrogate, low, high, (~(low | high)).to(surrogate.dtype))


def _sequence_log_ratio(batch: TokenBatch) -> Tensor:
    """log s, (B, 1): the mean log ratio of the counted tokens, 0 where there is none."""
    counted = batch.mask.sum(-1, keepdim=True).clamp(min=1)
    return batch.log_ratio.sum(-1, keepdim=True) / counted


def _uneven_rows(batch: TokenBatch) -> int:
    """Sequences whose counted tokens do not all have the same advantage."""
    if not batch.mask.any():
        return 0
    lowest = batch.advantages.masked_fill(~batch.mask, math.inf).amin(-1, keepdim=True)
    return int((batch.mask & (batch.advantages != lowest)).any(-1).sum())


def _weighted(log_weight: Tensor, advantages: Tensor) -> Tensor:
    """exp(log_weight) · Â, and 0 where Â = 0 even if the weight overflows."""
    return log_weight.masked_fill(advantages == 0, 0).exp() * advantages


def _log(bound: float) -> float:
    return math.log(bound) if bound > 0 else -math.inf
