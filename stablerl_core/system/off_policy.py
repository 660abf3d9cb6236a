"""Which sequences are too far from the policy that sampled them to learn from."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._checks import boolean_mask, finite_log_ratio, token_advantages


def off_policy_sequence_mask(
    logp: Tensor, sampler_logp: Tensor, advantages: Tensor, mask: Tensor, threshold: float
) -> Tensor:
    """Keep-mask (B, 1): False iff Â < 0 and the mean over tokens of log μ/π_θ > threshold.

    Learning from one's own mistakes helps; from mistakes that one no longer makes it can do harm.
    The same as: drop when Â < 0 and the geometric ratio (Π π_θ/μ)^{1/T} < e^{−threshold}.

    logp, sampler_logp: (B, T), log π_θ and log μ of the tokens, which μ sampled, as the
    inference engine returned them: staleness and mismatch are both in the statistic. advantages:
    (B,), one a sequence; from (B, T), as GAE gives them, follows Eq. 9 token by token, (B, T).
    mask: bool (B, T). threshold: δ in nats a token; DeepSeek does not publish its δ, and values
    from 1e-4 (slime) to 0.5 (TRL's documentation) are in use: at 0.5 next to nothing is dropped.
    A row without a counted token is kept.

    Multiply the advantages with it, not the KL penalty, and leave the mask of the loss alone:
    dividing by fewer tokens would change the step. Raises `ValueError`: a shape that differs, a
    mask that is not bool, a counted value that is not finite, a NaN advantage or threshold.
    Source: DeepSeek-V3.2, arXiv 2512.02556 Eq. 9.
    """
    if math.isnan(threshold):
        raise ValueError("threshold is NaN, expected nats a token, for example 0.03")
    delta, _ = finite_log_ratio(mask, sampler_logp=sampler_logp, logp=logp)
    far = delta.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1) > threshold
    far &= mask.any(1, keepdim=True)
    negative = token_advantages(advantages, mask) < 0
    return ~(far & (negative[:, :1] if advantages.dim() == 1 else negative))


def weight_threshold_mask(weights: Tensor, threshold: float = 0.95) -> Tensor:
    """`mask_filter` of the first seed text: the weights below `threshold`, and 0 for the others.

    Not what DeepSeek-V3.2 does: see `off_policy_sequence_mask`. On-policy weights are 1, so all
    on-policy data is dropped; what stays are tokens that the policy has moved away from, the
    ones the source drops when Â < 0. Here for comparison.

    weights: any shape, importance weights ≥ 0. Returns the same shape, detached. Raises
    `ValueError` for a NaN or negative weight.
    """
    weights = weights.detach()
    if not (weights >= 0).all():
        raise ValueError("weights has a negative entry or a NaN; expected importance weights ≥ 0")
    return torch.where(weights < threshold, weights, torch.zeros_like(weights))


def positional_decay(mask: Tensor, rate: float = 0.1) -> Tensor:
    """`Positional decay` of the first seed text: weights e^{−rate · position}, (B, T) float32.

    Position 0 is the first counted token of a row; 0 where `mask`, bool (B, T), is False. Not in
    DeepSeek-V3.2. At rate 0.1 the hundredth token has a weight of 5e-5: this does not lengthen
    what a policy learns from, it cuts it to the first few dozen tokens. Here for comparison.
    Raises `ValueError` for a negative rate or a mask that is not bool (B, T).
    """
    boolean_mask(mask)
    if not 0 <= rate < math.inf:
        raise ValueError(f"rate={rate}: must be ≥ 0 and finite (0 is no decay)")
    position = mask.cumsum(1) - 1
    return (-rate * position.float()).exp().masked_fill(~mask, 0)
