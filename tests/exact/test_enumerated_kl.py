"""KL estimators against exact sums: value, and expected gradient, on- and off-policy."""

import math

import pytest
import torch
from exact.enumeration import (
    all_sequences,
    expected_gradient,
    grad_forward_kl,
    grad_return,
    grad_reverse_kl,
    gradient,
    kl,
    logits,
    sequence_logp,
    sequence_probabilities,
)

from stablerl_core.policy import entropy, exact_kl, kl_estimate, kl_in_reward, policy_objective

SEEDS = range(4)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def policies(seed):
    """θ, and the probabilities π_θ, π_ref and μ: three different policies."""
    theta, ref, mu = logits(seed), logits(seed + 100), logits(seed + 200)
    return theta, theta.softmax(-1), ref.softmax(-1), mu.softmax(-1)


@pytest.mark.parametrize("seed", SEEDS)
def test_value_on_policy(seed):
    """k1 and k3 have the mean KL(π‖ref); k2 has another one."""
    _, pi, ref, _ = policies(seed)
    mean = {
        name: (pi * kl_estimate(pi.log(), ref.log(), name)).sum() for name in ("k1", "k2", "k3")
    }
    close(mean["k1"], kl(pi, ref))
    close(mean["k3"], kl(pi, ref))
    close(mean["k2"], (pi * 0.5 * (pi / ref).log() ** 2).sum())
    assert abs(mean["k2"] / kl(pi, ref) - 1) > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_value_off_policy(seed):
    """Under samples from μ only the weighted estimator has the mean KL(π‖ref)."""
    _, pi, ref, mu = policies(seed)
    weighted = kl_estimate(pi.log(), ref.log(), "unbiased", mu.log())
    close((mu * weighted).sum(), kl(pi, ref))
    for name in ("k1", "k2", "k3"):
        plain = (mu * kl_estimate(pi.log(), ref.log(), name)).sum()
        assert abs(plain / kl(pi, ref) - 1) > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_vector_1_expected_gradient_on_policy(seed):
    """k1 as a loss: nothing. k2: the reverse KL. k3: the forward KL."""
    theta, pi, ref, _ = policies(seed)
    expected = {
        "k1": torch.zeros_like(pi),
        "k2": grad_reverse_kl(pi, ref),
        "k3": grad_forward_kl(pi, ref),
    }
    for name, gradient_of_kl in expected.items():
        close(
            expected_gradient(lambda logp: kl_estimate(logp, ref.log(), name), theta, pi),  # noqa: B023
            gradient_of_kl,
        )
    assert (grad_forward_kl(pi, ref) - grad_reverse_kl(pi, ref)).norm() > 0.01


@pytest.mark.parametrize("seed", SEEDS)
def test_vector_1_unbiased_on_policy(seed):
    """With μ = π the ratio is 1 in value and still carries the gradient."""
    theta, pi, ref, _ = policies(seed)
    grad = expected_gradient(
        lambda logp: kl_estimate(logp, ref.log(), "unbiased", pi.log()), theta, pi
    )
    close(grad, grad_reverse_kl(pi, ref))


def penalty_in_reward(theta, ref, estimator, kl_coef=1.0, rewards=None):
    """Expected gradient of E[R] with the penalty in R, samples from π: REINFORCE, summed."""
    pi = theta.softmax(-1)
    rewards = torch.zeros_like(pi) if rewards is None else rewards
    mask = torch.ones(len(pi), 1, dtype=torch.bool)
    penalised = kl_in_reward(
        rewards, pi.log()[:, None], ref.log()[:, None], mask, kl_coef, estimator
    )

    def loss(t):
        logp = torch.log_softmax(t, -1)[:, None]
        return policy_objective("reinforce", logp, None, pi * penalised, mask, denominator=1)[0]

    return -gradient(loss, theta)


@pytest.mark.parametrize("seed", SEEDS)
def test_vector_1b_penalty_in_the_reward(seed):
    """k1 in the reward is right; k3 there is the difference of both directions; k2 neither."""
    theta, pi, ref, _ = policies(seed)
    reverse, forward = grad_reverse_kl(pi, ref), grad_forward_kl(pi, ref)
    close(penalty_in_reward(theta, ref, "k1"), -reverse)
    close(penalty_in_reward(theta, ref, "k3"), forward - reverse)
    half_square = 0.5 * (pi / ref).log() ** 2
    close(penalty_in_reward(theta, ref, "k2"), -grad_return(pi, half_square))


@pytest.mark.parametrize("seed", SEEDS)
def test_reward_and_penalty_together(seed):
    """∇(E[R] − kl_coef · KL), the objective of Ziegler et al."""
    theta, pi, ref, _ = policies(seed)
    rewards = logits(seed + 300)
    grad = penalty_in_reward(theta, ref, "k1", 0.3, rewards)
    close(grad, grad_return(pi, rewards) - 0.3 * grad_reverse_kl(pi, ref))


