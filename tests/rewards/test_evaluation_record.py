"""A score stays with its configuration; a comparison that could mean anything is refused."""

import json
from dataclasses import asdict, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import (
    DifferentConfigurations,
    EvaluationConfig,
    EvaluationScore,
    Problem,
    compare_scores,
    data_fingerprint,
    different_fields,
    wilson,
)

CONFIG = EvaluationConfig(
    weights="0a1b", data="d4", verifier="strict", chat_template="S{{ x }}=", system_prompt="",
    prompt_format="{prompt}", bos=0, eos=(1,), engine="transformers float32", temperature=1.0,
    top_p=1.0, top_k=0, max_new_tokens=24, samples=1, scoring="mean",
)  # fmt: skip
OTHER = {
    "weights": "ff", "data": "e5", "verifier": "any", "chat_template": "", "system_prompt": "Hi",
    "prompt_format": "Q: {prompt}", "bos": 1, "eos": (1, 2), "engine": "vllm bfloat16",
    "temperature": 0.0, "top_p": 0.9, "top_k": 50, "max_new_tokens": 8, "samples": 4,
    "scoring": "best",
}  # fmt: skip
NUMBERS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=40)


def test_the_list_of_other_values_covers_every_field():
    assert OTHER.keys() == asdict(CONFIG).keys()


@pytest.mark.parametrize("name", OTHER)
def test_each_field_alone_is_found_named_and_refused(name):
    other = replace(CONFIG, **{name: OTHER[name]})
    a, b = EvaluationScore(CONFIG, (1.0, 0.0, 1.0)), EvaluationScore(other, (0.0, 0.0, 1.0))
    assert different_fields(CONFIG, other) == (name,)
    tested = "weights" if name != "weights" else "temperature"
    with pytest.raises(DifferentConfigurations, match=name) as refused:
        compare_scores(a, b, vary=tested)
    assert refused.value.fields == (name,)
    assert isinstance(refused.value, ValueError)
    if name != "data":
        assert compare_scores(a, b, vary=name).difference == pytest.approx(1 / 3)


def test_the_refusal_names_all_that_differs_with_both_values():
    other = replace(CONFIG, weights="ff", temperature=0.6, system_prompt="Be brief.")
    a, b = EvaluationScore(CONFIG, (1.0, 0.0)), EvaluationScore(other, (1.0, 1.0))
    with pytest.raises(DifferentConfigurations) as refused:
        compare_scores(a, b)
    assert set(refused.value.fields) == {"temperature", "system_prompt"}
    assert "temperature (1.0 and 0.6)" in str(refused.value)
    assert "'Be brief.'" in str(refused.value)


def test_of_two_long_templates_the_refusal_shows_where_they_part():
    long = "x" * 500
    a = EvaluationScore(replace(CONFIG, chat_template=long + "OLD" + long), (1.0, 0.0))
    b = EvaluationScore(replace(CONFIG, chat_template=long + "NEW" + long), (1.0, 0.0))
    with pytest.raises(DifferentConfigurations, match="xxOLDx.* and '.*xxNEWx") as refused:
        compare_scores(a, b)
    assert len(str(refused.value)) < 400


def test_advice_to_vary_a_field_is_given_for_the_same_weights_only():
    same = replace(CONFIG, top_p=0.9)
    a = EvaluationScore(CONFIG, (1.0, 0.0))
    with pytest.raises(DifferentConfigurations, match="vary='top_p'"):
        compare_scores(a, EvaluationScore(same, (1.0, 0.0)))
    with pytest.raises(DifferentConfigurations) as refused:
        compare_scores(a, EvaluationScore(replace(same, weights="ff"), (1.0, 0.0)))
    assert "vary=" not in str(refused.value)


def test_a_difference_is_paired_by_problem():
    """By hand: d = 1, 0, 0, 1, so mean 1/2, s² = 1/3, half width 1.96 √(1/12)."""
    a = EvaluationScore(CONFIG, (1.0, 0.0, 1.0, 1.0))
    b = EvaluationScore(replace(CONFIG, weights="ff"), (0.0, 0.0, 1.0, 0.0))
    found = compare_scores(a, b)
    assert found.difference == 0.5 and found.n == 4
    assert found.high - 0.5 == pytest.approx(1.959964 * (1 / 12) ** 0.5)
    assert found.low < 0 and found.better is None


def test_pairs_see_what_two_separate_intervals_cannot():
    """b is right where a is, and on 20 of 200 problems more: the separate intervals overlap."""
    half = [1.0] * 90 + [0.0] * 110
    a = EvaluationScore(CONFIG, tuple(half))
    b = EvaluationScore(replace(CONFIG, weights="ff"), tuple([1.0] * 110 + [0.0] * 90))
    assert a.interval[1] > b.interval[0]
    assert compare_scores(a, b).better == "b"
    assert compare_scores(b, a).better == "a"


