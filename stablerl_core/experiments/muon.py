"""Chapter 32, Muon: what it does to an update, and what a limit of its norm adds.

`muon_sweep`: the supervised warm start of the sorting task from random weights, 40 steps of 64
demonstrations, gradients clipped at 1, with AdamW, Muon and seed 002's norm-capped Muon at five
learning rates, one for all parameters. `norm_cap same size` moves its hidden matrices 11 times as
fast as `norm_cap 0.01` (and the rest at .01). `muon_outlier`: the same, but the batch of step 15
has scrambled answers and a gradient 1000 times too large, and no gradient clipping unless an arm
says so. `muon_rl`: GRPO, 8 prompts × 8, 30 steps, from the shipped warm start. Losses are means of
steps 36-40, accuracies the last one. Predictions, written after one seed of most arms had been
looked at and before the repeated runs:

1. Sweep. Muon's best rate is .03, AdamW's .003 or .01; each at its best rate, Muon's loss is lower.
2. At rate .1 AdamW's loss is above 1.5, Muon's below 1.
3. The norm cap is worse than Muon at the rates .001 to .03, and its own best rate is the largest,
   .1. `norm_cap same size` does not differ from `muon 0.01` by anything that five seeds can show.
4. `muon_clip 0.1` (τ = 100) is `muon 0.1` bit for bit, since no logit reaches 100; the same in RL
   at .002. With τ = 8 heads are clipped at every step and the loss is the same within .1.
5. No run with Muon has a loss spike (1.5 times the mean of the five losses before).
6. Outlier. `muon`, `norm_cap`, `norm_cap same size` and `adamw` end at least 1 nat above
   `muon, no outlier`. The cap does not make the outlier's step shorter than the step before it,
   and at least ten steps after it go uphill on their own batch in the mean over seeds.
   With the gradient clipped the end is within .1 of no outlier at all.
7. RL. At rate .0005 AdamW and Muon do not differ measurably. At .002 AdamW ends below its start in
   all seeds and Muon ends higher than AdamW. The norm cap at .002 ends higher than Muon at .002,
   but not measurably higher than Muon at .0005.

Afterwards, since AdamW was best at the lowest rate that `muon_rl` had, `muon_rl_low`: AdamW at
.00025 and .000125. Predicted before they ran:

8. AdamW at .00025 ends higher than at .0005, and does not differ measurably from Muon at .0005.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..numerics import Muon, MuonClip, QKClip, clip_gradients, fused_splits
from ..rewards import task_by_name
from ..training import RECIPES, DataConfig, NumericsConfig, TrainerConfig, small_moe
from ..training.base import demonstrations, imitation_loss
from .experiment import Experiment
from .measured import Measured

RECIPE = replace(RECIPES["mixtral-cpu-sort"], batch=64, steps=40)
RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SAME_SIZE = 11.0  # 0.2 √64 · .87 √64: how much longer a matrix of 64 × 64 moves without the cap
SEED_RULE = {"update_norm_cap": 1.0, "scale": "none", "nesterov": False}
OUTLIER_STEP, OUTLIER_SIZE = 15, 1000.0
WATCHED = "model.layers.0.self_attn.q_proj.weight"
NEVER = 1e9  # a bound that no logit reaches
SPIKE = 1.5  # times the mean of the five losses before


@dataclass(frozen=True)
class Warm:
    """One arm of the warm start: who updates the hidden matrices, and how fast.

    optimizer: `adamw`, `muon`, `muon_clip` (with `tau`), or `norm_cap`, Muon as seed 002 cuts it.
    rate: of all parameters, except that hidden matrices get `matrix_rate` where it is given.
    max_grad_norm: bound of the gradient's norm before the optimizer sees it. outlier: the batch
    of step 15 has the answers of other problems, and a gradient 1000 times too large.
    """

    optimizer: str
    rate: float
    matrix_rate: float | None = None
    tau: float = 100.0
    max_grad_norm: float = 1.0
    outlier: bool = False

    def make(self, model: nn.Module, clip: QKClip) -> torch.optim.Optimizer:
        """The optimizer over all parameters of `model`."""
        if self.optimizer == "adamw":
            options = {"betas": (0.9, 0.95), "weight_decay": 0.0}
            return torch.optim.AdamW(model.parameters(), lr=self.rate, **options)
        options = {"weight_decay": 0.0, "splits": fused_splits(model), "adamw_lr": self.rate}
        options |= SEED_RULE if self.optimizer == "norm_cap" else {}
        rate = self.matrix_rate or self.rate
        if self.optimizer == "muon_clip":
            return MuonClip(model.named_parameters(), rate, qk_clip=clip, **options)
        return Muon(model.named_parameters(), rate, **options)


def scrambled(ids: Tensor, counted: Tensor, seed: int) -> Tensor:
    """The batch with its counted tokens dealt out anew: a damaged batch."""
    order = torch.randperm(int(counted.sum()), generator=torch.Generator().manual_seed(seed))
    ids = ids.clone()
    ids[counted] = ids[counted][order]
    return ids


def warm_start(arm: Warm, seed: int, steps: int = RECIPE.steps) -> list[dict]:
    """Teach a fresh model the sorting answers; a row a step.

    Rows hold the `loss` of the step's batch before the update (nats a token), the gradient's norm
    before clipping, the largest attention logit, how far a matrix of 64 × 64 (the first query
    projection) `moved`, ‖ΔW‖_F, and `downhill`, the cosine between that move and the one that
    this batch's gradient asks for.
    """
    model, tokenizer = small_moe(RECIPE.preset, seed=seed)
    task, rng = task_by_name(RECIPE.task, RECIPE.task_options), random.Random(seed)
    clip = QKClip(model, arm.tau if arm.optimizer == "muon_clip" else NEVER, exact=True)
    optimizer = arm.make(model, clip)
    rates = [group["lr"] for group in optimizer.param_groups]
    rows: list[dict] = []
    for step in range(1, steps + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * _share(step)
        ids, counted = demonstrations(tokenizer, task, RECIPE, rng, seed * 1_000_003 + step)
        out = arm.outlier and step == OUTLIER_STEP
        ids = scrambled(ids, counted, seed) if out else ids
        loss = imitation_loss(model, ids, counted)
        (loss * OUTLIER_SIZE if out else loss).backward()
        row = {"step": step, "loss": loss.item()} | _update(arm, model, optimizer, clip)
        rows.append(row)
    return rows


def _share(step: int) -> float:
    """Of the full rate: a rise over ten steps, and a fall over the last fifth."""
    return min(1.0, step / 10) * min(1.0, 5 * (1 - (step - 1) / RECIPE.steps))


def _update(arm: Warm, model: nn.Module, optimizer, clip: QKClip) -> dict:
    """One update from the gradients that are there, and what it did."""
    watched = dict(model.named_parameters())[WATCHED]
    norm = float(clip_gradients(model.parameters(), arm.max_grad_norm))
    before, slope = watched.detach().clone(), watched.grad.clone()
    optimizer.step()
    optimizer.zero_grad()
    seen = optimizer.clipped if arm.optimizer == "muon_clip" else clip.step()
    move = watched.detach() - before
    return {
        "grad_norm": norm,
        "moved": float(move.norm()),
        "downhill": float(torch.cosine_similarity(-slope.ravel(), move.ravel(), 0)),
        "attention_logit_max": seen.max_logit,
        "clipped_heads": seen.clipped,
    }


def spikes(losses: list[float], ratio: float = SPIKE) -> int:
    """How many losses exceed `ratio` times the mean of the five before them."""
    return sum(losses[i] > ratio * math.fsum(losses[i - 5 : i]) / 5 for i in range(5, len(losses)))


def sweep_rows(arm: Warm, seed: int) -> list[dict]:
    """A warm start, a row each five steps: means, but the largest logit, and all `spikes` so far.

    `clipped_heads` is the mean number a step.
    """
    rows = warm_start(arm, seed)
    losses = [row["loss"] for row in rows]
    found = []
    for end in range(5, len(rows) + 1, 5):
        part = rows[end - 5 : end]
        row = {name: math.fsum(r[name] for r in part) / 5 for name in part[0]}
        row |= {"step": end, "spikes": spikes(losses[:end])}
        row["attention_logit_max"] = max(r["attention_logit_max"] for r in part)
        found.append(row)
    return found


def outlier_rows(arm: Warm, seed: int) -> list[dict]:
    """A warm start with or without a damaged batch, step by step."""
    names = ("step", "loss", "grad_norm", "moved", "downhill")
    return [{name: row[name] for name in names} for row in warm_start(arm, seed)]


def _named(optimizer: str, rate: float) -> str:
    return f"{optimizer} {rate:g}"


SWEEP = Measured(
    "muon_sweep",
    __doc__,
    {
        _named(optimizer, rate): partial(sweep_rows, Warm(optimizer, rate))
        for optimizer in ("adamw", "muon", "norm_cap")
        for rate in RATES
    }
    | {
        "norm_cap same size": partial(sweep_rows, Warm("norm_cap", 1e-2, SAME_SIZE * 1e-2)),
        "muon_clip 0.1": partial(sweep_rows, Warm("muon_clip", 1e-1)),
        "muon_clip 0.1, tau 8": partial(sweep_rows, Warm("muon_clip", 1e-1, tau=8.0)),
    },
)


def _hurt(optimizer: str, *, outlier: bool = True, max_grad_norm: float = math.inf, **options):
    rate = 5e-3 if optimizer == "adamw" else 1e-2
    arm = Warm(optimizer, rate, max_grad_norm=max_grad_norm, outlier=outlier, **options)
    return partial(outlier_rows, arm)


OUTLIER = Measured(
    "muon_outlier",
    __doc__,
    {
        "muon, no outlier": _hurt("muon", outlier=False),
        "muon": _hurt("muon"),
        "norm_cap": _hurt("norm_cap"),
        "norm_cap same size": _hurt("norm_cap", matrix_rate=SAME_SIZE * 1e-2),
        "muon, gradient clipped": _hurt("muon", max_grad_norm=1.0),
        "adamw": _hurt("adamw"),
        "adamw, gradient clipped": _hurt("adamw", max_grad_norm=1.0),
    },
)

RL_RATES = (5e-4, 1e-3, 2e-3)
RL_OPTIMIZERS = (("adamw", "adamw"), ("muon", "muon"), ("norm_cap", "update_norm_cap"))


def _rl(optimizer: str, rate: float) -> tuple[TrainerConfig]:
    data = DataConfig(prompts=8, eval_every=15)
    return (
        TrainerConfig(
            steps=30,
            probe_every=10,
            data=data,
            numerics=NumericsConfig(optimizer=optimizer, learning_rate=rate),
        ),
    )


RL = Experiment(
    "muon_rl",
    __doc__,
    {
        _named(name, rate): _rl(optimizer, rate)
        for name, optimizer in RL_OPTIMIZERS
        for rate in RL_RATES
    }
    | {"muon_clip 0.002": _rl("muon_clip", 2e-3)},
)

RL_LOW = Experiment(
    "muon_rl_low",
    __doc__,
    {_named("adamw", rate): _rl("adamw", rate) for rate in (2.5e-4, 1.25e-4)},
)

ALL = (SWEEP, OUTLIER, RL, RL_LOW)
