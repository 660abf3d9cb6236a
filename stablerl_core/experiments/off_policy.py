"""Chapter 45, old data: what staleness does to a run, and what leaving old mistakes out does.

All training arms: 40 steps of sorting, 16 prompts × 8 completions, gradient norm at most 1, four
updates a rollout (four minibatches, one pass). The sampler gets the trainer's weights every 1, 4,
8 or 16 steps, so that its weights are 0 to 15 steps old. Final accuracy is held-out, the mean of
steps 30 and 40; a run has collapsed if that is below where the run began.

`staleness`: `trainer_N`, `sampler_N` say every how many steps weights are sent, and whose
log-probabilities are the denominator of the policy ratio. `once_N` makes one update a rollout.
With N = 16: `slow` and `slower` have a third and a tenth of the learning rate. `tis` multiplies
by the importance weight π_old/μ of each token, truncated at 2. These have the trainer's.

`opsm`: `DELTA_N` are the arms `trainer_N` with the off-policy sequence mask at that δ. `pos_N`
drops every completion with a negative advantage, however far it is. `sampler_DELTA` has
N = 16 and the sampler's log-probabilities in the ratio, as DeepSeek-V3.2 writes its objective.

Predictions, written after one seed of most arms and before the repeated runs:

staleness
1. The older the data, the lower the final accuracy: trainer_1 > trainer_4 > trainer_8 >
   trainer_16, which ends below 0.2 and collapses in all seeds.
2. sampler_16 ends above trainer_16 (paired interval above 0), and no higher than its start.
3. One update a rollout does not make old data harmless: once_16 collapses in most seeds, and
   once_1 ends highest of all arms.
4. A third of the learning rate does not save the run (slow_16 collapses in most seeds). A tenth
   does, and learns nothing: slower_16 ends within 0.1 of its start.
5. tis_16 collapses in most seeds: at this age the weights have an effective sample size below
   0.6. tis_4 ends above trainer_4.
6. In steps 9-16, before the first new weights arrive, the training reward of trainer_16 is within
   0.05 of that of steps 1-8, while its held-out accuracy at step 10 is at least 0.1 below its
   start: the reward is that of the old policy.

opsm
7. With N = 16 every δ up to 0.1 ends above trainer_16 by at least 0.3, and these end within 0.1 of
   each other: the values in use are one algorithm here, since old mistakes are far off.
8. δ = 0.5 ends below δ = 0.0001 and above trainer_16.
9. pos_16 ends within 0.1 of 0.0001_16: at this age the mask drops nearly all mistakes, and what
   helps is not to learn from them.
10. With fresh data (N = 1) 0.0001 drops fewer than half of what it drops with N = 16, and does
    not end below trainer_1.
11. pos_N has a lower entropy than 0.0001_N in steps 21-40, for N = 1 and N = 16.
12. sampler_0.1 ends above sampler_16, and not above 0.1_16.

`stale_gradient`: 16 steps of training on fresh data, with one update a rollout (`once`) or four
(`four`); then completions of the policies 0 to 16 steps back, and their gradient at the policy of
now under each rule, with ratio 1. `cos_…` is its cosine with the gradient of 2048 fresh
completions, `along_…` its part along that one in units of it, `kept_…` the share of tokens with
an advantage that keep one. `step` is the age.

`seed_rules`: what the first seed text calls masking, in training: `threshold_N` keeps token
weights π_old/μ below 0.95 and sets the others to 0, `decay_N` weights tokens by e^(−0.1·position).

Predictions, written after one seed of each arm of `stale_gradient` and none of `seed_rules`:

13. Without a rule the cosine falls with age, in `four` to below 0.3 at age 8. With δ up to 0.1
    it stays within 0.1 of that of fresh data at every age, and so does dropping all mistakes.
    δ = 0.5 lies between. Importance weights, token or sequence, lie between too.
14. On fresh data the threshold keeps no token at all, so threshold_1 ends exactly where it
    began (nothing but rounding moves it). threshold_16 collapses in most seeds: what it keeps are
    the tokens that the policy has turned away from, old mistakes above all.
15. decay_1 ends within 0.1 of trainer_1 and decay_16 collapses in most seeds: in answers of eight
    tokens the decay changes little, and it is blind to age.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..policy import group_advantages, policy_objective
from ..system import (
    importance_weights,
    off_policy_sequence_mask,
    positional_decay,
    weight_threshold_mask,
)
from ..training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Rollout,
    SystemConfig,
    Trainer,
    TrainerConfig,
    completion_logp,
)
from .experiment import Experiment
from .measured import Measured

RATE, STEPS = 5e-4, 40
AGES = (1, 4, 8, 16)  # weights are sent every so many steps
DELTAS = (1e-4, 0.01, 0.1, 0.5)
ALL_MISTAKES = -100.0  # a δ below any mean log-ratio: every negative completion is dropped


def stale(
    sync_every: int, *, updates: int = 4, rate: float = RATE, **system
) -> tuple[TrainerConfig]:
    """A run whose sampler gets new weights every `sync_every` steps; `system` as in its group."""
    return (
        TrainerConfig(
            steps=STEPS,
            data=DataConfig(prompts=16),
            policy=PolicyConfig(minibatches=updates),
            numerics=NumericsConfig(learning_rate=rate),
            system=SystemConfig(sync_every=sync_every, **system),
        ),
    )


STALENESS = Experiment(
    name="staleness",
    prediction=__doc__,
    arms={f"trainer_{n}": stale(n) for n in AGES}
    | {f"sampler_{n}": stale(n, old_logp="sampler") for n in AGES[1:]}
    | {f"once_{n}": stale(n, updates=1) for n in (1, 16)}
    | {"slow_16": stale(16, rate=RATE / 3), "slower_16": stale(16, rate=RATE / 10)}
    | {f"tis_{n}": stale(n, correction="tis") for n in (4, 16)},
)


def masked(n: int, delta: float, **system) -> tuple[TrainerConfig]:
    """`stale` with the off-policy sequence mask."""
    return stale(n, off_policy_threshold=delta, **system)


OPSM = Experiment(
    name="opsm",
    prediction=__doc__,
    arms={f"{d:g}_1": masked(1, d) for d in (1e-4, 0.1)}
    | {f"{d:g}_{n}": masked(n, d) for n in (4, 16) for d in DELTAS}
    | {f"pos_{n}": masked(n, ALL_MISTAKES) for n in (1, 4, 16)}
    | {f"sampler_{d:g}": masked(16, d, old_logp="sampler") for d in (1e-4, 0.1)},
)


@dataclass(frozen=True)
class Scored:
    """A rollout that some policy μ sampled, judged, and scored by the trainer's policy of now.

    advantages (B,); logp (B, T) log π_θ with its gradient; `batch.sampler_logp` is log μ.
    """

    batch: Rollout
    advantages: Tensor
    logp: Tensor

    @property
    def distance(self) -> Tensor:
        """(B,) mean over the tokens of log μ/π_θ: what the off-policy sequence mask compares."""
        gap = (self.batch.sampler_logp - self.logp.detach()) * self.batch.mask
        return gap.sum(1) / self.batch.mask.sum(1)


def scored(trainer: Trainer, sampler: PreTrainedModel, prompts: int, number: int) -> Scored:
    """Completions that `sampler` draws of new problems; `number` chooses them and the draws."""
    size = trainer.config.data.group_size
    problems = trainer._draw(number, prompts)
    sampling = trainer._sampling(trainer.config.policy)
    batch = trainer._sample(sampler, problems, number, 0, size, sampling)
    rewards = trainer._judge(batch, [p for p in problems for _ in range(size)])
    return Scored(batch, group_advantages(rewards, size), completion_logp(trainer.model, batch))


def rule_weights(given: Scored) -> dict[str, Tensor]:
    """What each rule multiplies the advantage of a token with, (B, T) each, 0 at padding."""
    mask, advantages = given.batch.mask, given.advantages
    pair = (given.logp.detach(), given.batch.sampler_logp)
    weights = {"none": torch.ones_like(pair[0])}
    for delta in (*DELTAS, ALL_MISTAKES):
        kept = off_policy_sequence_mask(*pair, advantages, mask, delta)
        name = "all mistakes" if delta == ALL_MISTAKES else f"{delta:g}"
        weights[name] = kept.float().expand(mask.shape)
    for level in ("token", "sequence"):
        found = importance_weights(*pair, mask, level=level, mode="truncate", cap=2.0)
        weights[level] = found.values
    ratio = (pair[0] - pair[1]).masked_fill(~mask, 0).exp()
    weights |= {"threshold": weight_threshold_mask(ratio), "decay": positional_decay(mask)}
    return {name: w * mask for name, w in weights.items()}


def gradient(trainer: Trainer, given: Scored, weights: Tensor | None = None) -> Tensor:
    """GRPO's gradient at ratio 1, all parameters in one vector; `weights` as in `rule_weights`."""
    used = given.advantages if weights is None else given.advantages[:, None] * weights
    loss, _ = policy_objective("grpo", given.logp, None, used, given.batch.mask)
    parameters = list(trainer.model.parameters())
    found = torch.autograd.grad(
        loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    return torch.cat([g.flatten() for g in found])


def gradient_by_age(
    seed: int, updates: int, ages: Sequence[int] = (0, 1, 2, 4, 8, 16), prompts: int = 64
) -> list[dict]:
    """What old completions say of the gradient of now, a row an age; see the prediction."""
    (config,) = stale(1, updates=updates)
    trainer = Trainer(replace(config, seed=seed))
    past = [deepcopy(trainer.model)]
    for _ in range(max(ages)):
        trainer.step()
        past.append(deepcopy(trainer.model))
    true = gradient(trainer, scored(trainer, trainer.model, 4 * prompts, 10_000))
    rows = []
    for age in ages:
        given = scored(trainer, past[-1 - age], prompts, 10_001 + age)
        rows.append({"step": age} | _signs(given) | _compared(trainer, given, true))
    return rows


def _signs(given: Scored) -> dict[str, float]:
    """Mean distance of the completions with positive and with negative advantage."""
    named = {"right": given.advantages > 0, "wrong": given.advantages < 0}
    return {f"distance_{name}": float(given.distance[rows].mean()) for name, rows in named.items()}


def _compared(trainer: Trainer, given: Scored, true: Tensor) -> dict[str, float]:
    row, had = {}, (given.advantages[:, None] != 0) & given.batch.mask
    for name, weights in rule_weights(given).items():
        found = gradient(trainer, given, weights)
        row[f"cos_{name}"] = float(torch.cosine_similarity(found, true, dim=0))
        row[f"along_{name}"] = float(found @ true / (true @ true))
        row[f"kept_{name}"] = float(((weights != 0) & had).sum() / had.sum())
    return row


class Reweighted(Trainer):
    """A trainer with a rule of the first seed text, `threshold` or `decay`, in every update."""

    def __init__(self, config: TrainerConfig, rule: str):
        self.rule = rule
        super().__init__(config)

    def _one_update(self, batch, advantages, old_logp, weights, rows):
        if self.rule == "decay":
            weights = positional_decay(batch.mask)
        else:
            ratio = (old_logp - batch.sampler_logp).masked_fill(~batch.mask, 0).exp()
            weights = weight_threshold_mask(ratio)
        return super()._one_update(batch, advantages, old_logp, weights, rows)


def seed_rule(seed: int, rule: str, sync_every: int) -> list[dict]:
    """One run of a `Reweighted` trainer, thinned as an `Experiment` thins it."""
    (config,) = stale(sync_every)
    log = Reweighted(replace(config, seed=seed), rule).run(progress=False)
    return [row for row in log if row["step"] % 5 == 0 or row["step"] == 1]


STALE_GRADIENT = Measured(
    name="stale_gradient",
    prediction=__doc__,
    arms={
        name: partial(gradient_by_age, updates=updates)
        for name, updates in {"once": 1, "four": 4}.items()
    },
)

SEED_RULES = Measured(
    name="seed_rules",
    prediction=__doc__,
    arms={
        f"{rule}_{n}": partial(seed_rule, rule=rule, sync_every=n)
        for rule in ("threshold", "decay")
        for n in (1, 16)
    },
)

ALL = (STALENESS, OPSM, STALE_GRADIENT, SEED_RULES)