@given(NUMBERS)
def test_comparison_is_antisymmetric_and_ignores_the_order_of_problems(pairs):
    def compared(pairs):
        a = EvaluationScore(CONFIG, tuple(x for x, _ in pairs))
        b = EvaluationScore(replace(CONFIG, weights="ff"), tuple(y for _, y in pairs))
        return compare_scores(a, b), compare_scores(b, a)

    (found, reverse), (turned, _) = compared(pairs), compared(pairs[::-1])
    assert found.difference == -reverse.difference
    assert found.low == pytest.approx(-reverse.high, abs=1e-12)
    assert turned.difference == pytest.approx(found.difference, abs=1e-12)


def test_interval_is_wilsons_for_right_or_wrong_and_clustered_for_shares():
    zeros = EvaluationScore(CONFIG, (0.0,) * 8)
    assert zeros.interval == (wilson(0, 8).low, wilson(0, 8).high)
    shares = EvaluationScore(CONFIG, (0.5, 0.5, 0.25, 0.75))
    half = 1.959964 * (0.125 / 3 / 4) ** 0.5
    assert shares.interval == pytest.approx((0.5 - half, 0.5 + half))
    ends = EvaluationScore(CONFIG, (1.0, 1.0, 0.9))
    assert ends.interval[1] == 1.0


def test_a_report_has_the_number_its_interval_and_every_field():
    text = EvaluationScore(CONFIG, (1.0, 0.0)).report()
    assert text.startswith("0.500 [0.095, 0.905] over 2 problems")
    for name, value in asdict(CONFIG).items():
        assert f"{name}: {value!r}" in text
    long = EvaluationScore(replace(CONFIG, chat_template="y" * 400), (1.0, 0.0)).report()
    assert "(400 characters)" in long and max(map(len, long.splitlines())) < 110


def test_json_brings_a_score_back_and_says_which_field_is_missing():
    score = EvaluationScore(CONFIG, (1.0, 0.25))
    assert EvaluationScore.from_json(score.to_json()) == score
    values = json.loads(score.to_json())
    del values["system_prompt"]
    with pytest.raises(ValueError, match="system_prompt"):
        EvaluationScore.from_json(json.dumps(values))
    with pytest.raises(ValueError, match="unknown.*seed"):
        EvaluationScore.from_json(json.dumps(json.loads(score.to_json()) | {"seed": 1}))
    for text in ("[1]", "not json", "{}", "3"):
        with pytest.raises(ValueError, match="by_problem"):
            EvaluationScore.from_json(text)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", ""),
        ("data", ""),
        ("engine", ""),
        ("verifier", ""),
        ("prompt_format", "Q:"),
        ("bos", -1),
        ("eos", ()),
        ("eos", [1]),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("max_new_tokens", 0),
        ("samples", 0),
        ("scoring", "median"),
    ],
)
def test_a_bad_field_is_named_with_its_value(name, value):
    with pytest.raises(ValueError, match=f"{name}="):
        replace(CONFIG, **{name: value})


def test_no_field_has_a_default():
    for name in asdict(CONFIG):
        values = asdict(CONFIG)
        del values[name]
        with pytest.raises(TypeError, match=name):
            EvaluationConfig(**values)


def test_bad_scores_and_comparisons_say_what_was_expected():
    with pytest.raises(ValueError, match="by_problem is empty"):
        EvaluationScore(CONFIG, ())
    for value in (1.5, -0.1, float("nan")):
        with pytest.raises(ValueError, match="by_problem has"):
            EvaluationScore(CONFIG, (1.0, value))
    a = EvaluationScore(CONFIG, (1.0, 0.0))
    with pytest.raises(ValueError, match="vary='seed'"):
        compare_scores(a, a, vary="seed")
    with pytest.raises(ValueError, match="2 and 3 numbers"):
        compare_scores(a, EvaluationScore(CONFIG, (1.0, 0.0, 1.0)))
    with pytest.raises(ValueError, match="1 and 1 numbers"):
        compare_scores(EvaluationScore(CONFIG, (1.0,)), EvaluationScore(CONFIG, (1.0,)))
    with pytest.raises(ValueError, match="no pairs"):
        compare_scores(a, EvaluationScore(replace(CONFIG, data="e5"), (1.0, 0.0)), vary="data")


def test_data_fingerprint_depends_on_prompts_golds_and_order():
    one, two = Problem("S21=", "12"), Problem("S43=", "34")
    first = data_fingerprint([one, two])
    assert first == data_fingerprint([Problem("S21=", "12"), two])
    others = [[two, one], [one], [one, Problem("S43=", "43")], [one, Problem("S34=", "34")]]
    # Joined without borders these would read the same.
    others.append([Problem("S21=12S43=", "34")])
    assert len({first, *(data_fingerprint(o) for o in others)}) == len(others) + 1
    with pytest.raises(ValueError, match="problems is empty"):
        data_fingerprint([])
