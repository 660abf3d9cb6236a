"""Chapter 11's exams: what is leaked, what is changed, what the probe shows."""

from __future__ import annotations

import random

import pytest

from stablerl_core.experiments import contamination as chapter
from stablerl_core.rewards import exact_duplicates, ngram_overlap, split_of, task_by_name


@pytest.mark.parametrize("size", [4, 16, 64])
def test_leaked_problems_are_held_out_ones_and_all_different(size):
    pool = chapter.leaked(size, seed=3)
    assert len({p.gold for p in pool}) == len(pool) == size
    assert {split_of(p.gold) for p in pool} == {"heldout"}


@pytest.mark.parametrize("size", [4, 64])
def test_the_exams_are_what_their_names_say(size):
    pool = chapter.leaked(size, seed=1)
    sets, known = chapter.exams(pool, seed=1), {p.gold for p in pool}
    assert {len(problems) for problems in sets.values()} == {chapter.TRIES}
    assert set(sets["leaked"]) == set(pool)
    pairs = zip(sets["leaked"], sets["reordered"], sets["changed"], strict=True)
    for asked, other, new in pairs:
        assert other.gold == asked.gold and other.prompt != asked.prompt
        assert new.gold not in known
        assert sum(a != b for a, b in zip(asked.prompt, new.prompt, strict=True)) == 1
    assert not known & {p.gold for p in sets["clean"]}
    for problem in (p for problems in sets.values() for p in problems):
        assert "".join(sorted(problem.prompt[1:-1])) == problem.gold


def test_equal_digits_have_no_other_order():
    alone = chapter._asked("777777")
    assert chapter.reordered(alone, random.Random(0)) == alone


def test_a_pool_is_drawn_evenly_and_its_held_out_problems_are_the_task_s():
    pool = chapter.Pool(chapter.leaked(4, 0), task_by_name("sort"))
    drawn = pool.sample("train", 8, seed=5)
    assert exact_duplicates([p.prompt for p in drawn]) and len({p.prompt for p in drawn}) == 4
    assert sorted(drawn, key=str) == sorted(2 * list(pool.problems), key=str)
    assert drawn == pool.sample("train", 8, 5) != pool.sample("train", 8, 6)
    assert pool.sample("heldout", 9, 0) == task_by_name("sort").sample("heldout", 9, 0)


def test_overlap_sees_the_leak_and_not_the_other_order():
    sets = chapter.exams(chapter.leaked(16, 0), 0)
    trained = [p.prompt for p in chapter.trainer(16).task.sample("train", 64, 0)]
    shares = {
        name: ngram_overlap(trained, [p.prompt for p in problems], n=8, unit="char")
        for name, problems in sets.items()
    }
    assert min(shares["leaked"]) == 1 and max(shares["clean"]) == 0
    assert sum(s == 1 for s in shares["reordered"]) < 0.1 * chapter.TRIES


def test_imitating_the_leaked_texts_makes_their_questions_continue():
    before, after = chapter.seen_before(0)
    assert before["continued"] == 0 and after["continued"] > 0.5
    assert after["leaked"] > before["leaked"] + 0.1


def test_a_run_has_its_marks():
    rows = chapter.rows(4, 0.0, seed=0, steps=10)
    assert [row["step"] for row in rows] == [0, 10]
    exams = {"leaked", "reordered", "changed", "clean", "parrot", "continued"}
    assert exams <= set(rows[0]) and {"reward", "entropy"} <= set(rows[1])
