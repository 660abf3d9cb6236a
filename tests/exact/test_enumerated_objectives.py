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

from stablerl_core.policy import OBJECTIVES, group_advantages, policy_objective

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


NAMES = sorted(OBJECTIVES)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_objective_is_the_policy_gradient(seed, name):
    """At ratio 1 all ten have E ∇loss = −∇E[R], summed over sequences with no length in it."""
    theta = logits(seed, 3, 3)
    probabilities = sequence_probabilities(theta, TOKENS, MASK)
    grad = expected_sequence_gradient(theta, probabilities, name, aggregation="constant")
    close(grad, -grad_expected(theta, REWARDS))


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


def by_hand(name, r, advantage, logp, w, low=None, high=None, dual=math.inf, cap=None, tau=None):
    """(term, d term / d log π) of one token in Python floats; r = π_θ/π_old, w = π_θ/μ."""
    if name == "reinforce":
        return advantage * logp, advantage
    if name == "sapo":
        gate = 1 / math.cosh(tau * (r - 1) / 2) ** 2
        return 4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage, gate * r * advantage
    if name == "cispo":
        weight = min(max(r, low), high)
        return weight * advantage * logp, weight * advantage
    outside = (advantage > 0 and r > high) or (advantage < 0 and r < low)
    if name == "minirl":
        weight = 0.0 if outside else min(w, cap)
        return weight * advantage * logp, weight * advantage
    term = min(r * advantage, min(max(r, low), high) * advantage)
    if advantage < 0 and r > dual:
        return dual * advantage, 0.0
    return term, 0.0 if outside else r * advantage


CLIPS = {  # objective: options of the call, and the same for by_hand
    "reinforce": [({}, {})],
    "grpo": [
        ({}, dict(low=0.8, high=1.2)),
        (dict(clip_low=10.0, clip_high=10.0), dict(low=-9.0, high=11.0)),
        (dict(dual_clip=3.0), dict(low=0.8, high=1.2, dual=3.0)),
    ],
    "dr_grpo": [({}, dict(low=0.8, high=1.2))],
    "dapo": [
        ({}, dict(low=0.8, high=1.28)),
        (dict(clip_low=0.3, dual_clip=2.0), dict(low=0.7, high=1.28, dual=2.0)),
    ],
    "gspo": [({}, dict(low=0.9997, high=1.0004))],
    "gspo_token": [({}, dict(low=0.9997, high=1.0004))],
    "cispo": [
        ({}, dict(low=-math.inf, high=5.0)),
        (dict(clip_low=0.2, clip_high=0.2), dict(low=0.8, high=1.2)),
    ],
    "sapo": [({}, {}), (dict(tau_positive=0.5, tau_negative=3.0), {})],
    "bapo": [(dict(clip_low=0.4, clip_high=2.0), dict(low=0.6, high=3.0))],
    "minirl": [
        ({}, dict(low=0.8, high=1.27, cap=5.0)),
        (dict(clip_high=0.5, ratio_cap=1.5), dict(low=0.8, high=1.5, cap=1.5)),
    ],
}
EVERY_CLIP = [(name, *pair) for name in CLIPS for pair in CLIPS[name]]


def sapo_tau(name, options, advantage):
    if name != "sapo":
        return {}
    key, default = ("tau_positive", 1.0) if advantage > 0 else ("tau_negative", 1.05)
    return {"tau": options.get(key, default)}


@pytest.mark.parametrize("name, options, hand", EVERY_CLIP)
@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_value_and_gradient_on_both_sides_of_every_edge(name, options, hand, sign):
    """One-token sequences, so that gspo's ratio is the token's; μ is not π_old."""
    advantage = 1.7 * sign
    edges = [e for e in (hand.get("low"), hand.get("high"), hand.get("dual")) if e is not None]
    near = [e + side for e in edges if 0 < e < math.inf for side in (-1e-6, 1e-6)]
    ratios = [0.05, 0.5, *near, 1.0, 2.0, 6.0, 40.0]
    logp = -torch.linspace(0.1, 3, len(ratios), dtype=torch.float64)
    rest = [(r, advantage, float(x)) for r, x in zip(ratios, logp, strict=True)]
    weights = [r * 1.3 for r in ratios] if OBJECTIVES[name].sampler else ratios
    tau = sapo_tau(name, options, advantage)
    terms = [by_hand(name, *a, w=w, **hand, **tau) for a, w in zip(rest, weights, strict=True)]
    logp = logp[:, None].requires_grad_()
    old_logp = logp.detach() - torch.tensor(ratios, dtype=torch.float64).log()[:, None]
    drawn = {"sampler_logp": old_logp - math.log(1.3)} if OBJECTIVES[name].sampler else {}
    loss, seen = policy_objective(
        name,
        logp,
        old_logp,
        torch.full((len(ratios),), advantage, dtype=torch.float64),
        torch.ones_like(logp, dtype=torch.bool),
        denominator=1,
        **options,
        **drawn,
    )
    loss.backward()
    assert loss.item() == pytest.approx(-sum(value for value, _ in terms), rel=1e-12)
    close(-logp.grad[:, 0], torch.tensor([grad for _, grad in terms], dtype=torch.float64))
    flat = sum(grad == 0 for _, grad in terms) if sign else 0
    if name != "cispo":
        assert seen.clip_fraction == pytest.approx(flat / len(ratios))
    dual = sum(r > hand.get("dual", math.inf) for r in ratios) if sign < 0 else 0
    high = flat if sign > 0 else dual
    if name != "cispo":
        assert seen.clip_fraction_high == pytest.approx(high / len(ratios))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name, options, hand", EVERY_CLIP)
