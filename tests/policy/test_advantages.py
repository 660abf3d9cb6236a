"""Group advantages: conventions, ties, noise, properties, refusals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import group_advantages


def test_the_formula_against_numpy():
    rewards = np.random.default_rng(0).normal(size=(3, 4))
    for ddof in (0, 1):
        expected = (rewards - rewards.mean(1, keepdims=True)) / (
            rewards.std(1, ddof=ddof, keepdims=True) + 1e-3
        )
        actual = group_advantages(torch.tensor(rewards).view(-1), 4, ddof=ddof, eps=1e-3)
        np.testing.assert_allclose(actual.view(3, 4).numpy(), expected, rtol=1e-12)


def test_batch_scale_is_the_group_mean_over_the_std_of_all_rewards():
    rewards = np.random.default_rng(1).normal(size=(3, 4))
    for ddof in (0, 1):
        expected = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(ddof=ddof) + 1e-6)
        actual = group_advantages(torch.tensor(rewards).view(-1), 4, scale="batch", ddof=ddof)
        np.testing.assert_allclose(actual.view(3, 4).numpy(), expected, rtol=1e-12)


def test_vector_6_std_conventions():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    for ddof, std in ((0, 0.5), (1, math.sqrt(1 / 3))):
        actual = group_advantages(rewards, 4, ddof=ddof, eps=0)
        torch.testing.assert_close(actual, (rewards - 0.5) / std)
    torch.testing.assert_close(group_advantages(rewards, 4, scale="none"), rewards - 0.5)


@pytest.mark.parametrize("size, printed", [(8, 2.646), (16, 3.873), (32, 5.568)])
def test_vector_7_one_right_answer_in_a_group(size, printed):
    rewards = torch.zeros(size, dtype=torch.float64)
    rewards[0] = 1
    best = group_advantages(rewards, size, eps=0)[0].item()
    assert best == pytest.approx(math.sqrt(size - 1), rel=1e-12)
    assert best == pytest.approx(printed, abs=5e-4)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize(
    "group",
    [
        [0.0, 0.0],
        [0.7, 0.7],
        [0.1 + 0.2, 0.3],  # differ in the last bit
        [-(0.1 + 0.2), -0.3],
        [1e30 * (0.1 + 0.2), 1e30 * 0.3],
        [sum([0.1] * 10), 1.0],
    ],
)
def test_an_all_equal_group_gives_exact_zeros(group, scale, ddof, eps):
    """Also next to a group that has a signal, for any eps, and with rounding in the rewards."""
    rewards = torch.tensor([*group, 1.0, 0.0], dtype=torch.float64)
    actual = group_advantages(rewards, 2, scale=scale, ddof=ddof, eps=eps)
    assert actual[:2].tolist() == [0.0, 0.0]
    assert actual[2] > 0 > actual[3]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_rounding_in_a_smaller_type_is_noise_too(dtype):
    one = torch.ones((), dtype=dtype)
    above = one + torch.finfo(dtype).eps
    assert above != one
    assert group_advantages(torch.stack([one, above]), 2, eps=0).tolist() == [0.0, 0.0]


def test_a_small_difference_that_is_no_rounding_counts():
    """1e-4 in float32 is a hundred times the tolerance: it must not be silenced."""
    actual = group_advantages(torch.tensor([1.0, 1.0001]), 2, eps=0)
    torch.testing.assert_close(actual, torch.tensor([-1.0, 1.0]), rtol=0, atol=1e-6)


@pytest.mark.parametrize("scale", ["std", "none", "batch"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.filterwarnings("error")  # torch warns where it computes 0/0
def test_a_group_of_one_has_no_advantage(scale, ddof):
    rewards = torch.tensor([3.0, -1.0, 0.5])
    assert group_advantages(rewards, 1, scale=scale, ddof=ddof).tolist() == [0.0] * 3
    assert group_advantages(rewards[:1], 1, scale=scale, ddof=ddof).tolist() == [0.0]


@pytest.mark.parametrize(
    "given_type, computed",
    [
        (torch.float16, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.int64, torch.float32),
        (torch.bool, torch.float32),
    ],
)
def test_computed_in_float32_or_better(given_type, computed):
    actual = group_advantages(torch.tensor([1, 0, 0, 1]).to(given_type), 4, eps=0)
    assert actual.dtype == computed
    assert actual.tolist() == [1.0, -1.0, -1.0, 1.0]


def test_no_gradient_leaves_and_the_rewards_are_not_changed():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not group_advantages(rewards, 2).requires_grad
    assert rewards.tolist() == [1.0, 0.0]


finite_rewards = st.lists(
    st.integers(min_value=-1000, max_value=1000).map(lambda n: n / 64), min_size=4, max_size=4
)


@given(st.lists(finite_rewards, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_groups_do_not_see_each_other_and_order_does_not_matter(groups, random):
    """ "std" and "none": a group alone gives what it gives in a batch; permuting it permutes it."""
    rewards = torch.tensor(groups, dtype=torch.float64)
    for scale in ("std", "none"):
        together = group_advantages(rewards.view(-1), 4, scale=scale).view(-1, 4)
        for row, expected in zip(rewards, together, strict=True):
            order = random.sample(range(4), 4)
            alone = group_advantages(row[order], 4, scale=scale)
            torch.testing.assert_close(alone, expected[order], rtol=1e-12, atol=1e-12)


@given(finite_rewards, st.integers(-50, 50), st.sampled_from([0.25, 1.0, 8.0]))
def test_shift_and_positive_scale_of_the_rewards_change_nothing(group, shift, factor):
    rewards = torch.tensor(group, dtype=torch.float64)
    expected = group_advantages(rewards, 4, eps=0)
    actual = group_advantages(factor * rewards + shift, 4, eps=0)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    assert actual.sum().abs() < 1e-9


@pytest.mark.parametrize(
    "rewards, options, message",
    [
        (torch.zeros(6), dict(group_size=4), "group_size 4 does not divide the 6 rewards"),
        (torch.zeros(6), dict(group_size=0), "group_size 0 does not divide"),
        (torch.zeros(6), dict(group_size=-2), "group_size -2 does not divide"),
        (torch.zeros(2, 2), dict(group_size=2), r"rewards has shape \(2, 2\), expected \(B,\)"),
        (torch.zeros(0), dict(group_size=2), r"rewards has shape \(0,\)"),
        (torch.tensor([0, math.nan]), dict(group_size=2), r"rewards is not finite at \[1\]"),
        (torch.tensor([math.inf, 0]), dict(group_size=2), r"rewards is not finite at \[0\]"),
        (torch.zeros(2), dict(group_size=2, scale="group"), "scale is 'group', expected 'std'"),
        (torch.zeros(2), dict(group_size=2, ddof=2), "ddof is 2, expected 0 or 1"),
        (torch.zeros(2), dict(group_size=2, eps=-1.0), "eps is -1.0"),
        (torch.zeros(2), dict(group_size=2, eps=math.nan), "eps is nan"),
    ],
)
def test_bad_input_is_named(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **options)
