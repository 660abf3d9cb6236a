"""What moves before it breaks: router logits, sizes of updates, the optimizer's second moments."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Router logits --------------------------------------------------------------------------------


@dataclass(frozen=True)
class RouterLogits:
    """What the router of one layer computed since the last `reset`.

    `largest` is the largest |logit|, `spread` the largest distance between two experts of one
    token, which is what the choice depends on: a softmax does not see a common shift. `z` is the
    mean of (log Σ_e exp logit_e)², the router z-loss of arXiv 2202.08906, Eq. 5. All three are
    over the finite rows. `nonfinite` tokens of `tokens` had a NaN or inf.
    """

    largest: float
    spread: float
    z: float
    nonfinite: int
    tokens: int


class RouterWatch:
    """Keeps, while a model runs, how large the logits of each router become.

    A router is a module whose class name ends with "router" and whose first output are logits
    (tokens, E), as in the mixtures of experts of transformers. As in `AttentionWatch`, forwards
    count in which gradients are recorded. Padding is routed too, and counts. Raises `ValueError`
    for a model without a router.
    """

    def __init__(self, model: nn.Module):
        routers = {
            name: module
            for name, module in model.named_modules()
            if type(module).__name__.lower().endswith("router")
        }
        if not routers:
            raise ValueError(
                f"model is {type(model).__name__}, in which no class name ends with Router"
            )
        self._seen: dict[str, list[Tensor]] = {}
        self._handles = [
            module.register_forward_hook(functools.partial(self._see, name))
            for name, module in routers.items()
        ]

    def reset(self) -> None:
        """Forget what was seen."""
        self._seen = {}

    def remove(self) -> None:
        """Stop watching for good."""
        for handle in self._handles:
            handle.remove()

    def report(self) -> dict[str, RouterLogits]:
        """What was seen since the last `reset`, by layer; NaN where no token was finite."""
        return {name: _summed(torch.stack(parts).cpu()) for name, parts in self._seen.items()}

    @torch.no_grad()
    def _see(self, name: str, module: nn.Module, args, output) -> None:
        # Whether this pass trains was decided outside of no_grad; the output remembers.
        logits = output[0] if isinstance(output, tuple) else output
        if not logits.requires_grad:
            return
        logits = logits.detach().double().flatten(0, -2)
        good = logits.isfinite().all(-1)
        kept, bad = logits[good], (~good).sum()
        none = logits.new_full((), -math.inf)
        size = kept.abs().amax() if len(kept) else none
        spread = (kept.amax(-1) - kept.amin(-1)).amax() if len(kept) else none
        z = kept.logsumexp(-1).square().sum()
        row = torch.stack([size, spread, z, bad.double(), bad.new_tensor(len(logits)).double()])
        self._seen.setdefault(name, []).append(row)


def _summed(rows: Tensor) -> RouterLogits:
    """One report of rows (largest, spread, sum of z, nonfinite, tokens)."""
    bad, tokens = int(rows[:, 3].sum()), int(rows[:, 4].sum())
    if bad == tokens:
        return RouterLogits(math.nan, math.nan, math.nan, bad, tokens)
    largest, spread = rows[:, :2].amax(0).tolist()
    return RouterLogits(largest, spread, float(rows[:, 2].sum()) / (tokens - bad), bad, tokens)


# Updates and weights --------------------------------------------------------------------------


@dataclass(frozen=True)
class UpdateRatio:
    """How far one update moved one parameter.

    `ratio` is ‖Δw‖ / ‖w‖ with w before the update: 0 where nothing moved, inf where it moved away
    from zero, NaN where a weight is NaN. `unchanged` is the share of entries that are the same bit
    for bit: in bfloat16 a step below half of the last place is lost.
    """

    ratio: float
    unchanged: float


@torch.no_grad()
def update_ratios(
    before: Mapping[str, Tensor], after: Mapping[str, Tensor]
) -> dict[str, UpdateRatio]:
    """‖after − before‖ / ‖before‖ of each tensor, in float64: what an update did to the weights.

    `before` holds copies (`p.detach().clone()`). Raises `ValueError` if names or shapes differ, or
    if both are the same memory.
    """
    if before.keys() != after.keys():
        odd = sorted(before.keys() ^ after.keys())
        raise ValueError(f"before and after differ in {odd[:3]}: name the same parameters")
    return {name: _ratio(name, before[name], after[name]) for name in before}


def _ratio(name: str, before: Tensor, after: Tensor) -> UpdateRatio:
    if before.shape != after.shape:
        was, now = tuple(before.shape), tuple(after.shape)
        raise ValueError(f"{name} has shape {was} in before and {now} in after")
    if before.numel() and before.data_ptr() == after.data_ptr():
        raise ValueError(f"{name} is the same memory in before and after: clone it before the step")
    if not before.numel():
        return UpdateRatio(0.0, 1.0)
    moved = (after.double() - before.double()).norm()
    ratio = 0.0 if moved == 0 else float(moved / before.double().norm())
    return UpdateRatio(ratio, float((after == before).double().mean()))


# The state of Adam ----------------------------------------------------------------------------


@dataclass(frozen=True)
class AdamState:
    """Moments of one parameter, after `step` updates.

    `below_eps` is the share of entries with √v̂ < ε, whose step is m̂/ε and not ±1: for them Adam
    is gradient descent. `zeros` is the share with v = 0. `dead` entries have v = inf, out of which
    they never come, as β₂·inf = inf: their step is 0 for ever while loss and weights look fine.
    `nonfinite` entries have a NaN in m or v or an infinite m, `negative` a v < 0; either makes the
    next weight NaN. `largest_step` is max |m̂|/(√v̂ + ε), in units of the learning rate, NaN where
    an entry's is. `smallest`, `median` are of √v̂.
    """

    step: int
    eps: float
    below_eps: float
    zeros: float
    dead: int
    nonfinite: int
    negative: int
    largest_step: float
    smallest: float
    median: float

    @property
    def poisoned(self) -> bool:
        """Whether some entry can never be trained again."""
        return bool(self.dead or self.nonfinite or self.negative)


@torch.no_grad()
def adam_states(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str] | None = None
) -> dict[str, AdamState]:
    """The state of Adam, or of the Adam part of `Muon`, for each parameter that has one.

    With m, v the moments after t steps: m̂ = m/(1 − β₁ᵗ), v̂ = v/(1 − β₂ᵗ); with amsgrad, v is the
    largest so far. `names` of parameters,
    as {p: name for name, p in model.named_parameters()}; otherwise "group.position". A parameter
    without state, or with another optimizer's, is left out. MiniMax-M1 (arXiv 2506.13585) saw
    gradients from 1e-18 to 1e-5 and lowered ε to 1e-15: `below_eps` says whether a run needs to.
    Raises `ValueError` if no parameter has a second moment.
    """
    found = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, p in enumerate(group["params"]):
            state = optimizer.state.get(p, {})
            if "exp_avg_sq" in state and int(state["step"]) and p.numel():
                found[(names or {}).get(p, f"{g}.{i}")] = _adam_state(state, group)
    if not found:
        raise ValueError(
            f"optimizer is {type(optimizer).__name__} and no parameter has a second moment "
            "(exp_avg_sq): it is no Adam, or has made no step"
        )
    return found


def _adam_state(state: Mapping[str, Tensor], group: Mapping) -> AdamState:
    t, (beta1, beta2), eps = int(state["step"]), group["betas"], float(group["eps"])
    m, v = state["exp_avg"].double(), state.get("max_exp_avg_sq", state["exp_avg_sq"]).double()
    root = (v / (1 - beta2**t)).sqrt()
    steps = (m / (1 - beta1**t)).abs() / (root + eps)
    dead = (v == math.inf) & m.isfinite()
    return AdamState(
        step=t,
        eps=eps,
        below_eps=float((root < eps).double().mean()),
        zeros=float((v == 0).double().mean()),
        dead=int(dead.sum()),
        nonfinite=int((~m.isfinite() | v.isnan()).sum()),
        negative=int((v < 0).sum()),
        largest_step=float(steps.amax()),
        smallest=float(root.amin()),
        median=float(root.median()),
    )
