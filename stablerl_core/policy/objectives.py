"""Policy objectives: one small function each says what a token is worth, the rest is shared.

To add one, write a function (TokenBatch, **options) → TokenTerms and enter it in `OBJECTIVES`
with its paper's defaults.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ._checks import at_least_float32, boolean_mask, finite_where, same_shape

Aggregation = Literal["token", "sequence", "constant"]


@dataclass(frozen=True)
class ObjectiveDiagnostics:
    """What one call saw, as plain numbers over the counted tokens (no gradient).

    Ratio and KL compare π_θ with π_old at tokens taken to be drawn from π_old; what separates
    π_old from the sampler μ is not in them. Without a counted token the ratios are 1, the rest 0.
    """

    tokens: int  # counted tokens
    ratio_mean: float  # π_θ/π_old
    ratio_min: float
    ratio_max: float
    clip_fraction: float  # share of the tokens whose gradient the clip sets to zero: low + high
    clip_fraction_low: float  # of these, Â < 0 and the ratio below its bound
    clip_fraction_high: float  # of these, Â > 0 and the ratio above its bound
    step_kl_k1: float  # mean of −log ratio: KL(π_old ‖ π_θ) in nats, unbiased, may be negative
    step_kl_k3: float  # mean of ratio − 1 − log ratio: the same KL, unbiased, never negative


class TokenBatch(NamedTuple):
    """A batch made safe: float32 or better, all (B, T), 0 where the mask is False."""

    logp: Tensor  # log π_θ, with gradient
    log_ratio: Tensor  # log π_θ/π_old, with gradient
    advantages: Tensor  # detached
    mask: Tensor


class TokenTerms(NamedTuple):
    """What an objective makes of each token, all (B, T)."""

    surrogate: Tensor  # to be maximised
    clipped_low: Tensor  # bool: the gradient was set to zero because the ratio is too low
    clipped_high: Tensor  # bool: … too high


@dataclass(frozen=True)
class Objective:
    """An entry of `OBJECTIVES`: the per-token function, its options and its aggregation."""

    terms: Callable[..., TokenTerms]
    aggregation: Aggregation
    options: Mapping[str, float] = field(default_factory=dict)


def _reinforce(batch: TokenBatch) -> TokenTerms:
    """Â · log π_θ. Source: Williams 1992; no ratio, nothing is clipped."""
    nothing = torch.zeros_like(batch.mask)
    return TokenTerms(batch.advantages * batch.logp, nothing, nothing)


def _grpo(batch: TokenBatch, clip_low: float, clip_high: float) -> TokenTerms:
    """min(r Â, clip(r, 1 − clip_low, 1 + clip_high) Â). Source: arXiv 2402.03300 Eq. 3.

    The minimum is r Â except on two flat sides: Â > 0 with r above the range, Â < 0 with r below.
    Written so, a ratio that overflows on a flat side gives no 0 · inf in the gradient. The other
    two sides have no bound: with Â < 0 the term falls without limit as r grows.
    """
    advantages = batch.advantages
    ratio = batch.log_ratio.detach().exp()
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    no_gradient = high | low | (advantages == 0)
    moving = batch.log_ratio.masked_fill(no_gradient, 0).exp() * advantages
    surrogate = torch.where(high, (1 + clip_high) * advantages, moving)
    return TokenTerms(torch.where(low, (1 - clip_low) * advantages, surrogate), low, high)


OBJECTIVES: dict[str, Objective] = {
    "reinforce": Objective(_reinforce, "constant"),
    "grpo": Objective(_grpo, "sequence", {"clip_low": 0.2, "clip_high": 0.2}),
}


def policy_objective(
    name: str,
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float | None = None,
    clip_high: float | None = None,
    aggregation: Aggregation | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, ObjectiveDiagnostics]:
    """Loss of a policy-gradient step: minus the aggregated per-token surrogate.

        reinforce   −Σ Â log π_θ                          aggregation "constant": a sum a sequence
        grpo        −Σ min(r Â, clip(r, 1 − clip_low, 1 + clip_high) Â),  r = π_θ/π_old
                                                          aggregation "sequence"

    logp, old_logp: (B, T), log-probabilities of the sampled tokens. old_logp None stands for
    logp.detach(): on-policy, r = 1 in value. advantages: (B,), one a sequence, or (B, T); a
    detached importance weight ≥ 0 may be multiplied in. mask: bool (B, T), tokens that count;
    what stands elsewhere, NaN included, reaches neither value nor gradient.
    Who sampled: tokens from π_old. Where the sampler μ differs, see `stablerl_core.system`.
    aggregation, denominator: see `aggregate`; with micro-batches pass the whole batch's
    denominator and add up the losses. The KL penalty is not in here: add
    kl_coef * aggregate(kl_estimate(…), mask, …) with the same two arguments.

    Defaults are the source's. DeepSeekMath gives GRPO no clip range: 0.2 is PPO's
    (arXiv 1707.06347 §6.1); DeepSeek-R1 used 10, which leaves the low side open.

    Returns (loss, diagnostics): a scalar, float32 (float64 for float64 logp), exactly 0 with zero
    gradient if no token counts; and a frozen `ObjectiveDiagnostics`.
    Raises `ValueError`: an unknown name, option or aggregation; a shape that is not the above
    (nothing is broadcast, (B, 1) advantages included); a mask that is not bool; a counted logp,
    old_logp or advantage that is not finite; a clip or denominator out of range.
    Source: reinforce Williams 1992; grpo arXiv 2402.03300 Eq. 3 without its KL term.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"name is {name!r}, expected one of {sorted(OBJECTIVES)}")
    objective = OBJECTIVES[name]
    options = _options(name, objective, {"clip_low": clip_low, "clip_high": clip_high})
    batch = _token_batch(logp, old_logp, advantages, mask)
    terms = objective.terms(batch, **options)
    loss = aggregate(-terms.surrogate, mask, aggregation or objective.aggregation, denominator)
    return loss, _diagnostics(batch, terms)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    aggregation: Aggregation,
    denominator: float | Tensor | None = None,
) -> Tensor:
    """One number from (B, T) per-token values: a masked sum over a stated denominator.

        token      Σ_i Σ_t x_it / D           D = counted tokens: every token weighs the same
        sequence   Σ_i (Σ_t x_it / |o_i|) / D  D = B: every sequence weighs the same
        constant   Σ_i Σ_t x_it / D           D = B: a sum a sequence, no length in it
                                              (B · longest allowed length: Dr. GRPO)

    D above is what denominator None takes from this batch; a sequence without a counted token
    still counts in B. For a batch split into micro-batches pass `loss_denominator` of the whole
    one: the sum of the parts is then the loss of the whole, and so is its gradient.

    Raises `ValueError`: shapes differ, mask not bool, unknown aggregation, denominator not > 0.
    Source: token arXiv 2503.14476, sequence 2402.03300, constant 2503.20783.
    """
    same_shape(per_token=per_token, mask=mask)
    if denominator is None:
        denominator = loss_denominator(mask, aggregation)
    _check_reduction(mask, aggregation, denominator)
    kept = torch.where(mask, per_token, torch.zeros_like(per_token))
    if aggregation == "sequence":
        kept = kept / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    return kept.sum() / denominator


