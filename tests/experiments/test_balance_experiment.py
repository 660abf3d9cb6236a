"""Chapter 23: its measurements are those of the trainer, its settings those of the sources."""

from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments.balance import (
    CODE,
    entropy_step,
    gradient_parts,
    hard,
    pulls_by_update,
    quadrant_steps,
    started,
)
from stablerl_core.policy import OBJECTIVES, balance_bounds
from stablerl_core.training import DataConfig


def small(updates: int, seed: int = 0):
    trainer = started(updates, seed)
    data = DataConfig(prompts=4, eval_prompts=4)
    trainer.config = replace(trainer.config, data=data)
    return trainer


def test_hard_problems_were_answered_right_at_most_so_often():
    trainer = small(1)
    some, none = hard(trainer, 0.5, 12).problems, hard(trainer, 0.0, 12).problems
    assert set(none) < set(some) and len(hard(trainer, 1.0, 12).problems) == 12


def test_the_first_update_of_a_rollout_has_a_share_of_one_half():
    rows = pulls_by_update(small(4), epochs=2)
    assert rows[0]["share"] == pytest.approx(0.5, abs=1e-6)
    assert [row["step"] for row in rows] == sorted({row["step"] for row in rows})
    assert any(abs(row["share"] - 0.5) > 1e-3 for row in rows[4:])


def test_the_two_halves_add_up_to_the_gradient():
    trainer = small(1)
    batch, _, advantages = trainer._collect(1)
    parts = gradient_parts(trainer, batch, advantages)
    up, down, both = parts["positive"], parts["negative"], parts["both"]
    assert both**2 == pytest.approx(up**2 + down**2 + 2 * up * down * parts["cosine"], rel=1e-4)
    flipped = gradient_parts(trainer, batch, -advantages)
    assert flipped["positive"] == pytest.approx(down) and flipped["both"] == pytest.approx(both)


def test_an_entropy_step_is_a_step_of_the_trainer():
    one, other = small(1), small(1)
    found, row = entropy_step(one), other.step()
    assert found["reward"] == row["reward"] and found["both"] == pytest.approx(
        row["grad_norm"], rel=1e-3
    )
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    assert one.version == 1 and all(torch.equal(a, b) for a, b in pairs)
    assert found["measured"] != 0


def test_a_step_along_one_kind_of_token_leaves_the_policy_as_it_was():
    trainer = small(1)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    near, far = quadrant_steps(trainer, 1e-4), quadrant_steps(trainer, 2e-4)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))
    for name, (predicted, measured) in near.items():
        assert predicted == far[name][0] != 0
        assert far[name][1] == pytest.approx(2 * measured, rel=0.1)


def test_the_released_codes_settings_are_those_that_the_search_documents():
    search = {k: v for k, v in CODE.items() if k in balance_bounds.__kwdefaults__}
    assert set(CODE) - set(search) == {"dual_clip"} <= set(OBJECTIVES["bapo"].options)
    assert search["order"] == search["statistic"] == "code" and search["target"] == 0.5
