"""Layer 3, numerical updates: can the parameters be updated at all?"""

from .attention import (
    AttentionWatch,
    add_qk_norm,
    attention_scores,
    clamp_attention_scores,
    max_attention_logits,
    soft_cap_scores,
)
from .compression import (
    Averaged,
    Codec,
    Dense,
    ErrorFeedback,
    FourBit,
    GradientCompression,
    PowerSGD,
    TopK,
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
from .memory import (
    SavedBytes,
    TrainingBytes,
    checkpointed,
    held_bytes,
    peak_bytes,
    saved_bytes,
    training_bytes,
)
from .muon import Muon, MuonClip, fused_splits, update_norm_cap, uses_muon
from .newton_schulz import COEFFICIENTS, newton_schulz
from .nonfinite import NonfiniteReport, Operation, find_nonfinite
from .precision import MasterWeights, NumberFormat, float32_head, number_format, swallowed
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
    "Averaged",
    "Codec",
    "Dense",
    "ErrorFeedback",
    "FourBit",
    "GradientCompression",
    "GradientStatistics",
    "LossScale",
    "MasterWeights",
    "Muon",
    "MuonClip",
    "NonfiniteReport",
    "NumberFormat",
    "Operation",
    "PowerSGD",
    "QKClip",
    "QKClipReport",
    "RouterLogits",
    "RouterWatch",
    "SavedBytes",
    "ScaledStep",
    "SkipNonfinite",
    "TopK",
    "TrainingBytes",
    "UpdateRatio",
    "adam_states",
    "adaptive_clip_gradients",
    "add_qk_norm",
    "attention_scores",
    "checkpointed",
    "clamp_attention_scores",
    "clip_gradients",
    "find_nonfinite",
    "float32_head",
    "fused_splits",
    "gradient_norm",
    "gradient_statistics",
    "halve_lr_on_gradient_outlier",
    "held_bytes",
    "max_attention_logits",
    "newton_schulz",
    "number_format",
    "peak_bytes",
    "saved_bytes",
    "soft_cap_scores",
    "swallowed",
    "training_bytes",
    "update_norm_cap",
    "update_ratios",
    "uses_muon",
]
