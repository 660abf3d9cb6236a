"""Advantages against exact sums: every group of actions, every sequence of a small chain."""

import math

import pytest
import torch
from exact.enumeration import (
    TOKENS,
    all_groups,
    all_sequences,
    grad_return,
    gradient,
    logits,
    sequence_logp,
    sequence_probabilities,
)

from stablerl_core.policy import gae, group_advantages, length_adaptive_lambda, value_targets

SEEDS = range(3)
SEQUENCES, MASK = all_sequences()
REWARDS = logits(50, len(SEQUENCES))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


# Groups: completions of one action, all groups of three


def groups_and_weights(theta, size=3):
    """Actions (N, size) of every group, and its probability as a function of θ."""
    groups = [group for group, _ in all_groups(theta.softmax(-1), size)]
    actions = torch.tensor(groups)
    return actions, lambda t: torch.log_softmax(t, -1)[actions].sum(-1).exp()


def expected_group_gradient(theta, rewards, **options):
    """E over groups of 1/G Σ_i Â_i ∇log π(a_i), the advantages from the package."""
    actions, weight = groups_and_weights(theta)
    size = actions.shape[1]
    flat = group_advantages(rewards[actions].view(-1), size, **options)
    factors = weight(theta)[:, None] * flat.view(-1, size) / size
    return gradient(lambda t: (factors * torch.log_softmax(t, -1)[actions]).sum(), theta)


def inverse_cdf(values, share):
    """The smallest value that at least `share` of the values do not exceed, by counting."""
    good = [v for v in sorted(values) if sum(w <= v for w in values) >= share * len(values) - 1e-9]
    return good[0]


@pytest.mark.parametrize("seed", SEEDS)
def test_leave_one_out_is_the_policy_gradient_and_the_mean_is_a_shorter_one(seed):
    theta, rewards = logits(seed), logits(seed + 10)
    true = grad_return(theta.softmax(-1), rewards)
    close(expected_group_gradient(theta, rewards, scale="none", baseline="leave_one_out"), true)
    close(expected_group_gradient(theta, rewards, scale="none"), true * 2 / 3)


@pytest.mark.parametrize("quantile", [0.2, 0.4, 0.5, 0.9])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_quantile_baseline_follows_the_reward_less_the_quantile(seed, quantile):
    """Σ_i E[Q s_i] = ∇E[Q] for any Q of the group, so it ascends E[R] − E[Q]/G: biased."""
    theta, rewards = logits(seed), logits(seed + 10)
    actions, weight = groups_and_weights(theta)
    baselines = torch.tensor(
        [inverse_cdf(row, quantile) for row in rewards[actions].tolist()], dtype=torch.float64
    )
    true = grad_return(theta.softmax(-1), rewards)
    bias = gradient(lambda t: (weight(t) * baselines).sum(), theta) / 3
    options = dict(scale="none", baseline="quantile", quantile=quantile)
    close(expected_group_gradient(theta, rewards, **options), true - bias)
    assert (bias - bias.dot(true) / true.dot(true) * true).norm() > 1e-3  # not a mere scale


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "quantile"])
@pytest.mark.parametrize("scale", ["std", "none", "batch", "iqr"])
def test_every_pair_of_options_on_every_group(baseline, scale):
    """Value by the definitions, for all groups of four out of five rewards."""
    pi, rewards = logits(0).softmax(-1), logits(1)
    values = torch.stack([rewards[group] for group, _ in all_groups(pi, 4)])
    values = values[(values != values[:, :1]).any(1)]
    every = values.flatten().tolist()
    actual = group_advantages(values.view(-1), 4, scale=scale, baseline=baseline, eps=0.01)
    for row, advantages in zip(values.tolist(), actual.view(-1, 4), strict=True):
        spread = {
            "std": deviation(row),
            "batch": deviation(every) if scale == "batch" else None,
            "none": 1 - 0.01,
            "iqr": linear_quantile(row, 0.75) - linear_quantile(row, 0.25),
        }[scale]
        expected = []
        for i, reward in enumerate(row):
            others = row[:i] + row[i + 1 :]
            centre = {
                "mean": sum(row) / 4,
                "leave_one_out": sum(others) / 3,
                "quantile": inverse_cdf(row, 0.4),
            }[baseline]
            expected.append((reward - centre) / (spread + 0.01))
        close(advantages, torch.tensor(expected, dtype=torch.float64))


def deviation(row):
    mean = sum(row) / len(row)
    return math.sqrt(sum((x - mean) ** 2 for x in row) / len(row))


def linear_quantile(row, share):
    place = share * (len(row) - 1)
    below = sorted(row)[math.floor(place)]
    return below + (place - math.floor(place)) * (sorted(row)[math.ceil(place)] - below)


@pytest.mark.parametrize("size", [2, 4, 5, 8, 10])
@pytest.mark.parametrize("quantile", [0.2, 0.4, 0.5, 0.6])
def test_the_gate_of_a_quantile_baseline(size, quantile):
    """Right-or-wrong rewards: only successes count where p ≤ 1 − K, only failures elsewhere."""
    for right in range(1, size):
        rewards = torch.tensor([1.0] * right + [0.0] * (size - right)).double()
        got = group_advantages(
            rewards, size, scale="none", baseline="quantile", quantile=quantile
        ).tolist()
        if right <= (1 - quantile) * size + 1e-9:
            assert got == [1.0] * right + [0.0] * (size - right)
        else:
            assert got == [0.0] * right + [-1.0] * (size - right)


