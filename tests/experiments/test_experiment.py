"""An experiment runs its phases, its arms and its seeds, and keeps what it finished."""

import json
import math
from dataclasses import replace

import pytest

from stablerl_core.cli import main
from stablerl_core.experiments import EXPERIMENTS, Experiment, Measured, Results
from stablerl_core.training import DataConfig, NumericsConfig, TrainerConfig

SMALL = TrainerConfig(
    steps=2,
    data=DataConfig(prompts=2, group_size=4, eval_prompts=8, eval_every=2, max_new_tokens=9),
)
SLOW = replace(SMALL, steps=4, numerics=NumericsConfig(learning_rate=1e-5))
PAYS_ANY = replace(SMALL, steps=4, data=replace(SMALL.data, verifier="any"))
TOY = Experiment("toy", "none", {"plain": (SMALL,), "phases": (SMALL, SLOW)}, log_every=1)


def test_phases_follow_each_other_in_one_run():
    trainer = TOY.trainer("phases", seed=3)
    log = TOY.train("phases", trainer, progress=False)
    assert [row["step"] for row in log] == [0, 1, 2, 3, 4]
    rates = log.series("learning_rate")[1]
    assert rates == pytest.approx([5e-5, 1e-4, 3e-6, 4e-6])  # a tenth a step of warm-up
    assert trainer.config.seed == 3


def test_training_can_stop_inside_a_phase_and_go_on():
    trainer = TOY.trainer("phases")
    assert len(TOY.train("phases", trainer, steps=3, progress=False)) == 4
    whole = TOY.trainer("phases")
    TOY.train("phases", whole, progress=False)
    TOY.train("phases", trainer, progress=False)
    assert trainer.log.series("reward") == whole.log.series("reward")
    assert trainer.log.series("grad_norm") == whole.log.series("grad_norm")


def test_a_phase_may_change_who_pays():
    seen = []
    experiment = Experiment("toy", "", {"x": (SMALL, PAYS_ANY)})
    trainer = experiment.trainer("x")
    experiment.train("x", trainer, progress=False, on_step=lambda row: seen.append(row["step"]))
    assert trainer.config.data.verifier == "any" and seen == [1, 2, 3, 4]


def test_an_unknown_arm_is_named():
    with pytest.raises(ValueError, match="arm='nothing' is not in toy; arms: plain, phases"):
        TOY.trainer("nothing")


def test_repeat_writes_what_a_notebook_reads(tmp_path):
    path = TOY.repeat(2, tmp_path, "the command")
    found = Results(**json.loads(path.read_text()))
    assert found.arms == ["plain", "phases"] and found.made["command"] == "the command"
    assert list(found.runs["phases"]) == ["0", "1"]
    assert [row["step"] for row in found.runs["phases"]["1"]] == [0, 1, 2, 3, 4]
    live = TOY.train("plain", TOY.trainer("plain", seed=1), progress=False)
    stored = [row["reward"] for row in found.runs["plain"]["1"] if "reward" in row]
    assert stored == pytest.approx(live.series("reward")[1], rel=1e-3)
    assert found.runs["plain"]["0"] != found.runs["plain"]["1"]


def test_every_experiment_predicts_and_has_configurations():
    for name, experiment in EXPERIMENTS.items():
        assert experiment.name == name and len(experiment.prediction) > 50
        if isinstance(experiment, Measured):
            assert all(callable(measure) for measure in experiment.arms.values())
            continue
        for phases in experiment.arms.values():
            ends = [phase.steps for phase in phases]
            assert ends == sorted(set(ends)), "each phase ends after the one before it"


def test_the_story_changes_what_it_says_it_changes():
    first, second, third = EXPERIMENTS["opening"].arms["story"]
    assert [p.data.verifier for p in (first, second, third)] == ["any"] * 3
    rates = [p.numerics.learning_rate for p in (first, second, third)]
    assert rates[1] == pytest.approx(0.3 * rates[0]) and rates[2] == rates[0]
    assert third.policy.epochs * third.policy.minibatches == 16
    assert math.isinf(third.numerics.max_grad_norm)
    clipped = EXPERIMENTS["opening"].arms["story_clip"][2]
    assert (
        replace(clipped, numerics=third.numerics) == third and clipped.numerics.max_grad_norm == 1
    )


def test_the_command_lists_and_refuses(capsys):
    assert main(["experiment"]) == 0
    assert "opening" in capsys.readouterr().out
    assert main(["experiment", "nothing"]) == 2
    assert "experiment='nothing' is unknown" in capsys.readouterr().err
    assert main(["experiment", "opening", "--seeds", "0"]) == 2


def test_the_gpu_scale_changes_model_and_device_and_nothing_else():
    plain, larger = TOY.arms["phases"], TOY.at_scale("gpu").arms["phases"]
    for before, after in zip(plain, larger, strict=True):
        assert after.base == "mixtral-gpu" and after.system.device == "cuda"
        assert replace(after, base=before.base, system=before.system) == before
    assert TOY.at_scale("cpu") is TOY
    with pytest.raises(ValueError, match="SCALE='huge'"):
        TOY.at_scale("huge")
