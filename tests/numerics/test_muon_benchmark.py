"""The script that measures Muon runs, on the same matrices on both sides; no time is judged."""

import importlib.util
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("muon_benchmark", FOLDER / "muon.py")
    module = importlib.util.module_from_spec(spec)
    with torch.random.fork_rng():
        spec.loader.exec_module(module)
        yield module
    sys.modules.pop("routing_overhead", None)


def test_every_ratio_is_measured_on_equal_work(script, monkeypatch):
    monkeypatch.setattr(script, "TOKENS", 64)
    args = Namespace(rounds=1, models=["mixtral-cpu"], lengths=[32], prompts=2)
    result = script.measure(args)
    assert [row["matrices"] for row in result["optimizers"]] == [2 * (4 + 8 * 3)] * 3
    assert all(row["ratio"] > 0 for part in ("optimizers", "watching") for row in result[part])
    assert len(result["watching"]) == 3 and "| mixtral-cpu, both float32 | 56 |" in script.table(
        result
    )


def test_unequal_work_is_told(script):
    model = script.model_of("mixtral-cpu")
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    theirs = script.Theirs(model)
    theirs.step()
    with pytest.raises(RuntimeError, match="the two optimizers are .* steps apart"):
        script._same_work(model, theirs, steps=1, rough=True)
