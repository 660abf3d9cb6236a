"""The optimizer of a run, and the names under which its state is saved."""

from __future__ import annotations

import torch
from torch import nn

from ..numerics import Muon, QKClip, fused_splits
from .config import NumericsConfig

DEFAULT_TAU = 100.0  # Kimi K2's bound of attention logits


def make_optimizer(model: nn.Module, numerics: NumericsConfig) -> torch.optim.Optimizer:
    """What `numerics.optimizer` names, over all parameters of `model`."""
    common = {"lr": numerics.learning_rate, "weight_decay": numerics.weight_decay}
    if numerics.optimizer == "adamw":
        options = {"betas": numerics.betas, "eps": numerics.eps, "fused": True}
        return torch.optim.AdamW(model.parameters(), **common, **options)
    options = {"adamw_betas": numerics.betas, "adamw_eps": numerics.eps}
    if numerics.optimizer == "update_norm_cap":
        options |= {"update_norm_cap": 1.0, "scale": "none", "nesterov": False}
    return Muon(model.named_parameters(), splits=fused_splits(model), **common, **options)


def make_qk_clip(model: nn.Module, numerics: NumericsConfig) -> QKClip | None:
    """QK-Clip on `model`, where the configuration asks for it."""
    tau = numerics.qk_clip
    if tau is None and numerics.optimizer == "muon_clip":
        tau = DEFAULT_TAU
    return None if tau is None else QKClip(model, tau)


def parameter_names(optimizer: torch.optim.Optimizer, model: nn.Module) -> list[str]:
    """Names of the optimizer's parameters, in the order of its state."""
    if "param_names" in optimizer.param_groups[0]:
        return [name for group in optimizer.param_groups for name in group["param_names"]]
    return [name for name, _ in model.named_parameters()]
