"""Baselines and scales of group advantages: noise, frameworks' conventions, refusals.

Values for every group and expected gradients are in tests/exact/test_enumerated_advantages.py.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import group_advantages

BASELINES = ["mean", "leave_one_out", "quantile"]
SCALES = ["std", "none", "batch", "iqr"]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("eps", [1e-30, 1e-6])
@pytest.mark.parametrize(
    "group",
    [
        [0.7, 0.7, 0.7],
        [0.1 + 0.2, 0.3, 0.3],  # differ in the last bit
        [-(0.1 + 0.2), -0.3, -0.3],
        [1e30 * (0.1 + 0.2), 1e30 * 0.3, 1e30 * 0.3],
        [sum([0.1] * 10), 1.0, 1.0],
    ],
)
def test_an_all_equal_group_gives_exact_zeros(group, scale, eps, baseline):
    """For every baseline and scale, beside a group with a signal and in a batch without one."""
    rewards = torch.tensor([*group, 1.0, 0.0, 0.5], dtype=torch.float64)
    options = dict(scale=scale, eps=eps, baseline=baseline)
    actual = group_advantages(rewards, 3, **options)
    assert actual[:3].tolist() == [0.0] * 3
    assert torch.isfinite(actual).all() and actual[3] > 0 > actual[4]
    alone = torch.tensor(group + group[::-1], dtype=torch.float64)
    assert group_advantages(alone, 3, **options).tolist() == [0.0] * 6


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
def test_rounding_inside_a_group_with_a_signal_stays_rounding(baseline, scale):
    """Two rewards that are 0.3 up to the last bit: their advantages differ by no more than that."""
    rewards = torch.tensor([0.1 + 0.2, 0.3, 0.3, 1.0, 0.0, 0.5], dtype=torch.float64)
    actual = group_advantages(rewards, 6, scale=scale, baseline=baseline)
    torch.testing.assert_close(actual[0], actual[1], rtol=0, atol=1e-15)
    assert actual[3] > actual[1] > actual[4]


@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.filterwarnings("error")
def test_a_group_of_one_has_no_advantage(baseline, scale):
    rewards = torch.tensor([3.0, -1.0, 0.5])
    for batch in (rewards, rewards[:1]):
        actual = group_advantages(batch, 1, scale=scale, baseline=baseline, eps=1e-30, ddof=1)
        assert actual.tolist() == [0.0] * len(batch)


def test_leave_one_out_by_hand():
    rewards = torch.tensor([4.0, 1.0, 1.0, 0.0])
    actual = group_advantages(rewards, 2, scale="none", baseline="leave_one_out")
    assert actual.tolist() == [3.0, -3.0, 1.0, -1.0]


def test_the_quantile_is_an_entry_of_the_group_or_interpolated():
    """Five of eight wrong: K = .6 is a wrong answer by counting, .2 of the way to a right one by
    the line that torch.quantile draws, which is what QAE's code calls."""
    rewards = torch.tensor([0.0] * 5 + [1.0] * 3, dtype=torch.float64)
    options = dict(scale="none", baseline="quantile", quantile=0.6)
    assert group_advantages(rewards, 8, **options).tolist() == rewards.tolist()
    lined = group_advantages(rewards, 8, **options, interpolate=True)
    torch.testing.assert_close(lined, rewards - torch.quantile(rewards, 0.6))
    assert lined[0].item() == pytest.approx(-0.2)


def test_whole_numbers_of_completions_survive_the_float_product():
    """K · G = .07 · 100 is 7.000000000000001 in floats and means the seventh reward."""
    rewards = torch.arange(100, dtype=torch.float64)
    actual = group_advantages(rewards, 100, scale="none", baseline="quantile", quantile=0.07)
    assert 0.07 * 100 > 7 and (rewards - actual).unique().tolist() == [6.0]


def test_the_interquartile_range_explodes_on_a_rare_success():
    """A quantile-based normalisation, on one right answer of eight: the quartiles coincide."""
    rewards = torch.tensor([1.0] + [0.0] * 7, dtype=torch.float64)
    options = dict(scale="iqr", baseline="quantile", quantile=0.5)
    assert group_advantages(rewards, 8, **options).tolist() == [1e6] + [0.0] * 7
    outlier = torch.tensor([0.0, 1.0, 2.0, 3.0, 1000.0], dtype=torch.float64)
    actual = group_advantages(outlier, 5, **options, eps=1e-30)
    assert actual.tolist() == [-1.0, -0.5, 0.0, 0.5, 499.0]  # the others keep their distances


