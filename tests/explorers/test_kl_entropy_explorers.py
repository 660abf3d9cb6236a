"""Chapter 20's explorers: the numbers of the text, and the expected step by enumeration."""

import itertools
import math

import pytest
import torch

from stablerl_core.explorers.kl_entropy import GROUP, STEPS, expected_step, pace, two_actions
from stablerl_core.policy import group_advantages


@pytest.mark.parametrize(("p", "words"), [(0.8, "KL 0.19 nats, entropy 0.50"),
                                          (0.95, "KL 0.49 nats, entropy 0.20"),
                                          (0.5, "KL 0.00 nats, entropy 0.69")])  # fmt: skip
def test_the_two_action_example(p, words):
    text, (curves, bars) = two_actions(p, 0.5)
    assert words in text
    assert curves.points["KL to reference"][1] == pytest.approx(math.log(2) - entropy(p))
    assert list(bars.values.values()) == pytest.approx([p, 1 - p, 0.5, 0.5])


def entropy(p: float) -> float:
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


@pytest.mark.parametrize("p", [0.03, 0.5, 0.9])
def test_expected_step_sums_over_every_group(p):
    """All 2^G outcomes, each with the gradient that autograd finds for it."""
    logit = torch.tensor(math.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
    right = torch.nn.functional.logsigmoid(logit)
    wrong = torch.nn.functional.logsigmoid(-logit)
    total = 0.0
    for outcome in itertools.product([0.0, 1.0], repeat=GROUP):
        rewards = torch.tensor(outcome, dtype=torch.float64)
        chance = math.prod(p if r else 1 - p for r in outcome)
        logp = torch.where(rewards > 0, right, wrong)
        total = total + chance * (group_advantages(rewards, GROUP) * logp).mean()
    (gradient,) = torch.autograd.grad(total, logit)
    assert expected_step(p) == pytest.approx(gradient.item(), rel=1e-9)


def test_pace_follows_the_step_size_and_the_difficulty():
    def largest(**changes):
        _, (_, moved, _) = pace(**{"rate": 0.5, "start": 0.5, "kl_coef": 0.0} | changes)
        return max(moved.lines["KL(before ‖ after)"][1:])

    assert largest(rate=1.0) > 3 * largest()  # KL is quadratic in a small step
    assert largest(start=0.9) < largest() / 3

    def end(kl_coef):
        return pace(0.5, 0.5, kl_coef)[1][0].lines["KL to reference"][STEPS]

    assert end(1.0) < end(0.1) < end(0.0)
