"""What an update does to the entropy, predicted and measured, on all actions of a softmax."""

import math

import pytest
import torch
from exact.enumeration import ACTIONS, gradient, logits

from stablerl_core.policy import entropy, entropy_change, policy_objective, sampled_entropy

SEEDS = range(3)
EVERY = torch.arange(ACTIONS)
STEP = 1e-4


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def shannon(z):
    pi = z.softmax(-1)
    return -(pi * pi.log()).sum()


def covariance(pi, x, y):
    return (pi * x * y).sum() - (pi * x).sum() * (pi * y).sum()


def measured(z, direction):
    """dH/dη along z + η·direction at η = 0, by Richardson's central differences."""

    def slope(h):
        return (shannon(z + h * direction) - shannon(z - h * direction)) / (2 * h)

    return (4 * slope(STEP) - slope(2 * STEP)) / 3


def predicted(theta, advantages, gradient="natural", **options):
    """The prediction for every action, at step size 1, (V,)."""
    rows = theta.expand(ACTIONS, ACTIONS)
    return entropy_change(rows, EVERY, advantages, step_size=1.0, gradient=gradient, **options)


def policy_and_advantages(seed):
    return logits(seed), logits(seed + 10)


@pytest.mark.parametrize("seed", SEEDS)
def test_sampled_entropy_is_unbiased(seed):
    theta = logits(seed)
    pi = theta.softmax(-1)
    one = torch.ones(1, dtype=torch.bool)
    mean = sum(p * sampled_entropy(p.log()[None], one) for p in pi)
    close(mean, shannon(theta))


