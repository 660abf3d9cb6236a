"""The KL penalty in the reward: value, masks, types, refusals.

Expected gradients are in tests/exact/test_enumerated_kl.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.policy import kl_in_reward

INF, NAN = math.inf, math.nan


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn(4, generator=generator, dtype=torch.float64)
    logp, ref_logp = -3 * torch.rand(2, 4, 5, generator=generator, dtype=torch.float64)
    return rewards, logp, ref_logp, torch.arange(5) < torch.tensor([[5], [1], [0], [3]])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_sum_over_the_counted_tokens_by_hand(estimator):
    rewards, logp, ref_logp, mask = batch()
    formula = {
        "k1": lambda d: -d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(d) - 1 - d,
    }[estimator]
    expected = [
        rewards[i].item()
        - 0.7 * sum(formula((ref_logp - logp)[i, t].item()) for t in range(5) if mask[i, t])
        for i in range(4)
    ]
    actual = kl_in_reward(rewards, logp, ref_logp, mask, 0.7, estimator)
    expected = torch.tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-14)
    assert actual[2] == rewards[2]  # nothing counted, nothing taken off


def test_k1_is_the_default_and_a_zero_coefficient_changes_nothing():
    rewards, logp, ref_logp, mask = batch()
    k1 = kl_in_reward(rewards, logp, ref_logp, mask, 0.5, "k1")
    assert torch.equal(kl_in_reward(rewards, logp, ref_logp, mask, 0.5), k1)
    assert torch.equal(kl_in_reward(rewards, logp, ref_logp, mask, 0.0), rewards)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.permutations(range(4)))
def test_padding_order_and_splits_change_nothing(seed, after, order):
    rewards, logp, ref_logp, mask = batch(seed)
    expected = kl_in_reward(rewards, logp, ref_logp, mask, 0.5)
    wide = [
        torch.nn.functional.pad(x.masked_fill(~mask, NAN), (0, after), value=NAN)
        for x in (logp, ref_logp)
    ]
    padded = kl_in_reward(rewards, *wide, torch.nn.functional.pad(mask, (0, after)), 0.5)
    torch.testing.assert_close(padded, expected, rtol=1e-12, atol=1e-14)
    for row in order:
        alone = kl_in_reward(*(x[row : row + 1] for x in (rewards, logp, ref_logp, mask)), 0.5)
        torch.testing.assert_close(alone, expected[row : row + 1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computed_in_float32_or_better_and_detached(dtype):
    rewards, logp, ref_logp, mask = batch()
    rewards, logp, ref_logp = rewards.to(dtype), logp.to(dtype), ref_logp.to(dtype)
    logp.requires_grad_()
    actual = kl_in_reward(rewards, logp, ref_logp, mask, 0.5)
    assert actual.dtype == torch.float32 and not actual.requires_grad
    expected = kl_in_reward(rewards.double(), logp.double(), ref_logp.double(), mask, 0.5)
    torch.testing.assert_close(actual.double(), expected.detach(), rtol=1e-5, atol=1e-5)


two, one = torch.full((2, 3), -1.0), torch.ones(2)
counted = torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(estimator="unbiased"), "estimator is 'unbiased', expected 'k1'"),
        (dict(estimator="k4"), "estimator is 'k4'"),
        (dict(rewards=torch.ones(3)), r"rewards has shape \(3,\) and logp \(2, 3\), expected"),
        (dict(rewards=torch.ones(2, 3)), r"rewards has shape \(2, 3\) and logp"),
        (dict(logp=two[0], rewards=torch.ones(3)), r"logp \(3,\), expected"),
        (dict(ref_logp=two[:1]), r"ref_logp has shape \(1, 3\), expected \(2, 3\)"),
        (dict(mask=counted[:, :1]), r"mask has shape \(2, 1\)"),
        (dict(mask=counted.long()), "mask has dtype torch.int64"),
        (dict(kl_coef=-0.1), "kl_coef is -0.1"),
        (dict(kl_coef=INF), "kl_coef is inf"),
        (dict(kl_coef=NAN), "kl_coef is nan"),
        (dict(rewards=one * NAN), r"rewards is nan at \[0\]"),
        (dict(logp=two * NAN), r"logp is nan at \[0, 0\]"),
        (dict(rewards=one.long()), "rewards has dtype torch.int64"),
    ],
)
def test_bad_input_is_named(change, message):
    given = dict(rewards=one, logp=two, ref_logp=two, mask=counted, kl_coef=0.1) | change
    with pytest.raises(ValueError, match=message):
        kl_in_reward(**given)
