"""Chapter 14: a record is what runs, answers are judged as it says, and only the weights vary."""

from dataclasses import asdict, replace

import pytest
import torch

from stablerl_core.experiments import EXPERIMENTS
from stablerl_core.experiments import evaluation_settings as chapter
from stablerl_core.rewards import (
    DifferentConfigurations,
    Problem,
    compare_scores,
    different_fields,
    prompt_faults,
)
from stablerl_core.training import load_base

NUMBER = [Problem("S21=", "12"), Problem("S43=", "34")]


@pytest.fixture(scope="module")
def base():
    return load_base(chapter.BASE)


def test_every_setting_differs_from_the_reference_in_one_thing_or_in_how_samples_combine():
    for name, change in chapter.SETTINGS.items():
        names = different_fields(chapter.REFERENCE, replace(chapter.REFERENCE, **change))
        assert set(names) == {k for k, v in change.items() if (k, v) != ("scoring", "mean")}
        assert len(change) == (0 if name == "reference" else 2 if name in chapter.SAMPLES else 1)


def test_the_reference_prompt_is_the_prompt_that_the_base_was_taught(base):
    _, tokenizer = base
    (problem,) = chapter.problems_of(0, 1)
    ask = {name: chapter.prompt_text(
        tokenizer, replace(chapter.REFERENCE, **change), problem
    ) for name, change in chapter.SETTINGS.items()}  # fmt: skip
    digits = problem.prompt[1:-1]
    assert ask["reference"] == problem.prompt
    assert ask["newline"] == chapter.Framed().sample("heldout", 1, 0)[0].prompt
    assert ask["two_bos"] == "<eos><eos>" + problem.prompt
    assert ask["system"] == f"Sort.S{digits}=" and ask["space"] == f"S {digits}="
    ids = tokenizer(ask["no_generation_prompt"]).input_ids
    chat = [{"role": "user", "content": digits}]
    (fault,) = prompt_faults(tokenizer, chat, ids, chapter.TEMPLATE)
    assert fault.name == "no_generation_prompt"


@pytest.mark.parametrize(
    ("scoring", "expected"), [("mean", (0.5, 0.25)), ("best", (1, 1)), ("majority", (1, 0))]
)
def test_samples_become_one_number_as_the_configuration_says(scoring, expected):
    config = replace(chapter.REFERENCE, samples=4, scoring=scoring)
    texts = ["#12", "#21", "#21#12", "12", "#34", "#43", "#43", "#34"]
    cut = [False] * 7 + [True]  # a cut answer has no vote and no reward
    assert chapter.judged(config, NUMBER, texts, cut).by_problem == expected


def test_a_problem_without_any_vote_gets_nothing():
    config = replace(chapter.REFERENCE, samples=2, scoring="majority")
    score = chapter.judged(config, NUMBER, ["12", "", "#34", "#34"], [False] * 4)
    assert score.by_problem == (0, 1)


def test_scores_carry_the_configuration_that_made_them(base):
    problems = chapter.problems_of(0, 6)
    found = chapter.scores(*base, problems, ("reference", "greedy", "best_8", "mean_8"), 0)
    for name, score in found.items():
        told = asdict(score.config)
        assert told["weights"] != "unset" and told["data"] != "unset"
        assert {k: told[k] for k in chapter.SETTINGS[name]} == chapter.SETTINGS[name]
    assert all(map(float.__ge__, found["best_8"].by_problem, found["mean_8"].by_problem))
    again = chapter.scores(*base, problems, ("greedy",), 1)["greedy"]
    assert again == found["greedy"]  # greedy answers do not depend on the seed
    with pytest.raises(DifferentConfigurations, match="temperature"):
        compare_scores(found["reference"], found["greedy"])
    with pytest.raises(DifferentConfigurations, match="data"):
        other = chapter.scores(*base, chapter.problems_of(1, 6), ("reference",), 0)
        compare_scores(found["reference"], other["reference"])


def test_the_same_answers_are_judged_by_both_verifiers(base):
    found = chapter.scores(*base, chapter.problems_of(0, 32), ("reference", "any"), 0)
    compared = compare_scores(found["any"], found["reference"], vary="verifier")
    assert all(map(float.__ge__, found["any"].by_problem, found["reference"].by_problem))
    assert compared.difference >= 0


def test_two_beginning_tokens_are_read_and_truncation_is_applied(base):
    problems = chapter.problems_of(0, 8)
    texts = {
        name: chapter.answers(
            *base, replace(chapter.REFERENCE, **change), problems, seed=0
        ) for name, change in {"plain": {}, "bos": {"bos": 1}, "short": {"max_new_tokens": 3},
                               "greedy": {"temperature": 0.0}, "top_1": {"top_k": 1}}.items()
    }  # fmt: skip
    assert texts["bos"][0] != texts["plain"][0]
    assert max(map(len, texts["short"][0])) <= 3 and all(texts["short"][1])
    assert texts["greedy"] == texts["top_1"]


def test_a_policy_is_trained_on_what_its_name_says():
    framed = chapter.Framed().sample("heldout", 2, 0)
    plain = chapter.problems_of(0, 2)
    assert [p.prompt for p in framed] == ["\n" + p.prompt for p in plain]
    assert [p.gold for p in framed] == [p.gold for p in plain]
    one, two = (chapter.policy("framed", seed, steps=1)[0] for seed in (0, 0))
    base = load_base(chapter.BASE)[0]
    for (name, a), b, c in zip(
        one.named_parameters(), two.parameters(), base.parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        assert a.shape == c.shape
    assert not all(map(torch.equal, one.parameters(), base.parameters()))


def test_more_tries_never_claim_less():
    found = chapter.tries(0, most=4)
    assert [row["step"] for row in found] == [1, 2, 4]
    assert found[0]["claimed"] == pytest.approx(found[0]["plain"])
    claims = [row["claimed"] for row in found]
    assert claims == sorted(claims) and claims[-1] > claims[0]


def test_the_rows_of_a_run_have_what_the_notebook_reads(monkeypatch):
    monkeypatch.setattr(chapter, "policy", lambda name, seed: load_base(chapter.BASE))
    few = chapter.problems_of(0, 8)
    monkeypatch.setattr(chapter, "problems_of", lambda seed: few)
    found = EXPERIMENTS["evaluation_settings"].rows("strict", 0)
    assert [row["step"] for row in found] == list(range(len(chapter.SETTINGS)))
    beside = [name for name, row in zip(chapter.SETTINGS, found, strict=True) if "paired" in row]
    assert tuple(beside) == chapter.PAIRED
    greedy = found[list(chapter.SETTINGS).index("greedy")]
    assert greedy["paired"] == 0  # the same weights, without chance: no pair differs
