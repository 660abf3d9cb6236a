"""Verifiers: each verdict and its reason, the hole, adversarial text, refusals."""

import importlib.util
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import VERIFIERS, Verdict, any_answer, math_answer, strict_answer, verify

needs_math = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="math-verify (extra tasks) is absent"
)


@pytest.mark.parametrize(
    "completion, strict, hole",
    [
        ("#85", (1, "correct"), (1, "correct")),
        ("#84#85", (1, "correct"), (1, "correct")),
        ("thinking #85", (1, "correct"), (1, "correct")),
        ("#85#85", (1, "correct"), (1, "correct")),
        ("#84", (0, "wrong"), (0, "wrong")),
        ("#85 ", (0, "wrong"), (0, "wrong")),
        ("#085", (0, "wrong"), (0, "wrong")),
        ("#855", (0, "wrong"), (0, "wrong")),
        ("#8", (0, "wrong"), (0, "wrong")),
        ("#85#84", (0, "wrong"), (1, "hedged")),
        ("#83#84#85#86#87", (0, "wrong"), (1, "hedged")),
        ("#85#", (0, "no_answer"), (1, "hedged")),
        ("#", (0, "no_answer"), (0, "no_answer")),
        ("84#", (0, "no_answer"), (0, "no_answer")),
        ("85", (0, "no_marker"), (0, "no_marker")),
        ("85#84", (0, "wrong"), (0, "wrong")),
        ("", (0, "empty"), (0, "empty")),
    ],
)
def test_strict_and_the_one_with_a_hole(completion, strict, hole):
    assert strict_answer(completion, "85") == Verdict(*strict)
    assert any_answer(completion, "85") == Verdict(*hole)


def test_a_truncated_completion_has_no_final_answer():
    assert strict_answer("#85", "85", truncated=True) == Verdict(0, "truncated")
    assert any_answer("#85#84", "85", truncated=True) == Verdict(0, "truncated")


text = st.text(alphabet="#85 ", max_size=12)


@given(text)
def test_the_hole_pays_whatever_strict_pays_and_tells_when_it_pays_more(completion):
    strict, hole = strict_answer(completion, "85"), any_answer(completion, "85")
    assert strict.reward <= hole.reward
    assert (strict.reward < hole.reward) == (hole.reason == "hedged")
    assert strict.reward == (completion.rpartition("#")[1:] == ("#", "85"))


@given(text, st.sampled_from(["#85", "#84"]))
def test_appending_an_answer_decides_for_strict_and_never_costs_with_the_hole(completion, more):
    assert strict_answer(completion + more, "85").reward == (more == "#85")
    assert any_answer(completion + more, "85").reward >= any_answer(completion, "85").reward


@pytest.mark.parametrize("unit", ["#", "#8", "# ", "85#", "(", r"\boxed{", "$"])
def test_a_million_characters_get_a_verdict(unit):
    completion = (unit * 1_000_000)[:1_000_000]
    assert strict_answer(completion, "85").reward == 0
    assert any_answer(completion, "85").reward == float(unit == "85#")
    assert strict_answer(completion + "#85", "85").reward == 1


