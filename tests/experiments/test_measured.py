"""An experiment of functions is repeated, written and refused like one of training runs."""

import json
from functools import partial

import pytest

from stablerl_core.experiments import Measured, Results


def power(seed: int, base: float) -> list[dict]:
    return [{"step": n, "power": base**n + seed} for n in (1, 2, 10)]


def unordered(seed: int) -> list[dict]:
    return [{"step": 2}, {"step": 2}]


TOY = Measured("toy", "none", {"third": partial(power, base=1 / 3), "two": partial(power, base=2)})


def test_repeat_writes_the_same_format_as_training_runs(tmp_path):
    path = TOY.repeat(2, tmp_path, "the command")
    found = Results(**json.loads(path.read_text()))
    assert found.name == "toy" and found.made["command"] == "the command"
    assert found.arms == ["third", "two"] and list(found.runs["two"]) == ["0", "1"]
    assert found.runs["third"]["0"][0] == {"step": 1, "power": 0.3333}  # four digits
    assert found.runs["two"]["1"] == [
        {"step": 1, "power": 3.0},
        {"step": 2, "power": 5.0},
        {"step": 10, "power": 1025.0},
    ]


def test_seeds_are_kept_in_the_order_of_their_numbers(tmp_path):
    found = json.loads(TOY.repeat(11, tmp_path, "").read_text())
    assert list(found["runs"]["two"]) == [str(seed) for seed in range(11)]


def test_one_run_is_exact():
    assert TOY.rows("third")[1] == {"step": 2, "power": (1 / 3) ** 2}


def test_what_cannot_be_run_is_named():
    with pytest.raises(ValueError, match="arm='one' is not in toy; arms: third, two"):
        TOY.rows("one")
    with pytest.raises(ValueError, match=r"steps \[2, 2\]; they must rise"):
        Measured("toy", "none", {"bad": unordered}).rows("bad")
    with pytest.raises(ValueError, match="SCALE='gpu': toy has one scale"):
        TOY.at_scale("gpu")
    assert TOY.at_scale("cpu") is TOY
