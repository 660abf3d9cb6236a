"""Explorer of chapter 23: the share of positive advantages, counted in three ways."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..policy import balance_bounds
from .explorer import Explorer, Slider
from .panels import Bars, Curves

STATISTICS = {"objective": "Eq. 8", "code": "released code", "gradient": "gradient"}
COLOURS = {"Eq. 8": "#888888", "released code": "#0072B2", "gradient": "#009E73"}
LOWS = [0.6 + i / 40 for i in range(13)]


def even_batch(spread: float, longer: int = 1, points: int = 41) -> tuple[Tensor, ...]:
    """One group of 8 answers, 2 of them right, every answer with the same token ratios.

    Log-ratios are normal quantiles with standard deviation `spread`; wrong answers have
    `longer` times the tokens. Returns logp, old_logp (8, longer · points), advantages (8,), mask.
    """
    quantiles = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    log_ratio = spread * torch.special.ndtri(quantiles).repeat(8, longer)
    old_logp = torch.full_like(log_ratio, -4.0)
    right = torch.arange(8) < 2
    advantages = (right.double() - 0.25) / right.double().std(correction=0)
    mask = (torch.arange(longer * points) < points) | ~right[:, None]
    return old_logp + log_ratio, old_logp, advantages, mask


def share(batch: tuple[Tensor, ...], statistic: str, c_low: float, c_high: float) -> float:
    """The share of Â > 0 under fixed bounds of the ratio: a search with nowhere to go."""
    fixed = {"low_range": (c_low, c_low), "high_range": (c_high, c_high)}
    return balance_bounds(*batch, statistic=statistic, **fixed).share


def balance(spread: float, longer: int, c_low: float, c_high: float):
    """Shares against c_low at the chosen c_high, and those under the chosen bounds."""
    batch = even_batch(spread, longer)
    lines = {
        label: [share(batch, name, low, c_high) for low in LOWS]
        for name, label in STATISTICS.items()
    }
    now = {label: share(batch, name, c_low, c_high) for name, label in STATISTICS.items()}
    signed = now.pop("Eq. 8")
    text = (
        f"Ratios between {c_low:g} and {c_high:g}: positive advantages have "
        f"{now['gradient']:.3f} of the gradient and {now['released code']:.3f} of the objective's "
        f"size; Eq. 8 says {'more than 1' if signed > 1 else f'{signed:.3f}'}."
    )
    return text, [
        Curves(
            "Share of positive advantages",
            "lower bound of the ratio, c_low",
            "share",
            LOWS,
            {name: [v if v < 2 else math.nan for v in values] for name, values in lines.items()},
            guides={"chosen": c_low},
            colours=COLOURS,
            y_range=(0, 1),
        ),
        Bars("Under the chosen bounds", "share", now, COLOURS, y_range=(0, 1)),
    ]


BALANCE = Explorer(
    "balance",
    "Which share do positive advantages have?",
    balance,
    [
        Slider("spread", "spread of log r", [0.05, 0.2, 0.4, 0.8], 0.4),
        Slider("longer", "length of wrong answers", [1, 2, 4], 1, unit="times"),
        Slider("c_low", "lower bound c_low", [0.6, 0.7, 0.8, 0.9], 0.6),
        Slider("c_high", "upper bound c_high", [1.2, 1.6, 2.0, 3.0], 1.2),
    ],
    alt="As the lower bound rises, the share measured by gradient rises too, while the share "
    "measured by the size of the objective, as in the released code, falls slightly.",
)
ALL = (BALANCE,)
