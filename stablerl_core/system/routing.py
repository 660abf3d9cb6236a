"""Keep Routing: which experts served each token while sampling, and the same ones in training.

The experts are recorded in the pass that samples and enforced in the passes that train, never
the other way round. What is replayed is the choice; the weights of the chosen experts are
computed anew by the model's own router, so it keeps its gradient. R3 (arXiv 2510.11370) replays
the sampler's record, R2 (arXiv 2512.01374) the trainer's own from the start of the step: the
same functions with another record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

COMPACT = (torch.uint8, torch.int16)
TOPK = (torch.topk, Tensor.topk)


@dataclass(frozen=True, eq=False)
class RoutingRecord:
    """Experts of B rows: `indices` (B, S, L, k) uint8 or int16, `mask` (B, S) bool.

    S counts the columns that were fed to the model: prompt and completion without its last
    token, which was sampled but not read. L counts MoE layers, dense ones left out. The order
    of the k experts is the router's. Where `mask` is False nothing is known, and a replay leaves
    the router its own choice.

    `record[rows, columns, layers]` takes a part, as on a tensor, with slices or index tensors.
    Raises `ValueError` for shapes and dtypes that do not fit; `RoutingRecord.of` converts.
    """

    indices: Tensor
    mask: Tensor

    def __post_init__(self):
        shape, mask = tuple(self.indices.shape), tuple(self.mask.shape)
        if len(shape) != 4 or self.indices.dtype not in COMPACT:
            raise ValueError(
                f"indices has shape {shape} and dtype {self.indices.dtype}; "
                "expected (B, S, L, k) uint8 or int16, as RoutingRecord.of makes them"
            )
        if mask != shape[:2] or self.mask.dtype != torch.bool:
            raise ValueError(
                f"mask has shape {mask} and dtype {self.mask.dtype}; expected bool {shape[:2]}"
            )

    @classmethod
    def of(cls, indices: Tensor, mask: Tensor | None = None) -> RoutingRecord:
        """A record from expert ids (B, S, L, k) of any integer dtype; `mask` None = all tokens."""
        if indices.is_floating_point() or indices.dim() != 4:
            raise ValueError(
                f"indices has shape {tuple(indices.shape)} and dtype {indices.dtype}; "
                "expected integers (B, S, L, k)"
            )
        low, high = (int(x) for x in indices.aminmax()) if indices.numel() else (0, 0)
        if low < 0 or high > torch.iinfo(torch.int16).max:
            raise ValueError(f"indices holds {low} to {high}; expected expert ids from 0 to 32767")
        if indices.dtype not in COMPACT:
            indices = indices.to(_compact_dtype(high + 1))
        if mask is None:
            mask = torch.ones(indices.shape[:2], dtype=torch.bool, device=indices.device)
        return cls(indices, mask.bool())

    @classmethod
    def joined(cls, parts: Sequence[RoutingRecord]) -> RoutingRecord:
        """Records of the same rows as one, column after column.

        Scored prompts that G completions share: `joined([prompts[owner], completions])`, `owner`
        (B,) the prompt of each row. Raises `ValueError` for no parts or other rows.
        """
        rows = [len(part.mask) for part in parts]
        if len(set(rows)) != 1:
            raise ValueError(
                f"parts have {rows or 'no'} rows; one record needs the same rows in each. Where "
                "rows share a prompt or leave the batch, pick them first: part[rows]"
            )
        return cls(torch.cat([p.indices for p in parts], 1), torch.cat([p.mask for p in parts], 1))

    @property
    def bytes_per_token(self) -> int:
        """L · k · bytes of one id."""
        return self.indices.shape[2] * self.indices.shape[3] * self.indices.element_size()

    def __getitem__(self, key) -> RoutingRecord:
        key = key if isinstance(key, tuple) else (key,)
        if len(key) > 3 or any(isinstance(part, int) for part in key):
            raise ValueError(f"record[{key}]: expected up to three slices or index tensors")
        return RoutingRecord(self.indices[key], self.mask[key[:2]])

    def relayout(self, mask: Tensor) -> RoutingRecord:
        """The same tokens in the same order where `mask` (B', S') is True: other padding, packing.

        Left padding becomes right padding, and `relayout(torch.ones(1, n, dtype=torch.bool))`
        packs all n tokens into one row. Raises `ValueError` where the tokens do not fit.
        """
        mask = mask.bool()
        ours, theirs = self.mask.sum(1).tolist(), mask.sum(1).tolist()
        if sum(ours) != sum(theirs) or (len(ours) == len(theirs) and ours != theirs):
            raise ValueError(
                f"mask {tuple(mask.shape)} has {theirs} tokens in its rows, the record {ours}"
            )
        indices = self.indices.new_zeros(*mask.shape, *self.indices.shape[2:])
        indices[mask] = self.indices[self.mask]
        return RoutingRecord(indices, mask)

    def save(self, path: str | Path) -> None:
        """Write a safetensors file."""
        tensors = {"indices": self.indices.contiguous(), "mask": self.mask.contiguous()}
        save_file(tensors, path, metadata={"format": "routing record 1"})

    @classmethod
    def load(cls, path: str | Path) -> RoutingRecord:
        """Read what `save` wrote; `ValueError` for a file that holds something else."""
        tensors = load_file(path)
        if set(tensors) != {"indices", "mask"}:
            raise ValueError(f"{path} holds {sorted(tensors)}; expected indices and mask")
        return cls(**tensors)


def _compact_dtype(experts: int) -> torch.dtype:
    return torch.uint8 if experts <= 256 else torch.int16


class Recording:
    """What `record_routing` collects: `parts`, one `RoutingRecord` for each forward pass."""

    def __init__(self, routers: dict[str, nn.Module]):
        self._routers = routers
        self._dtype = _compact_dtype(max(map(_num_experts, routers.values())))
        self._passes: list[tuple[tuple[int, int], Tensor | None, Tensor]] = []
        self._open: _Heard | None = None

    @property
    def parts(self) -> list[RoutingRecord]:
        """One record a forward pass, in order: (rows, columns fed, L, k)."""
        return [
            RoutingRecord.of(ids.unflatten(0, shape), mask) for shape, mask, ids in self._passes
        ]

    def record(self) -> RoutingRecord:
        """All passes as one record, column after column: a prompt and then its decoded tokens.

        The mask is what `attention_mask` said when a column was fed. Raises `ValueError` without
        a pass, and when the rows changed between passes: then the caller picks from `parts`.
        """
        return RoutingRecord.joined(self.parts)

    def _begin(self, _, args, kwargs) -> None:
        shape, mask = _fed(args, kwargs), (*args[1:2], kwargs.get("attention_mask"))[0]
        known = isinstance(mask, Tensor) and mask.dim() == 2
        # `ne` copies: a view would keep the whole attention mask of every decoded token alive.
        mask = mask[:, -shape[1] :].ne(0) if known else None
        self._open = _Heard(shape, mask, [None] * len(self._routers), [0] * len(self._routers))

    def _listen(self, layer: int, router: nn.Module, _, output) -> None:
        if self._open is not None:  # None in the re-run of a checkpointed layer
            self._open.ids[layer] = _expert_ids(router, output)
            self._open.calls[layer] += 1

    def _end(self, *_) -> None:
        heard, self._open = self._open, None
        _check_calls(heard.calls, self._routers)
        ids = torch.stack(heard.ids, 1).to(self._dtype)
        self._passes.append((heard.shape, heard.mask, ids))


@dataclass
class _Heard:
    """The pass that is being recorded: what was fed, and by layer the ids and number of calls."""

    shape: tuple[int, int]
    mask: Tensor | None
    ids: list[Tensor | None]
    calls: list[int]


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Recording]:
    """Record the experts that every router of `model` chooses: a prompt pass, decoding, scoring.

        with record_routing(model) as recording:
            model.generate(ids, attention_mask=mask, max_new_tokens=8)
        record = recording.record()

    `model` is the module whose forward is called, of any Hugging Face MoE family whose router is
    a module that returns expert ids. Greedy or sampled `generate` works; beam search and
    assisted decoding reorder or drop what they fed, so their columns are not those of the
    result. Re-runs of gradient checkpointing are not recorded. Raises `ValueError` for a model
    without routers, and for a pass in which a router did not run exactly once.
    """
    routers = _routers(model)
    recording = Recording(routers)
    handles = [model.register_forward_pre_hook(recording._begin, with_kwargs=True)]
    for layer, router in enumerate(routers.values()):
        handles.append(router.register_forward_hook(partial(recording._listen, layer)))
    handles.append(model.register_forward_hook(recording._end))
    try:
        yield recording
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replay_routing(
    model: nn.Module, record: RoutingRecord | Sequence[RoutingRecord]
) -> Iterator[None]:
    """Make every router of `model` choose the experts of `record`, with gates of its own logits.

    Inside each router the indices of its top-k are replaced; all that follows (softmax over the
    chosen, sigmoid, renormalisation, scaling) is the family's own code on current logits:
    g_i = I_i exp(s_i) / Σ_j I_j exp(s_j) for a softmax router, I from the record
    (arXiv 2510.11370). Columns are used in order, once: a forward of (B, n) takes the next n
    columns, so one record serves one pass over all columns or a prompt pass and decoding.

        with replay_routing(model, record):
            logp = ...          # also in the passes for old_logp and ref_logp
        (loss of logp).backward()

    A list of records is used one after the other; a forward never spans two. That serves passes
    over different rows, such as distinct prompts first and then all their completions:
    `[record[first_of_each_prompt, :S], record[:, S:]]`. The gradient may be taken inside or
    outside the block, with transformers' gradient checkpointing on or off: each re-run gets the
    experts of the pass it repeats. An auxiliary balancing loss still reads the current logits.

    Raises `ValueError` when the record does not fit the model (layers, k, ids), when a forward
    has other rows or more columns than are left, when a router did not run exactly once in a
    forward, and at the end of the block when columns are left.
    """
    records = [record] if isinstance(record, RoutingRecord) else list(record)
    replay = _Replay(model, records)
    with replay.patched():
        yield
    replay.check_used_up()


@dataclass
class _Pass:
    """The experts of one forward pass of N tokens: `chosen` (L, N, k) compact; `known` (N,), None
    where all are; `calls` of each layer so far."""

    chosen: Tensor
    known: Tensor | None
    calls: list[int]


class _Replay:
    """Hands out columns pass by pass, and keeps each checkpointed layer with its own pass."""

    def __init__(self, model: nn.Module, records: list[RoutingRecord]):
        self.model, self.routers = model, _routers(model)
        for part in records:
            _check_fits(part, self.routers)
        self.records = [part for part in records if part.mask.shape[1]]
        self.part = self.column = 0
        self.open: _Pass | None = None

    @contextmanager
    def patched(self):
        if any(isinstance(router.forward, _Replayed) for router in self.routers.values()):
            raise ValueError("model already replays a record; close that block first")
        handles = [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end),
        ]
        name = "_gradient_checkpointing_func"  # transformers calls it with a layer's forward
        layers = [m for m in self.model.modules() if getattr(m, "gradient_checkpointing", False)]
        layers = [m for m in layers if name in m.__dict__]
        try:
            with self._routers_patched(), _replaced(layers, name, lambda m, f: self._bound(f)):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _routers_patched(self):
        layer = {router: i for i, router in enumerate(self.routers.values())}

        def replayed(router, forward):
            own = forward.forward if isinstance(forward, _Replayed) else forward
            return _Replayed(self, layer[router], router, own)

        return _replaced(layer, "forward", replayed)

    def _begin(self, _, args, kwargs) -> None:
        rows, columns = _fed(args, kwargs)
        self.open = None
        left = self.records[self.part] if self.part < len(self.records) else None
        total = 0 if left is None else left.mask.shape[1]
        if left is None or rows != len(left.mask) or self.column + columns > total:
            raise ValueError(
                f"this forward feeds {rows} rows × {columns} columns, but {self._state()}. "
                "A completion's last token is sampled and not fed: leave it out"
            )
        part = left[:, self.column : self.column + columns]
        self.column += columns
        if self.column == total:
            self.part, self.column = self.part + 1, 0
        chosen = part.indices.flatten(0, 1).transpose(0, 1)
        known = None if bool(part.mask.all()) else part.mask.flatten()
        self.open = _Pass(chosen, known, [0] * len(self.routers))

    def _end(self, _, args, output) -> None:
        _check_calls(self.open.calls, self.routers)
        self.open = None

    def _bound(self, checkpoint: Callable) -> Callable:
        """A checkpoint function whose re-run, whenever it comes, sees the pass of its first run."""

        def run(layer, *args, **kwargs):
            serving = self.open

            def first_and_again(*inner, **named):
                with self._serving(serving):
                    return layer(*inner, **named)

            return checkpoint(first_and_again, *args, **kwargs)

        return run

    @contextmanager
    def _serving(self, serving: _Pass | None):
        before, self.open = self.open, serving
        # A backward pass may come when this block is closed, or inside the next one.
        ours = all(getattr(r.forward, "replay", None) is self for r in self.routers.values())
        with nullcontext() if ours else self._routers_patched():
            try:
                yield
            finally:
                self.open = before

    def _state(self) -> str:
        if self.part == len(self.records):
            return f"all {len(self.records)} records are used up in each of {self._layers()}"
        rows, columns = self.records[self.part].mask.shape
        return (
            f"record {self.part} has {rows} rows × {columns} columns, of which {self.column} "
            f"are used in each of {self._layers()}"
        )

    def _layers(self) -> str:
        names = list(self.routers)
        return f"{len(names)} layers ({names[0]} to {names[-1]})"

    def check_used_up(self) -> None:
        if self.part < len(self.records):
            raise ValueError(f"the record is not used up: {self._state()}")


class _Replayed:
    """Stands for a router's forward while a record is replayed."""

    def __init__(self, replay: _Replay, layer: int, router: nn.Module, forward: Callable):
        self.replay, self.layer, self.router, self.forward = replay, layer, router, forward

    def __call__(self, *args, **kwargs):
        serving = self.replay.open
        if serving is None:
            raise ValueError(
                f"layer {self.layer} ({type(self.router).__name__}) ran outside a forward of the "
                "model given to replay_routing: give the module whose forward you call, and use "
                "transformers' own gradient checkpointing"
            )
        serving.calls[self.layer] += 1
        device = next(self.router.parameters()).device
        chosen = serving.chosen[self.layer].to(device, torch.long)
        known = None if serving.known is None else serving.known.to(device)
        with _Choose(self.router, chosen, known) as choose:
            output = self.forward(*args, **kwargs)
        ids = _expert_ids(self.router, output)
        if choose.ids is None or not (ids is choose.ids or torch.equal(ids, choose.ids)):
            raise ValueError(
                f"layer {self.layer} ({type(self.router).__name__}) does not choose its experts "
                "by one top-k over (tokens, experts); its routing cannot be replayed"
            )
        return output


