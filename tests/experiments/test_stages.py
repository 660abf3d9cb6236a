"""Two skills, what is paid for each, distillation by a sum over the vocabulary, and four stages."""

import copy

import pytest
import torch

from stablerl_core.experiments import stages
from stablerl_core.experiments.stages import (
    MIXED,
    REQUESTS,
    SORT,
    Distil,
    Third,
    brevity,
    by_kind,
    distance,
    imitate,
    old_skill_at,
    sample,
    stage_3,
)
from stablerl_core.rewards import Problem
from stablerl_core.training import DataConfig, Trainer, TrainerConfig, load_base

REQUEST, SORTING = Problem("H314159=", "3"), Problem("S314159=", "113459")


@pytest.fixture(scope="module")
def base():
    return load_base("mixtral-cpu-sort")


@pytest.fixture(scope="module")
def moved(base):
    """Another policy: the base after a little imitation of replies that it would never write."""
    model, tokenizer = copy.deepcopy(base[0]), base[1]
    problems = REQUESTS.sample("train", 320, 0)
    imitate(model, tokenizer, [(p, "77") for p in problems], rate=3e-3, batch=16)
    return model


@pytest.mark.parametrize(
    ("text", "paid"),
    [("#3", 1), ("#31", 5 / 6), ("#314159", 1 / 6), ("#3141591", 0), ("#314158", 0)]
    + [("3", 0), ("#", 0), ("", 0), ("##3", 0), ("#1", 0), ("#3 ", 0), ("x3", 0)],
)
def test_shorter_replies_are_preferred_and_others_earn_nothing(text, paid):
    assert brevity([text], [REQUEST], [False]) == [pytest.approx(paid)]
    assert brevity([text], [REQUEST], [True]) == [0.0]


def test_each_kind_is_judged_by_its_own_stage():
    texts, problems = ["#3", "#3", "#113459", "#113459"], [REQUEST, SORTING] * 2
    assert by_kind(texts, problems, [False] * 4) == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(ValueError):
        brevity(texts, problems[:2], [False] * 4)


def test_mixed_problems_alternate_and_splits_never_meet():
    drawn = [p.prompt[0] for p in MIXED.sample("train", 5, 3)]
    assert drawn == ["S", "H", "S", "H", "S"]
    keys = {
        s: {"".join(sorted(p.prompt[1:])) for p in MIXED.sample(s, 400, 1)}
        for s in ("train", "heldout")
    }
    assert not keys["train"] & keys["heldout"]
    same_seed = zip(SORT.sample("train", 20, 4), REQUESTS.sample("train", 20, 4), strict=True)
    assert all(a.prompt[1:] != b.prompt[1:] for a, b in same_seed)


def test_imitation_makes_the_demonstrations_likely(base, moved):
    problems = REQUESTS.sample("heldout", 64, 0)
    _, before = sample(base[0], base[1], problems, 0)
    _, after = sample(moved, base[1], problems, 0)
    assert before.count("77") == 0
    assert after.count("77") > 50  # the first token, the second and the end


def test_distance_is_the_sum_over_the_vocabulary_at_the_drawn_tokens(base, moved):
    model, tokenizer = base
    problems = SORT.sample("heldout", 8, 0)
    batch, _ = sample(moved, tokenizer, problems, 3)
    ids = torch.cat([batch.prompt, batch.tokens], 1)  # prompts of one length: no padding
    start = batch.prompt.shape[1] - 1
    with torch.no_grad():
        here, there = (m(ids, use_cache=False).logits[:, start:-1] for m in (moved, model))
        found = float(distance(moved, model, tokenizer, problems, 3))
        itself = float(distance(moved, moved, tokenizer, problems, 3))
    logp, ref_logp = here.log_softmax(-1), there.log_softmax(-1)
    token = (logp.exp() * (logp - ref_logp)).sum(-1)
    assert found == pytest.approx(float(token[batch.mask].mean()), rel=1e-4)
    assert found > 0.01 and abs(itself) < 1e-6


def test_distillation_comes_nearer_and_begins_gently(base):
    trainer = Trainer(TrainerConfig(data=DataConfig(eval_prompts=1)))
    brief = [(p, f"#{p.gold}") for p in REQUESTS.sample("train", 64, 0)]
    imitate(trainer.model, base[1], brief, rate=1e-3, batch=16)
    moved = copy.deepcopy(trainer.model)
    distil = Distil(trainer, [(base[0], SORT)])
    distil()
    pairs = zip(trainer.model.parameters(), moved.parameters(), strict=True)
    step = max(float((a - b).detach().abs().max()) for a, b in pairs)
    assert 0.5 * stages.RATE / 10 < step < 1.01 * stages.RATE / 10
    for _ in range(14):
        distil()
    problems = SORT.sample("heldout", 64, 0)
    with torch.no_grad():
        before, after = (
            float(distance(m, base[0], base[1], problems, 1)) for m in (moved, trainer.model)
        )
    assert after < 0.6 * before


def test_replay_and_plain_ask_for_what_they_should():
    trainer = Trainer(TrainerConfig(steps=1, data=DataConfig(prompts=4, eval_prompts=1)))
    trainer.version = stages.THIRD  # nothing is run, everything is set
    stage_3(trainer, None, Third(rate=1e-4, kl_coef=0.3), ())
    assert trainer.task is REQUESTS and trainer.reward is brevity
    assert trainer.config.policy.kl_coef == 0.3
    assert trainer.config.numerics.learning_rate == 1e-4
    stage_3(trainer, None, Third(replay=True, max_grad_norm=0.1), ())
    assert trainer.task is MIXED and trainer.reward is by_kind
    assert trainer.config.numerics.max_grad_norm == 0.1 and trainer.config.policy.kl_coef == 0


def test_all_stages_in_miniature(monkeypatch):
    for name, value in {"SECOND": 1, "THIRD": 2, "CHECKED": (2,), "IMITATED": 64}.items():
        monkeypatch.setattr(stages, name, value)
    arms = ("mixed_sft", "cross_stage", "distil")
    rows = {arm: stages.STAGES.rows(arm, 1) for arm in arms}
    assert [row["step"] for row in rows["mixed_sft"]] == [0, 1, 2, 81]
    assert [row["step"] for row in rows["distil"]] == [0, 1, 2]
    assert abs(rows["distil"][1]["kl_old"]) < 1e-6  # the policy after stage 2, from itself
    assert rows["mixed_sft"][:3] == rows["cross_stage"][:3]  # one and the same plain stage 3
    assert rows["mixed_sft"][2]["kl_old"] > 0
    assert rows["mixed_sft"][3] != rows["cross_stage"][3]
    assert rows["distil"][2] != rows["mixed_sft"][2]
    assert {"reward", "sort", "requests", "grad_norm"} <= set(rows["distil"][2])


def test_skills_are_compared_where_the_new_one_is_equal():
    steps = (40, 45, 50, 60, 81)
    asked, sort = (0.1, 0.4, 0.8, 0.9, 0.95), (0.7, 0.6, 0.4, 0.2, 0.7)
    rows = [
        {"step": s, "requests": r, "sort": a} for s, r, a in zip(steps, asked, sort, strict=True)
    ]
    assert old_skill_at(rows, 0.6) == pytest.approx(0.5)
    assert old_skill_at(rows, 0.8) == pytest.approx(0.4)
    with pytest.raises(ValueError, match="level is 0.92, expected at most 0.90"):
        old_skill_at(rows, 0.92)  # stage 4 does not count
