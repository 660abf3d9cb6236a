"""Does the sampler hold the weights that the trainer sent?

Both sides take `fingerprints` of what they have, a few numbers a tensor that can go through any
channel, and `compare_fingerprints` names the tensor that is wrong and says how. `lr_zero_control`
asks the same of a run log: at learning rate 0 nothing is learned, so nothing may drift apart.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

SAMPLES = 64  # elements of a tensor that are kept, evenly spaced
_CHUNK = 1 << 22  # elements hashed at once: 32 MiB of int64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fingerprint:
    """One tensor in brief: `hash` of its bits and their order, and a few values in float64.

    `norm` = 2-norm, `largest` = max |x|, `samples` = up to 64 elements at fixed positions.
    `tied`: the first name under which the same memory was already listed, or None.
    """

    shape: tuple[int, ...]
    dtype: str
    hash: int
    norm: float
    largest: float
    samples: tuple[float, ...]
    tied: str | None = None


@dataclass(frozen=True)
class SyncFault:
    """`kind` is one of those that `compare_fingerprints` lists.

    `tensor` is its name, or None where all of them are meant; `version`: the index in `history`
    of what is held instead, or None; `detail`: one sentence.
    """

    kind: str
    tensor: str | None
    version: int | None
    detail: str


@dataclass(frozen=True)
class SyncReport:
    """`agree`: every tensor is bit for bit what was sent, or differs by rounding alone."""

    agree: bool
    tensors: int
    faults: tuple[SyncFault, ...]


Fingerprints = dict[str, Fingerprint]


@torch.no_grad()
def fingerprints(
    model: nn.Module | Mapping[str, Tensor], *, dtype: torch.dtype | None = None
) -> Fingerprints:
    """A `Fingerprint` of every parameter and buffer in the `state_dict` of a model, or in a dict.

    Tensors of three and more dimensions are stacks (experts): each slice has a fingerprint of
    its own, `name[0]`, `name[1]`, …, so that one expert that was never sent has a name.
    dtype: cast floating-point tensors to it first. A trainer in float32 that feeds a sampler in
    bfloat16 gives `dtype=torch.bfloat16` here and on the sampler's side: then equal means equal
    bits. The hash is integer arithmetic, the same on every device and in any order of summation.
    Raises `ValueError` for a model without tensors.
    """
    state = model.state_dict() if isinstance(model, nn.Module) else model
    if not state:
        raise ValueError("model has no tensor: pass a module or its state_dict")
    seen: dict[tuple, str] = {}
    found = {}
    for name, tensor in _slices(state):
        memory = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape)
        first = seen.setdefault(memory, name) if tensor.numel() else name
        cast = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        found[name] = _fingerprint(cast, None if first == name else first)
    return found


def compare_fingerprints(
    sent: Fingerprints,
    held: Fingerprints,
    history: Sequence[Fingerprints] = (),
    *,
    rounding: torch.dtype | None = None,
) -> SyncReport:
    """Compare what the trainer sent with what the sampler holds, and name every fault.

        missing, unexpected   a name that only one side has
        shape                 same name, other shape
        old version           nothing is newer than a version in `history`: the push did not
                              arrive, or the sync went backwards
        never sent            this tensor is of an old version, others are not
        tied                  the same, of a tensor that the trainer ties to one that arrived
        rounding              sampled elements differ by at most one unit in the last place of
                              `rounding`; not held against the sync
        different             none of these

    history: what was sent before, oldest first; without it an old version can only be called
    different. rounding: the coarsest format on the way, for example torch.float8_e4m3fn when the
    sampler quantises and holds bfloat16; None = the coarser of the two recorded dtypes. For a
    format that has no dtype (int4) take `fingerprints` of the quantised values on both sides. A
    merge (LoRA) may move a value by one such unit. If the last update is smaller than that,
    rounding hides it, and what is within the rounding of both versions is called rounding.
    """
    faults = _by_name(sent, held, history)
    bad = {f.tensor for f in faults}
    stale: dict[str, int] = {}
    for name in (sent.keys() & held.keys()) - bad:
        if not _same(sent[name], held[name]):
            kind, version = _difference(name, sent, held, history, rounding)
            if version is not None:
                stale[name] = version
            else:
                faults.append(SyncFault(kind, name, None, _detail(kind, sent[name], held[name])))
    unknown = any(f.kind == "different" for f in faults)
    faults += _stale_faults(stale, unknown, sent, held, history, rounding)
    faults.sort(key=lambda f: (f.tensor is not None, f.tensor or ""))
    return SyncReport(all(f.kind == "rounding" for f in faults), len(sent), tuple(faults))


def _slices(state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        if tensor.dim() < 3:
            yield name, tensor
        else:
            yield from ((f"{name}[{i}]", part) for i, part in enumerate(tensor))


def _fingerprint(tensor: Tensor, tied: str | None) -> Fingerprint:
    flat = tensor.detach().contiguous().reshape(-1)
    total, square, largest = 0, 0.0, 0.0
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        place = torch.arange(start, start + len(part), device=flat.device)
        bits = _bits(part).long()
        mixed = (bits + 1) * (place * 0x9E3779B1 + 0x85EBCA6B)  # int64 that wraps around
        total += int((mixed ^ (mixed >> 29)).sum())
        size = _double(part).abs()
        square, largest = square + float(size.square().sum()), max(largest, float(size.max()))
    count = min(SAMPLES, len(flat))
    chosen = torch.arange(count, device=flat.device) * len(flat) // max(count, 1)
    return Fingerprint(
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        hash=total % (1 << 64),
        norm=math.sqrt(square),
        largest=largest,
        samples=tuple(_double(_bits(flat)[chosen].view(flat.dtype)).tolist()),
        tied=tied,
    )


def _bits(x: Tensor) -> Tensor:
    """The same memory as integers: not every device indexes and compares every format."""
    return x.view(_BITS[x.element_size()])


def _double(x: Tensor) -> Tensor:
    """Through float32, because float8 has no cast to float64 on every device."""
    return x.double() if x.element_size() >= 4 else x.float().double()


def _same(a: Fingerprint, b: Fingerprint) -> bool:
    return (a.shape, a.dtype, a.hash) == (b.shape, b.dtype, b.hash)


def _by_name(sent: Fingerprints, held: Fingerprints, history) -> list[SyncFault]:
    """Faults that names and shapes already show. A tie that only one side has is none."""
    faults = []
    for name in sent.keys() - held.keys():
        if sent[name].tied not in held:
            detail = "the trainer sent it, the sampler has no tensor of that name"
            faults.append(SyncFault("missing", name, None, detail))
    for name in held.keys() - sent.keys():
        faults += _unexpected(name, held, sent, history)
    for name in sent.keys() & held.keys():
        if sent[name].shape != held[name].shape:
            detail = f"sent {sent[name].shape}, held {held[name].shape}"
            faults.append(SyncFault("shape", name, None, detail))
    return faults


def _unexpected(name: str, held: Fingerprints, sent: Fingerprints, history) -> list[SyncFault]:
    """Of a name that was not sent: nothing if it is a copy of what was, else one fault."""
    if held[name].tied in sent or any(_same(x, held[name]) for x in sent.values()):
        return []
    for version in reversed(range(len(history))):
        for other, old in history[version].items():
            if _same(old, held[name]):
                detail = f"a copy of {other} as it was in version {version}; only {other} was sent"
                return [SyncFault("tied", name, version, detail)]
    detail = "the sampler has it, the trainer sent no tensor of that name"
    return [SyncFault("unexpected", name, None, detail)]


def _difference(name, sent, held, history, rounding) -> tuple[str, int | None]:
    """What a held tensor is that is not bit for bit the one sent: (kind, version)."""
    candidates = [(v, old[name]) for v, old in enumerate(history) if name in old]
    for version, old in reversed(candidates):
        if _same(old, held[name]):
            return "old version", version
    if _within_rounding(sent[name], held[name], rounding):
        return "rounding", None
    for version, old in reversed(candidates):
        if _within_rounding(old, held[name], rounding):
            return "old version", version
    return "different", None


def _within_rounding(a: Fingerprint, b: Fingerprint, rounding: torch.dtype | None) -> bool:
    """Whether all sampled elements differ by at most one unit in the last place."""
    info = [torch.finfo(getattr(torch, x.dtype)) for x in (a, b) if "float" in x.dtype]
    if rounding is not None:
        info = [torch.finfo(rounding)]
    if a.shape != b.shape or not info or not math.isfinite(a.norm + b.norm):
        return False
    coarse = max(info, key=lambda i: i.eps)
    # Where the format has run out of exponents its steps are equal; a scale maps the largest
    # element to the largest number, as block-scaled formats do.
    largest, norm = max(a.largest, b.largest), max(a.norm, b.norm)
    least = coarse.smallest_normal * coarse.eps / coarse.max * largest
    if not abs(a.norm - b.norm) <= coarse.eps * norm + least * math.sqrt(math.prod(a.shape)):
        return False
    return all(
        x == y or abs(x - y) <= max(least, coarse.eps * _power_of_two(max(abs(x), abs(y))))
        for x, y in zip(a.samples, b.samples, strict=True)
    )


def _power_of_two(x: float) -> float:
    """The largest power of two that is not above x; NaN of what is not finite."""
    return math.ldexp(0.5, math.frexp(x)[1]) if math.isfinite(x) else math.nan


def _detail(kind: str, sent: Fingerprint, held: Fingerprint) -> str:
    gap = max((abs(x - y) for x, y in zip(sent.samples, held.samples, strict=True)), default=0.0)
    what = "within one unit in the last place" if kind == "rounding" else "not a version we know"
    return (
        f"{what}: largest difference {gap:.2g} in {len(sent.samples)} elements, "
        f"norm {sent.norm:.6g} ({sent.dtype}) sent, {held.norm:.6g} ({held.dtype}) held"
    )


def _stale_faults(stale, unknown, sent, held, history, rounding) -> list[SyncFault]:
    """One fault for the whole sync if nothing newer is held; and one for each older tensor."""
    if not stale:
        return []
    newest, faults = max(stale.values()), []
    others = sent.keys() - stale
    if not unknown and not any(_arrived(n, sent, held, history[newest], rounding) for n in others):
        behind = len(history) - newest
        where = (
            "the one before: the last push did not arrive"
            if behind == 1
            else f"{behind} pushes back: the sync stopped there, or went back to it"
        )
        detail = f"nothing is newer than version {newest}, {where}"
        faults.append(SyncFault("old version", None, newest, detail))
        stale = {n: v for n, v in stale.items() if not _same(history[v][n], history[newest][n])}
    for name, version in stale.items():
        tie = sent[name].tied
        kind, detail = "never sent", f"still version {version}; version {len(history)} was sent"
        if tie in held and tie not in stale:
            kind = "tied"
            detail = f"tied to {tie} in the trainer; that arrived, this is still version {version}"
        faults.append(SyncFault(kind, name, version, detail))
    return faults


def _arrived(name, sent, held, old, rounding) -> bool:
    """Whether the sampler's tensor is the new version and cannot be the old one."""
    if name not in held or name not in old or _same(sent[name], old[name]):
        return False
    if _same(sent[name], held[name]):
        return True
    new, before = (_within_rounding(x[name], held[name], rounding) for x in (sent, old))
    return new and not before


