"""From completions and problems to rewards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from .tasks import Problem, accepted_golds
from .verifiers import VERIFIERS, verify


def _reward(
    verifier: str,
    completions: Sequence[str],
    problems: Sequence[Problem],
    truncated: Sequence[bool],
) -> list[float]:
    golds = accepted_golds(completions, problems)
    verdicts = verify(verifier, completions, golds, truncated)
    return [verdict.reward for verdict in verdicts]


Reward = Callable[[Sequence[str], Sequence[Problem], Sequence[bool]], Sequence[float]]
"""A reward function: (completion texts, their problems, which were cut) → one number each."""


def reward_by_name(verifier: str) -> Reward:
    """The reward function of a verifier in `VERIFIERS`."""
    if verifier not in VERIFIERS:
        raise ValueError(f"verifier={verifier!r} is unknown; known: {', '.join(VERIFIERS)}")
    return partial(_reward, verifier)


strict_reward = reward_by_name("strict")
