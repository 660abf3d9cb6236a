r"""Chapter 13, shaping: what each addition to "right or wrong" does to the target.

8 prompts × 8 completions, learning rate 3e-4, 50 steps, at most 18 tokens. `sort`: six digits; the
base is right in 40 %, and a quarter of its answers hold drafts. `add`: two numbers, right in 35 %.

- `plain`: right or wrong. `overlong`: DAPO's penalty over the last 8 tokens, half weight (rewards
  are 0 and 1, not ±1). `filter`: cut completions leave the loss. `format`: 1 more for exactly one
  marked answer. `partial`: the share of digits in their places instead.
- `hard_strict`, `hard_partial`: seven digits, which the base has never seen.
- `outlier_mean`, `outlier_quantile`: 2 % of all completions are paid 20 more by mistake; the
  group's baseline is its mean, or its 0.4-quantile. `outlier_capped`: the mean, rewards cut off
  at 1.
- `add_strict`, `sv_substring`, `sv_levels`, `sv_proof`: adding. In the last three the first marked
  answer counts, and a second one withdraws it: who writes one answer says "correct", who writes
  more says "incorrect". Paid are seed 002's reward with its substring bug, its three levels as
  meant, and DeepSeekMath-V2's form. `first_right`, `withdrawn` and `caught` (wrong and withdrawn)
  are shares of 128 answers to held-out problems.

Predictions, written after exploring one seed (100) of the last three at a higher rate, and before
the repeated runs; "at the end" is steps 41-50, differences are paired by seed:

1. `overlong` answers are shorter at the end than `plain` ones; no difference in accuracy.
2. `filter`: more is cut at the end than in `plain`; no difference in accuracy.
3. `format`: its part above 0.95 at the end; no difference in accuracy to `plain`.
4. `partial`: no difference in accuracy to `plain`.
5. `hard_strict` earns nothing (below 0.02; over 0.9 of the groups tied). `hard_partial` rises by
   more than 0.05; strict accuracy stays below 0.1.
6. `outlier_mean` ends below `plain` in accuracy; `outlier_quantile` is no better than
   `outlier_mean`, since the outlier is still in the spread that divides; `outlier_capped` does not
   differ from `plain`.
7. `sv_substring`: withdrawn above 0.9, whatever is right; first answers right in at least 0.25.
8. `sv_levels` takes the sure half: withdrawn above 0.9, first answers right below 0.1, reward
   above 0.4.
9. `sv_proof`: first answers right more often than in `sv_levels`, less often than in `add_strict`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..policy import group_advantages
from ..rewards import (
    MARKER,
    Problem,
    final_answer,
    proof_reward,
    self_verification,
    self_verification_substring,
    strict_reward,
)
from ..training import DataConfig, NumericsConfig, PolicyConfig, Trainer, TrainerConfig
from .measured import Measured

RATE, STEPS, LIMIT = 3e-4, 50, 18
Reward = Callable[[Sequence[str], Sequence[Problem], Sequence[bool]], Sequence[float]]
KEPT = (
    *("step", "reward", "reward_part:answer", "reward_part:format", "reward_part:overlong"),
    *("heldout_accuracy", "length", "truncated", "zero_variance_groups", "entropy", "kl_ref"),
)


# Exactly: what a group of G, drawn from a policy over a few kinds of answers, does to each kind.


def expected_advantages(
    probs: Sequence[float], rewards: Sequence[float], group_size: int, **options
) -> Tensor:
    """E[Â | kind] (K,): the mean advantage of an answer of each kind, over its G − 1 siblings.

    probs, rewards: of K kinds of answers; siblings are drawn from probs, which is π_θ here. Every
    composition of the siblings is counted with its multinomial probability. `options` as in
    `group_advantages`.
    """
    kinds = len(probs)
    parts = list(compositions(group_size - 1, kinds))
    counts = torch.tensor(parts)
    p = torch.tensor(probs, dtype=torch.float64)
    weight = torch.exp(
        math.lgamma(group_size)
        - torch.lgamma(counts.double() + 1).sum(1)
        + torch.special.xlogy(counts.double(), p).sum(1)
    )
    siblings = torch.stack([torch.arange(kinds).repeat_interleave(row) for row in counts])
    paid = torch.tensor(rewards, dtype=torch.float64)
    out = []
    for kind in range(kinds):
        group = torch.cat([torch.full((len(counts), 1), kind), siblings], dim=1)
        found = group_advantages(paid[group].flatten(), group_size, **options)
        out.append((weight * found.view(-1, group_size)[:, 0]).sum())
    return torch.stack(out)


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `total` as an ordered sum of `parts` whole numbers ≥ 0."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def exact_flow(
    start: Sequence[float], earns: Callable[[Tensor], Tensor], steps: int, rate: float = 0.5
) -> Tensor:
    """Probabilities (steps + 1, K) of a softmax policy that climbs its expected reward exactly.

    start: K probabilities; earns: probabilities → expected reward of each kind (K,). The gradient
    of Σ p_a R_a to the logits is p_a (R_a − Σ p_b R_b): no sampling, no noise.
    """
    logits = torch.log(torch.tensor(start, dtype=torch.float64))
    path = [torch.softmax(logits, 0)]
    for _ in range(steps):
        p = path[-1]
        rewards = earns(p)
        logits = logits + rate * p * (rewards - (p * rewards).sum())
        path.append(torch.softmax(logits, 0))
    return torch.stack(path)


# Live: rewards that settings cannot name.


def in_place(texts, problems, truncated) -> list[float]:
    """Partial credit: the share of the gold answer's characters that stand in their places."""
    answers = [final_answer(text) or "" for text in texts]
    return [
        0.0 if cut else sum(map(str.__eq__, answer, problem.gold)) / len(problem.gold)
        for answer, problem, cut in zip(answers, problems, truncated, strict=True)
    ]


