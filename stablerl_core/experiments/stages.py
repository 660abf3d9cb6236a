"""Chapter 24, what a later stage forgets: four stages in small, two skills after each of them.

Stage 1 imitates: the shipped base goes on sorting, and learns to reply to requests with some of
their digits. Stage 2, steps 1-40, is reasoning RL: sorting, the strict verifier. Stage 3, steps
41-80, is preference RL: requests, and users prefer the shortest reply. Stage 4 repairs. Arms
differ from stage 3 on. `sort` is the held-out accuracy of sorting, `requests` the mean preference
for held-out replies, `kl_old` the exact KL(π_θ ‖ policy after stage 2) in nats a token on sorting
prompts. Step 81 stands for "after stage 4".

Predictions, written after exploring one seed of every arm but `clipped`, before the repeated runs:

1. Stage 2 forgets too: `requests` falls by more than 0.1 between stages 1 and 2.
2. `plain`: the reward of stage 3 ends above 0.9, and `sort` loses more than half of what it had.
3. At step 42, the second of the stage, `kl_old` is above 0.01 in every seed while the paired
   interval of the change in `sort` contains 0; at step 50 that interval lies below 0.
4. `clipped` (gradient norm at most 0.1) ends like `plain`: both paired intervals contain 0.
5. `slower` (0.3 of the learning rate) keeps more of `sort` at step 80 and learns less of
   `requests`. Where `requests` reaches 0.8, its `sort` is within 0.15 of that of `plain`.
6. `kl_new` (0.3 × KL to the policy after stage 2, on requests, the prompts of the stage): the new
   skill stays at least 0.2 below `plain`, and `sort` still loses 0.15 or more.
7. `replay` (half of the prompts are sorting problems, same budget) and `distil` (after each step
   one of distillation from the policy after stage 2, on sorting prompts): `sort` ends within 0.1
   of where stage 3 began, `requests` above 0.8.
8. After `plain`, stage 4 as mixed imitation of accepted answers (`mixed_sft`) or as distillation
   from both earlier policies (`cross_stage`): `sort` comes back to within 0.15 of where stage 2
   left it, and `requests` loses less than 0.05.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from ..policy import exact_kl
from ..rewards import MARKER, Problem, Reward, strict_reward, task_by_name
from ..training import (
    RECIPES,
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Rollout,
    Trainer,
    TrainerConfig,
    completion_logits,
)
from ..training.base import _pack, demonstration
from ..training.rollout import decode_completions
from .measured import Measured
from .sampled import completions_of

SECOND, THIRD, FOURTH = 40, 80, 81  # the steps after stages 2, 3 and 4
CHECKED = (41, 42, 45, 50, 60, 70, 80)  # steps of stage 3 after which the skills are measured
LOGGED = ("reward", "heldout_accuracy", "kl_ref", "entropy", "grad_norm")
RATE = 5e-4
IMITATED = 60 * 128  # demonstrations of stage 1


# Two skills: sorting, which a verifier checks, and requests, where users have a preference


@dataclass(frozen=True)
class Requests:
    """`H314159=` asks to name digits from the front; `#3` is the shortest reply, and preferred."""

    name: str = "requests"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        digits = [p.prompt[1:-1] for p in SORT.sample(split, n, seed + 500_000)]
        return [Problem(f"H{text}=", text[0]) for text in digits]


@dataclass(frozen=True)
class Mixed:
    """A sorting problem, a request, and so on in turn: old problems replayed beside new ones."""

    name: str = "mixed"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        half = (n + 1) // 2
        pairs = zip(SORT.sample(split, half, seed), REQUESTS.sample(split, half, seed), strict=True)
        return [problem for pair in pairs for problem in pair][:n]


SORT, REQUESTS, MIXED = task_by_name("sort"), Requests(), Mixed()


def brevity(
    completions: Sequence[str], problems: Sequence[Problem], truncated: Sequence[bool]
) -> list[float]:
    """The preference: (7 − k) / 6 for a reply that names the first k digits, 0 for any other."""
    rewards = []
    for text, problem, cut in zip(completions, problems, truncated, strict=True):
        named, digits = text[1:], problem.prompt[1:-1]
        fits = text[:1] == MARKER and named and digits.startswith(named) and not cut
        rewards.append((len(digits) + 1 - len(named)) / len(digits) if fits else 0.0)
    return rewards


def by_kind(
    completions: Sequence[str], problems: Sequence[Problem], truncated: Sequence[bool]
) -> list[float]:
    """Each problem judged as in its own stage: requests by `brevity`, sorting strictly."""
    judges = (strict_reward, brevity)
    scores = zip(*(judge(completions, problems, truncated) for judge in judges), strict=True)
    return [
        pair[problem.prompt.startswith("H")] for pair, problem in zip(scores, problems, strict=True)
    ]


# Sampling, imitation, distillation


def sample(model, tokenizer, problems: Sequence[Problem], seed: int) -> tuple[Rollout, list[str]]:
    """One completion of each problem, drawn from `model` at temperature 1; and their texts."""
    batch = completions_of(model, tokenizer, problems, seed)
    return batch, decode_completions(tokenizer, batch)


def scores(model, tokenizer, problems: Sequence[Problem], reward: Reward, seed: int):
    """The texts that `model` answers with, one a problem, and what `reward` pays for each."""
    batch, texts = sample(model, tokenizer, problems, seed)
    return texts, list(reward(texts, problems, (~batch.finished).tolist()))


def distance(model, teacher, tokenizer, problems: Sequence[Problem], seed: int) -> Tensor:
    """KL(π_θ ‖ teacher) in nats a token, on completions that the policy itself draws now.

    Exact over the vocabulary, a mean over the drawn tokens. As a loss this is on-policy
    distillation, dense: every token is compared, no reward is needed. Its gradient is that of
    the comparison; which texts are drawn is held fixed.
    """
    batch, _ = sample(model, tokenizer, problems, seed)
    with torch.no_grad():
        goal = completion_logits(teacher, batch)[batch.mask]
    return exact_kl(completion_logits(model, batch)[batch.mask], goal).mean()


def _optimizer(model) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, (0.9, 0.95), weight_decay=0.0)


def _update(model, optimizer, loss: Tensor, rate: float) -> None:
    optimizer.param_groups[0]["lr"] = rate
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def imitate(model, tokenizer, texts: Sequence[tuple[Problem, str]], rate: float, batch: int):
    """Supervised fine-tuning: one pass over demonstrations (problem, completion), in order."""
    optimizer, starts = _optimizer(model), range(0, len(texts), batch)
    for done, start in enumerate(starts):
        share = min(1.0, (done + 1) / 10, 5 * (1 - done / len(starts)))
        problems, completions = zip(*texts[start : start + batch], strict=True)
        ids, counted = _pack(tokenizer, problems, completions)
        logits = model(ids[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits[counted[:, 1:]], ids[:, 1:][counted[:, 1:]])
        _update(model, optimizer, loss, rate * share)


class Distil:
    """One step of on-policy distillation a call, from each teacher on the prompts of its task.

    The learning rate rises over the first ten calls: where policy and teacher are still the
    same, the gradient is rounding, which AdamW would turn into a whole step.
    """

    def __init__(self, trainer: Trainer, teachers: Sequence[tuple], prompts: int = 32):
        self.model, self.tokenizer = trainer.model, trainer.tokenizer
        self.teachers, self.prompts = teachers, prompts
        self.optimizer = _optimizer(trainer.model)
        self.seed, self.calls = trainer.config.seed, 0

    def __call__(self) -> None:
        self.calls += 1
        seed = (self.seed * 1_000_003 + self.calls) * 8 + 5
        parts = []
        for teacher, task in self.teachers:
            problems = task.sample("train", self.prompts, seed)
            parts.append(distance(self.model, teacher, self.tokenizer, problems, seed))
        loss, share = sum(parts) / len(parts), min(1.0, self.calls / 10)
        _update(self.model, self.optimizer, loss, RATE * share)


# The stages


def stage_1(seed: int = 0) -> Trainer:
    """Imitation: the shipped base goes on sorting, and learns to reply to requests."""
    trainer = Trainer(TrainerConfig(steps=THIRD, seed=seed, data=DataConfig(prompts=16)))
    rng, recipe = random.Random(seed), RECIPES["mixtral-cpu-sort"]
    sorting = [
        (p, demonstration(p, recipe, rng)) for p in SORT.sample("train", IMITATED // 2, seed)
    ]
    replies = [
        (p, MARKER + p.prompt[1 : 1 + rng.randint(1, 6)])
        for p in REQUESTS.sample("train", IMITATED // 2, seed)
    ]
    texts = sorting + replies
    rng.shuffle(texts)
    imitate(trainer.model, trainer.tokenizer, texts, rate=1e-3, batch=128)
    return trainer


def stage_2(trainer: Trainer):
    """Reasoning RL on sorting. Returns a copy of the policy it ends with."""
    trainer.run(SECOND, progress=False)
    trainer.reference.load_state_dict(trainer.model.state_dict())
    return copy.deepcopy(trainer.model).requires_grad_(False)


@dataclass(frozen=True)
class Third:
    """How stage 3 is run; the defaults are what one does without a thought of stage 2."""

    rate: float = RATE
    max_grad_norm: float = 1.0
    kl_coef: float = 0.0
    replay: bool = False
    distil: bool = False


def stage_3(trainer: Trainer, old, how: Third, checked: Sequence[int]) -> list[dict]:
    """Preference RL on requests, as `how` says; `old` is the policy after stage 2.

    Returns a row for each of the steps `checked`: what the log has of it, and both skills.
    """
    trainer.task, trainer.reward = (MIXED, by_kind) if how.replay else (REQUESTS, brevity)
    trainer.config = replace(
        trainer.config,
        policy=PolicyConfig(kl_coef=how.kl_coef, kl_estimator="unbiased"),
        numerics=NumericsConfig(learning_rate=how.rate, max_grad_norm=how.max_grad_norm),
    )
    distil, rows = Distil(trainer, [(old, SORT)]), []

    def after(row: dict) -> None:
        if how.distil:
            distil()
        if row["step"] in checked:
            logged = {name: row[name] for name in LOGGED if name in row}
            rows.append({"step": row["step"], **logged, **check(trainer, old)})

    trainer.run(THIRD, progress=False, on_step=after)
    return rows


def mixed_sft(trainer: Trainer, old, new) -> None:
    """Stage 4: imitate answers of the policies after stages 2 and 3 that earned full reward."""
    seed, texts = trainer.config.seed, []
    for model, task, reward in ((old, SORT, strict_reward), (new, REQUESTS, brevity)):
        problems = task.sample("train", 640, seed + 1)
        answers, paid = scores(model, trainer.tokenizer, problems, reward, seed)
        texts += [(p, a) for p, a, r in zip(problems, answers, paid, strict=True) if r == 1]
    random.Random(seed).shuffle(texts)
    imitate(trainer.model, trainer.tokenizer, texts, rate=RATE, batch=64)


def cross_stage(trainer: Trainer, old, new) -> None:
    """Stage 4: distil from the policies after stages 2 and 3, each on the prompts of its stage."""
    distil = Distil(trainer, [(old, SORT), (new, REQUESTS)])
    for _ in range(20):
        distil()


@torch.no_grad()
def check(trainer: Trainer, old=None) -> dict[str, float]:
    """Both skills on held-out problems, and the distance from `old` on the old prompts."""
    model, tokenizer, row = trainer.model, trainer.tokenizer, {}
    for name, task, reward in (("sort", SORT, strict_reward), ("requests", REQUESTS, brevity)):
        paid = scores(model, tokenizer, task.sample("heldout", 256, 7), reward, 8)[1]
        row[name] = sum(paid) / len(paid)
    if old is not None:
        row["kl_old"] = float(distance(model, old, tokenizer, SORT.sample("heldout", 128, 9), 9))
    return row


def run(how: Third, fourth: Callable | None, seed: int) -> list[dict]:
    """All stages of one arm and one seed: a row after each stage, and several within stage 3."""
    trainer = stage_1(seed)
    rows = [{"step": 0, **check(trainer)}]
    old = stage_2(trainer)
    rows.append({"step": SECOND, **check(trainer, old)})
    rows += stage_3(trainer, old, how, CHECKED)
    if fourth:
        fourth(trainer, old, copy.deepcopy(trainer.model).requires_grad_(False))
        rows.append({"step": FOURTH, **check(trainer, old)})
    return rows


def old_skill_at(rows: Sequence[dict], level: float) -> float:
    """`sort` at the moment of stage 3 when `requests` first reaches a level, between two checks.

    Learning one skill costs the other; two ways to train are compared where they have learned
    the same. Raises `ValueError` when the level is never reached.
    """
    checked = [row for row in rows if SECOND <= row["step"] <= THIRD]
    for a, b in zip(checked, checked[1:], strict=False):
        if a["requests"] < level <= b["requests"]:
            share = (level - a["requests"]) / (b["requests"] - a["requests"])
            return a["sort"] + share * (b["sort"] - a["sort"])
    best = max(row["requests"] for row in checked)
    raise ValueError(f"level is {level}, expected at most {best:.2f}, what `requests` reaches")


THIRDS = {
    "plain": Third(),
    "slower": Third(rate=0.3 * RATE),
    "clipped": Third(max_grad_norm=0.1),
    "kl_new": Third(kl_coef=0.3),
    "replay": Third(replay=True),
    "distil": Third(distil=True),
}
FOURTHS = {"mixed_sft": mixed_sft, "cross_stage": cross_stage}

STAGES = Measured(
    name="stages",
    prediction=__doc__,
    # `mixed_sft` and `cross_stage` are `plain` up to step 80.
    arms={arm: partial(run, how, None) for arm, how in THIRDS.items() if arm != "plain"}
    | {arm: partial(run, Third(), fourth) for arm, fourth in FOURTHS.items()},
)

ALL = (STAGES,)
