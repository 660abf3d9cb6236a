"""Layer 2, policy change: how fast does the policy move?"""

from .advantages import group_advantages
from .balance import BalanceBounds, balance_bounds
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
    "BalanceBounds",
    "ObjectiveDiagnostics",
    "aggregate",
    "balance_bounds",
    "entropy",
    "exact_kl",
    "group_advantages",
    "kl_estimate",
    "loss_denominator",
    "merge_diagnostics",
    "policy_objective",
]