@pytest.mark.parametrize("seed", SEEDS)
def test_one_token_softmax_step(seed):
    """Δz = η Â (e_o − π), the gradient of Â log π(o): measured, for every token."""
    theta, advantages = policy_and_advantages(seed)
    got = predicted(theta, advantages, "softmax")
    for token, value in enumerate(got):

        def objective(z, token=token):
            return advantages[token] * torch.log_softmax(z, -1)[token]

        expected = measured(theta, gradient(objective, theta))
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_one_token_natural_step(seed):
    """Δz = η Â F⁻¹ (e_o − π) with the Fisher matrix F = diag π − π πᵀ: measured."""
    theta, advantages = policy_and_advantages(seed)
    pi = theta.softmax(-1)
    fisher = torch.diag(pi) - torch.outer(pi, pi)
    got = predicted(theta, advantages, "natural")
    for token, value in enumerate(got):
        score = (EVERY == token).double() - pi
        direction = advantages[token] * torch.linalg.pinv(fisher) @ score
        torch.testing.assert_close(value, measured(theta, direction), rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_mean_natural_step_is_minus_the_covariance(seed):
    """E ΔH = −Cov(log π, Â + C), and the step is z + η Â."""
    theta, advantages = policy_and_advantages(seed)
    pi = theta.softmax(-1)
    mean = (pi * predicted(theta, advantages)).sum()
    close(mean, -covariance(pi, pi.log(), advantages + 3.0))
    torch.testing.assert_close(mean, measured(theta, advantages), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", SEEDS)
def test_mean_softmax_step_is_another_covariance(seed):
    """E ΔH = −Cov(log π, π (Â − E Â)): the ordinary gradient weighs by π once more."""
    theta, advantages = policy_and_advantages(seed)
    pi = theta.softmax(-1)
    mean = (pi * predicted(theta, advantages, "softmax")).sum()
    centred = advantages - (pi * advantages).sum()
    close(mean, -covariance(pi, pi.log(), pi * centred))
    grad = gradient(lambda z: (z.softmax(-1) * advantages).sum(), theta)
    torch.testing.assert_close(mean, measured(theta, grad), rtol=1e-9, atol=1e-10)
    natural = (pi * predicted(theta, advantages)).sum()
    assert abs(mean / natural - 1) > 0.05  # not interchangeable


def off_policy(seed):
    """θ, π_old and advantages such that the range .2 clips on both sides and lets both through."""
    theta, advantages = policy_and_advantages(seed)
    old = (theta + 0.7 * logits(seed + 20)).softmax(-1)
    ratio = theta.softmax(-1) / old
    high = (advantages > 0) & (ratio > 1.2)
    low = (advantages < 0) & (ratio < 0.8)
    return theta, old, ratio, advantages, high, low


OFF_POLICY_SEEDS = [0, 1, 4]


def test_the_off_policy_cases_clip_on_both_sides():
    cases = [off_policy(seed) for seed in OFF_POLICY_SEEDS]
    assert any(high.any() for *_, high, _ in cases) and any(low.any() for *_, low in cases)
    assert all((~(high | low)).any() for *_, high, low in cases)


@pytest.mark.parametrize("seed", OFF_POLICY_SEEDS)
def test_the_clip_rule_against_a_step_of_the_clipped_objective(seed):
    """Samples from π_old, gradient of GRPO's own loss by autograd, entropy measured after it."""
    theta, old, _, advantages, _, _ = off_policy(seed)
    mask = torch.ones(1, ACTIONS, dtype=torch.bool)

    def objective(z):
        total = 0.0
        for a in range(ACTIONS):
            logp = torch.log_softmax(z, -1)[a].view(1, 1)
            loss, _ = policy_objective(
                "grpo", logp, old.log()[a].view(1, 1), advantages[a : a + 1], mask[:, :1]
            )
            total = total - old[a] * loss
        return total

    clip = dict(old_logp=old.log(), clip_low=0.2, clip_high=0.2)
    mean = (old * predicted(theta, advantages, "softmax", **clip)).sum()
    expected = measured(theta, gradient(objective, theta))
    torch.testing.assert_close(mean, expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("seed", OFF_POLICY_SEEDS)
def test_the_clip_rule_is_bapos_covariance(seed):
    """Over π_old with the ratio in it: −Cov_{a∼π}(log π, 𝒳 Â + C)."""
    theta, old, ratio, advantages, high, low = off_policy(seed)
    pi, open_ = theta.softmax(-1), (~(high | low)).double()
    clip = dict(old_logp=old.log(), clip_low=0.2, clip_high=0.2)
    each = predicted(theta, advantages, **clip)
    close((old * each).sum(), -covariance(pi, pi.log(), open_ * advantages - 2.0))
    assert torch.equal(each[high | low], torch.zeros(int((high | low).sum())).double())
    unclipped = predicted(theta, advantages)
    close(each, ratio * open_ * unclipped)


@pytest.mark.parametrize("gradient_kind", ["natural", "softmax"])
def test_who_raises_entropy(gradient_kind):
    """Rare and good raises it, likely and good lowers it, and with bad it is the reverse."""
    theta = torch.tensor([0.9, 0.05, 0.05], dtype=torch.float64).log()
    rows, tokens = theta.expand(4, 3), torch.tensor([0, 1, 0, 1])
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    change = entropy_change(rows, tokens, advantages, step_size=0.1, gradient=gradient_kind)
    assert change[0] < 0 < change[1] and change[2] > 0 > change[3]


def test_the_uniform_policy_can_only_lose_and_to_first_order_does_not():
    change = predicted(torch.zeros(ACTIONS).double(), logits(0), "softmax")
    close(change, torch.zeros(ACTIONS).double())


@pytest.mark.parametrize("kind", ["natural", "softmax"])
def test_it_is_the_first_order(kind):
    """The error of the prediction falls a hundredfold when the step falls tenfold."""
    theta, advantages = policy_and_advantages(2)
    pi = theta.softmax(-1)
    direction = advantages
    if kind == "softmax":
        direction = gradient(lambda z: (z.softmax(-1) * advantages).sum(), theta)
    slope = (pi * predicted(theta, advantages, kind)).sum()
    errors = [
        abs(shannon(theta + eta * direction) - shannon(theta) - eta * slope).item()
        for eta in (1e-2, 1e-3)
    ]
    assert errors[0] / errors[1] == pytest.approx(100, rel=0.05)


def test_step_size_is_a_factor_and_entropy_is_ours():
    theta, advantages = policy_and_advantages(0)
    rows = theta.expand(ACTIONS, ACTIONS)
    small = entropy_change(rows, EVERY, advantages, step_size=0.25)
    close(small, 0.25 * predicted(theta, advantages))
    hand = -advantages * (torch.log_softmax(theta, -1) + entropy(theta))
    close(small, 0.25 * hand)
    assert math.isclose(entropy(theta).item(), shannon(theta).item(), rel_tol=1e-12)
