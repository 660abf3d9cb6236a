"""Group-relative advantages: how much better a completion did than its siblings."""

import math
from typing import Literal

import torch
from torch import Tensor

AdvantageScale = Literal["std", "none", "batch", "iqr"]
AdvantageBaseline = Literal["mean", "leave_one_out", "quantile"]


def group_advantages(
    rewards: Tensor,
    group_size: int,
    *,
    scale: AdvantageScale = "std",
    ddof: int = 0,
    eps: float = 1e-6,
    baseline: AdvantageBaseline = "mean",
    quantile: float = 0.4,
    interpolate: bool = False,
) -> Tensor:
    """Advantage of each completion over a baseline of its group (the completions of one prompt).

        Â_i = (R_i − baseline) / (scale + eps)

    rewards: (B,), any unit, sequences of one prompt adjacent. Returns (B,), detached, float32
    (float64 for float64 rewards). The rewards are those of completions drawn from μ.

    baseline: "mean" of the group (GRPO); "leave_one_out", the mean of the others, which makes Â_i
    unbiased (RLOO) and is G / (G − 1) times the former; "quantile", the group's K-quantile (QAE),
    K = `quantile`: the smallest reward that at least K of the group do not exceed. For right or
    wrong answers with pass rate p that is 0 if p ≤ 1 − K, so that only successes count, and else
    1, so that only failures do. `interpolate` draws a line between neighbours instead, as QAE's
    code does with torch.quantile; near p = 1 − K the gate is then no longer sharp.

    scale: "std" divides by the group's own standard deviation (GRPO), "batch" by that of all B
    rewards, "none" by nothing (Dr. GRPO, DeepSeek-V3.2, MiniRL). ddof 0 divides the squares by
    G, ddof 1 by G − 1: for rewards 1, 0, 1, 0 that is .500 against .577. TRL has ddof 1 and eps
    1e-4, verl ddof 1 and eps 1e-6. "iqr" divides by the distance of the group's quartiles; with
    baseline "quantile" and K = .5 that is how a "quantile-based reward normalization" would read.
    It is no remedy for outliers here: where under a quarter of the answers is right the quartiles
    coincide, eps alone divides, and Â is a million.

    A group counts as all-equal, and gets exact zeros, if max − min ≤ rtol · max|R| with rtol =
    1e-6 (two units in the last place for float16 and bfloat16 rewards). So rewards that differ
    by rounding (0.1 + 0.2 and 0.3) give 0 whatever eps is, not ± 1. A group of one is all-equal.

    Raises `ValueError`: rewards not (B,), empty or not finite; group_size does not divide B; an
    unknown scale or baseline; ddof not 0 or 1; eps negative, or 0 with "iqr"; quantile not in
    (0, 1).
    Source: arXiv 2402.03300 §4.1.2 (its formula names neither ddof nor eps); "none" 2503.20783;
    "leave_one_out" 2402.14740; "quantile" 2509.22611, K = .4 as in its authors' README.
    """
    _check(rewards, group_size, scale, ddof, eps)
    _check_baseline(baseline, quantile)
    resolution = torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    rtol = max(1e-6, 2 * resolution)
    dtype = torch.promote_types(rewards.dtype, torch.float32)
    groups = rewards.detach().to(dtype).view(-1, group_size)
    shifted = groups - groups[:, :1]  # exact for close rewards, whose mean would be rounded
    centred = _centred(shifted, baseline, quantile, interpolate)
    if scale == "std":
        centred = centred / (_std(shifted, ddof) + eps)
    elif scale == "batch":
        centred = centred / (_std(groups.view(1, -1), ddof) + eps)
    elif scale == "iqr":
        range_of_half = _quantile(shifted, 0.75, True) - _quantile(shifted, 0.25, True)
        centred = centred / (range_of_half + eps)
    spread = groups.amax(dim=1, keepdim=True) - groups.amin(dim=1, keepdim=True)
    all_equal = spread <= rtol * groups.abs().amax(dim=1, keepdim=True)
    return torch.where(all_equal, torch.zeros_like(centred), centred).view(-1)


def _centred(groups: Tensor, baseline: str, quantile: float, interpolate: bool) -> Tensor:
    """Rewards minus the baseline, both (groups, G)."""
    if baseline == "quantile":
        return groups - _quantile(groups, quantile, interpolate)
    centred = groups - groups.mean(dim=1, keepdim=True)
    size = groups.shape[1]
    return centred * (size / max(1, size - 1)) if baseline == "leave_one_out" else centred


def _quantile(groups: Tensor, quantile: float, interpolate: bool) -> Tensor:
    """The quantile of each row, (groups, 1): an entry of the row, or interpolated linearly."""
    if interpolate:
        return groups.quantile(quantile, dim=1, keepdim=True)
    rank = math.ceil(quantile * groups.shape[1] - 1e-9)  # .6 · 5 may come out above 3
    return groups.sort(dim=1).values[:, rank - 1 : rank]


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
    if scale not in ("std", "none", "batch", "iqr"):
        raise ValueError(f"scale is {scale!r}, expected 'std', 'none', 'batch' or 'iqr'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof!r}, expected 0 or 1")
    if not eps >= 0:
        raise ValueError(f"eps is {eps!r}, expected a number ≥ 0")
    if scale == "iqr" and eps == 0:
        raise ValueError("eps is 0, expected > 0 with scale 'iqr': equal quartiles divide by it")


def _check_baseline(baseline: str, quantile: float) -> None:
    if baseline not in ("mean", "leave_one_out", "quantile"):
        raise ValueError(
            f"baseline is {baseline!r}, expected 'mean', 'leave_one_out' or 'quantile'"
        )
    if not 0 < quantile < 1:
        raise ValueError(f"quantile is {quantile!r}, expected a number between 0 and 1")