@pytest.mark.parametrize("seed", SEEDS)
def test_penalty_in_the_reward_of_whole_sequences(seed):
    """k1 summed over a completion: the gradient of the KL between distributions of sequences."""
    tokens, mask = all_sequences()
    theta, other = logits(seed, 3, 3), logits(seed + 100, 3, 3)
    reference = sequence_probabilities(other, tokens, mask)
    weights = sequence_probabilities(theta, tokens, mask)
    penalised = kl_in_reward(
        logits(seed + 200, len(tokens)),
        sequence_logp(theta, tokens),
        sequence_logp(other, tokens),
        mask,
        0.3,
    )

    def truth(t):
        pi = sequence_probabilities(t, tokens, mask)
        return (pi * logits(seed + 200, len(tokens))).sum() - 0.3 * kl(pi, reference)

    def surrogate(t):
        logp = torch.where(mask, sequence_logp(t, tokens), 0.0).sum(-1)
        return (weights * penalised * logp).sum()

    close((weights * penalised).sum(), truth(theta))
    close(gradient(surrogate, theta), gradient(truth, theta))


def test_vector_1b_k3_in_the_reward_vanishes_near_the_reference():
    """Its share of the true gradient falls in proportion to the drift: to first order it is 0."""
    direction = logits(7)
    shares = []
    for drift in (0.1, 0.01, 0.001):
        reference = logits(8)
        theta = reference + drift * direction
        pi, ref = theta.softmax(-1), reference.softmax(-1)
        grad = penalty_in_reward(theta, ref, "k3")
        shares.append((grad.norm() / grad_reverse_kl(pi, ref).norm()).item())
    assert shares[0] < 0.1
    assert shares[0] / shares[1] == pytest.approx(10, rel=0.1)
    assert shares[1] / shares[2] == pytest.approx(10, rel=0.01)


@pytest.mark.parametrize("seed", SEEDS)
def test_vector_2_off_policy(seed):
    """ρ·k3 under μ is the reverse KL; with ρ detached the forward KL; without ρ neither."""
    theta, pi, ref, mu = policies(seed)

    def grad(loss):
        return expected_gradient(loss, theta, mu)

    def detached(logp):
        return (logp - mu.log()).exp().detach() * kl_estimate(logp, ref.log(), "k3")

    close(
        grad(lambda logp: kl_estimate(logp, ref.log(), "unbiased", mu.log())),
        grad_reverse_kl(pi, ref),
    )
    close(grad(detached), grad_forward_kl(pi, ref))
    without = grad(lambda logp: kl_estimate(logp, ref.log(), "k3"))
    assert (without - grad_reverse_kl(pi, ref)).norm() > 0.01
    assert (without - grad_forward_kl(pi, ref)).norm() > 0.01


def k3_gradient(log_delta, clamp):
    """d k3 / d log π_θ at one token, with k3 clamped at 10 or as it is."""
    logp = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    value = kl_estimate(logp, logp.detach() + log_delta, "k3")
    (value.clamp(max=10) if clamp else value).sum().backward()
    return logp.grad.item()


def test_vector_3_an_output_clamp_lets_go():
    """k3 clamped at 10 has no gradient from log δ = 2.6109 on; unclamped it is 1 − δ."""
    edge = 2.6109
    for log_delta in (edge - 1e-3, edge + 1e-3, 5.0, 20.0):
        free = 1 - math.exp(log_delta)
        assert k3_gradient(log_delta, clamp=False) == pytest.approx(free, rel=1e-12)
        expected = free if log_delta < edge else 0.0
        assert k3_gradient(log_delta, clamp=True) == pytest.approx(expected, rel=1e-12)
    assert math.exp(edge) - 1 - edge == pytest.approx(10, abs=1e-3)


@pytest.mark.parametrize("seed", SEEDS)
def test_exact_kl(seed):
    """Value and gradient by hand; with the arguments swapped, the forward KL."""
    theta, pi, ref, _ = policies(seed)
    close(exact_kl(theta, ref.log()), kl(pi, ref))
    close(gradient(lambda t: exact_kl(t, ref.log()), theta), grad_reverse_kl(pi, ref))
    close(gradient(lambda t: exact_kl(ref.log(), t), theta), grad_forward_kl(pi, ref))


@pytest.mark.parametrize("seed", SEEDS)
def test_entropy(seed):
    """H = −Σ π log π and ∇H = −π ⊙ (log π + H)."""
    theta, pi, _, _ = policies(seed)
    value = -(pi * pi.log()).sum()
    close(entropy(theta), value)
    close(gradient(entropy, theta), -pi * (pi.log() + value))
