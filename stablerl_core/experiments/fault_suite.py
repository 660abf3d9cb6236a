"""Chapter 50, the fault suite: faults of all four layers planted in live runs, then diagnosed.

Each arm is one run of 60 steps (16 prompts × 8 completions, learning rate 5e-4; 30 steps where a
rollout is used 16 times, 160 where a hack has to be found) with one planted
fault, or with none; its name begins with the truth: `layer1_` … `layer4_`, `healthy_`. The arm
returns one row: `truth` and `verdict` (0 healthy, 1-4 the layer, 5 insufficient evidence), `named`
(the step at which the named fault begins), `fell` (the step at which held-out accuracy or reward
fell, absent where neither did). The rules were tuned on seeds from 100 on and on the public cases;
the repeated runs use seeds from 0 on, which no rule was tuned on.

Predictions, before the repeated runs:

1. At least nine in ten of the faulty runs get the right layer, no healthy run is accused.
2. Layer 4 faults are named before the outcome falls; layer 2 faults at about the same step.
3. What is missed is missed as `healthy` or `insufficient evidence` rather than as another layer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from ..diagnosis import Diagnosis, diagnose
from ..rewards import Problem
from ..runlog import RunLog
from ..training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    SystemConfig,
    Trainer,
    TrainerConfig,
)
from .measured import Measured

STEPS, RATE = 60, 5e-4
VERDICTS = {"healthy": 0, "insufficient evidence": 5} | {f"layer {k}": k for k in (1, 2, 3, 4)}

Reward = Callable[[Sequence[str], Sequence[Problem], Sequence[bool]], list[float]]
Plant = Callable[[Trainer], None]


def config(
    *,
    rate: float = RATE,
    updates: tuple[int, int] = (1, 1),
    data: dict | None = None,
    nonfinite: str = "skip",
    steps: int = STEPS,
    system: dict | None = None,
    **policy,
) -> TrainerConfig:
    """A run of the suite; `updates` are minibatches and epochs."""
    minibatches, epochs = updates
    return TrainerConfig(
        steps=steps,
        data=DataConfig(prompts=16, max_new_tokens=32, **(data or {})),
        policy=PolicyConfig(minibatches=minibatches, epochs=epochs, **policy),
        numerics=NumericsConfig(learning_rate=rate, max_grad_norm=math.inf, nonfinite=nonfinite),
        system=SystemConfig(**(system or {})),
    )


# Rewards that are wrong, each like one that somebody trained with.


def never(texts, problems, cut) -> list[float]:
    """A verifier whose exceptions are swallowed: nothing is ever right."""
    return [0.0] * len(texts)


def always(texts, problems, cut) -> list[float]:
    """A gold answer that does not parse is equal to everything."""
    return [1.0] * len(texts)


def longer(texts, problems, cut) -> list[float]:
    """Pays for length alone."""
    return [min(len(text), 30) / 30 for text in texts]


def contains(texts, problems, cut) -> list[float]:
    """Pays for every digit of the answer that occurs in the text, in any order."""
    return [
        sum(digit in text for digit in set(p.gold)) / len(set(p.gold))
        for text, p in zip(texts, problems, strict=True)
    ]


def reversed_gold(texts, problems, cut) -> list[float]:
    """The gold answers of another task: the digits in descending order."""
    wanted = ["#" + p.gold[::-1] for p in problems]
    return [
        sum(a == b for a, b in zip(text, want, strict=False)) / len(want)
        for text, want in zip(texts, wanted, strict=True)
    ]


# Numerical and system faults that no setting makes.


def dead_gradient(trainer: Trainer) -> None:
    """The optimizer gets zeros, as from a partition that holds none of the parameters."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(torch.zeros_like)


def nan_from(trainer: Trainer, step: int) -> None:
    """One matrix gets a NaN gradient from a step on."""
    matrix = next(p for p in trainer.model.parameters() if p.dim() > 1)
    matrix.register_hook(lambda g: g * math.nan if trainer.version + 1 >= step else g)


