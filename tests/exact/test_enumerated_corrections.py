"""Importance corrections against exact sums over every sequence that μ can draw.

The policy of `enumeration.all_sequences`, π_θ = π_old (one update), tokens from another policy μ.
Each test writes down the expectation E_μ[weight · R · ∇ log π_θ] and compares it with ∇ E_π[R],
or with the closed form of what the correction estimates instead.
"""

import math

import pytest
import torch
from exact.enumeration import (
    all_sequences,
    grad_return,
    gradient,
    logits,
    sequence_logp,
    sequence_probabilities,
)

from stablerl_core.policy import policy_objective
from stablerl_core.system import (
    catastrophic_veto,
    geometric_rejection,
    importance_weights,
    masked_log_probs,
    minimum_prefix_weights,
    off_policy_sequence_mask,
    prefix_weights,
    safe_vocabulary,
    weight_threshold_mask,
)

SEEDS = range(3)
TOKENS, MASK = all_sequences()
LENGTHS = MASK.sum(-1).double()
REWARDS = logits(50, len(TOKENS))


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


class Case:
    """θ of the trainer, its log-probabilities and μ's, and both laws over all 15 sequences."""

    def __init__(self, seed, gap=0.7):
        self.theta = logits(seed, 3, 3)
        sampler = self.theta + gap * logits(seed + 100, 3, 3)
        self.logp, self.mu_logp = sequence_logp(self.theta, TOKENS), sequence_logp(sampler, TOKENS)
        self.pi = sequence_probabilities(self.theta, TOKENS, MASK)
        self.mu = sequence_probabilities(sampler, TOKENS, MASK)
        self.rho = (self.logp - self.mu_logp).exp()  # one ratio a token
        self.product = torch.where(MASK, self.rho, 1.0).prod(-1)

    @property
    def arguments(self):
        return self.logp, self.mu_logp, MASK

    def weights(self, **options):
        return importance_weights(*self.arguments, **options).values

    def pull(self, weights, rewards=REWARDS):
        """E_μ[Σ_t weight · R · ∇ log π_θ(o_t)], through the loss that a trainer would use."""
        law = self.mu[:, None] * torch.as_tensor(weights)
        advantages = (law * (rewards[:, None] if rewards.dim() == 1 else rewards)).expand(15, 3)

        def loss(t):
            logp = sequence_logp(t, TOKENS)
            return policy_objective("reinforce", logp, None, advantages, MASK, denominator=1)[0]

        return -gradient(loss, self.theta)

    def truth(self, rewards=REWARDS, law=None):
        """∇ Σ_i π_θ(i) rewards_i, or the same sum over sequences where `law` holds."""
        kept = rewards if law is None else rewards * law
        return gradient(
            lambda t: (sequence_probabilities(t, TOKENS, MASK) * kept).sum(), self.theta
        )


CASES = [pytest.param(seed, id=f"seed {seed}") for seed in SEEDS]


@pytest.mark.parametrize("seed", CASES)
def test_sequence_weights_without_a_cap_are_unbiased(seed):
    case = Case(seed)
    weights = case.weights(level="sequence", cap=math.inf)
    close((case.mu * weights[:, 0]).sum(), torch.tensor(1.0, dtype=torch.float64))
    close(case.pull(weights), case.truth())


@pytest.mark.parametrize("seed", CASES)
def test_recomputing_the_log_probabilities_corrects_nothing(seed):
    """The pull is that of samples from μ: π_old from the trainer is only the number in a ratio."""
    case = Case(seed)
    logp = case.logp

    def ppo(t):
        new = sequence_logp(t, TOKENS)
        advantages = case.mu[:, None] * REWARDS[:, None].expand_as(new)
        return policy_objective(
            "grpo", new, logp, advantages, MASK, aggregation="constant", denominator=1
        )[0]

    recomputed = -gradient(ppo, case.theta)
    by_hand = gradient(
        lambda t: (case.mu * REWARDS * (sequence_logp(t, TOKENS) * MASK).sum(-1)).sum(), case.theta
    )
    close(recomputed, by_hand)
    close(case.pull(1.0), by_hand)
    assert (recomputed - case.truth()).norm() > 0.1 * case.truth().norm()


@pytest.mark.parametrize("seed", CASES)
def test_token_weights_are_exact_for_one_token_and_biased_for_more(seed):
    """Bias: the weight that is missing at a token is the product over all other tokens."""
    case = Case(seed)
    weights = case.weights(level="token", cap=math.inf)
    close(weights[MASK], case.rho[MASK])
    missing = torch.where(MASK, case.product[:, None] - case.rho, 0.0)
    close(case.truth() - case.pull(weights), case.pull(missing))
    assert (case.pull(weights) - case.truth()).norm() > 0.03 * case.truth().norm()
    theta, mu, rewards = logits(seed), logits(seed + 7).softmax(-1), logits(seed + 9)
    logp = theta.log_softmax(-1)[:, None]
    one = torch.ones_like(logp, dtype=torch.bool)
    exact = importance_weights(logp, mu.log()[:, None], one, cap=math.inf).values

    def loss(t):
        advantages = (mu * rewards)[:, None] * exact
        new = t.log_softmax(-1)[:, None]
        return policy_objective("reinforce", new, None, advantages, one, denominator=1)[0]

    close(-gradient(loss, theta), grad_return(theta.softmax(-1), rewards))


