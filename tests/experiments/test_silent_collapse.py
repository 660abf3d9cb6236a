"""The arms are what their names say, and the alarm is the one that is described."""

import math
from dataclasses import replace

import pytest

from stablerl_core.experiments.results import Results
from stablerl_core.experiments.silent_collapse import FIXES, SILENT, first_alarms, windows
from stablerl_core.system import compare_fingerprints, fingerprints
from stablerl_core.training import Trainer


def results(healthy, faulty):
    """Runs with one value of entropy in each window of five steps."""

    def rows(values):
        return [{"step": 0, "entropy": 99.0}] + [
            {"step": 5 * i + j, "entropy": v} for i, v in enumerate(values) for j in (1, 2, 3, 4, 5)
        ]

    def arm(runs):
        return {str(i): rows(values) for i, values in enumerate(runs)}

    return Results("made up", "", {}, {"healthy": arm(healthy), "faulty": arm(faulty)})


def test_a_window_is_the_mean_of_five_steps_without_the_start():
    rows = [{"step": step, "reward": float(step)} for step in range(8)] + [{"step": 8}]
    assert windows(rows, "reward") == {5: 3.0, 10: 6.5}


# Mean 0 and standard deviation 1: one more run lies within 3 · sqrt(1 + 1/3) = 3.46.
BAND = [[-1.0] * 4, [0.0] * 4, [1.0] * 4]


@pytest.mark.parametrize(
    ("run", "alarm"),
    [
        ([3.4, 3.4, -3.4, -3.4], None),
        ([0.0, 3.5, 3.5, 0.0], 10),
        ([0.0, 0.0, -3.5, -3.5], 15),
        ([0.0, 3.5, 0.0, 3.5], None),  # never twice in a row
        ([0.0, 0.0, math.nan, math.nan], 15),
    ],
)
def test_the_alarm_is_the_first_of_two_windows_outside_the_band(run, alarm):
    assert first_alarms(results(BAND, [run]), "faulty", "entropy") == [alarm]


def test_a_healthy_run_is_judged_by_the_others():
    odd = [*BAND, [9.0] * 4]
    assert first_alarms(results(odd, []), "healthy", "entropy") == [None, None, None, 5]


def test_a_signal_that_never_varies_has_a_band_of_no_width():
    still = [[1.0] * 4] * 3
    alarms = first_alarms(results(still, [[1.0] * 4, [1.001] * 4]), "faulty", "entropy")
    assert alarms == [None, 5]


def test_the_arms_differ_from_the_faulty_run_by_what_they_are_named_for():
    (silent,) = SILENT.arms["silent"]
    assert silent.system.sync_skip == ("v_proj",) and silent.system.old_logp == "trainer"
    everything = SILENT.arms["healthy"][0].system.sync_skip
    assert SILENT.arms["healthy"] == (
        replace(silent, system=replace(silent.system, sync_skip=everything)),
    )
    (clipped,), (slower,), (kl,) = (FIXES.arms[name] for name in ("clipped", "slower", "kl"))
    numerics, policy = silent.numerics, silent.policy
    assert clipped == replace(silent, numerics=replace(numerics, max_grad_norm=0.1))
    assert slower.numerics == replace(numerics, learning_rate=0.3 * numerics.learning_rate)
    assert kl == replace(silent, policy=replace(policy, kl_coef=0.3))
    for name in ("slower", "kl"):
        assert FIXES.arms[f"{name}_healthy"][0].system.sync_skip == everything


def test_the_first_push_already_convicts_and_names_the_tensors():
    for arm, agree in (("healthy", True), ("silent", False)):
        trainer = SILENT.trainer(arm)
        before = fingerprints(trainer.model)
        trainer.step()
        report = compare_fingerprints(
            fingerprints(trainer.model), fingerprints(trainer.sampler), [before]
        )
        assert report.agree == agree
        named = {fault.tensor for fault in report.faults}
        expected = {f"model.layers.{i}.self_attn.v_proj.weight" for i in (0, 1)}
        assert named == (set() if agree else expected)
        assert all(fault.kind == "never sent" for fault in report.faults)


def test_the_repair_reaches_the_sampler_at_its_first_push():
    first, second = FIXES.arms["repaired"]
    assert (first.steps, second.steps) == (40, 70)
    trainer = Trainer(replace(first, steps=3))
    trainer.run(2, progress=False)
    trainer.config = replace(second, steps=4)
    trainer.run(4, progress=False)
    gap = dict(zip(*trainer.log.series("logp_gap"), strict=True))
    assert gap[2] > 1e-5 and gap[3] > 1e-5 and gap[4] < 1e-5