def test_expected_gradient_off_policy(seed, name, options, hand):
    """E_{a ~ π_old} ∇loss = −Σ_a π_old(a) c(a) (e_a − π), c by hand; minirl: a ~ μ."""
    theta = logits(seed)
    old, mu = logits(seed + 100).log_softmax(-1), logits(seed + 300).log_softmax(-1)
    rewards, logp, pi = logits(seed + 200), theta.log_softmax(-1), theta.softmax(-1)
    drawn = mu if OBJECTIVES[name].sampler else old
    grad, expected = torch.zeros_like(theta), torch.zeros_like(theta)
    for a in range(len(pi)):

        def loss(t, a=a):
            row = torch.log_softmax(t, -1)[a].view(1, 1)
            sampled = {"sampler_logp": mu[a].view(1, 1)} if OBJECTIVES[name].sampler else {}
            mask = torch.ones(1, 1, dtype=torch.bool)
            arguments = old[a].view(1, 1), rewards[a].view(1), mask
            return policy_objective(name, row, *arguments, **options, **sampled)[0]

        probability = drawn[a].exp()
        grad += probability * gradient(loss, theta)
        r, w = (logp[a] - old[a]).exp().item(), (logp[a] - mu[a]).exp().item()
        tau = sapo_tau(name, options, rewards[a])
        _, c = by_hand(name, r, rewards[a].item(), logp[a].item(), w=w, **hand, **tau)
        expected -= probability * c * (torch.eye(len(pi), dtype=torch.float64)[a] - pi)
    close(grad, expected)
    assert grad.norm() > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", ["grpo", "gspo", "gspo_token", "cispo", "minirl"])
def test_without_bounds_a_ratio_weight_undoes_the_sampler(seed, name):
    """One-token answers from π_old (minirl: from μ), no clip: E ∇loss = −∇E_{π_θ}[R]."""
    theta, drawn, old = logits(seed), logits(seed + 100), logits(seed + 300).log_softmax(-1)
    rewards, drawn = logits(seed + 200), drawn.log_softmax(-1)
    options = {"clip_low": math.inf, "clip_high": math.inf, "denominator": 1}
    old = old if name == "minirl" else drawn
    if name == "minirl":
        options |= {"ratio_cap": math.inf}

    def grad(**sampled):
        def loss(t):
            logp = torch.log_softmax(t, -1)[:, None]
            mask = torch.ones_like(logp, dtype=torch.bool)
            advantages = drawn.exp() * rewards
            return policy_objective(
                name, logp, old[:, None], advantages, mask, **options, **sampled
            )[0]

        return gradient(loss, theta)

    expected = -grad_return(theta.softmax(-1), rewards)
    if name != "minirl":
        return close(grad(), expected)
    close(grad(sampler_logp=drawn[:, None]), expected)
    assert (grad() - expected).norm() > 0.01  # weighed by π_θ/π_old: the mismatch stays


def moved(drift):
    """θ, old logits and everything a sequence objective needs, π_old drawing."""
    theta = logits(1, 3, 3)
    old = theta + drift * logits(2, 3, 3)
    return theta, sequence_logp(old, TOKENS), sequence_probabilities(old, TOKENS, MASK)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", ["gspo", "gspo_token"])
def test_gspo_clips_sequences_by_the_geometric_mean_of_their_ratios(name, sign):
    """Each of 15 sequences by hand: value min(sÂ, clip(s)Â), gradient sÂ/|o| a token, or none."""
    theta, old_logp, _ = moved(0.3)
    logp = sequence_logp(theta, TOKENS).requires_grad_()
    advantages = sign * (0.5 + REWARDS.abs())
    loss, seen = policy_objective(
        name, logp, old_logp, advantages, MASK, clip_low=0.05, clip_high=0.1, denominator=1
    )
    loss.backward()
    total, clipped = 0.0, 0
    for i, length in enumerate(LENGTHS.tolist()):
        ratios = (logp[i, :length] - old_logp[i, :length]).exp().tolist()
        s, a = math.prod(ratios) ** (1 / length), advantages[i].item()
        flat = s > 1.1 if sign > 0 else s < 0.95
        total -= min(s * a, min(max(s, 0.95), 1.1) * a)
        clipped += flat * length
        expected = torch.zeros(3, dtype=torch.float64)
        expected[:length] = 0.0 if flat else -s * a / length
        close(logp.grad[i], expected)  # vector 10: one coefficient for all tokens of a sequence
    assert loss.item() == pytest.approx(total, rel=1e-12)
    assert 0 < clipped < LENGTHS.sum() and seen.clip_fraction == pytest.approx(
        clipped / LENGTHS.sum().item()
    )


