"""What stands between a gradient and a step: bounds, skips that are counted, loss scales."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from .gradients import clip_gradients

# Clipping relative to the weights ---------------------------------------------------------------


@dataclass(frozen=True)
class AdaptiveClipReport:
    """`clipped` units of all `units`, and how many had a NaN or inf and were left alone."""

    clipped: int
    units: int
    nonfinite: int


@torch.no_grad()
def adaptive_clip_gradients(
    parameters: Iterable[Tensor], clipping: float = 0.01, *, eps: float = 1e-3
) -> AdaptiveClipReport:
    """Bound the gradient of each unit by `clipping` times the norm of its weights, in place.

        G_i ← G_i · min(1, λ max(‖W_i‖, ε) / ‖G_i‖)

    A unit i is what makes one output: a row of a matrix (also of each expert in a 3-D tensor), a
    filter of a convolution, the whole of a vector. ε lets units move that start at zero. A unit
    with a NaN or inf is counted and left as it is, for whoever decides about the step. The paper
    leaves the last layer out. Raises `ValueError` for a bound that is not positive. Source:
    arXiv 2102.06171, §4.1.
    """
    for name, value in (("clipping", clipping), ("eps", eps)):
        if not value > 0:
            raise ValueError(f"{name}={value}: must be > 0")
    clipped = units = bad = 0
    for p in parameters:
        if p.grad is None or not p.numel():
            continue
        norm, bound = _unit_norms(p.grad), clipping * _unit_norms(p).clamp(min=eps)
        finite = norm.isfinite() & bound.isfinite()
        over = finite & (norm > bound)
        p.grad.mul_(torch.where(over, bound / norm, 1.0).to(p.grad.dtype))
        clipped, units = clipped + int(over.sum()), units + norm.numel()
        bad += int((~finite).sum())
    return AdaptiveClipReport(clipped, units, bad)


def _unit_norms(tensor: Tensor) -> Tensor:
    """2-norm of each unit, in float32 or better, so that it broadcasts over the tensor."""
    wide = tensor.detach().to(torch.promote_types(tensor.dtype, torch.float32))
    if tensor.dim() <= 1:
        return wide.norm()
    dims = -1 if tensor.dim() <= 3 else list(range(1, tensor.dim()))
    return torch.linalg.vector_norm(wide, dim=dims, keepdim=True)


# Seed 000's rule --------------------------------------------------------------------------------


def halve_lr_on_gradient_outlier(
    norms: Tensor, learning_rate: float, *, factor: float = 3.0
) -> tuple[float, Tensor]:
    """Halve the learning rate once for each gradient larger than `factor` times the mean.

        for i: if ‖∇L_i‖ > 3 · mean_j ‖∇L_j‖: learning_rate *= 0.5

    `norms` (n,) of the gradients of samples, or of the steps so far. Returns the new rate and
    which are outliers, bool (n,). The rule as a blog post about DeepSeek-V3.2 has it; the report
    (arXiv 2512.02556) has no such rule. The rate never rises again, and the outlier stays in the
    gradient. No one of n ≤ `factor` numbers can exceed `factor` times their mean. Comparisons with
    NaN are false, so the rule would pass over one: raises `ValueError` for norms that are not
    finite or negative, and for `factor` or `learning_rate` not positive.
    """
    if norms.dim() != 1 or not len(norms) or not bool((norms.isfinite() & (norms >= 0)).all()):
        shape = tuple(norms.shape)
        raise ValueError(
            f"norms has shape {shape}; expected (n,) numbers that are finite and ≥ 0: decide "
            "about the others first, this rule does not see them"
        )
    for name, value in (("learning_rate", learning_rate), ("factor", factor)):
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name}={value}: must be > 0 and finite")
    wide = norms.double()
    outliers = wide > factor * wide.mean()
    return learning_rate * 0.5 ** int(outliers.sum()), outliers


# Steps that are not taken -----------------------------------------------------------------------


class SkipNonfinite:
    """Says before each step whether it may be taken, and counts those that may not.

    A step is skipped where the loss or the gradient norm is NaN or inf: neither is repaired,
    replaced or left out of a mean. `skipped` counts all, `in_a_row` since the last good step,
    `steps` everything; `first` is the number of the first skipped one, from 1. After
    `limit` skips in a row, `allows` raises `FloatingPointError`, since a fault that stays is
    none of the batch. Raises `ValueError` for limit < 1.
    """

    def __init__(self, limit: int = 10):
        if limit < 1:
            raise ValueError(f"limit={limit}: must be ≥ 1")
        self.limit = limit
        self.steps = self.skipped = self.in_a_row = 0
        self.first: int | None = None

    def allows(self, loss: float | Tensor, norm: float | Tensor) -> bool:
        """Whether the step may be taken, given the loss and the norm before clipping."""
        loss, norm = float(loss), float(norm)
        return self._count(math.isfinite(loss) and math.isfinite(norm), f"loss {loss}, norm {norm}")

    def _count(self, finite: bool, seen: str) -> bool:
        self.steps += 1
        if finite:
            self.in_a_row = 0
            return True
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        self.first = self.first or self.steps
        if self.in_a_row >= self.limit:
            raise FloatingPointError(
                f"step {self.steps}: {seen}; {self.in_a_row} steps in a row were not finite, so "
                "the cause is not one batch: look for it with find_nonfinite"
            )
        return False

    def state_dict(self) -> dict:
        """The counts, for a checkpoint."""
        return {name: getattr(self, name) for name in ("steps", "skipped", "in_a_row", "first")}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the counts of `state_dict`."""
        self.steps, self.skipped = state["steps"], state["skipped"]
        self.in_a_row, self.first = state["in_a_row"], state["first"]