def growing_gradient(trainer: Trainer, factor: float) -> None:
    """Sums in place of means: every gradient is `factor` times as large as the step before."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda g: g * factor ** min(trainer.version, 40))


def huge_gradient(trainer: Trainer) -> None:
    """A loss whose normaliser is wrong by nine orders of magnitude."""
    for parameter in trainer.model.parameters():
        parameter.register_hook(lambda g: g * 1e9)


def backwards(trainer: Trainer, step: int) -> None:
    """From a step on the sampler gets the weights of that step again and again."""
    own, kept = trainer._sync, {}

    def sync(n: int) -> None:
        if n == step:
            kept.update({k: v.clone() for k, v in trainer.model.state_dict().items()})
        own(n)
        if n > step:
            trainer.sampler.load_state_dict(kept)

    trainer._sync = sync


MU = {"old_logp": "sampler"}
ARMS: dict[str, tuple[TrainerConfig, Reward | None, Plant | None]] = {
    "layer1_never_pays": (config(), never, None),
    "layer1_always_pays": (config(), always, None),
    "layer1_parser_hole": (config(data={"verifier": "any"}, steps=160), None, None),
    "layer1_length_pays": (config(), longer, None),
    "layer1_keywords_pay": (config(), contains, None),
    "layer1_wrong_gold": (config(), reversed_gold, None),
    "layer1_too_hard": (config(data={"task_options": {"digits": 16}}), None, None),
    "layer2_rate_10x": (config(rate=10 * RATE), None, None),
    "layer2_16_updates": (config(updates=(4, 4), steps=30), None, None),
    "layer2_16_updates_no_clip": (
        config(updates=(4, 4), steps=30, objective="reinforce"),
        None,
        None,
    ),
    "layer2_entropy_bonus": (config(entropy_coef=0.3), None, None),
    "layer2_k1_as_a_loss": (
        config(kl_coef=1.0, kl_estimator="k1", aggregation="sequence"),
        None,
        None,
    ),
    "layer3_rate_zero": (config(rate=0.0), None, None),
    "layer3_dead_gradient": (config(), None, dead_gradient),
    "layer3_nan_applied": (config(nonfinite="apply"), None, partial(nan_from, step=25)),
    "layer3_nan_skipped": (config(), None, partial(nan_from, step=25)),
    "layer3_gradient_grows": (config(), None, partial(growing_gradient, factor=1.4)),
    "layer3_gradient_huge": (config(), None, huge_gradient),
    "layer4_int4_sampler": (config(system=MU | {"sampler_precision": "int4"}), None, None),
    "layer4_embedding_not_sent": (config(system=MU | {"sync_skip": ("embed",)}), None, None),
    "layer4_experts_not_sent": (config(system=MU | {"sync_skip": ("experts",)}), None, None),
    "layer4_sync_every_10": (config(system={"sync_every": 10}), None, None),
    "layer4_sync_goes_back": (
        config(system=MU | {"sync_skip": ("no such tensor",)}),
        None,
        partial(backwards, step=15),
    ),
    "layer4_noise_in_the_sampler": (config(system={"logit_noise": 1.0}), None, None),
    "layer4_top_p_not_known": (
        config(top_p=0.7, system={"sampling_mask": "none"}),
        None,
        None,
    ),
    "healthy_grpo": (config(), None, None),
    "healthy_dapo": (config(objective="dapo"), None, None),
    "healthy_with_kl": (config(kl_coef=0.01), None, None),
    "healthy_4_updates_slow": (config(updates=(4, 1), rate=RATE / 4), None, None),
    "healthy_bf16_sampler": (config(system={"sampler_precision": "bfloat16"}), None, None),
    "healthy_float8_corrected": (
        config(system={"sampler_precision": "float8_e4m3", "correction": "tis"}),
        None,
        None,
    ),
    "healthy_top_p": (config(top_p=0.95), None, None),
    "healthy_easy_data": (config(data={"task_options": {"digits": 3}}), None, None),
}


def log_of(arm: str, seed: int) -> RunLog:
    """The run log of one arm and seed, trained now."""
    settings, reward, plant = ARMS[arm]
    trainer = Trainer(replace(settings, seed=seed), reward=reward)
    if plant:
        plant(trainer)
    try:
        return trainer.run(progress=False)
    except ValueError:  # a policy of NaN cannot be sampled: the run ends, its log stays
        return trainer.log


def judged(arm: str, seed: int) -> list[dict]:
    """Train one arm and diagnose its log: one row of truth and verdict."""
    found = diagnose(log_of(arm, seed))
    truth = 0 if arm.startswith("healthy") else int(arm[len("layer")])
    row = {"step": 1, "truth": truth, "verdict": VERDICTS[found.verdict]}
    return [row | _when(found)]


def _when(found: Diagnosis) -> dict[str, float]:
    falls = [f for f in (*found.findings, *found.consequences) if f.harm]
    out = {"fell": falls[0].first_step} if falls else {}
    return out | ({"named": found.findings[0].first_step} if found.layer else {})


# The names under which two frameworks and a home-made table log our signals.
NAMES = {
    "trl": {
        "reward": "reward",
        "heldout_accuracy": "eval_reward",
        "length": "completions/mean_length",
        "truncated": "completions/clipped_ratio",
        "zero_variance_groups": "frac_reward_zero_std",
        "kl_ref": "kl",
        "entropy": "entropy",
        "clip_fraction": "clip_ratio/region_mean",
        "loss": "loss",
        "grad_norm": "grad_norm",
        "learning_rate": "learning_rate",
        "logp_gap": "sampling/sampling_logp_difference/mean",
        "logp_gap_max": "sampling/sampling_logp_difference/max",
    },
    "verl": {
        "reward": "critic/score/mean",
        "heldout_accuracy": "val-core/sort/acc/mean@1",
        "length": "response_length/mean",
        "truncated": "response_length/clip_ratio",
        "kl_ref": "actor/kl_loss",
        "kl_step": "actor/ppo_kl",
        "entropy": "actor/entropy",
        "clip_fraction": "actor/pg_clipfrac",
        "loss": "actor/pg_loss",
        "grad_norm": "actor/grad_norm",
        "learning_rate": "actor/lr",
        "mismatch_kl": "rollout_corr/k3_kl",
    },
    "csv": {
        "reward": "avg_return",
        "heldout_accuracy": "holdout",
        "length": "tokens_per_answer",
        "entropy": "policy_entropy",
        "grad_norm": "gnorm",
    },
}


def write_as(log: RunLog, framework: str, path: Path) -> Path:
    """Write a log as `trl` (trainer_state.json), `verl` (console) or `csv` would; returns `path`.

    Raises `ValueError` for another framework.
    """
    if framework not in NAMES:
        raise ValueError(f"framework={framework!r}: one of {', '.join(NAMES)}")
    names = NAMES[framework]
    rows = [{"step": row["step"]} | {names[k]: row[k] for k in names if k in row} for row in log]
    path.write_text({"trl": _as_state, "verl": _as_console, "csv": _as_csv}[framework](rows))
    return path


def _as_state(rows: list[dict]) -> str:
    history = []
    for row in rows:
        history.append({k: v for k, v in row.items() if not k.startswith("eval_")})
        if "eval_reward" in row:
            history.append({"step": row["step"], "eval_reward": row["eval_reward"]})
    return json.dumps({"global_step": rows[-1]["step"], "log_history": history})


def _as_console(rows: list[dict]) -> str:
    lines = []
    for row in rows:
        pairs = [f"{k}:np.float64({float(v)!r})" for k, v in row.items() if k != "step"]
        lines.append(
            f"\x1b[36m(TaskRunner pid=4711)\x1b[0m step:{row['step']} - " + " - ".join(pairs)
        )
    return "\n".join(lines) + "\n"


def _as_csv(rows: list[dict]) -> str:
    columns = ["step", *NAMES["csv"].values()]
    lines = [",".join(str(row.get(c, "")) for c in columns) for row in rows]
    return "\n".join([",".join(columns), *lines]) + "\n"


FAULT_SUITE = Measured("fault_suite", __doc__, {arm: partial(judged, arm) for arm in ARMS})

ALL = (FAULT_SUITE,)
