"""Chapter 20, reading KL and entropy: a step that is too large, and data that are too easy.

Predictions for `kl_entropy`, written after exploring one seed and before the repeated runs
(start: steps 1-10, end: steps 41-60; the runs have 60 steps):

1. Entropy falls by a third or more from step 1 to the end in `healthy`, `large` and `easy`
   alike, so it tells none of them apart.
2. `large` (four times the learning rate) has more than four times the KL per step of `healthy`
   at the start, in every seed; `easy` (the same 16 problems at every step) has less than
   `healthy` at the end.
3. In `large` KL to the reference rises more over steps 10-20 than over steps 1-10 and entropy
   falls more over steps 5-10 than over 1-5, in every seed. Reward ends below 0.1.
   A steepening KL alone is no alarm: in `healthy` too it rises more over 5-10 than over 1-5.
4. `large_clipped` (gradient norm at most 0.1) ends with an accuracy no better than `large`:
   AdamW divides the clipped scale away.
5. `large_kl` (KL penalty 0.3) ends with less than half the KL to the reference of `large`, and
   still with an accuracy below its start: the penalty bounds the distance, not the step.
6. `large_then_small` (the ordinary rate from step 11) ends above its start and above `large`.
7. `easy` ends with a reward above 0.85, more than 0.35 of the groups solved, and an accuracy
   below `healthy`.
8. `easy_slow` (0.3 of the rate) is the same later: entropy ends higher, accuracy no better.
9. `easy_then_all` (the whole task from step 31): entropy rises when the problems change, and
   accuracy ends above `easy`.
10. `screened` (48 problems, each with 6 of 8 right answers or more before training) lies between
    `easy` and `healthy` in accuracy; its reward at step 1 is well below the 0.75 that the
    screening promises, since what was picked for luck has no luck again.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..rewards import Problem, Task, strict_reward
from ..training import DataConfig, NumericsConfig, PolicyConfig, RunLog, Trainer, TrainerConfig
from .experiment import Experiment

RATE = 5e-4


@dataclass(frozen=True)
class Pool:
    """A task that trains on a fixed set of another task's problems; held-out ones stay as is."""

    task: Task
    problems: tuple[Problem, ...]

    @property
    def name(self) -> str:
        return self.task.name

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        """`n` different problems of the pool, or held-out problems of the task."""
        if split != "train":
            return self.task.sample(split, n, seed)
        if n > len(self.problems):
            raise ValueError(f"n={n} problems wanted, the pool holds {len(self.problems)}")
        return random.Random(f"pool/{seed}").sample(self.problems, n)


def candidates(trainer: Trainer, n: int) -> list[Problem]:
    """`n` training problems, other ones for every seed of a run."""
    return trainer.task.sample("train", n, seed=trainer.config.seed * 1_000_003)


def few(trainer: Trainer) -> Pool:
    """As many problems as a step has prompts: every step asks all of them again."""
    return Pool(trainer.task, tuple(candidates(trainer, trainer.config.data.prompts)))


def screened(trainer: Trainer, low: float = 0.75, n: int = 512, keep: int = 48) -> Pool:
    """The first `keep` of `n` problems that the policy now answers right at a rate ≥ `low`."""
    problems = candidates(trainer, n)
    rates = pass_rates(trainer, problems, 8)
    return Pool(
        trainer.task,
        tuple(p for p, rate in zip(problems, rates, strict=True) if rate >= low)[:keep],
    )


def pass_rates(trainer: Trainer, problems: Sequence[Problem], samples: int) -> list[float]:
    """Share of right answers to each problem, from `samples` completions of the present policy."""
    repeated = [p for p in problems for _ in range(samples)]
    texts = trainer.answer(repeated)
    right = strict_reward(texts, repeated, [False] * len(texts))
    return [sum(right[i : i + samples]) / samples for i in range(0, len(right), samples)]


@dataclass(frozen=True)
class OnPools(Experiment):
    """An experiment whose phases may train on a pool of problems, chosen as the phase begins."""

    pools: Mapping[str, Sequence[Callable[[Trainer], Pool] | None]] = field(default_factory=dict)

    def train(self, arm: str, trainer: Trainer, steps: int | None = None, **options) -> RunLog:
        """As in `Experiment`, on the pool of each phase; at the end the task is whole again."""
        whole = trainer.task
        for phase, choose in zip(self.arms[arm], self.pools[arm], strict=True):
            until = min(phase.steps, steps or phase.steps)
            if trainer.version < until:
                trainer.config = replace(phase, seed=trainer.config.seed)
                trainer.task = choose(trainer) if choose else whole
                trainer.run(until, **options)
        trainer.task = whole
        return trainer.log


def _phase(until: int = 60, *, rate: float = RATE, norm: float = math.inf, kl_coef: float = 0.0):
    return TrainerConfig(
        steps=until,
        data=DataConfig(prompts=16),
        policy=PolicyConfig(kl_coef=kl_coef),
        numerics=NumericsConfig(learning_rate=rate, max_grad_norm=norm),
    )


LARGE = 4 * RATE
PHASES = {
    "healthy": [(_phase(), None)],
    "large": [(_phase(rate=LARGE), None)],
    "large_clipped": [(_phase(rate=LARGE, norm=0.1), None)],
    "large_kl": [(_phase(rate=LARGE, kl_coef=0.3), None)],
    "large_then_small": [(_phase(10, rate=LARGE), None), (_phase(), None)],
    "easy": [(_phase(), few)],
    "easy_slow": [(_phase(rate=0.3 * RATE), few)],
    "easy_then_all": [(_phase(30), few), (_phase(), None)],
    "screened": [(_phase(), screened)],
}

KL_ENTROPY = OnPools(
    name="kl_entropy",
    prediction=__doc__,
    arms={arm: [config for config, _ in phases] for arm, phases in PHASES.items()},
    pools={arm: [choose for _, choose in phases] for arm, phases in PHASES.items()},
)

ALL = (KL_ENTROPY,)
