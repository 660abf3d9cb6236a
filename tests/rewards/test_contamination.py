"""Data checks: what is found, what is not reported, what cannot be seen."""

import importlib.util
import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import (
    cut_prompts,
    exact_duplicates,
    memorization_probe,
    near_duplicates,
    ngram_overlap,
)
from stablerl_core.rewards.contamination import ngrams

needs_sketch = pytest.mark.skipif(
    importlib.util.find_spec("datasketch") is None, reason="datasketch (extra tasks) absent"
)
ASKED = "A train leaves the station at noon and drives {} miles in {} hours. How fast is it?"


def test_case_space_and_width_make_no_new_text():
    texts = ["Add 2 and 3.", "add  2\nand 3. ", "Add 3 and 2.", "Ａdd 2 and 3."]
    assert exact_duplicates(texts) == [[0, 1, 3]]


def test_ngrams_of_words_and_characters():
    assert ngrams("a b c", 2) == {("a", "b"), ("b", "c")}
    assert ngrams("abc", 2, "char") == {("a", "b"), ("b", "c")}
    assert ngrams("a", 5) == {("a",)} and ngrams(" ", 5) == set()


@needs_sketch
def test_near_duplicates_are_found_and_their_similarity_is_exact():
    texts = [ASKED.format(60, 2), "How many eggs are in a dozen?", ASKED.format(60, 3)]
    (pair,) = near_duplicates(texts, threshold=0.7)
    a, b = (ngrams(texts[i], 5, "char") for i in (0, 2))
    assert (pair.first, pair.second) == (0, 2)
    assert pair.similarity == len(a & b) / len(a | b) > 0.7
    assert near_duplicates(texts, threshold=1.0) == []


@needs_sketch
def test_no_pair_below_the_threshold_is_reported_and_few_above_are_missed():
    rng = random.Random(0)
    texts = ["".join(rng.choice("abcdefgh") for _ in range(60)) for _ in range(20)]
    texts += [text[: rng.randrange(50, 60)] for text in texts]
    grams = [ngrams(text, 5, "char") for text in texts]
    true = {
        (i, j)
        for j in range(40)
        for i in range(j)
        if len(grams[i] & grams[j]) / len(grams[i] | grams[j]) >= 0.8
    }
    found = {(p.first, p.second) for p in near_duplicates(texts)}
    assert len(true) > 10 and found <= true and len(found) > 0.9 * len(true)


@needs_sketch
def test_an_exact_copy_is_always_found():
    assert [p.similarity for p in near_duplicates(["x" * 9, "other", "x" * 9])] == [1.0]


def test_without_the_library_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasketch", None)
    with pytest.raises(ImportError, match=r"stablerl_core\[tasks\]"):
        near_duplicates(["a", "b"])


def test_overlap_sees_a_copy_inside_a_longer_text_and_not_a_rephrased_one():
    copy, new = ASKED.format(60, 2), "Give the speed of a train that needs two hours for 60 miles"
    shares = ngram_overlap([f"Question 7: {copy} Answer: 30"], [copy, new, ""], n=8)
    assert shares == [1.0, 0.0, 0.0]
    half = ngram_overlap(["a b c d"], ["a b c x"], n=2)
    assert half == [pytest.approx(2 / 3)]


@given(st.lists(st.text("ab ", max_size=12), max_size=5))
def test_a_set_overlaps_itself_fully(texts):
    shares = ngram_overlap(texts, texts)
    assert shares == [float(bool(text.split())) for text in texts]


def test_the_probe_measures_what_is_known_by_heart():
    texts = ["abcdefgh", "ijklmnop"]
    known = {"abcd": "efgh and more", "ijkl": "mnxx"}
    probe = memorization_probe(texts, lambda prefixes: [known[p] for p in prefixes])
    assert (probe.exact, probe.matched) == (0.5, 0.75)
    silent = memorization_probe(texts, lambda prefixes: ["" for _ in prefixes])
    assert (silent.exact, silent.matched) == (0.0, 0.0)


def test_prompts_beyond_the_limit_are_named():
    assert cut_prompts([10, 3584, 3585], 3584) == [2]
    assert cut_prompts([], 1) == []


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: ngrams("a", 0), "n=0"),
        (lambda: near_duplicates(["a"], threshold=0.0), "threshold=0.0"),
        (lambda: memorization_probe([], list), "0 texts"),
        (lambda: memorization_probe(["ab"], lambda p: []), "0 texts for 1 prefixes"),
        (lambda: cut_prompts([1], 0), "limit=0"),
    ],
)
def test_bad_arguments_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
