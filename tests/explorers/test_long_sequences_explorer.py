"""What the explorer of chapter 25 says is what GAE does."""

import re

import pytest
import torch

from stablerl_core.explorers.long_sequences import CREDIT, credit_by_place
from stablerl_core.policy import gae


def first_and_last(**values):
    _, (curves, bars) = credit_by_place(**values)
    shares = curves.lines["this λ"]
    assert bars.values["this λ"] == shares[0]
    return shares[0], shares[-1]


@pytest.mark.parametrize("known", [0.0, 0.5])
def test_the_shares_are_those_of_gae(known):
    length, lam, late = 20, 0.9, 0.2
    values = torch.full((2, length), 0.5, dtype=torch.float64)
    values[0, 5:] += known / 2  # four readings after that of the decision know nothing
    values[1, 5:] -= known / 2
    paid = torch.tensor([1.0, 0.0], dtype=torch.float64)
    advantages = gae(paid, values, torch.ones_like(values, dtype=torch.bool), lam=lam)
    expected = float(advantages[0, 0] - advantages[1, 0])
    first, last = first_and_last(lam=lam, length=length, known=known, late=late)
    assert first == pytest.approx(expected, rel=1e-12) and last == 1


def test_the_text_says_what_the_bars_show():
    text, (_, bars) = credit_by_place(lam=0.95, length=400, known=0.5, late=0.05)
    told = [float(x) for x in re.findall(r"sees ([\d.e-]+\d)", text)]
    shown = [bars.values["this λ"], bars.values["VAPO's λ"]]
    assert told == pytest.approx(shown, rel=0.05) and CREDIT.start["length"] == 2000
