"""Tasks whose answers can be checked, split so that training and evaluation cannot overlap."""

from __future__ import annotations

import ast
import hashlib
import operator
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from functools import partial
from typing import Protocol

MARKER = "#"
SPLITS = ("train", "heldout")
HELDOUT_SHARE = 0.1


@dataclass(frozen=True)
class Problem:
    """What the model reads (`prompt`), and the answer that a verifier compares with (`gold`).

    Where more than one answer is right, `accepts` says of an answer text whether it is.
    """

    prompt: str
    gold: str
    accepts: Callable[[str], bool] | None = field(default=None, compare=False, repr=False)


class Task(Protocol):
    """Anything that hands out problems of one of the two `SPLITS`, repeatably from a seed."""

    name: str

    def sample(self, split: str, n: int, seed: int) -> list[Problem]: ...


def split_of(key: str) -> str:
    """The split that a problem belongs to, a function of the problem alone.

    A hash of `key` decides, so no seed, order or number of draws can put one problem into both
    splits; equivalent problems (the same digits in another order) share a key.
    """
    digest = hashlib.sha256(key.encode()).digest()
    return "heldout" if digest[0] < 256 * HELDOUT_SHARE else "train"


def _draw(make: Callable[[random.Random], tuple[str, Problem]], split, n, seed) -> list[Problem]:
    """`n` problems of a split; `make` returns a split key and a problem.

    Raises `ValueError` for an unknown split, and when the task's options leave the split empty.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: expected one of {SPLITS}")
    rng = random.Random(f"{split}/{seed}")
    problems: list[Problem] = []
    missed = 0
    while len(problems) < n:
        key, problem = make(rng)
        missed = missed + 1 if split_of(key) != split else 0
        if missed == 1000:  # by chance alone: 0.9^1000
            raise ValueError(f"the task's options leave no {split} problem, as {key!r}; widen them")
        if not missed:
            problems.append(problem)
    return problems


@dataclass(frozen=True)
class SortDigits:
    """Write the digits of the prompt in ascending order: `S314159=` → `#113459`."""

    digits: int = 6
    name: str = "sort"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        def make(rng: random.Random) -> tuple[str, Problem]:
            text = "".join(str(rng.randrange(10)) for _ in range(self.digits))
            gold = "".join(sorted(text))
            return gold, Problem(f"S{text}=", gold)

        return _draw(make, split, n, seed)


@dataclass(frozen=True)
class AddNumbers:
    """Add two numbers: `A27+58=` → `#85`. The sum of a and b is the same problem as b and a."""

    digits: int = 2
    name: str = "add"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        width, high = self.digits, 10**self.digits

        def make(rng: random.Random) -> tuple[str, Problem]:
            a, b = rng.randrange(high), rng.randrange(high)
            key = f"{min(a, b)}+{max(a, b)}"
            return key, Problem(f"A{a:0{width}d}+{b:0{width}d}=", str(a + b))

        return _draw(make, split, n, seed)


class ReasoningGym:
    """Any task of the library reasoning-gym by name (extra `tasks`), for example `chain_sum`.

    Questions are used as the library words them, followed by a line break. Its own scoring is
    not: by default it pays part of the reward to any text that *contains* the answer, a hole
    that a policy finds. Answers are compared exactly; where several are right, `accepts` has a
    checker (`countdown`). `options` go to the library's task configuration.

    Raises `ImportError` without the extra and `ValueError` for an unknown name.
    """

    def __init__(self, name: str, options: dict | None = None):
        try:
            import reasoning_gym
        except ImportError:
            raise ImportError(
                "the task needs reasoning-gym: pip install 'stablerl_core[tasks]'"
            ) from None
        self.name, self.options = name, dict(options or {})
        self._create = reasoning_gym.create_dataset
        known = sorted(reasoning_gym.factory.DATASETS)
        if name not in known:
            raise ValueError(
                f"task={name!r} is neither built in ({', '.join(DIGIT_TASKS)}) nor in "
                f"reasoning-gym; close: {get_close_matches(name, known)}"
            )

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        first = random.Random(f"{self.name}/{seed}").randrange(2**30)
        entries = iter(self._create(self.name, size=2**30, seed=first, **self.options))

        def make(_: random.Random) -> tuple[str, Problem]:
            entry = next(entries)
            accepts = partial(_countdown, entry["metadata"]) if self.name == "countdown" else None
            question, gold = entry["question"], str(entry["answer"])
            return question, Problem(question + "\n", gold, accepts)

        return _draw(make, split, n, seed)


_ARITHMETIC = re.compile(r"[0-9+\-*/() ]{1,200}")


def _countdown(metadata: dict, answer: str) -> bool:
    """Whether `answer` reaches the target with each number used once. Nothing is evaluated."""
    if not _ARITHMETIC.fullmatch(answer):
        return False
    try:
        used: list[int] = []
        tree = ast.parse(answer.strip(), mode="eval").body
        return _value(tree, used) == metadata["target"] and sorted(used) == sorted(
            metadata["numbers"]
        )
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _value(node: ast.expr, used: list[int]) -> Fraction:
    """Value of a tree of + − × ÷ over whole numbers, which are collected in `used`."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    raise ValueError(f"{type(node).__name__} is not arithmetic on whole numbers")


DIGIT_TASKS = {"sort": SortDigits, "add": AddNumbers}


def task_by_name(name: str, options: dict | None = None) -> Task:
    """A built-in digit task (`sort`, `add`) or any reasoning-gym task, with its options."""
    if name in DIGIT_TASKS:
        return DIGIT_TASKS[name](**(options or {}))
    return ReasoningGym(name, options)


def final_answer(completion: str) -> str | None:
    """The text after the last marker `#`, stripped; None when there is no marker."""
    _, marker, answer = completion.rpartition(MARKER)
    return answer.strip() if marker else None


def accepted_golds(completions: Sequence[str], problems: Sequence[Problem]) -> list[str]:
    """The gold answer to compare each completion with.

    That is the problem's own, unless the problem accepts several answers and the completion's
    final answer is one of them. Raises `ValueError` when the lengths differ.
    """
    if len(completions) != len(problems):
        raise ValueError(f"{len(completions)} completions for {len(problems)} problems")
    golds = []
    for completion, problem in zip(completions, problems, strict=True):
        answer = final_answer(completion) if problem.accepts else None
        golds.append(answer if answer and problem.accepts(answer) else problem.gold)
    return golds
