"""Generalised advantage estimation: the recursion, masks, λ by length, types, refusals.

Expected gradients and the bias of λ < 1 are in tests/exact/test_enumerated_advantages.py.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.policy import gae, length_adaptive_lambda, value_targets

INF, NAN = math.inf, math.nan


def batch(seed=0, rows=4, columns=6):
    """Token rewards, values and a right-padded mask with lengths 6, 1, 0, 4, …"""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    lengths = torch.tensor([columns, 1, 0, columns - 2] * rows)[:rows]
    return rewards, values, torch.arange(columns) < lengths[:, None]


def by_the_sum(rewards, values, lam, gamma):
    """Â_t = Σ_k (γλ)^k δ_{t+k} for one sequence without padding, term by term."""
    length = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(length)]
    return [
        sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, length)) for t in range(length)
    ]


@pytest.mark.parametrize("lam, gamma", [(0.95, 1.0), (0.0, 1.0), (1.0, 0.9), (0.7, 0.8)])
def test_the_sum_of_td_errors(lam, gamma):
    rewards, values, mask = batch()
    actual = gae(rewards, values, mask, lam=lam, gamma=gamma)
    for i, length in enumerate(mask.sum(-1).tolist()):
        row = by_the_sum(rewards[i, :length].tolist(), values[i, :length].tolist(), lam, gamma)
        expected = torch.tensor(row + [0.0] * (6 - length), dtype=torch.float64)
        torch.testing.assert_close(actual[i], expected, rtol=1e-12, atol=1e-14)


def test_a_reward_far_away_decays_with_lambda():
    """An untrained critic and λ = .95: a hundred tokens before the end .006 of it is left."""
    mask = torch.ones(1, 101, dtype=torch.bool)
    advantages = gae(torch.ones(1).double(), torch.zeros(1, 101).double(), mask, lam=0.95)
    assert advantages[0, 0].item() == pytest.approx(0.95**100, rel=1e-12)
    assert advantages[0, 0].item() == pytest.approx(0.006, abs=1e-4)
    assert advantages[0, -1] == 1


def test_one_reward_a_completion_is_paid_at_its_last_counted_token():
    _, values, mask = batch()
    mask[3, 1] = False  # a hole must not be taken for the end
    terminal = torch.tensor([1.0, -2.0, 5.0, 0.5], dtype=torch.float64)
    spread = torch.zeros(4, 6, dtype=torch.float64)
    for row, at in ((0, 5), (1, 0), (3, 3)):  # row 2 counts nothing, its reward is lost
        spread[row, at] = terminal[row]
    torch.testing.assert_close(
        gae(terminal, values, mask, lam=0.9), gae(spread, values, mask, lam=0.9), rtol=0, atol=0
    )


def test_holes_are_stepped_over():
    """Tokens that do not count, a tool's answer: as if they were not there."""
    rewards, values, _ = batch(rows=1, columns=7)
    mask = torch.tensor([[False, True, True, False, False, True, True]])
    with_holes = gae(rewards, values, mask, lam=0.8, gamma=0.9)
    whole = torch.ones(1, 4, dtype=torch.bool)
    without = gae(rewards[mask][None], values[mask][None], whole, lam=0.8, gamma=0.9)
    assert torch.equal(with_holes[mask][None], without)
    assert torch.equal(with_holes[~mask], torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("garbage", [NAN, INF, -INF, 1e300])
def test_what_does_not_count_is_not_read(garbage):
    rewards, values, mask = batch()
    mask[0, 2] = False
    expected = gae(rewards, values, mask, lam=0.8)
    dirty = [x.masked_fill(~mask, garbage) for x in (rewards, values)]
    assert torch.equal(gae(*dirty, mask, lam=0.8), expected)
    terminal = torch.tensor([1.0, 2.0, garbage, 3.0], dtype=torch.float64)  # row 2 is empty
    assert torch.isfinite(gae(terminal, values, mask, lam=0.8)).all()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 3), st.integers(0, 3), st.permutations(range(4)))
