"""Recording and replay on every family by one mechanism, against gates written by hand."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from moes import EXPERTS, FAMILIES, OTHERS, TOP_K, experts, gates, logits, moe, routers, tokens
from transformers import DynamicCache

from stablerl_core.system import RoutingRecord, record_routing, replay_routing
from stablerl_core.training.rollout import cache_argument

WITH_FORMULA = (*FAMILIES, "deepseek-v2")
every_family = pytest.mark.parametrize("family", FAMILIES)


def record_of(model, ids, **inputs) -> RoutingRecord:
    with torch.no_grad(), record_routing(model) as recording:
        model(ids, **inputs)
    return recording.record()


def gradients(model, out) -> dict[str, torch.Tensor]:
    """Of a loss in which every logit has its own weight."""
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    model.zero_grad()
    (out * weights).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@contextmanager
def by_hand(family: str, model, record: RoutingRecord):
    """The record's experts with the gates of `moes.gates`: what a replay must be equal to."""

    def forward(layer, router):
        def run(hidden):
            scores = logits(family, router, hidden)
            ids = record.indices[:, :, layer].flatten(0, 1).long()
            return scores, gates(family, scores, ids), ids

        return run

    for layer, router in enumerate(routers(model)):
        router.forward = forward(layer, router)
    yield
    for router in routers(model):
        del router.forward


@contextmanager
def served(model):
    """The expert ids that reach the experts, layer after layer."""
    seen = []

    def hook(_, args, kwargs):
        ids = [a for a in (*args, *kwargs.values()) if not a.is_floating_point()]
        seen.append(ids[0])

    handles = [m.register_forward_pre_hook(hook, with_kwargs=True) for m in experts(model)]
    yield seen
    for handle in handles:
        handle.remove()


@pytest.mark.parametrize("family", (*FAMILIES, *OTHERS))
def test_a_record_is_what_the_router_chose(family):
    model, ids = moe(family), tokens(3, 7)
    with served(model) as seen:
        record = record_of(model, ids)
    assert record.indices.shape == (3, 7, len(routers(model)), TOP_K)
    assert record.indices.dtype == torch.uint8 and record.mask.all()
    assert record.bytes_per_token == len(seen) * TOP_K
    assert torch.equal(record.indices.flatten(0, 1).long(), torch.stack(seen, 1))
    assert len(record.indices.unique()) == EXPERTS


@pytest.mark.parametrize("family", (*FAMILIES, *OTHERS))
def test_ones_own_record_changes_no_bit(family):
    model, ids = moe(family), tokens(3, 7)
    record = record_of(model, ids)
    plain = model(ids).logits
    expected = gradients(model, plain)
    with replay_routing(model, record):
        again = model(ids).logits
    found = gradients(model, again)
    assert torch.equal(again, plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("family", (*FAMILIES, *OTHERS))
def test_another_models_record_changes_exactly_the_experts(family):
    model, ids = moe(family), tokens(3, 7)
    own, record = record_of(model, ids), record_of(moe(family, seed=1), ids)
    with torch.no_grad(), served(model) as seen, replay_routing(model, record):
        changed = model(ids).logits
    assert torch.equal(torch.stack(seen, 1), record.indices.flatten(0, 1).long())
    assert (own.indices != record.indices).float().mean() > 0.5
    with torch.no_grad():
        assert (changed - model(ids).logits).abs().max() > 0.1


@pytest.mark.parametrize("family", WITH_FORMULA)
def test_logits_and_gradients_are_those_of_gates_written_by_hand(family):
    model, ids = moe(family), tokens(3, 7)
    record = record_of(moe(family, seed=1), ids)
    with by_hand(family, model, record):
        expected_logits = model(ids).logits
    expected = gradients(model, expected_logits)
    with replay_routing(model, record):
        found_logits = model(ids).logits
    found = gradients(model, found_logits)
    torch.testing.assert_close(found_logits, expected_logits)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-4)
        if "gate.weight" in name or "router.weight" in name:
            assert gradient.abs().max() > 0.1, name


@every_family
def test_the_router_gradient_is_that_of_the_formula_at_the_router_itself(family):
    router = routers(moe(family))[0]
    hidden = torch.randn(20, router.weight.shape[1], generator=torch.Generator().manual_seed(3))
    ids = torch.rand(20, EXPERTS, generator=torch.Generator().manual_seed(4)).topk(TOP_K).indices
    weights = torch.linspace(-1, 2, ids.numel()).view_as(ids)
    expected = gates(family, logits(family, router, hidden), ids)
    (wanted,) = torch.autograd.grad((expected * weights).sum(), router.weight)

    class Alone(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = router

        def forward(self, input_ids):
            return self.router(hidden)

    with replay_routing(alone := Alone(), RoutingRecord.of(ids[None, :, None])):
        _, found, chosen = alone(torch.zeros(1, 20))
    (gradient,) = torch.autograd.grad((found * weights).sum(), router.weight)
    assert torch.equal(chosen, ids)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(gradient, wanted)
    assert gradient.abs().max() > 0.01


def checkpointed(model, reentrant: bool = False) -> None:
    """Transformers renamed the method in 5.24."""
    new = getattr(model, "activation_checkpointing_enable", None)
    (new or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})


