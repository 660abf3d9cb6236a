"""Starting points: shipped as their cards say, repeatable from the recipe, named when damaged."""

import importlib.util
import json
import math
import os
import random
import re
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from stablerl_core.rewards import Problem, strict_answer, task_by_name
from stablerl_core.training import RECIPES, base, load_base, pass_rate, small_moe, train_base
from stablerl_core.training.base import (
    ASSETS,
    Recipe,
    _pack,
    demonstration,
    fingerprint,
    options_of,
    starting_point,
)

TINY = Recipe(task="sort", steps=3, batch=16)
BUILT_IN = ("sort", "add")


def shipped(name):
    """Files of a recipe; the test is skipped where they are not in this clone yet."""
    path, card = ASSETS / f"{name}.safetensors", ASSETS / f"{name}.json"
    if not path.exists():
        pytest.skip(f"{name} is not shipped yet")
    return path, json.loads(card.read_text())


def its_task(recipe):
    if recipe.task not in BUILT_IN and importlib.util.find_spec("reasoning_gym") is None:
        pytest.skip("reasoning-gym (extra tasks) is absent")
    return task_by_name(recipe.task, recipe.task_options)


# --- what is shipped -------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_the_card_tells_recipe_and_hash_of_the_file(name):
    path, card = shipped(name)
    assert card["recipe"] == asdict(RECIPES[name]) and name == RECIPES[name].name
    state = load_file(path)
    assert card["sha256"] == fingerprint(state)
    assert path.stat().st_size < 8 * 2**20
    assert all(torch.isfinite(tensor).all() for tensor in state.values())


@pytest.mark.parametrize("name", RECIPES)
def test_the_pass_rate_of_the_card_is_found_again(name):
    """On other draws: within four standard errors of the difference."""
    _, card = shipped(name)
    recipe, n = RECIPES[name], 300
    rate = pass_rate(*load_base(name), its_task(recipe), n, seed=77)
    p = card["heldout_pass_rate"]
    assert abs(rate - p) < 4 * math.sqrt(p * (1 - p) * (1 / n + 1 / 1024))
    assert 0.3 < p < 0.7  # half of the answers: something to learn, and something to learn from


def test_all_that_is_shipped_has_a_recipe():
    assert {path.stem for path in ASSETS.iterdir()} <= set(RECIPES)


# --- the recipe ------------------------------------------------------------------------------


def test_a_recipe_is_repeatable_bit_for_bit():
    torch.default_generator.manual_seed(1)
    before = torch.get_rng_state()
    first = train_base(TINY, progress=False)[0].state_dict()
    assert torch.equal(torch.get_rng_state(), before)
    torch.default_generator.manual_seed(2)
    again = train_base(TINY, progress=False)[0].state_dict()
    assert fingerprint(first) == fingerprint(again)
    for change in (dict(seed=1), dict(steps=4), dict(draft_share=1.0), dict(learning_rate=1e-3)):
        other = train_base(replace(TINY, **change), progress=False)[0].state_dict()
        assert fingerprint(other) != fingerprint(first), change


@torch.no_grad()
def test_it_learns_what_is_demonstrated():
    problems = task_by_name("sort").sample("heldout", 64, seed=0)
    losses = []
    for steps in (1, 20):
        with torch.enable_grad():
            model, tokenizer = train_base(replace(TINY, steps=steps, batch=64), progress=False)
        ids, counted = _pack(tokenizer, problems, [f"#{p.gold}" for p in problems])
        logits = model(ids[:, :-1]).logits[counted[:, 1:]]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[:, 1:][counted[:, 1:]]).item())
    assert losses[0] > 4 and losses[1] < 2.5  # from log 99 down to the ten digits and below


def test_demonstrations_end_in_the_answer_and_drafts_are_wrong():
    rng, recipe = random.Random(0), replace(TINY, draft_share=0.25, max_drafts=2)
    counts = []
    for problem in task_by_name("sort").sample("train", 2000, seed=0):
        text = demonstration(problem, recipe, rng)
        assert re.fullmatch(r"(#\d{6}){1,3}", text)
        assert strict_answer(text, problem.gold).reward == 1
        *drafts, _ = text.split("#")[1:]
        for draft in drafts:
            assert sum(a != b for a, b in zip(draft, problem.gold, strict=True)) == 1
        counts.append(len(drafts))
    share = sum(map(bool, counts)) / 2000
    assert abs(share - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)
    assert abs(counts.count(1) - counts.count(2)) < 4 * math.sqrt(500)


@pytest.mark.parametrize("share, drafts", [(0.0, 0), (1.0, 1)])
def test_draft_share_and_number(share, drafts):
    recipe = replace(TINY, draft_share=share, max_drafts=1)
    rng = random.Random(0)
    texts = [demonstration(Problem("S21=", "12"), recipe, rng) for _ in range(50)]
    assert {text.count("#") - 1 for text in texts} == {drafts}


def test_words_are_corrupted_too():
    recipe = replace(TINY, draft_share=1.0)
    text = demonstration(Problem("p", "cba"), recipe, random.Random(0))
    assert text.endswith("#cba") and text.count("#cba") == 1