@pytest.mark.parametrize("level", ["none", "token"])
def test_the_bias_of_no_and_of_token_weights_is_of_first_order_in_the_mismatch(level):
    """Half the mismatch, half the bias: token weights lower it, they do not change its order."""

    def bias(gap):
        case = Case(0, gap)
        weights = 1.0 if level == "none" else case.weights(level=level, cap=math.inf)
        return (case.pull(weights) - case.truth()).norm()

    assert bias(0.02) / bias(0.01) == pytest.approx(2, rel=0.02)
    assert bias(0.002) / bias(0.001) == pytest.approx(2, rel=0.002)


@pytest.mark.parametrize("seed", CASES)
@pytest.mark.parametrize("cap", [1.0, 1.3, 2.0])
def test_truncation_and_masking_lose_the_mass_above_the_cap(seed, cap):
    """min(w, C) estimates the gradient of Σ min(π, Cμ) R, the mask that of Σ_{w ≤ C} π R."""
    case = Case(seed)
    above = case.product > cap
    assert above.any() and not above.all()
    truncated = case.weights(level="sequence", cap=cap)
    share = torch.minimum(case.pi, cap * case.mu) / case.pi
    close(case.pull(truncated), case.pull(case.product[:, None], REWARDS * share))
    close((case.mu * truncated[:, 0]).sum(), torch.minimum(case.pi, cap * case.mu).sum())
    masked = case.weights(level="sequence", mode="mask", cap=cap)
    close(case.pull(masked), case.truth(law=~above))
    close((case.mu * masked[:, 0]).sum(), case.pi[~above].sum())
    assert case.pi[above].sum() > (case.pi - torch.minimum(case.pi, cap * case.mu)).sum() > 0.01


@pytest.mark.parametrize("seed", CASES)
def test_icepop_is_token_weights_on_the_tokens_inside_the_band(seed):
    case = Case(seed)
    inside = (case.rho >= 0.7) & (case.rho <= 1.5)
    assert 0 < (inside & MASK).sum() < MASK.sum()
    banded = case.weights(level="token", mode="mask", cap=1.5, floor=0.7)
    factor = case.mu[:, None] * REWARDS[:, None] * case.rho * inside * MASK
    by_hand = gradient(lambda t: (factor * sequence_logp(t, TOKENS)).sum(), case.theta)
    close(case.pull(banded), by_hand)


@pytest.mark.parametrize("seed", CASES)
def test_the_geometric_ratio_is_not_an_importance_weight(seed):
    case = Case(seed)
    weights = case.weights(level="geometric", cap=math.inf)
    close(weights[:, 0], case.product ** (1 / LENGTHS))
    mean = (case.mu * weights[:, 0]).sum()
    assert abs(mean - 1) > 1e-3
    close(case.pull(weights), case.pull(1.0, REWARDS * case.product ** (1 / LENGTHS)))
    assert (case.pull(weights) - case.truth()).norm() > 0.03 * case.truth().norm()


def values_after(case):
    """E_π[R | o_1 … o_t] of each token, (15, 3): what the trainer's policy earns from there."""
    same = (TOKENS[:, None, :] == TOKENS[None]) & MASK[:, None, :] & MASK[None]
    prefix = same.cumprod(-1).bool()  # (i, j, t): j starts with the first t + 1 tokens of i
    law = prefix * case.pi[None, :, None]
    return torch.where(MASK, (law * REWARDS[None, :, None]).sum(1) / law.sum(1), 0.0)


@pytest.mark.parametrize("seed", CASES)
def test_prefix_weights_are_exact_with_the_values_of_the_trainers_policy(seed):
    """∇E_π[R] = E_μ Σ_t Π_{i ≤ t} ρ_i · Q^π_t · ∇ log π_t; with R for Q the tail is still μ's."""
    case = Case(seed)
    weights = prefix_weights(*case.arguments).values
    close(weights[MASK], torch.where(MASK, case.rho, 1.0).cumprod(-1)[MASK])
    close(case.pull(weights, values_after(case)), case.truth())
    assert (case.pull(weights) - case.truth()).norm() > 0.01 * case.truth().norm()


