"""verl's own weights and metrics on the same numbers.

`rollout_corr_helper.py` is loaded from an installed verl by path, with stand-ins for what it
imports (masked sums and means, and containers it does not need here): verl itself needs Ray.

Same: token and sequence TIS, IcePop, geometric rejection, and every off-policy metric.
Different: verl takes its mean, standard deviation and ESS after truncation, of token positions
also at sequence level (long answers count more); its `seq_mean_k1` measures the inverse ratio;
it clamps log-ratios at ±20 and adds 1e-8 to denominators; rejection edits the response mask.
"""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from stablerl_core.system import (
    CORRECTIONS,
    geometric_rejection,
    importance_weights,
    mismatch_report,
)

B, T = 6, 9


def masked_sum(x, mask, axis=None):
    return (x * mask).sum(axis) if axis is not None else (x * mask).sum()


def masked_mean(x, mask, axis=None):
    return masked_sum(x, mask, axis) / (mask.sum(axis) if axis is not None else mask.sum())


@pytest.fixture
def verl(monkeypatch):
    root = Path(sys.prefix) / "oracles" / "verl"  # where `make test` puts it (tests/oracles.txt)
    if not root.is_dir():
        spec = importlib.util.find_spec("verl")
        if spec is None or not spec.submodule_search_locations:
            if os.environ.get("STABLERL_REQUIRE_ORACLES"):
                pytest.fail(f"verl is not in {root}")
            pytest.skip(f"verl is not in {root}")
        root = Path(spec.submodule_search_locations[0])
    path = root / "trainer" / "ppo" / "rollout_corr_helper.py"
    names = {
        "verl": {},
        "verl.utils": {},
        "verl.utils.torch_functional": dict(masked_sum=masked_sum, masked_mean=masked_mean),
        "verl.protocol": dict(DataProto=SimpleNamespace),
        "verl.trainer": {},
        "verl.trainer.config": {},
        "verl.trainer.config.algorithm": dict(RolloutCorrectionConfig=dict),
        "verl.workers": {},
        "verl.workers.config": {},
        "verl.workers.config.actor": dict(PolicyLossConfig=dict),
    }
    for name, content in names.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    spec = importlib.util.spec_from_file_location("rollout_corr_helper", path)
    helper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helper)
    return helper


@pytest.fixture
def numbers():
    generator = torch.Generator().manual_seed(0)
    mu = -3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    old = mu + 1.2 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([[9], [1], [3], [4], [6], [9]])
    return old, mu, mask


@pytest.mark.parametrize("name", ["tis", "sequence_tis", "icepop", "icepop_glm5"])
def test_weights(verl, numbers, name):
    old, mu, mask = numbers
    options = CORRECTIONS[name]
    cap = options["cap"]
    threshold = f"{options['floor']}_{cap}" if "floor" in options else cap
    theirs, metrics = verl.compute_rollout_correction_weights(
        old - mu, mask.double(), options["level"], threshold
    )
    ours = importance_weights(old, mu, mask, **options)
    torch.testing.assert_close(ours.values, theirs, rtol=1e-12, atol=1e-14)
    assert ours.above_cap == pytest.approx(metrics["rollout_is_ratio_fraction_high"])
    assert ours.above_cap > 0
    if "floor" in options:
        assert ours.masked == pytest.approx(metrics["rollout_is_oob_ratio"])
    if name == "tis":  # ours tell of the tail that the cap removes
        assert metrics["rollout_is_max"] == cap < ours.maximum
        assert metrics["rollout_is_eff_sample_size"] > 1.1 * ours.ess


def test_geometric_rejection(verl, numbers):
    old, mu, mask = numbers
    theirs, _ = verl.compute_rollout_rejection_mask(
        old - mu, mask.double(), "seq_mean_k1", "0.7_1.5"
    )
    kept = theirs.bool().any(1, keepdim=True)
    assert torch.equal(geometric_rejection(old, mu, mask, low=1 / 1.5, high=1 / 0.7), kept)
    assert 0 < kept.sum() < B


def test_metrics(verl, numbers):
    old, mu, mask = numbers
    theirs = verl.compute_offpolicy_metrics(old, mu, mask.double())
    ours = mismatch_report(old, mu, mask)
    for here, there in {
        "k1": "kl",
        "k3": "k3_kl",
        "ppl_ratio": "ppl_ratio",
        "chi2_token": "chi2_token",
        "chi2_seq": "chi2_seq",
    }.items():
        assert getattr(ours, here) == pytest.approx(theirs[there], rel=1e-12), here
