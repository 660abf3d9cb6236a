"""Policy objectives: what is shared by all of them, from checks to aggregation and diagnostics.

What a token is worth to each is in surrogates.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ._batch import TokenBatch, token_batch
from ._checks import boolean_mask, same_shape
from .surrogates import OBJECTIVES, Aggregation, Objective, TokenTerms


@dataclass(frozen=True)
class ObjectiveDiagnostics:
    """What one call saw, as plain numbers over the counted tokens (no gradient).

    Ratio and KL compare π_θ with π_old at tokens taken to be drawn from π_old; what separates
    π_old from the sampler μ is not in them. The ratio is a token's also for gspo, whose clip acts
    on its sequence's. Without a counted token the ratios and the gate are 1, the rest 0.
    """

    tokens: int  # counted tokens
    ratio_mean: float  # π_θ/π_old
    ratio_min: float
    ratio_max: float
    clip_fraction: float  # share of the tokens whose gradient the clip sets to zero (cispo: whose
    #                       weight it holds at a bound): low + high
    clip_fraction_low: float  # of these, the ratio below its bound
    clip_fraction_high: float  # of these, the ratio above its bound
    step_kl_k1: float  # mean of −log ratio: KL(π_old ‖ π_θ) in nats, unbiased, may be negative
    step_kl_k3: float  # mean of ratio − 1 − log ratio: the same KL, unbiased, never negative
    gate_mean: float = 1.0  # mean share of a token's unclipped gradient that is left: 1 −
    #                         clip_fraction with a hard clip; what SAPO and a capped weight leave


def policy_objective(
    name: str,
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sampler_logp: Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    dual_clip: float | None = None,
    tau_positive: float | None = None,
    tau_negative: float | None = None,
    ratio_cap: float | None = None,
    aggregation: Aggregation | None = None,
    denominator: float | Tensor | None = None,
) -> tuple[Tensor, ObjectiveDiagnostics]:
    """Loss of a policy-gradient step: minus the aggregated per-token surrogate.

    With r = π_θ/π_old of a token, s = its geometric mean over a sequence, sg = no gradient:

        reinforce          Â log π_θ                                              constant  none
        grpo               min(r Â, clip(r, 1 − clip_low, 1 + clip_high) Â)       sequence  std
        dr_grpo            the same                                               constant  none
        dapo               the same, clip_high > clip_low                         token     std
        gspo, gspo_token   the same with s for r; gspo_token: gradient per token  sequence  std
        cispo              sg[clip(r)] Â log π_θ                                  token     std
        sapo               4/τ σ(τ(r − 1)) Â, τ by the sign of Â                  sequence  std
        bapo               as grpo, bounds from `balance_bounds`                  sequence  std
        minirl             M sg[min(π_θ/μ, ratio_cap)] Â log π_θ                  constant  none

    The last columns are the default aggregation and the advantage scale that the source uses (the
    advantages are yours to compute). An option of None is the default in `OBJECTIVES[name]`.
    dual_clip (grpo, dr_grpo, dapo, bapo; default inf = none, 3 in arXiv 1912.09729): with Â < 0
    the term is never below dual_clip · Â.

    logp, old_logp: (B, T), log-probabilities of the sampled tokens. old_logp None stands for
    logp.detach(): on-policy, r = 1 in value. advantages: (B,), one a sequence, or (B, T); a
    detached importance weight ≥ 0 may be multiplied in. mask: bool (B, T), tokens that count;
    what stands elsewhere, NaN included, reaches neither value nor gradient. sampler_logp: log μ,
    read by minirl and by bapo's search alone; None stands for old_logp.
    Who sampled: tokens from π_old (minirl: from μ). Where the sampler differs, for the others see
    `stablerl_core.system`.
    aggregation, denominator: see `aggregate`; with micro-batches pass the whole batch's
    denominator (and for bapo its bounds) and add up the losses. The KL penalty is not in here:
    add kl_coef * aggregate(kl_estimate(…), mask, …) with the same two arguments.

    Defaults are the source's, where it has them. DeepSeekMath gives GRPO no clip range: 0.2 is
    PPO's (arXiv 1707.06347 §6.1); DeepSeek-R1 used 10, which leaves the low side open. MiniMax
    does not publish CISPO's clip_high: 4 is the absolute cap 5 of ScaleRL (2510.13786); its low
    side is open (verl closes it at 0.8). Dr. GRPO's code divides by B · longest allowed length.

    Returns (loss, diagnostics): a scalar, float32 (float64 for float64 logp), exactly 0 with zero
    gradient if no token counts; and a frozen `ObjectiveDiagnostics`.
    Raises `ValueError`: an unknown name or aggregation; an option or sampler_logp that the
    objective does not have; a shape that is not the above (nothing is broadcast, (B, 1)
    advantages included); a mask that is not bool; a counted log-probability or advantage that is
    not finite; an option or denominator out of range; gspo with advantages that differ within a
    sequence; bapo with one bound of the two.
    Source: reinforce Williams 1992; grpo arXiv 2402.03300 Eq. 3 without its KL term; dr_grpo
    2503.20783; dapo 2503.14476; gspo 2507.18071; cispo 2506.13585; sapo 2511.20347; bapo
    2510.18927; minirl 2512.01374.
    """
    if name not in OBJECTIVES:
        raise ValueError(f"name is {name!r}, expected one of {sorted(OBJECTIVES)}")
    objective = OBJECTIVES[name]
    given = dict(clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, ratio_cap=ratio_cap)
    given |= dict(tau_positive=tau_positive, tau_negative=tau_negative)
    options = _options(name, objective, given)
    if sampler_logp is not None and not objective.sampler:
        raise ValueError(
            f"{name} does not read sampler_logp: multiply an importance weight into advantages"
        )
    batch = token_batch(logp, old_logp, sampler_logp, advantages, mask)
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
    """The source's options, replaced by those given; refuse what the objective does not have."""
    chosen = {key: value for key, value in given.items() if value is not None}
    for key, value in chosen.items():
        if key not in objective.options:
            raise ValueError(f"{name} has no {key} (options: {sorted(objective.options)})")
        if key.startswith("clip") and not value >= 0:
            raise ValueError(f"{key} is {value!r}, expected a number ≥ 0")
        least = 1 if key == "dual_clip" else 0
        if not key.startswith("clip") and not value > least:
            raise ValueError(f"{key} is {value!r}, expected a number > {least}")
    return {**objective.options, **chosen}


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
        return ObjectiveDiagnostics(0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)
    ratio = log_ratio.exp()
    low = terms.clipped_low[batch.mask].to(ratio.dtype).mean()
    high = terms.clipped_high[batch.mask].to(ratio.dtype).mean()
    k3 = (torch.expm1(log_ratio) - log_ratio).mean()
    numbers = [ratio.mean(), ratio.min(), ratio.max(), low + high, low, high, -log_ratio.mean(), k3]
    numbers.append(terms.gate[batch.mask].mean())
    return ObjectiveDiagnostics(len(log_ratio), *torch.stack(numbers).tolist())
