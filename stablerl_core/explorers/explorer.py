"""The explorer: one function behind sliders, drawn on a static page and in a kernel."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from importlib.resources import files

from .panels import BOX, Axis, Panel, Row

LARGEST = 200_000  # bytes of one notebook output
Value = float | int | str
Shown = tuple[str, Sequence[Panel]]


@dataclass(frozen=True)
class Slider:
    """One argument of the function: its label, unit, the stops on the page, where it starts.

    `values` are numbers or words. In a kernel numbers between the stops can be chosen too, on a
    logarithmic scale if `log`; whole numbers stay whole.
    """

    name: str
    label: str
    values: Sequence[Value]
    start: Value
    unit: str = ""
    log: bool = False

    def __post_init__(self):
        if len(self.values) < 2 or self.start not in self.values:
            raise ValueError(
                f"slider {self.name!r}: start={self.start!r} must be one of at least two values, "
                f"got {list(self.values)!r}"
            )

    def words(self, value: Value) -> str:
        """A value as the reader sees it, with its unit."""
        text = value if isinstance(value, str) else f"{value:.4g}"
        return f"{text} {self.unit}".strip()

    def control(self):
        """The ipywidgets slider."""
        import ipywidgets

        given = {"description": self.label, "style": {"description_width": "initial"}}
        if any(isinstance(v, str) for v in self.values):
            return ipywidgets.SelectionSlider(options=self.values, value=self.start, **given)
        low, high = min(self.values), max(self.values)
        if self.log:
            ends = {"min": math.log10(low), "max": math.log10(high), "step": 0.01}
            return ipywidgets.FloatLogSlider(value=self.start, **ends, **given)
        if all(isinstance(v, int) for v in self.values):
            return ipywidgets.IntSlider(value=self.start, min=low, max=high, **given)
        ends = {"min": low, "max": high, "step": (high - low) / 200, "readout_format": ".3g"}
        return ipywidgets.FloatSlider(value=self.start, **ends, **given)


@dataclass(frozen=True, repr=False)
class Explorer:
    """A function of some sliders, and two ways to move them.

    function: takes the sliders' values by name; returns a line of text and the panels to draw.
    Titles, labels and names must be the same at all values; numbers and the text may change.
    alt: what the picture shows, for readers who do not see it.

    As the last value of a cell it is HTML, SVG and a small script over the grid of all stops: it
    works on a page without network or kernel. `widget()` is the same with ipywidgets, where
    every move calls the function. Numbers are kept to four significant digits in both.
    Raises `ValueError` if the grid is larger than a notebook output may be.
    """

    name: str
    title: str
    function: Callable[..., Shown]
    sliders: Sequence[Slider]
    alt: str

    def __repr__(self) -> str:
        return f"Explorer {self.name!r}: {', '.join(s.name for s in self.sliders)}"

    def frame(self, values: Mapping[str, Value]) -> list[str | Row]:
        """Everything that the sliders change at some values: the text, then rows of numbers."""
        text, panels = self.function(**values)
        if [panel.fixed() for panel in panels] != [panel.fixed() for panel in self._panels]:
            raise ValueError(f"function changes a title, label, range or name at {dict(values)}")
        return [text, *([_short(v) for v in row] for panel in panels for row in panel.rows())]

    @property
    def start(self) -> dict[str, Value]:
        """Where the sliders stand at first."""
        return {s.name: s.start for s in self.sliders}

    @cached_property
    def _panels(self) -> Sequence[Panel]:
        return self.function(**self.start)[1]

    def stops(self) -> list[dict[str, Value]]:
        """All values that the sliders can take on the page, the last slider moving fastest."""
        names = [s.name for s in self.sliders]
        every = itertools.product(*(s.values for s in self.sliders))
        return [dict(zip(names, values, strict=True)) for values in every]

    @cached_property
    def grid(self) -> list[list[str | Row]]:
        """The frames at all stops, in their order."""
        return [self.frame(values) for values in self.stops()]

    @cached_property
    def _places(self) -> list[tuple[int, int]]:
        """First and last row of each panel in a frame, whose row 0 is the text."""
        ends = itertools.accumulate((len(p.rows()) for p in self._panels), initial=1)
        return list(itertools.pairwise(ends))

    @cached_property
    def axes(self) -> list[tuple[Axis, Axis]]:
        """The axes of each panel, wide enough for the whole grid, so that they stand still."""
        return [
            panel.axes([frame[a:b] for frame in self.grid])
            for panel, (a, b) in zip(self._panels, self._places, strict=True)
        ]

    def picture(self, values: Mapping[str, Value]) -> str:
        """The text and the panels at any values, as HTML that moves nothing by itself."""
        frame = self.frame(values)
        drawn = "".join(
            f'<div data-panel="{i}">{panel.html(frame[a:b], a, self.axes[i])}</div>'
            for i, (panel, (a, b)) in enumerate(zip(self._panels, self._places, strict=True))
        )
        return f'<output>{escape(frame[0])}</output><div class="srl-panels">{drawn}</div>'

    def _repr_html_(self) -> str:
        pool: dict[str, int] = {}  # a row that several frames share is written once
        frames = [[pool.setdefault(_json(row), len(pool)) for row in f] for f in self.grid]
        words = [[s.words(v) for v in s.values] for s in self.sliders]
        facts = {"box": BOX, "stops": words, "axes": self.axes, "frames": frames}
        data = f'{_json(facts)[:-1]},"pool":[{",".join(pool)}]}}'
        html = (
            f'<figure class="srl-explorer" data-name="{escape(self.name)}" role="group" '
            f'aria-label="{escape(self.alt)}"><style>{_file("explorer.css")}</style>'
            f'<div class="srl-title">{escape(self.title)}</div>'
            f'<div class="srl-sliders">{"".join(map(_input, self.sliders))}</div>'
            f"{self.picture(self.start)}"
            "<noscript><p>Without JavaScript the sliders stand still.</p></noscript>"
            f'<script type="application/json">{data}</script>'
            f"<script>{_file('explorer.js')}</script></figure>"
        )
        if len(html.encode()) > LARGEST:
            raise ValueError(
                f"explorer {self.name!r} has {len(html.encode())} bytes, at most {LARGEST}: give "
                f"its {len(frames)} frames fewer stops or its curves fewer points"
            )
        return html

    def widget(self):
        """The sliders and the picture in a kernel; every move calls the function."""
        import ipywidgets

        controls = {s.name: s.control() for s in self.sliders}
        shown = ipywidgets.HTML()

        def redraw(_=None):
            picture = self.picture({name: c.value for name, c in controls.items()})
            style = f"<style>{_file('explorer.css')}</style>"
            shown.value = f'<div class="srl-explorer">{style}{picture}</div>'

        for control in controls.values():
            control.observe(redraw, "value")
        redraw()
        return ipywidgets.VBox([*controls.values(), shown])


def _short(value) -> float | str | None:
    """Four significant digits; None for what is not finite; words as they are."""
    if isinstance(value, str):
        return value
    return float(f"{value:.4g}") if value is not None and math.isfinite(value) else None


def _json(value) -> str:
    """JSON that can stand inside a script element, whole numbers without a point."""

    def plain(v):
        if isinstance(v, list | tuple):
            return [plain(x) for x in v]
        if isinstance(v, dict):
            return {k: plain(x) for k, x in v.items()}
        return int(v) if isinstance(v, float) and v.is_integer() and abs(v) < 1e9 else v

    text = json.dumps(plain(value), separators=(",", ":"), ensure_ascii=False)
    return text.replace("<", "\\u003c")


def _input(slider: Slider) -> str:
    """A slider over the stops; the attribute data-lm- keeps JupyterLab's hands off its keys."""
    at = list(slider.values).index(slider.start)
    words = escape(slider.words(slider.start))
    return (
        f"<label>{escape(slider.label)} <b>{words}</b>"
        f'<input type="range" min="0" max="{len(slider.values) - 1}" value="{at}" '
        f'aria-valuetext="{words}" data-lm-suppress-shortcuts="true" disabled></label>'
    )


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")
