"""Groups: built from ids alone, their silence explained, failures left out, exact chances."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import group_advantages
from stablerl_core.rewards import (
    draws_per_group,
    group_report,
    group_rows,
    group_size_for,
    in_group_order,
    no_signal_chance,
    usable_rows,
)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_siblings_meet_in_whatever_order_they_come_back(names, shuffle):
    ids = [name for name in sorted(set(names)) for _ in range(3)]
    rows = list(range(len(ids)))
    shuffle.shuffle(rows)
    came = [ids[row] for row in rows]
    order = in_group_order(came)
    assert sorted(order) == list(range(len(ids)))
    for start in range(0, len(ids), 3):
        assert len({came[row] for row in order[start : start + 3]}) == 1


def test_one_prompt_with_two_gold_answers_is_two_groups():
    """Merged by their text, 16 wrong and 16 right answers had advantages of ±16/31; split, none."""
    rewards, ids = torch.tensor([0.0] * 16 + [1.0] * 16), ["row 1"] * 16 + ["row 2"] * 16
    merged = group_advantages(rewards, 32, scale="none", baseline="leave_one_out")
    assert merged.unique().tolist() == pytest.approx([-16 / 31, 16 / 31])
    report = group_report(rewards, ids)
    assert (report.mixed, report.dead, report.solved, report.silent) == (0, 1, 1, 1.0)
    order = in_group_order(ids)
    assert not group_advantages(rewards[order], 16).any()


def test_an_id_for_each_completion_or_none_at_all_is_refused():
    with pytest.raises(ValueError, match="all 4 ids differ"):
        group_rows(["a", "b", "c", "d"])
    with pytest.raises(ValueError, match=r"ids\[1\] is None"):
        group_rows(["a", None])
    with pytest.raises(ValueError, match="from 1 to 2"):
        in_group_order(["a", "a", "b"])


def test_silent_groups_are_told_apart_by_their_level():
    groups = {"mixed": [0, 1], "solved": [1, 1], "dead": [0, 0], "tied": [0.5, 0.5], "single": [1]}
    ids = [name for name, values in groups.items() for _ in values]
    report = group_report(torch.tensor([float(v) for vs in groups.values() for v in vs]), ids)
    assert all(getattr(report, name) == 1 for name in groups)
    assert report.total == 5 and report.silent == pytest.approx(0.8)
    signed = group_report(torch.tensor([-1.0, -1, 1, 1]), ["a", "a", "b", "b"], lowest=-1)
    assert (signed.dead, signed.solved) == (1, 1)


def test_rounding_noise_in_a_reward_is_no_signal():
    third = torch.tensor([1 / 3, 1 / 3 + 1e-8, 1.0, 1.0 - 1e-8], dtype=torch.float64)
    report = group_report(third, ["a", "a", "b", "b"])
    assert (report.mixed, report.tied, report.solved) == (0, 1, 1)


@pytest.mark.parametrize("rewards", [[1.0, math.nan], [1.0], [[1.0, 0.0]]])
def test_rewards_that_are_missing_or_not_finite_are_refused(rewards):
    with pytest.raises(ValueError, match="one finite number each"):
        group_report(torch.tensor(rewards), ["a", "a"])


def test_a_failed_environment_is_no_wrong_answer():
    ids, failed = ["a"] * 4 + ["b"] * 4, [0, 1, 0, 0, 1, 1, 0, 0]
    usable = usable_rows(ids, failed, 4)
    assert usable.rows == [0, 2, 3, 0]  # b keeps half, which is not more than half
    assert (usable.failures, usable.dropped_groups) == (3, 1)
    rewards = torch.tensor([1.0, 0, 1, 1])  # as a wrong answer the failure would give a signal
    assert group_advantages(rewards, 4).any()
    assert not group_advantages(rewards[usable.rows], 4).any()


def test_a_group_that_lost_rows_before_counts_them_as_lost():
    assert usable_rows(["a"] * 2 + ["b"] * 3, [False] * 5, 4).rows == [2, 3, 4, 2]
    with pytest.raises(ValueError, match="3 entries for 2 ids"):
        usable_rows(["a", "a"], [False] * 3, 2)
    with pytest.raises(ValueError, match="has 3 completions, group_size=2"):
        usable_rows(["a"] * 3, [False] * 3, 2)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_chance_of_no_signal_is_the_sum_over_all_outcomes(p, size):
    chance = math.fsum(
        math.prod(p if right else 1 - p for right in outcome)
        for outcome in itertools.product((0, 1), repeat=size)
        if len(set(outcome)) == 1
    )
    assert no_signal_chance(p, size) == pytest.approx(chance, abs=1e-15)


@given(st.floats(0.02, 0.98), st.floats(0.05, 0.95))
def test_the_group_size_is_the_smallest_that_suffices(p, chance):
    size = group_size_for(p, chance=chance)
    assert 1 - no_signal_chance(p, size) >= chance
    assert size == 2 or 1 - no_signal_chance(p, size - 1) < chance


def test_group_size_is_symmetric_and_bounded():
    assert group_size_for(0.5) == 5  # 1 − 2/32 = 0.94, with 4: 0.875
    assert group_size_for(0.1) == group_size_for(0.9) == 22
    assert group_size_for(0.0, largest=64) == group_size_for(1.0, largest=64) == 64


def test_draws_for_a_full_batch_average_over_problems_before_the_division():
    assert draws_per_group([0.5], 2) == pytest.approx(2)
    assert draws_per_group([0.5, 0.0], 2) == pytest.approx(4)
    assert draws_per_group([0.0, 1.0], 8) == math.inf


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: no_signal_chance(1.1, 2), "pass_rate=1.1"),
        (lambda: no_signal_chance(0.5, 0), "group_size=0"),
        (lambda: group_size_for(0.5, chance=1.0), "chance=1.0"),
        (lambda: draws_per_group([], 8), "empty"),
    ],
)
def test_bad_numbers_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
