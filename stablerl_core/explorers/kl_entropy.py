"""Explorers of chapter 20: what KL and entropy say about a policy with two actions."""

from __future__ import annotations

from math import comb, exp, log

import torch
from torch import Tensor

from ..four_curves import COLOURS
from ..policy import entropy, exact_kl, group_advantages
from .explorer import Explorer, Slider
from .panels import Bars, Curves

STYLE = {"KL to reference": COLOURS["kl_ref"], "entropy": COLOURS["entropy"]}


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
    values = dict(zip(STYLE, here, strict=True))
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
            dict(zip(STYLE, (kl, spread), strict=True)),
            points={name: (policy, value) for name, value in values.items()},
            colours=STYLE,
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

GROUP, STEPS = 8, 20


def expected_step(p: float) -> float:
    """Expected GRPO gradient of the logit of the right action, whose probability is p.

        E_k[mean_i Â_i (R_i − p)],   k ~ Binomial(G, p) right ones in a group, Â from their rewards

    Groups that are all right or all wrong have Â = 0 and add nothing.
    """
    right = torch.arange(GROUP + 1)[:, None]
    rewards = (torch.arange(GROUP) < right).double()  # row k: k right answers
    advantages = group_advantages(rewards.flatten(), GROUP).view_as(rewards)
    pulls = (advantages * (rewards - p)).mean(dim=1).tolist()
    return sum(
        comb(GROUP, k) * p**k * (1 - p) ** (GROUP - k) * pull for k, pull in enumerate(pulls)
    )


def pace(rate: float, start: float, kl_coef: float):
    """The right one of two actions, learned by exact expected GRPO steps with a KL penalty."""
    logit = anchor = log(start / (1 - start))
    right = [start]
    for _ in range(STEPS):
        p = right[-1]
        logit += rate * (expected_step(p) - kl_coef * p * (1 - p) * (logit - anchor))
        right.append(1 / (1 + exp(-logit)))
    policy = _logits(right)
    kl = exact_kl(policy, _logits([start] * len(right))).tolist()
    spread = entropy(policy).tolist()
    moved = [None, *exact_kl(policy[:-1], policy[1:]).tolist()]
    solved = [p**GROUP for p in right]
    text = (
        f"After {STEPS} steps {right[-1]:.0%} of the answers are right (at first {start:.0%}); "
        f"KL {kl[-1]:.2f}, entropy {spread[-1]:.2f} nats. The largest single step has KL "
        f"{max(moved[1:]):.2g}. In the end {solved[-1]:.0%} of the groups are all right."
    )
    x, where = list(range(STEPS + 1)), {"x_range": (0, STEPS)}
    step, right_groups = {"KL(before ‖ after)": moved}, {"all right": solved}
    return text, [
        Curves("KL and entropy", "step", "nats", x, dict(zip(STYLE, (kl, spread), strict=True)),
               colours=STYLE, y_range=(0, 1.2), **where),
        Curves("KL of each step", "step", "nats, log scale", x, step, y_range=(1e-5, 1),
               log_y=True, colours=dict.fromkeys(step, COLOURS["kl_step"]), **where),
        Curves("Solved groups", "step", "share", x, right_groups, y_range=(0, 1),
               colours=dict.fromkeys(right_groups, COLOURS["solved_groups"]), **where),
    ]  # fmt: skip


PACE = Explorer(
    "pace",
    "The same policy, trained",
    pace,
    [
        Slider("rate", "step size", [0.1, 0.2, 0.5, 1.0, 2.0, 5.0], 0.5, log=True),
        Slider("start", "share of right answers at first", [0.1, 0.3, 0.5, 0.7, 0.9], 0.5),
        Slider("kl_coef", "KL coefficient", [0.0, 0.1, 0.3, 1.0], 0.0),
    ],
    alt="Over 20 steps KL to the start rises, first ever more steeply, then levelling off, and "
    "entropy falls. A larger step size raises the KL of each step; easier questions lower it, and "
    "more groups are solved.",
)

ALL = (TWO_ACTIONS, PACE)
