"""Chapter 43's measures: what counts as a flip, where it sits, and whose gap it is."""

from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments import routing_flips as rf
from stablerl_core.system import mismatch_report
from stablerl_core.training import completion_logp, load_base, routers
from stablerl_core.training.rollout import with_own_routing


@pytest.fixture(scope="module")
def base():
    return load_base("mixtral-cpu-sort")


@pytest.fixture(scope="module")
def drawn(base):
    """A rollout of a sampler whose routers were rounded to two bits."""
    sampler = rf.Sampler(router_bits=2).of(base[0])
    return sampler, rf.roll(sampler, base[1], 0)


def toy(ids, prompt=2):
    """A rollout that holds nothing but a routing (B, S+T−1, L, k)."""
    ids = torch.as_tensor(ids, dtype=torch.uint8)
    rows, fed = ids.shape[:2]
    mask = torch.ones(rows, fed - prompt + 1, dtype=torch.bool)
    blank = torch.zeros(mask.shape)
    return rf.Rollout(
        prompt=torch.zeros(rows, prompt, dtype=torch.long),
        prompt_mask=torch.ones(rows, prompt, dtype=torch.bool),
        tokens=blank.long(),
        mask=mask,
        sampler_logp=blank,
        entropy=blank,
        finished=torch.ones(rows, dtype=torch.bool),
        version=0,
        sampling=None,
        routing=ids,
    )


def test_another_order_is_no_flip_and_half_a_set_is_half_changed():
    a = toy([[[[0, 1]], [[2, 3]], [[4, 5]], [[6, 7]]]])
    b = toy([[[[1, 0]], [[2, 4]], [[6, 7]], [[6, 7]]]])
    assert rf.flips(a, b).flatten().tolist() == [False, True, True, False]
    assert rf.changed_experts(a, b).flatten().tolist() == [0, 0.5, 1, 0]


def test_a_token_belongs_to_the_position_that_was_fed_before_it():
    batch = toy([[[[0]], [[1]], [[2]], [[3]]]], prompt=2)  # 2 prompt tokens, 3 of the completion
    places = torch.arange(4)[None]
    assert rf.at_tokens(places, batch).tolist() == [[1, 2, 3]]
    batch.mask[0, 2] = False  # the third token is padding: what was fed for it, the second, too
    assert rf.known_positions(batch).tolist() == [[True, True, True, False]]


def test_load_counts_tokens_and_takes_the_worst_layer():
    batch = toy([[[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 2], [0, 3]]]])
    # Layer 0: expert 0 serves 3 of 6 among 4 experts, mean 1.5. Layer 1: 0 and 3 serve 2.
    assert rf.busiest(batch, 4) == 2
    batch.mask[0, 1] = False  # the last fed position is now padding
    assert rf.busiest(batch, 4) == 2  # experts 0 and 1 serve 2 of 4, mean 1
    assert rf.busiest(batch, 8) == 4


def test_an_exact_sampler_has_no_flips_and_no_gap(base):
    model, tokenizer = base
    row = rf.look(model, rf.roll(model, tokenizer, 0))
    assert row["flips_0"] == row["flips_1"] == row["experts"] == row["flipped"] == 0
    assert row["gap"] < 1e-5 and row["gap"] == pytest.approx(row["gap_replay"], abs=1e-6)
    assert "gap_flip" not in row and row["load"] == row["load_sampler"]


def test_the_gap_of_all_is_made_of_those_with_a_flip_and_the_others(base, drawn):
    model, batch = base[0], drawn[1]
    row = rf.look(model, batch)
    for name in ("", "_replay"):
        parts = row["flipped"] * row[f"gap_flip{name}"]
        parts += (1 - row["flipped"]) * row[f"gap_same{name}"]
        assert parts == pytest.approx(row[f"gap{name}"], rel=1e-4)
    with torch.no_grad():
        free = completion_logp(model, replace(batch, routing=None))
    assert row["k3"] == mismatch_report(free, batch.sampler_logp, batch.mask).k3
    assert row["k3_replay"] < row["k3"] / 10 and row["gap_flip"] > 2 * row["gap_same"]


def test_flips_are_those_of_the_trainers_own_choice(base, drawn):
    model, batch = base[0], drawn[1]
    own = with_own_routing(model, batch)
    first, second = (r.routing[0, 0, 0].tolist() for r in (batch, own))
    assert bool(rf.flips(batch, own)[0, 0, 0]) == (set(first) != set(second))
    counted = rf.flips(batch, own)[rf.known_positions(batch)].float().mean(0)
    row = rf.look(model, batch)
    assert [row["flips_0"], row["flips_1"]] == pytest.approx(counted.tolist())
    assert row["load"] == rf.busiest(own, 8) != rf.busiest(batch, 8) == row["load_sampler"]


def test_the_reversed_direction_reports_less_than_the_true_gap(base, drawn):
    model, (sampler, batch) = base[0], drawn
    row, found = rf.look(model, batch), rf.look_reversed(model, sampler, batch)
    assert found["gap_reversed"] < row["gap"] / 2 and found["miss_reversed"] > 1e-3
    same = rf.look_reversed(model, model, rf.roll(model, base[1], 0))
    assert same["gap_reversed"] < 1e-5 and same["miss_reversed"] < 1e-5


def test_low_bits_has_so_many_values_and_keeps_the_largest():
    weight = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    for bits, most in ((2, 3), (3, 7), (4, 15)):
        rounded = rf.low_bits(weight, bits)
        assert all(len(row.unique()) <= most for row in rounded)
        assert torch.allclose(rounded.abs().amax(-1), weight.abs().amax(-1))
        step = weight.abs().amax(-1, keepdim=True) / (most // 2)
        assert ((rounded - weight).abs() <= step / 2 * 1.0001).all()


def test_a_sampler_differs_only_where_it_says(base):
    model = base[0]
    routed = rf.Sampler(router_bits=2).of(model)
    gates = {f"{name}.weight" for name in routers(model)}
    for name, tensor in routed.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]) == (name not in gates)
    assert rf.Sampler(dtype=torch.bfloat16).of(model).dtype == torch.bfloat16
    assert model.dtype == torch.float32


def test_updates_are_looked_at_one_by_one():
    rows = rf.by_updates(0, 5e-4, updates=4, warm_up=1)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert 0 < rows[0]["gap"] < rows[3]["gap"] and rows[3]["flips_0"] > 0
    still = rf.by_updates(0, 0.0, updates=2, warm_up=1)
    assert all(row["flipped"] == 0 and row["gap"] < 1e-5 for row in still)


def test_the_samplers_are_rows_in_their_order(monkeypatch, base):
    monkeypatch.setattr(rf, "train_base", lambda recipe, progress: base)
    monkeypatch.setattr(rf, "PROMPTS", 4)
    names = ("float16 weights", "float8 everywhere", "router in 2 bits")
    rows = rf.by_precision(0, names=names)
    assert [list(rf.SAMPLERS)[row["step"]] for row in rows] == list(names)
    assert rows[0]["gap"] < rows[1]["gap"] < rows[2]["gap"]