@dataclass(frozen=True)
class ControlVerdict:
    """`verdict`: "convicted", "suspected", "cleared" or "insufficient evidence", and the `reason`.

    `trend`: z of the Mann-Kendall trend of the signal in the lr = 0 run; `excess`: z of the
    rank-sum test that the live run lies higher (None without one); `floor`: median of the signal
    in the lr = 0 run, what engines that hold the same weights differ by.
    """

    verdict: Literal["convicted", "suspected", "cleared", "insufficient evidence"]
    reason: str
    trend: float
    excess: float | None
    floor: float


def lr_zero_control(
    rows: Sequence[Mapping[str, float]],
    live_rows: Sequence[Mapping[str, float]] | None = None,
    *,
    signal: str = "logp_gap",
    z: float = 2.58,
    least: int = 8,
) -> ControlVerdict:
    """Judge the weight sync by a run at learning rate 0, and a live run to compare with.

    At lr = 0 every version of the weights is the same. Whatever gap is left is kernels and
    precision, and it must not grow with the steps: if it does, the sync itself changes weights
    (convicted). If it does not, but the live run lies above it, the gap comes with the updates:
    pushes that do not arrive, staleness, or a policy that has become harder to sample (suspected:
    compare fingerprints). Otherwise the sync is cleared.

    What it cannot see: a tensor that is wrong from the first load on, in both runs alike.

    rows, live_rows: logged rows, oldest first, with `signal` (any gap between trainer and
    sampler; rows without it are passed over) and "learning_rate". z: one-sided threshold of both
    rank tests, 2.58 is p = .005. Fewer than `least` values give "insufficient evidence". Raises
    `ValueError` if a row of `rows` has a learning rate other than 0 or an `update_norm` above 0.
    """
    for row in rows:
        if row.get("learning_rate", 0) != 0 or row.get("update_norm", 0) > 0:
            raise ValueError(f"rows: step {row.get('step')} has updated weights; lr must be 0")
    gap, live = _values(rows, signal), _values(live_rows or (), signal)
    floor = statistics.median(gap) if gap else math.nan
    if len(gap) < least or (live_rows is not None and len(live) < least):
        few = f"{len(gap)} and {len(live)} values of {signal}, expected {least} or more of each"
        return ControlVerdict("insufficient evidence", few, math.nan, None, floor)
    trend = _trend(gap)
    excess = _excess(live, gap) if live_rows is not None else None
    if trend > z:
        verdict, reason = "convicted", "grows at learning rate 0: the sync changes weights"
    elif excess is not None and excess > z:
        verdict, reason = "suspected", "is flat at learning rate 0, and higher with updates"
    else:
        verdict, reason = "cleared", "does not grow at learning rate 0"
    return ControlVerdict(verdict, f"{signal} {reason}", trend, excess, floor)


def _values(rows: Sequence[Mapping[str, float]], signal: str) -> list[float]:
    values = [float(row[signal]) for row in rows if signal in row]
    return [value for value in values if not math.isnan(value)]


def _sign(x: float) -> int:
    return (x > 0) - (x < 0)


def _trend(values: Sequence[float]) -> float:
    """z of the Mann-Kendall test, corrected for ties; 0 if all values are equal."""
    n = len(values)
    s = sum(_sign(values[j] - values[i]) for i in range(n) for j in range(i + 1, n))
    ties = [values.count(v) for v in set(values)]
    variance = n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)
    return (s - _sign(s)) / math.sqrt(variance / 18) if variance else 0.0


def _excess(a: Sequence[float], b: Sequence[float]) -> float:
    """z of the rank-sum test that `a` lies above `b`, corrected for ties; 0 if all are equal."""
    n, m, both = len(a), len(b), [*a, *b]
    u = sum(_sign(x - y) for x in a for y in b) / 2
    ties = sum(t**3 - t for t in (both.count(v) for v in set(both)))
    variance = n * m / 12 * (n + m + 1 - ties / ((n + m) * (n + m - 1)))
    return u / math.sqrt(variance) if variance > 0 else 0.0
