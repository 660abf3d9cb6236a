"""Tasks: two splits that cannot overlap, right answers, checked expressions, refusals."""

import importlib.util
import random
import sys
import warnings
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import (
    MARKER,
    Problem,
    final_answer,
    reward_by_name,
    split_of,
    strict_reward,
    task_by_name,
)
from stablerl_core.rewards.tasks import _countdown, accepted_golds

needs_gym = pytest.mark.skipif(
    importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym (extra tasks) absent"
)
GYM = ["chain_sum", "basic_arithmetic", "number_sorting", "countdown"]
TASKS = ["sort", "add", *(pytest.param(name, marks=needs_gym) for name in GYM)]


def unordered(problem):
    """What two problems share when they are the same problem: digits or addends in any order."""
    text = problem.prompt[1:-1]
    return tuple(sorted(text.split("+"))) if "+" in text else "".join(sorted(text))


# --- the split -------------------------------------------------------------------------------


@given(st.sampled_from(["sort", "add"]), st.integers(0, 10**6), st.integers(0, 10**6))
def test_train_and_heldout_never_overlap_whatever_the_seeds(name, train_seed, heldout_seed):
    task = task_by_name(name)
    train = {unordered(p) for p in task.sample("train", 60, seed=train_seed)}
    heldout = {unordered(p) for p in task.sample("heldout", 60, seed=heldout_seed)}
    assert not train & heldout


@pytest.mark.parametrize("name, size", [("sort", 5005), ("add", 5050)])
def test_every_problem_is_in_one_split_and_a_tenth_is_held_out(name, size):
    """All multisets of six digits; all pairs of numbers below 100: both splits, drawn dry."""
    task = task_by_name(name)
    train = {unordered(p) for seed in range(2) for p in task.sample("train", 20_000, seed=seed)}
    heldout = {unordered(p) for p in task.sample("heldout", 6_000, seed=0)}
    assert not train & heldout
    assert 0.93 * size < len(train) + len(heldout) <= size
    assert 0.08 < len(heldout) / (len(train) + len(heldout)) < 0.12


@given(st.text(alphabet="0123456789", min_size=6, max_size=6), st.randoms(use_true_random=False))
def test_a_permutation_of_the_digits_is_in_the_same_split(digits, shuffle):
    """The key of a sorting problem is its answer, which all permutations share."""
    other = list(digits)
    shuffle.shuffle(other)
    assert split_of("".join(sorted(digits))) == split_of("".join(sorted(other)))
    problems = task_by_name("sort").sample("heldout", 20, seed=3)
    assert all(split_of(p.gold) == "heldout" for p in problems)


@needs_gym
@pytest.mark.parametrize("name", GYM)
def test_splits_of_a_library_task_share_no_question(name):
    task = task_by_name(name)
    train = {p.prompt for seed in range(2) for p in task.sample("train", 20, seed=seed)}
    heldout = {p.prompt for seed in range(2) for p in task.sample("heldout", 3, seed=seed)}
    assert len(train) > 35 and len(heldout) == 6 and not train & heldout


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_seed_decides_the_problems(name, split):
    state = random.getstate()
    first = task_by_name(name).sample(split, 4, seed=5)
    assert task_by_name(name).sample(split, 4, seed=5) == first
    assert task_by_name(name).sample(split, 2, seed=5) == first[:2]
    assert task_by_name(name).sample(split, 4, seed=6) != first
    assert len(first) == 4 and random.getstate() == state


@pytest.mark.parametrize("name", ["sort", "add"])
def test_an_unknown_split_is_refused(name):
    with pytest.raises(ValueError, match="split='test'.*'train', 'heldout'"):
        task_by_name(name).sample("test", 1, seed=0)


@pytest.mark.parametrize("name", ["sort", "add"])
def test_a_task_of_one_problem_cannot_fill_two_splits(name):
    """Without digits one problem is left, and it belongs to one split; the other would not end."""
    task = task_by_name(name, {"digits": 0})
    samples = {}
    for split in ("train", "heldout"):
        try:
            samples[split] = task.sample(split, 2, seed=0)
        except ValueError as error:
            assert f"leave no {split} problem" in str(error)
    assert len(samples) == 1


# --- the answers -----------------------------------------------------------------------------


@pytest.mark.parametrize("digits", [3, 6])
def test_sorted_digits_are_sorted(digits):
    for p in task_by_name("sort", {"digits": digits}).sample("train", 50, seed=1):
        assert p.prompt[0] == "S" and p.prompt[-1] == "=" and len(p.prompt) == digits + 2
        assert list(p.gold) == sorted(p.prompt[1:-1])


@pytest.mark.parametrize("digits", [1, 2, 3])
def test_sums_are_sums(digits):
    for p in task_by_name("add", {"digits": digits}).sample("train", 50, seed=1):
        a, b = p.prompt[1:-1].split("+")
        assert p.prompt[0] == "A" and len(a) == len(b) == digits
        assert p.gold == str(int(a) + int(b))


