"""Multiple choice: which option a completion names, if it names one and one only."""

from __future__ import annotations

import re

from .final_text import after_thinking, box_tail, until_closed
from .tasks import MARKER, final_answer
from .verdict import Verdict, check_texts

_TAG = re.compile(r"<answer>([^<]{0,400})</answer>", re.IGNORECASE)
_SAID = re.compile(r"\banswer\b\s*(?:is\b|:|=)\s*:?", re.IGNORECASE)
_DRESS = re.compile(r"\\(?:text|mathrm|mathbf|textbf)\b|[{}$*_`\s]|\boption\b|\bchoice\b", re.I)
_LABELLED = re.compile(r"\W*([A-Za-z])\W*[).:]\s*(.*)", re.DOTALL)


def choice_answer(
    completion: str, gold: str, *, options: str = "ABCD", truncated: bool = False, prefill: str = ""
) -> Verdict:
    r"""Reward 1 iff the completion's final answer is the option `gold` and no other.

    The final answer is, in this order, the last `\boxed{…}`, `<answer>…</answer>`, the text after
    the last `#`, all that follows the last "answer is" or "answer:", or else the whole completion;
    thinking before `</think>` is no answer (`prefill` as in `after_thinking`). It must be a letter
    of `options`, bare or dressed (`(B)`, `**B.**`, `\text{b}`), or a labelled option (`B) Paris`)
    in which no other option is named. Nothing is searched for inside words, so neither "A or B or
    C" nor "a prime" is an answer; `B) vitamin C` is refused too: better a right answer unpaid than
    a list paid.

    Reasons: correct, wrong, several (more than one option named), unparseable, no_answer, empty,
    truncated. Raises `ValueError`: completion or gold is no text; gold is not one of the options.
    """
    check_texts(completion, gold)
    if len(gold) != 1 or gold not in options:
        raise ValueError(f"gold is {gold!r}: expected one letter of options={options!r}")
    if truncated or not completion:
        return Verdict(0.0, "truncated" if truncated else "empty")
    said = _final_part(completion, prefill)
    if isinstance(said, Verdict):
        return said
    named = _named(said, options.upper())
    if len(named) != 1:
        return Verdict(0.0, "several" if named else "unparseable")
    return Verdict(1.0, "correct") if named == {gold.upper()} else Verdict(0.0, "wrong")


def _final_part(completion: str, prefill: str) -> str | Verdict:
    """The text that holds the answer, or why there is none."""
    text = after_thinking(completion, prefill)
    if text is None:
        return Verdict(0.0, "truncated")
    tail = box_tail(text)
    if tail is not None:
        said = until_closed(tail)
        if said is None:
            return Verdict(0.0, "truncated")
    elif tags := _TAG.findall(text):
        said = tags[-1]
    elif MARKER in text:
        said = final_answer(text)
    else:
        said = text[max((found.end() for found in _SAID.finditer(text)), default=0) :]
    return said if said.strip() else Verdict(0.0, "no_answer")


def _named(said: str, options: str) -> set[str]:
    """The options that an answer names; empty if it is not of a form that names one."""
    bare = _DRESS.sub("", said).strip("().:,;[]!").upper()
    if bare and len(bare) == 1:
        return {bare} & set(options)
    letters = re.findall(rf"(?<![A-Za-z0-9'])([{re.escape(options)}])(?![A-Za-z0-9'])", said)
    labelled = _LABELLED.fullmatch(said.strip())
    if labelled and labelled[1].upper() in options:
        labels = re.findall(rf"(?<![A-Za-z0-9'])([{re.escape(options)}])[).:](?!\w)", said, re.I)
        return {labelled[1].upper(), *letters, *map(str.upper, labels)}
    return set(letters) if len(set(letters)) > 1 else set()
