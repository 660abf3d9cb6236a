"""Objectives against exact sums: all sequences, all groups, both sides of both clip edges."""

import math

import pytest
import torch
from exact.enumeration import (
    all_groups,
    all_sequences,
    grad_return,
    gradient,
    logits,
    sequence_logp,
    sequence_probabilities,
)

from stablerl_core.policy import group_advantages, policy_objective

SEEDS = range(3)
TOKENS, MASK = all_sequences()
LENGTHS = MASK.sum(-1)
REWARDS = logits(50, len(TOKENS))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def expected_sequence_gradient(theta, weights, name, **options):
    """Σ_i weights_i ∇ loss(sequence i), each sequence a batch of its own."""
    total = torch.zeros_like(theta)
    for i, weight in enumerate(weights):

        def loss(t, i=i):
            logp = sequence_logp(t, TOKENS[i : i + 1])
            row = slice(i, i + 1)
            return policy_objective(name, logp, None, REWARDS[row], MASK[row], **options)[0]

        total += weight * gradient(loss, theta)
    return total


def grad_expected(theta, values):
    """∇_θ Σ_i π_θ(sequence i) values_i, by differentiating the probabilities."""
    return gradient(lambda t: (sequence_probabilities(t, TOKENS, MASK) * values).sum(), theta)


def test_the_enumeration_is_complete():
    probabilities = sequence_probabilities(logits(0, 3, 3), TOKENS, MASK)
    assert len(TOKENS) == 15
    close(probabilities.sum(), torch.tensor(1.0, dtype=torch.float64))


@pytest.mark.parametrize("seed", SEEDS)
def test_reinforce_is_the_policy_gradient(seed):
    """E ∇loss = −∇E[R] over sequences of different lengths, with its default aggregation."""
    theta = logits(seed, 3, 3)
    probabilities = sequence_probabilities(theta, TOKENS, MASK)
    grad = expected_sequence_gradient(theta, probabilities, "reinforce")
    close(grad, -grad_expected(theta, REWARDS))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["reinforce", "grpo"])
def test_sequence_aggregation_divides_each_reward_by_the_length(seed, name):
    """GRPO's 1/|o| follows ∇E[R/|o|], not ∇E[R]: its length bias in one line."""
    theta = logits(seed, 3, 3)
    probabilities = sequence_probabilities(theta, TOKENS, MASK)
    grad = expected_sequence_gradient(theta, probabilities, name, aggregation="sequence")
    close(grad, -grad_expected(theta, REWARDS / LENGTHS))
    assert (grad + grad_expected(theta, REWARDS)).norm() > 0.01


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_vector_10_at_ratio_1_the_clip_range_does_not_matter(aggregation):
    """First step: GRPO has REINFORCE's gradient, whatever the range, and clips nothing."""
    theta = logits(3, 3, 3)

    def grad(name, **options):
        def loss(t):
            logp = sequence_logp(t, TOKENS)
            return policy_objective(
                name, logp, logp.detach(), REWARDS, MASK, aggregation=aggregation, **options
            )[0]

        return gradient(loss, theta)

    reference = grad("reinforce")
    assert reference.norm() > 0.01
    for clip in (0.0, 0.2, 10.0, math.inf):
        close(grad("grpo", clip_low=clip, clip_high=clip), reference)


@pytest.mark.parametrize("seed", SEEDS)
def test_off_policy_without_a_clip_grpo_is_importance_sampling(seed):
    """Samples from π_old, ratio unclipped: E ∇loss = −∇E_{π_θ}[R] on one-token answers."""
    theta, old = logits(seed), logits(seed + 100).log_softmax(-1)
    rewards = logits(seed + 200)
    pi = theta.softmax(-1)

    def loss(t, **clip):
        logp = torch.log_softmax(t, -1)[:, None]
        mask = torch.ones_like(logp, dtype=torch.bool)
        advantages = old.exp() * rewards  # the probability of the sample, times its reward
        return policy_objective("grpo", logp, old[:, None], advantages, mask, **clip)[0]

    def grad(**clip):
        return len(pi) * gradient(lambda t: loss(t, **clip), theta)

    close(grad(clip_low=math.inf, clip_high=math.inf), -grad_return(pi, rewards))
    assert (grad() + grad_return(pi, rewards)).norm() > 0.01


