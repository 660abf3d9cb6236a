"""BAPO's search: clip bounds that let positive advantages keep their share of the update."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ._batch import TokenBatch, token_batch

Order = Literal["paper", "code"]
Statistic = Literal["objective", "gradient", "code"]


@dataclass(frozen=True)
class BalanceBounds:
    """What the search chose, as plain numbers; `clip_low` and `clip_high` go to `policy_objective`.

    The bounds of the ratio are 1 − clip_low (the paper's c_low) and 1 + clip_high (c_high).
    """

    clip_low: float
    clip_high: float
    share: float  # of the tokens with Â > 0, under these bounds
    start_share: float  # the same where the search began
    reached: bool  # share ≥ target


def balance_bounds(
    logp: Tensor,
    old_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sampler_logp: Tensor | None = None,
    order: Order = "paper",
    statistic: Statistic = "objective",
    target: float = 0.4,
    low_range: tuple[float, float] = (0.6, 0.9),
    high_range: tuple[float, float] = (1.2, 3.0),
    low_step: float = 0.02,
    high_step: float = 0.05,
    reduce: Callable[[Tensor], Tensor] | None = None,
) -> BalanceBounds:
    """The first bounds on the search path under which positive advantages have their share.

    From c_low, c_high at the low end of their ranges, raise one by its step until share ≥ target:
    order "paper" takes all steps of c_high first, "code" all of c_low. The path is finite, and
    its last point is the answer if the target is never reached. The share, by `statistic`:

        objective  |Σ_{Â>0} μ f / Σ μ f|,  f = min(r Â, clip(r, c_low, c_high) Â)   Eq. 8, signed
        code       Σ_{Â>0} f / Σ |f|            the released code; no probability as weight
        gradient   Σ_{Â>0} r|Â| / Σ r|Â|, over tokens that the clip leaves a gradient       ours

    Raising c_low takes gradient from negative tokens, but f = c_low Â grows in size: by the first
    two the share moves away from the target, by "gradient" towards it. Eq. 8's denominator is a
    signed sum: near balance the share passes 1, and where the sum is 0 it is inf.
    Without a token of Â > 0 no bound could help: the search stays at its start with share 0, as
    it does without any token. Without one of Â < 0 the share is 1.

    logp, old_logp, advantages, mask: as in `policy_objective`, with the WHOLE batch of an update,
    before micro-batches; no gradient is kept. sampler_logp: log μ of "objective", None = old_logp.
    reduce: with the batch spread over ranks, a function that sums a tensor over them (all-reduce);
    it gets one (candidates, 2) tensor of sums, and all ranks choose alike.

    Defaults are the paper's. The released code has order and statistic "code", low_range
    (0.6, 0.8), high_range (1.2, 2.0), both steps 0.05, target 0.5 (its config says a
    positive/negative ratio of 1), and a dual clip of 3. Whole steps only, as in the paper.
    Raises `ValueError`: what `policy_objective` raises; an unknown order or statistic; a target
    or step not > 0; a range not 0 ≤ low ≤ high with 1 between the two ranges.
    Source: arXiv 2510.18927 Eq. 8, Algorithm 1; github.com/WooooDyy/BAPO recipe/bapo.
    """
    _check(order, statistic, target, low_range, high_range, low_step, high_step)
    with torch.no_grad():
        batch = token_batch(logp, old_logp, sampler_logp, advantages, mask)
        low = [low_range[0] + k * low_step for k in range(_steps(low_range, low_step) + 1)]
        high = [high_range[0] + k * high_step for k in range(_steps(high_range, high_step) + 1)]
        path = list(_path(low, high, order))
        sums = torch.stack([_sums(batch, c_low, c_high, statistic) for c_low, c_high in path])
    sums = sums if reduce is None else reduce(sums)
    share = (sums[:, 0] / sums[:, 1]).abs().nan_to_num(nan=0.0, posinf=float("inf")).tolist()
    stuck = 0 if not sums[:, 0].any() else len(path) - 1
    chosen = next((k for k, s in enumerate(share) if s >= target), stuck)
    clip_low, clip_high = (round(abs(bound - 1), 12) for bound in path[chosen])  # 0.2, not 0.1999…
    return BalanceBounds(
        clip_low, clip_high, share[chosen], share[0], reached=share[chosen] >= target
    )


def _path(low: list[float], high: list[float], order: Order) -> Iterator[tuple[float, float]]:
    """All candidates in the order in which they are tried."""
    if order == "paper":
        yield from ((low[0], c_high) for c_high in high)
        yield from ((c_low, high[-1]) for c_low in low[1:])
    else:
        yield from ((c_low, high[0]) for c_low in low)
        yield from ((low[-1], c_high) for c_high in high[1:])


def _sums(batch: TokenBatch, c_low: float, c_high: float, statistic: Statistic) -> Tensor:
    """(2,): what positive advantages contribute, and what all do."""
    log_ratio, advantages = batch.log_ratio[batch.mask], batch.advantages[batch.mask]
    positive, negative = advantages > 0, advantages < 0
    floor, cap = torch.tensor([c_low, c_high], dtype=torch.float64).log().tolist()
    bounded = torch.where(positive, log_ratio.clamp(max=cap), log_ratio.clamp(min=floor))
    if statistic == "gradient":
        advantages = advantages.masked_fill(bounded != log_ratio, 0)
    elif statistic == "objective":  # μ r in one exponential: no 0 · inf
        bounded = bounded + batch.sampler_logp[batch.mask]
    size = bounded.exp() * advantages.abs()
    gain, loss = size[positive].sum(), size[negative].sum()
    return torch.stack([gain, gain - loss if statistic == "objective" else gain + loss])


def _steps(bounds: tuple[float, float], step: float) -> int:
    """Whole steps from one end of a range to the other, forgiving the last bits of a float."""
    return int((bounds[1] - bounds[0]) / step + 1e-9)


def _check(
    order: str,
    statistic: str,
    target: float,
    low_range: tuple[float, float],
    high_range: tuple[float, float],
    low_step: float,
    high_step: float,
) -> None:
    if order not in ("paper", "code"):
        raise ValueError(f"order is {order!r}, expected 'paper' or 'code'")
    if statistic not in ("objective", "gradient", "code"):
        raise ValueError(f"statistic is {statistic!r}, expected 'objective', 'gradient' or 'code'")
    for name, value in (("target", target), ("low_step", low_step), ("high_step", high_step)):
        if not 0 < value < float("inf"):
            raise ValueError(f"{name} is {value!r}, expected a finite number > 0")
    if not 0 <= low_range[0] <= low_range[1] <= 1:
        raise ValueError(
            f"low_range is {low_range!r}, expected 0 ≤ low ≤ high ≤ 1: bounds of the ratio itself"
        )
    if not 1 <= high_range[0] <= high_range[1] < float("inf"):
        raise ValueError(
            f"high_range is {high_range!r}, expected 1 ≤ low ≤ high: bounds of the ratio itself"
        )
