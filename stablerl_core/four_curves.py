"""The four curves of a run, as a self-contained SVG and HTML page. Standard library only."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One of the four pictures: a layer, and signals drawn on a left and a right axis.

    An axis spans at least its `least` value, so that rounding does not look like news.
    """

    layer: int
    title: str
    left: tuple[str, ...]
    left_label: str
    right: tuple[str, ...]
    right_label: str
    log_left: bool = False
    log_right: bool = False
    least_left: float = 0.0
    least_right: float = 0.0


PANELS = (
    Panel(1, "Data and rewards", ("reward", "heldout_accuracy"), "share", ("length",), "tokens"),
    Panel(2, "Policy change", ("kl_ref",), "nats/token", ("entropy",), "nats/token"),
    Panel(
        3,
        "Numerical updates",
        ("loss",),
        "loss",
        ("grad_norm",),
        "gradient norm",
        log_right=True,
        least_left=0.01,
    ),
    Panel(
        4,
        "Training system",
        ("logp_gap",),
        "nats",
        ("staleness",),
        "versions",
        least_left=0.01,
        least_right=1.0,
    ),
)

# Okabe–Ito: told apart by readers with any colour vision, on white and on black.
COLOURS = {
    "reward": "#E69F00",
    "heldout_accuracy": "#0072B2",
    "length": "#888888",
    "solved_groups": "#009E73",
    "kl_ref": "#D55E00",
    "kl_step": "#CC79A7",
    "entropy": "#56B4E9",
    "loss": "#CC79A7",
    "grad_norm": "#009E73",
    "logp_gap": "#D55E00",
    "staleness": "#888888",
}

LABELS = {
    "reward": "training reward",
    "heldout_accuracy": "held-out accuracy",
    "length": "length",
    "solved_groups": "solved groups",
    "kl_ref": "KL to reference",
    "kl_step": "KL of the step",
    "entropy": "entropy",
    "loss": "loss",
    "grad_norm": "gradient norm",
    "logp_gap": "sampler-trainer gap",
    "staleness": "staleness",
}

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 230, 58, 58, 44, 34

Points = Sequence[tuple[float, float]]


def spans_decades(series: Iterable[Points]) -> bool:
    """Whether positive values spread over more than a factor of ten: worth a logarithmic axis."""
    values = [v for points in series for _, v in points if math.isfinite(v) and v > 0]
    return bool(values) and max(values) > 10 * min(values)


def axis_range(series: Iterable[Points], log: bool, least: float = 0.0) -> tuple[float, float]:
    """Lowest and highest value of an axis (their log10 if `log`), at least `least` apart."""
    values = [v for points in series for _, v in points if math.isfinite(v) and (v > 0 or not log)]
    if log:
        values = [math.log10(v) for v in values]
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if not log and low >= 0:
        low = 0.0
    missing = (least or 1.0) - (high - low)
    if missing > 0 and (least or high - low < 1e-12):
        low, high = (low, high + missing) if low == 0 else (low - missing / 2, high + missing / 2)
    return low, high + 0.05 * (high - low)


def colour_of(name: str) -> str:
    """The colour of a signal, the same in all pictures."""
    return COLOURS.get(name, "#D55E00")


def label_of(name: str) -> str:
    """The name of a signal in a legend."""
    return LABELS.get(name, name.replace("_", " "))


def _path(points: Points, x, y, log: bool) -> str:
    """SVG path of a series; a non-finite value breaks the line."""
    out, pen = [], "M"
    for step, value in points:
        if not math.isfinite(value) or (log and value <= 0):
            pen = "M"
            continue
        out.append(f"{pen}{x(step):.1f} {y(math.log10(value) if log else value):.1f}")
        pen = "L"
    return " ".join(out)


def _tick(value: float, log: bool) -> str:
    value = 10**value if log else value
    return f"{value:.2g}" if value == 0 or 1e-3 <= abs(value) < 1e4 else f"{value:.0e}"


def _axis(low: float, high: float, log: bool, at: float, anchor: str, label: str, y) -> str:
    ticks = "".join(
        f'<text x="{at}" y="{y(v) + 4:.1f}" text-anchor="{anchor}">{_tick(v, log)}</text>'
        for v in (low, (low + high) / 2, high)
    )
    x = 12 if anchor == "end" else WIDTH - 6
    middle = (TOP + HEIGHT - BOTTOM) / 2
    return ticks + (
        f'<text class="unit" x="{x}" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 {x} {middle})">{html.escape(label)}</text>'
    )


