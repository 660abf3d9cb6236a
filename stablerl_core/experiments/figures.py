"""Pictures of repeated runs: means over seeds with their intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..four_curves import COLOURS, LABELS
from .results import Results

# What a reader compares across arms, from the curve everybody has to the one few look at.
ROWS = (
    (("reward",), "share", False),
    (("heldout_accuracy",), "share", False),
    (("length",), "tokens", False),
    (("kl_ref", "entropy"), "nats/token", False),
    (("grad_norm",), "2-norm", False),
    (("logp_gap",), "nats", True),
)


def small_multiples(
    results: Results,
    arms: Mapping[str, str],
    rows: Sequence[tuple[tuple[str, ...], str, bool]] = ROWS,
):
    """A grid of curves: one column an arm (name → title), one row a set of signals.

    Lines are means over seeds, bands 95 % intervals of the mean; a row shares its scale, so arms
    can be compared by eye. `rows` are (signals, unit, logarithmic). Returns the figure.
    """
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(
        len(rows),
        len(arms),
        figsize=(2.1 * len(arms) + 0.6, 1.35 * len(rows) + 0.5),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for line, (signals, unit, log) in zip(grid, rows, strict=True):
        for ax, arm in zip(line, arms, strict=True):
            for signal in signals:
                draw_band(ax, results, arm, signal)
            if log:
                ax.set_yscale("log")
        line[0].set_ylabel("\n".join([*(LABELS[s] for s in signals), f"({unit})"]), fontsize=9)
        if len(signals) > 1:
            line[0].legend(fontsize=7)
    for ax, title in zip(grid[0], arms.values(), strict=True):
        ax.set_title(title, fontsize=10)
    for ax in grid[-1]:
        ax.set_xlabel("step")
    return figure


def draw_band(ax, results: Results, arm: str, signal: str, colour: str = "", label: str = ""):
    """Draw one signal of one arm: mean over seeds and its 95 % interval."""
    steps, intervals = results.band(arm, signal)
    colour = colour or COLOURS[signal]
    ax.plot(steps, [i.mean for i in intervals], color=colour, label=label or LABELS[signal])
    low, high = [i.low for i in intervals], [i.high for i in intervals]
    ax.fill_between(steps, low, high, color=colour, alpha=0.25, linewidth=0)
