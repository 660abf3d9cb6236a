"""Curricula: which problems to draw next, from how the policy did on them."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .difficulty import PassRate, wilson
from .tasks import Problem, Task


@dataclass(frozen=True)
class LevelProblem(Problem):
    """A problem that knows the name of its level."""

    level: str = ""


@dataclass
class Levels:
    """A task made of levels, each of them a task, drawn in given shares.

    `shares` are weights, normalised to sum 1; None draws all levels alike. Subclasses move them.
    Raises `ValueError`: no level, a share for an unknown level, no positive share.
    """

    levels: Mapping[str, Task]
    shares: Mapping[str, float] | None = None
    name: str = "levels"

    def __post_init__(self):
        if not self.levels:
            raise ValueError("levels is empty: expected at least one task")
        self.mix()

    def mix(self) -> dict[str, float]:
        """Share of each level in the next draw."""
        given = dict.fromkeys(self.levels, 1.0) if self.shares is None else dict(self.shares)
        unknown = sorted(set(given) - set(self.levels))
        total = sum(given.values())
        if unknown or min(given.values()) < 0 or total <= 0:
            raise ValueError(
                f"shares={given}: expected weights ≥ 0, one above, of {list(self.levels)}"
            )
        return {name: given.get(name, 0.0) / total for name in self.levels}

    def sample(self, split: str, n: int, seed: int) -> list[LevelProblem]:
        """`n` problems of a split: training problems in the mix of now, held-out ones alike."""
        mix = self.mix() if split == "train" else dict.fromkeys(self.levels, 1.0)
        rng = random.Random(f"{self.name}/{split}/{seed}")
        drawn = rng.choices(list(mix), list(mix.values()), k=n)
        source = {
            level: iter(self.levels[level].sample(split, drawn.count(level), seed))
            for level in set(drawn)
        }
        return [_at(level, next(source[level])) for level in drawn]

    def observe(self, problems: Sequence[Problem], rewards: Sequence[float]) -> None:
        """Learn from judged completions; fixed shares ignore them."""


def _at(level: str, problem: Problem) -> LevelProblem:
    return LevelProblem(problem.prompt, problem.gold, problem.accepts, level)


@dataclass
class MovingLevels(Levels):
    """A curriculum that follows the policy: levels whose pass rate is in the bucket come first.

    Pass rates change as the policy learns, so they are counted from the training completions
    themselves and old ones fade: with each observation the counts before it weigh `memory` of
    what they did. The next draw goes to the levels between `low` and `high`; while there are
    none, to the one closest to the middle. Two shares are set aside: `replay` for solved levels
    (above `high`), which MiMo draws 10 % of the time, as dropping them made its updates
    unstable (arXiv 2505.07608, §3), and `explore` for those below `low`, whose pass rate would
    else never be seen to rise. A level not yet tried counts as one in the bucket.

    State that no checkpoint of the trainer holds: a resumed run begins with fresh counts.
    """

    low: float = 0.3
    high: float = 0.7
    replay: float = 0.1
    explore: float = 0.1
    memory: float = 0.8
    counts: dict[str, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self):
        if not 0 <= self.low < self.high <= 1:
            raise ValueError(f"low={self.low}, high={self.high}: must be 0 ≤ low < high ≤ 1")
        aside = self.replay + self.explore
        if min(self.replay, self.explore) < 0 or aside >= 1 or not 0 <= self.memory < 1:
            raise ValueError(
                f"replay={self.replay}, explore={self.explore}, memory={self.memory}: shares ≥ 0 "
                "with a sum below 1, and a memory in [0, 1)"
            )
        super().__post_init__()

    def observe(self, problems: Sequence[LevelProblem], rewards: Sequence[float]) -> None:
        """Count the rewards (0 to 1) of one step's completions by level."""
        self.counts = {
            level: (self.memory * right, self.memory * tries)
            for level, (right, tries) in self.counts.items()
        }
        for problem, reward in zip(problems, rewards, strict=True):
            right, tries = self.counts.get(problem.level, (0.0, 0.0))
            self.counts[problem.level] = (right + float(reward), tries + 1)

    def rates(self) -> dict[str, PassRate]:
        """Pass rate of each level that was tried, with its interval."""
        tried = {level: self.counts[level] for level in self.levels if level in self.counts}
        return {level: wilson(*count) for level, count in tried.items() if count[1] > 1e-9}

    def mix(self) -> dict[str, float]:
        rates = {level: rate.rate for level, rate in self.rates().items()}
        solved = [level for level, rate in rates.items() if rate > self.high]
        hard = [level for level, rate in rates.items() if rate < self.low]
        chosen = [level for level in self.levels if level not in solved + hard]
        if not chosen:
            middle = (self.low + self.high) / 2
            chosen = [min(rates, key=lambda level: abs(rates[level] - middle))]
        asides = ((solved, self.replay), (hard, self.explore))
        weights = dict.fromkeys(self.levels, 0.0)
        for levels, share in ((chosen, 1 - sum(s for ls, s in asides if ls)), *asides):
            for level in levels:
                weights[level] += share / len(levels)
        return weights


@dataclass
class StagedLevels(Levels):
    """A fixed order, easy first, that asks nobody: each level for `steps_each` observed steps.

    The last level is kept from then on. Its place is state that no checkpoint holds.
    """

    steps_each: int = 10
    step: int = 0

    def observe(self, problems: Sequence[Problem], rewards: Sequence[float]) -> None:
        self.step += 1

    def mix(self) -> dict[str, float]:
        stage = min(self.step // self.steps_each, len(self.levels) - 1)
        return {name: float(i == stage) for i, name in enumerate(self.levels)}
