"""Series that were posted in public issue threads: the layer that was found there, or abstention.

The facts are not part of the project; where they do not lie beside it, these tests are skipped.
"""

import json
from pathlib import Path

import pytest

from stablerl_core.diagnosis import diagnose, read_rows

CASES = Path(__file__).resolve().parents[3] / "shared/data/cases.jsonl"
pytestmark = pytest.mark.skipif(not CASES.exists(), reason="the public cases are not here")

TRL = {
    "completion_length": "length",
    "kl": "kl_ref",
    "frac_zero_std": "zero_variance_groups",
    "frac_reward_zero_std": "zero_variance_groups",
    "rewards/accuracy": "reward_part:accuracy",
    "rewards/format": "reward_part:format",
}
OTHERS = {
    "score": "reward",
    "raw_reward": "reward",
    "positive_response_length": "length",
    "zero_spread_groups": "zero_variance_groups",
    "val_acc": "heldout_accuracy",
    "logprob_abs_diff": "logp_gap",
    "pg_clipfrac": "clip_fraction",
    "ppo_kl": "kl_step",
    "kl_loss": "kl_ref",
    "scores": "reward",
    "approxkl": "kl_step",
    "clipfrac": "clip_fraction",
    "ratio": "ratio_mean",
    "objective/kl": "kl_ref_seq",
    "total_loss": "loss",
    "student_length": "length",
    "pearson_from_to": "prob_correlation",
}
OURS = ("reward", "entropy", "loss", "grad_norm", "reward_std", "learning_rate", "loss_scale")
OURS += ("advantage_min", "advantage_max", "mismatch_kl", "abs_diff")
STEPS = ("step", "row", "global_iter", "episode")
NAMES = TRL | OTHERS | {name: name for name in OURS} | {"abs_diff": "logp_gap"}


def verdict_of(case: str, prefix: str = "", columns: dict | None = None):
    """Diagnose one series of a case, whose names begin with `prefix`."""
    facts = next(c for c in map(json.loads, CASES.open()) if c["id"] == case)
    series = {k.removeprefix(prefix): v for k, v in facts["data"]["series"].items() if prefix in k}
    names = NAMES | (columns or {})
    steps = next((series[s] for s in STEPS if s in series), None)
    kept = {names[k]: v for k, v in series.items() if k in names}
    rows = len(next(iter(kept.values())))
    steps = steps or range(1, rows + 1)
    table = [
        {"step": step} | {k: v[n] for k, v in kept.items() if n < len(v)}
        for n, step in enumerate(steps)
    ]
    return diagnose(read_rows(table, "stablerl"))


@pytest.mark.parametrize(
    "case, prefix, columns, layer",
    [
        ("C05", "", {}, 1),
        ("C69", "", {}, 1),
        ("C74", "", {}, 1),
        ("C13", "", {}, 2),
        ("C33", "buggy_", {}, 3),
        ("C36", "n5890_", {}, 3),
        ("C90", "", {}, 3),
        ("C97", "run4_", {}, 3),
        ("C44", "", {}, 4),
        ("C45", "", {"fp8_tensorwise_kl": "mismatch_kl"}, 4),
        ("C109", "", {}, 4),
    ],
)
def test_the_layer_that_was_found(case, prefix, columns, layer):
    found = verdict_of(case, prefix, columns)
    assert found.layer == layer, found.to_text()


@pytest.mark.parametrize(
    "case, prefix, columns",
    [
        ("C33", "fixed_", {}),
        ("C33", "micro_", {}),
        ("C45", "", {"bf16_kl": "mismatch_kl"}),
        ("C45", "", {"mxfp8_kl": "mismatch_kl"}),
        ("C53", "", {}),
        ("C58", "", {}),
        ("C72", "", {}),
        ("C75", "", {}),
        ("C85", "", {}),
        ("C121", "", {}),
        ("C122", "", {}),
        ("C125", "xtuner_", {}),
        ("C126", "", {}),
    ],
)
def test_no_fault_where_none_was_proven(case, prefix, columns):
    assert verdict_of(case, prefix, columns).layer is None
