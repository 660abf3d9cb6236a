"""Explorer of chapter 25: how much of a reward reaches a decision, by its place in the answer."""

from __future__ import annotations

import torch

from ..experiments.chain import credit_moments
from ..policy import length_adaptive_lambda
from .explorer import Explorer, Slider
from .panels import Bars, Curves

PLACES = [i / 25 for i in range(26)]  # of the decision, as a share of the answer


def _arriving(length: int, lam: float, known: float, late: float, place: float) -> float:
    """Share of a decision's effect that its advantage shows, see `credit_moments`."""
    distance = round((1 - place) * (length - 1))
    delay = round(late * length)
    return credit_moments(distance, lam, known=known, delay=delay, chances=(1.0, 0.0))[0]


def credit_by_place(lam: float, length: float, known: float, late: float):
    """Share that arrives along an answer: for a chosen λ, for VAPO's, and for λ = 1."""
    length = round(length)  # a logarithmic slider also stands between two tokens
    adaptive = length_adaptive_lambda(torch.tensor([length], dtype=torch.float64)).item()
    chosen = {"this λ": lam, "VAPO's λ": adaptive, "λ = 1": 1.0}
    lines = {
        name: [_arriving(length, value, known, late, place) for place in PLACES]
        for name, value in chosen.items()
    }
    first = {name: values[0] for name, values in lines.items()}
    ours, theirs, _ = first.values()
    text = (
        f"With λ = {lam:g} the first of {length} tokens sees {ours:.2g} of what it did, "
        f"with VAPO's λ = {adaptive:.4g} it sees {theirs:.2g}."
    )
    return text, [
        Curves(
            "Share of a decision's effect that arrives",
            "place of the decision in the answer",
            "share",
            PLACES,
            lines,
            y_range=(0.0, 1.05),
        ),
        Bars("At the first token", "share", first),
    ]


CREDIT = Explorer(
    "credit",
    "Whose credit arrives?",
    credit_by_place,
    sliders=[
        Slider("lam", "λ of the advantages", [0.9, 0.95, 0.98, 0.99, 0.999, 1.0], 0.95),
        Slider("length", "length of the answer", [20, 100, 400, 2000], 2000, "tokens", log=True),
        Slider("known", "share of the effect that the critic comes to know", [0.0, 0.5, 1.0], 0.5),
        Slider("late", "when it knows, as a share of the answer", [0.0, 0.05, 0.2], 0.05),
    ],
    alt="Curves of the share of a decision's effect that reaches its advantage, against its place "
    "in the answer: level at 1 for λ = 1, elsewhere below what the critic knows and rising to 1 "
    "only at the last tokens. Bars of the same share at the first token.",
)

ALL = (CREDIT,)
