"""How far the policy is from its anchor: estimates from sampled tokens, and the exact sum."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ._checks import at_least_float32, boolean_mask, finite_where, same_shape

KLEstimator = Literal["k1", "k2", "k3", "unbiased"]


def _k1(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor | None) -> Tensor:
    return logp - ref_logp


def _k2(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor | None) -> Tensor:
    return 0.5 * (ref_logp - logp) ** 2


def _k3(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor | None) -> Tensor:
    log_delta = ref_logp - logp
    return torch.expm1(log_delta) - log_delta  # expm1: exact digits where π_θ ≈ π_ref


def _unbiased(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor | None) -> Tensor:
    # ρ·k3 = (π_ref/μ − 1) − (ρ − 1) − ρ·log δ, multiplied out: where π_θ is tiny, ρ is 0 and δ
    # infinite, but their product π_ref/μ is neither. It holds no θ, so δ leaves the gradient.
    log_rho = logp - sampler_logp
    return (
        torch.expm1(ref_logp - sampler_logp)
        - torch.expm1(log_rho)
        - torch.exp(log_rho) * (ref_logp - logp)
    )


ESTIMATORS: dict[str, Callable[[Tensor, Tensor, Tensor | None], Tensor]] = {
    "k1": _k1,
    "k2": _k2,
    "k3": _k3,
    "unbiased": _unbiased,
}


def kl_estimate(
    logp: Tensor,
    ref_logp: Tensor,
    estimator: KLEstimator,
    sampler_logp: Tensor | None = None,
    *,
    mask: Tensor | None = None,
) -> Tensor:
    """Estimate KL(π_θ ‖ π_ref) at each sampled token, in nats.

    With δ = π_ref/π_θ and ρ = π_θ/μ at the sampled token:

        k1 = −log δ      k2 = ½ (log δ)²      k3 = δ − 1 − log δ      unbiased = ρ · k3

    logp, ref_logp, sampler_logp: any one shape, usually (B, T). Returns that shape, float32
    (float64 for float64 input). Gradient flows through `logp` only, and through ρ too.
    Who sampled: k1, k2, k3 assume tokens drawn from π_θ itself; "unbiased" takes tokens drawn
    from μ and needs its log-probabilities, also where μ = π_θ (ρ = 1 still carries gradient).

    Used as a loss their expected gradients differ: k1 gives 0, k2 ∇KL(π_θ‖π_ref), k3
    ∇KL(π_ref‖π_θ), the other direction; "unbiased" gives ∇KL(π_θ‖π_ref) for any μ.
    Nothing is clamped: δ and ρ overflow to inf beyond a log-ratio of 88 in float32.

    mask: optional bool; entries that do not count give exactly 0 and no gradient, whatever
    they hold. Without it every entry counts.

    Raises `ValueError`: unequal shapes; an unknown estimator; "unbiased" without sampler_logp,
    or another one with it; a counted entry that is not finite.
    Source: k1-k3 Schulman 2020, joschu.net/blog/kl-approx.html; unbiased arXiv 2512.02556 Eq. 7.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator is {estimator!r}, expected one of {list(ESTIMATORS)}")
    if (estimator == "unbiased") != (sampler_logp is not None):
        was = "missing" if sampler_logp is None else "given"
        raise ValueError(
            f"sampler_logp is {was} with estimator {estimator!r}: 'unbiased' weighs by π_θ/μ and "
            "needs it, k1, k2 and k3 would ignore it"
        )
    same_shape(logp=logp, ref_logp=ref_logp, sampler_logp=sampler_logp, mask=mask)
    if mask is None:
        mask = torch.ones_like(logp, dtype=torch.bool)
    boolean_mask(mask)
    logp, ref_logp, sampler_logp = at_least_float32(
        logp=logp, ref_logp=ref_logp, sampler_logp=sampler_logp
    )
    logp = finite_where("logp", logp, mask)
    ref_logp = finite_where("ref_logp", ref_logp.detach(), mask)
    if sampler_logp is not None:
        sampler_logp = finite_where("sampler_logp", sampler_logp.detach(), mask)
    return ESTIMATORS[estimator](logp, ref_logp, sampler_logp)


