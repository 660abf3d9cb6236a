"""Chapter 12, where the gradient vanishes: groups without variance, and what to do about them.

Two measurements on sorting digits, from the base that answers about 42 % of six digits, 31 % of
three, and next to none of any other number.

`gradient_noise`: the gradient of the untrained base, for groups of G = 2 … 32 (see the function).
`curricula`: problems of 3, 6, 7, 8, 9 and 10 digits, of which the base can do the first two; 8
groups of 8, learning rate 3e-4, and a budget of 3072 completions for each arm, whatever they are
spent on. `uniform` draws all levels alike. `dynamic sampling` does too, and draws again until 8
groups have a signal, at most three times; `dynamic sampling, unpaid` goes on for 48 updates,
whatever they cost. `frozen bucket` measures each level with 64 completions (paid from the budget)
and draws those between 30 and 70 %. `moving bucket` follows the policy, with a tenth each for
solved and for hard levels. `easy first` takes each level in its order for 8 steps.

Predictions, written after exploring seed 100 (gradient noise, uniform, the moving bucket) and
before the repeated runs:

1. Silent groups: more than half with G = 2, less than 0.15 with G = 8.
2. "Groups below 8 have 2.1 times the variance": the noise of eight groups of 4 is between 1.5 and
   2.5 times that of eight groups of 8. At 64 completions whatever G is, the noise with G = 4 is
   not above that with G = 8, and with G = 32 it is more than twice that with G = 8.
3. At 64 completions `steady` is highest with G = 2 and lowest with G = 32: more problems tell more
   than more siblings do.
4. Uniform draws have more than 0.6 silent groups; accuracy of the two levels in reach still rises.
5. Dynamic sampling makes at most half of the updates of uniform. At the same budget no difference
   in the accuracy of these levels is measurable. Unpaid, it ends above uniform, and has drawn more
   than twice as many completions.
6. Both buckets are above uniform by more than 0.05 at 1024 and at 2048 completions, and no
   difference between them is measurable.
7. Easy first ends lowest of all: from step 17 more than 0.9 of its groups are silent.
8. The four other levels stay below 0.02 in every arm: nothing makes a gradient where no answer is
   ever right.

Added after the repeated runs of `curricula` and before those of `coasting`. Easy first fell from
0.46 at 1024 completions to 0.34 at 2048, in steps of which hardly a group had a gradient. AdamW
does not stop where the gradient does: its step is m/√v, which without a gradient shrinks by
0.9/√0.95 = 0.923 a step, so it coasts up to 13 full steps on in the direction of the last ones.
`coasting` repeats easy first up to 2048 completions, and once more with the update taken back in
every step without any gradient (`held`). `coasted` is the length of the way in those steps.

9. Held, accuracy at 2048 completions is above that of easy first by more than 0.05, and no fall
   from 1024 to 2048 is measurable.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from ..policy import group_advantages, policy_objective
from ..rewards import Levels, MovingLevels, StagedLevels, buckets, strict_reward, task_by_name
from ..training import (
    DataConfig,
    NumericsConfig,
    Trainer,
    TrainerConfig,
    completion_logp,
    load_base,
)
from ..training.rollout import decode_completions
from .measured import Measured
from .sampled import completions_of

# --- what a batch of groups tells ---------------------------------------------------------------

SIZES = (2, 4, 8, 16, 32)
COMPLETIONS, PROMPTS, BATCHES = 64, 8, 6


def gradient_noise(seed: int) -> list[dict]:
    """The base model's gradient from 64 completions in 64/G groups, a row a group size (`step`).

    Against a reference u, the direction of the gradient of 2048 other completions (256 groups,
    advantages not divided): `along`, the mean over batches of g·u, what a batch is expected to
    give; `noise`, the mean of |g|² less its square; `steady` = along² / mean |g|², 1 if all
    batches said the same. `silent`: groups without variance. Ending `_none`: advantages are not
    divided by the standard deviation. `noise_prompts`: 8 groups, whatever G is (up to 16).
    """
    base, rows = load_base("mixtral-cpu-sort"), []
    places = range(1000 * seed + 100, 1000 * seed + 116)
    unit = sum(_batch(base, 16, 8, place)["none"] for place in places)
    unit /= unit.norm()
    for size in SIZES:
        places = range(1000 * seed, 1000 * seed + BATCHES)
        same = [_batch(base, COMPLETIONS // size, size, place) for place in places]
        row = {"step": size, "silent": sum(float(b["silent"]) for b in same) / BATCHES}
        for scale, ending in (("std", ""), ("none", "_none")):
            told = _told([b[scale] for b in same], unit)
            row |= {f"{name}{ending}": value for name, value in told.items()}
        if size <= 16:
            apart = [_batch(base, PROMPTS, size, place)["std"] for place in places]
            row["noise_prompts"] = _told(apart, unit)["noise"]
        rows.append(row)
    return rows


def _batch(base, prompts: int, size: int, place: int) -> dict[str, Tensor]:
    """Gradients of one batch by the advantage's scale, and its share of silent groups."""
    model, tokenizer = base
    problems = task_by_name("sort").sample("train", prompts, seed=place)
    drawn = completions_of(model, tokenizer, problems, place, group_size=size)
    texts, cut = decode_completions(tokenizer, drawn), (~drawn.finished).tolist()
    rewards = torch.tensor(strict_reward(texts, [p for p in problems for _ in range(size)], cut))
    found = {
        scale: _gradient(model, drawn, group_advantages(rewards, size, scale=scale))
        for scale in ("std", "none")
    }
    groups = rewards.view(prompts, size)
    return found | {"silent": (groups == groups[:, :1]).all(1).float().mean()}


