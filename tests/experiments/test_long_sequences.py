"""Length bias by enumeration, and the arms of the two experiments."""

import pytest
import torch
from torch.testing import assert_close

from stablerl_core.experiments import long_sequences
from stablerl_core.experiments.long_sequences import (
    BIAS,
    CREDIT,
    credit_at_all_lengths,
    expected_gradient,
    train_by_length,
)
from stablerl_core.policy import group_advantages, policy_objective
from stablerl_core.training import PolicyConfig

LENGTHS = torch.tensor([2, 5, 2, 5])
REWARDS = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
LOGITS = torch.tensor([-0.3, 0.2, 0.5, -0.1], dtype=torch.float64)


@pytest.mark.parametrize("aggregation", ["sequence", "token", "constant"])
@pytest.mark.parametrize("scale", ["std", "none"])
def test_the_expected_gradient_is_that_of_the_objective(aggregation, scale):
    logits = LOGITS.clone().requires_grad_()
    total, size = 0.0, 3
    for group in torch.cartesian_prod(*[torch.arange(4)] * size):
        first = logits.log_softmax(0)[group]
        mask = torch.arange(5)[None, :] < LENGTHS[group][:, None]
        logp = torch.cat([first[:, None], torch.zeros(size, 4, dtype=torch.float64)], dim=1)
        advantages = group_advantages(REWARDS[group], size, scale=scale)
        longest = {"denominator": 5 * size} if aggregation == "constant" else {}
        loss, _ = policy_objective(
            "reinforce", logp, None, advantages, mask, aggregation=aggregation, **longest
        )
        total = total - first.detach().sum().exp() * loss
    expected = torch.autograd.grad(total, logits)[0]
    options = {"group_size": size, "aggregation": aggregation, "scale": scale}
    found = expected_gradient(LOGITS, LENGTHS, REWARDS, **options)
    assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_a_constant_denominator_is_the_gradient_of_the_mean_reward():
    logits = LOGITS.clone().requires_grad_()
    exact = torch.autograd.grad(logits.softmax(0) @ REWARDS, logits)[0]
    options = {"group_size": 4, "aggregation": "constant", "scale": "none"}
    found = expected_gradient(LOGITS, LENGTHS, REWARDS, **options)
    assert_close(found, exact * (1 - 1 / 4) / 5, rtol=1e-10, atol=1e-12)


def test_one_over_the_length_spares_long_wrong_answers():
    def relative(aggregation):  # of the log-odds: long against short, right and wrong
        even = torch.zeros(4, dtype=torch.float64)
        push = expected_gradient(even, LENGTHS, REWARDS, aggregation=aggregation, scale="none")
        return float(push[1] - push[0]), float(push[3] - push[2])

    right, wrong = relative("sequence")
    assert right < -1e-3 and wrong > 1e-3
    assert relative("constant") == pytest.approx((0, 0), abs=1e-12)


def test_an_arm_holds_one_run_a_length():
    rows = credit_at_all_lengths(0, CREDIT.arms["grpo"].keywords["credit"], lengths=(20, 40))
    assert [row["step"] for row in rows] == list(range(10, 121, 10))
    names = {f"{name}_{n}" for name in ("reward", "first", "last") for n in (20, 40)}
    assert all(set(row) == names | {"step"} for row in rows)
    assert rows[-1]["reward_20"] > 0.8


def test_the_arms_are_what_their_names_say():
    credits = {name: arm.keywords["credit"] for name, arm in CREDIT.arms.items()}
    assert credits["blind_0.95"].lam == 0.95 and credits["blind_0.95"].critic == "blind"
    assert credits["late_adaptive"].lam_at(2000) == pytest.approx(0.99)
    assert credits["seeing_0.95_coupled"].critic_lam is None
    assert all(c.critic_lam == 1 for n, c in credits.items() if "coupled" not in n)
    policies = {name: arm.keywords["policy"] for name, arm in BIAS.arms.items()}
    assert policies["grpo_no_std"] == PolicyConfig(scale="none")
    assert {p.objective for p in policies.values()} == {"grpo", "dapo", "dr_grpo"}


def test_lengths_of_right_and_wrong_answers_add_up():
    small = long_sequences.bias_config(PolicyConfig(), 10)
    assert small.data.max_new_tokens == 48
    rows = train_by_length(0, PolicyConfig(), steps=10)
    (row,) = rows
    share = row["reward"]
    mixed = share * row["right_length"] + (1 - share) * row["wrong_length"]
    assert mixed == pytest.approx(row["length"], rel=1e-5)