def test_padding_on_either_side_splits_and_order_change_nothing(seed, before, after, order):
    rewards, values, mask = batch(seed)
    lam = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    expected = gae(rewards, values, mask, lam=lam)
    padded = [torch.nn.functional.pad(x, (before, after), value=NAN) for x in (rewards, values)]
    wide = gae(*padded, torch.nn.functional.pad(mask, (before, after)), lam=lam)
    assert torch.equal(wide[:, before : before + 6], expected)
    for i in order:  # each row alone, with its own λ as a number
        row = slice(i, i + 1)
        alone = gae(rewards[row], values[row], mask[row], lam=lam[i].item())
        torch.testing.assert_close(alone, expected[row], rtol=1e-12, atol=1e-14)
    moved = gae(rewards[order], values[order], mask[order], lam=lam[order])
    assert torch.equal(moved, expected[order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_computed_in_float32_or_better(dtype):
    rewards, values, mask = batch()
    rewards, values = rewards.to(dtype), values.to(dtype)
    actual = gae(rewards, values, mask, lam=0.9)
    assert actual.dtype == torch.float32
    expected = gae(rewards.double(), values.double(), mask, lam=0.9)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-6)
    assert gae(rewards, values.double(), mask, lam=0.9).dtype == torch.float64


def test_detached_and_the_inputs_are_left_alone():
    rewards, values, mask = batch()
    copies = [x.clone() for x in (rewards, values, mask)]
    values.requires_grad_()
    lam = torch.full((4,), 0.5, requires_grad=True)
    assert not gae(rewards, values, mask, lam=lam).requires_grad
    assert all(torch.equal(x, y) for x, y in zip((rewards, values, mask), copies, strict=True))


def test_nothing_counts():
    rewards, values, mask = batch()
    for shape in ((4, 6), (4, 0), (0, 6)):
        none = torch.zeros(shape, dtype=torch.bool)
        actual = gae(torch.ones(shape[0]), torch.ones(shape), none, lam=0.9)
        assert actual.shape == shape and not actual.any()


def test_value_targets_are_discounted_returns():
    rewards = torch.tensor([[1.0, 2.0, 4.0]])
    mask = torch.tensor([[True, True, True]])
    assert value_targets(rewards, mask, gamma=0.5).tolist() == [[3.0, 4.0, 4.0]]
    assert value_targets(torch.tensor([7.0]), mask[:, :2]).tolist() == [[7.0, 7.0]]
    rewards, values, mask = batch()
    targets = value_targets(rewards, mask, gamma=0.9)
    by_gae = gae(rewards, values, mask, lam=1.0, gamma=0.9) + values
    torch.testing.assert_close(targets[mask], by_gae[mask], rtol=1e-12, atol=1e-14)
    assert not targets[~mask].any()


def test_vector_13_length_adaptive_lambda():
    lengths = torch.tensor([0, 1, 10, 20, 100, 1000, 16_000])
    expected = torch.tensor([0, 0, 0, 0, 0.8, 0.98, 0.99875])  # 1 − 1/(.05 · 10) is −1
    torch.testing.assert_close(length_adaptive_lambda(lengths), expected, rtol=1e-6, atol=1e-7)
    assert length_adaptive_lambda(torch.tensor([4, 0]), alpha=1.0).tolist() == [0.75, 0.0]
    assert length_adaptive_lambda(torch.tensor([0]), alpha=2.0).item() == 0.0  # not that of 1


zeros, here = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(rewards=torch.zeros(3)), r"rewards has shape \(3,\), expected \(2,\) or \(2, 3\)"),
        (dict(rewards=torch.zeros(2, 1)), r"rewards has shape \(2, 1\)"),
        (dict(values=torch.zeros(3)), r"values has shape \(3,\), expected \(B, T\)"),
        (dict(values=torch.zeros(2, 4)), r"mask has shape \(2, 3\), expected \(2, 4\)"),
        (dict(mask=here.long()), "mask has dtype torch.int64"),
        (dict(values=zeros * NAN), r"values is nan at \[0, 0\] \(6 of 6"),
        (dict(rewards=torch.tensor([0.0, INF])), r"rewards is inf at \[1\]"),
        (dict(rewards=zeros * NAN), r"rewards is nan at \[0, 0\]"),
        (dict(rewards=torch.zeros(2).long()), "rewards has dtype torch.int64"),
        (dict(lam=1.01), "lam is 1.01, expected a number in"),
        (dict(lam=NAN), "lam is nan"),
        (dict(lam=torch.zeros(3)), r"lam has shape \(3,\), expected one number or \(2,\)"),
        (dict(lam=torch.tensor([0.5, -0.1])), "lam has .* expected numbers in"),
        (dict(gamma=-0.1), "gamma is -0.1"),
    ],
)
def test_bad_input_is_named(change, message):
    given = dict(rewards=torch.zeros(2), values=zeros, mask=here, lam=0.9) | change
    with pytest.raises(ValueError, match=message):
        gae(given.pop("rewards"), given.pop("values"), given.pop("mask"), **given)


@pytest.mark.parametrize(
    "lengths, alpha, message",
    [
        (torch.ones(2, 3), 0.05, r"lengths has shape \(2, 3\), expected \(B,\)"),
        (torch.tensor([3, -1]), 0.05, "lengths has -1"),
        (torch.tensor([3]), 0.0, "alpha is 0.0"),
    ],
)
def test_bad_lengths_are_named(lengths, alpha, message):
    with pytest.raises(ValueError, match=message):
        length_adaptive_lambda(lengths, alpha)
