"""Curricula: the mix that is drawn, how it follows the policy, what is set aside."""

from collections import Counter

import pytest

from stablerl_core.rewards import Levels, MovingLevels, StagedLevels, task_by_name

TASKS = {f"sort {n}": task_by_name("sort", {"digits": n}) for n in (2, 4, 6)}
EASY, MIDDLE, HARD = TASKS


def observed(curriculum, rates, tries=100):
    """Tell a curriculum that each level was tried so often with such a pass rate."""
    for level, rate in rates.items():
        problem = Levels({level: TASKS[level]}).sample("train", 1, 0)[0]
        right = round(rate * tries)
        curriculum.observe([problem] * tries, [1.0] * right + [0.0] * (tries - right))
    return curriculum


def test_levels_are_drawn_in_their_shares_and_repeatably():
    mixed = Levels(TASKS, {EASY: 3.0, HARD: 1.0})
    drawn = mixed.sample("train", 400, seed=7)
    count = Counter(problem.level for problem in drawn)
    assert set(count) == {EASY, HARD} and 260 < count[EASY] < 340
    assert drawn == mixed.sample("train", 400, seed=7) != mixed.sample("train", 400, seed=8)
    assert all(len(p.gold) == int(p.level[-1]) for p in drawn)


def test_held_out_problems_come_from_all_levels_whatever_is_trained():
    count = Counter(p.level for p in Levels(TASKS, {EASY: 1.0}).sample("heldout", 300, 0))
    assert min(count[level] for level in TASKS) > 60


def test_a_curriculum_moves_to_the_level_in_the_bucket_and_goes_on_when_it_is_solved():
    moving = MovingLevels(TASKS)
    assert moving.mix() == pytest.approx(dict.fromkeys(TASKS, 1 / 3))
    observed(moving, {EASY: 0.9, MIDDLE: 0.5, HARD: 0.0})
    assert moving.mix() == pytest.approx({EASY: 0.1, MIDDLE: 0.8, HARD: 0.1})
    for _ in range(10):
        observed(moving, {EASY: 0.95, MIDDLE: 0.95, HARD: 0.4})
    assert moving.mix() == pytest.approx({EASY: 0.05, MIDDLE: 0.05, HARD: 0.9})


def test_without_a_level_in_the_bucket_the_closest_one_is_drawn():
    moving = observed(MovingLevels(TASKS), {EASY: 0.25, MIDDLE: 0.1, HARD: 0.0})
    assert moving.mix() == pytest.approx({EASY: 0.9 + 0.1 / 3, MIDDLE: 0.1 / 3, HARD: 0.1 / 3})
    done = observed(MovingLevels(TASKS), {EASY: 1.0, MIDDLE: 0.99, HARD: 0.8})
    assert max(done.mix(), key=done.mix().get) == HARD


def test_old_counts_fade():
    moving = MovingLevels({EASY: TASKS[EASY]}, memory=0.5)
    observed(moving, {EASY: 0.0})
    observed(moving, {EASY: 1.0})
    assert moving.rates()[EASY].rate == pytest.approx(100 / 150)
    forgetful = MovingLevels({EASY: TASKS[EASY]}, memory=0.0)
    observed(observed(forgetful, {EASY: 0.0}), {EASY: 1.0})
    assert forgetful.rates()[EASY].rate == 1


def test_a_fixed_order_takes_each_level_for_its_steps():
    staged, seen = StagedLevels(TASKS, steps_each=2), []
    for _ in range(8):
        seen.append({p.level for p in staged.sample("train", 5, seed=0)})
        staged.observe([], [])
    assert seen == [{EASY}] * 2 + [{MIDDLE}] * 2 + [{HARD}] * 4


@pytest.mark.parametrize(
    "make, match",
    [
        (lambda: Levels({}), "levels is empty"),
        (lambda: Levels(TASKS, {"sort 9": 1.0}), "sort 9"),
        (lambda: Levels(TASKS, {EASY: -1.0, HARD: 2.0}), "expected weights"),
        (lambda: Levels(TASKS, {EASY: 0.0}), "expected weights"),
        (lambda: MovingLevels(TASKS, low=0.8), "low=0.8"),
        (lambda: MovingLevels(TASKS, replay=0.6, explore=0.5), "replay=0.6"),
    ],
)
def test_impossible_mixes_are_named(make, match):
    with pytest.raises(ValueError, match=match):
        make()
