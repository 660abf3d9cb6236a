"""Muon and MuonClip for the matrices of a model, AdamW for everything else, in one optimizer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from ._sharded import local, local_like, part_of, whole
from .newton_schulz import Triple, newton_schulz
from .qk_clip import QKClip, QKClipReport

Split = int | tuple[int, Sequence[int]]

SCALES: dict[str, Callable[[int, int], float]] = {
    "match_rms": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "none": lambda rows, columns: 1.0,
}
NOT_HIDDEN = ("embed", "wte", "wpe", "norm", "bias", "router", "conv", "lora_magnitude")
OTHERS = ("gate", "head", "score", "classifier")
FUSED_QKV = ("qkv_proj", "query_key_value", "wqkv", "qkv", "c_attn", "in_proj_weight")
GATE_AND_UP: dict[str, Split] = {"gate_up_proj": 2}
MAX_ELEMENTS = 2**27  # of the matrices that are orthogonalized at once


def uses_muon(name: str, shape: Sequence[int], adamw: Sequence[str] = ()) -> bool:
    """Whether a parameter is a hidden matrix, or a batch of them, by its dotted name and shape.

    AdamW gets vectors (also as one row or one column), embeddings, output heads, norms, biases,
    routers (`…gate.weight`, not `gate_proj`), and names that contain one of `adamw`.
    """
    parts = name.lower().split(".")
    if len(shape) not in (2, 3) or min(shape[-2:]) == 1:
        return False
    if any(word in part for part in parts for word in NOT_HIDDEN):
        return False
    if any(p in OTHERS or p.endswith(("_gate", "_head")) for p in parts):
        return False
    return parts != ["output", "weight"] and not any(word in name for word in adamw)


def fused_splits(model: nn.Module) -> dict[str, Split]:
    """Which parameters of a Hugging Face model hold several matrices, for `Muon(splits=…)`.

    By parameter name (dimension, sizes): gate and up of 3-D experts in the layout their module
    declares; query, key and value of a fused `qkv_proj`; latent and rotary key of
    `kv_a_proj_with_mqa` and, head by head, key and value of `kv_b_proj` (multi-head latent
    attention).
    """
    found: dict[str, Split] = dict(GATE_AND_UP)
    for prefix, module in model.named_modules():
        experts = getattr(module, "gate_up_proj", None)
        if isinstance(experts, Tensor) and experts.dim() == 3:
            dim = -1 if getattr(module, "is_transposed", False) else -2
            half, glued = experts.shape[dim] // 2, getattr(module, "is_concatenated", True)
            found[f"{prefix}.gate_up_proj"] = (dim, (half, half) if glued else (1, 1))
        if hasattr(module, "kv_b_proj"):
            key, value = module.qk_nope_head_dim, module.v_head_dim
            latent = (-2, (module.kv_lora_rank, module.qk_rope_head_dim))
            found[f"{prefix}.kv_a_proj_with_mqa.weight"] = latent
            found[f"{prefix}.kv_b_proj.weight"] = (-2, (key, value))
        if isinstance(getattr(module, "qkv_proj", None), nn.Module):
            config, d = module.config, module.head_dim
            q, kv = config.num_attention_heads * d, config.num_key_value_heads * d
            found[f"{prefix}.qkv_proj.weight"] = (-2, (q, kv, kv))
    return found


def update_norm_cap(update: Tensor, max_norm: float = 1.0) -> Tensor:
    """Seed 002's "MuonClip": each matrix of `update` (…, m, n) is cut to norm ‖·‖_F ≤ `max_norm`.

    MuonClip has no such step (arXiv 2507.20534, Alg. 1). After Newton-Schulz the norm is about
    .87 √min(m, n) whatever the gradient was, so a cap of 1 acts at every step and only divides
    the learning rate by that number.
    """
    norm = torch.linalg.vector_norm(update, dim=(-2, -1), keepdim=True)
    return update * (max_norm / norm.clamp(min=max_norm))


class Muon(torch.optim.Optimizer):
    """Hidden matrices by momentum and Newton-Schulz, everything else by AdamW.

    M ← μ M + (1−μ) G, N = μ M + (1−μ) G with Nesterov, O = NS(N), and with s = 0.2 √max(m, n)

        W ← (1 − η λ) W − η s O .

    Newton-Schulz does not see the factor 1−μ that the sum of the papers lacks. `params` is
    `model.named_parameters()`, or groups whose `params` are pairs (name, parameter): `uses_muon`
    decides by name which half takes a parameter, a group's own `muon` (bool) overrules it. A 3-D
    parameter is a batch of matrices, an expert each. `splits` says which parameters are several
    matrices glued together, by full name or a part of it (`gate_up_proj`): n equal parts of the
    rows, or (dimension −2 or −1, sizes), the sizes repeated until the dimension is used up;
    `fused_splits(model)` finds them. Matrices of one shape are orthogonalized as one batch. For
    sharded (DTensor, FSDP2) parameters the whole matrix is gathered, except where experts are
    sharded between each other.

    Since O does not depend on the size of the momentum, a matrix whose gradient is zero, such as
    an expert that got no token, goes on at full speed in its last direction. A parameter whose
    `.grad` is None stands still.

    `scale`: `match_rms` (s above: the learning rate and decay of AdamW fit), `original`
    (√max(1, m/n)) or `none`. `update_norm_cap` caps ‖O‖_F as seed 002 says; no paper does. `adamw`
    names further parameters that AdamW should have; `adamw_lr` and `adamw_weight_decay` default
    to the common ones. `steps`, `coefficients`, `dtype` as in `newton_schulz`.

    Raises `ValueError` for parameters without names, for a fused QKV projection without a split
    and for sizes that do not fit. Sources: K. Jordan et al., 2024 (Muon); arXiv 2502.16982
    (decay, scale).
    """

    def __init__(
        self,
        params: Iterable[tuple[str, Tensor]] | Iterable[dict[str, Any]],
        lr: float = 2e-4,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        scale: str = "match_rms",
        steps: int = 5,
        coefficients: str | Sequence[Triple] = "quintic",
        dtype: torch.dtype | None = None,
        splits: Mapping[str, Split] | None = None,
        update_norm_cap: float | None = None,
        adamw: Sequence[str] = (),
        adamw_lr: float | None = None,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        adamw_eps: float = 1e-8,
        adamw_weight_decay: float | None = None,
    ):
        self._adamw = tuple(adamw)
        self._for_adamw = {
            "lr": lr if adamw_lr is None else adamw_lr,
            "weight_decay": weight_decay if adamw_weight_decay is None else adamw_weight_decay,
        }
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "scale": scale,
            "steps": steps,
            "coefficients": coefficients,
            "dtype": dtype,
            "splits": dict(GATE_AND_UP if splits is None else splits),
            "update_norm_cap": update_norm_cap,
            "betas": tuple(adamw_betas),
            "eps": adamw_eps,
        }
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; what Muon takes of them and what AdamW takes become a group each."""
        named, options = _named(param_group["params"]), dict(param_group)
        halves = {True: [], False: []}
        for name, p in named:
            takes = options.get("muon", uses_muon(name, p.shape, self._adamw))
            halves[takes].append((name, p))
        for muon, part in halves.items():
            if part:
                own = {} if muon else self._for_adamw | {"fused": _can_fuse(part)}
                merged = own | options | {"params": part, "muon": muon}
                _check(self.defaults | merged)
                super().add_param_group(merged)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update from the gradients that are there; returns what `closure` returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            pairs = zip(group["param_names"], group["params"], strict=True)
            live = [(name, p) for name, p in pairs if p.grad is not None]
            if live:
                (self._muon_step if group["muon"] else self._adamw_step)(live, group)
        return loss

    def _muon_step(self, live: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        names, params = zip(*live, strict=True)
        grads = [local_like(p.grad, p) for p in params]
        for p in params:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [local(self.state[p]["momentum_buffer"]) for p in params]
        mu = group["momentum"]
        torch._foreach_lerp_(buffers, grads, 1 - mu)
        found = torch._foreach_lerp(grads, buffers, mu) if group["nesterov"] else buffers
        updates = [whole(u, p) for u, p in zip(found, params, strict=True)]
        if not group["nesterov"]:
            updates = [u.clone() for u in updates]
        _orthogonalize(names, updates, group)
        updates = [part_of(u, p) for u, p in zip(updates, params, strict=True)]
        weights = [local(p) for p in params]
        torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(weights, updates, alpha=-group["lr"])

    def _adamw_step(self, live: list[tuple[str, Tensor]], group: dict[str, Any]) -> None:
        params = [p for _, p in live]
        for p in params:
            if not self.state[p]:
                self.state[p]["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        fields = ("exp_avg", "exp_avg_sq")
        adamw(
            [local(p) for p in params],
            [local_like(p.grad, p) for p in params],
            *([local(self.state[p][field]) for p in params] for field in fields),
            [],
            [self.state[p]["step"] for p in params],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


class MuonClip(Muon):
    """Kimi K2's optimizer: Muon with decay and matched RMS, then QK-Clip on the new weights.

    `qk_clip` watches the model whose parameters are given; what it did at the last step is in
    `clipped`. All other arguments are those of `Muon`. No norm of an update is clipped. Source:
    arXiv 2507.20534, Alg. 1, which writes no Nesterov step: `nesterov=False` is its letter.
    """

    def __init__(self, params: Iterable, lr: float = 2e-4, *, qk_clip: QKClip, **muon: Any):
        super().__init__(params, lr, **muon)
        self.qk_clip = qk_clip
        self.clipped: QKClipReport | None = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The step of `Muon`, then that of `qk_clip`."""
        loss = super().step(closure)
        self.clipped = self.qk_clip.step()
        return loss


def _orthogonalize(names: Sequence[str], updates: list[Tensor], group: dict[str, Any]) -> None:
    """Every matrix in `updates` becomes its scaled O, in place; those of one shape as a batch."""
    batches: dict[tuple, list[Tensor]] = defaultdict(list)
    for name, update in zip(names, updates, strict=True):
        blocks = _blocks(name, update, group["splits"]) if update.numel() else ()
        for block in blocks:
            rows, columns = block.shape[-3] * block.shape[-2], block.shape[-1]
            size = SCALES[group["scale"]](rows, columns)
            shape = (min(rows, columns), max(rows, columns))
            batches[*shape, size, block.device].append(block)
    for (*_, size, _), blocks in batches.items():
        for part in _portions(blocks):
            _orthogonalize_batch(part, size, group)


def _orthogonalize_batch(blocks: list[Tensor], size: float, group: dict[str, Any]) -> None:
    wide = [_wide(block) for block in blocks]
    options = {name: group[name] for name in ("steps", "coefficients", "dtype")}
    found = newton_schulz(torch.cat(wide), **options)
    if group["update_norm_cap"] is not None:
        found = update_norm_cap(found, group["update_norm_cap"])
    found = found.mul_(size).split([len(w) for w in wide])
    for block, o in zip(blocks, found, strict=True):
        tall = block.shape[-3] * block.shape[-2] > block.shape[-1]
        block.copy_((o.mT if tall else o).reshape(block.shape))


def _wide(block: Tensor) -> Tensor:
    """(…, R, s, n) as matrices (N, R·s, n), lying down."""
    matrices = block.flatten(-3, -2).reshape(-1, block.shape[-3] * block.shape[-2], block.shape[-1])
    return matrices.mT if matrices.shape[-2] > matrices.shape[-1] else matrices


def _blocks(name: str, update: Tensor, splits: Mapping[str, Split]) -> Sequence[Tensor]:
    """Views (…, R, s, n) of the matrices in a parameter: each has R stretches of s rows."""
    found = _split_of(name, splits)
    if found is None:
        return [update.unsqueeze(-3)]
    dim, sizes = found if isinstance(found, tuple) else (-2, None)
    turned = update.mT if dim == -1 else update
    rows = turned.shape[-2]
    sizes = [rows // found] * found if sizes is None else list(sizes)
    period = sum(sizes)
    if dim not in (-1, -2) or period < 1 or rows % period:
        raise ValueError(
            f"splits gives {found} for {name} of shape {tuple(update.shape)}: expected sizes "
            f"whose sum divides {rows}, in dimension -2 or -1"
        )
    return turned.unflatten(-2, (rows // period, period)).split(sizes, dim=-2)


def _split_of(name: str, splits: Mapping[str, Split]) -> Split | None:
    parts = name.split(".")
    for key in (name, *reversed(parts)):
        if key in splits:
            return splits[key]
    fused = [part for part in parts if part.lower() in FUSED_QKV]
    if fused:
        raise ValueError(
            f"splits says nothing about {name}, which holds queries, keys and values: pass "
            f"splits=fused_splits(model), or its layout, such as {{'{fused[0]}': (-2, (q, k, v))}} "
            "rows; 1 keeps it whole"
        )
    return None


def _portions(blocks: list[Tensor]) -> Iterable[list[Tensor]]:
    part: list[Tensor] = []
    for block in blocks:
        if part and sum(b.numel() for b in part) + block.numel() > MAX_ELEMENTS:
            yield part
            part = []
        part.append(block)
    yield part


def _named(params: Any) -> list[tuple[str, Tensor]]:
    named = [params] if isinstance(params, Tensor) else list(params)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError(
            "params has parameters without names, and the name decides who updates what: pass "
            "model.named_parameters(), or groups with pairs (name, parameter)"
        )
    return named


def _can_fuse(part: list[tuple[str, Tensor]]) -> bool:
    return all(p.is_floating_point() and p.device.type in ("cpu", "cuda", "mps") for _, p in part)


def _check(group: dict[str, Any]) -> None:
    """Raise `ValueError` for settings, or matrices of `params`, that no step could use."""
    for name in ("lr", "weight_decay", "eps"):
        if not 0 <= group[name] < math.inf:
            raise ValueError(f"{name}={group[name]}: must be ≥ 0 and finite")
    for name, value in (("momentum", group["momentum"]), *(("betas", b) for b in group["betas"])):
        if not 0 <= value < 1:
            raise ValueError(f"{name}={group[name]}: must lie in [0, 1)")
    if group["scale"] not in SCALES:
        raise ValueError(f"scale={group['scale']!r}: one of {', '.join(SCALES)}")
    cap = group["update_norm_cap"]
    if cap is not None and not cap > 0:
        raise ValueError(f"update_norm_cap={cap}: must be > 0")
    options = {name: group[name] for name in ("steps", "coefficients", "dtype")}
    newton_schulz(torch.ones(1, 1), **options)
    for name, p in group["params"] if group["muon"] else ():
        _blocks(name, torch.empty(p.shape, device="meta"), group["splits"])
