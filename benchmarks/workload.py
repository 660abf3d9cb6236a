"""What both sides are given: a checkpoint, a case, and a stopwatch for the parts of a step."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stablerl_core.rewards import Problem, strict_reward
from stablerl_core.training.base import load_base

PARTS = ("generate", "forward", "backward", "optimizer", "other")
GROUP = 8


@dataclass(frozen=True)
class Case:
    """One GRPO step: `prompts` × `GROUP` completions of at most `new_tokens` tokens.

    `kind` is what the command line calls it. `ends` is False where no completion may end early,
    so that both sides process the same number of tokens. `reward` takes completion texts, their
    problems, and which were cut.
    """

    kind: str
    prompts: int
    new_tokens: int
    ends: bool
    reward: Callable[[Sequence[str], Sequence[Problem], Sequence[bool]], list[float]]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.prompts}×{GROUP}"

    @property
    def rows(self) -> int:
        return self.prompts * GROUP

    @property
    def tokens(self) -> int | None:
        """The exact number of completion tokens in a step, None where they may end early."""
        return None if self.ends else self.rows * self.new_tokens


def coins(texts: Sequence[str], problems: Sequence[Problem], cut: Sequence[bool]) -> list[float]:
    """Half of each group wins, in an order drawn from its texts: no group is ever all equal."""
    rewards: list[float] = []
    for first in range(0, len(texts), GROUP):
        group = [0.0, 1.0] * (GROUP // 2)
        random.Random("".join(texts[first : first + GROUP])).shuffle(group)
        rewards += group
    return rewards


# 64 prompts are the default batch of our Trainer, 24 tokens its default limit.
CASES = (
    Case("fixed", prompts=16, new_tokens=16, ends=False, reward=coins),
    Case("fixed", prompts=64, new_tokens=16, ends=False, reward=coins),
    Case("live", prompts=64, new_tokens=24, ends=True, reward=strict_reward),
)


def save_checkpoint(folder: Path, ends: bool) -> Path:
    """The shipped sorting model as a Hugging Face folder that both sides load.

    Where completions must not end, its end token becomes one that the model has no logit for:
    nothing is suppressed while sampling, on either side.
    """
    model, tokenizer = load_base("mixtral-cpu-sort")
    if not ends:
        tokenizer.add_special_tokens({"eos_token": "<never>"})
        if tokenizer.eos_token_id < model.config.vocab_size:
            raise RuntimeError(f"token {tokenizer.eos_token_id} can be sampled")
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


class Stopwatch:
    """Splits a step into parts: a lap is what has passed since the last one."""

    def __init__(self):
        self.steps: list[dict[str, float]] = []

    def start(self) -> None:
        self.steps.append(dict.fromkeys(PARTS, 0.0))
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        if self.steps:
            self.steps[-1][part] += now - self._last
        self._last = now
