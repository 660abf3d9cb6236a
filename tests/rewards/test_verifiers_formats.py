r"""Boxes, thinking and choices: real formats, adversarial text, and no substring traps."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import (
    Verdict,
    after_thinking,
    boxed_answer,
    choice_answer,
    last_box,
    math_answer,
    number_answer,
    verify,
)


@pytest.mark.parametrize(
    "text, content",
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\boxed{4}}", "4"),
        (r"\boxed {3}", "3"),
        (r"\fbox{3}", "3"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{a\}", None),
        (r"\boxed{1", None),
        (r"\boxed{1} or \boxed{2", None),
        ("boxed{1}", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_box(text, content):
    assert last_box(text) == content


balanced = st.recursive(
    st.text(alphabet=r"ab\ 1", max_size=3).filter(lambda s: not s.endswith("\\")),
    lambda inner: st.lists(inner, max_size=3).map(lambda parts: "{" + "".join(parts) + "}"),
    max_leaves=6,
)


@given(st.text(max_size=20), balanced.filter(lambda s: "box" not in s), st.text(max_size=20))
def test_what_is_in_the_last_box_is_what_was_put_there(before, content, after):
    text = before + r"\boxed{" + content + "}" + after.replace("box", "")
    assert last_box(text) == content


@pytest.mark.parametrize(
    "completion, prefill, rest",
    [
        ("<think>a</think>b", "", "b"),
        ("a</think>b", "<think>\n", "b"),
        ("a</think>b", "", "b"),
        ("a</think>b</think>c", "<think>", "c"),
        ("<think>a", "", None),
        ("<think>a</think>b<think>c", "", None),
        ("a</think>b<think>c", "<think>", None),
        ("b", "<think>\n\n</think>\n\n", "\n\nb"),
        ("a", "Assistant: <think>\n", None),
        ("b", "", "b"),
        ("", "", ""),
    ],
)
def test_what_follows_the_thinking(completion, prefill, rest):
    assert after_thinking(completion, prefill) == rest


@pytest.mark.parametrize(
    "completion, verdict",
    [
        (r"so \boxed{1}", (1, "correct")),
        (r"\boxed{ 1 }", (1, "correct")),
        (r"\boxed{2} no \boxed{1}" + "x" * 1000, (1, "correct")),  # a long tail hides nothing
        (r"\boxed{21}", (0, "wrong")),
        (r"\boxed{12}", (0, "wrong")),
        (r"\boxed{1, 2}", (0, "wrong")),
        (r"\boxed{1} \boxed{2}", (0, "wrong")),
        (r"<think>\boxed{1}</think> 2", (0, "no_marker")),
        (r"<think>\boxed{2}</think>\boxed{1}", (1, "correct")),
        (r"<think>\boxed{1}", (0, "truncated")),
        (r"\boxed{1", (0, "truncated")),
        (r"\boxed{ }", (0, "no_answer")),
        ("1", (0, "no_marker")),
        ("", (0, "empty")),
    ],
)
def test_boxed_answers(completion, verdict):
    assert boxed_answer(completion, "1") == Verdict(*verdict)


def test_a_think_tag_that_the_template_opened_is_joined():
    completion = r"\boxed{2} hm</think> \boxed{1}"
    assert boxed_answer(completion, "1", prefill="<think>\n").reward == 1
    assert boxed_answer(r"\boxed{1}", "1", prefill="<think>\n") == Verdict(0.0, "truncated")


@pytest.mark.parametrize(
    "completion",
    [
        *("B", " B ", "(B)", "b", "B.", "**B**", "B) Paris", "(B) Paris", "B: the second"),
        *(r"\boxed{B}", r"\boxed{\text{B}}", r"\boxed{\text{(B)}}", r"$\boxed{\mathrm{b}}$"),
        *("<answer>B</answer>", "<answer> (B) </answer>", "#B", "#### B"),
        *("The answer is B.", "The answer is: (B)", "Answer: **B**", "answer is option B"),
        *("A? No. The correct answer is B", "The answer is A.\nWait. The answer is B."),
        *("<think>A or C</think>B", r"A and C fail, so \boxed{B}"),
        *("b) at 3 a.m.", "B) b: a number"),
    ],
)
def test_forms_of_a_right_choice(completion):
    assert choice_answer(completion, "B") == Verdict(1.0, "correct")


@pytest.mark.parametrize(
    "completion, reason",
    [
        ("A or B or C", "several"),
        ("A, B", "several"),
        ("(b) or (a)", "several"),
        ("b. a.", "several"),
        ("B) not a: that is worse", "several"),
        ("ABCD", "unparseable"),
        (r"\boxed{AB}", "unparseable"),
        (r"\boxed{A, B}", "several"),
        ("B) x or C) y", "several"),
        ("The answer is A or B", "several"),
        ("Because", "unparseable"),
        ("the Best", "unparseable"),
        ("a prime number", "unparseable"),
        ("The answer is a big B-tree", "unparseable"),
        ("The answer is B. The answer is A.", "wrong"),
        ("A", "wrong"),
        ("E", "unparseable"),
        ("B1", "unparseable"),
        (r"\boxed{}", "no_answer"),
        ("#", "no_answer"),
        (r"\boxed{B", "truncated"),
        ("<think>B", "truncated"),
        ("", "empty"),
    ],
)
def test_what_is_no_right_choice(completion, reason):
    assert choice_answer(completion, "B") == Verdict(0.0, reason)


@given(st.lists(st.sampled_from("ABCD"), min_size=2, max_size=4, unique=True), st.data())
def test_a_list_of_options_is_never_paid(letters, data):
    joined = data.draw(st.sampled_from([", ", " or ", " and ", "/", " ", "\n", ") "]))
    frame = data.draw(st.sampled_from(["{}", r"\boxed{{{}}}", "The answer is {}", "#{}"]))
    for gold in "ABCD":
        assert choice_answer(frame.format(joined.join(letters)), gold).reward == 0


@given(st.text(alphabet=r"ABCDab ()#.{}\boxed<think>/", max_size=40))
def test_at_most_one_option_is_ever_right(completion):
    paid = [choice_answer(completion, gold).reward for gold in "ABCD"]
    assert sum(paid) <= 1


@pytest.mark.parametrize("unit", ["A", "A ", "(", r"\boxed{", "answer is ", "<answer>", "{", "B)"])
def test_long_texts_get_a_verdict(unit):
    text = (unit * 100_000)[:200_000]
    assert choice_answer(text, "B").reason
    assert boxed_answer(text, "B").reward == 0
    assert choice_answer(text + r"}\boxed{B}", "B").reward == 1


def test_options_may_be_small_letters():
    assert choice_answer("The answer is (b).", "b", options="abcd") == Verdict(1.0, "correct")
    assert choice_answer("B) Paris", "b", options="abcd").reward == 1
    assert choice_answer("(a)", "b", options="abcd").reason == "wrong"
    assert choice_answer("a or b", "b", options="abcd").reward == 0


def test_a_truncated_text_has_no_choice_and_no_box():
    assert choice_answer("B", "B", truncated=True) == Verdict(0.0, "truncated")
    assert boxed_answer(r"\boxed{B}", "B", truncated=True) == Verdict(0.0, "truncated")
    assert verify("choice", ["B", "B"], ["B", "B"], [True, False])[0].reason == "truncated"


@pytest.mark.parametrize("gold", ["E", "AB", "b"])
def test_a_gold_that_is_no_option_is_named(gold):
    with pytest.raises(ValueError, match=re.escape(f"gold is {gold!r}: expected one letter of")):
        choice_answer("B", gold)


def test_math_reads_a_box_in_which_braces_are_characters():
    pytest.importorskip("math_verify")
    assert math_answer(r"\boxed{\left\{1, 2\right\}}", r"\{2, 1\}").reason == "correct"
    assert math_answer(r"\boxed{7.41\%}", r"7.41\%").reward == 1


@pytest.mark.parametrize(
    "completion, verdict",
    [
        ("#### 42", (1, "correct")),
        ("#42", (1, "correct")),
        ("#### 42" + "x" * 301, (1, "correct")),  # a window at the end would miss it
        ("#### 42\nI hope this helps. " + "z" * 10_000, (1, "correct")),
        ("#### $42.00", (1, "correct")),
        ("#### 42.", (1, "correct")),
        ("#### +42 apples", (1, "correct")),
        ("#### 7\n#### 42", (1, "correct")),
        ("#### 42\n#### 7", (0, "wrong")),
        ("#### 142", (0, "wrong")),
        ("#### 421", (0, "wrong")),
        ("#### -42", (0, "wrong")),
        ("#### 42,000", (0, "wrong")),
        ("#### 42.5", (0, "wrong")),
        ("#### about 42", (0, "unparseable")),
        ("#### 42,00,000", (0, "unparseable")),  # 42 hundred thousand, in the Indian way
        ("#### 42,5", (0, "unparseable")),
        ("#### 42.000,5", (0, "unparseable")),
        ("#### 42, 43", (1, "correct")),  # what follows a space does not matter, as documented
        ("#### .", (0, "unparseable")),
        ("####", (0, "no_answer")),
        ("42", (0, "no_marker")),
        ("", (0, "empty")),
    ],
)
def test_numbers_after_a_marker(completion, verdict):
    assert number_answer(completion, "42") == Verdict(*verdict)
    assert number_answer(completion, "42", truncated=True) == Verdict(0.0, "truncated")


@given(st.integers(-(10**9), 10**9), st.integers(-(10**9), 10**9))
def test_two_numbers_are_equal_or_not_however_they_are_written(a, b):
    assert number_answer(f"#### {a:,}.00!", str(b)).reward == float(a == b)
    assert number_answer(f"#### {a}", f"{a:,}").reward == 1


@pytest.mark.parametrize("gold", ["forty", "x=3", "#42"])
def test_a_gold_that_is_no_number_is_named(gold):
    with pytest.raises(ValueError, match=f"gold is '{gold}': expected a number"):
        number_answer("#### 42", gold)


def test_percentages_are_equal_to_themselves_off_the_main_thread():
    pytest.importorskip("math_verify")
    from threading import Thread

    verdicts = []
    thread = Thread(target=lambda: verdicts.extend(
        [math_answer("#7.41%", "7.41%"), number_answer("#7.41%", "7.41%")]))
    thread.start()
    thread.join(60)
    assert [v.reward for v in verdicts] == [1, 1]
