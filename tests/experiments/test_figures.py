"""Figures of repeated runs are tested on what they draw."""

import matplotlib
import pytest

matplotlib.use("Agg")

from stablerl_core.experiments import Results, draw_band, small_multiples  # noqa: E402


def _rows(offset: float) -> list[dict]:
    return [{"step": s, "reward": 0.1 * s + offset, "grad_norm": 1.0 + s} for s in range(4)]


RUNS = {arm: {"0": _rows(0.0), "1": _rows(0.2)} for arm in ("a", "b")}
MADE = Results("toy", "", {}, RUNS)
ROWS = ((("reward",), "share", False), (("grad_norm",), "2-norm", True))


def test_small_multiples_has_a_column_an_arm_and_a_row_a_signal():
    figure = small_multiples(MADE, {"a": "First", "b": "Second"}, ROWS)
    axes = figure.axes
    assert len(axes) == 4
    assert [ax.get_title() for ax in axes[:2]] == ["First", "Second"]
    assert axes[0].get_ylabel().startswith("training reward") and "share" in axes[0].get_ylabel()
    assert axes[2].get_yscale() == "log" and axes[3].get_xlabel() == "step"
    assert axes[0].get_ylim() == axes[1].get_ylim(), "a row shares its scale"


def test_a_band_is_drawn_around_the_mean_of_the_seeds():
    import matplotlib.pyplot as plt

    _, ax = plt.subplots()
    draw_band(ax, MADE, "a", "reward")
    line, band = ax.lines[0], ax.collections[0].get_paths()[0].vertices
    assert line.get_xdata().tolist() == [0, 1, 2, 3]
    assert line.get_ydata() == pytest.approx([0.1, 0.2, 0.3, 0.4])
    # two seeds 0.2 apart: standard error 0.1, t = 12.706
    assert band[:, 1].min() == pytest.approx(0.1 - 1.2706) and band[:, 1].max() > 0.4
