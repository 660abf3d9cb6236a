"""The first NaN: which module, operation and token it comes from, and whether it comes again."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ._trace import Operation, Trace, is_finite

Batch = Mapping[str, object] | tuple | Tensor
Loss = Callable[[nn.Module, Batch], Tensor]
WIDER = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class NonfiniteReport:
    """What `find_nonfinite` found.

    `first` made the first value that is not finite of those that reached the loss, the outputs or
    a gradient; `nan` made a NaN of it (the same where it was one at once, None where an infinity
    stayed one). `reached`: "loss", "outputs", or the parameters whose gradient is not finite.
    `repeats` has the first operation of each run on the same batch, None for a run without fault.
    `replays` says by dtype whether the fault is there in that precision: "finite", "nonfinite" (in
    the same module), "elsewhere: in which module", or "not run: why". `sequences` are the rows
    that show the same fault alone, `prefix` how many of their first tokens suffice; None where not
    asked for or not found, or where the model or the loss could not take such a part of the batch:
    `not_split` says why. `hidden` are operations that made a NaN which did not become the fault:
    it was masked away, averaged away or replaced, or it has the same cause.
    """

    first: Operation | None
    nan: Operation | None
    reached: tuple[str, ...]
    repeats: tuple[Operation | None, ...]
    replays: Mapping[str, str]
    sequences: tuple[int, ...] | None
    prefix: int | None
    not_split: str | None
    hidden: tuple[Operation, ...]

    @property
    def found(self) -> bool:
        """Whether any run had a fault."""
        return self.first is not None

    @property
    def repeatable(self) -> bool | None:
        """Whether every run has the same fault; None after a single run, or without a fault."""
        if len(self.repeats) < 2 or not self.found:
            return None
        return all(r is not None and r.place == self.first.place for r in self.repeats)

    @property
    def cause(self) -> str:
        """none, given, random, precision, path or unknown: where to look first.

        given: a parameter, buffer or input was not finite before. random: not every run on the
        same batch has it, so look at kernels, dropout, races, memory. precision: every run has
        it, but not in wider numbers: an overflow or underflow. path: also in float64, so the
        batch or a formula: 0/0, the logarithm of a negative number. unknown: it was not repeated,
        or not replayed.
        """
        if not self.found:
            return "none"
        if self.first.source != "operation":
            return "given"
        if self.repeatable is None:
            return "unknown"
        if not self.repeatable:
            return "random"
        if any(found.startswith(("finite", "elsewhere")) for found in self.replays.values()):
            return "precision"
        return "path" if self.replays.get("float64") == "nonfinite" else "unknown"


def find_nonfinite(
    model: nn.Module,
    batch: Batch,
    *,
    loss: Loss | None = None,
    repeats: int = 3,
    replay: bool = True,
    bisect: bool = True,
) -> NonfiniteReport:
    """Find where the first NaN or inf of a forward and backward pass of `model` on `batch` is made.

    `batch` is what the model is called with: keyword arguments, a tuple, or one tensor; its first
    tensor has B rows, and T columns if it holds token ids. `loss(model, batch)` returns a scalar
    and should take everything that belongs to the rows from `batch`; without it the model's own
    `.loss` is taken, or a scalar it returns, or else only the forward pass is looked at.

    A fault is a NaN or inf in the loss or a gradient; without a loss, a NaN or +inf in an output
    (−inf bans a token). The same batch runs `repeats` times, then once in each wider precision
    (a copy; autocast off), then in halves: which sequence has the fault alone, and then which of
    its prefixes, so that in a causal model `prefix − 1` is the guilty token.

    A repeated fault alone does not rule out precision: an overflow repeats too. That is what
    the replays are for. Every operation is checked, which is slow: this is for one batch.
    Parameters, gradients, buffers and the CPU's random stream are afterwards as before; hooks of
    others, such as `AttentionWatch`, see all these passes. Compiled parts are not looked into, and
    a module that casts to float32 itself, as the norms of transformers do, casts in the replays.

    Raises `ValueError` for repeats < 1, a batch without a tensor, or a loss that is no scalar.
    Idea of the repeated batch: Megatron-LM's rerun state machine, which repeats a whole step.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: must be ≥ 1 (≥ 2 to see whether the fault repeats)")
    size = _size(batch)
    with _restored(model):
        runs = [_run(model, batch, loss, size) for _ in range(repeats)]
        fault = next((run for run in runs if run.first), runs[0])
        replays = {}
        if replay and fault.first:
            replays = _replays(model, batch, loss, size, fault.first)
        same = all(r.first and r.first.place == fault.first.place for r in runs if fault.first)
        part = (None, None, None)
        if bisect and fault.first and same and size[0]:
            part = _bisect(model, batch, loss, size, fault.first.place)
    return NonfiniteReport(
        first=fault.first,
        nan=fault.nan,
        reached=fault.reached,
        repeats=tuple(run.first for run in runs),
        replays=replays,
        sequences=part[0],
        prefix=part[1],
        not_split=part[2],
        hidden=fault.hidden,
    )


