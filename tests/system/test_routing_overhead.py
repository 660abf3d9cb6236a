"""The script that measures what recording costs runs and counts bytes; no time is judged."""

import importlib.util
from argparse import Namespace
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "routing_overhead.py"


def test_every_part_is_measured_on_the_same_tokens():
    spec = importlib.util.spec_from_file_location("routing_overhead", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    args = Namespace(family="mixtral", scale="cpu", prompts=2, new_tokens=3, rounds=1)
    result = script.measure(args)
    assert [row["case"].split(",")[0] for row in result["rows"]] == [
        "rollout", "rollout", "scoring and gradient",
    ]  # fmt: skip
    assert all(row["ms_without"] > 0 and row["ratio"] > 0 for row in result["rows"])
    assert result["sampled_tokens"] == 2 * 8 * 3 and result["bytes_per_token"] == 2 * 2
    # 16 tokens of the prompt and the two completion tokens that were fed, for each of 16 rows.
    assert result["record_bytes"] == 2 * 8 * (16 + 2) * 4
    assert "4 bytes a token" in script.table(result)
