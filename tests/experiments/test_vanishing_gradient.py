"""Chapter 12's measurements: what a batch tells, what a budget is spent on, what levels see."""

from __future__ import annotations

import pytest
import torch

from stablerl_core.experiments import vanishing_gradient as chapter
from stablerl_core.experiments.sampled import completions_of
from stablerl_core.rewards import MovingLevels, StagedLevels, task_by_name
from stablerl_core.training import completion_logp, load_base


def test_a_batch_has_the_gradient_of_its_reward_and_counts_its_silent_groups():
    """Two batches of the same place are the same; without the division an advantage is smaller."""
    base = load_base("mixtral-cpu-sort")
    found = chapter._batch(base, 4, 4, place=3)
    again = chapter._batch(base, 4, 4, place=3)
    assert torch.equal(found["std"], again["std"])
    assert found["none"].norm() < found["std"].norm()
    alone = chapter._batch(base, 8, 1, place=3)
    assert alone["silent"] == 1 and not alone["std"].any()


def test_the_gradient_is_that_of_the_mean_weighted_log_probability():
    """A step of ε along g raises mean Â Σ log π by ε |g|², and its sign is up."""
    model, tokenizer = load_base("mixtral-cpu-sort")
    problems = task_by_name("sort").sample("train", 4, 0)
    drawn = completions_of(model, tokenizer, problems, 0, group_size=2)
    advantages = torch.tensor([1.0, -1.0] * 4)
    gradient = chapter._gradient(model, drawn, advantages)

    def objective():
        with torch.no_grad():
            logp = completion_logp(model, drawn).masked_fill(~drawn.mask, 0)
            return float((advantages * logp.double().sum(1)).mean())

    before, step = objective(), 1e-5
    flat = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    torch.nn.utils.vector_to_parameters(flat + step * gradient, model.parameters())
    square = float(gradient.square().sum())
    assert objective() - before == pytest.approx(step * square, rel=0.05)


def test_what_batches_say_along_a_direction():
    unit = torch.tensor([1.0, 0.0])
    told = chapter._told([torch.tensor([1.0, 1.0]), torch.tensor([3.0, -1.0])], unit)
    assert told == {"along": 2.0, "noise": 2.0, "steady": pytest.approx(4 / 6)}


@pytest.mark.parametrize(
    "arm, kind", [("moving bucket", MovingLevels), ("easy first", StagedLevels)]
)
def test_the_reward_tells_the_task_what_happened(arm, kind):
    run = chapter.trainer(arm)
    assert isinstance(run.task, kind)
    run.step()
    if kind is MovingLevels:
        assert sum(tries for _, tries in run.task.counts.values()) == 64
    else:
        assert run.task.step == 1


def test_the_frozen_bucket_holds_what_the_base_can_do():
    mix = chapter.curriculum("frozen bucket", 0).mix()
    assert mix["6 digits"] > 0 and not any(mix[level] for level in chapter.DEAD)


def test_a_run_ends_with_its_budget_and_refills_are_counted(monkeypatch):
    monkeypatch.setattr(chapter, "ASKED", 8)
    monkeypatch.setattr(chapter, "EVERY", 256)
    plain = chapter.levels_rows("uniform", 0, budget=256)
    assert [row["step"] for row in plain] == [0, 256] and plain[-1]["updates"] == 4
    (_, *rows) = chapter.levels_rows("dynamic sampling", 0, budget=256)
    assert rows[-1]["spent"] >= 256 and rows[-1]["updates"] < 4
    unpaid = chapter.levels_rows(chapter.UNPAID, 0, updates=16)
    assert [row["step"] for row in unpaid] == [0, 16] and unpaid[-1]["spent"] > 16 * 64


def test_held_steps_without_a_gradient_change_nothing(monkeypatch):
    """Two levels that nobody solves: the run coasts unless it is held."""
    monkeypatch.setattr(chapter, "ASKED", 8)
    monkeypatch.setattr(chapter, "EVERY", 512)
    told = []
    trainer = chapter.trainer

    def switched(arm, seed):
        run = trainer(arm, seed)
        run.run(4, progress=False)
        run.task.step = 99  # the last level: no answer is right
        told.append(run)
        return run

    monkeypatch.setattr(chapter, "trainer", switched)
    free, held = (
        chapter.levels_rows("easy first", 0, budget=512, hold=hold)[-1] for hold in (False, True)
    )
    assert free["silent"] == held["silent"] == 1 and free["coasted"] > 0
    start = trainer("easy first", 0)
    start.run(4, progress=False)
    for parameter, same in zip(start.model.parameters(), told[1].model.parameters(), strict=True):
        assert torch.equal(parameter, same)
