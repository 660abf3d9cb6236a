"""Verifiers: does a completion answer its problem? Text is compared, never evaluated or run."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from decimal import Decimal
from pathlib import Path

from .choices import choice_answer
from .final_text import after_thinking, box_tail, until_closed
from .tasks import MARKER
from .verdict import Verdict, check_texts

MAX_MATH_ANSWER = 256  # characters; what a symbolic parser gets to see at most
_NUMBER = re.compile(
    r"\s*[$€£]?\s*([-+]?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+))(\.[0-9]+|)(?![,.]?[0-9])"
)
_MATH_WORKER = Path(__file__).with_name("_math_worker.py")


def strict_answer(completion: str, gold: str, *, truncated: bool = False) -> Verdict:
    """Reward 1 iff the text after the last marker `#` equals `gold`, character by character.

    completion: the text without its end token, drawn from μ. truncated: it was cut at the token
    limit; then it has no final answer, whatever it holds, and gets 0.
    Time is linear in the length. Raises `ValueError`: completion or gold is no text; gold is
    empty or contains the marker.
    """
    answers = _marked_answers(completion, gold)
    if truncated:
        return Verdict(0.0, "truncated")
    return _judge(completion, answers, gold)


def any_answer(completion: str, gold: str, *, truncated: bool = False) -> Verdict:
    """Reward 1 iff any marked answer equals `gold`: a verifier with a hole.

    `#84#85#86` earns the reward for 85, so listing candidates pays, and length grows. Parsers
    that accept any match in the text behave so. The reason tells what the reward hides:
    "correct" if the final answer is right, "hedged" if only another one is. truncated: as in
    `strict_answer` a cut completion gets 0, so the list must end. Time and errors too.
    """
    answers = _marked_answers(completion, gold)
    if truncated:
        return Verdict(0.0, "truncated")
    if gold in answers[:-1] and answers[-1] != gold:
        return Verdict(1.0, "hedged")
    return _judge(completion, answers, gold)


def math_answer(
    completion: str, gold: str, *, truncated: bool = False, timeout: float = 2.0
) -> Verdict:
    r"""Reward 1 iff the final answer is mathematically equal to `gold` (LaTeX or plain).

    The final answer is the content of the last `\boxed{…}`, or else the text after the last
    `#`; a truncated completion has none. math-verify compares: 1/2, 0.5 and \frac12 are equal.
    Three holes are the library's: an unfinished computation counts as its value (`27+58` for
    85), so does the right-hand side of an equation (`84=85`), and a percent sign is overlooked
    (`85%`). For plain numbers `strict_answer` has none of them.

    At most 256 characters are parsed, in a process of its own that ends after `timeout` seconds of
    its own processor time, so a busy machine makes no answer late (works in any thread; about half
    a second to start it: use `verify` for a batch).
    Raises `ValueError`: as `strict_answer` (but gold may contain `#`), and for a gold that
    cannot be parsed; `ImportError` without math-verify.
    """
    return _math_answers([completion], [gold], [truncated], timeout)[0]


def boxed_answer(
    completion: str, gold: str, *, truncated: bool = False, prefill: str = ""
) -> Verdict:
    r"""Reward 1 iff the last `\boxed{…}` after the thinking holds `gold`, up to outer spaces.

    Characters are compared, so the box `21` is not the answer `1`, and `1, 2` is neither. A box
    inside the thinking is no answer; a box that is never closed, or thinking that never ends, is
    "truncated". prefill: the end of the prompt that belongs to the text, as in `after_thinking`.
    Time is linear in the length. Raises `ValueError`: completion or gold is no text, gold is empty.
    """
    check_texts(completion, gold)
    if truncated or not completion:
        return Verdict(0.0, "truncated" if truncated else "empty")
    text = after_thinking(completion, prefill)
    tail = None if text is None else box_tail(text)
    if tail is None:
        return Verdict(0.0, "truncated" if text is None else "no_marker")
    answer = until_closed(tail)
    if answer is None or not answer.strip():
        return Verdict(0.0, "truncated" if answer is None else "no_answer")
    return Verdict(*((1.0, "correct") if answer.strip() == gold.strip() else (0.0, "wrong")))


def number_answer(completion: str, gold: str, *, truncated: bool = False) -> Verdict:
    """Reward 1 iff the number right after the last marker equals `gold`, as GSM8K has it.

    `#### 1,234.50 dollars` is 1234.5: spaces, a currency sign before it and whatever follows the
    number, however long, do not matter; `21` is not `1`. Compared exactly, as decimals. A marker
    with no number after it is "unparseable", and so are digits that go on after a comma or a point
    in another way (`1,00,000` is not 1, `1.234,5` is not 1.234). Time is linear in the length.
    Raises `ValueError`: completion or gold is no text; gold does not begin with a number.
    """
    check_texts(completion, gold)
    wanted = _number(gold)
    if wanted is None:
        raise ValueError(f"gold is {gold!r}: expected a number; mend it in the task")
    if truncated or not completion:
        return Verdict(0.0, "truncated" if truncated else "empty")
    if MARKER not in completion:
        return Verdict(0.0, "no_marker")
    answer = completion.rpartition(MARKER)[2]
    if not answer.strip():
        return Verdict(0.0, "no_answer")
    found = _number(answer)
    if found is None:
        return Verdict(0.0, "unparseable")
    return Verdict(1.0, "correct") if found == wanted else Verdict(0.0, "wrong")


def _number(text: str) -> Decimal | None:
    """The number with which a text begins; None if it begins with something else."""
    found = _NUMBER.match(text[:MAX_MATH_ANSWER])
    return Decimal(found[1].replace(",", "") + found[2]) if found else None


VERIFIERS: dict[str, Callable[..., Verdict]] = {
    "strict": strict_answer,
    "any": any_answer,
    "math": math_answer,
    "number": number_answer,
    "boxed": boxed_answer,
    "choice": choice_answer,
}


def verify(
    name: str,
    completions: Sequence[str],
    golds: Sequence[str],
    truncated: Sequence[bool] | None = None,
) -> list[Verdict]:
    """Verdicts of a batch: `VERIFIERS[name]` for each completion, its gold, and whether it was cut.

    truncated None: none was. Raises `ValueError`: an unknown name, lengths that differ, or what
    the verifier raises.
    """
    if name not in VERIFIERS:
        raise ValueError(f"name is {name!r}, expected one of {sorted(VERIFIERS)}")
    if isinstance(completions, str) or isinstance(golds, str):
        raise ValueError("completions and golds must be sequences of texts, got one text")
    cuts = [False] * len(completions) if truncated is None else [bool(cut) for cut in truncated]
    if not len(completions) == len(golds) == len(cuts):
        raise ValueError(
            f"{len(completions)} completions, {len(golds)} golds, {len(cuts)} truncated: pass one "
            "gold (and one flag) a completion"
        )
    if name == "math":
        return _math_answers(completions, golds, cuts)
    verifier = VERIFIERS[name]
    return [
        verifier(text, gold, truncated=cut)
        for text, gold, cut in zip(completions, golds, cuts, strict=True)
    ]


def _marked_answers(completion: str, gold: str) -> list[str]:
    """All texts that follow a marker, each up to the next marker."""
    check_texts(completion, gold)
    if MARKER in gold:
        raise ValueError(f"gold is {gold!r}: with a marker {MARKER!r} in it no answer could match")
    return completion.split(MARKER)[1:]


def _judge(completion: str, answers: list[str], gold: str) -> Verdict:
    """The verdict on the last marked answer."""
    if not completion:
        return Verdict(0.0, "empty")
    if not answers:
        return Verdict(0.0, "no_marker")
    if not answers[-1]:
        return Verdict(0.0, "no_answer")
    return Verdict(1.0, "correct") if answers[-1] == gold else Verdict(0.0, "wrong")


def _math_final_answer(completion: str, truncated: bool) -> str | Verdict:
    r"""The content of the last \boxed{…}, else the text after the last marker, or why neither."""
    if truncated:
        return Verdict(0.0, "truncated")
    if not completion:
        return Verdict(0.0, "empty")
    tail = box_tail(completion)
    if tail is not None:
        answer = until_closed(tail[: MAX_MATH_ANSWER + 1])
        if answer is None:
            return Verdict(0.0, "truncated" if len(tail) <= MAX_MATH_ANSWER else "too_long")
    elif MARKER in completion:
        answer = completion.rpartition(MARKER)[2]
    else:
        return Verdict(0.0, "no_marker")
    if len(answer) > MAX_MATH_ANSWER:
        return Verdict(0.0, "too_long")
    return answer.strip().strip("$").strip() or Verdict(0.0, "no_answer")


def _math_answers(
    completions: Sequence[str],
    golds: Sequence[str],
    truncated: Sequence[bool],
    timeout: float = 2.0,
) -> list[Verdict]:
    """`math_answer` of a batch; one worker process, a new one after each comparison that hangs."""
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout!r}, expected seconds > 0")
    if importlib.util.find_spec("math_verify") is None:
        raise ImportError("math_answer needs math-verify: pip install 'stablerl_core[tasks]'")
    for completion, gold in zip(completions, golds, strict=True):
        check_texts(completion, gold)
    answers = list(map(_math_final_answer, completions, truncated))
    # Pairs without an answer are sent too, with "": a gold is checked whatever the model wrote.
    pairs = [
        (gold.strip().strip("$"), "" if isinstance(answer, Verdict) else answer)
        for gold, answer in zip(golds, answers, strict=True)
    ]
    reasons: list[str] = []
    while len(reasons) < len(pairs):
        reasons += _run_math_worker(pairs[len(reasons) :], timeout)
    if "bad_gold" in reasons:
        bad = golds[reasons.index("bad_gold")]
        raise ValueError(f"gold {bad!r} cannot be parsed as mathematics: mend it in the task")
    return [
        answer if isinstance(answer, Verdict) else Verdict(float(reason == "correct"), reason)
        for answer, reason in zip(answers, reasons, strict=True)
    ]


def _run_math_worker(pairs: list[tuple[str, str]], timeout: float) -> list[str]:
    """One reason a pair, up to and including the first that hangs."""
    done = subprocess.run(
        # -P: the folder of the script must not become a place to import from
        [sys.executable, "-P", str(_MATH_WORKER), str(timeout)],
        input=json.dumps(pairs),
        capture_output=True,
        text=True,
        encoding="utf-8",
    )
    ready, *reasons = done.stdout.split() or [""]
    if ready != "ready":
        raise RuntimeError(f"the math-verify process did not start:\n{done.stderr[-2000:]}")
    return reasons if len(reasons) == len(pairs) else [*reasons, "timeout"]