class _Choose(TorchFunctionMode):
    """Replaces the indices of a router's top-k, and reads their values from the same scores.

    `ids` is what the top-k returned. A router that first narrows to some groups of experts
    (`num_group`, `topk_group`) is made to keep the groups of the recorded ones.
    """

    def __init__(self, router: nn.Module, chosen: Tensor, known: Tensor | None):
        super().__init__()
        self.chosen, self.known, self.ids = chosen, known, None
        self.experts = _num_experts(router)
        self.groups = getattr(router, "num_group", None)
        self.kept_groups = getattr(router, "topk_group", None)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func not in TOPK:
            return func(*args, **kwargs)
        scores, k = args[0], kwargs.get("k", args[1] if len(args) > 1 else None)
        if scores.dim() == 2 and (scores.shape[1], k) == (self.experts, self.chosen.shape[-1]):
            return self._experts(func, scores, k)
        if scores.dim() == 2 and (scores.shape[1], k) == (self.groups, self.kept_groups):
            groups = self.chosen // (self.experts // self.groups)
            keep = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, groups, True)
            if self.known is not None:
                keep &= self.known[:, None]
            args = (scores.masked_fill(keep, torch.inf), *args[1:])
        return func(*args, **kwargs)

    def _experts(self, func, scores: Tensor, k: int):
        if len(scores) != len(self.chosen):
            raise ValueError(f"{len(scores)} tokens are routed, the record has {len(self.chosen)}")
        self.ids = self.chosen
        if self.known is not None:
            own = func(scores, k, dim=-1).indices
            self.ids = torch.where(self.known[:, None], self.chosen, own)
        return torch.return_types.topk((scores.gather(-1, self.ids), self.ids))


