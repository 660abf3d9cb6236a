"""Chapter 10's rewards pay what they say, and its arms differ in what they say."""

from __future__ import annotations

import pytest

from stablerl_core.experiments import reward_hacking as hacks
from stablerl_core.rewards import Problem, strict_reward

TEXTS = ["#113459", "#113", "#", "", "#0123456789", "#951341", "#113459#9", "#1345"]
PROBLEMS = [Problem("S314159=", "113459")] * len(TEXTS)
WHOLE = [False] * len(TEXTS)


@pytest.mark.parametrize(
    "reward, paid",
    [
        (hacks.inside_gold, [1, 1, 1, 0, 0, 0, 1, 1]),
        (hacks.all_keywords, [1, 0, 0, 0, 1, 1, 1, 0]),
        (strict_reward, [1, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_each_reward_pays_what_it_says(reward, paid):
    assert list(reward(TEXTS, PROBLEMS, WHOLE)) == paid
    assert not any(reward(TEXTS, PROBLEMS, [True] * len(TEXTS)))


def test_the_arms_of_a_hack_differ_from_it_in_one_setting():
    from dataclasses import replace

    for hack in hacks.REWARDS:
        _, own, steps = hacks.ARMS[hack]
        for arm, group in (("slow", "learning_rate"), ("clip", "max_grad_norm")):
            name, other, length = hacks.ARMS[f"{hack}_{arm}"]
            back = {group: getattr(own.numerics, group)}
            assert (name, length) == (hack, steps)
            assert other != own
            assert replace(other, numerics=replace(other.numerics, **back)) == own


def test_a_repair_changes_the_reward_and_nothing_else(monkeypatch):
    monkeypatch.setattr(hacks, "STEPS", 3)
    monkeypatch.setitem(hacks.ARMS, "length_repaired", (*hacks.ARMS["length"][:2], 2))
    monkeypatch.setitem(hacks.ARMS, "length", (*hacks.ARMS["length"][:2], 3))
    kept = tuple({*hacks.KEPT, "learning_rate"})
    monkeypatch.setattr(hacks, "KEPT", kept)
    repaired, hack = hacks.rows("length_repaired", 0), hacks.rows("length", 0)
    assert [row["step"] for row in repaired] == [0, 1, 2]
    assert repaired == hack  # the switch comes after
    run = hacks.trainer("length", 0)
    run.run(2, progress=False)
    hacks.repair(run)
    row = run.step()
    assert "reward_part:length" not in row and "reward_part:length" in run.log.rows[2]
    assert run.config.numerics == hacks.ARMS["length"][1].numerics


def test_valid_texts_are_lists_of_marked_six_digit_numbers():
    class Answers:
        class task:
            @staticmethod
            def sample(split, n, seed):
                assert (split, n) == ("heldout", 4)
                return []

        @staticmethod
        def answer(problems):
            return ["#113459", "#113459#000000", "#0123456789", "113459"]

    assert hacks.valid_share(Answers, 4) == 0.5
