"""Do two routing records agree, and if not, what kind of mistake lies between them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .routing import RoutingRecord

FAULTS = (
    "shift",
    "padding",
    "rows permuted",
    "layer map",
    "missing tokens",
    "top-k order",
    "numerics",
    "unrelated",
)
MAX_SHIFT = 8  # columns to either side that are tried for a shift
ENOUGH_COLUMNS = 64  # columns that are read to tell rows and layers apart


@dataclass(frozen=True)
class RoutingComparison:
    """Result of `compare_routing`; a decision is one token in one layer.

    `agree`: the records are the same, order within the top-k and mask included. `share`: of the
    decisions both records hold, the fraction with the same set of experts; `layers` the same for
    each layer. `fault`: one of `FAULTS`, or None. `explained`: `share` with that fault undone.
    `detail`, by fault: the shift in columns · the shift of each row · for each row of a its row
    in b · for each layer of the shallower record its layer in the other · tokens only in a and
    only in b · (row, column, layer) of the first decision that differs. `evidence`: a sentence.
    """

    agree: bool
    share: float
    layers: tuple[float, ...]
    fault: str | None
    explained: float
    detail: tuple[int, ...]
    evidence: str


@dataclass(frozen=True)
class _Suspect:
    """An explanation: `score` = decisions of a that it makes agree, over all that a holds."""

    fault: str
    score: float
    detail: tuple[int, ...]
    evidence: str


def compare_routing(a: RoutingRecord, b: RoutingRecord) -> RoutingComparison:
    """Say whether two records of the same rows agree, and if not, which mistake explains it.

    Explanations are tried from simple to complex: b some columns late or early (a shift: its mask
    did not move along), each row placed at another column (padding), rows in another order,
    layers in another order or number. One is named when it explains more than half of the
    decisions that the ones before left unexplained. What is left: other tokens in the masks;
    decisions no more alike than those of unrelated tokens (other weights, other inputs); the same
    experts in another order, in more than a quarter of the decisions; and otherwise numerics,
    experts so close that rounding or a small update decides.

    Raises `ValueError` when rows or k differ: bring both to one layout with `relayout` first.
    """
    rows, k = (len(a.mask), len(b.mask)), (a.indices.shape[3], b.indices.shape[3])
    if rows[0] != rows[1] or k[0] != k[1]:
        raise ValueError(
            f"a has {rows[0]} rows with {k[0]} experts a token, b {rows[1]} with {k[1]}; both "
            "must hold the same rows (RoutingRecord.relayout packs and unpacks) and k"
        )
    same, ordered = _as_given(a, b)
    layers = tuple(same.double().mean(0).tolist()) if len(same) else (0.0,) * same.shape[1]
    share = sum(layers) / max(len(layers), 1)
    found = RoutingComparison(False, share, layers, None, share, (), "")
    same_tokens = _only(a, b) == _only(b, a) == 0 and a.indices.shape[2] == b.indices.shape[2]
    if same_tokens and bool(ordered.all()):
        return replace(found, agree=True, evidence=f"all {ordered.numel()} decisions are equal")
    comparable = bool(a.mask.any()) and bool(b.mask.any())
    suspect = (comparable and _structural(a, b, share)) or _rest(a, b, same, ordered, share)
    return replace(
        found,
        fault=suspect.fault,
        explained=suspect.score,
        detail=suspect.detail,
        evidence=suspect.evidence,
    )


def _sets(record: RoutingRecord) -> Tensor:
    """(B, S, L, k) int16 ids in ascending order: the set of experts, whatever their order."""
    return record.indices.to(torch.int16).sort(-1).values


def _common(a: RoutingRecord, b: RoutingRecord) -> tuple[slice, slice, slice]:
    """The columns and layers that both records have."""
    columns, layers = (min(a.indices.shape[i], b.indices.shape[i]) for i in (1, 2))
    return slice(None), slice(columns), slice(layers)


def _as_given(a: RoutingRecord, b: RoutingRecord) -> tuple[Tensor, Tensor]:
    """Bool (N, L): the same set, and the same order, in the N tokens that both masks hold."""
    common = _common(a, b)
    a, b = a[common], b[common]
    both = a.mask & b.mask
    same = (_sets(a) == _sets(b)).all(-1)[both]
    return same, (a.indices == b.indices).all(-1)[both]


def _structural(a: RoutingRecord, b: RoutingRecord, share: float) -> _Suspect | None:
    """The explanation by a wrong place that is worth more than half of what is unexplained."""
    best, found = share, None
    first, second = _sets(a), _sets(b)
    for suspect in (*_placements(a, b, first, second), _row_order(a, b, first, second)):
        if suspect.score > best + (1 - best) / 2:
            best, found = suspect.score, suspect
    layers = _layer_map(a, b, first, second)
    deeper = a.indices.shape[2] != b.indices.shape[2] and found is None
    if layers.score > best + (1 - best) / 2 or (deeper and layers.score >= best):
        return layers
    return found


def _placements(a, b, first: Tensor, second: Tensor) -> list[_Suspect]:
    """Rows of b found at other columns: all by one shift, or each by its own."""
    offsets = [s for s in range(-MAX_SHIFT, MAX_SHIFT + 1) if s]
    rows = len(a.mask)
    shifts = [torch.full((rows,), s, device=a.mask.device) for s in offsets] + _edges(a, b)
    hits = torch.stack([_hits(a, first, second, s) for s in shifts])  # (candidates, B)
    total = max(int(a.mask.sum()) * min(first.shape[2], second.shape[2]), 1)
    constant = int(hits[: len(offsets)].sum(1).argmax())
    own = torch.stack(shifts).gather(0, hits.argmax(0)[None])[0]
    by = offsets[constant]
    way = "late" if by > 0 else "early"
    moved = _mask_moved(a, b, by)
    one = _Suspect(
        "padding" if moved else "shift",
        float(hits[constant].sum()) / total,
        (by,) * rows if moved else (by,),
        f"b is {abs(by)} column{'s' * (abs(by) > 1)} {way} in every row"
        + (", and so is its mask" if moved else ", its mask is not"),
    )
    each = _Suspect(
        "padding",
        float(hits.amax(0).sum()) / total,
        tuple(own.tolist()),
        f"rows of b sit {int(own.min())} to {int(own.max())} columns further right",
    )
    return [one, each]


def _edges(a: RoutingRecord, b: RoutingRecord) -> list[Tensor]:
    """Shifts (B,) that put each row of a at the left end of b, at its right end, at b's mask."""
    start = a.mask.int().argmax(1)
    last = a.mask.shape[1] - 1 - a.mask.flip(1).int().argmax(1)
    return [-start, b.mask.shape[1] - 1 - last, b.mask.int().argmax(1) - start]


