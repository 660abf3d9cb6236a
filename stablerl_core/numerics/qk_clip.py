"""QK-Clip: after the optimizer step, smaller query and key weights for heads grown too hot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ._sharded import scale_rows
from .attention import AttentionWatch, attention_layers, normalised


@dataclass(frozen=True)
class QKClipReport:
    """What one `QKClip.step` saw and did.

    `max_logits` (H,) by layer, −inf for a head that saw nothing, upper bounds where the search was
    not `exact` and no head of the layer exceeded τ; `clipped` heads of all `heads`;
    `smallest` the smallest factor γ; `nonfinite` heads that had a NaN or inf among their logits.
    """

    max_logits: dict[str, Tensor]
    clipped: int
    heads: int
    smallest: float
    nonfinite: int

    @property
    def max_logit(self) -> float:
        """The largest of all."""
        return max(float(heads.max()) for heads in self.max_logits.values())


@dataclass(frozen=True)
class _Part:
    """Rows (heads, d) of one projection, which take γ^share; `keys`: heads are key heads."""

    projection: nn.Module
    rows: Tensor
    share: float
    keys: bool = False


@dataclass(frozen=True)
class _Layout:
    heads: int
    key_heads: int
    parts: tuple[_Part, ...]


class QKClip:
    """Bound the attention logits of `model` by `tau`, head by head, through its weights.

    While the model trains, the largest logit S_h = max scale·q·k of each head is kept, over all
    forwards since the last step (micro-batches) and, where torch.distributed runs, over all ranks
    of `group`; causally hidden keys and padding do not count (`AttentionWatch`). `step()`, called
    after the optimizer's, multiplies where S_h > τ, with γ_h = τ/S_h:

        multi-head   W_q^h by γ^α, W_k^h by γ^(1−α)              (and their biases)
        grouped      the same with S of a group = max over its query heads (Megatron-LM's rule);
                     with shared_keys="query" W_q^h by γ_h and no key
        latent (MLA) q^C by γ^α, k^C by γ^(1−α), q^R by γ; the rotary key k^R, which all heads
                     share, is left alone

    so that on the same inputs no logit of the layer exceeds τ. Heads with S_h ≤ τ, thus all with
    S_h ≤ 0, are untouched. Nothing in the forward or backward pass is changed: this is no clamp.
    A clipped layer changes the inputs of those above it, whose logits the next step sees.

    LoRA adapters (peft) are scaled so that W + s·B A obeys: the rows of W, though frozen, and of
    B. `masters` maps a parameter to the float32 copy that an optimizer keeps of it: both are
    scaled. A head with a NaN or inf among its logits is counted; its finite ones still clip.
    Only in layers where some head might exceed τ, by the lengths of its queries and keys, is the
    largest logit searched for; of the others an upper bound is reported. `exact` (which may be set
    between steps) searches everywhere, which costs another product Q Kᵀ, and clips the same.

    Raises `ValueError` for a model with QK-norm, whose logits do not depend on the scale of
    these weights, with clamped projections, or with projections it does not know; and, at
    `step()`, if a layer's attention could not be seen. Source: arXiv 2507.20534, §2.1, Alg. 1.
    """

    def __init__(
        self,
        model: nn.Module,
        tau: float = 100.0,
        *,
        alpha: float = 0.5,
        shared_keys: str = "group",
        exact: bool = False,
        masters: Mapping[Tensor, Tensor] | None = None,
        group: torch.distributed.ProcessGroup | None = None,
    ):
        if not 0 < tau < math.inf:
            raise ValueError(f"tau={tau}: must be > 0 and finite")
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha={alpha}: must lie in [0, 1]")
        if shared_keys not in ("group", "query"):
            raise ValueError(f"shared_keys={shared_keys!r}: group or query")
        self.tau, self.group, self.masters = tau, group, dict(masters or {})
        self._layouts: dict[str, _Layout] = {}
        for name, layer in attention_layers(model).items():
            _refuse(name, layer)
            alone = shared_keys == "query"
            self._layouts[name] = _layout(name, layer, 1.0 if alone else alpha, alone)
        self.watch = AttentionWatch(model)
        self.exact = exact

    @property
    def exact(self) -> bool:
        """Whether the largest logits are searched for where they cannot exceed τ, too."""
        return self.watch.enough is None

    @exact.setter
    def exact(self, value: bool) -> None:
        self.watch.enough = None if value else self.tau

    def counting(self, *masks: Tensor):
        """Context in which the n-th forward counts, of its queries those in masks[n] (B, Q)."""
        return self.watch.counting(*masks)

    def reset(self) -> None:
        """Forget the logits seen since the last step, where no step follows them."""
        self.watch.reset()

    def remove(self) -> None:
        """Stop watching the model."""
        self.watch.remove()

    @torch.no_grad()
    def step(self) -> QKClipReport:
        """Clip the heads that exceeded τ since the last step, and begin to watch anew."""
        self.watch.check()
        maxima, nonfinite = self._reduced()
        self.watch.reset()
        gammas = {name: self._gamma(name, s) for name, s in maxima.items()}
        hot = {name: gamma for name, gamma in gammas.items() if bool((gamma < 1).any())}
        for name, gamma in hot.items():
            self._scale(self._layouts[name], gamma)
        return QKClipReport(
            max_logits=maxima,
            clipped=sum(int((gamma < 1).sum()) for gamma in hot.values()),
            heads=sum(layout.heads for layout in self._layouts.values()),
            smallest=min((float(gamma.min()) for gamma in hot.values()), default=1.0),
            nonfinite=nonfinite,
        )

    def _reduced(self) -> tuple[dict[str, Tensor], int]:
        """The largest logits of all ranks, on the CPU, and how many heads had a non-finite one."""
        sizes = {name: layout.heads for name, layout in self._layouts.items()}
        maxima, bad = [], []
        for name, heads in sizes.items():
            seen = self.watch.maxima.get(name, torch.full((heads,), -math.inf))
            if len(seen) != heads:
                raise ValueError(
                    f"{name} attended with {len(seen)} heads, its projections have {heads}: heads "
                    "that are split between processes are not supported"
                )
            maxima.append(seen.double())
            bad.append(self.watch.nonfinite.get(name, seen.isnan()).double())
        device = _device_of(self._layouts)
        packed = torch.cat([x.to(device) for x in (*maxima, *bad)])  # one collective for all
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(packed, torch.distributed.ReduceOp.MAX, self.group)
        found, flags = packed.cpu().chunk(2)
        found = found.split(list(sizes.values()))
        return dict(zip(sizes, found, strict=True)), int(flags.sum())

    def _gamma(self, name: str, maxima: Tensor) -> Tensor:
        """γ (H,) of each query head; heads that share a scaled key share its γ."""
        layout = self._layouts[name]
        if any(part.keys for part in layout.parts):
            maxima = maxima.view(layout.key_heads, -1)
            maxima = maxima.amax(1, keepdim=True).expand_as(maxima).reshape(-1)
        return torch.where(maxima > self.tau, self.tau / maxima, 1)

    def _scale(self, layout: _Layout, gamma: Tensor) -> None:
        per_key = gamma.view(layout.key_heads, -1)[:, 0]
        factors: dict[nn.Module, Tensor] = {}
        for part in layout.parts:
            if part.projection not in factors:
                rows = _base(part.projection).out_features
                factors[part.projection] = torch.ones(rows, dtype=torch.float64)
            powers = (per_key if part.keys else gamma) ** part.share
            factors[part.projection][part.rows] = powers[:, None].expand(part.rows.shape)
        for projection, by in factors.items():
            for parameter in _output_rows(projection):
                scale_rows(parameter, by)
                if parameter in self.masters:
                    scale_rows(self.masters[parameter], by)


def _device_of(layouts: Mapping[str, _Layout]) -> torch.device:
    first = next(iter(layouts.values())).parts[0].projection
    return _base(first).weight.device


def _refuse(name: str, layer: nn.Module) -> None:
    norm = normalised(layer)
    if norm:
        raise ValueError(
            f"{name} has a QK-norm ({norm}): it divides the scale of the query and key weights "
            "out again, so QK-Clip would change nothing. Its gains bound the logits: watch or "
            "lower those"
        )
    clamped = getattr(getattr(layer, "config", None), "clip_qkv", None)
    if clamped is not None:
        raise ValueError(
            f"{name} clamps its projections at {clamped} (config.clip_qkv): logits are not "
            "proportional to the weights, so QK-Clip cannot promise its bound"
        )


def _layout(name: str, layer: nn.Module, alpha: float, query_only: bool) -> _Layout:
    """Which rows of which projection belong to which head."""
    if isinstance(getattr(layer, "kv_b_proj", None), nn.Module):
        return _latent(layer, alpha)
    d, glued = layer.head_dim, isinstance(getattr(layer, "qkv_proj", None), nn.Module)
    query, key = (layer.qkv_proj,) * 2 if glued else (layer.q_proj, layer.k_proj)
    if glued:
        heads, keys = layer.config.num_attention_heads, layer.config.num_key_value_heads
        sizes = {query: (heads + 2 * keys) * d}
    else:
        heads, keys = (max(1, _base(p).out_features // d) for p in (query, key))
        sizes = {query: heads * d, key: keys * d}
    if heads % keys or any(_base(p).out_features != size for p, size in sizes.items()):
        raise ValueError(f"{name} has {heads} query and {keys} key heads of {d}: no known layout")
    offset = heads * d if glued else 0
    parts = [_Part(query, torch.arange(heads * d).view(heads, d), alpha)]
    if not query_only:
        rows = offset + torch.arange(keys * d).view(keys, d)
        parts.append(_Part(key, rows, 1 - alpha, keys=True))
    return _checked(name, _Layout(heads, keys, tuple(parts)))


def _latent(layer: nn.Module, alpha: float) -> _Layout:
    """MLA: q^C and k^C share γ, q^R takes it whole."""
    content, rotary, value = layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim
    query = layer.q_proj if getattr(layer, "q_lora_rank", None) is None else layer.q_b_proj
    heads = _base(query).out_features // (content + rotary)
    rows = torch.arange(heads * (content + rotary)).view(heads, -1)
    keys = torch.arange(heads * (content + value)).view(heads, -1)[:, :content]
    parts = [_Part(query, rows[:, :content], alpha), _Part(query, rows[:, content:], 1.0)]
    if alpha < 1:
        parts.append(_Part(layer.kv_b_proj, keys, 1 - alpha, keys=True))
    return _checked("latent attention", _Layout(heads, heads, tuple(parts)))


def _checked(name: str, layout: _Layout) -> _Layout:
    for part in layout.parts:
        for parameter in _output_rows(part.projection):
            if not parameter.is_floating_point():
                raise ValueError(f"{name} has weights of {parameter.dtype}, which cannot be scaled")
    return layout


def _base(projection: nn.Module) -> nn.Module:
    """The linear layer under a LoRA wrapper, or the projection itself."""
    return getattr(projection, "base_layer", projection)


def _output_rows(projection: nn.Module) -> Iterable[Tensor]:
    """The parameters whose rows scale the output: W and its bias, or with LoRA also B and its."""
    base = _base(projection)
    modules = [base]
    if base is not projection:
        adapters = getattr(projection, "lora_B", None)
        if adapters is None or len(getattr(projection, "lora_magnitude_vector", ())):
            raise ValueError(
                f"{type(projection).__name__} wraps a linear layer in something other than LoRA "
                "(W + s·B A); its output cannot be scaled here. Merge it first"
            )
        modules += list(adapters.values())
    found = [p for m in modules for p in (m.weight, getattr(m, "bias", None)) if p is not None]
    return found