def _told(gradients: Sequence[Tensor], unit: Tensor) -> dict[str, float]:
    along = sum(float(g @ unit) for g in gradients) / len(gradients)
    square = sum(float(g.square().sum()) for g in gradients) / len(gradients)
    return {"along": along, "noise": square - along**2, "steady": along**2 / square}


def _gradient(model, drawn, advantages: Tensor) -> Tensor:
    """Gradient of the mean over completions of Â Σ log π, flat."""
    model.zero_grad()
    logp = completion_logp(model, drawn)
    given = (logp, drawn.sampler_logp, advantages, drawn.mask)
    rows = float(len(advantages))
    loss, _ = policy_objective("reinforce", *given, aggregation="constant", denominator=rows)
    (-loss).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


# --- six levels, two of them in reach: what to draw with a budget of completions ----------------

REACHED, DEAD = ("3 digits", "6 digits"), ("7 digits", "8 digits", "9 digits", "10 digits")
LEVELS = {name: task_by_name("sort", {"digits": int(name.split()[0])}) for name in REACHED + DEAD}
BUDGET, EVERY, SIZE, RATE = 3072, 1024, 8, 3e-4
TRIES = 64  # completions of each level that the frozen buckets cost
ASKED = 192  # held-out problems of each level in an evaluation


def accuracies(model, tokenizer, split: str, tries: int, seed: int) -> dict[str, float]:
    """Share of right answers to `tries` problems of each level, one sample each."""
    found = {}
    for level, task in LEVELS.items():
        problems = task.sample(split, tries, seed)
        drawn = completions_of(model, tokenizer, problems, seed)
        texts, cut = decode_completions(tokenizer, drawn), (~drawn.finished).tolist()
        found[level] = sum(strict_reward(texts, problems, cut)) / tries
    return found