# Loss scaling -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScaledStep:
    """One step with a scaled loss: `norm` of the gradients without the scale, before clipping;
    whether it was `skipped`; the `scale` it had, and the `next_scale`.
    """

    norm: float
    skipped: bool
    scale: float
    next_scale: float


class LossScale:
    """torch's `GradScaler`, whose skipped steps are counted and do not go on for ever.

    float16 has no number below 6e-8: gradients smaller than that are 0. So the loss is multiplied
    by a scale s before the backward pass and the gradients divided by it after. Where s was too
    large, a gradient overflows, the step is skipped and s halved; after `growth_interval` good
    steps s is doubled. A fault that is no overflow is skipped in the same way, at every scale,
    while s falls to zero: after `limit` skips in a row `step` raises `FloatingPointError`.
    `skipped`, `in_a_row` and `steps` count. Weights have to be float32, their gradients with
    them. Raises `ValueError` for limit < 1 or a scale that is not positive. Source:
    arXiv 1710.03740, §3.2.
    """

    def __init__(
        self,
        device: str = "cuda",
        *,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        limit: int = 20,
    ):
        if not (init_scale > 0 and math.isfinite(init_scale)):
            raise ValueError(f"init_scale={init_scale}: must be > 0 and finite")
        if growth_interval < 1:
            raise ValueError(f"growth_interval={growth_interval}: must be ≥ 1")
        self._scaler = torch.amp.GradScaler(
            device, init_scale=init_scale, growth_interval=growth_interval
        )
        self._guard = SkipNonfinite(limit)

    @property
    def skipped(self) -> int:
        """Steps that were not taken."""
        return self._guard.skipped

    @property
    def in_a_row(self) -> int:
        """Steps that were not taken since the last that was."""
        return self._guard.in_a_row

    @property
    def steps(self) -> int:
        """All steps, taken or not."""
        return self._guard.steps

    def scaled(self, loss: Tensor) -> Tensor:
        """s · loss, to call `backward` on."""
        return self._scaler.scale(loss)

    def step(self, optimizer: torch.optim.Optimizer, max_norm: float = math.inf) -> ScaledStep:
        """Divide the gradients by s, clip them, step if they are finite, and adapt s."""
        scale = self._scaler.get_scale()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in parameters):
            raise ValueError("optimizer has no gradient: call scaled(loss).backward() before step")
        self._scaler.unscale_(optimizer)
        norm = float(clip_gradients(parameters, max_norm))
        if math.isfinite(norm):  # else torch skips too, except where only the sum overflows
            self._scaler.step(optimizer)
        self._scaler.update()
        taken = self._guard._count(math.isfinite(norm), f"norm {norm} at the loss scale {scale}")
        return ScaledStep(norm, not taken, scale, self._scaler.get_scale())

    def state_dict(self) -> dict:
        """The scale and the counts, for a checkpoint."""
        return {"scaler": self._scaler.state_dict(), "counts": self._guard.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Continue with the scale and counts of `state_dict`."""
        self._scaler.load_state_dict(state["scaler"])
        self._guard.load_state_dict(state["counts"])