@pytest.mark.parametrize("seed", CASES)
def test_minimum_prefix_weights_are_the_prefix_weights_of_the_first_two_tokens(seed):
    """Our reading, ρ_t · min_{i<t} ρ_i: by hand; and biased from the third token on."""
    case = Case(seed)
    exact = prefix_weights(*case.arguments).values
    ours = minimum_prefix_weights(*case.arguments).values
    close(ours[:, :2], exact[:, :2])
    third = case.rho[:, 2] * torch.minimum(case.rho[:, 0], case.rho[:, 1])
    close(ours[:, 2], third * MASK[:, 2])
    q = values_after(case)
    missing = (exact - ours) * (torch.arange(3) == 2)
    close(case.truth() - case.pull(ours, q), case.pull(missing, q))
    assert case.pull(missing, q).norm() > 1e-3


@pytest.mark.parametrize("seed", CASES)
def test_off_policy_mask_removes_negative_sequences_that_the_policy_has_left(seed):
    """What is left is E_μ over the kept ones; the KL penalty, which it does not touch, is whole."""
    case = Case(seed)
    keep = off_policy_sequence_mask(case.logp, case.mu_logp, REWARDS, MASK, 0.1)
    distance = -case.product.log() / LENGTHS
    dropped = (REWARDS < 0) & (distance > 0.1)
    assert dropped.any() and (dropped != (REWARDS < 0)).any()
    assert torch.equal(keep[:, 0], ~dropped)
    close(case.pull(keep), case.pull(1.0) - case.pull(1.0, REWARDS * dropped))


@pytest.mark.parametrize("seed", CASES)
def test_rejection_and_veto_condition_on_what_they_keep(seed):
    """With sequence weights on top, the pull is the gradient of Σ_kept π R; nothing else moves."""
    case = Case(seed)
    weights = case.weights(level="sequence", cap=math.inf)
    inside = (case.product ** (1 / LENGTHS) - 1).abs() <= 0.2
    close(
        case.pull(weights * geometric_rejection(*case.arguments, low=0.8, high=1.2)),
        case.truth(law=inside),
    )
    lowest = torch.where(MASK, case.rho, 1.0).amin(-1)
    threshold = float(lowest.unique()[:2].mean())
    alive = lowest >= threshold
    vetoed = weights * catastrophic_veto(*case.arguments, threshold=threshold)
    close(case.pull(vetoed), case.truth(law=alive))
    assert 0 < inside.sum() < 15 and 0 < alive.sum() < 15


@pytest.mark.parametrize("seed", CASES)
def test_the_seeds_threshold_on_policy_leaves_no_gradient(seed):
    """Weights are 1 on-policy: all above .95. Off-policy it keeps exactly what moved away."""
    on_policy, case = Case(seed, gap=0.0), Case(seed)
    weights = on_policy.weights(level="sequence", cap=math.inf)
    assert on_policy.pull(weight_threshold_mask(weights)).norm() == 0
    assert on_policy.truth().norm() > 0.1
    kept = weight_threshold_mask(case.weights(level="sequence", cap=math.inf))
    close(case.pull(kept), case.truth(law=case.product < 0.95))


@pytest.mark.parametrize("seed", CASES)
def test_a_safe_vocabulary_in_both_engines_is_unbiased_for_the_pruned_policy(seed):
    """Both renormalise over the ids the sampler kept; the price is at most 2 |R| (1 − mass)."""
    theta, rewards = logits(seed, 6), logits(seed + 20, 6)
    sampler = theta + 0.05 * logits(seed + 30, 6)
    likely = sampler.softmax(-1).sort(descending=True).values
    kept, mass = safe_vocabulary(sampler, float(likely[2:4].mean() / likely[0]))
    ids = kept.long()
    assert len(ids) == 3
    mu = sampler[ids].softmax(-1)  # what the sampler draws from
    tokens, trainer = ids, theta.expand(len(ids), 6)
    logp = masked_log_probs(trainer, tokens, kept.expand(len(ids), -1))[:, None]
    one = torch.ones_like(logp, dtype=torch.bool)
    weights = importance_weights(logp, mu.log()[:, None], one, cap=math.inf).values
    close((mu * weights[:, 0]).sum(), torch.tensor(1.0, dtype=torch.float64))

    def loss(t):
        new = masked_log_probs(t.expand(len(ids), 6), tokens, kept.expand(len(ids), -1))[:, None]
        advantages = (mu * rewards[ids])[:, None] * weights
        return policy_objective("reinforce", new, None, advantages, one, denominator=1)[0]

    pruned = gradient(lambda t: (t[ids].softmax(-1) * rewards[ids]).sum(), theta)
    close(-gradient(loss, theta), pruned)
    assert (pruned[[i for i in range(6) if i not in ids]] == 0).all()
    bias = (sampler.softmax(-1) * rewards).sum() - (mu * rewards[ids]).sum()
    assert 0 < bias.abs() <= 2 * rewards.abs().max() * (1 - mass)
    whole = torch.zeros_like(theta).index_put((ids,), mu)
    close((whole - sampler.softmax(-1)).abs().sum() / 2, 1 - mass)