def loss_denominator(mask: Tensor, aggregation: Aggregation) -> int:
    """The denominator `aggregate` takes from a whole batch: counted tokens, or sequences B.

    mask: bool (B, T). Never less than 1. Raises `ValueError`: mask not (B, T) bool, unknown
    aggregation.
    """
    _check_reduction(mask, aggregation, 1)
    return max(1, int(mask.sum()) if aggregation == "token" else mask.shape[0])


def merge_diagnostics(parts: Sequence[ObjectiveDiagnostics]) -> ObjectiveDiagnostics:
    """Diagnostics of a whole batch from those of its micro-batches, weighted by their tokens.

    Raises `ValueError`: no parts.
    """
    if not parts:
        raise ValueError("parts is empty, expected one ObjectiveDiagnostics a micro-batch")
    counted = [part for part in parts if part.tokens]
    if not counted:
        return parts[0]
    tokens = sum(part.tokens for part in counted)

    def mean(name: str) -> float:
        return sum(getattr(part, name) * part.tokens for part in counted) / tokens

    names = ObjectiveDiagnostics.__dataclass_fields__.keys() - {"tokens", "ratio_min", "ratio_max"}
    return ObjectiveDiagnostics(
        tokens=tokens,
        ratio_min=min(part.ratio_min for part in counted),
        ratio_max=max(part.ratio_max for part in counted),
        **{name: mean(name) for name in names},
    )


