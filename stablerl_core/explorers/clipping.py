"""Explorer of chapter 22: which tokens each objective lets through."""

from __future__ import annotations

from math import exp, log

import torch

from ..policy import policy_objective
from .explorer import Explorer, Slider
from .panels import Bars, Curves

SHOWN = {
    "grpo": ("grpo", {}),
    "dual clip": ("grpo", {"dual_clip": 3.0}),
    "dapo": ("dapo", {}),
    "gspo": ("gspo", {}),
    "cispo": ("cispo", {}),
    "sapo": ("sapo", {}),
    "minirl": ("minirl", {}),
}
RATIOS = [exp(log(0.1) + i / 60 * log(100)) for i in range(61)]


def weights(name: str, ratios: list[float], advantage: float, length: int) -> list[float]:
    """∂(objective of the sequence)/∂ log π_θ of its first token, for each ratio of that token.

    The token stands in a sequence of `length` tokens whose other ratios are 1. Terms are added
    up without a denominator, so a token of ratio 1 weighs as much as its advantage.
    """
    logp = torch.zeros(len(ratios), length, dtype=torch.float64)
    logp[:, 0] = torch.tensor(ratios, dtype=torch.float64).log()
    logp.requires_grad_()
    mask, advantages = (
        torch.ones_like(logp, dtype=torch.bool),
        torch.full_like(logp[:, 0], advantage),
    )
    objective, options = SHOWN[name]
    loss, _ = policy_objective(
        objective,
        logp,
        torch.zeros_like(logp),
        advantages,
        mask,
        aggregation="constant",
        denominator=1.0,
        **options,
    )
    return (-torch.autograd.grad(loss, logp)[0][:, 0]).tolist()


def which_tokens(ratio: float, advantage: float, probability: float, length: int):
    """Gradient weights over the ratio, and what each objective does to one token."""
    lines = {name: weights(name, RATIOS, advantage, length) for name in SHOWN}
    ratio = min(ratio, 1 / probability)
    here = {name: weights(name, [ratio], advantage, length)[0] for name in SHOWN}
    silent = [name for name, w in here.items() if abs(w) < 1e-12]
    stopped = ", ".join(silent) if silent else "none"
    text = (
        f"Probability {probability:g} → {ratio * probability:.3g}: ratio {ratio:.3g}, of its "
        f"sequence {ratio ** (1 / length):.3g}. Advantage {advantage:+g}. "
        f"Without gradient: {stopped}."
    )
    own = {name: w * (1 - ratio * probability) for name, w in here.items()}
    return text, [
        Curves(
            "Weight of the token's gradient",
            "ratio of new to old probability",
            "weight",
            RATIOS,
            lines,
            guides={"this token": ratio},
            y_range=(-6, 6),
            log_x=True,
        ),
        Bars("Pull on its own logit", "weight × (1 − new probability)", own, y_range=(-6, 6)),
    ]


WHICH_TOKENS = Explorer(
    "which_tokens",
    "Which tokens does an objective let through?",
    which_tokens,
    [
        Slider(
            "ratio", "ratio of the token", [0.1, 0.5, 0.79, 1, 1.25, 1.5, 2, 4, 8], 1.25, log=True
        ),
        Slider("advantage", "advantage", [-2, -1, 1, 2], 1),
        Slider("probability", "old probability", [0.01, 0.1, 0.5, 0.9], 0.1),
        Slider("length", "tokens in its sequence", [1, 10], 1),
    ],
    alt="For a positive advantage the weight grows with the ratio and falls to zero beyond the "
    "clip of GRPO, DAPO and MiniRL, is held level by CISPO and fades with SAPO; for a negative "
    "one GRPO has no weight below its clip and one without bound above.",
)
ALL = (WHICH_TOKENS,)