@dataclass(frozen=True)
class _Run:
    first: Operation | None = None
    nan: Operation | None = None
    reached: tuple[str, ...] = ()
    hidden: tuple[Operation, ...] = ()


def _run(model: nn.Module, batch: Batch, loss: Loss | None, size: tuple[int, int]) -> _Run:
    """One forward and backward pass, every operation checked."""
    given = {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    given |= {f"buffer {n}": b for n, b in model.named_buffers()}
    given |= {f"batch {n}": t for n, t in _entries(batch).items()}
    for parameter in model.parameters():
        parameter.grad = None
    trace = Trace(model, size, given)
    with torch.enable_grad(), trace.modules(), trace:
        outputs, value = _forward(model, batch, loss)
        if value is not None and value.requires_grad:
            value.backward()
    faults = _faults(model, outputs, value)
    for parameter in model.parameters():
        parameter.grad = None
    if not faults:
        return _Run(hidden=tuple(trace.nans))
    chains = [trace.chain_of(t) or trace.unseen(t) for t in faults.values()]
    chain = min(chains, key=lambda c: (c.deliberate, c.order))  # the loss before what follows it
    hidden = tuple(made for made in trace.nans if made not in (chain.first, chain.nan))
    return _Run(chain.first, chain.nan, tuple(faults), hidden)


def _forward(model, batch: Batch, loss: Loss | None) -> tuple[list[Tensor], Tensor | None]:
    """Outputs, and the loss where there is one."""
    if loss is not None:
        value = loss(model, batch)
        if not isinstance(value, Tensor) or value.numel() != 1:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss returned {got}; expected a tensor with one number")
        return [], value.reshape(())
    if isinstance(batch, Mapping):
        output = model(**batch)
    else:
        output = model(*batch) if isinstance(batch, tuple) else model(batch)
    value = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if value is None and isinstance(output, Tensor) and output.numel() == 1:
        value = output.reshape(())
    leaves = torch.utils._pytree.tree_leaves(output)
    leaves = [x for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
    return leaves, value


def _faults(model: nn.Module, outputs: list[Tensor], value: Tensor | None) -> dict[str, Tensor]:
    """What is not finite at the end, by name."""
    faults = {}
    if value is not None and not is_finite(value):
        faults["loss"] = value.detach()
    for output in outputs if value is None else []:
        if bool((output.isnan() | (output == math.inf)).any()):
            faults.setdefault("outputs", output.detach())
    for name, parameter in model.named_parameters():
        if parameter.grad is not None and not is_finite(parameter.grad):
            faults[name] = parameter.grad
    return faults


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Give the model its gradients and buffers back, and the caller the random stream."""
    grads = {p: p.grad for p in model.parameters()}
    buffers = {b: b.detach().clone() for b in model.buffers()}
    devices = sorted({p.device.index for p in grads if p.device.type == "cuda"})
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for parameter, grad in grads.items():
            parameter.grad = grad
        with torch.no_grad():
            for buffer, value in buffers.items():
                buffer.copy_(value)


# Replays ----------------------------------------------------------------------------------------


def _replays(model, batch, loss, size, fault: Operation) -> dict[str, str]:
    """Whether the fault is there in each precision wider than the narrowest of the parameters."""
    dtypes = [p.dtype for p in model.parameters() if p.is_floating_point()]
    bits = min((torch.finfo(d).bits for d in dtypes), default=16)
    kind, found = _device_of(model), {}
    for name, dtype in WIDER.items():
        if torch.finfo(dtype).bits <= bits:
            continue
        wide = copy.deepcopy(model).to(dtype)
        if hasattr(wide, "set_experts_implementation"):  # transformers: grouped_mm has no float64
            wide.set_experts_implementation("eager")
        try:
            with torch.autocast(kind, enabled=False):
                run = _run(wide, _mapped(batch, partial(_cast, dtype)), loss, size)
            found[name] = _compared(run.first, fault)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # no such kernel
            found[name] = f"not run: {str(error).splitlines()[0]}"
    return found


def _compared(found: Operation | None, fault: Operation) -> str:
    """By module: another dtype may take other operations."""
    if found is None:
        return "finite"
    if (found.module, found.phase, found.source) == (fault.module, fault.phase, fault.source):
        return "nonfinite"
    return f"elsewhere: {found.module}"


def _device_of(model: nn.Module) -> str:
    return next((p.device.type for p in model.parameters()), "cpu")


def _cast(dtype: torch.dtype, tensor: Tensor) -> Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


# Parts of a batch -------------------------------------------------------------------------------


def _entries(batch: Batch) -> dict[str, Tensor]:
    if isinstance(batch, Tensor):
        return {"0": batch}
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch)
    return {str(name): x for name, x in items if isinstance(x, Tensor)}


def _mapped(batch: Batch, change: Callable[[Tensor], Tensor]) -> Batch:
    """`batch` with every tensor changed."""

    def one(x):
        return change(x) if isinstance(x, Tensor) else x

    if isinstance(batch, Mapping):
        return {name: one(x) for name, x in batch.items()}
    return tuple(one(x) for x in batch) if isinstance(batch, tuple) else one(batch)


def _size(batch: Batch) -> tuple[int, int]:
    """(B, T) of the first tensor; T = 0 unless it holds token ids."""
    if not isinstance(batch, Mapping | tuple | Tensor):
        kind = type(batch).__name__
        raise ValueError(f"batch is a {kind}; expected a dict, a tuple or a tensor")
    entries = _entries(batch)
    if not entries:
        raise ValueError("batch holds no tensor")
    first = entries.get("input_ids", next(iter(entries.values())))
    if first.dim() == 0:
        return 0, 0
    ids = first.dim() > 1 and not first.is_floating_point() and first.dtype != torch.bool
    return len(first), first.shape[1] if ids else 0


def _part(batch: Batch, size: tuple[int, int], rows: list[int], length: int) -> Batch:
    """Some sequences, and of each its first tokens."""

    def cut(tensor: Tensor) -> Tensor:
        if tensor.dim() == 0 or len(tensor) != size[0]:
            return tensor
        if size[1] and tensor.dim() > 1 and tensor.shape[1] == size[1]:
            tensor = tensor[:, :length]
        return tensor[rows]

    return _mapped(batch, cut)


def _bisect(model, batch, loss, size, place) -> tuple[tuple | None, int | None, str | None]:
    """The rows that have the fault at `place` alone, the shortest prefix, and why there is none."""

    def fails(rows: list[int], length: int) -> bool:
        part = _part(batch, size, rows, length)
        run = _run(model, part, loss, _size(part))
        return run.first is not None and run.first.place == place

    rows, low, high = list(range(size[0])), 0, size[1]
    found = None
    try:
        while len(rows) > 1:
            halves = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            part = next((half for half in halves if fails(half, size[1])), None)
            if part is None:  # it takes sequences of both
                break
            rows = part
        found = tuple(rows)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fails(rows, middle) else (middle, high)
    except (RuntimeError, IndexError, ValueError) as error:
        return found, None, f"part of the batch does not run: {str(error).splitlines()[0]}"
    return found, high or None, None
