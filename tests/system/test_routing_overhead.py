"""The script that measures what recording costs runs and counts bytes; no time is judged."""

import importlib.util
from argparse import Namespace
from pathlib import Path

import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "routing_overhead.py"


def load_script():
    spec = importlib.util.spec_from_file_location("routing_overhead", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


def test_every_part_is_measured_on_the_same_tokens():
    script = load_script()
    args = Namespace(family="mixtral", scale="cpu", prompts=2, new_tokens=3, rounds=1)
    result = script.measure(args)
    assert [row["case"].split(",")[0] for row in result["rows"]] == [
        "rollout", "rollout", "rollout with top-p 0.9", "scoring and gradient",
    ]  # fmt: skip
    assert all(row["ms_without"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert result["sampled_tokens"] == 2 * 8 * 3 and result["bytes_per_token"] == 2 * 2
    # The prompt and the two completion tokens that were fed, for each of 16 rows.
    width = script.Bench(args).prompt.shape[1]
    assert result["record_bytes"] == 2 * 8 * (width + 2) * 4
    # Four bytes of count and at least one id of one byte; a table has four bytes an id.
    assert 5 <= result["kept_bytes_per_token"] < result["kept_table_bytes_per_token"] + 5
    assert "4 bytes a token" in script.table(result)


def test_sampling_without_a_list_of_ids_draws_the_same_tokens():
    script = load_script()
    args = Namespace(family="mixtral", scale="cpu", prompts=2, new_tokens=3, rounds=1)
    bench = script.Bench(args)
    without, kept = bench.truncated(False), bench.truncated(True)
    assert without.kept is None and kept.kept is not None
    assert torch.equal(without.tokens, kept.tokens)
    assert bench.truncated(True).kept is not None  # the patch is gone again