@contextmanager
def _replaced(modules, name: str, make: Callable):
    """Set attribute `name` of each module to `make(module, its value)`; put all back at the end."""
    before = [(module, module.__dict__.get(name), getattr(module, name)) for module in modules]
    made = [(module, make(module, value)) for module, _, value in before]
    try:
        for module, new in made:
            setattr(module, name, new)
        yield
    finally:
        for module, own, _ in before:
            if own is None:
                module.__dict__.pop(name, None)
            else:
                setattr(module, name, own)


def _routers(model: nn.Module) -> dict[str, nn.Module]:
    """Router modules by name, in the order of the layers."""
    found = {}
    for name, module in model.named_modules():
        kind = type(module).__name__.lower()
        if kind.endswith("router") or (kind.endswith("gate") and hasattr(module, "top_k")):
            found[name] = module
    if not found:
        raise ValueError(f"model is {type(model).__name__}, which has no MoE router")
    return found


def _num_experts(router: nn.Module) -> int:
    for name in ("num_experts", "n_routed_experts"):
        if isinstance(getattr(router, name, None), int):
            return getattr(router, name)
    return len(router.weight)


def _expert_ids(router: nn.Module, output) -> Tensor:
    """The integer tensor (tokens, k) among what a router returns."""
    outputs = output if isinstance(output, tuple) else (output,)
    ids = [o for o in outputs if isinstance(o, Tensor) and not o.is_floating_point()]
    if len(ids) != 1 or ids[0].dim() != 2:
        raise ValueError(f"{type(router).__name__} does not return expert ids (tokens, k)")
    return ids[0]


