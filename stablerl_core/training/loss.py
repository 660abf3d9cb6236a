"""The loss of one update: the objective, its penalties, and what all rows decide together."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..policy import (
    OBJECTIVES,
    ObjectiveDiagnostics,
    aggregate,
    balance_bounds,
    clip_cov,
    entropy,
    kl_cov,
    kl_estimate,
    loss_denominator,
    policy_objective,
)
from ..system import (
    CORRECTIONS,
    geometric_rejection,
    importance_weights,
    minimum_prefix_weights,
    off_policy_sequence_mask,
)
from .config import PolicyConfig, SystemConfig
from .rollout import Rollout, completion_logp, select_rows

GEOMETRIC_BAND = 1.001  # verl's preset decoupled_geo_rs
NOTHING_SEEN = ObjectiveDiagnostics(0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass
class UpdateLoss:
    """The loss of one update, for micro-batches whose gradients add up to that of the whole.

    `old_logp` (B, T), `advantages` (B,) or (B, T) and `anchored` (B, T), the tokens that KL-Cov
    pulls back, are those of the whole rollout; `clip` are the bounds in force, found by BAPO's
    search where the configuration names none. `weights` (B, T) correct for μ, which sampled.
    `pull` (2,) adds up Σ|∂loss/∂log π_θ| of the objective over tokens with Â > 0, and over all;
    `silenced` (2,) the tokens with an advantage that weights and masks set to 0, and all of them;
    `lost` (2,) the tokens outside of the sets that the trainer's own filter left, and all.
    """

    policy: PolicyConfig
    system: SystemConfig
    reference: PreTrainedModel
    denominator: int
    old_logp: Tensor | None
    advantages: Tensor
    clip: dict[str, float | None]
    weights: Tensor | None = None
    anchored: Tensor | None = None
    pull: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    silenced: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    lost: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))

    def of(
        self, logits: Tensor, logp: Tensor, piece: Rollout, rows: Tensor
    ) -> tuple[Tensor, ObjectiveDiagnostics]:
        """Loss of the rows `rows` of the rollout, cut out as `piece`, and what it saw.

        Log-probabilities that are not finite make it NaN, with a NaN gradient: whoever steps
        has to count and handle that.
        """
        old_logp = self._cut(self.old_logp, rows, piece)
        if piece.refilter:
            logp, old_logp, piece = self._without_lost(logp, old_logp, piece)
        if not torch.isfinite(logp[piece.mask]).all():
            return logp.sum() * math.nan, NOTHING_SEEN
        advantages = self._corrected(logp.detach(), piece, rows)
        loss, seen = policy_objective(
            self.policy.objective,
            logp,
            old_logp,
            advantages,
            piece.mask,
            sampler_logp=piece.sampler_logp if self.policy.objective == "minirl" else None,
            aggregation=aggregation_of(self.policy),
            denominator=self.denominator,
            **self.clip,
            **_options_of(self.policy),
        )
        self.pull += _pull(loss, logp, advantages)
        penalties = self._penalties(logits, logp, old_logp, piece, rows)
        return sum((coef * self._mean(x, piece) for coef, x in penalties), loss), seen

    def _without_lost(self, logp: Tensor, old_logp: Tensor | None, piece: Rollout):
        """Take tokens of log-probability −inf out of the mask; they keep a 0 without a gradient."""
        lost = logp == -math.inf
        if old_logp is not None:
            lost |= old_logp == -math.inf
            old_logp = old_logp.masked_fill(lost, 0)
        counted = piece.mask
        self.lost += torch.stack([(lost & counted).sum(), counted.sum()]).double().cpu()
        return logp.masked_fill(lost, 0), old_logp, replace(piece, mask=counted & ~lost)

    def _corrected(self, logp: Tensor, piece: Rollout, rows: Tensor) -> Tensor:
        """The advantages, weighted and masked for tokens that came from μ and not from π_old."""
        advantages, system = self.advantages[rows], self.system
        given = advantages if advantages.ndim == 1 else advantages[:, : logp.shape[1]]
        used = given
        if self.weights is not None:
            used = _wide(used) * self._cut(self.weights, rows, piece)
        if system.correction == "minimum_prefix":
            cap = math.inf if system.correction_cap is None else system.correction_cap
            found = minimum_prefix_weights(logp, piece.sampler_logp, piece.mask, cap=cap)
            used = _wide(used) * found.values
        if system.off_policy_threshold is not None:
            threshold, drawn = system.off_policy_threshold, piece.sampler_logp
            keep = off_policy_sequence_mask(logp, drawn, given, piece.mask, threshold)
            used = _wide(used) * keep.expand(piece.mask.shape)
        if used is not given:
            had = (_wide(given) != 0) & piece.mask
            self.silenced += torch.stack([(had & (used == 0)).sum(), had.sum()]).double().cpu()
        return used

    def _penalties(self, logits, logp, old_logp, piece: Rollout, rows: Tensor):
        """(weight, (B, T) values) of everything that joins the objective."""
        policy = self.policy
        if policy.kl_coef and policy.kl_in == "loss":
            with torch.no_grad():
                ref_logp = completion_logp(self.reference, piece)
            drawn = piece.sampler_logp if policy.kl_estimator == "unbiased" else None
            kl = kl_estimate(logp, ref_logp, policy.kl_estimator, drawn, mask=piece.mask)
            yield policy.kl_coef, kl
        if policy.entropy_coef:
            yield -policy.entropy_coef, entropy(logits / piece.sampling.temperature)
        if self.anchored is not None and old_logp is not None:
            chosen = self._cut(self.anchored, rows, piece)
            yield 1.0, torch.where(chosen, (logp - old_logp).abs(), 0.0)

    def _mean(self, per_token: Tensor, piece: Rollout) -> Tensor:
        return aggregate(per_token, piece.mask, aggregation_of(self.policy), self.denominator)

    @staticmethod
    def _cut(whole: Tensor | None, rows: Tensor, piece: Rollout) -> Tensor | None:
        return None if whole is None else whole[rows, : piece.mask.shape[1]]


def update_denominator(policy: PolicyConfig, mask: Tensor, longest: int) -> int:
    """What the sum over an update's rows is divided by; `constant` means rows × `longest`."""
    whole = loss_denominator(mask, aggregation_of(policy))
    return whole * longest if aggregation_of(policy) == "constant" else whole


