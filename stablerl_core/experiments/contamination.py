"""Chapter 11, memory or skill: a training set that holds a few problems of the evaluation.

Sorting six digits, 8 prompts × 8 completions, learning rate 5e-4, 60 steps. `pool of 4`, `16` and
`64` train on so many problems of the held-out split, drawn again and again: they are duplicates
and they are contamination. `fresh` draws a new training problem each time. `pool of 4, with KL`
adds a penalty of 0.1. `seen before` is no reinforcement learning: the base imitates 16 leaked
texts, question and answer, for 40 updates, as a model does that met them in pretraining.

Five exams of 128 questions: `leaked` (those of the pool), `reordered` (the same digits in another
order: another question, the same answer), `changed` (one digit of a leaked question replaced) and
`clean` (held-out, digits of none of the pool). `parrot` is the share of answers to `changed` that
are the right answer of the question before the change. `continued` is the share of the pool's
questions whose second half the policy writes greedily when shown the first.

Predictions, written after exploring seed 100 (pools of 4 and 16 and fresh problems, at first
without `changed`, `parrot` and `continued`; those on 20 steps with a pool of 4 and on `seen
before`) and before the repeated runs:

1. pool of 4: reward in steps 51-60 above 0.8 and leaked accuracy above 0.8 at the end, clean
   accuracy below its start by more than 0.1.
2. pool of 16: leaked accuracy rises by more than 0.25; no rise of clean accuracy is measurable.
3. pool of 64: clean accuracy rises, less than leaked accuracy does.
4. fresh: clean accuracy rises, and leaked accuracy by an amount that is not measurably different.
5. Reordering does not unmask memory: with pools of 4 and 16 reordered accuracy ends less than
   0.15 below leaked accuracy, and more than 0.2 above clean accuracy.
6. Changing a digit does: with a pool of 4 changed accuracy ends more than 0.2 below leaked
   accuracy and parrot above 0.1; with fresh problems parrot stays below 0.1.
7. The KL penalty slows both and separates nothing: with it clean accuracy ends above that of the
   pool of 4 without it, and still no higher than it began.
8. Reinforcement learning trains no question token, so `continued` stays below 0.05 in every arm
   with a pool; in `seen before` it ends above 0.8.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ..rewards import (
    Problem,
    Task,
    final_answer,
    memorization_probe,
    strict_answer,
    task_by_name,
)
from ..training import DataConfig, PolicyConfig, Sampling, Trainer, TrainerConfig, load_base
from ..training.base import _pack, imitation_loss
from ..training.rollout import decode_completions, encode_prompts, rollout
from .measured import Measured
from .sampled import completions_of

STEPS, EVERY, TRIES = 60, 10, 128


@dataclass(frozen=True)
class Pool:
    """A training set of few problems, drawn again and again; held-out ones are the task's own."""

    problems: Sequence[Problem]
    task: Task
    name: str = "pool"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        if split != "train":
            return self.task.sample(split, n, seed)
        rng, size = random.Random(f"pool/{seed}"), len(self.problems)
        rounds = range(-(-n // size))
        return [p for _ in rounds for p in rng.sample(self.problems, size)][:n]


def leaked(size: int, seed: int) -> list[Problem]:
    """`size` problems of the held-out split with different digits, as they leak into training."""
    drawn = task_by_name("sort").sample("heldout", 4 * size, 500 + seed)
    return list({p.gold: p for p in drawn}.values())[:size]


def _asked(digits: Sequence[str]) -> Problem:
    return Problem(f"S{''.join(digits)}=", "".join(sorted(digits)))


def reordered(problem: Problem, rng: random.Random) -> Problem:
    """The same digits in another order: another question with the same answer."""
    digits = list(problem.gold)
    while len(set(digits)) > 1 and _asked(digits).prompt == problem.prompt:
        rng.shuffle(digits)
    return _asked(digits)


def changed(problem: Problem, rng: random.Random, known: set[str]) -> Problem:
    """One digit replaced, so that the answer is another one, and none that is `known`."""
    while True:
        digits = list(problem.prompt[1:-1])
        digits[rng.randrange(len(digits))] = str(rng.randrange(10))
        if (new := _asked(digits)).gold not in known:
            return new


def exams(pool: Sequence[Problem], seed: int) -> dict[str, list[Problem]]:
    """Four sets of `TRIES` questions: leaked, reordered, changed (of the pool in turn), clean."""
    rng, known = random.Random(seed), {p.gold for p in pool}
    same = [pool[i % len(pool)] for i in range(TRIES)]
    others = task_by_name("sort").sample("heldout", 4 * TRIES, 900 + seed)
    return {
        "leaked": same,
        "reordered": [reordered(p, rng) for p in same],
        "changed": [changed(p, rng, known) for p in same],
        "clean": [p for p in others if p.gold not in known][:TRIES],
    }


def marks(model, tokenizer, sets: dict[str, list[Problem]], seed: int) -> dict[str, float]:
    """Share of right answers in each exam, one sample a question; `parrot` and `continued`."""
    found = {}
    for name, problems in sets.items():
        drawn = completions_of(model, tokenizer, problems, seed)
        texts, cut = decode_completions(tokenizer, drawn), (~drawn.finished).tolist()
        asked = zip(texts, problems, cut, strict=True)
        verdicts = [strict_answer(t, p.gold, truncated=c) for t, p, c in asked]
        found[name] = sum(v.reward for v in verdicts) / TRIES
        if name == "changed":
            before = zip(texts, sets["leaked"], strict=True)
            found["parrot"] = sum(final_answer(t) == p.gold for t, p in before) / TRIES
    questions = sorted({p.prompt for p in sets["leaked"]})
    probe = memorization_probe(questions, partial(continued, model, tokenizer))
    return found | {"continued": probe.exact}


def continued(model, tokenizer, prefixes: list[str]) -> list[str]:
    """What the policy writes greedily after each prefix, at most eight tokens."""
    prompt, mask = encode_prompts(tokenizer, prefixes, model.device)
    drawn = rollout(
        model,
        prompt,
        mask,
        group_size=1,
        max_new_tokens=8,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator().manual_seed(0),
        sampling=Sampling(top_k=1),
    )
    return decode_completions(tokenizer, drawn)


def trainer(size: int, seed: int = 0, kl_coef: float = 0.0) -> Trainer:
    """A run on a pool of `size` leaked problems, or on fresh ones if 0."""
    data = DataConfig(prompts=8, eval_every=STEPS, eval_prompts=8)
    policy = PolicyConfig(kl_coef=kl_coef)
    config = TrainerConfig(steps=STEPS, seed=seed, probe_every=20, data=data, policy=policy)
    task = task_by_name("sort")
    return Trainer(config, task=Pool(leaked(size, seed), task) if size else task)


def rows(size: int, kl_coef: float, seed: int, steps: int = STEPS) -> list[dict]:
    """One run: a row each `EVERY` steps, means since the row before and the marks of all exams.

    A run on fresh problems sits the exams of a pool of 16.
    """
    run, sets = trainer(size, seed, kl_coef), exams(leaked(size or 16, seed), seed)
    found = [{"step": 0} | marks(run.model, run.tokenizer, sets, seed)]
    for step in range(EVERY, steps + 1, EVERY):
        done = [run.step() for _ in range(EVERY)]
        means = {
            name: sum(row[name] for row in done) / EVERY
            for name in ("reward", "zero_variance_groups", "entropy")
        }
        found.append({"step": step} | means | marks(run.model, run.tokenizer, sets, seed))
    return found


def seen_before(seed: int, updates: int = 40) -> list[dict]:
    """Marks before and after the base imitates 16 leaked texts, question and answer."""
    (model, tokenizer), pool = load_base("mixtral-cpu-sort"), leaked(16, seed)
    sets = exams(pool, seed)
    found = [{"step": 0} | marks(model, tokenizer, sets, seed)]
    ids, _ = _pack(tokenizer, pool, [f"#{p.gold}" for p in pool])
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.0)
    for _ in range(updates):
        optimizer.zero_grad()
        imitation_loss(model, ids, ids != tokenizer.pad_token_id).backward()
        optimizer.step()
    return [*found, {"step": updates} | marks(model, tokenizer, sets, seed)]


POOLS = {"pool of 4": 4, "pool of 16": 16, "pool of 64": 64, "fresh": 0}
ALL = (
    Measured(
        "contamination",
        __doc__,
        {arm: partial(rows, size, 0.0) for arm, size in POOLS.items()}
        | {"pool of 4, with KL": partial(rows, 4, 0.1), "seen before": seen_before},
    ),
)
