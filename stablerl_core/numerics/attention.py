"""Attention logits: the largest of each head, seen as it happens, and three ways to bound them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_layernorm", "key_layernorm")
# Scores that exist at once while the largest are looked for: what fits a core's cache, or a GPU.
CHUNK = {"cpu": 2**18, "elsewhere": 2**26}


def attention_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Modules by name that project queries and keys: separate, fused, or latent (MLA)."""
    found = {}
    for name, module in model.named_modules():
        has = {part for part in ("q_proj", "k_proj", "kv_b_proj", "qkv_proj") if _is(module, part)}
        if {"q_proj", "k_proj"} <= has or has & {"kv_b_proj", "qkv_proj"}:
            found[name] = module
    if not found:
        raise ValueError(
            f"model is {type(model).__name__}, in which no module has q_proj and k_proj, qkv_proj "
            "or kv_b_proj"
        )
    return found


def _is(module: nn.Module, part: str) -> bool:
    return isinstance(getattr(module, part, None), nn.Module)


def normalised(attention: nn.Module) -> str | None:
    """Name of the QK-norm of an attention layer, or None."""
    return next((name for name in NORMS if _is(attention, name)), None)


# The largest logit ----------------------------------------------------------------------------


@torch.no_grad()
def max_attention_logits(
    query: Tensor,
    key: Tensor,
    visible: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = False,
    counted: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """max over rows, queries i and keys j that i may see of `scale`·q_i·k_j, for each head: (H,).

    `query` (B, H, Q, d), `key` (B, Hk, S, d) after rotation, Hk dividing H; `scale` is 1/√d by
    default. `visible` is what attention is given: bool, or numbers that are added, of which only
    a huge negative one hides a key; broadcast to (B, H, Q, S). `causal` hides keys j > i.
    `counted` (B, Q) bool leaves out queries, such as padding; so does a `visible` in which some
    queries do not see their own key. A head with nothing to see has −inf; a NaN stays NaN. At
    most about `chunk` scores exist at a time.
    """
    (b, h, q, d), (hk, s) = query.shape, key.shape[1:3]
    chunk = chunk or CHUNK["cpu" if query.is_cpu else "elsewhere"]
    if counted is not None and counted.shape != (b, q):
        raise ValueError(f"counted has shape {tuple(counted.shape)}, expected {(b, q)}")
    if h % hk:
        raise ValueError(f"key has {hk} heads, which do not divide the {h} of query")
    if query.dtype == torch.float16:  # whose largest number is 65504
        query, key = query.float(), key.float()
    hidden = _hidden(visible, counted)
    query, best = query.unflatten(1, (hk, h // hk)), query.new_full((h,), -math.inf)
    size = max(1, chunk // max(1, b * h * s))
    for start in range(0, q, size):
        stop = min(start + size, q)
        until = min(stop, s) if causal else s
        part = query[:, :, :, start:stop].flatten(2, 3) @ key[:, :, :until].mT
        part = part.unflatten(2, (h // hk, stop - start)).flatten(1, 2)
        if causal:  # only the keys of this stretch can be later than one of its queries
            diagonal = part[..., start:]
            later = torch.ones(diagonal.shape[-2:], dtype=torch.bool, device=key.device).triu(1)
            diagonal.masked_fill_(later, -math.inf)
        if hidden is not None:
            part.masked_fill_(hidden[..., start:stop, :until], -math.inf)
        best = torch.maximum(best, part.flatten(2).amax(2).amax(0))
    return best * (d**-0.5 if scale is None else scale)


def _hidden(visible: Tensor | None, counted: Tensor | None) -> Tensor | None:
    """Pairs (B, 1 or H, Q, S or 1) that do not count, or None."""
    if visible is not None and visible.dtype != torch.bool:
        visible = visible > torch.finfo(visible.dtype).min / 2
    counted = _counted(visible, counted)
    out = None if counted is None else ~counted[..., None]
    if visible is None or out is None:
        return out if visible is None else ~visible
    return ~visible | out


def _counted(seen: Tensor | None, counted: Tensor | None) -> Tensor | None:
    """(B, 1 or H, Q) bool: queries that are told to count and are no padding."""
    counted = None if counted is None else counted[:, None]
    if seen is None or seen.shape[-2] > seen.shape[-1]:
        return counted
    # With right padding a padded query sees the real keys, but not its own.
    own = seen.diagonal(seen.shape[-1] - seen.shape[-2], -2, -1)
    own = own | ~own.any()  # in a cache longer than what is in it, the diagonal lies elsewhere
    return own if counted is None else own & counted


class AttentionWatch:
    """Keeps, while a model runs, the largest attention logit of each head of each layer.

    It sees `scaled_dot_product_attention` and eager softmax, whoever calls them inside a module
    of `attention_layers`. Forwards count in which gradients are recorded: those that train, not
    rollouts. `counting` says so explicitly. `maxima` has (H,) by layer since the last `reset`,
    −inf where nothing was seen yet; `nonfinite` says which heads had a NaN or inf. Where no head of
    a layer can exceed `enough`, since scale·max|q|·max|k| does not, that bound is kept in place
    of the logit that a search would find: the cost falls from that of a product Q Kᵀ to nearly
    nothing. Without `enough` every value is exact.

    Raises `ValueError` for a model whose softmax does not get scale·q·k: soft-capped logits, or
    attention sinks.
    """

    def __init__(self, model: nn.Module, enough: float | None = None):
        self.layers, self.enough = attention_layers(model), enough
        for name, layer in self.layers.items():
            _refuse_other_logits(name, layer)
        self._masks: Iterator[Tensor] | None = None
        self._mask: Tensor | None = None
        self._open: list[TorchFunctionMode | None] = []
        self._handles = [model.register_forward_pre_hook(self._begin)]
        for name, layer in self.layers.items():
            enter = functools.partial(self._enter, name)
            self._handles += [
                layer.register_forward_pre_hook(enter),
                layer.register_forward_hook(self._leave, prepend=True, always_call=True),
            ]
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self.maxima: dict[str, Tensor] = {}
        self.nonfinite: dict[str, Tensor] = {}
        self._called: set[str] = set()
        self._explicit = False

    def remove(self) -> None:
        """Stop watching for good."""
        for handle in self._handles:
            handle.remove()

    @contextmanager
    def counting(self, *masks: Tensor):
        """Within, the n-th forward of the model counts, of its queries those in masks[n] (B, Q).

        Without masks all queries count that the attention mask does not show to be padding. Until
        the next `reset` nothing outside counts, so that a recomputation in the backward pass,
        which knows no mask, adds nothing.
        """
        self._explicit, self._masks = True, iter(masks) if masks else iter(lambda: None, 0)
        try:
            yield self
        finally:
            self._masks = self._mask = None

    def check(self) -> None:
        """Raise `ValueError` if a layer ran and its attention was not seen."""
        unseen = sorted(self._called - set(self.maxima))
        if unseen:
            raise ValueError(
                f"{unseen[0]} and {len(unseen) - 1} other layers ran without torch's "
                "scaled_dot_product_attention or softmax, so their logits were not seen: load the "
                "model with attn_implementation='sdpa' or 'eager'"
            )

    def _begin(self, model: nn.Module, args) -> None:
        if self._masks is None:
            return
        try:
            self._mask = next(self._masks)
        except StopIteration:
            raise ValueError("masks has fewer entries than the model had forwards") from None

    def _enter(self, name: str, layer: nn.Module, args) -> None:
        inside = self._masks is not None
        mode = None
        if inside or (torch.is_grad_enabled() and not self._explicit):
            self._called.add(name)
            mode = _Seeing(functools.partial(self._see, name), _heads(layer), self.enough)
            mode.__enter__()
        self._open.append(mode)

    def _leave(self, layer: nn.Module, args, output) -> None:
        mode = self._open.pop()
        if mode is not None:
            mode.__exit__(None, None, None)

    def _see(self, name: str, find: Callable[[Tensor | None], Tensor]) -> None:
        found = find(self._mask)
        found = found.to(torch.promote_types(found.dtype, torch.float32))
        bad = torch.isnan(found) | (found == math.inf)
        found = found.masked_fill(bad, -math.inf)
        if name in self.maxima:
            found = torch.maximum(found, self.maxima[name])
            bad = bad | self.nonfinite[name]
        self.maxima[name], self.nonfinite[name] = found, bad


def _refuse_other_logits(name: str, layer: nn.Module) -> None:
    cap = getattr(getattr(layer, "config", None), "attn_logit_softcapping", None)
    if cap is not None:
        raise ValueError(f"{name} caps its logits softly at {cap}: they are bounded already")
    if getattr(layer, "sinks", None) is not None:
        raise ValueError(f"{name} has attention sinks: its softmax is given shifted logits")


def _heads(layer: nn.Module) -> int | None:
    heads = getattr(getattr(layer, "config", None), "num_attention_heads", None)
    return heads if isinstance(heads, int) else None


class _Seeing(TorchFunctionMode):
    """Tells `see` how to find the largest logits whenever attention is computed."""

    def __init__(self, see: Callable, heads: int | None, enough: float | None):
        super().__init__()
        self.see, self.heads, self.enough = see, heads, enough

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self._sdpa(*args, **kwargs)
        elif func is F.softmax and args and args[0].dim() == 4:
            scores = args[0].detach()
            self.see(lambda counted: _max_scores(scores, counted))
        return func(*args, **kwargs)

    def _sdpa(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        query, key, heads = query.detach(), key.detach(), self.heads
        if heads and query.shape[1] != heads == query.shape[1] * query.shape[2]:
            # transformers turns the heads of one group into queries where there is one query
            query = query.reshape(len(query), heads, 1, -1)
            if attn_mask is not None and attn_mask.shape[1] > 1:
                attn_mask = attn_mask.reshape(len(attn_mask), heads, 1, -1)
        if self.enough is not None:
            bound = _bound(query, key, scale)
            # A thousandth for rounding. False for NaN, whose heads have to be found.
            if bool((bound <= 0.999 * self.enough).all()):
                return self.see(lambda counted: bound)
        options = {"scale": scale, "causal": is_causal}
        self.see(lambda c: max_attention_logits(query, key, attn_mask, counted=c, **options))


@torch.no_grad()
def _bound(query: Tensor, key: Tensor, scale: float | None) -> Tensor:
    """scale·max|q|·max|k| (H,) ≥ the largest logit of each head."""
    wide = torch.promote_types(query.dtype, torch.float32)
    longest = [x.to(wide).square().sum(-1).amax((0, 2)).sqrt() for x in (query, key)]
    keys = longest[1].repeat_interleave(query.shape[1] // key.shape[1])
    return longest[0] * keys * (query.shape[-1] ** -0.5 if scale is None else scale)


@torch.no_grad()
def _max_scores(scores: Tensor, counted: Tensor | None) -> Tensor:
    """The same from scores (B, H, Q, S) that exist anyway, masked by huge negative numbers."""
    seen = ~(scores <= torch.finfo(scores.dtype).min / 2)  # NaN counts as seen
    counted = _counted(seen, counted)
    if counted is not None:
        seen = seen & counted[..., None]
    return scores.masked_fill(~seen, -math.inf).amax((0, 2, 3))


# Ways to bound it -----------------------------------------------------------------------------


def clamp_attention_scores(scores: Tensor, bound: float = 30.0) -> Tensor:
    """Seeds 001 and 002's "QK-clip": min(max(scores, −bound), bound), before the mask.

    It is not QK-Clip. Beyond the bound the gradient is exactly 0, so nothing pulls the queries
    and keys back that went there, and keys beyond it can no longer be told apart.
    """
    return scores.clamp(-bound, bound)


def soft_cap_scores(scores: Tensor, cap: float = 50.0) -> Tensor:
    """cap · tanh(scores/cap), Gemma 2's logit soft-cap (arXiv 2408.00118), before the mask.

    Its slope 1 − tanh² is .79 at half the cap, .42 at the cap and .07 at twice the cap.
    """
    return cap * torch.tanh(scores / cap)


@contextmanager
def attention_scores(model: nn.Module, change: Callable[[Tensor], Tensor]):
    """Within, attention is softmax(mask(`change`(scale · Q Kᵀ))) V in every layer.

    `change` gets scores (B, H, Q, S) before the mask and returns as many. All scores exist at
    once, so this is for looking, not for long contexts. An `AttentionWatch` goes on seeing the
    logits before the change. Raises `ValueError` where attention is not computed by
    `scaled_dot_product_attention`.
    """
    opened: list[TorchFunctionMode] = []

    def enter(layer, args):
        opened.append(_Changing(change).__enter__())

    def leave(layer, args, output):
        opened.pop().__exit__(None, None, None)

    handles = []
    for layer in attention_layers(model).values():
        handles += [
            layer.register_forward_pre_hook(enter, prepend=True),
            layer.register_forward_hook(leave, always_call=True),
        ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Changing(TorchFunctionMode):
    def __init__(self, change: Callable[[Tensor], Tensor]):
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **kwargs)
        if func is F.softmax and args and args[0].dim() == 4:
            raise ValueError(
                "model computes attention eagerly, so its scores cannot be changed before the "
                "mask: load it with attn_implementation='sdpa'"
            )
        return func(*args, **kwargs)

    def _attend(
        self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
        enable_gqa=False,
    ):  # fmt: skip
        if enable_gqa:
            times = query.shape[1] // key.shape[1]
            key, value = (x.repeat_interleave(times, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        scores = self.change(query @ key.mT * scale)
        if is_causal:
            later = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(later, -math.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            scores = scores.masked_fill(~attn_mask, -math.inf)
        elif attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        # A row of −inf has nothing to attend to: zeros, as torch's own attention returns.
        weights = weights.masked_fill((scores == -math.inf).all(-1, keepdim=True), 0)
        return F.dropout(weights, dropout_p) @ value


class HeadNorm(nn.RMSNorm):
    """RMSNorm of each head of a projection's output (…, H·d), with one gain for all heads."""

    def hook(self, projection: nn.Module, args, output: Tensor) -> Tensor:
        return self(output.unflatten(-1, (-1, self.normalized_shape[0]))).flatten(-2)


def add_qk_norm(model: nn.Module, *, gain: float = 1.0, eps: float = 1e-6) -> None:
    """Give every attention layer of `model` a QK-norm: RMSNorm of each query and key, for good.

    As in Qwen3, before the rotation, with learnt gains `q_norm.weight` and `k_norm.weight` (d,)
    that start at `gain`; at first no logit exceeds gain²·√d. It changes what the model computes.
    Raises `ValueError` for latent attention, whose keys are never whole when it generates
    (arXiv 2507.20534, §2.1), for a fused projection, and where there is a norm already.
    """
    layers = attention_layers(model)
    for name, layer in layers.items():
        if normalised(layer):
            raise ValueError(f"model has a QK-norm already: {name}.{normalised(layer)}")
        if not (_is(layer, "q_proj") and _is(layer, "k_proj")):
            raise ValueError(f"{name} has no separate q_proj and k_proj to normalise after")
    for layer in layers.values():
        for side in "qk":
            projection = getattr(layer, f"{side}_proj")
            like = {"device": projection.weight.device, "dtype": projection.weight.dtype}
            norm = HeadNorm(layer.head_dim, eps=eps, **like)
            nn.init.constant_(norm.weight, gain)
            setattr(layer, f"{side}_norm", norm)
            projection.register_forward_hook(norm.hook)