def _options(name: str, objective: Objective, given: Mapping[str, float | None]) -> dict:
    """The paper's options, replaced by those given; refuse what the objective does not have."""
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if key not in objective.options:
            raise ValueError(f"{name} has no {key} (options: {sorted(objective.options)})")
        if not value >= 0:
            raise ValueError(f"{key} is {value!r}, expected a number ≥ 0")
    return {**objective.options, **chosen}


def _token_batch(
    logp: Tensor, old_logp: Tensor | None, advantages: Tensor, mask: Tensor
) -> TokenBatch:
    """Check shapes and finiteness, cast, and put 0 where the mask is False."""
    if logp.ndim != 2:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, expected (B, T)")
    same_shape(logp=logp, old_logp=old_logp, mask=mask)
    boolean_mask(mask)
    if advantages.shape == logp.shape[:1]:
        advantages = advantages[:, None].expand(logp.shape)
    if advantages.shape != logp.shape:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, expected ({logp.shape[0]},) or "
            f"{tuple(logp.shape)}, from logp: pass advantages.squeeze(1) for (B, 1)"
        )
    logp, old_logp = at_least_float32(logp=logp, old_logp=old_logp)
    logp = finite_where("logp", logp, mask)
    old_logp = logp.detach() if old_logp is None else old_logp.detach()
    log_ratio = logp - finite_where("old_logp", old_logp, mask)
    advantages = finite_where("advantages", advantages.detach().to(logp.dtype), mask)
    return TokenBatch(logp, log_ratio, advantages, mask)


def _check_reduction(mask: Tensor, aggregation: str, denominator: float | Tensor) -> None:
    boolean_mask(mask)
    if mask.ndim != 2:
        raise ValueError(f"mask has shape {tuple(mask.shape)}, expected (B, T)")
    if aggregation not in ("token", "sequence", "constant"):
        raise ValueError(
            f"aggregation is {aggregation!r}, expected 'token', 'sequence' or 'constant'"
        )
    if isinstance(denominator, Tensor) and denominator.numel() != 1:
        raise ValueError(f"denominator has shape {tuple(denominator.shape)}, expected one number")
    if not 0 < float(denominator) < float("inf"):
        raise ValueError(
            f"denominator is {float(denominator)}, expected a finite number > 0: "
            "see loss_denominator"
        )


def _diagnostics(batch: TokenBatch, terms: TokenTerms) -> ObjectiveDiagnostics:
    log_ratio = batch.log_ratio.detach()[batch.mask]
    if not len(log_ratio):
        return ObjectiveDiagnostics(0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    ratio = log_ratio.exp()
    low = terms.clipped_low[batch.mask].to(ratio.dtype).mean()
    high = terms.clipped_high[batch.mask].to(ratio.dtype).mean()
    k3 = (torch.expm1(log_ratio) - log_ratio).mean()
    numbers = [ratio.mean(), ratio.min(), ratio.max(), low + high, low, high, -log_ratio.mean(), k3]
    return ObjectiveDiagnostics(len(log_ratio), *torch.stack(numbers).tolist())
