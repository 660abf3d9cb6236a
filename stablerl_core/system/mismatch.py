"""How far the policy that sampled is from the policy that is trained, on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BINS = (0.0, 0.01, 0.1, 0.3, 0.7, 1.0)


@dataclass(frozen=True)
class MismatchReport:
    """Statistics of Δ = log π_old − log μ over counted tokens; every token was drawn from μ.

    `mean_abs` and `max_abs` of Δ in nats; `k1` = E[−Δ] and `k3` = E[e^Δ − 1 − Δ], both
    estimates of KL(μ‖π_old) in nats/token; `chi2_token` = E[e^{2Δ}] − 1 and `chi2_seq` the same
    of the sequence product; `ppl_ratio` = mean over sequences of exp(−mean Δ), trainer
    perplexity over sampler perplexity; `ess_token`, `ess_seq` = (E w)²/E w², a fraction;
    `extreme` = share of tokens whose ratio or inverse ratio exceeds τ = 2; `pearson` =
    correlation of the two token probabilities; `bins` = (low, high, tokens, mean |Δ|) by the
    sampler's token probability.
    """

    tokens: int
    mean_abs: float
    max_abs: float
    k1: float
    k3: float
    chi2_token: float
    chi2_seq: float
    ppl_ratio: float
    ess_token: float
    ess_seq: float
    extreme: float
    pearson: float
    bins: tuple[tuple[float, float, int, float], ...]


def mismatch_report(
    trainer_logp: Tensor, sampler_logp: Tensor, mask: Tensor, *, tau: float = 2.0
) -> MismatchReport:
    """Compare the trainer's and the sampler's log-probabilities of the sampled tokens.

    All arguments (B, T); `mask` bool, True at counted completion tokens; tokens drawn from μ,
    the policy of `sampler_logp`. Computed in float64 before any truncation. Raises
    `ValueError` for shapes that differ, an empty mask, or counted values that are not finite.
    Source: formulas of verl `compute_offpolicy_metrics`; extreme share: arXiv 2510.11370.
    """
    if not trainer_logp.shape == sampler_logp.shape == mask.shape or mask.dim() != 2:
        raise ValueError(
            f"trainer_logp {tuple(trainer_logp.shape)}, sampler_logp "
            f"{tuple(sampler_logp.shape)} and mask {tuple(mask.shape)} must share one (B, T)"
        )
    mask = mask.bool()
    if not mask.any():
        raise ValueError("mask counts no token: nothing was sampled, so nothing can be compared")
    mu = sampler_logp.detach().double()[mask]
    delta = trainer_logp.detach().double()[mask] - mu
    if not torch.isfinite(delta).all():
        raise ValueError("trainer_logp or sampler_logp is not finite at a counted token")
    rows = mask.nonzero()[:, 0].unique(return_inverse=True)[1]
    lengths = rows.bincount().double()
    sums = torch.zeros_like(lengths).index_add_(0, rows, delta)
    ratio, product = delta.exp(), sums.exp()
    return MismatchReport(
        tokens=len(delta),
        mean_abs=float(delta.abs().mean()),
        max_abs=float(delta.abs().max()),
        k1=float(-delta.mean()),
        k3=float((torch.expm1(delta) - delta).mean()),
        chi2_token=float(ratio.square().mean() - 1),
        chi2_seq=float(product.square().mean() - 1),
        ppl_ratio=float((-sums / lengths).exp().mean()),
        ess_token=_ess(delta),
        ess_seq=_ess(sums),
        extreme=float((delta.abs() > torch.tensor(tau).double().log()).double().mean()),
        pearson=_pearson((mu + delta).exp(), mu.exp()),
        bins=tuple(_bin(low, high, mu.exp().clamp(max=1), delta) for low, high in pairwise(BINS)),
    )


def _ess(log_weights: Tensor) -> float:
    """(Σw)² / (n Σw²), from log-weights, without overflow."""
    first, second = log_weights.logsumexp(0), (2 * log_weights).logsumexp(0)
    return float((2 * first - second).exp() / len(log_weights))


def _pearson(a: Tensor, b: Tensor) -> float:
    """Correlation of two samples; NaN when one of them does not vary."""
    a, b = a - a.mean(), b - b.mean()
    spread = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / spread) if spread > 0 else float("nan")


def _bin(low: float, high: float, p: Tensor, delta: Tensor):
    inside = (p > low) & (p <= high) if low else p <= high
    count = int(inside.sum())
    return low, high, count, float(delta[inside].abs().mean()) if count else float("nan")