def panel_svg(
    panel: Panel,
    rows: Sequence[Mapping[str, float]],
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """One panel as an SVG figure with a title, a description, axes and a legend.

    Each of `marks`, a step and what happened there, is an upright line that shows its text to
    the mouse.
    """
    steps = [row["step"] for row in rows] or [0, 1]
    first, last = min(steps), max(max(steps), min(steps) + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    body, legend, words = [], [], []
    for side, label, log, least in (
        (panel.left, panel.left_label, panel.log_left, panel.least_left),
        (panel.right, panel.right_label, panel.log_right, panel.least_right),
    ):
        series = {s: [(r["step"], r[s]) for r in rows if s in r] for s in side}
        log = log and spans_decades(series.values())
        low, high = axis_range(series.values(), log, least)

        def y(value: float, low=low, high=high) -> float:
            return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

        at, anchor = (LEFT - 6, "end") if side is panel.left else (WIDTH - RIGHT + 6, "start")
        body.append(_axis(low, high, log, at, anchor, label + (" (log)" if log else ""), y))
        dash = "" if side is panel.left else ' stroke-dasharray="5 3"'
        for name, points in series.items():
            body.append(f'<path d="{_path(points, x, y, log)}" stroke="{colour_of(name)}"{dash}/>')
            legend.append((name, dash))
            if points:
                words.append(f"{label_of(name)} {points[0][1]:.3g} to {points[-1][1]:.3g}")
    for step, event in marks:
        at = min(max(x(step), LEFT), WIDTH - RIGHT)
        told = html.escape(f"step {step:g}: {event}")
        line = f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"
        body.append(f'<path class="event" d="{line}"><title>{told}</title></path>')
        words.append(f"marked at step {step:g}")
    keys = "".join(
        f'<path d="M{LEFT + 130 * i} 30h18" stroke="{colour_of(n)}"{d}/>'
        f'<text x="{LEFT + 130 * i + 22}" y="34">{html.escape(label_of(n))}</text>'
        for i, (n, d) in enumerate(legend)
    )
    title = f"Layer {panel.layer}: {panel.title}"
    return (
        f'<svg class="panel" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{html.escape(title + ". " + "; ".join(words))}">'
        f'<text class="title" x="{LEFT}" y="16">{title}</text>{keys}'
        f'<path class="frame" d="M{LEFT} {TOP}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}V{TOP}"/>'
        f'<text x="{LEFT}" y="{HEIGHT - 16}">{first:g}</text>'
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 16}" text-anchor="end">{last:g}</text>'
        f'<text class="unit" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}" '
        f'text-anchor="middle">step</text>{"".join(body)}</svg>'
    )


STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --line: #bbb; }
@media (prefers-color-scheme: dark) { :root { --ink: #ddd; --page: #16181d; --line: #555; } }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page);
       max-width: 62rem; margin: 2rem auto; padding: 0 1rem; }
.panels { display: grid; gap: 1rem;
          grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.panel { width: 100%; font-size: 11px; fill: var(--ink); }
.panel .title { font-size: 13px; font-weight: 600; }
.panel path { fill: none; stroke-width: 1.8; }
.panel .event { stroke: var(--ink); stroke-width: 1.2; stroke-dasharray: 3 3; }
.panel .frame { stroke: var(--line); stroke-width: 1; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
td, th { border-bottom: 1px solid var(--line); padding: .25rem .75rem; text-align: left; }
"""


def to_html(rows: Sequence[Mapping[str, float]], title: str, facts: Mapping[str, object]) -> str:
    """A self-contained page: the four panels, then a table of facts about the run.

    `rows` are the rows of a run log, `facts` what a reader needs to repeat the run (command,
    seed, versions, hardware). The page loads nothing and follows the reader's light or dark
    theme.
    """
    panels = "".join(panel_svg(panel, rows) for panel in PANELS)
    table = "".join(
        f"<tr><th scope='row'>{html.escape(str(k))}</th><td>{html.escape(str(v))}</td></tr>"
        for k, v in facts.items()
    )
    title = html.escape(title)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'>"
        f"<meta name='viewport' content='width=device-width'><title>{title}</title>"
        f"<style>{STYLE}</style><h1>{title}</h1><div class='panels'>{panels}</div>"
        f"<h2>How it was made</h2><table>{table}</table></html>"
    )
