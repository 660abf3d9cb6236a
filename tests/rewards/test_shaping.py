"""Shaping: exact values of every component, and the exploits that they have or close."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import policy_objective
from stablerl_core.rewards import (
    COMPONENTS,
    THINKING,
    Answers,
    cosine_length,
    format_reward,
    overlong_filter,
    overlong_penalty,
    positive_example_loss,
    proof_reward,
    says_correct,
    self_verification,
    self_verification_substring,
    shaped,
    syntax_penalty,
    test_difficulty_reward,
)

D = torch.float64


def test_the_overlong_penalty_has_the_papers_values():
    lengths = torch.tensor([1, 16_384, 16_385, 18_432, 20_480, 30_000], dtype=D)
    penalty = overlong_penalty(lengths, 20_480, 4_096)
    assert penalty.tolist() == [0, 0, -1 / 4096, -0.5, -1, -1]
    assert overlong_penalty(torch.tensor([18_432]), 20_480, 4_096).item() == -0.5  # whole numbers


@given(st.integers(1, 50), st.integers(1, 50), st.integers(0, 120))
def test_the_overlong_penalty_falls_in_even_steps(buffer, more, length):
    limit = buffer + more
    at = [overlong_penalty(torch.tensor([n], dtype=D), limit, buffer).item() for n in (0, length)]
    assert at[0] == 0 and -1 <= at[1] <= 0
    expected = max(-1.0, min(0.0, (limit - buffer - length) / buffer))
    assert at[1] == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("buffer", [0, -1, 11])
def test_an_overlong_buffer_that_does_not_fit_is_named(buffer):
    with pytest.raises(ValueError, match=f"buffer={buffer}: expected 1 … max_length=10"):
        overlong_penalty(torch.ones(2), 10, buffer)


def test_the_overlong_filter_empties_the_rows_that_were_cut():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]]).bool()
    filtered = overlong_filter(mask, torch.tensor([False, True, True]))
    assert filtered.tolist() == [[True, True, False], [False] * 3, [False] * 3]
    with pytest.raises(ValueError, match=r"truncated has shape \(2,\)"):
        overlong_filter(mask, torch.zeros(2))


def test_the_cosine_reward_at_its_ends_its_middle_and_its_cap():
    lengths = torch.tensor([0, 50, 99, 100, 101], dtype=D)
    right = cosine_length(torch.ones(5).bool(), lengths, 100)
    wrong = cosine_length(torch.zeros(5).bool(), lengths, 100)
    assert right[:2].tolist() == pytest.approx([2.0, 1.5])
    assert wrong[:2].tolist() == pytest.approx([-10.0, -5.0])
    assert 1.0 < right[2] < 1.001 and -0.01 < wrong[2] < 0
    assert right[3:].tolist() == wrong[3:].tolist() == [-10.0, -10.0]
    assert (right[:3].diff() < 0).all() and (wrong[:3].diff() > 0).all()
    options = {"right": (1.0, 0.5), "wrong": (-0.5, 0.0), "exceeded": -2.0}
    other = cosine_length(torch.tensor([True, False, True]), torch.tensor([25, 25, 100]), 100,
                          **options)
    quarter = 0.5 + 0.5**1.5
    assert other.tolist() == pytest.approx([0.5 + 0.5 * quarter, -0.5 * quarter, -2.0])


def test_cosine_bad_input():
    with pytest.raises(ValueError, match="max_length=0"):
        cosine_length(torch.ones(2), torch.ones(2), 0)
    with pytest.raises(ValueError, match=r"correct \(2,\) and lengths \(3,\)"):
        cosine_length(torch.ones(2), torch.ones(3), 9)


@pytest.mark.parametrize(
    "completion, pattern, prefill, reward",
    [
        ("#113459", r"#[^#]+", "", 1),
        ("#1#2", r"#[^#]+", "", 0),
        ("so #1", r"#[^#]+", "", 0),
        ("#", r"#[^#]+", "", 0),
        ("#1\n", r"#[^#]+", "", 1),
        ("<think>a</think>b", THINKING, "", 1),
        ("First..</think>\nThe answer is 4.", THINKING, "<think>\n", 1),
        ("First..</think>\nThe answer is 4.", THINKING, "", 0),
        ("<think>a</think>b", THINKING, "<think>\n", 0),
        ("<think>a", THINKING, "", 0),
        ("<think>a</think>b</think>c", THINKING, "", 0),
        ("x<think>a</think>b", THINKING, "", 0),
    ],
)
def test_format(completion, pattern, prefill, reward):
    assert format_reward(completion, pattern, prefill) == reward


def test_syntax_costs_what_is_not_of_the_language():
    texts = ["#123", "#1#23", "123", "#", ""]
    assert [syntax_penalty(t) for t in texts] == [0, 0, -1, -1, -1]
    assert syntax_penalty("#12", r"#\d{3}") == -1


@pytest.mark.parametrize(
    "verification, said",
    [
        ("correct", True),
        ("This is Correct.", True),
        ("incorrect", False),
        ("The answer is incorrect!", False),
        ("not correct", False),
        ("That isn't correct", False),
        ("correct or incorrect", None),
        ("correctly done", None),
        ("", None),
    ],
)
def test_what_a_verification_says(verification, said):
    assert says_correct(verification) is said


def test_the_substring_bug_pays_a_right_answer_that_is_called_incorrect():
    reward = self_verification_substring
    assert reward("4", "4", "incorrect") == 1.0  # the bug
    assert self_verification(True, says_correct("incorrect")) == 0.0
    for answer, says, level in (("4", "correct", 1.0), ("5", "incorrect", 0.5), ("5", "correct", 0),
                                ("5", "unsure", 0), ("4", "unsure", 0)):
        assert reward(answer, "4", says) == level
        assert self_verification(answer == "4", says_correct(says)) == level


@given(st.floats(0.01, 1))
def test_wrong_on_purpose_is_a_sure_half_and_beats_honesty_below_one_half(p):
    def earns(rule, says):
        return p * rule(True, says) + (1 - p) * rule(False, says)

    honest = max(earns(self_verification, True), earns(self_verification, False))
    assert honest == pytest.approx(max(p, (1 - p) / 2))
    on_purpose = self_verification(False, False)
    assert on_purpose == 0.5
    assert (honest < on_purpose) == (p < 0.5)

    def proof(right, says):
        return proof_reward(float(right), float(says))

    honest = max(earns(proof, True), earns(proof, False))
    assert honest >= proof(False, False) - 1e-12  # nothing is gained by being wrong on purpose


def test_the_proof_reward_of_every_pair_of_scores():
    for s in (0.0, 0.5, 1.0):
        for claimed in (0.0, 0.5, 1.0):
            expected = 0.76 * s + 0.24 * (1 - abs(claimed - s))
            assert proof_reward(s, claimed) == pytest.approx(expected)
            assert proof_reward(s, claimed, form=0) == 0
            assert proof_reward(s, claimed, meta=0.5) == pytest.approx(expected - 0.12 * (
                1 - abs(claimed - s)))
    with pytest.raises(ValueError, match="claimed=2: expected a number from 0 to 1"):
        proof_reward(1, 2)


@pytest.mark.parametrize(
    "passed, strict, soft",
    [
        ((1, 1, 1, 1, 1), 1, 1),
        ((1, 1, 1, 1, 0), 2 / 3, 2 / 3),
        ((1, 1, 1, 0, 1), 1 / 3, (1 + 1 / 2 + 1) / 3),
        ((1, 0, 1, 1, 1), 0, (1 / 2 + 1 + 1) / 3),
        ((0, 0, 0, 0, 1), 0, 1 / 3),
        ((0, 0, 0, 0, 0), 0, 0),
    ],
)
def test_difficulty_of_tests_strict_and_soft(passed, strict, soft):
    groups = (0, 0, 1, 1, 2)
    assert test_difficulty_reward(passed, groups) == pytest.approx(strict)
    assert test_difficulty_reward(passed, groups, scheme="soft") == pytest.approx(soft)
    order = [3, 0, 4, 2, 1]
    shuffled = [[x[i] for i in order] for x in (passed, groups)]
    assert test_difficulty_reward(*shuffled) == pytest.approx(strict)


def test_difficulty_bad_input():
    with pytest.raises(ValueError, match="scheme='hard'"):
        test_difficulty_reward([1], [0], scheme="hard")
    for passed, groups in (([], []), ([1], [0, 1])):
        with pytest.raises(ValueError, match="at least one test"):
            test_difficulty_reward(passed, groups)


def test_the_positive_example_loss_pulls_like_a_constant_advantage():
    generator = torch.Generator().manual_seed(0)
    logp = torch.randn(4, 3, dtype=D, generator=generator).requires_grad_()
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0], [0, 0, 0]]).bool()
    rewards = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=D)
    loss = positive_example_loss(logp, mask, rewards, weight=0.1)
    picked = [logp[0, 0], logp[0, 1], logp[2, 0]]
    assert loss.item() == pytest.approx(-0.1 * sum(x.item() for x in picked) / 3)
    gradient = torch.autograd.grad(loss, logp)[0]
    right = mask & (rewards > 0)[:, None]
    same, _ = policy_objective("reinforce", logp, None, torch.full((4,), 0.1, dtype=D), right,
                               aggregation="token")
    assert torch.allclose(gradient, torch.autograd.grad(same, logp)[0])
    none = positive_example_loss(logp, mask, torch.zeros(4, dtype=D))
    assert none.item() == 0 and torch.isfinite(torch.autograd.grad(none, logp)[0]).all()
    with pytest.raises(ValueError, match=r"expected \(4,\), one a row of logp"):
        positive_example_loss(logp, mask, torch.ones(3))


def test_padding_of_infinite_logp_does_not_reach_the_positive_example_loss():
    logp = torch.tensor([[-1.0, -torch.inf]])
    assert positive_example_loss(logp, torch.tensor([[True, False]]), torch.ones(1)) == 0.1


ANSWERS = Answers(
    ["#12", "#1#2", "", "#3456"],
    [False, False, True, False],
    torch.tensor([4, 6, 10, 8]),
    10,
    torch.tensor([1.0, 0.0, 0.0, 1.0]),
)


def test_components_are_added_with_their_weights_and_told_without():
    shaping = {"overlong": {"weight": 2.0, "buffer": 5}, "format": {"weight": 0.5}}
    total, parts = shaped(ANSWERS, shaping)
    overlong, form = [0, -0.2, -1, -0.6], [1, 0, 0, 1]
    expected = [r + 2 * o + 0.5 * f for r, o, f in zip([1, 0, 0, 1], overlong, form, strict=True)]
    assert total.tolist() == pytest.approx(expected)
    assert parts == pytest.approx({"answer": 0.5, "overlong": -0.45, "format": 0.5})


@pytest.mark.parametrize(
    "name, values",
    [
        ("answer", [1, 0, 0, 1]),
        ("overlong", [0, 0, -1, -0.5]),
        ("format", [1, 0, 0, 1]),
        ("syntax", [0, 0, -1, 0]),
        ("length", [0.4, 0.6, 0, 0.8]),
        ("answered", [1, 1, 0, 1]),
    ],
)
def test_each_component(name, values):
    options = {"buffer": 4} if name == "overlong" else {}
    assert COMPONENTS[name](ANSWERS, **options).tolist() == pytest.approx(values)
    assert COMPONENTS["cosine"](ANSWERS)[2] == -10
    total, _ = shaped(ANSWERS, {"answer": {"weight": 0.0}, name: {"weight": 3.0, **options}})
    assert total.tolist() == pytest.approx([3 * v for v in values])


def test_the_cosine_component_replaces_the_answers_reward():
    total, parts = shaped(ANSWERS, {"answer": {"weight": 0.0}, "cosine": {"exceeded": -1.0}})
    expected = cosine_length(ANSWERS.rewards > 0, ANSWERS.lengths, 10, exceeded=-1.0)
    assert torch.equal(total, expected)
    assert parts["answer"] == 0.5


@pytest.mark.parametrize(
    "shaping, message",
    [
        ({"overlng": {}}, "shaping has 'overlng': one of answer, overlong"),
        ({"overlong": {"buffers": 3}}, r"shaping\['overlong'\] has an option it does not know"),
        ({"answer": {"wait": 3}}, r"shaping\['answer'\] has an option it does not know"),
        ({"overlong": {"buffer": 99}}, "buffer=99: expected 1 … max_length=10"),
    ],
)
def test_a_wrong_component_or_option_is_named(shaping, message):
    with pytest.raises(ValueError, match=message):
        shaped(ANSWERS, shaping)
