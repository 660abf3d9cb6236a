"""The losses beside the right ones, and the moments of one draw, against sums over all draws."""

import math

import pytest
import torch
from exact.enumeration import (
    expected_gradient,
    grad_forward_kl,
    grad_reverse_kl,
    kl,
    logits,
)

from stablerl_core.experiments.kl_gradient import (
    gradient_moments,
    k3_clamped,
    k3_detached_ratio,
    score_coefficient,
    seed_delta_log_delta,
)
from stablerl_core.policy import kl_estimate

SEEDS = range(3)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def policies(seed):
    theta, ref, mu = logits(seed), logits(seed + 100), logits(seed + 200)
    return theta, theta.softmax(-1), ref.softmax(-1), mu.softmax(-1)


def coefficient(loss, pi):
    logp = pi.log().requires_grad_()
    return score_coefficient(loss(logp), logp)


@pytest.mark.parametrize("seed", SEEDS)
def test_moments_are_those_of_all_draws(seed):
    _, pi, ref, mu = policies(seed)
    c = coefficient(lambda x: kl_estimate(x, ref.log(), "k3"), pi)
    draws = c[:, None] * (torch.eye(len(pi), dtype=torch.float64) - pi)
    mean, variance = gradient_moments(c, pi, mu)
    close(mean, mu @ draws)
    close(variance, (mu @ (draws - mu @ draws) ** 2).sum())


@pytest.mark.parametrize("seed", SEEDS)
def test_moments_of_many_policies_at_once(seed):
    rows = [policies(seed + i) for i in range(3)]
    pi, mu = (torch.stack([row[i] for row in rows]) for i in (1, 3))
    ref_logp = torch.stack([row[2] for row in rows]).log()
    c = coefficient(lambda x: kl_estimate(x, ref_logp, "k2"), pi)
    mean, variance = gradient_moments(c, pi, mu)
    for i in range(3):
        one = gradient_moments(c[i], pi[i], mu[i])
        close(mean[i], one[0])
        close(variance[i], one[1])


@pytest.mark.parametrize("seed", SEEDS)
def test_detached_ratio_is_the_forward_kl(seed):
    theta, pi, ref, mu = policies(seed)
    grad = expected_gradient(lambda x: k3_detached_ratio(x, ref.log(), mu.log()), theta, mu)
    close(grad, grad_forward_kl(pi, ref))
    assert (grad - grad_reverse_kl(pi, ref)).norm() > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_a_detached_ratio_weighs_k2_back_to_the_reverse_kl(seed):
    """What the chapter's table says of k2 off-policy: wrong without the weight, right with it."""
    theta, pi, ref, mu = policies(seed)
    ratio = pi / mu
    plain = expected_gradient(lambda x: kl_estimate(x, ref.log(), "k2"), theta, mu)
    weighted = expected_gradient(lambda x: ratio * kl_estimate(x, ref.log(), "k2"), theta, mu)
    close(weighted, grad_reverse_kl(pi, ref))
    assert (plain - grad_reverse_kl(pi, ref)).norm() > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_k1_off_policy_drives_away_from_the_sampler(seed):
    theta, pi, ref, mu = policies(seed)
    grad = expected_gradient(lambda x: kl_estimate(x, ref.log(), "k1"), theta, mu)
    close(grad, -grad_forward_kl(pi, mu))


@pytest.mark.parametrize("seed", SEEDS)
def test_seed_formula_has_the_mean_of_the_forward_kl_and_no_kl_gradient(seed):
    theta, pi, ref, _ = policies(seed)
    value = seed_delta_log_delta(pi.log(), ref.log())
    close((pi * value).sum(), kl(ref, pi))
    assert value.min() < 0
    grad = expected_gradient(lambda x: seed_delta_log_delta(x, ref.log()), theta, pi)
    for right in (grad_forward_kl(pi, ref), grad_reverse_kl(pi, ref)):
        assert (grad / grad.norm() - right / right.norm()).norm() > 0.05


def test_clamp_equals_k3_inside_and_lets_go_outside():
    log_delta = torch.tensor([-12.0, -10.9, -1.0, 2.6, 2.62, 30.0], dtype=torch.float64)
    logp = -log_delta.requires_grad_()
    pull = score_coefficient(k3_clamped(logp, torch.zeros_like(logp)), logp)
    free = score_coefficient(kl_estimate(logp, torch.zeros_like(logp), "k3"), logp)
    held = torch.tensor([False, True, True, True, False, False])
    close(pull[held], free[held])
    assert (pull[~held] == 0).all() and (free[~held] != 0).all()
    assert math.exp(2.6) - 3.6 < 10 < math.exp(2.62) - 3.62