# Sequences: GAE on a chain of at most three tokens, a critic with one value a prefix


def prefix_index(i, t):
    """The prefix before token t of sequence i, as a number."""
    return t * TOKENS**3 + int("0" + "".join(map(str, SEQUENCES[i, :t].tolist())), TOKENS)


def table_of(critic):
    """Values (15, 3) from a function of the prefix index."""
    return torch.tensor(
        [[critic(prefix_index(i, t)) for t in range(3)] for i in range(len(SEQUENCES))],
        dtype=torch.float64,
    )


def true_values(theta):
    """V^π of the prefix before each token, (15, 3), by summing the sequences that go through it."""
    weights = sequence_probabilities(theta, SEQUENCES, MASK)
    mass, total = {}, {}
    for i, weight in enumerate(weights.tolist()):
        for t in range(3):
            if MASK[i, t]:
                key = prefix_index(i, t)
                mass[key] = mass.get(key, 0) + weight
                total[key] = total.get(key, 0) + weight * REWARDS[i].item()
    return table_of(lambda key: total[key] / mass[key] if key in mass else 0.0)


def random_values(seed):
    return table_of(lambda key: logits(seed, 200)[key].item())


def expected_gradient_of(theta, advantages):
    """E Σ_t s_t Â_t over all sequences."""
    weights = sequence_probabilities(theta, SEQUENCES, MASK)[:, None] * advantages
    return gradient(
        lambda t: torch.where(MASK, weights * sequence_logp(t, SEQUENCES), 0.0).sum(), theta
    )


def true_gradient(theta):
    return gradient(lambda t: (sequence_probabilities(t, SEQUENCES, MASK) * REWARDS).sum(), theta)


@pytest.mark.parametrize("seed", SEEDS)
def test_lambda_1_is_unbiased_whatever_the_critic_says(seed):
    theta = logits(seed, 3, 3)
    for values in (random_values(seed), 0 * random_values(seed), true_values(theta)):
        close(
            expected_gradient_of(theta, gae(REWARDS, values, MASK, lam=1.0)), true_gradient(theta)
        )


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_perfect_critic_is_unbiased_for_any_lambda(seed, lam):
    theta = logits(seed, 3, 3)
    advantages = gae(REWARDS, true_values(theta), MASK, lam=lam)
    close(expected_gradient_of(theta, advantages), true_gradient(theta))


@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95])
@pytest.mark.parametrize("seed", SEEDS)
def test_the_bias_of_a_smaller_lambda(seed, lam):
    """E Σ_t s_t Σ_{k≥1} (1 − λ) λ^(k−1) b_{t+k}, with b = V − V^π, and not less."""
    theta, values = logits(seed, 3, 3), random_values(seed + 5)
    error = torch.where(MASK, values - true_values(theta), 0.0)
    ahead = torch.zeros_like(error)
    for t in range(3):
        for k in range(1, 3 - t):
            ahead[:, t] += (1 - lam) * lam ** (k - 1) * error[:, t + k]
    bias = expected_gradient_of(theta, ahead)
    advantages = gae(REWARDS, values, MASK, lam=lam)
    close(expected_gradient_of(theta, advantages), true_gradient(theta) + bias)
    assert bias.norm() > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_length_adaptive_lambda_is_biased_even_with_a_perfect_critic(seed):
    """λ is a function of the length, which the tokens still to come decide: it correlates with
    their TD errors, so these no longer average out."""
    theta = logits(seed, 3, 3)
    lam = length_adaptive_lambda(MASK.sum(-1), alpha=1.0)  # 0, .5, .67 for one to three tokens
    assert lam.unique().numel() == 3
    advantages = gae(REWARDS, true_values(theta), MASK, lam=lam)
    error = expected_gradient_of(theta, advantages) - true_gradient(theta)
    assert error.norm() > 1e-3 * true_gradient(theta).norm()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_value_given_a_prefix_and_a_token_is_q_minus_v(seed):
    """λ = 1: E[Â_t | prefix, token] = Q^π − V, for the critic as it is."""
    theta, values = logits(seed, 3, 3), random_values(seed)
    advantages = gae(REWARDS, values, MASK, lam=1.0)
    weights = sequence_probabilities(theta, SEQUENCES, MASK)
    for t in range(3):
        keys = [prefix_index(i, t + 1) if MASK[i, t] else -1 for i in range(15)]
        for key in set(keys) - {-1}:
            through = torch.tensor([k == key for k in keys])
            share = weights[through] / weights[through].sum()
            q_value = (share * REWARDS[through]).sum()
            close((share * advantages[through, t]).sum(), q_value - values[through, t][0])


@pytest.mark.parametrize("seed", SEEDS)
def test_value_targets_average_to_the_true_values(seed):
    theta = logits(seed, 3, 3)
    weights, targets = sequence_probabilities(theta, SEQUENCES, MASK), value_targets(REWARDS, MASK)
    close(targets, torch.where(MASK, REWARDS[:, None], 0.0))
    truth = true_values(theta)
    start = (weights * targets[:, 0]).sum()
    close(start, truth[0, 0])