def test_packing_counts_completion_and_end_only():
    _, tokenizer = small_moe("mixtral-cpu")
    problems = [Problem("S21=", "12"), Problem("S3210=", "0123")]
    ids, counted = _pack(tokenizer, problems, ["#12", "#0123"])
    assert ids.shape == counted.shape == (2, 12)
    texts = ["S21=#12<eos>", "S3210=#0123<eos>"]
    for row, count, text, answer in zip(ids, counted, texts, ["#12", "#0123"], strict=True):
        n = len(text) - 4
        assert tokenizer.decode(row[:n]) == text and (row[n:] == 0).all()
        assert tokenizer.decode(row[count]) == answer + "<eos>"


def test_the_pass_rate_is_strict_and_of_held_out_problems(monkeypatch):
    model, tokenizer = load_base("mixtral-cpu-sort")
    asked = []

    class Task:
        name = "sort"

        def sample(self, split, n, seed):
            asked.append((split, n, seed))
            return task_by_name("sort").sample(split, n, seed)

    rate = pass_rate(model, tokenizer, Task(), 64, seed=5)
    assert asked == [("heldout", 64, 5)] and 0.2 < rate < 0.7
    assert pass_rate(model, tokenizer, Task(), 64, seed=5) == rate
    monkeypatch.setattr(base, "decode_completions", lambda *_: ["#0#"] * 64)
    assert pass_rate(model, tokenizer, Task(), 64) == 0


# --- building and damage ---------------------------------------------------------------------


@pytest.fixture
def workshop(tmp_path, monkeypatch):
    """One tiny recipe, and an empty folder in place of the shipped files."""
    monkeypatch.setattr(base, "ASSETS", tmp_path / "base")
    monkeypatch.setattr(base, "RECIPES", {TINY.name: TINY})
    return tmp_path / "base"


def test_build_writes_and_then_finds_the_same(workshop, capsys):
    assert base.build(TINY, write=True)
    assert sorted(p.name for p in workshop.iterdir()) == [
        f"{TINY.name}.json",
        f"{TINY.name}.safetensors",
    ]
    assert base.build(TINY, write=False)
    assert capsys.readouterr().out.count("bit-identical") == 2
    model, _ = load_base(TINY.name)
    assert (
        fingerprint(model.state_dict())
        == json.loads((workshop / f"{TINY.name}.json").read_text())["sha256"]
    )


def test_build_tells_a_difference(workshop, capsys):
    base.build(TINY, write=True)
    before = (workshop / f"{TINY.name}.safetensors").read_bytes()
    base.build(replace(TINY, learning_rate=2.9e-3), write=False)
    assert re.search(r"weights differ by up to \d", capsys.readouterr().out.splitlines()[-1])
    assert (workshop / f"{TINY.name}.safetensors").read_bytes() == before
    card = workshop / f"{TINY.name}.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"heldout_pass_rate": 0.5}))
    assert not base.build(replace(TINY, learning_rate=2.9e-3), write=False)


@pytest.mark.parametrize(
    "fault", ["missing", "truncated", "not a file of tensors", "another model"]
)
def test_a_damaged_file_is_named_with_the_remedy(workshop, fault):
    base.build(TINY, write=True)
    path = workshop / f"{TINY.name}.safetensors"
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        os.truncate(path, path.stat().st_size // 2)
    elif fault == "not a file of tensors":
        path.write_text("sorry")
    else:
        save_file(small_moe("olmoe-cpu")[0].state_dict(), path)
    with pytest.raises(ValueError, match=rf"{TINY.name}\.safetensors.*make base"):
        load_base(TINY.name)


def test_an_unknown_starting_point_names_the_known_ones():
    with pytest.raises(ValueError, match="base='mixtral-cpu' is not shipped.*mixtral-cpu-sort"):
        load_base("mixtral-cpu")


def test_a_preset_that_is_not_shipped_is_warmed_up_by_the_recipe_of_the_task(monkeypatch):
    short = replace(RECIPES["mixtral-cpu-sort"], steps=2, batch=8)
    monkeypatch.setitem(RECIPES, "mixtral-cpu-sort", short)
    model, _ = starting_point("olmoe-cpu", "sort", "cpu")
    expected, _ = train_base(replace(short, preset="olmoe-cpu"), progress=False)
    assert type(model).__name__ == "OlmoeForCausalLM"
    assert fingerprint(model.state_dict()) == fingerprint(expected.state_dict())


def test_a_shipped_file_with_other_weights_is_refused(tmp_path, monkeypatch):
    name = "mixtral-cpu-sort"
    path, card = shipped(name)
    state = load_file(path)
    state["model.norm.weight"][0] += 1
    save_file(state, tmp_path / path.name)
    (tmp_path / f"{name}.json").write_text(json.dumps(card))
    monkeypatch.setattr(base, "ASSETS", tmp_path)
    with pytest.raises(ValueError, match="its hash is not the one on its card"):
        load_base(name)


def test_a_task_is_drawn_as_its_warm_start_knew_it():
    assert options_of("spell_backward") == RECIPES["mixtral-cpu-spell_backward"].task_options
    assert options_of("sort") == {} and options_of("countdown") == {}
