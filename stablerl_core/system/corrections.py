"""Importance corrections: weights and masks for tokens that another policy sampled.

The tokens came from μ, the trainer differentiates at π_old, and the ratio between the two is not
seen by PPO's clip. A weight enters by multiplication, outside the clip and without a gradient:

    weights = importance_weights(old_logp, sampler_logp, mask, **CORRECTIONS["tis"])
    policy_objective("grpo", logp, old_logp, advantages[:, None] * weights.values, mask)

A keep-mask enters in the same way, `advantages[:, None] * keep`: the loss keeps its denominator.
`mask & keep` would divide by fewer tokens, so that the rest gets a larger step.

Computing π_old again with the trainer ("recompute") is none of these: it defines π_old, and the
tokens still come from μ. With μ's log-probabilities as `old_logp` the policy ratio already holds
both factors; a weight on top would count the mismatch twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor

from ._checks import finite_log_ratio, token_advantages

Level = Literal["token", "sequence", "geometric"]
Mode = Literal["truncate", "mask"]

# The corrections of the literature as arguments of `importance_weights`.
CORRECTIONS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Yao et al. 2025 (fengyao.notion.site/off-policy-rl); cap: verl, slime, arXiv 2601.18150.
        "tis": dict(level="token", mode="truncate", cap=2.0),
        # verl's preset decoupled_seq_is.
        "sequence_tis": dict(level="sequence", mode="truncate", cap=2.0),
        # Liu, Li et al. 2025 (richardli.xyz/rl-collapse): upper bound only; the cap is TIS's.
        "mis": dict(level="token", mode="mask", cap=2.0),
        # The default of TRL 1.16 (vllm_importance_sampling_mode and _clip_max).
        "sequence_mis": dict(level="sequence", mode="mask", cap=3.0),
        # Ring-1T, arXiv 2510.18855; band: verl's preset decoupled_token_icepop.
        "icepop": dict(level="token", mode="mask", cap=5.0, floor=0.5),
        # GLM-5, arXiv 2602.15763: pop(ρ, 1/β, β) with β = 2.
        "icepop_glm5": dict(level="token", mode="mask", cap=2.0, floor=0.5),
    }
)


@dataclass(frozen=True)
class ImportanceWeights:
    """Weights (B, T) for the loss, and what the ratios looked like before cap and floor.

    `values`: detached, float32 or better, 0 where the mask is False. The statistics `mean`,
    `minimum`, `maximum`, `ess` = (E w)²/E w² (a fraction), `above_cap`, `below_floor` (shares)
    and `mass_kept` = Σ after / Σ before are over `units` weights: the counted tokens, or at
    sequence and geometric level the sequences that have one. `masked` is the share of counted
    tokens whose weight was set to 0, `masked_positive` and `masked_negative` the same among
    tokens with Â > 0 and Â < 0 (None without `advantages`). The weights come from tokens drawn
    from μ: at token and sequence level E w = 1. Without a counted token the means are 1, the
    shares 0.
    """

    values: Tensor
    units: int
    mean: float
    minimum: float
    maximum: float
    ess: float
    above_cap: float
    below_floor: float
    mass_kept: float
    masked: float
    masked_positive: float | None
    masked_negative: float | None


def importance_weights(
    old_logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    mode: Mode = "truncate",
    cap: float,
    floor: float | None = None,
    advantages: Tensor | None = None,
) -> ImportanceWeights:
    """Detached weights π_old/μ for tokens that μ sampled, with a cap.

        token       w_t = π_old(o_t)/μ(o_t)                biased unless T = 1, low variance
        sequence    w = Π_t π_old(o_t)/μ(o_t)              unbiased before the cap, E w² grows
                                                           like (1 + χ²)^T
        geometric   w = (Π_t π_old(o_t)/μ(o_t))^{1/T}      not an importance weight: E w ≠ 1
        truncate    min(w, cap), and max(w, floor) if given
        mask        w if floor ≤ w ≤ cap, else 0

    old_logp, sampler_logp: (B, T) log-probabilities of the tokens, in nats; π_θ in place of
    π_old gives GLM-5's DIS. mask: bool (B, T); products and means run over True. cap: > 0,
    `math.inf` for none. advantages: (B,) or (B, T), only to split the masked share by sign.
    `CORRECTIONS` has the settings of the literature. Products are sums of logs, in float64.

    Raises `ValueError`: level, mode, cap or floor out of range; a shape that differs; a mask
    that is not bool; a counted log-probability that is not finite; an uncapped weight beyond
    the range of its dtype.
    Source: TIS Yao et al. 2025; MIS Liu, Li et al. 2025; IcePop arXiv 2510.18855. TRL and ms-swift
    call different things "sequence": here it is the product, as in TRL and verl.
    """
    _check_bounds(cap, floor)
    delta, dtype = finite_log_ratio(mask, old_logp=old_logp, sampler_logp=sampler_logp)
    log_weights = _at_level(delta, mask, level)
    return _weights(log_weights, mask, mode, cap, floor, advantages, dtype)


def prefix_weights(
    old_logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    cap: float = math.inf,
    advantages: Tensor | None = None,
) -> ImportanceWeights:
    """Exact weight of a token and all before it, w_t = Π_{i ≤ t} π_old(o_i)/μ(o_i), truncated.

    With the true advantage of each token (what π_old, not μ, earns afterwards) the expected
    gradient is exact; with the reward of the sampled completion it is not, because its tail was
    drawn from μ. Arguments, result and errors as in `importance_weights` at token level.
    Source: arXiv 2601.22718 (the correction that its surrogate replaces).
    """
    _check_bounds(cap, None)
    delta, dtype = finite_log_ratio(mask, old_logp=old_logp, sampler_logp=sampler_logp)
    return _weights(delta.cumsum(1), mask, "truncate", cap, None, advantages, dtype)


def minimum_prefix_weights(
    logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    cap: float = math.inf,
    advantages: Tensor | None = None,
) -> ImportanceWeights:
    """Our reading of MinPRO: w_t = ρ_t · min_{i < t} ρ_i with ρ = π_θ/μ, detached, truncated.

    The minimum of nothing is 1, so the first two tokens get their exact prefix weight. From
    there on a running minimum stands for the product: bounded variance, and a bias. One very
    unlikely token keeps everything after it small.

    logp, sampler_logp: (B, T) log π_θ and log μ; the tokens come from μ. Result and errors as
    in `importance_weights` at token level.
    Source: arXiv 2601.22718, from its abstract; the paper's exact formula, clipping and cap could
    not be verified, and no public code was found.
    """
    _check_bounds(cap, None)
    delta, dtype = finite_log_ratio(mask, logp=logp, sampler_logp=sampler_logp)
    none_yet = torch.full_like(delta[:, :1], math.inf)
    before = torch.cat([none_yet, delta.masked_fill(~mask, math.inf)], 1)[:, :-1]
    smallest = before.cummin(1).values
    smallest = torch.where(smallest.isinf(), 0.0, smallest)
    return _weights(delta + smallest, mask, "truncate", cap, None, advantages, dtype)


def geometric_rejection(
    old_logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    low: float = 0.999,
    high: float = 1.001,
) -> Tensor:
    """Keep-mask (B, 1): True iff low ≤ (Π_t π_old/μ)^{1/T} ≤ high.

    A trust region, not a weight: it drops whole sequences on either side, whatever Â is. Without
    a counted token a row is kept. The tokens come from μ. Errors as in `importance_weights`.
    Source: verl's preset decoupled_geo_rs (its bounds; it measures the inverse ratio, which
    mirrors the band, and sets the response mask, which changes the loss's denominator).
    """
    if not 0 < low <= high < math.inf:
        raise ValueError(f"low={low}, high={high}: expected 0 < low ≤ high, for example 0.99, 1.01")
    delta, _ = finite_log_ratio(mask, old_logp=old_logp, sampler_logp=sampler_logp)
    ratio = _at_level(delta, mask, "geometric").exp()
    return ((ratio >= low) & (ratio <= high)) | ~mask.any(1, keepdim=True)


def catastrophic_veto(
    old_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, threshold: float = 1e-4
) -> Tensor:
    """Keep-mask (B, 1): False iff a counted token has π_old/μ < threshold.

    One such token says that trainer and sampler did not see the same thing there. The tokens
    come from μ. Errors as in `importance_weights`.
    Source: slime's veto (thresholds between 1e-4 and 1e-6 are in use).
    """
    if not 0 < threshold < 1:
        raise ValueError(f"threshold={threshold}: a ratio between 0 and 1, for example 1e-4")
    delta, _ = finite_log_ratio(mask, old_logp=old_logp, sampler_logp=sampler_logp)
    return ~((delta < math.log(threshold)) & mask).any(1, keepdim=True)


def _check_bounds(cap: float, floor: float | None) -> None:
    if not cap > 0:
        raise ValueError(f"cap={cap}: must be > 0 (math.inf for no cap)")
    if floor is not None and not 0 <= floor <= cap:
        raise ValueError(f"floor={floor}: must lie between 0 and cap={cap}")


def _at_level(delta: Tensor, mask: Tensor, level: Level) -> Tensor:
    """Log-weights: (B, T) at token level, (B, 1) at the others."""
    if level == "token":
        return delta
    total = delta.sum(1, keepdim=True)
    if level == "sequence":
        return total
    if level == "geometric":
        return total / mask.sum(1, keepdim=True).clamp(min=1)
    raise ValueError(f"level is {level!r}, expected 'token', 'sequence' or 'geometric'")


def _weights(
    log_weights: Tensor,
    mask: Tensor,
    mode: Mode,
    cap: float,
    floor: float | None,
    advantages: Tensor | None,
    dtype: torch.dtype,
) -> ImportanceWeights:
    """Apply cap and floor to log-weights (B, T) or (B, 1) and describe what was there before."""
    if mode not in ("truncate", "mask"):
        raise ValueError(f"mode is {mode!r}, expected 'truncate' or 'mask'")
    low = 0.0 if floor is None else floor
    above, below = log_weights.exp() > cap, log_weights.exp() < low
    if mode == "truncate":
        after = log_weights.masked_fill(above, math.log(cap) if cap < math.inf else 0.0)
        after = after.masked_fill(below, math.log(low) if low else 0.0)
    else:
        after = log_weights.masked_fill(above | below, -math.inf)
    values = after.exp().clamp(max=cap).to(dtype).expand(mask.shape).masked_fill(~mask, 0)
    if values.isinf().any():
        raise ValueError(f"cap={cap}: a weight is beyond the range of {dtype}; give a finite cap")
    units = mask if log_weights.shape == mask.shape else mask.any(1, keepdim=True)
    dropped = (above | below).expand(mask.shape) & mask & (mode == "mask")
    return ImportanceWeights(
        values=values,
        above_cap=_share(above, units),
        below_floor=_share(below, units),
        **_before(log_weights[units], after[units]),
        **_masked(dropped, mask, advantages),
    )


def _before(log_weights: Tensor, after: Tensor) -> dict[str, Any]:
    """Statistics of the weights before cap and floor, from their logs, without overflow."""
    n = len(log_weights)
    if n == 0:
        return dict(units=0, mean=1.0, minimum=1.0, maximum=1.0, ess=1.0, mass_kept=1.0)
    first, second = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return dict(
        units=n,
        mean=float((first - math.log(n)).exp()),
        minimum=float(log_weights.min().exp()),
        maximum=float(log_weights.max().exp()),
        ess=float((2 * first - second).exp() / n),
        mass_kept=float((after.logsumexp(0) - first).exp()),
    )


def _masked(dropped: Tensor, mask: Tensor, advantages: Tensor | None) -> dict[str, Any]:
    if advantages is None:
        split = dict(masked_positive=None, masked_negative=None)
    else:
        sign = token_advantages(advantages, mask)
        split = dict(
            masked_positive=_share(dropped, mask & (sign > 0)),
            masked_negative=_share(dropped, mask & (sign < 0)),
        )
    return dict(masked=_share(dropped, mask), **split)


def _share(condition: Tensor, among: Tensor) -> float:
    """Share of `among` where `condition` holds; 0 of nothing is 0."""
    return float((condition & among).sum().double() / among.sum().clamp(min=1))
