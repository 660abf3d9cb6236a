"""Intervals, and reading repeated runs."""

import math

import pytest

from stablerl_core.experiments import (
    EXPERIMENTS,
    Experiment,
    Measured,
    Results,
    interval,
    load,
    results_folder,
)
from stablerl_core.experiments.results import T95
from stablerl_core.runlog import SIGNALS

RUNS = {
    "a": {
        "0": [{"step": 0, "reward": 0.0}, {"step": 5, "reward": 0.2}, {"step": 10, "reward": 0.4}],
        "1": [{"step": 0, "reward": 0.2}, {"step": 5, "length": 3.0}, {"step": 10, "reward": 0.6}],
    },
    "b": {
        "0": [{"step": 0, "reward": 0.1}, {"step": 10, "reward": 0.3}],
        "1": [{"step": 0, "reward": 0.1}, {"step": 10, "reward": 0.5}],
    },
}
MADE = Results("toy", "none", {}, RUNS)


def test_interval_of_three_numbers_by_hand():
    # mean 2, sample standard deviation 1, standard error 1/√3, t(2 degrees) = 4.303
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2 and found.n == 3
    assert found.high - found.mean == pytest.approx(4.303 / math.sqrt(3))
    assert found.mean - found.low == pytest.approx(4.303 / math.sqrt(3))
    assert str(found) == "2.00 [-0.48, 4.48]"


def test_the_quantiles_fall_towards_the_normal_one():
    assert list(T95) == sorted(T95, reverse=True) and len(T95) == 30
    assert 1.96 < T95[-1] < 2.05


def test_one_run_has_no_interval_and_none_is_an_error():
    alone = interval([0.3])
    assert alone.mean == 0.3 and math.isnan(alone.low) and math.isnan(alone.high)
    with pytest.raises(ValueError, match="values is empty"):
        interval([])


def test_per_seed_over_steps_and_with_another_reduction():
    assert MADE.per_seed("a", "reward", 5, 10) == pytest.approx([0.3, 0.6])
    assert MADE.per_seed("a", "reward", 0, 10, max) == [0.4, 0.6]
    assert MADE.over("a", "reward", 0, 0) == interval([0.0, 0.2])


def test_change_is_paired_by_seed():
    # differences 0.1 and 0.1: paired they have no spread, unpaired they would
    found = MADE.change("a", "b", "reward", 10, 10)
    assert found.mean == pytest.approx(0.1) and found.high - found.low == pytest.approx(0, abs=1e-9)


def test_band_is_taken_where_every_seed_was_measured():
    steps, intervals = MADE.band("a", "reward")
    assert steps == [0, 10]
    assert [i.mean for i in intervals] == pytest.approx([0.1, 0.5])


def test_an_experiment_may_have_columns_of_its_own():
    rows = [{"step": 20, "bias": 0.5}, {"step": 100, "bias": 0.25}]
    found = Results("toy", "none", {}, {"a": {"0": rows, "1": rows}})
    steps, intervals = found.band("a", "bias")
    assert steps == [20, 100] and [i.mean for i in intervals] == [0.5, 0.25]
    with pytest.raises(ValueError, match="'variance' is unknown; a measured: bias, step"):
        found.band("a", "variance")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: MADE.over("c", "reward", 0, 1), "arm='c' is not in toy; arms: a, b"),
        (lambda: MADE.over("a", "reward", 11, 12), "no value in steps 11 to 12"),
        (lambda: MADE.band("a", "rewards"), "signal='rewards' is unknown"),
    ],
)
def test_what_is_not_there_is_named(call, text):
    with pytest.raises(ValueError, match=text):
        call()


def test_a_missing_file_names_the_command_that_makes_it():
    with pytest.raises(FileNotFoundError, match="stablerl experiment nothing --seeds 5"):
        load("nothing")


@pytest.mark.parametrize("path", sorted(results_folder().glob("**/*.json")), ids=lambda p: p.stem)
def test_a_committed_result_can_be_repeated_and_believed(path):
    found = load(path.stem, "gpu" if path.parent.name == "gpu" else "cpu")
    experiment = EXPERIMENTS[found.name]
    then, now = " ".join(found.prediction.split()), " ".join(experiment.prediction.split())
    # A later experiment of the chapter may add its own predictions below; none may be altered.
    assert now.startswith(then), "the prediction was changed after the runs"
    assert set(found.arms) == set(experiment.arms)
    assert {"command", "commit", "torch", "hardware", "seconds"} <= found.made.keys()
    for arm, seeds in found.runs.items():
        least = 3 if found.name == "fault_suite" else 5  # there 99 runs are counted, not arms
        assert len(seeds) >= least, f"{arm} has {len(seeds)} seeds; {least} are the least"
        for rows in seeds.values():
            if isinstance(experiment, Measured):
                # What cannot be measured in one seed, such as a gap without a flip, is absent.
                assert [r["step"] for r in rows] == [r["step"] for r in seeds["0"]]
                continue
            assert rows[-1]["step"] == experiment.arms[arm][-1].steps
            if type(experiment) is Experiment:  # others may measure more
                assert all(set(row) <= set(SIGNALS) for row in rows)
