"""The comparison with TRL runs to its end on equal work. Its times are never judged here."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

RUN = Path(__file__).parents[1] / "benchmarks" / "run.py"
RATIOS = {"ratio", "ratio_quartiles", "ratio_range", "ratio_of_fastest", "ratio_of_totals"}
SIDE = {"ms", "ms_quartiles", "parts_ms", "generated_tokens", "trained_tokens", "reward"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra trl"),
]


@pytest.fixture(scope="module")
def result(tmp_path_factory) -> dict:
    file = tmp_path_factory.mktemp("benchmarks") / "result.json"
    command = [sys.executable, RUN, "--quick", "--rounds", "1", "--threads", "1", "--json", file]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=500)
    assert run.returncode == 0, run.stderr
    assert "| fixed 16×8 | same settings |" in run.stdout
    return json.loads(file.read_text())


def test_every_case_and_setting_has_a_row(result):
    assert set(result) == {"machine", "rows", "memory_mb"}
    assert {"processor", "cores", "torch", "transformers", "trl", "load"} <= set(result["machine"])
    names = [(row["case"], row["settings"]) for row in result["rows"]]
    settings = ("same settings", "its defaults, float32")
    assert names == [
        (case, s) for case in ("fixed 16×8", "fixed 64×8", "live 64×8") for s in settings
    ]
    for row in result["rows"]:
        assert RATIOS | {"case", "settings", "rounds", "ours", "trl"} == set(row)
        assert set(row["ours"]) == set(row["trl"]) == SIDE


def test_fixed_work_is_the_same_number_of_tokens_on_both_sides(result):
    expected = {"fixed 16×8": 16 * 8 * 16, "fixed 64×8": 64 * 8 * 16}
    for row in result["rows"]:
        for side in ("ours", "trl"):
            generated, trained = row[side]["generated_tokens"], row[side]["trained_tokens"]
            if row["case"] in expected:
                assert generated == trained == expected[row["case"]]
            else:
                assert 64 * 8 <= trained <= generated <= 64 * 8 * 24


def test_live_work_differs_only_by_the_groups_without_a_gradient(result):
    for row in result["rows"]:
        assert row["trl"]["trained_tokens"] == row["trl"]["generated_tokens"]
        if row["case"] == "live 64×8":
            assert row["ours"]["trained_tokens"] < row["ours"]["generated_tokens"]
