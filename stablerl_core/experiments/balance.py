"""Chapter 23, balance: do negative samples drown the positive ones, and does BAPO help?

`balance` has three settings of 16 prompts × 8 at learning rate 5e-4, no gradient clipping:

- `replay_…`: four updates a rollout, 50 steps, exactly `clipping_4`, whose `grpo`, `dapo` and
  `bapo` (the paper's defaults) are the arms to compare with, seed by seed;
- `partial_…`: completions interrupted every 4 tokens, one update, ratios against the sampler;
- `rare_…`: four updates on problems that the policy answered right at most once in eight.

`code` is the released BAPO code; `even` is BAPO in the paper's order with the share measured by
gradient and a target of 1/2. `tight_low` and `high` are GRPO with 1 − clip_low = .9, or 1 +
clip_high = 3; `bonus` has an entropy bonus of .1, `slower` a third of the learning rate.
`balance_steps` takes single rollouts apart: after ten steps at four updates a rollout, the share
of the pull at each of 16 updates of one more (`replay`); and 24 steps at one update, the two
halves of the gradient and the change of entropy (`steps`). `_rare`: the hard problems again.

Predictions, written with `clipping_4` known, after one seed of `rare_…` (24 steps), of
`balance_steps` (`replay`, `steps`) and of 12 steps of `partial_grpo` and of `even`, and before
the repeated runs:

1. The share of the pull of positive advantages stays between .47 and .53 in every arm, rare
   positives or not: advantages of a group add up to 0.
2. bapo with the paper's defaults never moves its bounds, here or with rare positives: it is
   GRPO with clip_low .4. So `tight_low` ends above clipping_4's grpo, and that above bapo.
3. `even` moves its bounds at almost every step and ends within .05 of grpo in accuracy.
4. `code` drives c_low to its limit .8 and then c_high far up. It ends above bapo, whose only
   other difference that matters is c_low .6.
5. `high` has an entropy above grpo at the end, by less than .05 nats.
6. `bonus` ends at least .1 nats above grpo in entropy, and no better in accuracy.
7. `slower` ends above grpo in accuracy and in entropy.
8. `partial_…`: the four arms end within .05 of each other.
9. `rare_…`: `even` and `code` end above grpo and bapo, the setting BAPO's claim is made for.
10. The gradient of negative advantages has the larger 2-norm in most steps though its pull is
    one half; with rare positives the positive one has.
11. Entropy falls where the prediction says it falls (more than nine steps in ten). Over steps
    the size correlates: softmax about .3, natural about 0.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..policy import entropy, entropy_change, policy_objective
from ..training import (
    DataConfig,
    NumericsConfig,
    Rollout,
    SystemConfig,
    Trainer,
    TrainerConfig,
    completion_logits,
    completion_logp,
)
from .clipping import RATE, arm
from .kl_entropy import OnPools, Pool, candidates, pass_rates
from .measured import Measured

CODE = {
    "order": "code",
    "statistic": "code",
    "target": 0.5,
    "low_range": (0.6, 0.8),
    "high_range": (1.2, 2.0),
    "low_step": 0.05,
    "high_step": 0.05,
    "dual_clip": 3.0,
}
EVEN = {"statistic": "gradient", "target": 0.5}


def hard(trainer: Trainer, high: float = 0.125, n: int = 512) -> Pool:
    """Of `n` training problems, those that the policy now answers right at a rate ≤ `high`."""
    problems = candidates(trainer, n)
    rates = pass_rates(trainer, problems, 8)
    return Pool(trainer.task, tuple(p for p, r in zip(problems, rates, strict=True) if r <= high))


def pulls_by_update(trainer: Trainer, epochs: int = 4) -> list[dict]:
    """Use one rollout for `epochs` passes of the configured minibatches, and look at each update.

    A row an update, before it steps: `step` its number, and `share`, that of positive advantages
    in Σ|∂loss/∂log π_θ|. An update whose rows have no gradient leaves no row.
    """
    batch, _, advantages = trainer._collect(trainer.version + 1)
    with torch.no_grad():
        old_logp = completion_logp(trainer.model, batch)
    parts = torch.arange(len(advantages)).chunk(trainer.config.policy.minibatches)
    rows = []
    for number, chosen in enumerate(parts * epochs, start=1):
        update = trainer._one_update(batch, advantages, old_logp, None, chosen)
        positive, total = update.pull.tolist()
        if total:
            rows.append({"step": number, "share": positive / total})
    return rows


def gradient_parts(trainer: Trainer, batch: Rollout, advantages: Tensor) -> dict[str, float]:
    """The on-policy gradient of the parameters as a sum of two, from Â > 0 and from Â < 0.

    Returns their 2-norms `positive` and `negative`, that of their sum, `both`, and the `cosine`
    between them.
    """
    logp, parts = completion_logp(trainer.model, batch), []
    parameters = list(trainer.model.parameters())
    for kept in (advantages.clamp(min=0), advantages.clamp(max=0)):
        loss, _ = policy_objective("grpo", logp, None, kept, batch.mask)
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        parts.append(torch.cat([g.flatten() for g in found if g is not None]))
    up, down = parts
    return {
        "positive": float(up.norm()),
        "negative": float(down.norm()),
        "both": float((up + down).norm()),
        "cosine": float(torch.cosine_similarity(up, down, dim=0)),
    }


def entropy_step(trainer: Trainer) -> dict[str, float]:
    """One training step: what it was predicted to do to the entropy, and what it did.

    `measured` is the change of the exact entropy, averaged over the rollout's own positions;
    `natural` and `softmax` are `entropy_change` with step size 1, averaged over its tokens.
    Both are nats a token, but the size of a prediction means nothing here: AdamW sets the step.
    """
    number = trainer.version + 1
    batch, row, advantages = trainer._collect(number)
    counted = batch.mask
    with torch.no_grad():
        before = completion_logits(trainer.model, batch)[counted]
    wide = advantages[:, None].expand(counted.shape)[counted]
    given = (before, batch.tokens[counted], wide)
    found = {"step": number, "reward": row["reward"]} | gradient_parts(trainer, batch, advantages)
    for kind in ("natural", "softmax"):
        change = entropy_change(*given, step_size=1.0, gradient=kind)
        found[kind] = float(change.mean())
    trainer._update(batch, advantages)
    trainer.version = number
    with torch.no_grad():
        after = completion_logits(trainer.model, batch)[counted]
    return found | {"measured": float((entropy(after) - entropy(before)).mean())}


def quadrant_steps(trainer: Trainer, distance: float = 0.02) -> dict[str, tuple[float, float]]:
    """Four small steps from the same policy, each along the gradient of one kind of token only.

    A token is likely if log π > −H. Returns predicted and measured change of entropy, in nats a
    token of the rollout: the mean of `entropy_change` ("softmax", step size 1), and what a step
    of length `distance` in parameter space does to the exact entropy.
    """
    batch, _, advantages = trainer._collect(trainer.version + 1)
    counted, found = batch.mask, {}
    wide = advantages[:, None].expand(counted.shape)
    with torch.no_grad():
        before = completion_logits(trainer.model, batch)[counted]
    likely = torch.zeros_like(counted)
    likely[counted] = batch.sampler_logp[counted] > -entropy(before)
    for name, chosen in {
        "likely, advantage > 0": likely & (wide > 0),
        "unlikely, advantage > 0": ~likely & (wide > 0),
        "likely, advantage < 0": likely & (wide < 0),
        "unlikely, advantage < 0": ~likely & (wide < 0),
    }.items():
        kept = wide * chosen
        given = (before, batch.tokens[counted], kept[counted])
        predicted = entropy_change(*given, step_size=1.0, gradient="softmax").mean()
        after = _entropy_after(trainer, batch, kept, distance)
        found[name] = (float(predicted), after - float(entropy(before).mean()))
    return found


def _entropy_after(trainer: Trainer, batch: Rollout, kept: Tensor, distance: float) -> float:
    """Mean entropy at the rollout's positions after a step so far down the slope; θ stays."""
    parameters = list(trainer.model.parameters())
    start = [p.detach().clone() for p in parameters]
    logp = completion_logp(trainer.model, batch)
    loss, _ = policy_objective("grpo", logp, None, kept, batch.mask, aggregation="token")
    slope = torch.autograd.grad(loss, parameters)
    norm = float(torch.nn.utils.get_total_norm(slope))
    with torch.no_grad():
        torch._foreach_add_(parameters, slope, alpha=-distance / norm)
        after = entropy(completion_logits(trainer.model, batch)[batch.mask]).mean()
        torch._foreach_copy_(parameters, start)
    return float(after)


