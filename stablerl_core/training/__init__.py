"""The loop that joins the four layers: small models, rollout, trainer, run log, checkpoints."""

from ..runlog import SIGNALS, RunLog
from .base import RECIPES, load_base, pass_rate, train_base
from .config import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .live import draw_curves, live_plot
from .models import PRESETS, routers, small_moe
from .precision import round_weights, rounded_activations, rounded_cache
from .provenance import provenance
from .rollout import Rollout, Sampling, completion_logits, completion_logp, rollout
from .trainer import Trainer

__all__ = [
    "PRESETS",
    "RECIPES",
    "SIGNALS",
    "DataConfig",
    "NumericsConfig",
    "PolicyConfig",
    "Rollout",
    "RunLog",
    "Sampling",
    "SystemConfig",
    "Trainer",
    "TrainerConfig",
    "completion_logits",
    "completion_logp",
    "draw_curves",
    "live_plot",
    "load_base",
    "pass_rate",
    "provenance",
    "rollout",
    "round_weights",
    "rounded_activations",
    "rounded_cache",
    "routers",
    "small_moe",
    "train_base",
]
