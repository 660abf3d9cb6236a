"""Every operation of a forward and backward pass, and where its first NaN or inf comes from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Fresh memory holds what was there before; that is no result, and no cause of one.
UNINITIALISED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
OVERWRITING = ("copy_", "fill_", "zero_", "normal_", "uniform_")  # their first argument


@dataclass(frozen=True)
class Operation:
    """One operation whose result was not finite, though what it was given was.

    `module` is the name of the innermost module that called it, or whose forward it is the
    backward of; "(model)" the model itself, "(loss)" what lies outside. `operation` is torch's
    name of it, in the backward after that of the autograd node: "DivBackward0: aten.div".
    `phase` is forward or backward, `value` nan or inf. `source` is "operation" if it made the
    value, or else which parameter, buffer, entry of the batch or other tensor brought it.
    `shape` is that of the result, `index` of its first entry that is not finite, and `sequence`
    and `token` what that entry belongs to where the shape says so.
    """

    module: str
    operation: str
    phase: str
    value: str
    source: str
    shape: tuple[int, ...]
    index: tuple[int, ...]
    sequence: int | None = None
    token: int | None = None

    @property
    def place(self) -> tuple[str, str, str, str]:
        """What two runs have to share to have the same fault."""
        return self.module, self.operation, self.phase, self.source


@dataclass(frozen=True)
class _Chain:
    """`first` made a value that is not finite, `nan` made a NaN of it; `order` in time."""

    first: Operation
    nan: Operation | None
    order: int
    deliberate: bool


def is_finite(tensor: Tensor) -> bool:
    if tensor.dtype.itemsize == 1:  # float8 has no isfinite
        tensor = tensor.float()
    return bool(torch.isfinite(tensor).all())


def _has_nan(tensor: Tensor) -> bool:
    return bool(torch.isnan(tensor.float() if tensor.dtype.itemsize == 1 else tensor).any())


def _first_bad(tensor: Tensor) -> tuple[int, ...]:
    wide = tensor.float() if tensor.dtype.itemsize == 1 else tensor
    return tuple((~torch.isfinite(wide)).nonzero()[0].tolist())


def _floats(tree: object) -> list[Tensor]:
    leaves = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.layout == torch.strided]
    return [x for x in leaves if (x.is_floating_point() or x.is_complex()) and x.numel()]


def _key(tensor: Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.untyped_storage().data_ptr()


class Trace(TorchDispatchMode):
    """While entered, follows values that are not finite from operation to operation.

    `size` (B, T) of the batch lets entries be told apart as sequences and tokens; `names` of
    tensors that exist before, by `_key`. Chains are followed by storage, so views and in-place
    operations are seen through. An infinity that was written on purpose, as in an attention
    mask, is followed too, but gives way to any other cause.
    """

    def __init__(self, model: nn.Module, size: tuple[int, int], given: Mapping[str, Tensor]):
        super().__init__()
        self.model, self.size = model, size
        self.names = {_key(t): name for name, t in given.items() if _floats(t)}
        shapes = {tuple(p.shape) for p in model.parameters()}
        self.weights = shapes | {shape[::-1] for shape in shapes}  # of these, rows are no sequences
        self.chains: dict[tuple, _Chain] = {}
        self.nans: list[Operation] = []  # every one that made a NaN of what was none
        self._order, self._fresh = 0, set()
        self._stack: list[str] = []
        self._entered: list[tuple[str, int]] = []
        self._spans: list[tuple[int, int, str]] = []

    def chain_of(self, tensor: Tensor) -> _Chain | None:
        """Where a NaN or inf in `tensor` comes from."""
        return self.chains.get(_key(tensor))

    def unseen(self, tensor: Tensor) -> _Chain:
        """A chain for what no operation was seen to make: it ran in compiled code, or elsewhere."""
        where = ("(unseen)", "(unseen)", "unseen", "nan" if _has_nan(tensor) else "inf")
        made = Operation(*where, "operation", tuple(tensor.shape), _first_bad(tensor))
        return _Chain(made, made if made.value == "nan" else None, 2**62, False)

    @contextmanager
    def modules(self) -> Iterator[None]:
        """Within, know which module of the model is running."""
        handles = []
        for name, module in self.model.named_modules():
            label = name or "(model)"
            handles.append(module.register_forward_pre_hook(self._enter(label), prepend=True))
            handles.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, label: str):
        def hook(module, args) -> None:
            self._stack.append(label)
            self._entered.append((label, torch.autograd._get_sequence_nr()))

        return hook

    def _leave(self, module, args, output) -> None:
        self._stack.pop()
        label, start = self._entered.pop()
        self._spans.append((start, torch.autograd._get_sequence_nr(), label))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        given = _floats((args, kwargs))
        read = _floats((args[1:], kwargs)) if name in OVERWRITING else given
        read = [t for t in read if _key(t) not in self._fresh and not is_finite(t)]
        # Before the operation: one in place would overwrite what it was given.
        bad = [(_has_nan(t), self.chain_of(t) or self._brought(func, t)) for t in read]
        out = func(*args, **kwargs)
        for result in _floats(out):
            if name in UNINITIALISED:
                self._fresh.add(_key(result))
                self.chains.pop(_key(result), None)
            else:
                self._fresh.discard(_key(result))
                self._follow(func, (args, kwargs), given, bad, result)
        return out

    def _follow(self, func, arguments, given, bad, result: Tensor) -> None:
        key = _key(result)
        if is_finite(result):
            whole = result.numel() * result.element_size() == result.untyped_storage().nbytes()
            if whole or all(_key(t) != key for t in given):
                self.chains.pop(key, None)
            return
        nan = _has_nan(result)
        # NaN before inf, what was on purpose last, then the earliest.
        ranked = sorted(bad, key=lambda b: (not b[0], b[1].deliberate, b[1].order))
        cause = ranked[0][1] if ranked else None
        if cause is None or (cause.deliberate and nan and cause.nan is None):
            made = self._describe(func, result, "operation")
            on_purpose = not nan and any(
                isinstance(x, float) and math.isinf(x) for x in tree_leaves(arguments)
            )
            cause = _Chain(made, made if nan else None, self._next(), on_purpose)
        elif nan and cause.nan is None:
            made = self._describe(func, result, "operation")
            cause = _Chain(cause.first, made, cause.order, False)
        self.chains[key] = cause

    def _brought(self, func, tensor: Tensor) -> _Chain:
        """The beginning of a chain in a tensor that was not finite before."""
        source = self.names.get(_key(tensor), "a tensor from outside")
        found = self._describe(func, tensor, source)
        nan = found.value == "nan"
        on_purpose = not nan and tensor.numel() == 1
        chain = _Chain(found, found if nan else None, self._next(), on_purpose)
        self.chains[_key(tensor)] = chain
        return chain

    def _next(self) -> int:
        self._order += 1
        return self._order

    def _describe(self, func, tensor: Tensor, source: str) -> Operation:
        operation, phase = str(func.overloadpacket), "forward"
        module = self._stack[-1] if self._stack else "(loss)"
        if torch._C._current_graph_task_id() != -1 and not self._stack:
            node, phase = torch._C._current_autograd_node(), "backward"
            if node is not None:
                operation = f"{node.name()}: {operation}"
                module = self._module_of(node._sequence_nr())
        index = _first_bad(tensor)
        value = "nan" if _has_nan(tensor) else "inf"
        shape = tuple(tensor.shape)
        where = (None, None) if shape in self.weights else _row_and_token(shape, index, self.size)
        found = Operation(module, operation, phase, value, source, shape, index, *where)
        if value == "nan":
            self.nans.append(found)
        return found

    def _module_of(self, number: int) -> str:
        """The innermost module whose forward made the autograd node of this number."""
        spans = [(b - a, name) for a, b, name in self._spans if a <= number < b]
        return min(spans, key=lambda span: span[0])[1] if spans else "(loss)"


def _row_and_token(shape, index, size: tuple[int, int]) -> tuple[int | None, int | None]:
    """Sequence and token of an entry: (B, T, …), (B·T, …), (B, H, T, …) or (B, …)."""
    b, t = size
    if not shape or not b:
        return None, None
    if t and len(shape) > 1 and shape[:2] == (b, t):
        return index[0], index[1]
    if t and shape[0] == b * t:
        return divmod(index[0], t)
    if shape[0] != b:
        return None, None
    return index[0], index[2] if t and len(shape) == 4 and shape[2] == t else None
