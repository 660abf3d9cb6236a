"""Every fault that is planted between two routing records is named, with its evidence."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moes import moe, routers, tokens

from stablerl_core.system import RoutingRecord, compare_routing, record_routing
from stablerl_core.system.routing_compare import FAULTS


def record_of(model, ids, **inputs) -> RoutingRecord:
    with torch.no_grad(), record_routing(model) as recording:
        model(ids, **inputs)
    return recording.record()


def real(padded: bool = False, family: str = "mixtral", rows=6, columns=14) -> RoutingRecord:
    """The routing of a model; rows in pairs share their first half, as those of a prompt do."""
    ids = tokens(rows, columns)
    ids[1::2, : columns // 2] = ids[::2, : columns // 2]
    if not padded:
        return record_of(moe(family), ids)
    lengths = torch.tensor([columns - r for r in range(rows)])
    mask = torch.arange(columns) >= columns - lengths[:, None]
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)
    return record_of(moe(family), ids, attention_mask=mask.long(), position_ids=positions)


def noisy(record: RoutingRecord, share: float, seed: int = 0) -> RoutingRecord:
    """One expert of `share` of the decisions replaced by one that was not chosen."""
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(record.indices.shape[:3], generator=generator) < share
    ids = record.indices.clone()
    scores = torch.rand(*ids.shape[:3], 8, generator=generator)
    other = scores.scatter(-1, ids.long(), -1).argmax(-1).to(ids.dtype)
    ids[..., 1] = torch.where(hit, other, ids[..., 1])
    return RoutingRecord(ids, record.mask)


def shifted(record: RoutingRecord, by: int) -> RoutingRecord:
    """The ids `by` columns late; the mask stays, as it does in an off-by-one."""
    return RoutingRecord(record.indices.roll(by, 1), record.mask)


@pytest.mark.parametrize("padded", [False, True])
def test_equal_records_agree(padded):
    a = real(padded)
    found = compare_routing(a, RoutingRecord(a.indices.clone(), a.mask.clone()))
    assert found.agree and found.share == found.explained == 1 and found.fault is None
    assert found.layers == (1.0, 1.0, 1.0) and found.detail == ()


def test_what_lies_under_padding_does_not_matter():
    a = real(padded=True)
    ids = a.indices.clone()
    ids[~a.mask] = 0
    assert compare_routing(a, RoutingRecord(ids, a.mask)).agree


def test_columns_of_padding_at_the_end_do_not_matter():
    a = real(padded=True)
    wide = torch.cat([a.mask, torch.zeros(6, 3, dtype=torch.bool)], 1)
    assert compare_routing(a, a.relayout(wide)).agree and compare_routing(a.relayout(wide), a).agree


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("by", [1, -1, 3])
def test_a_shift(by, padded, noise):
    a = real(padded)
    found = compare_routing(a, noisy(shifted(a, by), noise))
    assert (found.agree, found.fault, found.detail) == (False, "shift", (by,))
    assert found.share < 0.4 < 0.6 < found.explained
    assert ("late" if by > 0 else "early") in found.evidence


@pytest.mark.parametrize("by", [1, -1])
def test_columns_that_a_shift_pushes_out_do_not_count_as_alike(by):
    ids = real().indices.clone()
    edge, inner = (-1, -2) if by > 0 else (0, 1)
    ids[:, edge] = ids[:, inner]  # what would be compared if one stopped at the edge
    a = RoutingRecord.of(ids)
    assert compare_routing(a, shifted(a, by)).explained == pytest.approx(13 / 14)


def test_the_off_by_one_between_a_prompt_and_its_completion():
    """A trainer that records a begin token which the sampler did not feed."""
    b = real()
    found = compare_routing(b[:, 1:], b)
    assert (found.fault, found.detail, found.explained) == ("shift", (1,), 1.0)
    found = compare_routing(b, b[:, 1:])
    assert (found.fault, found.detail) == ("shift", (-1,))


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_left_against_right_padding(noise):
    a = real(padded=True)
    right = a.mask.flip(1)
    found = compare_routing(a, noisy(a.relayout(right), noise))
    assert found.fault == "padding" and found.explained > 0.85
    assert found.detail == tuple(-r for r in range(6))
    # The same when the ids are on the right and the mask still says left.
    wrong = RoutingRecord(a.relayout(right).indices, a.mask)
    found = compare_routing(a, wrong)
    assert (found.fault, found.explained) == ("padding", 1.0)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("told", ["with its mask", "the other mask", "no mask"])
def test_padding_wider_than_any_shift_that_is_tried(side, told):
    lengths = torch.tensor([40, 12, 25, 8])
    columns = torch.arange(40)
    masks = {"right": columns < lengths[:, None], "left": columns >= 40 - lengths[:, None]}
    ids = torch.rand(4, 40, 2, 16, generator=torch.Generator().manual_seed(0)).topk(3).indices
    a = RoutingRecord.of(ids, masks[side])
    mask = masks["left" if side == "right" else "right"]
    b = a.relayout(mask)
    if told != "with its mask":
        b = RoutingRecord(b.indices, a.mask if told == "the other mask" else torch.ones_like(mask))
    found = compare_routing(a, b)
    moved = tuple((lengths - 40 if side == "left" else 40 - lengths).tolist())
    assert (found.fault, found.explained, found.detail) == ("padding", 1.0, moved)


def test_more_padding_that_the_mask_knows_of_is_no_shift():
    a = real(padded=True)
    wide = torch.cat([torch.zeros(6, 2, dtype=torch.bool), a.mask], 1)
    found = compare_routing(a, a.relayout(wide))
    assert (found.fault, found.detail, found.explained) == ("padding", (2,) * 6, 1.0)
    blind = RoutingRecord(a.relayout(wide).indices, torch.ones_like(wide))
    assert compare_routing(a, blind).fault == "shift"


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (1, 2, 3, 4, 5, 0)])
def test_rows_permuted(order, padded, noise):
    a = real(padded)
    b = noisy(a, noise)[torch.tensor(order)]
    b = RoutingRecord(b.indices, a.mask if padded else b.mask)
    found = compare_routing(a, b)
    places = tuple(order.index(r) for r in range(6))
    assert (found.fault, found.detail) == ("rows permuted", places)
    assert found.share < found.explained and found.explained > 0.85


def test_only_siblings_swapped():
    """Rows that share a prompt, of which half the decisions agree anyway."""
    a = real()
    found = compare_routing(a, a[torch.tensor([1, 0, 3, 2, 5, 4])])
    assert found.fault == "rows permuted" and found.explained == 1
    assert 0.4 < found.share < 0.7
    assert "6 of 6 rows" in found.evidence


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("order", [(1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_layers_in_another_order(order, noise):
    a = real(padded=True)
    found = compare_routing(a, noisy(a, noise)[:, :, torch.tensor(order)])
    assert (found.fault, found.detail) == ("layer map", tuple(order.index(x) for x in range(3)))
    assert found.explained > 0.85


def test_a_dense_or_a_prediction_layer_in_one_record_only():
    a = real()
    extra = real(family="qwen3-moe").indices[:, :, :1]
    first = RoutingRecord(torch.cat([extra, a.indices], 2), a.mask)
    last = RoutingRecord(torch.cat([a.indices, extra], 2), a.mask)
    found = compare_routing(a, first)
    assert (found.fault, found.detail, found.explained) == ("layer map", (1, 2, 3), 1.0)
    found = compare_routing(first, a)
    assert (found.fault, found.detail) == ("layer map", (1, 2, 3))
    found = compare_routing(a, last)
    assert (found.fault, found.detail) == ("layer map", (0, 1, 2))
    assert "a has 3 layers, b 4" in found.evidence


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("how", ["reversed", "by id"])
def test_the_order_within_the_top_k(how, noise):
    a = real(padded=True)
    b = noisy(a, noise)
    ids = b.indices.flip(-1) if how == "reversed" else b.indices.sort(-1).values
    found = compare_routing(a, RoutingRecord(ids, a.mask))
    assert found.fault == "top-k order" and not found.agree
    assert found.share == pytest.approx(1 - noise, abs=0.05)


def test_tokens_that_one_record_lacks():
    a = real(padded=True)
    mask = a.mask.clone()
    mask[:, -2:] = False
    unknown = a.indices * mask[..., None, None]
    found = compare_routing(a, RoutingRecord(unknown, mask))
    assert (found.fault, found.detail, found.share) == ("missing tokens", (12, 0), 1.0)
    found = compare_routing(a[:, :-1], a)
    assert (found.fault, found.detail) == ("missing tokens", (0, 6))


def test_rounding_is_numerics_and_grows_with_depth():
    model, ids = moe("mixtral"), tokens(16, 40)
    a = record_of(model, ids)
    b = record_of(copy.deepcopy(model).bfloat16(), ids)
    found = compare_routing(a, b)
    assert found.fault == "numerics" and 0.8 < found.share < 1
    assert found.layers[0] > found.layers[-1]
    row, column, layer = found.detail
    assert (a.indices != b.indices).any(-1)[row, column, layer]
    assert (a.indices == b.indices).flatten(1)[:row].all()


@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_scattered_differences_are_numerics(noise):
    a = real(padded=True)
    found = compare_routing(a, noisy(a, noise))
    assert found.fault == "numerics" and found.share == pytest.approx(1 - noise, abs=0.1)


def test_one_stale_row_is_pointed_at():
    a = real(rows=16)
    ids = a.indices.clone()
    ids[5] = noisy(a, 1.0).indices[5]
    found = compare_routing(a, RoutingRecord(ids, a.mask))
    assert found.fault == "numerics" and "42 of 672" in found.evidence
    assert found.evidence.endswith("42 are in row 5")


def test_a_small_update_is_numerics():
    model, ids = moe("mixtral"), tokens(8, 20)
    a = record_of(model, ids)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for router in routers(model):
            router.weight.add_(0.02 * torch.randn(router.weight.shape, generator=generator))
    assert compare_routing(a, record_of(model, ids)).fault == "numerics"


@pytest.mark.parametrize("what", ["other weights", "other tokens"])
def test_records_that_have_nothing_in_common(what):
    ids = tokens(8, 20)
    a = record_of(moe("mixtral"), ids)
    model = moe("mixtral", seed=1) if what == "other weights" else moe("mixtral")
    found = compare_routing(
        a, record_of(model, ids if what == "other weights" else tokens(8, 20, 5))
    )
    assert found.fault == "unrelated" and found.share < 0.3


@settings(max_examples=60)
@given(
    fault=st.sampled_from(["shift", "rows permuted", "layer map", "top-k order"]),
    seed=st.integers(0, 10_000),
    rows=st.integers(2, 6),
    columns=st.integers(6, 20),
    k=st.integers(2, 4),
)
def test_planted_faults_in_random_records(fault, seed, rows, columns, k):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, columns, 4, 16, generator=generator).topk(k).indices
    a = RoutingRecord.of(ids)
    b = {
        "shift": lambda: shifted(a, 1),
        "rows permuted": lambda: a[torch.arange(rows).roll(1)],
        "layer map": lambda: a[:, :, torch.tensor([0, 2, 1, 3])],
        "top-k order": lambda: RoutingRecord(a.indices.flip(-1), a.mask),
    }[fault]()
    assert compare_routing(a, a).agree
    assert compare_routing(a, b).fault == compare_routing(b, a).fault == fault


def test_one_row_and_one_expert_can_be_compared():
    ids = torch.arange(12).view(1, 6, 2, 1)
    a = RoutingRecord.of(ids)
    assert compare_routing(a, a).agree
    assert compare_routing(a, shifted(a, 1)).fault == "shift"
    empty = RoutingRecord(a.indices, torch.zeros_like(a.mask))
    assert compare_routing(a, empty).fault == "missing tokens"
    assert compare_routing(empty, empty).agree


def test_a_long_record_is_read_in_samples():
    """More columns than are read to tell rows and layers apart."""
    generator = torch.Generator().manual_seed(0)
    a = RoutingRecord.of(torch.rand(3, 300, 3, 8, generator=generator).topk(2).indices)
    assert compare_routing(a, a[torch.tensor([2, 0, 1])]).fault == "rows permuted"
    assert compare_routing(a, a[:, :, torch.tensor([1, 0, 2])]).fault == "layer map"


def test_differences_between_the_samples_are_not_taken_for_an_order():
    generator = torch.Generator().manual_seed(0)
    a = RoutingRecord.of(torch.rand(3, 300, 3, 8, generator=generator).topk(2).indices)
    ids = a.indices.clone()
    ids[:, 1::5] = noisy(a, 1.0).indices[:, 1::5]
    assert compare_routing(a, RoutingRecord(ids, a.mask)).fault == "numerics"


def test_records_that_cannot_be_compared_are_refused():
    a = real()
    with pytest.raises(ValueError, match="a has 6 rows with 2 experts a token, b 5 with 2"):
        compare_routing(a, a[1:])
    with pytest.raises(ValueError, match="b 6 with 1"):
        compare_routing(a, RoutingRecord(a.indices[..., :1], a.mask))


def test_every_fault_has_a_test():
    text = open(__file__, encoding="utf-8").read()
    assert all(f'"{fault}"' in text for fault in FAULTS)
