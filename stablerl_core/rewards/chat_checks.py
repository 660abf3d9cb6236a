"""Does the model read, and learn, the tokens that its chat template means?"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Messages = Sequence[Mapping[str, str]]

# Control markers of chat formats. `[INST]` is left out: Llama 2 means it as plain text.
_MARKER = re.compile(r"<[|｜][^<>|｜]{1,40}[|｜]>|</?s>|<(?:start|end)_of_turn>")
_PROBE = "ab"


class ChatTokenizer(Protocol):
    """What a Hugging Face tokenizer with a chat template has."""

    bos_token_id: int | None
    eos_token_id: int | None

    def apply_chat_template(
        self, conversation: Any, *, chat_template: Any, tokenize: Any, add_generation_prompt: Any
    ) -> Any: ...

    def encode(self, text: str, add_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class ChatFault:
    """One word that names the fault, and a sentence with what was found."""

    name: str
    detail: str


def prompt_faults(
    tokenizer: ChatTokenizer, messages: Messages, ids: Sequence[int], template: str | None = None
) -> tuple[ChatFault, ...]:
    """Compare the ids that a model was given with what the template makes of the messages.

    Found are `double_bos` (the template writes a beginning token, and the tokenizer another),
    `unexpected_bos`, `missing_bos`, `eos_in_prompt`; and one of `no_generation_prompt` (the model
    is not told that it is its turn), `template_twice`, `no_template`, or `another_prompt`, which
    none of these explains.

    ids: the prompt as it was fed, without padding. template: the one to expect, None for the
    tokenizer's own. The template's text is encoded without special tokens, as it brings its own.
    Raises `ValueError` without ids or messages, and where there is no template.
    """
    if not len(ids) or not len(messages):
        raise ValueError(f"{len(ids)} ids and {len(messages)} messages: both are needed")
    expected = _encode(tokenizer, _render(tokenizer, messages, template, True))
    bos, faults = tokenizer.bos_token_id, []
    fed, given = _without_bos([int(i) for i in ids], bos)
    body, due = _without_bos(expected, bos)
    if given != due:
        name = "missing_bos" if given < due else "double_bos" if given > 1 else "unexpected_bos"
        faults.append(
            ChatFault(name, f"{given} beginning tokens are read, the template writes {due}")
        )
    eos = tokenizer.eos_token_id
    if fed[-1:] == [eos] and body[-1:] != [eos]:
        faults.append(ChatFault("eos_in_prompt", "the prompt ends with the end token"))
        fed = fed[:-1]
    if fed != body:
        faults.append(_explained(tokenizer, messages, template, fed, body))
    return tuple(faults)


def _explained(tokenizer, messages: Messages, template, fed: list[int], body: list[int]):
    """The known mistake that gives these ids, else the position where they part."""
    once = [_render(tokenizer, messages, template, asked) for asked in (True, False)]
    content = "".join(message["content"] for message in messages)
    texts = [("no_generation_prompt", once[1]), ("no_template", content)]
    for text in once:
        again = [{"role": "user", "content": text}]
        texts += [
            ("template_twice", _render(tokenizer, again, template, asked))
            for asked in (True, False)
        ]
    for name, text in texts:
        if fed == _without_bos(_encode(tokenizer, text), tokenizer.bos_token_id)[0]:
            return ChatFault(name, f"what is read is {text!r}, what is meant {once[0]!r}")
    same = zip(fed, body, strict=False)
    at = next((i for i, (a, b) in enumerate(same) if a != b), min(len(fed), len(body)))
    return ChatFault(
        "another_prompt", f"parts from the template's at token {at}; {len(fed)} and {len(body)}"
    )


def answer_faults(
    ids: Sequence[Sequence[int]],
    counted: Sequence[Sequence[bool]],
    eos: Sequence[int],
    truncated: Sequence[bool] | None = None,
) -> tuple[ChatFault, ...]:
    """Do the answers end, and is their end learned? One fault a kind, with its rows.

    `eos_not_counted`: an end token follows the last counted token, outside the loss, as when
    padding is the end token and padding is masked. `eos_absent`: a whole answer has none there.
    `nothing_counted`: a row without a counted token. A model trained so is not taught to stop.

    ids, counted: one row an answer (prompts may stand before, padding after); counted is True
    where the loss looks. eos: ids that end an answer. truncated: rows that were cut and rightly
    have no end; an end token after them is padding. Raises `ValueError`: no row, no eos, shapes
    that differ.
    """
    cuts = [False] * len(ids) if truncated is None else [bool(cut) for cut in truncated]
    if not len(ids) or not len(eos) or not len(ids) == len(counted) == len(cuts):
        raise ValueError(
            f"{len(ids)} rows of ids, {len(counted)} of counted, {len(cuts)} truncated, {len(eos)} "
            "eos: expected as many of each, and at least one end token"
        )
    rows: dict[str, list[int]] = {}
    for i, (row, seen, cut) in enumerate(zip(ids, counted, cuts, strict=True)):
        if len(row) != len(seen):
            raise ValueError(f"row {i} has {len(row)} ids and {len(seen)} counted")
        fault = _ending([int(t) for t in row], [bool(c) for c in seen], set(eos))
        if fault and not (cut and fault != "nothing_counted"):
            rows.setdefault(fault, []).append(i)
    return tuple(
        ChatFault(name, f"{len(found)} of {len(ids)} rows, first {found[:5]}")
        for name, found in rows.items()
    )


def _ending(row: list[int], seen: list[bool], eos: set[int]) -> str | None:
    if True not in seen:
        return "nothing_counted"
    last = len(seen) - 1 - seen[::-1].index(True)
    if row[last] in eos:
        return None
    follows = row[last + 1 : last + 2]
    return "eos_not_counted" if follows and follows[0] in eos else "eos_absent"


def template_faults(
    tokenizer: ChatTokenizer, template: str | None = None, eos: Sequence[int] | None = None
) -> tuple[ChatFault, ...]:
    """Does a template belong to this tokenizer, and does generation stop where a turn ends?

    `unknown_markers`: control markers of the template, such as `<|im_start|>`, that the tokenizer
    breaks into pieces or does not know; the template is another tokenizer's. `stops_elsewhere`:
    what the template writes after an answer is not in `eos` (None: the tokenizer's end token).
    `no_generation_prompt`: the template is the same with and without it.

    Nothing is sampled: two probe turns are rendered. Raises `ValueError` where there is no
    template; what the template itself raises on a plain user turn is passed on.
    """
    asked = [{"role": "user", "content": _PROBE}]
    told = [*asked, {"role": "assistant", "content": _PROBE}]
    text = _render(tokenizer, told, template, False)
    faults = []
    foreign = [m for m in dict.fromkeys(_MARKER.findall(text)) if not _is_known(tokenizer, m)]
    if foreign:
        faults.append(ChatFault("unknown_markers", f"not one token each: {', '.join(foreign)}"))
    ends = [tokenizer.eos_token_id] if eos is None else list(eos)
    after = _encode(tokenizer, text[text.rindex(_PROBE) + len(_PROBE) :])
    if not after or after[0] not in ends:
        found = after[0] if after else "nothing"
        faults.append(ChatFault("stops_elsewhere", f"an answer is followed by {found}, not {ends}"))
    if _render(tokenizer, asked, template, True) == _render(tokenizer, asked, template, False):
        faults.append(ChatFault("no_generation_prompt", "the template has none to give"))
    return tuple(faults)


def _is_known(tokenizer, marker: str) -> bool:
    """Whether a marker is one token, and not the one for what is unknown."""
    ids = _encode(tokenizer, marker)
    return len(ids) == 1 and ids[0] != getattr(tokenizer, "unk_token_id", None)


def _render(tokenizer, messages: Messages, template: str | None, asked: bool) -> str:
    if template is None and not getattr(tokenizer, "chat_template", None):
        raise ValueError("tokenizer has no chat_template: pass template, or check plain prompts")
    return tokenizer.apply_chat_template(
        list(messages), chat_template=template, tokenize=False, add_generation_prompt=asked
    )


def _encode(tokenizer, text: str) -> list[int]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    return [int(i) for i in getattr(ids, "ids", ids)]


def _without_bos(ids: list[int], bos: int | None) -> tuple[list[int], int]:
    """The ids after their leading beginning tokens, and how many those were."""
    count = 0
    while bos is not None and count < len(ids) and ids[count] == bos:
        count += 1
    return ids[count:], count
