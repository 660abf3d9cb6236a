"""Bytes of training: what the formulas say, and what a model, a graph and a step really hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from ._sharded import local

# By formula -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes that one worker holds on its device, without activations; `host`: what it offloaded.

    `weights` and `gradients` of the model, `master` copies of the weights, `states` of the
    optimizer. `moved` is what travels between device and host in each step.
    """

    weights: float
    gradients: float
    master: float
    states: float
    host: float = 0.0
    moved: float = 0.0

    @property
    def total(self) -> float:
        """Bytes on the device."""
        return self.weights + self.gradients + self.master + self.states


def training_bytes(
    parameters: float,
    *,
    weights: torch.dtype = torch.bfloat16,
    gradients: torch.dtype | None = None,
    master: bool = True,
    states: int = 2,
    state_bits: int = 32,
    zero: int = 0,
    workers: int = 1,
    offload: bool = False,
) -> TrainingBytes:
    """What `parameters` weights cost one of N workers: mixed precision, ZeRO 0 to 3, offload.

        16-bit weights 2 + gradients 2 + float32 master 4 + Adam's two states 8 = 16 bytes each
        ZeRO-1 shards master and states, ZeRO-2 gradients too, ZeRO-3 weights too

    so 16 becomes 4 + 12/N, 2 + 14/N and 16/N. `gradients` None have the format of the weights;
    `states` numbers a weight of `state_bits` each. With `offload` master and states live in host
    memory: each step sends the worker's gradients down and its new weights up. Buffers that hold
    a gathered layer for a moment are not in it. Raises `ValueError` for zero or workers that do
    not exist. Sources: arXiv 1910.02054, §3.1 and §5; 2101.06840, §3.
    """
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: one of 0, 1, 2, 3")
    if workers < 1:
        raise ValueError(f"workers={workers}: must be ≥ 1")
    shard = [1 / workers if zero >= stage else 1.0 for stage in (3, 2, 1)]
    held = parameters * weights.itemsize * shard[0]
    grad = parameters * (gradients or weights).itemsize * shard[1]
    copies = parameters * 4 * shard[2] if master else 0.0
    state = parameters * states * state_bits / 8 * shard[2]
    if not offload:
        return TrainingBytes(held, grad, copies, state)
    down = parameters * (gradients or weights).itemsize * shard[2]
    up = parameters * weights.itemsize * shard[2]
    return TrainingBytes(held, grad, 0.0, 0.0, host=copies + state, moved=down + up)


# By measurement ---------------------------------------------------------------------------------


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> TrainingBytes:
    """What this process really holds: sharded tensors count with their local part.

    `master` are parameters of the optimizer that are none of the model's; of `states` only
    tensors with as many entries as their parameter count, so that step counters do not.
    """
    own = list(model.parameters())
    mine = {id(p) for p in own}
    groups = optimizer.param_groups if optimizer else ()
    stepped = [p for group in groups for p in group["params"]]
    others = [p for p in stepped if id(p) not in mine]
    states = [
        value
        for p in stepped
        for value in optimizer.state[p].values()
        if isinstance(value, Tensor) and value.dim() and value.numel() == p.numel()
    ]
    grads = [p.grad for p in own + others if p.grad is not None]
    return TrainingBytes(*(float(_bytes(x)) for x in (own, grads, others, states)))


def _bytes(tensors: list[Tensor]) -> int:
    return sum(local(t).nbytes for t in tensors)


@dataclass
class SavedBytes:
    """What the graph keeps for the backward pass: see `saved_bytes`.

    `nbytes` of memory that nothing else would keep. `copied` are the bytes that
    `torch.autograd.graph.save_on_cpu` would move instead: it copies each saved tensor every time
    it is saved, parameters too.
    """

    nbytes: int = 0
    copied: int = 0
    _seen: set[int] = field(default_factory=set, repr=False)


@contextmanager
def saved_bytes(model: nn.Module) -> Iterator[SavedBytes]:
    """Count what operations inside the block save for their backward pass.

    Memory that several operations save is counted once, and the model's own parameters and
    buffers are not. Inside checkpointed layers nothing is saved, only their inputs are. What the
    re-run saves during the backward pass, one layer at a time, is not in the count, and neither
    is what lives only within an operation; `peak_bytes` has both.
    """
    found = SavedBytes()
    owned = {_storage(t) for t in (*model.parameters(), *model.buffers())}

    def pack(tensor: Tensor) -> Tensor:
        storage = _storage(tensor)
        found.copied += tensor.nbytes
        if storage not in owned and storage not in found._seen:
            found._seen.add(storage)
            found.nbytes += tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _storage(tensor: Tensor) -> int:
    """An address that stays taken as long as the graph holds the tensor."""
    return local(tensor).untyped_storage().data_ptr()


@contextmanager
def checkpointed(model: nn.Module) -> Iterator[None]:
    """Keep only the inputs of each layer of a Hugging Face model; run it again for the backward.

    Transformers' own switch around `torch.utils.checkpoint` (not reentrant). Only a model in
    training mode and without a cache is checkpointed, so inside the block `model` is in training
    mode, and forwards need `use_cache=False`; take the gradient inside the block. A re-run must
    choose the same experts: it does where nothing has changed in between, and otherwise under
    `replay_routing`. Source: arXiv 1604.06174.
    """
    training = model.training
    # The first name is that of newer versions.
    on = getattr(model, "activation_checkpointing_enable", None)
    off = getattr(model, "activation_checkpointing_disable", None)
    (on or model.gradient_checkpointing_enable)({"use_reentrant": False})
    model.train()
    try:
        yield
    finally:
        (off or model.gradient_checkpointing_disable)()
        model.train(training)


def peak_bytes(model: nn.Module, step: Callable[[], object]) -> dict[str, int]:
    """The most that was held at one moment of `step`: tensors of `model`, its graph and all else.

    `parameters`, `gradients`, `activations`, `other` at that moment, and their `total`, in bytes
    on the model's device; storages as torch's own `MemTracker` sees them come and go, so also on
    a CPU. What a kernel takes for itself it does not see. Optimizer states are not tracked.
    """
    # A private module of torch, here since 2.4; nothing public counts memory on a CPU.
    from torch.distributed._tools.mem_tracker import MemTracker

    tracker = MemTracker()
    tracker.track_external(model)
    with tracker:
        step()
    device = next(model.parameters()).device
    seen = {
        str(getattr(kind, "name", kind)): size
        for kind, size in tracker.get_tracker_snapshot("peak")[device].items()
    }
    found = {"parameters": seen["PARAM"] + seen["BUFFER"], "gradients": seen["GRAD"]}
    # What the backward pass makes on the way is "temporary" to the tracker.
    found |= {"activations": seen["ACT"], "other": seen["TEMP"] + seen["OPT"] + seen["OTH"]}
    return found | {"total": seen["Total"]}
