"""Records, the order in which a replay uses them, checkpointed re-runs, and every refusal."""

from __future__ import annotations

import copy
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from moes import moe, routers, tokens
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, MixtralConfig

from stablerl_core.system import RoutingRecord, record_routing, replay_routing
from stablerl_core.training import Sampling
from stablerl_core.training.rollout import (
    completion_logits,
    completion_logp,
    rollout,
    select_rows,
)


def record_of(model, ids, **inputs) -> RoutingRecord:
    with torch.no_grad(), record_routing(model) as recording:
        model(ids, **inputs)
    return recording.record()


def random_record(rows=3, columns=5, layers=2, k=2, experts=8, seed=0, mask=None):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(rows, columns, layers, experts, generator=generator)
    return RoutingRecord.of(scores.topk(k).indices, mask)


def gradient(model) -> list[torch.Tensor]:
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


def weighted(out, seed=0):
    return (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))).sum()


# --- the record ------------------------------------------------------------------------------


def test_a_record_is_frozen_and_knows_its_bytes():
    record = random_record(layers=5, k=3)
    assert record.indices.dtype == torch.uint8 and record.bytes_per_token == 15
    with pytest.raises(FrozenInstanceError):
        record.mask = None


def test_many_experts_take_two_bytes():
    config = MixtralConfig(
        vocab_size=20, hidden_size=8, intermediate_size=4, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=300,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for router in routers(model):
        nn.init.normal_(router.weight)
    ids = tokens(2, 40) % 20
    record = record_of(model, ids)
    assert record.indices.dtype == torch.int16 and record.bytes_per_token == 8
    assert int(record.indices.max()) > 256
    with torch.no_grad(), replay_routing(model, record):
        replayed = model(ids).logits
    assert torch.equal(replayed, model(ids).logits)


@pytest.mark.parametrize("experts, dtype", [(256, torch.uint8), (257, torch.int16)])
def test_the_smallest_type_that_holds_the_ids(experts, dtype):
    ids = torch.tensor([0, experts - 1]).view(1, 1, 1, 2)
    record = RoutingRecord.of(ids)
    assert (
        record.indices.dtype == dtype and record.indices.flatten().tolist() == ids[0, 0, 0].tolist()
    )


@pytest.mark.parametrize("experts", [8, 300])
def test_save_and_load(tmp_path, experts):
    mask = torch.rand(3, 5) > 0.4
    record = random_record(experts=experts, mask=mask)[1:]
    record.save(tmp_path / "routing.safetensors")
    loaded = RoutingRecord.load(tmp_path / "routing.safetensors")
    assert torch.equal(loaded.indices, record.indices) and torch.equal(loaded.mask, mask[1:])
    assert loaded.indices.dtype == record.indices.dtype


def test_loading_something_else_is_refused(tmp_path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds \['weight'\]; expected indices and mask"):
        RoutingRecord.load(tmp_path / "model.safetensors")


def test_parts_are_taken_like_those_of_a_tensor():
    mask = torch.rand(4, 6) > 0.3
    record = random_record(rows=4, columns=6, layers=3, mask=mask)
    rows = torch.tensor([2, 0])
    part = record[rows, 1:4, 1:]
    assert torch.equal(part.indices, record.indices[rows, 1:4, 1:])
    assert torch.equal(part.mask, mask[rows, 1:4])
    assert torch.equal(record[1:].mask, mask[1:])
    for wrong in (0, (slice(None), 1), (slice(None),) * 4):
        with pytest.raises(ValueError, match="up to three slices"):
            record[wrong]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    pad=st.integers(0, 3),
    seed=st.integers(0, 99),
)
def test_relayout_keeps_every_token_and_comes_back(lengths, pad, seed):
    columns = torch.arange(5 + pad)
    left = torch.stack([columns >= 5 + pad - n for n in lengths])
    right = torch.stack([columns < n for n in lengths])
    record = random_record(rows=len(lengths), columns=5 + pad, seed=seed, mask=left)
    packed = record.relayout(torch.ones(1, sum(lengths), dtype=torch.bool))
    assert torch.equal(packed.indices[0], record.indices[left])
    for back in (packed.relayout(left), record.relayout(right).relayout(left)):
        assert torch.equal(back.indices[left], record.indices[left])
        assert torch.equal(back.mask, left)


def test_relayout_refuses_other_lengths():
    record = random_record(rows=2, columns=3)
    swapped = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], dtype=torch.bool)
    for mask in (swapped, torch.ones(1, 5, dtype=torch.bool)):
        with pytest.raises(ValueError, match="the record"):
            record.relayout(mask)


