"""Layer 2, policy change: how fast does the policy move?"""

from .advantages import group_advantages
from .entropy import entropy
from .kl import exact_kl, kl_estimate
from .objectives import (
    OBJECTIVES,
    ObjectiveDiagnostics,
    aggregate,
    loss_denominator,
    merge_diagnostics,
    policy_objective,
)

__all__ = [
    "OBJECTIVES",
    "ObjectiveDiagnostics",
    "aggregate",
    "entropy",
    "exact_kl",
    "group_advantages",
    "kl_estimate",
    "loss_denominator",
    "merge_diagnostics",
    "policy_objective",
]
