"""The four curves as SVG and HTML: well formed, self-contained, honest about NaN."""

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from stablerl_core.four_curves import COLOURS, LABELS, PANELS, panel_svg, to_html
from stablerl_core.runlog import SIGNALS

ROWS = [{"step": 0, "heldout_accuracy": 0.3}] + [
    {
        "step": n,
        "reward": n / 10,
        "length": 8.0 + n,
        "kl_ref": 0.01 * n,
        "entropy": 0.5,
        "loss": (-1) ** n * 1e-8,
        "grad_norm": 10.0**n,
        "logp_gap": 1e-7,
        "staleness": n % 3,
    }
    for n in range(1, 9)
]
NUMBER = r"-?\d+(?:\.\d+)?(?:e-?\d+)?"


def curves(panel, rows):
    """Path data of each series by colour."""
    tree = ElementTree.fromstring(panel_svg(panel, rows))
    legend = {p.get("stroke"): [] for p in tree.iter("path") if p.get("stroke")}
    for p in tree.iter("path"):
        if p.get("stroke") and "h18" not in p.get("d"):
            legend[p.get("stroke")].append(p.get("d"))
    assert legend and all(len(d) == 1 for d in legend.values())
    return {colour: d[0] for colour, d in legend.items()}


def points(path):
    return [(float(x), float(y)) for x, y in re.findall(rf"({NUMBER}) ({NUMBER})", path)]


@pytest.mark.parametrize("panel", PANELS, ids=[f"layer {p.layer}" for p in PANELS])
@pytest.mark.parametrize("rows", [ROWS, ROWS[:2], ROWS[:1], []], ids=["run", "two", "one", "empty"])
def test_each_panel_is_a_figure_with_words(panel, rows):
    tree = ElementTree.fromstring(panel_svg(panel, rows))
    assert tree.tag == "svg" and tree.get("role") == "img"
    assert tree.get("aria-label").startswith(f"Layer {panel.layer}: {panel.title}")
    texts = ["".join(t.itertext()) for t in tree.iter("text")]
    assert f"Layer {panel.layer}: {panel.title}" in texts and "step" in texts
    for name in panel.left + panel.right:
        assert LABELS[name] in texts
        drawn = [row[name] for row in rows if name in row]
        told = f"{LABELS[name]} {drawn[0]:.3g} to {drawn[-1]:.3g}" if drawn else None
        assert (told or "") in tree.get("aria-label")


def test_the_panels_are_the_layers_and_draw_known_signals():
    assert [panel.layer for panel in PANELS] == [1, 2, 3, 4]
    for panel in PANELS:
        for name in panel.left + panel.right:
            assert SIGNALS[name].layer == panel.layer and name in COLOURS and name in LABELS
        assert len({COLOURS[n] for n in panel.left + panel.right}) == len(panel.left + panel.right)


def test_points_stand_where_their_values_are():
    """Steps from left to right, values linear from the axis at the bottom, all within the frame."""
    drawn = points(curves(PANELS[0], ROWS)[COLOURS["reward"]])
    assert len(drawn) == 8
    xs, ys = zip(*drawn, strict=True)
    assert all(58 <= x <= 402 for x in xs) and all(44 <= y <= 196 for y in ys)
    assert [b - a for a, b in zip(xs, xs[1:], strict=False)] == pytest.approx([43.0] * 7, abs=0.11)
    drops = [a - b for a, b in zip(ys, ys[1:], strict=False)]
    assert drops == pytest.approx([drops[0]] * 7, abs=0.11) and drops[0] > 5
    assert ys[-1] == pytest.approx(44 + (196 - 44) * (1 - 1 / 1.05), abs=0.1)  # .8 is the highest


def test_a_logarithmic_axis_is_linear_in_the_exponent():
    ys = [y for _, y in points(curves(PANELS[2], ROWS)[COLOURS["grad_norm"]])]
    drops = [a - b for a, b in zip(ys, ys[1:], strict=False)]
    assert drops == pytest.approx([drops[0]] * 7, abs=0.11) and drops[0] > 5


