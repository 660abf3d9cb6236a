r"""Where in a completion the final answer stands: after the thinking, in the last `\boxed{…}`."""

from __future__ import annotations

import re

THINK = ("<think>", "</think>")
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")


def after_thinking(completion: str, prefill: str = "") -> str | None:
    """What follows the thinking; None if it was begun, or begun again, and never ended.

    prefill: the end of the prompt, which belongs to the text. Chat templates that open the
    thinking put `<think>` there, so that it is never in a completion; a check of the completion
    alone would refuse every well-formed one. A text without thinking is returned whole.
    """
    _, ended, rest = (prefill + completion).rpartition(THINK[1])
    if THINK[0] in rest:
        return None
    return rest if ended else completion


def box_tail(completion: str) -> str | None:
    r"""What follows the opening brace of the last `\boxed{` (or `\fbox{`); None without one."""
    starts = [found.end() for found in _BOX.finditer(completion)]
    return completion[starts[-1] :] if starts else None


def last_box(completion: str) -> str | None:
    r"""The content of the last `\boxed{…}`, braces inside it matched.

    None if there is no box, or if the last one is never closed, however many were before: the
    model was cut while it answered. `\{` and `\}` are characters, not braces. A box in a box
    counts as the inner one. Time is linear in the length.
    """
    tail = box_tail(completion)
    return None if tail is None else until_closed(tail)


def until_closed(text: str) -> str | None:
    """`text` up to the brace that closes one opened before it; None if there is none."""
    depth, escaped = 1, False
    for i, character in enumerate(text):
        if not escaped:
            depth += (character == "{") - (character == "}")
        escaped = character == "\\" and not escaped
        if depth == 0:
            return text[:i]
    return None
