"""Explorer of chapter 12: what a group of G tells about a problem of pass rate p."""

from __future__ import annotations

from ..rewards import advantage_moments, draws_per_group, group_size_for, no_signal_chance
from .explorer import Explorer, Slider
from .panels import Bars, Curves

RATES = [0.01, *(i / 40 for i in range(1, 40)), 0.99]
BUDGET = 64  # completions


def group_of(p: float, size: int):
    """Chance of no signal over all pass rates, and what 64 completions give at this one."""
    silent = no_signal_chance(p, size)
    moments = advantage_moments(p, size)
    groups = BUDGET / size
    text = (
        f"Of problems solved {p:.0%} of the time, {silent:.0%} of the groups of {size} have no "
        f"gradient; dynamic sampling draws {draws_per_group([p], size):.3g} for each that it "
        f"keeps. Nine of ten groups would have one from G = {group_size_for(p)} on."
    )
    every = {
        "no signal": [no_signal_chance(rate, size) for rate in RATES],
        "std of the rewards": [(rate * (1 - rate)) ** 0.5 for rate in RATES],
    }
    return text, [
        Curves(
            "Groups without a gradient",
            "pass rate p",
            "share",
            RATES,
            every,
            points={"this problem": (p, silent)},
            y_range=(0, 1),
        ),
        Bars(
            "64 completions in groups of G",
            "number",
            {"groups": groups, "with a gradient": groups * (1 - silent)},
            y_range=(0, 32),
        ),
        Bars(
            "Advantage, in exact expectation",
            "squared error",
            {"signal E[ÂA]": moments.signal, "E[Â²]": moments.second, "E[(Â−A)²]": moments.error},
            y_range=(0, 1.2),
        ),
    ]


GROUP_OF = Explorer(
    "group_of",
    "When has a group a gradient?",
    group_of,
    [
        Slider("p", "pass rate", [0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.98], 0.1),
        Slider("size", "completions in a group", [2, 4, 6, 8, 12, 16, 24, 32, 64], 8),
    ],
    alt="The share of groups without a gradient is 1 at pass rates 0 and 1 and lowest in the "
    "middle; larger groups press it down and widen the middle, but of a fixed number of "
    "completions they make fewer groups.",
)
ALL = (GROUP_OF,)