def with_outliers(texts, problems, truncated, *, cap: float = math.inf) -> list[float]:
    """Right or wrong, and 20 more for 5 texts in 256, by their hash: a fault of the scorer."""
    paid = strict_reward(texts, problems, truncated)
    faulty = [
        hashlib.sha256((problem.prompt + text).encode()).digest()[0] < 5
        for text, problem in zip(texts, problems, strict=True)
    ]
    return [min(cap, r + 20.0 * bad) for r, bad in zip(paid, faulty, strict=True)]


def first_and_withdrawn(text: str) -> tuple[str, bool]:
    """The first marked answer, and whether another follows it."""
    answers = text.split(MARKER)[1:]
    return (answers[0] if answers else ""), len(answers) > 1


def verified(texts, problems, truncated, *, rule: str) -> list[float]:
    """Pays for the first marked answer, and for withdrawing it if it is wrong."""
    out = []
    for text, problem, cut in zip(texts, problems, truncated, strict=True):
        answer, withdrawn = first_and_withdrawn(text)
        right = answer == problem.gold
        if cut or not answer:
            out.append(0.0)
        elif rule == "substring":
            said = "incorrect" if withdrawn else "correct"
            out.append(self_verification_substring(answer, problem.gold, said))
        elif rule == "levels":
            out.append(self_verification(right, not withdrawn))
        else:
            out.append(proof_reward(float(right), float(not withdrawn)))
    return out


def config(task: str = "sort", *, baseline: str = "mean", **data) -> TrainerConfig:
    """Settings of an arm."""
    return TrainerConfig(
        steps=STEPS,
        probe_every=10,
        data=DataConfig(task=task, prompts=8, max_new_tokens=LIMIT, eval_prompts=128, **data),
        policy=PolicyConfig(baseline=baseline),
        numerics=NumericsConfig(learning_rate=RATE, max_grad_norm=math.inf),
    )


OVERLONG = {"overlong": {"weight": 0.5, "buffer": 8}}
ONE_ANSWER = {"format": {"weight": 1.0, "pattern": "#[^#]+"}}
SEVEN = {"digits": 7}
ARMS: dict[str, tuple[TrainerConfig, Reward]] = {
    "plain": (config(), strict_reward),
    "overlong": (config(shaping=OVERLONG), strict_reward),
    "filter": (config(mask_truncated=True), strict_reward),
    "format": (config(shaping=ONE_ANSWER), strict_reward),
    "partial": (config(), in_place),
    "hard_strict": (config(task_options=SEVEN), strict_reward),
    "hard_partial": (config(task_options=SEVEN), in_place),
    "outlier_mean": (config(), with_outliers),
    "outlier_quantile": (config(baseline="quantile"), with_outliers),
    "outlier_capped": (config(), partial(with_outliers, cap=1.0)),
    "add_strict": (config("add"), strict_reward),
    "sv_substring": (config("add"), partial(verified, rule="substring")),
    "sv_levels": (config("add"), partial(verified, rule="levels")),
    "sv_proof": (config("add"), partial(verified, rule="proof")),
}


def trainer(arm: str, seed: int = 0) -> Trainer:
    """The trainer of one arm and seed, at its start."""
    settings, reward = ARMS[arm]
    return Trainer(replace(settings, seed=seed), reward=reward)


def first_answers(run: Trainer, n: int = 128) -> dict[str, float]:
    """Shares of answers to held-out problems: first one right, withdrawn, wrong and withdrawn."""
    problems = run.task.sample("heldout", n, seed=1)
    seen = [first_and_withdrawn(text) for text in run.answer(problems)]
    right = [answer == p.gold for (answer, _), p in zip(seen, problems, strict=True)]
    withdrawn = [gone for _, gone in seen]
    caught = [gone and not ok for gone, ok in zip(withdrawn, right, strict=True)]
    shares = {"first_right": right, "withdrawn": withdrawn, "caught": caught}
    return {name: sum(flags) / n for name, flags in shares.items()}


def rows(arm: str, seed: int) -> list[dict]:
    """One run: the rows of its log, for adding with the first answers at every evaluation."""
    run = trainer(arm, seed)
    adds = run.config.data.task == "add"
    more = {0: first_answers(run)} if adds else {}

    def watch(row: dict) -> None:
        if adds and "heldout_accuracy" in row:
            more[row["step"]] = first_answers(run)

    run.run(progress=False, on_step=watch)
    kept = [row for row in run.log if row["step"] % 2 == 0 or row["step"] == 1]
    return [{k: row[k] for k in KEPT if k in row} | more.get(row["step"], {}) for row in kept]


SHAPING = Measured("shaping", __doc__, {arm: partial(rows, arm) for arm in ARMS})

ALL = (SHAPING,)
