"""What a number format can hold, and the float32 copies that a 16-bit model learns by."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class NumberFormat:
    """A floating-point format: `bits` in all, `significant` ones with the hidden one.

    `largest` finite number, `smallest` above zero that keeps all significant bits, `least` above
    zero at all; `step` is the distance from 1 to the next number, so rounding changes a number
    by at most half of `step`, relatively.
    """

    name: str
    bits: int
    significant: int
    largest: float
    smallest: float
    least: float
    step: float


def number_format(dtype: torch.dtype) -> NumberFormat:
    """What a floating dtype can hold, from `torch.finfo`."""
    if not dtype.is_floating_point:
        raise ValueError(f"dtype={dtype}: expected a floating dtype, such as torch.bfloat16")
    facts = torch.finfo(dtype)
    significant = 1 - round(torch.tensor(facts.eps, dtype=torch.float64).log2().item())
    # Numbers below `smallest` lose one bit with each halving.
    least = facts.smallest_normal * facts.eps
    name = str(dtype).removeprefix("torch.")
    sizes = (facts.bits, significant, facts.max, facts.smallest_normal, least, facts.eps)
    return NumberFormat(name, *sizes)


def swallowed(parameter: Tensor, update: Tensor, dtype: torch.dtype) -> Tensor:
    """Share of the nonzero updates that a weight held in `dtype` does not notice, 0-d float.

        mean over u ≠ 0 of [cast(cast(w) + u) = cast(w)]

    The sum is taken in float64, so this is what rounding of the weight alone does. `parameter`
    and `update` have one shape; without a nonzero update the share is 0. Raises `ValueError` where
    shapes differ.
    """
    if parameter.shape != update.shape:
        shapes = f"{tuple(parameter.shape)} and {tuple(update.shape)}"
        raise ValueError(f"parameter and update have shapes {shapes}; expected the same")
    held, moved = parameter.to(dtype), update != 0
    stays = (held.double() + update.double()).to(dtype) == held
    return (stays & moved).sum() / moved.sum().clamp(min=1)


class MasterWeights:
    """Float32 copies of the parameters of a model in fewer bits, for the optimizer to step on.

        masters = MasterWeights(model.parameters())
        optimizer = torch.optim.AdamW(masters.copies, lr=1e-3)
        loss.backward(); masters.take_gradients(); optimizer.step(); masters.write()

    A step smaller than half the spacing of bfloat16 around a weight is lost when it is added to
    a bfloat16 weight, and adds up in the copy. Costs 4 bytes a parameter, and the optimizer's
    state is float32 with them. Source: arXiv 1710.03740, §3.1.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.parameters = list(parameters)
        self.copies = [nn.Parameter(p.detach().float().clone()) for p in self.parameters]

    def take_gradients(self) -> None:
        """The parameters' gradients in float32 as those of the copies; None stays None."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            copy.grad = None if p.grad is None else p.grad.float()

    @torch.no_grad()
    def write(self) -> None:
        """The copies, rounded, into the parameters."""
        for p, copy in zip(self.parameters, self.copies, strict=True):
            p.copy_(copy)


def float32_head(model: nn.Module) -> None:
    """From now on the output layer of `model` is float32, its weights, its input and its logits.

    MiniMax-M1 found its bfloat16 head to be the main source of the gap between training and
    sampling (arXiv 2506.13585). Logits of 8 significant bits are wrong by up to 0.4 % each
    before any softmax sees them; a float32 log-softmax afterwards cannot repair that. Raises
    `ValueError` for a model without an output layer, and for one that is tied to the embedding,
    whose weights would change their format too.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is None:
        raise ValueError(f"model is {type(model).__name__}, which has no output layer")
    if head.weight is getattr(model.get_input_embeddings(), "weight", None):
        raise ValueError("model ties its output layer to the embedding: untie them first")
    head.float()
    head.register_forward_pre_hook(lambda _, args: (args[0].float(), *args[1:]))
