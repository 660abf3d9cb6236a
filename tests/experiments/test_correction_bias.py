"""The chapter's gradients, factors and sample sizes against sums that are written out by hand."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from stablerl_core.experiments import correction_bias
from stablerl_core.experiments.correction_bias import (
    METHODS,
    SAMPLERS,
    Chain,
    Drawn,
    chain_row,
    coefficients,
    drawn_of,
    factors,
    gradients_of,
    half,
    measure_length,
    measure_model,
    model_gradients,
    sampled_log_products,
    sequence_ess,
)
from stablerl_core.training import SystemConfig
from stablerl_core.training.rollout import completion_logp

SEEDS = range(3)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def expected_reward(theta, sampler, marks, length):
    """E[R] with tokens from `sampler`, a loop over all sequences; and E of R times π_θ/μ."""
    pi, mu, plain, weighted = theta.softmax(-1), sampler.softmax(-1), 0.0, 0.0
    for tokens in product(range(theta.shape[1]), repeat=length):
        before, chance, reward, ratio = theta.shape[1], 1.0, 0.0, 1.0
        for token in tokens:
            chance = chance * mu[before, token]
            ratio = ratio * pi[before, token] / mu[before, token].detach()
            reward = reward + marks[before, token] / length
            before = token
        plain, weighted = plain + chance * reward, weighted + chance.detach() * ratio * reward
    return plain, weighted


@pytest.mark.parametrize("seed", SEEDS)
def test_the_true_gradient_is_that_of_the_trainers_own_reward(seed):
    chain = Chain.of(seed)
    theta = chain.theta.clone().requires_grad_()
    own, weighted = expected_reward(theta, theta, chain.marks, 3)
    (expected,) = torch.autograd.grad(own, theta)
    close(chain.truth(3), expected)
    foreign = expected_reward(theta, chain.sampler, chain.marks, 3)[1]
    close(torch.autograd.grad(foreign, theta)[0], expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_sequence_has_its_probability_and_an_advantage_of_mean_zero(seed):
    drawn, law = Chain.of(seed).drawn(4)
    close(law.sum(), torch.tensor(1.0).double())
    assert len(law) == 3**4 and abs(float(law @ drawn.advantages[:, 0])) < 1e-12


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_sequence_product_has_no_bias_and_the_token_ratio_none_for_one_token(length):
    rows = {m: chain_row(m, Chain.of(0), length) for m in METHODS}
    assert rows["sequence_is"]["bias"] < 1e-12 and rows["sequence_is"]["cosine"] > 1 - 1e-12
    assert (rows["token_is"]["bias"] < 1e-12) == (length == 1)
    assert rows["recompute"]["bias"] > 0.1 and rows["recompute"]["mass"] == pytest.approx(1)
    assert rows["sequence_is"]["mass"] == pytest.approx(1)


def test_noise_is_the_variance_of_one_sequence():
    chain = Chain.of(1)
    drawn, law = chain.drawn(2)
    each = chain.gradients(2, coefficients("tis", drawn)).flatten(1)
    by_hand = sum(p * (g - law @ each).square().sum() for p, g in zip(law, each, strict=True))
    expected = by_hand / chain.truth(2).square().sum()
    assert chain_row("tis", chain, 2)["noise"] == pytest.approx(float(expected))


def two_sequences(ratios, advantages):
    logp = torch.tensor(ratios, dtype=torch.float64).log()
    wide = torch.tensor(advantages, dtype=torch.float64)[:, None].expand_as(logp)
    return Drawn(logp, torch.zeros_like(logp), wide, torch.ones_like(logp).bool())


def test_log_probabilities_of_the_sampler_as_old_ones_put_the_clip_on_the_mismatch():
    """Ratios at the first update: above 1.2 with Â > 0 and below 0.8 with Â < 0 nothing is left."""
    drawn = two_sequences([[0.5, 1.1, 3.0], [0.5, 1.1, 3.0]], [2.0, -1.0])
    expected = [[2 * 0.5, 2 * 1.1, 0.0], [0.0, -1.1, -3.0]]
    close(coefficients("mu_as_old", drawn), torch.tensor(expected, dtype=torch.float64))
    close(coefficients("recompute", drawn), drawn.advantages)
    found = factors(coefficients("mu_as_old", drawn), drawn)
    assert found["silenced"] == pytest.approx(2 / 6)
    assert found["mass"] == pytest.approx((0.5 + 1.1 + 1.1 + 3) / 6)
    squares = 0.25 + 1.21 + 1.21 + 9
    assert found["ess"] == pytest.approx(5.7**2 / squares / 6)


def test_weights_of_the_table_reach_the_coefficients():
    drawn = two_sequences([[0.4, 6.0, 2.5]], [-1.0])
    expected = {
        "token_is": [0.4, 6, 2.5],
        "sequence_is": [6, 6, 6],
        "prefix": [0.4, 2.4, 6],
        "tis": [0.4, 2, 2],
        "sequence_tis": [2, 2, 2],
        "mis": [0.4, 0, 0],
        "sequence_mis": [0, 0, 0],
        "icepop": [0, 0, 2.5],
        "minimum_prefix": [0.4, 2.4, 1.0],
        "geometric_rejection": [1, 1, 1],
        "geometric_narrow": [0, 0, 0],
        "opsm": [1, 1, 1],  # μ is below π_θ: nothing the policy has moved away from
    }
    for method, weights in expected.items():
        close(coefficients(method, drawn)[0], -torch.tensor(weights, dtype=torch.float64))
    far = two_sequences([[0.4, 0.9, 0.9]], [-1.0])
    assert not coefficients("opsm", far).any()


def test_tokens_without_an_advantage_are_not_counted_and_laws_are():
    drawn = two_sequences([[4.0, 1.0], [9.0, 9.0]], [1.0, 0.0])
    found = factors(coefficients("tis", drawn), drawn)
    assert found["mass"] == pytest.approx(1.5) and found["silenced"] == 0
    drawn = two_sequences([[4.0], [1.0]], [1.0, 1.0])
    law = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert factors(coefficients("tis", drawn), drawn, law)["mass"] == pytest.approx(1.25)


def test_pruning_removes_the_same_tokens_from_both_and_pays_with_mass():
    chain = Chain.of(0)
    small = chain.pruned(0.5)
    gone = torch.isinf(small.sampler)
    assert gone.any() and torch.equal(gone, torch.isinf(small.theta))
    p = chain.sampler.softmax(-1)
    assert torch.equal(gone, p < 0.5 * p.amax(-1, keepdim=True))
    row = chain_row("pruned", Chain.of(0), 4)
    assert row["mass"] < 0.999 and row["silenced"] == 0 and row["ess"] == pytest.approx(1)
    assert chain_row("pruned", replace(chain, sampler=chain.theta), 2)["bias"] > 0.01


@pytest.mark.parametrize("length", [1, 2, 3])
def test_the_matrix_power_is_the_sum_over_all_sequences(length):
    chain = Chain.of(2)
    drawn, law = chain.drawn(length)
    second = law @ (2 * (drawn.logp - drawn.sampler_logp).sum(1)).exp()
    assert sequence_ess(chain, length) == pytest.approx(float(1 / second))


def test_a_long_product_does_not_overflow_and_is_worth_nothing():
    assert 0 <= sequence_ess(Chain.of(0, 2.0), 4096) < 1e-30
    assert sequence_ess(Chain.of(0, 0.0), 4096) == pytest.approx(1)


def test_sampled_products_have_mean_one():
    logs = sampled_log_products(Chain.of(0), (1, 3), 20_000, seed=0)
    for each in logs.exp():
        assert abs(float(each.mean()) - 1) < 4 * float(each.std()) / 20_000**0.5
    rows = measure_length(0, gap=0.3, count=16)
    assert [r["step"] for r in rows] == [4**k for k in range(7)]
    assert rows[-1]["ess"] < 1 / 16 <= rows[-1]["ess_128"] and rows[0]["kl"] < 0.2


def test_gradients_of_the_model_are_those_of_a_plain_loss():
    model, batch, advantages = half(SAMPLERS["noise"], 1, 0, prompts=2)
    drawn = drawn_of(model, batch, advantages)
    wanted = {m: coefficients(m, drawn) for m in ("recompute", "sequence_tis")}
    found = model_gradients(model, batch, wanted)
    for method, coefficient in wanted.items():
        model.zero_grad()
        logp = completion_logp(model, batch)
        torch.where(batch.mask, coefficient * logp, 0.0).sum().div(len(logp)).backward()
        expected = torch.cat([p.grad.flatten() for p in model.parameters()]).double()
        assert (found[method] - expected).norm() < 1e-4 * expected.norm()
    assert (found["recompute"] - found["sequence_tis"]).norm() > 0.1 * found["recompute"].norm()


def test_pruning_reaches_the_models_rollout_and_its_mass():
    model, batch, advantages = half(SAMPLERS["noise"], 1, 0, prompts=2, min_p=0.3)
    drawn = drawn_of(model, batch, advantages)
    assert drawn.whole_logp is not None
    assert (drawn.whole_logp <= drawn.logp + 1e-5)[drawn.mask].all()
    assert 0.5 < factors(coefficients("pruned", drawn), drawn)["mass"] < 0.999
    assert math.isclose(factors(coefficients("pruned", drawn), drawn)["ess"], 1, rel_tol=1e-6)


def test_the_way_towards_the_sampler_and_the_truth_come_from_the_same_prompts():
    found, shares = gradients_of(SAMPLERS["int4"], 1, 0, prompts=2)
    assert set(found) == {*METHODS, "truth", "imitate"} and set(shares) == {*METHODS, "truth"}
    model, batch, advantages = half(SAMPLERS["int4"], 1, 0, prompts=2)
    loss = torch.where(batch.mask, completion_logp(model, batch), 0.0).sum() / len(batch.tokens)
    way = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert (found["imitate"] - way).norm() < 1e-4 * way.norm()
    model, batch, advantages = half(SystemConfig(), 1, 0, prompts=2)
    logp = completion_logp(model, batch)
    loss = torch.where(batch.mask, advantages * logp, 0.0).sum() / len(batch.tokens)
    true = torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])
    assert (found["truth"] - true).norm() < 1e-4 * true.norm()


def test_a_row_holds_products_of_independent_halves(monkeypatch):
    """Each method's gradient is 2 in one half and 3 in the other, the true one 1 and 5."""

    def halves(system, n, seed, prompts):
        names = {m: 1.0 + n for m in METHODS} | {"truth": 4.0 * n - 3, "imitate": 10.0 * n}
        found = {name: torch.tensor([x, 0.0]).double() for name, x in names.items()}
        return found, {m: {"mass": float(n)} for m in METHODS}

    monkeypatch.setattr(correction_bias, "gradients_of", halves)
    row = measure_model("int4", 0, prompts=4)[0]
    expected = {"bias2": (2 - 1) * (3 - 5), "size2": 5, "length2": 6, "along": (2 * 5 + 3) / 2}
    expected |= {"noise": (1 / 2) * 32, "toward": (2 * 20 + 3 * 10) / 2, "way2": 200}
    expected |= {"true_toward": (20 + 5 * 10) / 2, "step": 0, "mass": 1.0}
    assert row == pytest.approx(expected)