def correction_weights(
    system: SystemConfig, old_logp: Tensor, batch: Rollout
) -> tuple[Tensor, float] | None:
    """Weights (B, T) of the configured correction and their effective sample size, or None.

    None too where a log-probability is not finite: the loss finds that and is NaN. Tokens that a
    re-run filter lost are not counted.
    """
    name, cap = system.correction, system.correction_cap
    if name in (None, "minimum_prefix"):
        return None
    given = (old_logp, batch.sampler_logp, found_tokens(old_logp, batch))
    if not torch.isfinite(old_logp[given[-1]]).all():
        return None
    if name == "geometric_rejection":
        high = GEOMETRIC_BAND if cap is None else cap
        keep = geometric_rejection(*given, low=1 / high, high=high)
        found = importance_weights(*given, level="geometric", cap=high)
        return keep.to(old_logp.dtype).expand_as(old_logp), found.ess
    options = dict(CORRECTIONS[name]) | ({} if cap is None else {"cap": cap})
    found = importance_weights(*given, **options)
    return found.values, found.ess


def found_tokens(logp: Tensor, batch: Rollout) -> Tensor:
    """The mask (B, T), without the tokens that a re-run filter lost."""
    return batch.mask & (logp != -math.inf) if batch.refilter else batch.mask


@torch.no_grad()
def decide_together(
    loss: UpdateLoss,
    model: PreTrainedModel,
    batch: Rollout,
    rows: Tensor,
    generator: torch.Generator,
) -> None:
    """Settle what needs all rows of the update at once: BAPO's bounds, the covariance rules."""
    policy = loss.policy
    searches = policy.objective == "bapo" and policy.clip_low is None is policy.clip_high
    if not (searches or policy.covariance) or len(rows) == 0:
        return
    piece = select_rows(batch, rows)
    logp, width = completion_logp(model, piece), piece.mask.shape[1]
    if not torch.isfinite(logp[piece.mask]).all():
        return
    if searches:
        old_logp = None if loss.old_logp is None else loss.old_logp[rows, :width]
        given = (logp, old_logp, loss.advantages[rows], piece.mask)
        options = {k: v for k, v in policy.options.items() if k != "dual_clip"}
        found = balance_bounds(*given, sampler_logp=piece.sampler_logp, **options)
        loss.clip = {"clip_low": found.clip_low, "clip_high": found.clip_high}
    given, share = (loss.advantages[rows], logp, piece.mask), policy.covariance_share
    if policy.covariance == "clip_cov":
        wide = loss.advantages[:, None].repeat(1, batch.mask.shape[1])
        wide[rows, :width] = clip_cov(*given, ratio=share, generator=generator)
        loss.advantages = wide
    elif policy.covariance == "kl_cov":
        loss.anchored = torch.zeros_like(batch.mask)
        loss.anchored[rows, :width] = kl_cov(*given, ratio=share)


def _wide(advantages: Tensor) -> Tensor:
    return advantages[:, None] if advantages.ndim == 1 else advantages


def aggregation_of(policy: PolicyConfig) -> str:
    """The aggregation in force: the configured one, or that of the objective's source."""
    return policy.aggregation or OBJECTIVES[policy.objective].aggregation


def _options_of(policy: PolicyConfig) -> dict:
    """Options of the objective itself; BAPO's others are those of its search."""
    known, searched = OBJECTIVES[policy.objective].options, policy.objective == "bapo"
    return {k: v for k, v in policy.options.items() if k in known or not searched}


def _pull(loss: Tensor, logp: Tensor, advantages: Tensor) -> Tensor:
    """How hard the objective pulls at its tokens: those with Â > 0, and all, (2,)."""
    (weight,) = torch.autograd.grad(loss, logp, retain_graph=True)
    weight = weight.abs().double()
    positive = (advantages > 0).view(len(weight), -1)
    return torch.stack([(weight * positive).sum(), weight.sum()]).cpu()
