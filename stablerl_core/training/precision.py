"""Real casts of a sampler of lower precision: weights, activations, cached keys and values.

A value is replaced by the nearest one that the format can hold; sums stay in the model's dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from transformers import Cache

from .config import ACTIVATIONS
from .models import routers

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
FLOAT8 = ("float8_e4m3", "float8_e4m3_blocks")
BLOCK = 128

# How Hugging Face models multiply by a weight; attention scores use other functions.
PRODUCTS = tuple(
    getattr(place, name)
    for place, name in (
        (F, "linear"),
        (F, "grouped_mm"),
        (torch, "_grouped_mm"),
        (torch, "matmul"),
        (Tensor, "matmul"),
        (Tensor, "__matmul__"),
    )
    if hasattr(place, name)
)


def cast_and_back(weight: Tensor, precision: str) -> Tensor:
    """The nearest value that `precision` can hold, in the weight's own dtype.

    `float8_e4m3` and `int4` scale each row (last dimension) so that its largest magnitude maps
    to the largest value of the format (448 and 7), `float8_e4m3_blocks` each block of 128 × 128
    of the last two dimensions (FP8-RL, arXiv 2601.18150); the others are plain casts.
    """
    if precision == "int4":
        scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
        return (weight / scale).round() * scale
    if precision == "float8_e4m3":
        return _float8(weight, weight.abs().amax(-1, keepdim=True))
    if precision == "float8_e4m3_blocks":
        return _float8(weight, _block_maxima(weight, BLOCK, BLOCK))
    return weight.to(DTYPES[precision]).to(weight.dtype)


def round_activations(x: Tensor, precision: str) -> Tensor:
    """The nearest value that `precision` can hold, for vectors along the last dimension.

    As `cast_and_back`, but `float8_e4m3_blocks` has one scale for each 1 × 128 (arXiv
    2601.18150), and `float8_e4m3` one for each token. A float16 overflows beyond 65504 to inf.
    """
    if precision == "float8_e4m3_blocks":
        return _float8(x, _block_maxima(x, 1, BLOCK))
    return cast_and_back(x, precision)


def _float8(x: Tensor, largest: Tensor) -> Tensor:
    """x in e4m3 and back, scaled so that magnitude `largest` becomes 448."""
    scale = largest.clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale


def _block_maxima(x: Tensor, rows: int, columns: int) -> Tensor:
    """For each element of (…, m, n), the largest magnitude in its block; the edges may be cut."""
    m, n = x.shape[-2:]
    padded = F.pad(x.abs(), (0, -n % columns, 0, -m % rows))
    blocks = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    largest = blocks.amax((-3, -1), keepdim=True).expand_as(blocks)
    return largest.flatten(-2).flatten(-3, -2)[..., :m, :n]


@torch.no_grad()
def round_weights(
    source: nn.Module, target: nn.Module, precision: str, skip: tuple[str, ...] = ()
) -> None:
    """Copy `source` into `target`, rounding matrices to `precision`.

    Vectors (norm gains) keep their precision, as quantised engines leave them; with
    `float8_e4m3_blocks` so do embeddings, routers and the output head. Parameters whose
    name contains a string of `skip` are not sent: that is the fault of a broken weight sync.
    """
    whole = _left_whole(source, precision)
    untouched = {f"{name}.weight" for name, module in source.named_modules() if module in whole}
    for name, tensor in source.state_dict().items():
        if any(part in name for part in skip):
            continue
        rounds = tensor.dim() >= 2 and tensor.is_floating_point() and name not in untouched
        value = cast_and_back(tensor, precision) if rounds else tensor
        _slot(target, name).copy_(value)


def _slot(module: nn.Module, name: str) -> Tensor:
    """The parameter or buffer of that name."""
    owner, _, leaf = name.rpartition(".")
    return getattr(module.get_submodule(owner), leaf)


def _left_whole(model: nn.Module, precision: str) -> set[nn.Module]:
    """Embeddings, routers and the output head, where the recipe of `precision` spares them."""
    if precision != "float8_e4m3_blocks":
        return set()
    embeddings = {module for module in model.modules() if isinstance(module, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return embeddings | set(routers(model).values()) | ({head} - {None})


@contextmanager
def rounded_activations(model: nn.Module, precision: str) -> Iterator[None]:
    """Inside the block, round what enters each product with a weight of `model`.

    In a 16-bit engine the product is stored in 16 bits too, so its output is rounded as well; an
    8-bit engine multiplies 8-bit inputs, adds up in more bits and hands those on (W8A8 linears,
    arXiv 2601.18150). Products are linear layers, fused experts (gate/up and down), routers and
    the head, the last two not with `float8_e4m3_blocks`. Norms, softmax, attention scores and
    the residual stream stay in the model's dtype: a model that really is in bfloat16 rounds those
    too. Weights are not touched; `round_weights` does that. `float32` does nothing.

    Raises `ValueError` for an unknown precision, and for experts computed in another way than
    by linear, matmul or grouped matrix products.
    """
    _check_known(precision)
    if precision == "float32":
        yield
        return
    whole = _left_whole(model, precision)
    handles = []
    for module in _with_products(model):
        if module not in whole:
            within = _Within(precision)
            handles.append(module.register_forward_pre_hook(within.enter))
            handles.append(module.register_forward_hook(within.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _check_known(precision: str) -> None:
    if precision not in ACTIVATIONS:
        raise ValueError(f"precision={precision!r}: activations can be one of {ACTIVATIONS}")


def _with_products(model: nn.Module) -> list[nn.Module]:
    """Modules that multiply by their own weights: linear layers, routers, fused experts."""
    chosen = set(routers(model).values())
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.Linear) or module in chosen or _are_fused_experts(module)
    ]


def _are_fused_experts(module: nn.Module) -> bool:
    return any(p.dim() == 3 for p in module.parameters(recurse=False))


class _Within:
    """Two hooks: while the module between them runs, its products are rounded."""

    def __init__(self, precision: str):
        self.products = _RoundedProducts(precision)

    def enter(self, module: nn.Module, args) -> None:
        self.products.count = 0
        self.products.__enter__()

    def leave(self, module: nn.Module, args, output) -> None:
        self.products.__exit__(None, None, None)
        if self.products.count == 0 and output is not None:  # None: the forward has raised
            raise ValueError(
                f"{type(module).__name__} has no product that could be rounded: use "
                "experts_implementation='grouped_mm' or 'eager'"
            )


class _RoundedProducts(TorchFunctionMode):
    """Rounds the first operand of every product, and with 16 bits its result."""

    def __init__(self, precision: str):
        super().__init__()
        self.precision, self.count = precision, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        self.count += 1
        first, *others = args
        result = func(round_activations(first, self.precision), *others, **(kwargs or {}))
        return result if self.precision in FLOAT8 else round_activations(result, self.precision)


@contextmanager
def rounded_cache(model: nn.Module, precision: str) -> Iterator[None]:
    """Inside the block, round keys and values to `precision` as they enter the cache of `model`.

    Attention then reads the rounded ones, also those of the tokens just fed. With float8 each
    token and head has its own scale; engines share one among all tokens of a layer, which is
    never finer. Multi-head latent attention caches latents, and those are rounded. `float32`
    does nothing.

    Raises `ValueError` for an unknown precision and a model without attention layers.
    """
    _check_known(precision)
    if precision == "float32":
        yield
        return
    layers = [m for m in model.modules() if type(m).__name__.endswith("Attention")]
    if not layers:
        raise ValueError(f"model is {type(model).__name__}, which has no attention layer")

    def swap(value):
        return _RoundedCache(value, precision) if isinstance(value, Cache) else value

    def enter(_, args, kwargs):
        return tuple(map(swap, args)), {name: swap(value) for name, value in kwargs.items()}

    handles = [m.register_forward_pre_hook(enter, with_kwargs=True) for m in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _RoundedCache:
    """Stands for a cache inside one attention layer; all but `update` is the cache's own."""

    def __init__(self, cache: Cache, precision: str):
        self._cache, self._precision = cache, precision

    def update(self, keys: Tensor, values: Tensor, *args, **kwargs):
        keys, values = (round_activations(x, self._precision) for x in (keys, values))
        return self._cache.update(keys, values, *args, **kwargs)

    def __getattr__(self, name: str):
        return getattr(self._cache, name)
