"""The four curves in a notebook, redrawn while a run goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ..four_curves import COLOURS, LABELS, PANELS, axis_range, spans_decades


def draw_curves(runs: Mapping[str, Iterable[Mapping]] | Iterable[Mapping], axes=None):
    """Draw the four panels of one run, or of several by name, with matplotlib; returns the figure.

    A run is a `RunLog` or any iterable of its rows. Several runs share the panels: the first is
    solid, the others follow in other dashes. `axes` are four axes to draw into.
    """
    import matplotlib.pyplot as plt

    runs = runs if isinstance(runs, Mapping) else {"": runs}
    runs = {name: list(rows) for name, rows in runs.items()}  # read once, drawn eight times
    if axes is None:
        _, grid = plt.subplots(2, 2, figsize=(9, 6), layout="constrained")
        axes = grid.flat
    for ax, panel in zip(axes, PANELS, strict=True):
        _draw_panel(ax, panel, runs)
    return axes[0].figure


def _draw_panel(ax, panel, runs: Mapping[str, Iterable[Mapping]]) -> None:
    twin = ax.twinx()
    sides = (
        (ax, panel.left, panel.left_label, panel.log_left, panel.least_left, 1.0),
        (twin, panel.right, panel.right_label, panel.log_right, panel.least_right, 0.6),
    )
    for side, signals, label, log, least, alpha in sides:
        drawn = []
        for (name, rows), dash in zip(runs.items(), ("-", "--", ":", "-.") * 4, strict=False):
            for signal in signals:
                points = [(r["step"], r[signal]) for r in rows if signal in r]
                text = LABELS[signal] + (f", {name}" if name else "")
                style = dict(color=COLOURS[signal], linestyle=dash, label=text, alpha=alpha)
                side.plot(*zip(*points, strict=True) if points else ((), ()), **style)
                drawn.append(points)
        if log and spans_decades(drawn):
            side.set_yscale("log")
        else:
            side.set_ylim(axis_range(drawn, False, least))
        side.set_ylabel(label)
    lines = ax.lines[:] + twin.lines[:]
    ax.legend(lines, [line.get_label() for line in lines], fontsize=8, loc="best")
    ax.set(title=f"Layer {panel.layer}: {panel.title}", xlabel="step")


def live_plot(run: Iterable[Mapping], every: int = 10) -> Callable[[Mapping], None]:
    """Show the four curves of `run` and return a function that redraws them as it grows.

        trainer.run(on_step=live_plot(trainer.log))

    In a notebook the picture is updated in place every `every` steps; elsewhere nothing is
    shown and the call costs nothing.
    """
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        return lambda row: None
    if get_ipython() is None:
        return lambda row: None
    import matplotlib.pyplot as plt

    figure = draw_curves(run)
    handle = display(figure, display_id=True)
    plt.close(figure)

    def redraw(row: Mapping) -> None:
        if row["step"] % every == 0:
            figure = draw_curves(run)
            handle.update(figure)
            plt.close(figure)

    return redraw