def test_gspo_token_gives_each_token_its_own_advantage():
    """Same s, same clip, but coefficient s Â_t: the values of a sequence's tokens may differ."""
    theta, old_logp, _ = moved(0.3)
    logp = sequence_logp(theta, TOKENS).requires_grad_()
    advantages = torch.where(MASK, logits(9, *MASK.shape), 0.0)
    options = {"clip_low": 0.05, "clip_high": 0.1, "aggregation": "constant", "denominator": 1}
    policy_objective("gspo_token", logp, old_logp, advantages, MASK, **options)[0].backward()
    log_s = torch.where(MASK, logp.detach() - old_logp, 0.0).sum(-1) / LENGTHS
    s = log_s.exp()[:, None]
    flat = ((advantages > 0) & (s > 1.1)) | ((advantages < 0) & (s < 0.95))
    assert flat.any() and (flat != flat.all(-1, keepdim=True)).any()
    close(logp.grad, torch.where(flat | ~MASK, 0.0, -s * advantages))


def gradient_under(theta, old_logp, probabilities, weights_of, **changes):
    """E over sequences from π_old of the gradient, each objective without its bounds."""
    options = {"clip_low": math.inf, "clip_high": math.inf, "aggregation": "constant"}
    return gradient(
        lambda t: policy_objective(
            weights_of,
            sequence_logp(t, TOKENS),
            old_logp,
            probabilities * REWARDS,
            MASK,
            denominator=1,
            **(options | changes),
        )[0],
        theta,
    )


def test_a_ratio_a_token_is_right_to_first_order_in_the_drift():
    """Sequences of up to 3 tokens: the error of the gradient falls like the drift (2512.01374)."""
    errors = {"grpo": [], "minirl": [], "gspo": []}
    for drift in (0.1, 0.01, 0.001):
        theta, old_logp, probabilities = moved(drift)
        truth = -grad_expected(theta, REWARDS)
        for name in errors:
            changes = {"ratio_cap": math.inf} if name == "minirl" else {}
            grad = gradient_under(theta, old_logp, probabilities, name, **changes)
            errors[name].append(((grad - truth).norm() / truth.norm()).item())
    for e in errors.values():
        assert e[0] > 1e-3
        assert e[0] / e[1] == pytest.approx(10, rel=0.2)
        assert e[1] / e[2] == pytest.approx(10, rel=0.03)
    assert errors["grpo"] == pytest.approx(errors["minirl"], rel=1e-9)  # one gradient, two ways


def test_vector_11_cispo_moves_every_token_also_outside_its_range():
    """gradient = sg(clip(r)) Â s: inside the PPO range as GRPO, outside it is not 0."""
    ratios = torch.tensor([[0.1, 0.7, 1.0, 1.5, 4.9, 5.1, 60.0]], dtype=torch.float64)
    logp = ratios.log().requires_grad_()
    mask = torch.ones_like(ratios, dtype=torch.bool)
    rest = torch.zeros_like(ratios), torch.tensor([-2.0], dtype=torch.float64), mask
    policy_objective("cispo", logp, *rest, denominator=1)[0].backward()
    close(logp.grad, 2 * ratios.clamp(max=5))


@pytest.mark.parametrize("ratio, printed", [(0.5, 0.940), (1.0, 1.0), (2.0, 0.786), (3.0, 0.420)])
def test_vector_12_sapo_weight(ratio, printed):
    """w(r) = 4 σ(1 − σ) at τ = 1, and f(1) = 2/τ, not 1."""
    logp = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
    rest = torch.zeros_like(logp), torch.ones(1).double(), torch.ones(1, 1, dtype=torch.bool)
    loss, seen = policy_objective("sapo", logp, *rest)
    loss.backward()
    assert seen.gate_mean == pytest.approx(printed, abs=5e-4)
    assert -logp.grad.item() == pytest.approx(seen.gate_mean * ratio, rel=1e-12)
    for tau in (0.3, 1.0, 7.0):
        loss, _ = policy_objective("sapo", torch.zeros(1, 1), None, *rest[1:], tau_positive=tau)
        assert loss.item() == pytest.approx(-2 / tau)


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
