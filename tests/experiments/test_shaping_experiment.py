"""Chapter 13: the exact advantages by brute force, and rewards that pay what they say."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from stablerl_core.experiments import shaping
from stablerl_core.policy import group_advantages
from stablerl_core.rewards import Problem


@pytest.mark.parametrize("options", [{}, {"scale": "none"}, {"baseline": "quantile"}])
def test_expected_advantages_are_those_of_every_group_written_out(options):
    probs, rewards, size = (0.5, 0.3, 0.2), (0.0, 1.0, 0.4), 4
    expected = torch.zeros(3, dtype=torch.float64)
    for kind in range(3):
        for others in itertools.product(range(3), repeat=size - 1):
            group = torch.tensor([rewards[k] for k in (kind, *others)], dtype=torch.float64)
            chance = math.prod(probs[k] for k in others)
            expected[kind] += chance * group_advantages(group, size, **options)[0]
    found = shaping.expected_advantages(probs, rewards, size, **options)
    assert torch.allclose(found, expected, atol=1e-12)
    if options.get("baseline") != "quantile":
        assert abs((torch.tensor(probs, dtype=torch.float64) * found).sum()) < 1e-12


def test_a_kind_that_never_occurs_still_has_an_advantage():
    found = shaping.expected_advantages((1.0, 0.0), (0.0, 1.0), 8)
    assert found.tolist() == pytest.approx([0.0, math.sqrt(7)], rel=1e-4)


def test_the_exact_flow_is_the_gradient_of_the_expected_reward():
    earned = torch.tensor([0.2, 1.0, 0.5], dtype=torch.float64)
    path = shaping.exact_flow((0.6, 0.1, 0.3), lambda p: earned, 400)
    logits = torch.log(path[0]).requires_grad_()
    gradient = torch.autograd.grad((torch.softmax(logits, 0) * earned).sum(), logits)[0]
    moved = torch.softmax(logits + 0.5 * gradient, 0)
    assert torch.allclose(path[1], moved.detach(), atol=1e-12)
    assert ((path @ earned).diff() > 0).all() and path[-1, 1] > 0.95


TEXTS = ["#85", "#84#85", "#85#84", "#84", "", "85"]
PROBLEMS = [Problem("A27+58=", "85")] * len(TEXTS)
WHOLE = [False] * len(TEXTS)


@pytest.mark.parametrize(
    "rule, paid",
    [
        ("substring", [1, 0.5, 1, 0, 0, 0]),
        ("levels", [1, 0.5, 0, 0, 0, 0]),
        ("proof", [1, 0.24, 0.76, 0, 0, 0]),
    ],
)
def test_self_verification_of_the_first_answer(rule, paid):
    assert shaping.verified(TEXTS, PROBLEMS, WHOLE, rule=rule) == pytest.approx(paid)
    assert not any(shaping.verified(TEXTS, PROBLEMS, [True] * len(TEXTS), rule=rule))


def test_partial_credit_is_by_place():
    problems = [Problem("S4321=", "1234")] * 6
    texts = ["#1234", "#1243", "#4321", "#123", "#12345", "1234"]
    assert shaping.in_place(texts, problems, [False] * 6) == [1, 0.5, 0, 0.75, 1, 0]
    assert shaping.in_place(texts, problems, [True] * 6) == [0] * 6


def test_some_texts_are_outliers_always_the_same_ones():
    problems = [Problem(f"A{i}=", "1") for i in range(4000)]
    texts = ["#1"] * 4000
    paid = shaping.with_outliers(texts, problems, [False] * 4000)
    assert set(paid) == {1.0, 21.0} and 50 < paid.count(21.0) < 110
    assert paid == shaping.with_outliers(texts, problems, [False] * 4000)
    assert set(shaping.with_outliers(texts, problems, [False] * 4000, cap=1.0)) == {1.0}


def test_an_arm_of_adding_has_its_first_answers_and_another_has_not(monkeypatch):
    short = {
        "sv_levels": (shaping.config("add", eval_every=1), shaping.ARMS["sv_levels"][1]),
        "format": shaping.ARMS["format"],
    }
    monkeypatch.setattr(shaping, "ARMS", short)
    one_step = lambda self, progress, on_step: on_step(self.step())  # noqa: E731
    monkeypatch.setattr(shaping.Trainer, "run", one_step)
    adding, sorting = shaping.rows("sv_levels", 0), shaping.rows("format", 0)
    names = {"first_right", "withdrawn", "caught"}
    assert all(names <= row.keys() for row in adding) and len(adding) == 2
    assert adding[0]["caught"] <= min(adding[0]["withdrawn"], 1 - adding[0]["first_right"])
    assert not any(names & row.keys() for row in sorting)
    assert sorting[1]["reward"] == pytest.approx(
        sorting[1]["reward_part:answer"] + sorting[1]["reward_part:format"], abs=1e-6
    )
