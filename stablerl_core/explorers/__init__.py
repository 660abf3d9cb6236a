"""Interactive figures: one function behind sliders, alive on the static page and in a kernel.

To make one, write a function of the sliders' values that returns a line of text and panels:

    def coin(bias, tosses):
        x = [i / 50 for i in range(1, 50)]
        rows = torch.tensor([[p, 1 - p] for p in [bias, *x]], dtype=torch.float64)
        now, *curve = entropy(rows.log()).tolist()
        return f"{tosses} tosses carry {tosses * now:.2f} nats.", [
            Curves("Entropy", "bias", "nats", x, {"entropy": curve}, {"now": (bias, now)}),
            Bars("All tosses", "nats", {"entropy": tosses * now}),
        ]

    COIN = Explorer(
        "coin", "How much does a coin tell?", coin, alt="An arch of entropy, highest at one half.",
        sliders=[Slider("bias", "bias of the coin", [i / 20 for i in range(1, 20)], 0.5),
                 Slider("tosses", "number of tosses", [1, 2, 5, 10], 1)])

Put it into a module of this package and its name into `ALL` there; `tests/explorers` and the
browser test then find it. In a notebook `COIN` as the last line of a cell shows the static form
(commit that); a reader with a kernel types `COIN.widget()`. Rules:

- Compute in float64, so that the page is the same on every machine to the digits it keeps.
- Every slider must change the picture and the text at some stop.
- Sliders × points must fit: the HTML may have 200 kB. Twelve stops a slider is plenty.
- Panels: `Curves` (lines, points, vertical guides, log axes), `Bars`, `Table` (of texts).
"""

from . import (
    balance,
    clipping,
    kl_entropy,
    kl_gradient,
    long_sequences,
    newton_schulz,
    queues,
    vanishing_gradient,
)
from .explorer import Explorer, Slider
from .panels import Bars, Curves, Table

CHAPTERS = (
    vanishing_gradient,
    kl_entropy,
    kl_gradient,
    clipping,
    balance,
    long_sequences,
    newton_schulz,
    queues,
)
EXPLORERS = {e.name: e for chapter in CHAPTERS for e in chapter.ALL}

__all__ = ["EXPLORERS", "Bars", "Curves", "Explorer", "Slider", "Table"]