@pytest.mark.parametrize(
    "indices, mask, told",
    [
        (torch.zeros(2, 3, 1, dtype=torch.uint8), torch.ones(2, 3).bool(), "indices has shape"),
        (torch.zeros(2, 3, 1, 1), torch.ones(2, 3).bool(), "dtype torch.float32"),
        (torch.zeros(2, 3, 1, 1).byte(), torch.ones(2, 4).bool(), r"mask has shape \(2, 4\)"),
        (torch.zeros(2, 3, 1, 1).byte(), torch.ones(2, 3), "expected bool"),
    ],
)
def test_bad_records_are_refused(indices, mask, told):
    with pytest.raises(ValueError, match=told):
        RoutingRecord(indices, mask)


def test_ids_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="expected integers"):
        RoutingRecord.of(torch.zeros(1, 2, 3, 1))
    with pytest.raises(ValueError, match="-1 to 0"):
        RoutingRecord.of(torch.tensor([-1, 0]).view(1, 1, 1, 2))


# --- which pass gets what --------------------------------------------------------------------


def sampled(record_routing=True, seed=0):
    """A model and its rollout of two prompts, one padded.

    Scoring replays a rollout's record by itself; `bare` leaves that to the test.
    """
    model = moe("mixtral")
    prompt = tokens(2, 4)
    known = torch.tensor([[False, True, True, True], [True] * 4])
    batch = rollout(
        model, prompt, known, group_size=3, max_new_tokens=6, eos_token_id=22,
        generator=torch.Generator().manual_seed(seed), sampling=Sampling(temperature=3.0),
        record_routing=record_routing,
    )  # fmt: skip
    return model, batch


def bare(batch):
    return replace(batch, routing=None)


def passes_of(batch) -> list[RoutingRecord]:
    """A rollout's record as the two passes that score it: distinct prompts, then completions."""
    width = batch.prompt.shape[1]
    record = RoutingRecord(batch.routing, torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1))
    first = torch.arange(0, len(batch.prompt), 3)
    return [record[first, :width], record[:, width:]]


def test_a_rollout_is_scored_with_its_own_experts():
    model, batch = sampled()
    assert not batch.mask.all() and not batch.prompt_mask.all()
    with torch.no_grad():
        plain = completion_logp(model, bare(batch))
        with replay_routing(model, passes_of(batch)):
            replayed = completion_logp(model, bare(batch))
    # Sampler and scorer may disagree by rounding only where two experts tie; here they do not.
    torch.testing.assert_close(replayed[batch.mask], plain[batch.mask])
    torch.testing.assert_close(replayed[batch.mask], batch.sampler_logp[batch.mask])


def test_after_an_update_the_sampled_experts_are_still_used():
    _, batch = sampled()
    trainer, parts = moe("mixtral", seed=1), passes_of(batch)
    with torch.no_grad(), record_routing(trainer) as recording, replay_routing(trainer, parts):
        completion_logits(trainer, bare(batch))
    for found, wanted in zip(recording.parts, parts, strict=True):
        assert torch.equal(found.indices[wanted.mask], wanted.indices[wanted.mask])
    with torch.no_grad(), record_routing(trainer) as recording:
        completion_logits(trainer, bare(batch))
    free = recording.parts[1].indices[parts[1].mask]
    assert (free != parts[1].indices[parts[1].mask]).float().mean() > 0.5


def test_recording_sees_what_the_rollouts_own_tap_sees():
    model, batch = sampled()
    with torch.no_grad(), record_routing(model) as recording:
        sampled_again = rollout(
            model, batch.prompt[::3], batch.prompt_mask[::3], group_size=3, max_new_tokens=6,
            eos_token_id=22, generator=torch.Generator().manual_seed(0),
            sampling=Sampling(temperature=3.0),
        )  # fmt: skip
    assert torch.equal(sampled_again.tokens, batch.tokens)
    prompts, *decoded = recording.parts
    assert torch.equal(prompts.indices, batch.routing[::3, :4])
    for t, part in enumerate(decoded):
        alive = batch.mask[:, t + 1]
        assert torch.equal(part.indices[:, 0], batch.routing[alive, 4 + t])
    assert len(decoded) == batch.routing.shape[1] - 4
    with pytest.raises(ValueError, match=r"have \[2, 5"):
        recording.record()