@pytest.mark.parametrize("fault", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("panel, signal", [(PANELS[2], "loss"), (PANELS[2], "grad_norm")])
def test_a_value_that_is_not_finite_breaks_the_line(panel, signal, fault):
    rows = [dict(row) for row in ROWS]
    rows[4][signal] = fault
    path = curves(panel, rows)[COLOURS[signal]]
    assert [len(points(part)) for part in path.split("M")[1:]] == [3, 4]
    assert not re.search("nan|inf", path)
    whole = points(curves(panel, ROWS)[COLOURS[signal]])
    assert points(path) == whole[:3] + whole[4:]  # the other points have not moved


def test_zero_and_negative_break_a_logarithmic_line():
    rows = [dict(row) for row in ROWS]
    rows[3]["grad_norm"], rows[6]["grad_norm"] = 0.0, -1.0
    path = curves(PANELS[2], rows)[COLOURS["grad_norm"]]
    assert [len(points(part)) for part in path.split("M")[1:]] == [2, 2, 2]


def test_a_logarithmic_panel_is_linear_until_its_values_spread():
    zeros = [{"step": n, "grad_norm": 0.0} for n in range(3)]
    heights = {y for _, y in points(curves(PANELS[2], zeros)[COLOURS["grad_norm"]])}
    assert len(heights) == 1
    equal_steps = [{"step": n, "grad_norm": 1.0 + n} for n in range(4)]
    ys = [y for _, y in points(curves(PANELS[2], equal_steps)[COLOURS["grad_norm"]])]
    drops = [a - b for a, b in zip(ys, ys[1:], strict=False)]
    assert drops == pytest.approx([drops[0]] * 3, abs=0.11)


def test_rounding_is_drawn_flat_and_a_real_gap_is_not():
    def spread(gap):
        rows = [{"step": n, "logp_gap": gap * (1 + n % 2)} for n in range(6)]
        ys = [y for _, y in points(curves(PANELS[3], rows)[COLOURS["logp_gap"]])]
        return max(ys) - min(ys)

    assert spread(3e-7) < 0.11 and spread(0.05) > 50


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-30, 1e30, math.nan, math.inf])
@pytest.mark.parametrize("panel", PANELS, ids=[f"layer {p.layer}" for p in PANELS])
def test_flat_and_extreme_series_stay_in_the_frame(panel, value):
    rows = [{"step": n} | {s: value for s in panel.left + panel.right} for n in range(3)]
    for path in curves(panel, rows).values():
        assert all(44 <= y <= 196.05 for _, y in points(path))


def test_a_signal_measured_now_and_then_is_one_line():
    rows = [dict(row, heldout_accuracy=0.5) if row["step"] % 4 == 0 else row for row in ROWS]
    path = curves(PANELS[0], rows)[COLOURS["heldout_accuracy"]]
    assert path.count("M") == 1 and len(points(path)) == 3


def page(**facts):
    return to_html(ROWS, "A run <of> & mine", facts)


def test_the_page_is_well_formed_and_loads_nothing():
    text = page(command="stablerl run", seed=0)
    tree = ElementTree.fromstring(
        text.removeprefix("<!doctype html>")
        .replace("<meta charset='utf-8'>", "")
        .replace("<meta name='viewport' content='width=device-width'>", "")
    )
    assert len(list(tree.iter("svg"))) == 4 and tree.get("lang") == "en"
    assert tree.find("h1").text == "A run <of> & mine"
    assert not re.search(r"https?:|//|url\(|@import|src=|href=|<script|<link", text)
    assert "color-scheme: light dark" in text


def test_facts_are_told_and_escaped():
    text = page(command="<script>alert('x')</script>", seed="1 & 2")
    assert "<script" not in text and "1 &amp; 2" in text
    rows = re.findall(r"<th scope='row'>(.*?)</th><td>(.*?)</td>", text)
    assert [key for key, _ in rows] == ["command", "seed"]


def test_an_empty_log_is_a_page_too():
    text = to_html([], "nothing yet", {})
    assert text.count("<svg") == 4 and not re.search("nan|inf", text.split("</style>")[1])
