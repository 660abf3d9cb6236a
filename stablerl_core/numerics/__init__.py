"""Layer 3, numerical updates: can the parameters be updated at all?"""

from .attention import (
    AttentionWatch,
    add_qk_norm,
    attention_scores,
    clamp_attention_scores,
    max_attention_logits,
    soft_cap_scores,
)
from .gradients import clip_gradients, gradient_norm
from .muon import Muon, MuonClip, fused_splits, update_norm_cap, uses_muon
from .newton_schulz import COEFFICIENTS, newton_schulz
from .nonfinite import NonfiniteReport, Operation, find_nonfinite
from .qk_clip import QKClip, QKClipReport

__all__ = [
    "COEFFICIENTS",
    "AttentionWatch",
    "Muon",
    "MuonClip",
    "NonfiniteReport",
    "Operation",
    "QKClip",
    "QKClipReport",
    "add_qk_norm",
    "attention_scores",
    "clamp_attention_scores",
    "clip_gradients",
    "find_nonfinite",
    "fused_splits",
    "gradient_norm",
    "max_attention_logits",
    "newton_schulz",
    "soft_cap_scores",
    "update_norm_cap",
    "uses_muon",
]
