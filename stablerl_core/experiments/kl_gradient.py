"""Chapter 21, which KL gradient: the same estimate, put into the loss or the reward.

The runs: 16 sorting problems a step, 8 completions each, 40 steps, advantages without the
division by the standard deviation, one mean over all tokens of the batch. `*_4` uses every
rollout for four updates. Predictions, written after exploring one seed and before the repeated
runs; KL is the exact `kl_ref` over steps 21-40, β = 0.3 unless said otherwise:

1. `k1` (as a loss): KL is not below that of `none`; the gradient norm is above it.
2. `k1_raised` (β = 1): KL above `none`, held-out accuracy below it.
3. `k1_clipped` (the same, gradients clipped at 0.1): no better; KL above `none`, accuracy below.
4. `k1_sequence` (β = 1, a mean within each completion first): length at least doubles.
5. `unbiased`: KL below 0.6 of that of `none`, entropy above it. `reward_k1`: KL below `none`.
6. `k3` against `unbiased`: the paired interval of the difference in KL contains 0, with one
   update and with four. At this drift forward and reverse KL are too alike to tell.
7. `reward_k3`: KL not below `none`, accuracy below it.
8. `none_4`: KL above `none`, accuracy below `unbiased_4`.
9. `k1_4`: accuracy below 0.05 and KL above three times that of `none_4`.
10. `k2_4`, without a ratio, differs from `unbiased_4` in KL by nothing that six seeds can show.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..policy import kl_estimate
from ..training import DataConfig, NumericsConfig, PolicyConfig, TrainerConfig
from .experiment import Experiment

BETA, RAISED = 0.3, 1.0


def _arm(
    kl_estimator: str = "k1",
    kl_coef: float = BETA,
    *,
    kl_in: str = "loss",
    aggregation: str = "token",
    epochs: int = 1,
    max_grad_norm: float = 1.0,
) -> tuple[TrainerConfig]:
    return (
        TrainerConfig(
            steps=40,
            data=DataConfig(prompts=16),
            policy=PolicyConfig(
                scale="none",
                aggregation=aggregation,
                kl_coef=kl_coef,
                kl_estimator=kl_estimator,
                kl_in=kl_in,
                epochs=epochs,
            ),
            numerics=NumericsConfig(max_grad_norm=max_grad_norm),
        ),
    )


KL_GRADIENT = Experiment(
    name="kl_gradient",
    prediction=__doc__,
    arms={
        "none": _arm(kl_coef=0.0),
        "k1": _arm("k1"),
        "k1_raised": _arm("k1", RAISED),
        "k1_clipped": _arm("k1", RAISED, max_grad_norm=0.1),
        "k1_sequence": _arm("k1", RAISED, aggregation="sequence"),
        "k3": _arm("k3"),
        "unbiased": _arm("unbiased"),
        "reward_k1": _arm("k1", kl_in="reward"),
        "reward_k3": _arm("k3", kl_in="reward"),
        "none_4": _arm(kl_coef=0.0, epochs=4),
        "k1_4": _arm("k1", epochs=4),
        "k2_4": _arm("k2", epochs=4),
        "k3_4": _arm("k3", epochs=4),
        "unbiased_4": _arm("unbiased", epochs=4),
        "reward_k1_4": _arm("k1", kl_in="reward", epochs=4),
    },
)

ALL = (KL_GRADIENT,)


# Losses that go by the name of a KL estimate, and what one draw of them does to the logits.


def k3_detached_ratio(logp: Tensor, ref_logp: Tensor, sampler_logp: Tensor) -> Tensor:
    """sg[π_θ/μ] · k3: the correction of DeepSeek-V3.2 with its gradient through the ratio cut.

    Any one shape; tokens drawn from μ. Expected gradient: ∇KL(π_ref‖π_θ), the forward KL.
    """
    ratio = (logp - sampler_logp).detach().exp()
    return ratio * kl_estimate(logp, ref_logp, "k3")


def k3_clamped(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k3 with log δ clamped to ±20 and the result to ±10, as verl's `low_var_kl` computes it.

    Any one shape; tokens drawn from π_θ. No gradient where k3 > 10: log δ > 2.61 or < −11.
    """
    log_delta = (ref_logp - logp).clamp(-20, 20)
    return (log_delta.exp() - log_delta - 1).clamp(-10, 10)


def seed_delta_log_delta(logp: Tensor, ref_logp: Tensor) -> Tensor:
    """δ log δ with δ = π_ref/π_θ: the formula that a circulated text gives for k3.

    Any one shape; tokens drawn from π_θ. Its mean is KL(π_ref‖π_θ), single values may be
    negative, and as a loss its gradient is that of neither KL.
    """
    log_delta = ref_logp - logp
    return log_delta.exp() * log_delta


def score_coefficient(loss: Tensor, logp: Tensor) -> Tensor:
    """What a per-token loss multiplies the score ∇log π_θ with: d loss / d logp, detached."""
    return torch.autograd.grad(loss.sum(), logp, retain_graph=True)[0]


def gradient_moments(coefficient: Tensor, pi: Tensor, mu: Tensor) -> tuple[Tensor, Tensor]:
    """Exact mean and total variance of one draw c(a) · ∇log π(a), a ~ μ, in the logits of π.

        E = μ⊙c − π Σ μ c        Var = Σ_a μ c² ‖∇log π(a)‖² − ‖E‖²,  ∇log π(a) = e_a − π

    coefficient c, pi, mu: (..., V), the last two probabilities. Returns (..., V) and (...).
    """
    mean = mu * coefficient - pi * (mu * coefficient).sum(-1, keepdim=True)
    squared_score = 1 - 2 * pi + (pi**2).sum(-1, keepdim=True)
    second = (mu * coefficient**2 * squared_score).sum(-1)
    return mean, second - (mean**2).sum(-1)
