"""Group-relative advantages: how much better a completion did than its siblings."""

from typing import Literal

import torch
from torch import Tensor

AdvantageScale = Literal["std", "none", "batch"]


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: AdvantageScale = "std",
    ddof: int = 0,
    eps: float = 1e-6,
) -> Tensor:
    """Advantage of each completion over the mean of its group (the completions of one prompt).

        Â_i = (R_i − mean_group R) / (std + eps)

    rewards: (B,), any unit, sequences of one prompt adjacent. Returns (B,), detached, float32
    (float64 for float64 rewards). The rewards are those of completions drawn from μ.

    scale: "std" divides by the group's own standard deviation (GRPO), "batch" by that of all B
    rewards, "none" by nothing (Dr. GRPO, DeepSeek-V3.2, MiniRL). ddof 0 divides the squares by
    G, ddof 1 by G − 1 (TRL and verl): for rewards 1, 0, 1, 0 that is .500 against .577.

    A group counts as all-equal, and gets exact zeros, if max − min ≤ rtol · max|R| with rtol =
    1e-6 (two units in the last place for float16 and bfloat16 rewards). So rewards that differ
    by rounding (0.1 + 0.2 and 0.3) give 0 whatever eps is, not ± 1. A group of one is all-equal.

    Raises `ValueError`: rewards not (B,), empty or not finite; group_size does not divide B; an
    unknown scale; ddof not 0 or 1; eps negative.
    Source: arXiv 2402.03300 §4.1.2 (its formula names neither ddof nor eps); "none" 2503.20783.
    """
    _check(rewards, group_size, scale, ddof, eps)
    resolution = torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    rtol = max(1e-6, 2 * resolution)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    groups = rewards.detach().to(dtype).view(-1, group_size)
    shifted = groups - groups[:, :1]  # exact for close rewards, whose mean would be rounded
    centred = shifted - shifted.mean(dim=1, keepdim=True)
    if scale == "std":
        centred = centred / (_std(shifted, ddof) + eps)
    elif scale == "batch":
        centred = centred / (_std(groups.view(1, -1), ddof) + eps)
    spread = groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True)
    all_equal = spread <= rtol * groups.abs().amax(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(centred), centred).view(-1)


def _std(rows: Tensor, ddof: int) -> Tensor:
    """Standard deviation of each row, (rows, 1); a row of one gives 0 for either ddof."""
    return rows.std(dim=1, keepdim=True, correction=min(ddof, rows.shape[1] - 1))


def _check(rewards: Tensor, group_size: int, scale: str, ddof: int, eps: float) -> None:
    if rewards.ndim != 1 or len(rewards) == 0:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, expected (B,) with B > 0: one number a "
            "sequence"
        )
    if group_size < 1 or len(rewards) % group_size:
        raise ValueError(
            f"group_size {group_size} does not divide the {len(rewards)} rewards: pass whole "
            "groups, the sequences of one prompt adjacent"
        )
    if not torch.isfinite(rewards).all():
        bad = (~torch.isfinite(rewards)).nonzero().view(-1).tolist()
        raise ValueError(
            f"rewards is not finite at {bad[:8]} (B = {len(rewards)}): mend the reward function, "
            "or decide what a sequence without a verdict is worth"
        )
    if scale not in ("std", "none", "batch"):
        raise ValueError(f"scale is {scale!r}, expected 'std', 'none' or 'batch'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof!r}, expected 0 or 1")
    if not eps >= 0:
        raise ValueError(f"eps is {eps!r}, expected a number ≥ 0")