@every_family
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("inside", [True, False])
def test_gradient_checkpointing_gives_the_same_gradient(family, reentrant, inside):
    model, ids = moe(family).train(), tokens(3, 7)
    record = record_of(moe(family, seed=1), ids)
    with replay_routing(model, record):
        expected = gradients(model, model(ids).logits)
    checkpointed(model, reentrant)
    with replay_routing(model, record):
        out = model(ids, use_cache=False).logits
        if inside:
            found = gradients(model, out)
    if not inside:
        found = gradients(model, out)
    assert all(torch.equal(found[name], gradient) for name, gradient in expected.items())


@every_family
def test_generation_with_cache_gives_one_record_a_sequence(family):
    model = moe(family)
    ids, mask = tokens(3, 5), torch.ones(3, 5, dtype=torch.long)
    mask[0, :3] = mask[2, :1] = 0
    ids = ids * mask
    options = dict(attention_mask=mask, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    plain = model.generate(ids, **options)
    with record_routing(model) as recording:
        full = model.generate(ids, **options)
    assert torch.equal(full, plain)
    record = recording.record()
    fed, seen = full[:, :-1], torch.cat([mask, torch.ones(3, 5, dtype=torch.long)], 1)
    assert record.indices.shape[:2] == fed.shape and torch.equal(record.mask, seen.bool())
    # The same tokens in one pass choose the same experts (a tie closer than rounding apart).
    positions = (seen.cumsum(1) - 1).clamp(min=0)
    once = record_of(model, fed, attention_mask=seen, position_ids=positions)
    assert torch.equal(once.indices[once.mask], record.indices[record.mask])


@every_family
def test_a_record_serves_the_prompt_and_then_the_cache_column_by_column(family):
    model, ids = moe(family), tokens(2, 8)
    record = record_of(moe(family, seed=1), ids)
    with torch.no_grad(), replay_routing(model, record):
        whole = model(ids, use_cache=False).logits
    with torch.no_grad(), replay_routing(model, record):
        cache = {cache_argument(model): DynamicCache(config=model.config)}
        pieces = [model(ids[:, :5], use_cache=True, **cache).logits]
        pieces += [model(ids[:, t : t + 1], use_cache=True, **cache).logits for t in (5, 6, 7)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)


def packed_attention(lengths) -> dict[str, torch.Tensor]:
    """What gpt-oss must be told, because it does not read packing off the position ids."""
    row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(row))[:, None] - torch.arange(len(row))
    full = (row[:, None] == row) & (back >= 0)
    masks = {"full_attention": full, "sliding_attention": full & (back < 6)}
    return {n: torch.zeros(1, 1, *m.shape).masked_fill(~m, -1e9) for n, m in masks.items()}


@every_family
def test_left_padding_right_padding_and_packing_are_one_record(family):
    model, lengths = moe(family), (7, 3, 5)
    rows = [tokens(1, n, seed=n)[0] for n in lengths]
    left = torch.stack([torch.arange(7) >= 7 - n for n in lengths])
    right = torch.stack([torch.arange(7) < n for n in lengths])
    ids = {True: torch.zeros(3, 7, dtype=torch.long), False: torch.zeros(3, 7, dtype=torch.long)}
    ids[True][left] = ids[False][right] = torch.cat(rows)
    position = {m: (k.long().cumsum(1) - 1).clamp(min=0) for m, k in ((True, left), (False, right))}
    record = record_of(
        moe(family, seed=1), ids[True], attention_mask=left.long(), position_ids=position[True]
    )
    with torch.no_grad(), replay_routing(model, record):
        a = model(ids[True], attention_mask=left.long(), position_ids=position[True]).logits[left]
    with torch.no_grad(), replay_routing(model, record.relayout(right)):
        b = model(ids[False], attention_mask=right.long(), position_ids=position[False])
    packed = record.relayout(torch.ones(1, sum(lengths), dtype=torch.bool))
    with torch.no_grad(), replay_routing(model, packed):
        places = torch.cat([torch.arange(n) for n in lengths])[None]
        mask = packed_attention(lengths) if family == "gpt-oss" else None
        c = model(torch.cat(rows)[None], mask, places, use_cache=False).logits[0]
    torch.testing.assert_close(b.logits[right], a)
    torch.testing.assert_close(c, a)