rewards_of_two_groups = st.lists(st.integers(-64, 64).map(lambda n: n / 64), min_size=8, max_size=8)


@given(rewards_of_two_groups, st.permutations(range(4)))
def test_order_and_the_other_groups_do_not_matter(rewards, order):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    for baseline in BASELINES:
        for scale in ("std", "none", "iqr"):
            options = dict(scale=scale, baseline=baseline)
            together = group_advantages(rewards, 4, **options)[:4]
            alone = group_advantages(rewards[:4][order], 4, **options)
            torch.testing.assert_close(alone, together[order], rtol=1e-9, atol=1e-9)


@given(rewards_of_two_groups, st.integers(-8, 8), st.sampled_from([0.25, 8.0]))
def test_shift_and_positive_scale_change_nothing(rewards, shift, factor):
    rewards = torch.tensor(rewards, dtype=torch.float64)
    for baseline in BASELINES:
        options = dict(scale="std", baseline=baseline, eps=0)
        expected = group_advantages(rewards, 4, **options)
        actual = group_advantages(factor * rewards + shift, 4, **options)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("baseline", BASELINES)
def test_computed_in_float32(dtype, baseline):
    rewards = torch.tensor([1, 0, 0, 1, 1, 1, 1, 0]).to(dtype)
    actual = group_advantages(rewards, 4, baseline=baseline)
    assert actual.dtype == torch.float32
    torch.testing.assert_close(
        actual.double(), group_advantages(rewards.double(), 4, baseline=baseline)
    )


def test_the_rewards_are_not_changed():
    rewards = torch.tensor([1.0, 0.0, 0.5])
    group_advantages(rewards, 3, baseline="quantile")
    assert rewards.tolist() == [1.0, 0.0, 0.5]


# What frameworks compute, in their own words: re-typed for numpy


def framework_rewards():
    return np.random.default_rng(0).normal(size=(3, 4))


def agree(expected, rtol=1e-12, **options):
    actual = group_advantages(torch.tensor(framework_rewards()).view(-1), 4, **options)
    np.testing.assert_allclose(actual.view(3, 4).numpy(), expected, rtol=rtol)


def test_trl_divides_by_the_sample_deviation_plus_1e_4():
    """`scale_rewards="group"`, "batch" and "none"; nanstd has ddof 1, its G/(G − 1) in float32."""
    nanstd = pytest.importorskip("trl.trainer.grpo_trainer").nanstd
    rewards = framework_rewards()
    centred = rewards - rewards.mean(1, keepdims=True)
    group = nanstd(torch.tensor(rewards), dim=1, keepdim=True).numpy()
    agree(centred / (group + 1e-4), 1e-7, ddof=1, eps=1e-4)
    batch = nanstd(torch.tensor(rewards).view(-1)).item()
    agree(centred / (batch + 1e-4), 1e-7, scale="batch", ddof=1, eps=1e-4)
    agree(centred, scale="none")


def test_verl_divides_by_the_sample_deviation_plus_1e_6():
    """`compute_grpo_outcome_advantage`: torch.std, so ddof 1."""
    rewards = framework_rewards()
    centred = rewards - rewards.mean(1, keepdims=True)
    agree(centred / (rewards.std(1, ddof=1, keepdims=True) + 1e-6), ddof=1)


def test_our_default_differs_from_both():
    rewards = torch.tensor([1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    best = [
        group_advantages(rewards, 4, **options)[0].item()
        for options in ({}, dict(ddof=1, eps=1e-4), dict(ddof=1))
    ]
    assert best == pytest.approx(
        [0.5 / (0.5 + 1e-6), 0.5 / (3**-0.5 + 1e-4), 0.5 / (3**-0.5 + 1e-6)], rel=1e-12
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(baseline="median"), "baseline is 'median', expected 'mean', 'leave_one_out'"),
        (dict(scale="range"), "scale is 'range', expected 'std', 'none', 'batch' or 'iqr'"),
        (dict(quantile=0.0), "quantile is 0.0, expected a number between 0 and 1"),
        (dict(quantile=1.0), "quantile is 1.0"),
        (dict(quantile=math.nan), "quantile is nan"),
        (dict(scale="iqr", eps=0.0), "eps is 0, expected > 0 with scale 'iqr'"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(4), 2, **options)
