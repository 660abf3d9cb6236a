"""What a verifier returns, and what it may ask of its texts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verdict:
    """A reward, and one word why: also what to count when a reward looks too good.

    correct; hedged (right, but not the final answer: only `any_answer` pays it); wrong;
    empty (no completion); no_marker; no_answer (a marker, nothing after it); truncated (cut
    before the end); unparseable, too_long, timeout (`math_answer`); several (`choice_answer`);
    failed, no_code, no_function, syntax_error, error, memory, timeout (`code_answer`).
    """

    reward: float
    reason: str


def check_texts(completion: str, gold: str) -> None:
    """Raises `ValueError` unless both are texts and there is a gold answer."""
    for name, text in (("completion", completion), ("gold", gold)):
        if not isinstance(text, str):
            raise ValueError(f"{name} is a {type(text).__name__}, expected a str: decode it first")
    if not gold.strip():
        raise ValueError("gold is empty: every problem needs an answer to compare with")
