"""Layer 2, policy change: how fast does the policy move?"""

from .advantages import group_advantages
from .balance import BalanceBounds, balance_bounds
from .entropy import clip_cov, entropy, entropy_change, kl_cov, sampled_entropy
from .gae import gae, length_adaptive_lambda, value_targets
from .kl import exact_kl, kl_estimate, kl_in_reward
from .objectives import (
    OBJECTIVES,
    ObjectiveDiagnostics,
    aggregate,
    loss_denominator,
    merge_diagnostics,
    policy_objective,
)
from .schedules import (
    SCHEDULES,
    AdaptiveClip,
    AdaptiveEntropy,
    AdaptiveKL,
    Constant,
    Linear,
    Piecewise,
    Schedule,
    schedule_from_dict,
    schedule_to_dict,
)

__all__ = [
    "OBJECTIVES",
    "SCHEDULES",
    "AdaptiveClip",
    "AdaptiveEntropy",
    "AdaptiveKL",
    "BalanceBounds",
    "Constant",
    "Linear",
    "ObjectiveDiagnostics",
    "Piecewise",
    "Schedule",
    "aggregate",
    "balance_bounds",
    "clip_cov",
    "entropy",
    "entropy_change",
    "exact_kl",
    "gae",
    "group_advantages",
    "kl_cov",
    "kl_estimate",
    "kl_in_reward",
    "length_adaptive_lambda",
    "loss_denominator",
    "merge_diagnostics",
    "policy_objective",
    "sampled_entropy",
    "schedule_from_dict",
    "schedule_to_dict",
    "value_targets",
]