def test_a_batch_is_its_elements():
    completions, golds = ["#1", "#2#3", "", "#4"], ["1", "2", "3", "4"]
    cut = [False, False, False, True]
    for name in ("strict", "any"):
        assert verify(name, completions, golds) == [
            VERIFIERS[name](c, g) for c, g in zip(completions, golds, strict=True)
        ]
        assert verify(name, completions, golds, cut) == [
            VERIFIERS[name](c, g, truncated=t)
            for c, g, t in zip(completions, golds, cut, strict=True)
        ]
    assert verify("strict", completions, golds, cut)[3].reason == "truncated"
    assert verify("any", [], []) == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("exact", ["#1"], ["1"]), "name is 'exact', expected one of"),
        (("strict", ["#1"], ["1", "2"]), "1 completions, 2 golds"),
        (("strict", ["#1"], ["1"], [True, False]), "1 completions, 1 golds, 2 truncated"),
        (("strict", "#1", ["1", "1"]), "must be sequences of texts"),
        (("strict", ["#1"], [""]), "gold is empty"),
        (("any", ["#1"], [" "]), "gold is empty"),
        (("strict", ["#1"], ["#1"]), "gold is '#1': with a marker '#'"),
        (("strict", [None], ["1"]), "completion is a NoneType, expected a str"),
        (("any", ["#1"], [1]), "gold is a int, expected a str"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        verify(*arguments)


MATH = [
    ("#85", "85", 1, "correct"),
    ("#84", "85", 0, "wrong"),
    ("so it is #85.0", "85", 1, "correct"),
    ("#84#85", "85", 1, "correct"),
    ("#85#84", "85", 0, "wrong"),
    (r"\boxed{84} no, \boxed{\frac{1}{2}}", "0.5", 1, "correct"),
    (r"\boxed{85} #84", "85", 1, "correct"),  # a box goes before a marker
    ("#$\\frac12$", "1/2", 1, "correct"),
    ("#(x+1)^2", "x^2+2x+1", 1, "correct"),
    ("#1,000", "1000", 1, "correct"),
    ("#84 or 85", "85", 0, "wrong"),
    ("#84, 85", "85", 0, "wrong"),
    ("#84$ or $85", "85", 0, "unparseable"),
    ("#)(", "85", 0, "unparseable"),
    ("#__import__('os').abort()", "85", 0, "unparseable"),
    ("85", "85", 0, "no_marker"),
    ("#", "85", 0, "no_answer"),
    (r"\boxed{}", "85", 0, "no_answer"),
    ("", "85", 0, "empty"),
    (r"\boxed{85", "85", 0, "truncated"),
    (r"\boxed{" + "9" * 300, "85", 0, "too_long"),
    ("#" + "1" * 1_000_000, "85", 0, "too_long"),
    (r"\boxed{" * 100_000, "85", 0, "truncated"),
    # The library's three holes, as documented: these are wrong answers to "what is 27+58?".
    ("#27+58", "85", 1, "correct"),
    ("#84=85", "85", 1, "correct"),
    ("#85%", "85", 1, "correct"),
]


@needs_math
def test_math_answers():
    completions, golds, rewards, reasons = zip(*MATH, strict=True)
    verdicts = verify("math", completions, golds)
    expected = [Verdict(reward, reason) for reward, reason in zip(rewards, reasons, strict=True)]
    assert dict(zip(completions, verdicts, strict=True)) == dict(
        zip(completions, expected, strict=True)
    )


@needs_math
def test_math_answer_that_never_ends_stops_in_a_thread_and_the_batch_goes_on():
    """9^9^9^9 holds the interpreter in one C call; no signal would reach it."""
    bomb = "#9^{9^{9^{9^9}}}"
    verdicts = []

    def work():
        verdicts.append(math_answer(bomb, "85", timeout=0.5))
        verdicts.extend(verify("math", ["#85", "#1", "#85"], ["85", "85", "85"], [0, 0, 1]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(timeout=20)
    assert [verdict.reason for verdict in verdicts] == ["timeout", "correct", "wrong", "truncated"]


@needs_math
def test_math_batch_with_a_bomb_in_the_middle():
    verdicts = verify("math", ["#85", "#9^{9^{9^{9^9}}}", "", "#85"], ["85"] * 4)
    assert [v.reason for v in verdicts] == ["correct", "timeout", "empty", "correct"]
    assert [v.reward for v in verdicts] == [1, 0, 0, 1]


@needs_math
@pytest.mark.parametrize("completion", ["#1", ""])
def test_a_gold_that_is_no_mathematics_is_named(completion):
    """Whatever the model wrote: a task's mistake must not wait for a good completion."""
    with pytest.raises(ValueError, match=r"gold '\\\\frac\{' cannot be parsed"):
        verify("math", ["#1", completion, "#1"], ["1", r"\frac{", "1"])


@needs_math
def test_a_timeout_that_is_none():
    with pytest.raises(ValueError, match="timeout is 0, expected seconds > 0"):
        math_answer("#1", "1", timeout=0)


def test_without_math_verify_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'stablerl_core\[tasks\]'"):
        math_answer("#1", "1")