def _policy(mode: tuple[TrainerConfig, ...], **changes) -> tuple[TrainerConfig, ...]:
    (config,) = mode
    return (replace(config, policy=replace(config.policy, **changes)),)


def _rules(mode: tuple[TrainerConfig, ...], *names: str) -> dict[str, tuple[TrainerConfig, ...]]:
    return {name: _policy(mode, **RULES[name]) for name in names}


RULES = {
    "grpo": {},
    "bapo": {"objective": "bapo"},
    "code": {"objective": "bapo", "options": CODE},
    "even": {"objective": "bapo", "options": EVEN},
    "tight_low": {"clip_low": 0.1, "clip_high": 0.2},
    "high": {"clip_low": 0.2, "clip_high": 2.0},
    "bonus": {"entropy_coef": 0.1},
}
REPLAY, SLOWER = arm("grpo", 4), arm("grpo", 4, rate=RATE / 3)
PARTIAL = (
    TrainerConfig(
        steps=40,
        data=DataConfig(prompts=16),
        numerics=NumericsConfig(learning_rate=RATE, max_grad_norm=math.inf),
        system=SystemConfig(partial_tokens=4, old_logp="sampler"),
    ),
)
RARE = (replace(REPLAY[0], steps=32, data=DataConfig(prompts=16, eval_every=8)),)
FOUR = ("grpo", "bapo", "code", "even")
ARMS = {
    "replay": _rules(REPLAY, "code", "even", "tight_low", "high", "bonus") | {"slower": SLOWER},
    "partial": _rules(PARTIAL, *FOUR),
    "rare": _rules(RARE, *FOUR),
}

