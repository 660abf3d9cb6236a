"""Data checks: texts that occur twice, evaluation problems in the training data, memory."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


def normalised(text: str) -> str:
    """A text without what does not make it another one: case, width, runs of white space."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def exact_duplicates(texts: Sequence[str]) -> list[list[int]]:
    """Places of texts that are equal once `normalised`, two or more each, in order."""
    places: dict[str, list[int]] = defaultdict(list)
    for i, text in enumerate(texts):
        places[normalised(text)].append(i)
    return [same for same in places.values() if len(same) > 1]


def ngrams(text: str, n: int, unit: str = "word") -> set[tuple[str, ...]]:
    """All runs of n words (or of n characters with unit `char`); a shorter text is one run."""
    if n < 1 or unit not in ("word", "char"):
        raise ValueError(f"n={n}, unit={unit!r}: expected n ≥ 1 and 'word' or 'char'")
    plain = normalised(text)
    parts = tuple(plain.split() if unit == "word" else plain)
    if not parts:
        return set()
    return {parts[i : i + n] for i in range(max(1, len(parts) - n + 1))}


@dataclass(frozen=True)
class NearPair:
    """Two texts and their Jaccard similarity |A ∩ B| / |A ∪ B| in sets of n-grams."""

    first: int
    second: int
    similarity: float


def near_duplicates(
    texts: Sequence[str], *, threshold: float = 0.8, n: int = 5, permutations: int = 128
) -> list[NearPair]:
    """Pairs whose n-grams of characters agree to at least `threshold`, exact duplicates included.

    MinHash and LSH of the library datasketch (extra `tasks`) find candidates without comparing
    all pairs; each is then compared exactly, so no pair is reported wrongly. Some are missed: a
    pair right at the threshold often, one far above it rarely (more `permutations`: fewer).
    Raises `ImportError` without the extra, `ValueError` for a threshold outside (0, 1].
    """
    if not 0 < threshold <= 1:
        raise ValueError(f"threshold={threshold}: must lie in (0, 1]")
    try:
        from datasketch import MinHash, MinHashLSH
    except ImportError:
        raise ImportError(
            "near duplicates need datasketch: pip install 'stablerl_core[tasks]'"
        ) from None
    grams = [ngrams(text, n, "char") for text in texts]
    # Candidates are compared below, so a wrong one costs a comparison and a missed one the pair.
    index = MinHashLSH(threshold=min(threshold, 0.9), num_perm=permutations, weights=(0.1, 0.9))
    pairs = []
    for i, own in enumerate(grams):
        sketch = MinHash(num_perm=permutations)
        sketch.update_batch(["".join(gram).encode() for gram in own])
        for j in sorted(index.query(sketch)):
            alike = _jaccard(grams[j], own)
            if alike >= threshold:
                pairs.append(NearPair(j, i, alike))
        index.insert(i, sketch)
    return pairs


def _jaccard(a: set, b: set) -> float:
    return len(a & b) / len(a | b) if a | b else 1.0


def ngram_overlap(
    train: Sequence[str], evaluation: Sequence[str], *, n: int = 8, unit: str = "word"
) -> list[float]:
    """For each evaluation text, the share of its n-grams that some training text has.

    1 for a text that was copied, also into the middle of a longer one; near 0 for a new one if
    n is long enough that frequent phrases do not count (8 to 13 words are usual). Reordered or
    rephrased problems pass unseen. A text without an n-gram counts 0.
    """
    seen: set[tuple[str, ...]] = set()
    for text in train:
        seen |= ngrams(text, n, unit)
    found = [ngrams(text, n, unit) for text in evaluation]
    return [len(grams & seen) / len(grams) if grams else 0.0 for grams in found]


@dataclass(frozen=True)
class Probe:
    """Share of texts whose rest was reproduced word for word, and of characters until a slip."""

    exact: float
    matched: float


def memorization_probe(
    texts: Sequence[str],
    complete: Callable[[list[str]], Sequence[str]],
    *,
    shown: float = 0.5,
) -> Probe:
    """Show the beginning of each text and see whether the policy goes on as the text does.

    `complete` returns one continuation for each prefix, best greedily (temperature 0).
    `shown` is the share of characters that is given. A policy cannot guess the second half of a
    question it has never seen; compare with texts of the same kind that it cannot have seen, as
    a rest that follows from the beginning is continued without memory too.
    Raises `ValueError`: no text, `shown` outside (0, 1), another number of continuations.
    """
    if not texts or not 0 < shown < 1:
        raise ValueError(f"{len(texts)} texts, shown={shown}: expected texts, and 0 < shown < 1")
    cuts = [max(1, min(len(text) - 1, round(shown * len(text)))) for text in texts]
    prefixes = [text[:cut] for text, cut in zip(texts, cuts, strict=True)]
    answers = complete(prefixes)
    if len(answers) != len(texts):
        raise ValueError(f"complete returned {len(answers)} texts for {len(texts)} prefixes")
    shares = []
    for text, cut, answer in zip(texts, cuts, answers, strict=True):
        rest = text[cut:]
        same = next((i for i, (a, b) in enumerate(zip(rest, answer, strict=False)) if a != b), None)
        shares.append((min(len(rest), len(answer)) if same is None else same) / max(1, len(rest)))
    return Probe(sum(s == 1 for s in shares) / len(shares), sum(shares) / len(shares))


def cut_prompts(lengths: Sequence[int], limit: int) -> list[int]:
    """Places of prompts longer than `limit` tokens, which a data loader would cut silently.

    A precondition, to be checked before any other signal: a policy that never saw the
    instruction cannot follow it, and no reward will tell. Expected result: an empty list.
    Raises `ValueError` for a limit below 1.
    """
    if limit < 1:
        raise ValueError(f"limit={limit}: must be ≥ 1")
    return [i for i, length in enumerate(lengths) if length > limit]