def kl_in_reward(
    rewards: Tensor,
    logp: Tensor,
    ref_logp: Tensor,
    mask: Tensor,
    kl_coef: float,
    estimator: KLEstimator = "k1",
) -> Tensor:
    """Rewards minus the KL penalty of their completions, for advantages to be taken from.

        R_i ← R_i − kl_coef · Σ_t k(o_it)        k1: R_i − kl_coef · log π_θ(o_i)/π_ref(o_i)

    rewards: (B,). logp, ref_logp: (B, T), mask: bool (B, T). Returns (B,), detached, float32
    (float64 for float64). kl_coef is in reward per nat; the sum is over the whole completion.
    Who sampled: tokens from π_θ as `logp` has it at sampling time, before any update (old_logp).

    Under a policy gradient "k1" here is ∇KL(π_θ‖π_ref) exactly, which as a loss it is not. "k3"
    here is not: it gives ∇KL(π_θ‖π_ref) − ∇KL(π_ref‖π_θ), nearly nothing close to the reference.
    A group's scale "std" then divides the penalty too. In a completion without a counted token
    the reward stays.

    Raises `ValueError`: shapes that do not fit; mask not bool; a counted entry or a reward that
    is not finite; kl_coef negative; estimator "unbiased", whose gradient a reward cannot carry.
    Source: arXiv 1909.08593 Eq. 2.
    """
    if estimator == "unbiased":
        raise ValueError("estimator is 'unbiased', expected 'k1', 'k2' or 'k3': see kl_estimate")
    if rewards.shape != logp.shape[:1] or logp.ndim != 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)} and logp {tuple(logp.shape)}, expected (B,) "
            "and (B, T)"
        )
    if not 0 <= kl_coef < float("inf"):
        raise ValueError(f"kl_coef is {kl_coef!r}, expected a finite number ≥ 0")
    penalty = kl_estimate(logp.detach(), ref_logp, estimator, mask=mask).sum(-1)
    rewards, penalty = at_least_float32(rewards=rewards.detach(), penalty=penalty)
    rewards = finite_where("rewards", rewards, torch.ones_like(rewards, dtype=torch.bool))
    return rewards - kl_coef * penalty


def exact_kl(logits: Tensor, ref_logits: Tensor) -> Tensor:
    """KL(π_θ ‖ π_ref) by the sum over the whole vocabulary, in nats; nobody has to sample.

        KL = Σ_v π_θ(v) (log π_θ(v) − log π_ref(v))

    logits, ref_logits: (..., V), unnormalised. Returns (...), float32 (float64 for float64).
    Gradient flows into both arguments: compute ref_logits under `torch.no_grad()`, or swap the
    two for the forward KL(π_ref ‖ π_θ).
    A −inf logit is a token of probability 0 and adds 0 (0·log 0 = 0), in value and gradient;
    where π_θ has mass and π_ref none the result is +inf, and there is no gradient to be had.

    Raises `ValueError`: unequal shapes; a row without a finite logit, or with NaN or +inf.
    Source: arXiv 2512.02556 §3.1 (the quantity that Eq. 7 estimates).
    """
    same_shape(logits=logits, ref_logits=ref_logits)
    logits, ref_logits = at_least_float32(logits=logits, ref_logits=ref_logits)
    logp = log_softmax_of("logits", logits)
    ref_logp = log_softmax_of("ref_logits", ref_logits)
    empty = logp.detach().exp() == 0  # filled before multiplying: 0 · (−inf) would be NaN
    difference = logp.masked_fill(empty, 0) - ref_logp.masked_fill(empty, 0)
    return (logp.exp() * difference).sum(dim=-1)


def log_softmax_of(name: str, logits: Tensor) -> Tensor:
    """`log_softmax` over the last dimension; raise `ValueError` for a row that has none."""
    logp = torch.log_softmax(logits, dim=-1)
    if logits.shape[-1] == 0 or torch.isnan(logp.detach()).any():
        rows = int(torch.isnan(logp).any(dim=-1).sum())
        raise ValueError(
            f"{name} has shape {tuple(logits.shape)} and {rows} rows that are no "
            "distribution: each needs one finite logit, and neither NaN nor +inf"
        )
    return logp
