"""Layer 3, numerical updates: can the parameters be updated at all?"""

from .attention import (
    AttentionWatch,
    add_qk_norm,
    attention_scores,
    clamp_attention_scores,
    max_attention_logits,
    soft_cap_scores,
)
from .gradients import (
    GradientStatistics,
    clip_gradients,
    gradient_norm,
    gradient_statistics,
)
from .guards import (
    AdaptiveClipReport,
    LossScale,
    ScaledStep,
    SkipNonfinite,
    adaptive_clip_gradients,
    halve_lr_on_gradient_outlier,
)
from .muon import Muon, MuonClip, fused_splits, update_norm_cap, uses_muon
from .newton_schulz import COEFFICIENTS, newton_schulz
from .nonfinite import NonfiniteReport, Operation, find_nonfinite
from .qk_clip import QKClip, QKClipReport
from .watch import (
    AdamState,
    RouterLogits,
    RouterWatch,
    UpdateRatio,
    adam_states,
    update_ratios,
)

__all__ = [
    "COEFFICIENTS",
    "AdamState",
    "AdaptiveClipReport",
    "AttentionWatch",
    "GradientStatistics",
    "LossScale",
    "Muon",
    "MuonClip",
    "NonfiniteReport",
    "Operation",
    "QKClip",
    "QKClipReport",
    "RouterLogits",
    "RouterWatch",
    "ScaledStep",
    "SkipNonfinite",
    "UpdateRatio",
    "adam_states",
    "adaptive_clip_gradients",
    "add_qk_norm",
    "attention_scores",
    "clamp_attention_scores",
    "clip_gradients",
    "find_nonfinite",
    "fused_splits",
    "gradient_norm",
    "gradient_statistics",
    "halve_lr_on_gradient_outlier",
    "max_attention_logits",
    "newton_schulz",
    "soft_cap_scores",
    "update_norm_cap",
    "update_ratios",
    "uses_muon",
]