def test_the_trainers_own_record_is_replayed_by_the_same_function():
    """R2: the experts of π_old, recorded in the pass for `old_logp`, after the weights moved."""
    _, batch = sampled()
    trainer = moe("mixtral", seed=1)
    with torch.no_grad(), record_routing(trainer) as recording:
        old_logp = completion_logp(trainer, bare(batch))
        prompts, completions = recording.parts
    with torch.no_grad(), replay_routing(trainer, recording.parts):
        assert torch.equal(
            completion_logp(trainer, bare(batch)), old_logp
        )  # first update: unchanged
        for router in routers(trainer):
            router.weight.mul_(-1)
    whole = RoutingRecord.joined([prompts[torch.arange(6) // 3], completions])
    rows = torch.tensor([3, 4, 5])
    part, width = select_rows(batch, rows), batch.prompt.shape[1]
    mine = whole[rows, : width + part.mask.shape[1] - 1]
    two = [mine[:1, :width], mine[:, width:]]
    with torch.no_grad(), record_routing(trainer) as again, replay_routing(trainer, two):
        completion_logp(trainer, bare(part))
    known = part.mask[:, 1:]
    assert torch.equal(
        again.parts[1].indices[known], completions.indices[rows][:, : known.shape[1]][known]
    )
    with pytest.raises(ValueError, match=r"parts have \[2, 6\] rows"):
        RoutingRecord.joined([prompts, completions])


def test_part_of_a_rollout_keeps_its_record():
    model, batch = sampled()
    rows = torch.tensor([3, 4, 5])
    part = select_rows(batch, rows)
    with torch.no_grad(), replay_routing(model, passes_of(part)):
        found = completion_logp(model, bare(part))
    torch.testing.assert_close(found[part.mask], batch.sampler_logp[rows][batch.mask[rows]])


def test_one_token_completions_have_an_empty_second_pass():
    model, batch = sampled()
    short = select_rows(batch, torch.arange(6))
    short = replace(
        short, tokens=short.tokens[:, :1], mask=short.mask[:, :1], routing=short.routing[:, :4]
    )
    with torch.no_grad(), replay_routing(model, passes_of(short)):
        found = completion_logits(model, bare(short))
    assert found.shape[1] == 1


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3", "deepseek-v2"])
def test_where_nothing_is_known_the_router_chooses(family):
    model, ids = moe(family), tokens(2, 6)
    other = record_of(moe(family, seed=1), ids)
    known = torch.ones(2, 6, dtype=torch.bool)
    known[0, 4:] = known[1, 5:] = False
    poisoned = other.indices.clone()
    poisoned[~known] = 0  # the same expert twice: no router can have chosen that
    with torch.no_grad(), record_routing(model) as recording:
        with replay_routing(model, RoutingRecord(poisoned, known)):
            model(ids)
    found = recording.record().indices
    assert torch.equal(found[known], other.indices[known])
    assert (found[~known][..., 0] != found[~known][..., 1]).all()
    # The first layer's choice there is that of a router whose input nothing has changed.
    assert torch.equal(found[:, :, 0][~known], record_of(model, ids).indices[:, :, 0][~known])


def test_several_records_are_used_one_after_the_other():
    model, ids = moe("mixtral"), tokens(4, 6)
    record = record_of(moe("mixtral", seed=1), ids)
    with torch.no_grad(), replay_routing(model, record):
        whole = model(ids).logits
    parts = [record[2:, :3], record[2:, 3:][:, :0], record[:1], record[1:2]]
    with torch.no_grad(), replay_routing(model, parts):
        found = [model(ids[2:, :3]).logits, model(ids[:1]).logits, model(ids[1:2]).logits]
    torch.testing.assert_close(found[0], whole[2:, :3])
    torch.testing.assert_close(torch.cat(found[1:]), whole[:2])


def test_reference_and_old_passes_take_the_same_record():
    model, ids = moe("mixtral"), tokens(2, 5)
    reference = copy.deepcopy(model)
    record = record_of(moe("mixtral", seed=1), ids)
    with torch.no_grad(), replay_routing(model, record), replay_routing(reference, record):
        old, ref = model(ids).logits, reference(ids).logits
    assert torch.equal(old, ref)


def test_inputs_may_come_as_embeddings_or_by_name():
    model, ids = moe("mixtral"), tokens(2, 5)
    record = record_of(moe("mixtral", seed=1), ids)
    with torch.no_grad():
        outputs = []
        embedded = model.get_input_embeddings()(ids)
        for inputs in ({"input_ids": ids}, {"inputs_embeds": embedded}):
            with replay_routing(model, record), record_routing(model) as recording:
                outputs.append(model(**inputs).logits)
            assert torch.equal(recording.record().indices, record.indices)
    assert torch.equal(*outputs)


def test_low_precision():
    for dtype in (torch.bfloat16, torch.float16):
        model, ids = moe("mixtral").to(dtype), tokens(2, 5)
        record = record_of(model, ids)
        with replay_routing(model, record):
            out = model(ids).logits
        assert out.dtype == dtype and torch.equal(out, model(ids).logits)


# --- checkpointed re-runs --------------------------------------------------------------------


def checkpointed(model, reentrant: bool = False):
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    return model


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["together", "in the next block", "after both"])
def test_every_rerun_gets_the_experts_of_its_own_pass(reentrant, order):
    model = moe("mixtral").train()
    ids = [tokens(2, 5, seed=s) for s in (0, 1)]
    records = [record_of(moe("mixtral", seed=2 + s), ids[s]) for s in (0, 1)]
    expected = []
    for i, r in zip(ids, records, strict=True):
        with replay_routing(model, r):
            weighted(model(i).logits).backward()
        expected.append(gradient(model))
    checkpointed(model, reentrant)
    if order == "together":
        with replay_routing(model, records):
            losses = [weighted(model(i, use_cache=False).logits) for i in ids]
            sum(losses).backward()
    else:
        with replay_routing(model, records[0]):
            first = weighted(model(ids[0], use_cache=False).logits)
        with replay_routing(model, records[1]):
            second = weighted(model(ids[1], use_cache=False).logits)
            if order == "in the next block":
                first.backward()
                second.backward()
        if order == "after both":
            first.backward()
            second.backward()
    for found, a, b in zip(gradient(model), *expected, strict=True):
        torch.testing.assert_close(found, a + b)
    assert all("forward" not in router.__dict__ for router in routers(model))


def test_reruns_are_neither_recorded_nor_counted():
    model, ids = checkpointed(moe("mixtral").train()), tokens(2, 5)
    record = record_of(moe("mixtral", seed=1), ids)
    with record_routing(model) as recording, replay_routing(model, record):
        loss = weighted(model(ids, use_cache=False).logits)
        loss.backward(retain_graph=True)
        once = gradient(model)
        loss.backward()
    assert len(recording.parts) == 1
    assert all(torch.equal(a, b) for a, b in zip(once, gradient(model), strict=True))


def test_checkpointing_that_is_not_transformers_is_refused_in_the_rerun():
    model, ids = moe("mixtral").train(), tokens(2, 5)
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda *a, **k: torch.utils.checkpoint.checkpoint(
        forward, *a, use_reentrant=False, **k
    )
    with pytest.raises(ValueError, match=r"layer 1 .* outside a forward"):
        with replay_routing(model, record_of(model, ids)):
            weighted(model(ids, use_cache=False).logits).backward()


# --- refusals, and what is left behind -------------------------------------------------------


@pytest.mark.parametrize(
    "rows, columns, told",
    [
        (2, 7, r"2 rows × 7 columns, but record 0 has 2 rows × 6 columns, of which 0"),
        (3, 6, r"3 rows × 6 columns, but record 0 has 2 rows × 6"),
        (4, 3, r"4 rows × 3 columns, but record 0 has 2 rows × 6"),  # as many tokens in all
    ],
)
def test_a_pass_that_does_not_fit_is_refused(rows, columns, told):
    model = moe("mixtral")
    record = record_of(model, tokens(2, 6))
    with pytest.raises(ValueError, match=told):
        with replay_routing(model, record):
            model(tokens(rows, columns))


def test_a_record_too_short_or_not_used_up_names_layers_and_counts():
    model, ids = moe("mixtral"), tokens(2, 6)
    record = record_of(model, ids)
    names = r"3 layers \(model.layers.0.mlp.gate to model.layers.2.mlp.gate\)"
    with pytest.raises(ValueError, match=rf"of which 4 are used in each of {names}"):
        with replay_routing(model, record):
            model(ids[:, :4])
    with pytest.raises(ValueError, match=rf"all 1 records are used up in each of {names}"):
        with replay_routing(model, record):
            model(ids)
            model(ids[:, :1])
    with pytest.raises(ValueError, match="of which 4 are used"):
        with replay_routing(model, record):
            model(ids[:, :4])
            model(ids[:, 3:])
    with pytest.raises(ValueError, match="not used up: record 1 has 2 rows × 6 columns"):
        with replay_routing(model, [record, record]):
            model(ids)


@pytest.mark.parametrize("fault, told", [("skipped", "ran 0 times"), ("twice", "ran 2 times")])
@pytest.mark.parametrize("context", ["record", "replay"])
def test_a_router_that_does_not_run_once_is_named(fault, told, context):
    model, ids = moe("mixtral"), tokens(2, 4)
    record = record_of(model, ids)
    block = model.model.layers[1].mlp
    before = block.forward
    if fault == "skipped":
        block.forward = lambda hidden: hidden
    else:
        block.forward = lambda hidden: before(hidden) + before(hidden)
    open_ = record_routing(model) if context == "record" else replay_routing(model, record)
    with pytest.raises(ValueError, match=rf"layer 1 \(model.layers.1.mlp.gate\) {told}"):
        with open_:
            model(ids)


def test_a_record_of_another_model_is_refused():
    model, ids = moe("mixtral"), tokens(2, 4)
    record = record_of(model, ids)
    wrong = {
        "record has 2 layers with 2 experts": record[:, :, 1:],
        "3 layers with 1 experts a token, the model 3 with": RoutingRecord.of(
            record.indices[..., :1]
        ),
        "names expert 8, the model has 8": RoutingRecord.of(
            record.indices.masked_fill(record.indices == 7, 8)
        ),
        "names one expert twice in 24 of 24 choices, first in layer 0": RoutingRecord.of(
            torch.zeros_like(record.indices)
        ),
    }
    for told, bad in wrong.items():
        with pytest.raises(ValueError, match=told), replay_routing(model, bad):
            pass


def test_models_that_cannot_be_replayed_are_refused():
    with pytest.raises(ValueError, match="parts have no rows"), record_routing(moe("olmoe")) as r:
        r.record()
    with pytest.raises(ValueError, match="Linear, which has no MoE router"):
        with record_routing(nn.Linear(2, 2)):
            pass
    model, ids = moe("mixtral"), tokens(2, 4)
    record = record_of(model, ids)
    with pytest.raises(ValueError, match="already replays"), replay_routing(model, record):
        with replay_routing(model, record):
            pass
    with pytest.raises(ValueError, match="layer 0 .* outside a forward of the model given"):
        with replay_routing(model, record):
            model.model(ids)
    router = routers(model)[2]
    before = router.forward

    def argsort(hidden):
        scores, gates, _ = before(hidden)
        return scores, gates, scores.argsort(-1, descending=True)[:, :2]

    router.forward = argsort
    with pytest.raises(ValueError, match="layer 2 .* does not choose its experts by one top-k"):
        with replay_routing(model, record_of(moe("mixtral", seed=1), ids)):
            model(ids)


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_left_as_it_was(fails):
    model, ids = checkpointed(moe("mixtral").train()), tokens(2, 4)
    record = record_of(model, ids)

    def state():
        found = [(m, set(m.__dict__)) for m in model.modules()]
        hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
        functions = [m.__dict__.get("_gradient_checkpointing_func") for m in model.modules()]
        return found, hooks, functions

    before = state()
    try:
        with record_routing(model), replay_routing(model, record):
            assert state() != before
            model(ids, use_cache=False)
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert state() == before


def test_a_failure_inside_the_block_is_what_is_told():
    model = moe("mixtral")
    with pytest.raises(KeyError), replay_routing(model, record_of(model, tokens(2, 4))):
        raise KeyError("the user's own")
