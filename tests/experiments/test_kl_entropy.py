"""Chapter 20's pools: fixed problems, chosen as a phase begins, and held-out ones untouched."""

from dataclasses import replace

import pytest

from stablerl_core.experiments.kl_entropy import KL_ENTROPY, OnPools, few, pass_rates
from stablerl_core.rewards import strict_reward
from stablerl_core.training import DataConfig, TrainerConfig

DATA = DataConfig(prompts=3, group_size=2, eval_prompts=8, max_new_tokens=9)
FIRST, THEN = TrainerConfig(steps=2, data=DATA), TrainerConfig(steps=4, data=DATA)
TOY = OnPools("toy", "", {"x": [FIRST, THEN]}, pools={"x": [few, None]})


def asked(trainer, steps=None) -> list[list[str]]:
    """The prompts of each step that an arm trains."""
    seen, paid = [], []

    def reward(texts, problems, cut):
        seen.append([p.prompt for p in problems][:: DATA.group_size])
        paid.append(strict_reward(texts, problems, cut))
        return paid[-1]

    trainer.reward = reward
    TOY.train("x", trainer, steps, progress=False)
    return seen


def test_a_pool_is_asked_again_and_the_whole_task_is_not():
    trainer = TOY.trainer("x")
    whole = trainer.task
    one, two, three, four = map(set, asked(trainer))
    assert one == two and len(one) == 3
    assert not one & three and three != four and trainer.task is whole


def test_stopping_and_going_on_asks_the_same_problems():
    stopped = TOY.trainer("x")
    before = asked(stopped, steps=1)
    assert before + asked(stopped) == asked(TOY.trainer("x"))


def test_other_seeds_have_other_pools():
    pools = [few(TOY.trainer("x", seed)).problems for seed in (0, 0, 1)]
    assert pools[0] == pools[1] != pools[2]


def test_a_pool_keeps_the_held_out_problems_and_its_size():
    trainer = TOY.trainer("x")
    pool = few(trainer)
    assert pool.sample("heldout", 5, 0) == trainer.task.sample("heldout", 5, 0)
    assert pool.name == trainer.task.name and set(pool.sample("train", 3, 9)) == set(pool.problems)
    with pytest.raises(ValueError, match="n=4 problems wanted, the pool holds 3"):
        pool.sample("train", 4, 0)


def test_pass_rates_count_right_answers_of_each_problem(monkeypatch):
    trainer = TOY.trainer("x")
    problems = trainer.task.sample("train", 2, 0)
    answers = iter([True, False, False, False, True, True, True, True])
    monkeypatch.setattr(
        trainer, "answer", lambda ps: [f"#{p.gold if next(answers) else ''}" for p in ps]
    )
    assert pass_rates(trainer, problems, 4) == [0.25, 1.0]


def test_every_arm_has_a_pool_or_none_for_every_phase():
    assert KL_ENTROPY.arms.keys() == KL_ENTROPY.pools.keys()
    for arm, phases in KL_ENTROPY.arms.items():
        assert len(phases) == len(KL_ENTROPY.pools[arm]) and phases[-1].steps == 60
    larger = KL_ENTROPY.at_scale("gpu")
    assert larger.pools == KL_ENTROPY.pools
    assert replace(larger.arms["easy"][0], base="mixtral-cpu") != KL_ENTROPY.arms["easy"][0]
