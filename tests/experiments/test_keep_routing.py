"""Chapter 43's runs: what R2 and R3 leave as it is, the sampler's faults, the reversed table."""

from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments import keep_routing as kr
from stablerl_core.experiments.routing_flips import known_positions
from stablerl_core.training import DataConfig, PolicyConfig, Sampling, SystemConfig, TrainerConfig
from stablerl_core.training.rollout import with_own_routing

DATA = DataConfig(prompts=4, group_size=4, eval_prompts=8, eval_every=10)


def trainer(kind=None, fault=None, updates=1, **system):
    policy = PolicyConfig(minibatches=updates)
    config = TrainerConfig(
        steps=2, data=DATA, policy=policy, system=SystemConfig(replay_routing=kind, **system)
    )
    return kr.RoutedTrainer(config, fault)


def weights(trained):
    return torch.cat([p.detach().flatten() for p in trained.model.parameters()])


def apart(a, b) -> float:
    return float((weights(a) - weights(b)).abs().max())


def stepped(*args, steps=1, **options):
    made = trainer(*args, **options)
    made.run(steps, progress=False)
    return made


def test_with_one_update_r2_is_no_replay_at_all():
    """Under any mismatch: it replays what the trainer chooses anyway."""
    coarse = {"fault": kr.coarse_router, "sampler_precision": "bfloat16"}
    assert apart(stepped(**coarse), stepped("R2", **coarse)) == 0
    assert apart(stepped(**coarse), stepped("R3", **coarse)) > 1e-5


def test_with_four_updates_it_is():
    assert apart(stepped(updates=4), stepped("R2", updates=4)) > 1e-5


def test_without_mismatch_r3_is_r2_and_with_one_update_nothing():
    assert apart(stepped("R2", updates=4, steps=2), stepped("R3", updates=4, steps=2)) < 1e-6
    assert apart(stepped(), stepped("R3")) < 1e-6


def test_a_fault_needs_a_sampler_of_its_own():
    with pytest.raises(ValueError, match="no separate sampler"):
        trainer(fault=kr.coarse_router)


def test_the_fault_comes_back_after_each_sync_and_stays_in_the_sampler():
    faulty = stepped(fault=kr.coarse_router, sampler_precision="bfloat16")
    for name, router in kr.routers(faulty.sampler).items():
        mine = faulty.model.get_submodule(name).weight
        assert max(len(row.unique()) for row in router.weight) <= 3 < len(mine[0].unique())
        assert torch.allclose(router.weight.abs().amax(-1), mine.abs().amax(-1), rtol=0.01)
    sent, held = (m.model.embed_tokens.weight for m in (faulty.model, faulty.sampler))
    assert torch.equal(sent.bfloat16().float(), held)


def test_a_table_holds_the_experts_that_served_a_token_most():
    made = trainer()
    batch = made._sample(made.model, made._draw(1, 8), 0, 4, 4, Sampling())
    table, seen = kr.routing_table(made.model, batch)
    own, known = with_own_routing(made.model, batch), known_positions(batch)
    ids = torch.cat([batch.prompt, batch.tokens[:, :-1]], 1)
    assert seen.sum() == len(ids[known].unique())
    token = int(ids[known].mode().values)
    for layer in range(2):
        served = own.routing[known & (ids == token)][:, layer].flatten().long().bincount()
        assert served[table[token, layer]].sum() == served.topk(2).values.sum()


def test_a_sampler_by_table_routes_by_it_and_is_recorded_so():
    made = trainer(fault=kr.persistent_table, sampler_precision="bfloat16")
    problems = made._draw(1, 4)
    batch = made._sample(made.sampler, problems, 0, 0, 2, Sampling(), record_routing=True)
    ids = torch.cat([batch.prompt, batch.tokens[:, :-1]], 1)
    known = known_positions(batch) & made.sampler.seen[ids]
    expected = made.sampler.table[ids][known].sort(-1).values
    assert torch.equal(batch.routing[known].long().sort(-1).values, expected)
    free = with_own_routing(made.model, batch)
    assert not torch.equal(free.routing[known], batch.routing[known])


def test_a_token_the_table_has_not_seen_is_routed_freely():
    made = trainer(fault=kr.persistent_table, sampler_precision="bfloat16")
    made.sampler.seen = torch.zeros_like(made.sampler.seen)
    batch = made._sample(made.sampler, made._draw(1, 4), 0, 0, 2, Sampling(), record_routing=True)
    own, known = with_own_routing(made.model, batch), known_positions(batch)
    same = (own.routing == batch.routing).all(-1)[known].float().mean()
    assert same > 0.98  # bfloat16


def test_a_table_is_refreshed_when_due_and_only_then():
    made = trainer(fault=kr.persistent_table, sampler_precision="bfloat16")
    first = made.sampler.table
    kr.persistent_table(made, 5)
    assert made.sampler.table is first
    kr.persistent_table(made, 10)
    assert made.sampler.table is not first and made.sampler.table.shape == first.shape


def test_what_is_served_is_the_samplers_and_in_its_precision():
    made = trainer(sampler_precision="bfloat16")
    assert kr.served_accuracy(made) > 0
    made.sampler.lm_head.weight.data.zero_()
    assert kr.served_accuracy(made) == 0 < made.evaluate()
    made = trainer(sampler_precision="bfloat16", sampler_activations="float8_e4m3")
    assert kr.look_at(made)["gap"] > 3 * kr.look_at(trainer(sampler_precision="bfloat16"))["gap"]


def test_rows_come_every_ten_steps_with_what_is_served(monkeypatch):
    config = replace(trainer(sampler_precision="bfloat16").config, steps=2)
    monkeypatch.setattr(kr, "EVERY", 1)
    config = replace(config, data=replace(DATA, eval_every=1))
    rows = kr.train(0, config, kr.coarse_router)
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows:
        assert 0 <= row["served"] <= 1 and 0 <= row["heldout_accuracy"] <= 1
        assert row["flips_0"] > 0.2 and row["gap"] > row["gap_replay"]
    assert rows[1]["mismatch_kl"] > 0 and rows[1]["reward"] <= 1


def test_arms_differ_in_what_they_are_named_after():
    plain = kr.FAULT.arms["none"].keywords["config"]
    replayed = kr.FAULT.arms["R3"].keywords["config"]
    assert replace(replayed, system=plain.system) == plain
    assert kr.FAULT.arms["exact"].keywords["fault"] is None
    assert kr.FAULT.arms["exact"].keywords["config"] == plain
    assert set(kr.KEPT.arms) == {"none_1", "R3_1"} | {
        f"{kind}_{n}" for kind in ("none", "R2", "R3") for n in (4, 8)
    }
    for name, made in kr.EXACT.arms.items():
        config = made.keywords["config"]
        kind, updates, pace = name.split("_")
        assert (config.system.replay_routing or "none") == kind
        assert config.policy.minibatches == int(updates)
        assert (config.numerics.learning_rate > 3e-4) == (pace == "fast")