@pytest.mark.parametrize("clip_low, clip_high", [(0.2, 0.2), (0.2, 0.28), (10.0, 10.0)])
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_grpo_value_and_gradient_on_both_sides_of_both_edges(clip_low, clip_high, sign):
    """−min(rÂ, clip(r)Â) and, per token, −rÂ or 0: written out with Python floats."""
    low, high = 1 - clip_low, 1 + clip_high
    ratios = [0.05, low - 0.01, low + 0.01, 1.0, high - 0.01, high + 0.01, 40.0]
    ratios = [r for r in ratios if r > 0]
    advantage = 1.7 * sign
    values, grads, clipped = [], [], 0
    for r in ratios:
        flat = (sign > 0 and r > high) or (sign < 0 and r < low)
        values.append(-min(r * advantage, min(max(r, low), high) * advantage))
        grads.append(0.0 if flat else -r * advantage)
        clipped += flat
    logp = torch.tensor([ratios], dtype=torch.float64).log().requires_grad_()
    loss, seen = policy_objective(
        "grpo",
        logp,
        torch.zeros_like(logp),
        torch.tensor([advantage], dtype=torch.float64),
        torch.ones(logp.shape, dtype=torch.bool),
        clip_low=clip_low,
        clip_high=clip_high,
        aggregation="constant",
    )
    loss.backward()
    assert loss.item() == pytest.approx(sum(values), rel=1e-12)
    close(logp.grad[0], torch.tensor(grads, dtype=torch.float64))
    assert seen.clip_fraction == pytest.approx(clipped / len(ratios))
    assert seen.clip_fraction_high == pytest.approx(clipped / len(ratios) if sign > 0 else 0)
    assert seen.clip_fraction_low == pytest.approx(clipped / len(ratios) if sign < 0 else 0)
    assert clipped > 0 or sign == 0 or (sign < 0 and clip_low == 10)


def expected_group_gradient(theta, rewards, group_size, scale):
    """E over all groups of G one-token answers of ∇ GRPO loss with group advantages."""
    total = torch.zeros_like(theta)
    for group, probability in all_groups(theta.softmax(-1), group_size):
        advantages = group_advantages(rewards[group], group_size, scale=scale, eps=0)

        def loss(t, group=group, advantages=advantages):
            logp = torch.log_softmax(t, -1)[group][:, None]
            mask = torch.ones_like(logp, dtype=torch.bool)
            return policy_objective("grpo", logp, None, advantages, mask)[0]

        total += probability * gradient(loss, theta)
    return total


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_group_mean_as_baseline_shrinks_the_gradient_by_1_minus_1_over_g(group_size):
    """The sample is in its own baseline: E ∇loss = −(1 − 1/G) ∇E[R], unbiased in direction."""
    theta, rewards = logits(1, 4), logits(2, 4)
    grad = expected_group_gradient(theta, rewards, group_size, "none")
    close(grad, -(1 - 1 / group_size) * grad_return(theta.softmax(-1), rewards))


def test_std_in_a_pair_doubles_the_centred_gradient_of_right_or_wrong():
    """G = 2, rewards 0 and 1: Â is ±1 or 0, and E ∇loss = −∇p instead of −½ ∇p."""
    theta = logits(3, 4)
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    grad = expected_group_gradient(theta, rewards, 2, "std")
    close(grad, -grad_return(theta.softmax(-1), rewards))


@pytest.mark.parametrize(
    "group_size, pass_rate, printed", [(8, 0.3, 0.058), (8, 0.05, 0.663), (32, 0.05, 0.194)]
)
def test_vector_8_groups_without_a_signal(group_size, pass_rate, printed):
    """P(all advantages 0) = p^G + (1 − p)^G, summed over the number of right answers."""
    rows = [[1.0] * k + [0.0] * (group_size - k) for k in range(group_size + 1)]
    advantages = group_advantages(torch.tensor(rows).view(-1), group_size).view(-1, group_size)
    silent = (advantages == 0).all(dim=1).tolist()
    p = pass_rate
    total = sum(
        math.comb(group_size, k) * p**k * (1 - p) ** (group_size - k)
        for k in range(group_size + 1)
        if silent[k]
    )
    assert total == pytest.approx(p**group_size + (1 - p) ** group_size, rel=1e-12)
    assert total == pytest.approx(printed, abs=5e-4)
