"""Explorers of chapter 20: what KL and entropy say about a policy with two actions."""

from __future__ import annotations

import torch
from torch import Tensor

from ..four_curves import COLOURS
from ..policy import entropy, exact_kl
from .explorer import Explorer, Slider
from .panels import Bars, Curves

BLUE = {"KL to reference": COLOURS["kl_ref"], "entropy": COLOURS["entropy"]}


def _logits(probability) -> Tensor:
    """Log-probabilities (..., 2) of a policy that takes action A with this probability."""
    p = torch.as_tensor(probability, dtype=torch.float64)
    return torch.stack([p, 1 - p], dim=-1).log()


def two_actions(policy: float, reference: float):
    """KL to the reference and entropy of a policy over two actions, exact, in nats."""
    x = [i / 100 for i in range(1, 100)]
    anchor = _logits([reference] * len(x))
    kl, spread = exact_kl(_logits(x), anchor).tolist(), entropy(_logits(x)).tolist()
    here = exact_kl(_logits(policy), _logits(reference)).item(), entropy(_logits(policy)).item()
    values = dict(zip(BLUE, here, strict=True))
    shares = {"policy A": policy, "B": 1 - policy, "reference A": reference, "B ": 1 - reference}
    text = (
        f"Policy [{policy:.2f}, {1 - policy:.2f}], reference [{reference:.2f}, "
        f"{1 - reference:.2f}]: KL {here[0]:.2f} nats, entropy {here[1]:.2f} nats."
    )
    return text, [
        Curves(
            "KL and entropy",
            "probability of action A under the policy",
            "nats",
            x,
            dict(zip(BLUE, (kl, spread), strict=True)),
            points={name: (policy, value) for name, value in values.items()},
            colours=BLUE,
            x_range=(0, 1),
            y_range=(0, 1.5),
        ),
        Bars("Probabilities", "share", shares, dict.fromkeys(shares, "#888888"), (0, 1)),
    ]


STOPS = [0.02, 0.05, *(i / 10 for i in range(1, 10)), 0.95, 0.98]

TWO_ACTIONS = Explorer(
    "two_actions",
    "A policy with two actions",
    two_actions,
    [
        Slider("policy", "probability of A under the policy", STOPS, 0.8),
        Slider("reference", "probability of A under the reference", STOPS, 0.5),
    ],
    alt="KL to the reference is zero where the policy equals the reference and rises ever more "
    "steeply away from it. Entropy is an arch, highest at one half.",
)

ALL = (TWO_ACTIONS,)