def _fed(args: tuple, kwargs: dict) -> tuple[int, int]:
    """Rows and columns that a forward is given."""
    for tensor in (*args[:1], kwargs.get("input_ids"), kwargs.get("inputs_embeds")):
        if tensor is not None:
            return tuple(tensor.shape[:2])
    raise ValueError("the forward is given neither input_ids nor inputs_embeds")


def _check_calls(calls: list[int], routers: dict[str, nn.Module]) -> None:
    for layer, (name, count) in enumerate(zip(routers, calls, strict=True)):
        if count != 1:
            raise ValueError(
                f"layer {layer} ({name}) ran {count} times in one forward; expected once. "
                "A fused kernel or a shared layer goes round the router module"
            )


def _check_fits(record: RoutingRecord, routers: dict[str, nn.Module]) -> None:
    """Raise `ValueError` for a record of another model, or with tokens that were never recorded."""
    layers, k = record.indices.shape[2:]
    widths = {getattr(router, "top_k", k) for router in routers.values()}
    if layers != len(routers) or widths != {k}:
        raise ValueError(
            f"record has {layers} layers with {k} experts a token, the model {len(routers)} with "
            f"{sorted(widths)}; dense layers have no record"
        )
    known = record.indices[record.mask]
    experts = min(_num_experts(router) for router in routers.values())
    if known.numel() and int(known.max()) >= experts:
        raise ValueError(f"record names expert {int(known.max())}, the model has {experts}")
    ordered = known.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
    if bool(twice.any()):
        raise ValueError(
            f"record names one expert twice in {int(twice.sum())} of {twice.numel()} choices, "
            f"first in layer {int(twice.nonzero()[0, 1])}: tokens that were never recorded? "
            "Their mask must be False"
        )