def _hits(a, first: Tensor, second: Tensor, shift: Tensor) -> Tensor:
    """Decisions (B,) of a that equal those of b `shift` columns further right; b's mask is not
    asked, because it may be what is wrong."""
    layers = min(first.shape[2], second.shape[2])
    columns = torch.arange(first.shape[1], device=shift.device) + shift[:, None]
    inside = (columns >= 0) & (columns < second.shape[1])
    rows = torch.arange(len(first), device=shift.device)[:, None]
    other = second[rows, columns.clamp(0, second.shape[1] - 1), :layers]
    same = (first[:, :, :layers] == other).all(-1)
    return (same & (inside & a.mask)[..., None]).sum((1, 2))


def _mask_moved(a: RoutingRecord, b: RoutingRecord, by: int) -> bool:
    """Whether b's tokens are exactly a's, `by` columns further right."""
    left, right = (r.mask.nonzero() for r in (a, b))
    return len(left) == len(right) and bool((left + left.new_tensor([0, by]) == right).all())


def _thin(record: RoutingRecord, sets: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A mask and both sets at no more than `ENOUGH_COLUMNS` of the columns that both have."""
    columns = min(sets.shape[1], other.shape[1])
    step = max(1, -(-columns // ENOUGH_COLUMNS))
    pick = slice(0, columns, step)
    return record.mask[:, pick], sets[:, pick], other[:, pick]


def _row_order(a, b, first: Tensor, second: Tensor) -> _Suspect:
    """Pair the rows of a with those rows of b that are most like them."""
    mask, first, second = _thin(a, first, second)
    layers = min(first.shape[2], second.shape[2])
    pairs = torch.stack(
        [
            ((row[:, :layers] == second[:, :, :layers]).all(-1) & known[:, None]).sum((1, 2))
            for row, known in zip(first, mask, strict=True)
        ]
    )
    owner = _partners(pairs)
    score = float(pairs.gather(1, owner[:, None]).sum()) / max(int(mask.sum()) * layers, 1)
    moved = int((owner != torch.arange(len(owner), device=owner.device)).sum())
    return _Suspect(
        "rows permuted",
        score if moved else 0.0,
        tuple(owner.tolist()),
        f"{moved} of {len(owner)} rows of a are found in another row of b",
    )


def _layer_map(a, b, first: Tensor, second: Tensor) -> _Suspect:
    """Pair the layers of the shallower record with those most like them in the other."""
    mask, first, second = _thin(a, first, second)
    mask = mask & _thin(b, second, first)[0]
    fewer, more = sorted((first[mask], second[mask]), key=lambda sets: sets.shape[1])
    pairs = (fewer[:, :, None] == more[:, None]).all(-1).sum(0)
    owner = _partners(pairs)
    score = float(pairs.gather(1, owner[:, None]).sum()) / max(len(fewer) * len(owner), 1)
    straight = owner.tolist() == list(range(more.shape[1]))
    return _Suspect(
        "layer map",
        0.0 if straight else score,
        tuple(owner.tolist()),
        f"a has {first.shape[2]} layers, b {second.shape[2]}; those of the shallower record "
        f"match layers {owner.tolist()} of the other",
    )


def _partners(pairs: Tensor) -> Tensor:
    """One partner for each, the best first and none twice."""
    open_ = pairs.clone()
    partner = torch.zeros(len(pairs), dtype=torch.long, device=pairs.device)
    for _ in range(len(pairs)):
        row, column = divmod(int(open_.argmax()), pairs.shape[1])
        partner[row] = column
        open_[row], open_[:, column] = -1, -1
    return partner


def _rest(a, b, same: Tensor, ordered: Tensor, share: float) -> _Suspect:
    """What remains when nothing is in the wrong place."""
    only_a, only_b = _only(a, b), _only(b, a)
    if bool(ordered.all()):
        evidence = f"equal where both hold a token; {only_a} tokens only in a, {only_b} only in b"
        return _Suspect("missing tokens", share, (only_a, only_b), evidence)
    chance = _chance(a, b)
    if share <= chance + (1 - chance) / 10 and chance < 0.9:
        evidence = f"{share:.0%} alike, {chance:.0%} by chance: other weights or other tokens"
        return _Suspect("unrelated", share, (), evidence)
    swapped = int((same & ~ordered).sum())
    if swapped > same.sum() / 4:
        evidence = (
            f"{swapped} of {int(same.sum())} decisions with the same experts have them in another "
            "order; harmless for gates computed anew, wrong for stored gates"
        )
        return _Suspect("top-k order", share, _first(a, b, ordered), evidence)
    differ = (~same).sum(1)
    rows = (a[_common(a, b)].mask & b[_common(a, b)].mask).nonzero()[:, 0].bincount(differ)
    evidence = (
        f"{int(differ.sum())} of {same.numel()} decisions differ, and no shift, padding or order "
        f"of rows or layers explains them; {int(rows.max())} are in row {int(rows.argmax())}"
    )
    return _Suspect("numerics", share, _first(a, b, ordered), evidence)


def _only(a: RoutingRecord, b: RoutingRecord) -> int:
    """Tokens that a holds and b does not."""
    held = torch.zeros_like(a.mask)
    columns = min(a.mask.shape[1], b.mask.shape[1])
    held[:, :columns] = b.mask[:, :columns]
    return int((a.mask & ~held).sum())


def _first(a: RoutingRecord, b: RoutingRecord, ordered: Tensor) -> tuple[int, ...]:
    """(row, column, layer) of the first decision that is not the same, order included."""
    common = _common(a, b)
    places = (a[common].mask & b[common].mask).nonzero()
    token, layer = (~ordered).nonzero()[0].tolist()
    return (*places[token].tolist(), layer)


def _chance(a: RoutingRecord, b: RoutingRecord) -> float:
    """How often decisions agree when tokens are paired that have nothing to do with each other."""
    common = _common(a, b)
    first, second = _sets(a[common])[a[common].mask], _sets(b[common])[b[common].mask]
    n = min(len(first), len(second))
    if n == 0:
        return 0.0
    far = second[:n].roll(n // 2, 0)
    return float((first[:n] == far).all(-1).double().mean())
