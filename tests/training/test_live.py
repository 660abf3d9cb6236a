"""The four curves in a notebook: the values drawn, several runs, and redrawing while it grows."""

import math

import IPython
import IPython.display
import matplotlib
import pytest

matplotlib.use("Agg")

import matplotlib.pyplot as plt  # noqa: E402

from stablerl_core.four_curves import LABELS, PANELS  # noqa: E402
from stablerl_core.runlog import RunLog  # noqa: E402
from stablerl_core.training import live_plot  # noqa: E402
from stablerl_core.training.live import draw_curves  # noqa: E402

ROWS = [{"step": 0, "heldout_accuracy": 0.3}] + [
    {
        "step": n,
        "reward": n / 10,
        "length": 8.0 + n,
        "kl_ref": 0.01 * n,
        "entropy": 0.5,
        "loss": math.nan if n == 3 else 1e-8,
        "grad_norm": 10.0**n,
        "logp_gap": 1e-7,
        "staleness": 0,
    }
    for n in range(1, 6)
]


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def lines(figure):
    """Drawn series by label: (steps, values)."""
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata()))
        for ax in figure.axes
        for line in ax.lines
    }


def test_every_measured_value_is_drawn():
    figure = draw_curves(ROWS)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == [
        f"Layer {p.layer}: {p.title}" for p in PANELS
    ]
    drawn = lines(figure)
    assert set(drawn) == {LABELS[s] for p in PANELS for s in p.left + p.right}
    assert drawn["training reward"] == ([1, 2, 3, 4, 5], [0.1, 0.2, 0.3, 0.4, 0.5])
    assert drawn["held-out accuracy"] == ([0], [0.3])
    assert math.isnan(drawn["loss"][1][2]) and len(drawn["loss"][1]) == 5
    scales = {ax.get_yscale() for ax in figure.axes if ax.get_ylabel() == "gradient norm"}
    assert scales == {"log"}


def test_a_log_any_iterable_and_a_generator_draw_the_same():
    log = RunLog()
    for row in ROWS:
        log.append(row)
    expected = repr(lines(draw_curves(ROWS)))
    assert repr(lines(draw_curves(log))) == expected
    assert repr(lines(draw_curves(row for row in ROWS))) == expected


def test_runs_by_name_share_the_panels():
    figure = draw_curves({"first": ROWS, "second": (row for row in ROWS[:3])})
    drawn = lines(figure)
    assert len(drawn["training reward, first"][0]) == 5
    assert len(drawn["training reward, second"][0]) == 2
    styles = {line.get_label(): line.get_linestyle() for ax in figure.axes for line in ax.lines}
    assert styles["loss, first"] == "-" and styles["loss, second"] == "--"


def test_axes_that_are_given_are_drawn_into():
    figure, grid = plt.subplots(1, 4)
    assert draw_curves(ROWS, axes=grid) is figure
    assert all(ax.lines for ax in grid)
    with pytest.raises(ValueError):
        draw_curves(ROWS, axes=grid[:3])


@pytest.mark.parametrize(
    "rows", [[], [{"step": 1, "grad_norm": 0.0}], [{"step": 1, "grad_norm": math.nan}]]
)
def test_nothing_or_nothing_positive_can_be_drawn(rows):
    figure = draw_curves(rows)
    figure.canvas.draw()
    assert {ax.get_yscale() for ax in figure.axes} == {"linear"}


def test_outside_a_notebook_nothing_happens():
    redraw = live_plot(ROWS)
    assert redraw({"step": 10}) is None and not plt.get_fignums()


def test_in_a_notebook_one_picture_is_updated_as_the_run_grows(monkeypatch):
    shown = []

    class Handle:
        def update(self, figure):
            shown.append(lines(figure))

    def display(figure, display_id):
        assert display_id is True
        shown.append(lines(figure))
        return Handle()

    monkeypatch.setattr(IPython, "get_ipython", lambda: object())
    monkeypatch.setattr(IPython.display, "display", display)
    log = RunLog()
    log.append(ROWS[0])
    redraw = live_plot(log, every=2)
    for row in ROWS[1:]:
        log.append(row)
        redraw(row)
    assert [len(drawn["training reward"][0]) for drawn in shown] == [0, 2, 4]
    assert not plt.get_fignums()  # nothing is shown twice or kept in memory