BALANCE = OnPools(
    "balance",
    __doc__,
    {f"{mode}_{name}": config for mode, arms in ARMS.items() for name, config in arms.items()},
    pools={
        f"{mode}_{name}": [hard if mode == "rare" else None]
        for mode, arms in ARMS.items()
        for name in arms
    },
)


def started(updates: int, seed: int, rare: bool = False) -> Trainer:
    """A trainer of GRPO with so many updates a rollout, on all problems or on the hard ones."""
    trainer = Trainer(replace(arm("grpo", updates)[0], seed=seed))
    if rare:
        trainer.task = hard(trainer)
    return trainer


def _pulls(seed: int, rare: bool = False) -> list[dict]:
    trainer = started(4, seed, rare)
    trainer.run(10, progress=False)  # the learning rate has risen, the policy moves
    return pulls_by_update(trainer)


def _steps(seed: int, rare: bool = False) -> list[dict]:
    trainer = started(1, seed, rare)
    return [entropy_step(trainer) for _ in range(24)]


BALANCE_STEPS = Measured(
    "balance_steps",
    __doc__,
    {
        "replay": _pulls,
        "replay_rare": partial(_pulls, rare=True),
        "steps": _steps,
        "steps_rare": partial(_steps, rare=True),
    },
)
ALL = (BALANCE, BALANCE_STEPS)