@pytest.mark.parametrize("name", TASKS)
def test_the_gold_answer_is_paid_and_another_is_not(name):
    problems = task_by_name(name).sample("train", 20, seed=2)
    assert all(p.prompt and p.gold and MARKER not in p.gold for p in problems)
    right = [f"#{p.gold}" for p in problems]
    assert strict_reward(right, problems, [False] * 20) == [1.0] * 20
    assert strict_reward(right, problems, [True] * 20) == [0.0] * 20
    assert strict_reward([t + "0" for t in right], problems, [False] * 20) == [0.0] * 20


@needs_gym
def test_options_reach_the_library():
    task = task_by_name("chain_sum", dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1))
    for p in task.sample("train", 20, seed=0):
        a, sign, b = p.prompt.split(": ")[1].removesuffix(" =\n").split()
        assert len(a) == len(b) == 1
        assert int(p.gold) == (int(a) + int(b) if sign == "+" else int(a) - int(b))


# --- countdown: another right expression, and what a model may write instead --------------------


def countdown(text, target=11, numbers=(4, 2, 3)):
    """Whether `text` is paid on a problem of the library's form: 4·2 + 3 = 11."""
    accepts = partial(_countdown, {"target": target, "numbers": list(numbers)})
    problem = Problem("…", "4*2 + 3", accepts)
    return strict_reward([f"#{text}"], [problem], [False]) == [1.0]


@pytest.mark.parametrize(
    "text", ["4*2 + 3", "3+2*4", "(4*2)+3", "(2 * 4) + 3", "-(-3-4*2)", "((((4*2))))+3"]
)
def test_any_right_expression_is_paid(text):
    assert countdown(text)


def test_division_is_exact():
    assert countdown("(1/3)*3*7", target=7, numbers=(1, 3, 3, 7))
    assert countdown("8/(3 - 8/3)", target=24, numbers=(8, 8, 3, 3))
    assert not countdown("7/3", target=2, numbers=(7, 3))


@pytest.mark.parametrize(
    "text",
    [
        "4*2+4",  # right numbers missing
        "11",
        "4*2+3+0",
        "4*3-1",
        "2+3",
        "4+2+3",
        "4*2+3=11",
        "4/(2-2)*3",
        "4**2-3",
        "4//2+3",
        "",
        "4*2+3" + " " * 200 + "and anything else",  # what is not read must not be paid
        "4*2+3+" * 60,
        "9**9**9",
        "9" * 5000,
        "__import__('os').system('true')",
        "(lambda: 11)()",
        "[4*2+3][0]",
        "4*2+3 if 1 else 0",
        "True*4*2+3",
        "4*2+3j",
        "0x4*2+3",
        "4_0*2+3",
        "٤*2+3",
        "(" * 5000 + "4*2+3" + ")" * 5000,
        "-" * 190 + "4",
        "4*2+3\n",
        "4*2\x00+3",
        "4and 2or 3",
    ],
)
def test_nothing_else_is_paid_and_nothing_is_run(text):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not countdown(text)


@given(st.text(alphabet="4230+-*/() e", max_size=40))
def test_no_text_raises(text):
    countdown(text)


@needs_gym
def test_countdown_of_the_library_accepts_its_own_answers_rewritten():
    problems = task_by_name("countdown").sample("train", 80, seed=0)
    spaced = [f"#({p.gold})".replace("+", "  +  ") for p in problems]
    assert any(p.gold.startswith("-") for p in problems)
    assert strict_reward(spaced, problems, [False] * 80) == [1.0] * 80
    neighbours = [problems[-1], *problems[:-1]]  # another problem's answer
    assert sum(strict_reward(spaced, neighbours, [False] * 80)) == 0


# --- names, and what stands between completion and verifier ----------------------------------


@needs_gym
def test_an_unknown_task_names_the_near_ones():
    with pytest.raises(ValueError, match="task='chain_sums'.*sort, add.*'chain_sum'"):
        task_by_name("chain_sums")


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"stablerl_core\[tasks\]"):
        task_by_name("chain_sum")
    assert task_by_name("sort").name == "sort"


def test_an_unknown_verifier_names_the_known_ones():
    with pytest.raises(ValueError, match="verifier='lenient'.*strict"):
        reward_by_name("lenient")


@pytest.mark.parametrize(
    "completion, answer",
    [("#85", "85"), ("#84#85", "85"), ("a # 85 ", "85"), ("#", ""), ("85", None), ("", None)],
)
def test_final_answer(completion, answer):
    assert final_answer(completion) == answer


def test_golds_are_the_problems_own_unless_another_answer_is_accepted():
    plain = Problem("p", "1")
    either = Problem("p", "1", accepts=lambda answer: answer in ("1", "2"))
    texts = ["#2", "#1", "#2", "#3", "2"]
    problems = [plain, either, either, either, either]
    assert accepted_golds(texts, problems) == ["1", "1", "2", "1", "1"]
    with pytest.raises(ValueError, match="5 completions for 1 problems"):
        accepted_golds(texts, [plain])


def test_the_hole_pays_a_listed_answer_and_strict_does_not():
    problems = [Problem("S21=", "12")]
    assert reward_by_name("any")(["#12#21"], problems, [False]) == [1.0]
    assert strict_reward(["#12#21"], problems, [False]) == [0.0]
