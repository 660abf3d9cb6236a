"""How far the policy that sampled is from the policy that is trained, on the same tokens."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ._checks import token_advantages

BINS = (0.0, 0.01, 0.1, 0.3, 0.7, 1.0)


class ProbabilityBin(NamedTuple):
    """The tokens whose sampler probability p lies in (low, high].

    `mean_abs` and `mean` of Δ = log π_old − log μ in nats; `tail` = mean of 1 − p;
    `logit_noise` = E|Δ| / E 2(1−p): the error of the logits, in nats, whose first-order bound
    `bound(ε)` = 2ε(1−p) is the mean gap of the bin. If the gap is rounding of the logits it is
    about the same in every bin; if one bin stands out, something else is at work. NaN in a bin
    without tokens.
    """

    low: float
    high: float
    tokens: int
    mean_abs: float
    mean: float
    tail: float
    logit_noise: float

    def bound(self, eps: float) -> float:
        """Largest mean |Δ|, in nats and to first order, that logit errors up to `eps` allow."""
        return 2 * eps * self.tail


@dataclass(frozen=True)
class MismatchReport:
    """Statistics of Δ = log π_old − log μ over counted tokens; every token was drawn from μ.

    `mean_abs` and `max_abs` of Δ in nats; `k1` = E[−Δ] and `k3` = E[e^Δ − 1 − Δ], both
    estimates of KL(μ‖π_old) in nats/token; `chi2_token` = E[e^{2Δ}] − 1 and `chi2_seq` the same
    of the sequence product; `ppl_ratio` = mean over sequences of exp(−mean Δ), trainer
    perplexity over sampler perplexity; `ess_token`, `ess_seq` = (E w)²/E w², a fraction;
    `extreme` = F(τ), the share of tokens whose ratio or inverse ratio exceeds τ = 2; `pearson` =
    correlation of the two token probabilities; `bins` by the sampler's token probability;
    `positive`, `negative`: the same report of the tokens with Â > 0 and with Â < 0, None
    without advantages or without such a token.
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
    bins: tuple[ProbabilityBin, ...]
    positive: MismatchReport | None = None
    negative: MismatchReport | None = None


def mismatch_report(
    trainer_logp: Tensor,
    sampler_logp: Tensor,
    mask: Tensor,
    *,
    tau: float = 2.0,
    advantages: Tensor | None = None,
    edges: tuple[float, ...] = BINS,
) -> MismatchReport:
    """Compare the trainer's and the sampler's log-probabilities of the sampled tokens.

    All arguments (B, T); `mask` bool, True at counted completion tokens; tokens drawn from μ,
    the policy of `sampler_logp`. `advantages` (B,) or (B, T) add a report for each sign of Â.
    `edges`: the bins' limits, rising. Computed in float64 before any truncation. Raises
    `ValueError` for shapes that differ, an empty mask, counted values that are not finite,
    a tau below 1 or edges that do not rise from 0 to 1.
    Source: formulas of verl `compute_offpolicy_metrics`, without its clamp of log-ratios at ±20;
    extreme share: arXiv 2510.11370; bins: arXiv 2512.23087.
    """
    mask = _check(trainer_logp, sampler_logp, mask, tau, edges)
    report = _report(trainer_logp, sampler_logp, mask, tau, edges)
    if advantages is None:
        return report
    sign = token_advantages(advantages, mask)
    split = {}
    for name, chosen in (("positive", mask & (sign > 0)), ("negative", mask & (sign < 0))):
        if chosen.any():
            split[name] = _report(trainer_logp, sampler_logp, chosen, tau, edges)
    return MismatchReport(**(vars(report) | split))


def logit_noise_bound(sampler_logp: Tensor, eps: float, *, exact: bool = False) -> Tensor:
    """Largest |Δ log p| of a token when every logit is off by at most `eps` nats.

        first order   2ε(1 − p)                    exact   log(p + (1 − p) e^{2ε})

    The exact bound is reached when the token's logit falls by ε and all others rise by ε.
    sampler_logp: log p, any shape; same shape returned, float64. Raises `ValueError` for a
    negative eps. Source: arXiv 2512.23087 (that the bound scales with 1 − p).
    """
    if not eps >= 0:
        raise ValueError(f"eps={eps}: the size of a logit error, must be ≥ 0")
    p = sampler_logp.detach().double().exp().clamp(max=1)
    if not exact:
        return 2 * eps * (1 - p)
    return torch.log1p((1 - p) * torch.expm1(torch.tensor(2 * eps, dtype=p.dtype)).to(p.device))


def _check(trainer_logp, sampler_logp, mask, tau, edges) -> Tensor:
    if not trainer_logp.shape == sampler_logp.shape == mask.shape or mask.dim() != 2:
        raise ValueError(
            f"trainer_logp {tuple(trainer_logp.shape)}, sampler_logp "
            f"{tuple(sampler_logp.shape)} and mask {tuple(mask.shape)} must share one (B, T)"
        )
    mask = mask.bool()
    if not mask.any():
        raise ValueError("mask counts no token: nothing was sampled, so nothing can be compared")
    for x in (trainer_logp, sampler_logp):
        if not torch.isfinite(x.detach()[mask]).all():
            raise ValueError("trainer_logp or sampler_logp is not finite at a counted token")
    if not tau >= 1:
        raise ValueError(f"tau={tau}: a ratio, must be ≥ 1")
    if tuple(edges) != tuple(sorted(set(edges))) or (edges[0], edges[-1]) != (0, 1):
        raise ValueError(f"edges={edges}: expected probabilities that rise from 0 to 1")
    return mask


def _report(trainer_logp, sampler_logp, mask, tau, edges) -> MismatchReport:
    mu = sampler_logp.detach().double()[mask]
    delta = trainer_logp.detach().double()[mask] - mu
    rows = mask.nonzero()[:, 0].unique(return_inverse=True)[1]
    lengths = rows.bincount().double()
    sums = torch.zeros_like(lengths).index_add_(0, rows, delta)
    ratio, product, p = delta.exp(), sums.exp(), mu.exp().clamp(max=1)
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
        bins=tuple(_bin(low, high, p, delta) for low, high in pairwise(edges)),
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


def _bin(low: float, high: float, p: Tensor, delta: Tensor) -> ProbabilityBin:
    inside = (p > low) & (p <= high) if low else p <= high
    count, nothing = int(inside.sum()), float("nan")
    if not count:
        return ProbabilityBin(low, high, 0, nothing, nothing, nothing, nothing)
    gap, tail = delta[inside], float((1 - p[inside]).mean())
    size = float(gap.abs().mean())
    noise = size / (2 * tail) if tail else nothing
    return ProbabilityBin(low, high, count, size, float(gap.mean()), tail, noise)