def curriculum(arm: str, seed: int) -> Levels:
    """The task of an arm: what it draws, and how that follows the policy."""
    if arm == "easy first":
        return StagedLevels(LEVELS, steps_each=BUDGET // (len(LEVELS) * PROMPTS * SIZE))
    if arm == "frozen bucket":
        rates = accuracies(*load_base("mixtral-cpu-sort"), "train", TRIES, seed)
        return Levels(LEVELS, dict.fromkeys(buckets(rates)["middle"], 1.0))
    if arm == "moving bucket":
        return MovingLevels(LEVELS)
    return Levels(LEVELS)


def trainer(arm: str, seed: int = 0) -> Trainer:
    """The trainer of one arm and seed at its start; the reward tells the task how levels went."""
    task = curriculum(arm, seed)
    data = DataConfig(
        prompts=PROMPTS,
        group_size=SIZE,
        eval_every=BUDGET,
        eval_prompts=4,
        dynamic_sampling=arm.startswith("dynamic"),
    )
    numerics = NumericsConfig(learning_rate=RATE)
    config = TrainerConfig(
        steps=BUDGET, seed=seed, probe_every=BUDGET, data=data, numerics=numerics
    )

    def reward(texts, problems, cut):
        rewards = strict_reward(texts, problems, cut)
        task.observe(problems, rewards)
        return rewards

    return Trainer(config, task=task, reward=reward)


def levels_rows(
    arm: str, seed: int, budget: int = BUDGET, updates: int = 0, hold: bool = False
) -> list[dict]:
    """One run until its budget is spent: a row each `EVERY` completions (`step`).

    Given `updates`, the run ends after so many instead, with a row every 16, and `step` counts
    them. Otherwise the step is rounded down to `EVERY`; `spent` is exact. `reached` is the mean
    held-out accuracy of the two levels that the base can do at all, `dead` that of the others;
    `silent` the share of groups without variance among all drawn since the row before; `draws` the
    share of levels in reach in the mix now in force; `updates` the steps so far. `hold` takes the
    update of a step without any gradient back; `coasted` is how far such updates went.
    """
    run, spent = trainer(arm, seed), TRIES * len(LEVELS) * (arm == "frozen bucket")
    rows, silent, coasted = [{"step": 0} | _measured(run, seed)], [], 0.0
    while run.version < updates if updates else spent < budget:
        before = parameters_to_vector(run.model.parameters()).detach().clone()
        row = run.step()
        if row["zero_variance_groups"] == 1:
            after = parameters_to_vector(run.model.parameters()).detach()
            coasted += float((after - before).norm())
            if hold:
                vector_to_parameters(before, run.model.parameters())
        groups = int(row.get("drawn_groups", PROMPTS))
        spent += groups * SIZE
        silent += [row["zero_variance_groups"]] * groups
        done, every = (run.version, 16) if updates else (spent, EVERY)
        if done >= rows[-1]["step"] + every:
            new = {"step": done - done % every, "spent": spent}
            new |= {"silent": sum(silent) / len(silent), "updates": run.version}
            rows.append(new | {"coasted": coasted} | _measured(run, seed))
            silent, coasted = [], 0.0
    return rows


def _measured(run: Trainer, seed: int) -> dict[str, float]:
    found = accuracies(run.model, run.tokenizer, "heldout", ASKED, 1000 + seed)
    mix = run.task.mix()
    means = {
        n: sum(found[v] for v in ls) / len(ls) for n, ls in (("reached", REACHED), ("dead", DEAD))
    }
    return means | found | {"draws": sum(mix[level] for level in REACHED)}


ARMS = ("uniform", "dynamic sampling", "frozen bucket", "moving bucket", "easy first")
UNPAID = "dynamic sampling, unpaid"
WHILE = BUDGET // (PROMPTS * SIZE)  # the updates of an arm that draws once a step

ALL = (
    Measured("gradient_noise", __doc__, {"base": gradient_noise}),
    Measured(
        "curricula",
        __doc__,
        {arm: partial(levels_rows, arm) for arm in ARMS}
        | {UNPAID: partial(levels_rows, UNPAID, updates=WHILE)},
    ),
    Measured(
        "coasting",
        __doc__,
        {
            "easy first": partial(levels_rows, "easy first", budget=2 * EVERY),
            "held": partial(levels_rows, "easy first", budget=2 * EVERY, hold=True),
        },
    ),
)
