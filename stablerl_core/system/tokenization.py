"""Does text bring back the tokens it was made from?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol


class TokenizerLike(Protocol):
    """What a Hugging Face tokenizer has; `encode` gives ids, or an object with `.ids`."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str: ...

    def encode(self, text: str, add_special_tokens: bool) -> Any: ...


@dataclass(frozen=True)
class TokenizationDrift:
    """`changed`: share of rows that come back as other ids. `first`: for each row the position
    of the first id that differs (the end of the shorter one, if one continues the other), or
    None. `longer`: mean over all rows of the new length minus the old one, in tokens."""

    rows: int
    changed: float
    first: tuple[int | None, ...]
    longer: float


def round_trip_drift(tokenizer: TokenizerLike, ids: Sequence[Sequence[int]]) -> TokenizationDrift:
    """Decode each row of ids to text, encode the text, and compare.

    A sampler that hands over text, and a trainer that encodes it again, train on other tokens
    than were sampled wherever a row drifts: the log-probabilities then belong to something else,
    from the first changed position on. Handing over ids ("token in, token out") has no drift.

    tokenizer: `decode` and `encode` of Hugging Face; special tokens stay in the text and none are
    added. ids: one sequence of ids a row, without padding. Raises `ValueError` without a row.
    Source: arXiv 2602.15763 (GLM-5) for token-in-token-out.
    """
    if not len(ids):
        raise ValueError("ids has no row: nothing was sampled, so nothing can be compared")
    first, longer = [], 0
    for row in ids:
        before = [int(i) for i in row]
        again = tokenizer.encode(
            tokenizer.decode(before, skip_special_tokens=False), add_special_tokens=False
        )
        after = list(getattr(again, "ids", again))
        first.append(_first_difference(before, after))
        longer += len(after) - len(before)
    changed = sum(position is not None for position in first)
    return TokenizationDrift(len(ids), changed / len(ids), tuple(first), longer / len(ids))


def _first_difference(a: list[int], b: list[int]) -> int | None:
    for position, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return position
    return None if len(a) == len(b) else min(len(a), len(b))
