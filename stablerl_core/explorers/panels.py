"""What an explorer can show: curves, bars, a table. Each draws itself from rows of numbers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from ..four_curves import axis_range

WIDTH, HEIGHT = 340, 220
BOX = LEFT, RIGHT, TOP, BOTTOM = 56, WIDTH - 10, 8, HEIGHT - 36
PALETTE = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#888888")
DASHES = ("", "6 3", "2 2", "8 2 2 2")  # tell lines apart once the palette is used up

Row = list  # numbers, None where there is none, or the words of a table
Axis = tuple[float, float, bool]  # lowest and highest (their log10 if the flag is set), log?


@dataclass(frozen=True)
class Curves:
    """Lines over a common x, marked points (x, y), and vertical guides at some x.

    Values that are not finite, or outside a range, leave a gap. A range that is not given spans
    what the lines of the whole grid reach.
    """

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]
    points: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    guides: Mapping[str, float] = field(default_factory=dict)
    colours: Mapping[str, str] = field(default_factory=dict)
    x_range: tuple[float, float] | None = None
    y_range: tuple[float, float] | None = None
    log_x: bool = False
    log_y: bool = False

    def __post_init__(self):
        for name, values in self.lines.items():
            if len(values) != len(self.x):
                raise ValueError(f"lines[{name!r}] has {len(values)} values for {len(self.x)} x")

    def fixed(self) -> tuple:
        """What a slider must not change."""
        names = tuple(self.lines), tuple(self.points), tuple(self.guides)
        ranges = self.x_range, self.y_range, self.log_x, self.log_y
        return self.title, self.x_label, self.y_label, *ranges, *names, tuple(self.colours.items())

    def rows(self) -> list[Row]:
        return [
            list(self.x),
            *map(list, self.lines.values()),
            *map(list, self.points.values()),
            *([x] for x in self.guides.values()),
        ]

    def axes(self, frames: Sequence[list[Row]]) -> tuple[Axis, Axis]:
        """The axes that hold every frame of the grid; x spans its values exactly."""
        xs = [v for rows in frames for v in rows[0] if v is not None]
        heights = [rows[i] for rows in frames for i in range(1, 1 + len(self.lines))]
        x_range = self.x_range or (min(xs), max(xs))
        return _axis(x_range, self.log_x), _axis(self.y_range, self.log_y, heights)

    def html(self, rows: Sequence[Row], at: int, axes: tuple[Axis, Axis]) -> str:
        """The drawing of one frame; `at` is where this panel's rows begin in a frame."""
        x, y = axes
        n, m = 1 + len(self.lines), 1 + len(self.lines) + len(self.points)
        drawn = [
            *(self._line(i, rows[0], rows[1 + i], at, axes) for i in range(len(self.lines))),
            *(self._point(i, rows[n + i], at + n + i, axes) for i in range(len(self.points))),
            *(self._guide(i, rows[m + i], at + m + i, x) for i in range(len(self.guides))),
        ]
        label = f"{self.title}: {', '.join(self.lines)} against {self.x_label}"
        axis = _x_axis(x, self.x_label) + _y_axis(y, self.y_label)
        return _figure(
            self.title, label, [key for _, key in drawn], axis + "".join(mark for mark, _ in drawn)
        )

    def _colour(self, name: str) -> str:
        names = [*self.lines, *(p for p in self.points if p not in self.lines)]
        return self.colours.get(name, PALETTE[names.index(name) % len(PALETTE)])

    def _line(self, i: int, xs: Row, ys: Row, at: int, axes) -> tuple[str, str]:
        name, dash = list(self.lines)[i], DASHES[i // len(PALETTE) % len(DASHES)]
        style = f'stroke="{self._colour(name)}" stroke-dasharray="{dash or "none"}"'
        where = f'data-x="{at}" data-y="{at + 1 + i}" d="{_path(xs, ys, axes)}"'
        return f"<path {where} {style}/>", _key(name, f'<path d="M0 4H22" {style}/>')

    def _point(self, i: int, row: Row, at: int, axes) -> tuple[str, str]:
        name = list(self.points)[i]
        px, py = _across(row[0], axes[0]), _up(row[1], axes[1])
        where = f'cx="{px or 0:.1f}" cy="{py or 0:.1f}" {_seen(px is not None and py is not None)}'
        fill = f'fill="{self._colour(name)}"'
        key = "" if name in self.lines else _key(name, f'<circle cx="11" cy="4" r="3.5" {fill}/>')
        return f'<circle data-x="{at}" r="4.5" {fill} {where}/>', key

    def _guide(self, i: int, row: Row, at: int, x: Axis) -> tuple[str, str]:
        px = _across(row[0], x)
        where = f'x1="{px or 0:.1f}" x2="{px or 0:.1f}" y1="{TOP}" y2="{BOTTOM}"'
        mark = f'<line class="srl-guide" data-x="{at}" {where} {_seen(px is not None)}/>'
        return mark, _key(list(self.guides)[i], '<path class="srl-guide" d="M0 4H22"/>')


@dataclass(frozen=True)
class Bars:
    """One bar a name, from zero."""

    title: str
    y_label: str
    values: Mapping[str, float]
    colours: Mapping[str, str] = field(default_factory=dict)
    y_range: tuple[float, float] | None = None
    log_y: bool = False

    def fixed(self) -> tuple:
        return (
            self.title,
            self.y_label,
            self.y_range,
            self.log_y,
            *self.values,
            *self.colours.items(),
        )

    def rows(self) -> list[Row]:
        return [list(self.values.values())]

    def axes(self, frames: Sequence[list[Row]]) -> tuple[Axis, Axis]:
        return (0.0, 1.0, False), _axis(self.y_range, self.log_y, [rows[0] for rows in frames])

    def html(self, rows: Sequence[Row], at: int, axes: tuple[Axis, Axis]) -> str:
        y = axes[1]
        bars = "".join(self._bar(i, rows[0][i], at, y) for i in range(len(self.values)))
        label = f"{self.title}: bars of {', '.join(self.values)}"
        return _figure(self.title, label, [], _y_axis(y, self.y_label) + bars)

    def _bar(self, i: int, value: float | None, at: int, y: Axis) -> str:
        wide = (RIGHT - LEFT) / len(self.values)
        middle, name = LEFT + (i + 0.5) * wide, list(self.values)[i]
        zero = _up(10 ** y[0] if y[2] else 0.0, y, held=True)
        top = _up(value, y, held=True)
        top = zero if top is None else top
        colour = self.colours.get(name, PALETTE[i % len(PALETTE)])
        return (
            f'<rect data-x="{at}" data-i="{i}" x="{middle - 0.32 * wide:.1f}" '
            f'width="{0.64 * wide:.1f}" y="{min(top, zero):.1f}" '
            f'height="{abs(top - zero):.1f}" fill="{colour}"/>'
            f'<text x="{middle:.1f}" y="{BOTTOM + 15}" text-anchor="middle">{escape(name)}</text>'
        )


@dataclass(frozen=True)
class Table:
    """Words in columns; format numbers as a reader should see them."""

    title: str
    columns: Sequence[str]
    lines: Mapping[str, Sequence[str]]

    def __post_init__(self):
        for name, cells in self.lines.items():
            if len(cells) != len(self.columns) or not all(isinstance(c, str) for c in cells):
                raise ValueError(
                    f"lines[{name!r}]={cells!r}: expected {len(self.columns)} texts, one a column"
                )

    def fixed(self) -> tuple:
        return self.title, *self.columns, *self.lines

    def rows(self) -> list[Row]:
        return [list(cells) for cells in self.lines.values()]

    def axes(self, frames: Sequence[list[Row]]) -> tuple[Axis, Axis]:
        return (0.0, 1.0, False), (0.0, 1.0, False)

    def html(self, rows: Sequence[Row], at: int, axes: tuple[Axis, Axis]) -> str:
        head = "".join(f'<th scope="col">{escape(c)}</th>' for c in ("", *self.columns))
        body = "".join(
            f'<tr><th scope="row">{escape(name)}</th>'
            + "".join(f'<td data-x="{at + i}" data-i="{j}">{escape(c)}</td>'
                      for j, c in enumerate(rows[i]))
            + "</tr>"
            for i, name in enumerate(self.lines)
        )  # fmt: skip
        table = f"<table><tr>{head}</tr>{body}</table>"
        return f'<div class="srl-name">{escape(self.title)}</div>{table}'


Panel = Curves | Bars | Table


def _axis(given, log: bool, values: Sequence[Row] = ()) -> Axis:
    """An axis over the given range, or else over all the values, with some room above."""
    if given is None:
        series = [[(0, v) for v in row if v is not None] for row in values]
        return *axis_range(series, log), log
    low, high = (math.log10(v) for v in given) if log else given
    return low, high if high > low else low + 1.0, log


def _share(value: float | None, axis: Axis, held: bool = False) -> float | None:
    """How far along the axis; None for no value or, unless `held` at the ends, outside of it."""
    low, high, log = axis
    if value is None or (log and value <= 0):
        return None
    share = ((math.log10(value) if log else value) - low) / (high - low)
    if held:
        return min(1.0, max(0.0, share))
    return share if -1e-9 <= share <= 1 + 1e-9 else None


def _across(value: float | None, axis: Axis) -> float | None:
    share = _share(value, axis)
    return None if share is None else LEFT + share * (RIGHT - LEFT)


def _up(value: float | None, axis: Axis, held: bool = False) -> float | None:
    share = _share(value, axis, held)
    return None if share is None else BOTTOM - share * (BOTTOM - TOP)


def _seen(there: bool) -> str:
    return f'style="visibility:{"visible" if there else "hidden"}"'


def _path(xs: Row, ys: Row, axes: tuple[Axis, Axis]) -> str:
    out, pen = [], "M"
    for x, y in zip(xs, ys, strict=True):
        px, py = _across(x, axes[0]), _up(y, axes[1])
        if px is None or py is None:
            pen = "M"
            continue
        out.append(f"{pen}{px:.1f} {py:.1f}")
        pen = "L"
    return "".join(out)


def _ticks(axis: Axis) -> list[tuple[float, str]]:
    """Places on an axis (log10 if it is logarithmic) and their words, about five."""
    low, high, log = axis
    if log and math.floor(high) - math.ceil(low) >= 1:
        step = -(-(math.floor(high) - math.ceil(low)) // 5) or 1
        return [(k, f"{10.0**k:g}") for k in range(math.ceil(low), math.floor(high) + 1, step)]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda m: abs(m * power - rough))
    places = [k * step for k in range(math.ceil(low / step - 1e-9), int(high / step + 1e-9) + 1)]
    return [(v, f"{10**v if log else v + 0.0:.3g}") for v in places]


def _x_axis(axis: Axis, label: str) -> str:
    low, high, _ = axis
    ticks = "".join(
        f'<text x="{LEFT + (v - low) / (high - low) * (RIGHT - LEFT):.1f}" y="{BOTTOM + 15}" '
        f'text-anchor="middle">{words}</text>'
        for v, words in _ticks(axis)
    )
    middle = (LEFT + RIGHT) / 2
    return ticks + (
        f'<text x="{middle}" y="{HEIGHT - 5}" text-anchor="middle">{escape(label)}</text>'
    )


def _y_axis(axis: Axis, label: str) -> str:
    low, high, _ = axis
    places = [(BOTTOM - (v - low) / (high - low) * (BOTTOM - TOP), w) for v, w in _ticks(axis)]
    ticks = "".join(
        f'<text x="{LEFT - 5}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
        f'<path class="srl-grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        for y, words in places
    )
    middle = (TOP + BOTTOM) / 2
    return ticks + (
        f'<text x="11" y="{middle}" text-anchor="middle" '
        f'transform="rotate(-90 11 {middle})">{escape(label)}</text>'
        f'<path class="srl-frame" d="M{LEFT} {TOP}V{BOTTOM}H{RIGHT}"/>'
    )


def _key(name: str, mark: str) -> str:
    return f'<span><svg viewBox="0 0 22 8" aria-hidden="true">{mark}</svg> {escape(name)}</span>'


def _figure(title: str, label: str, keys: Sequence[str], drawing: str) -> str:
    return (
        f'<div class="srl-name">{escape(title)}</div><div class="srl-keys">{"".join(keys)}</div>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
        f"{drawing}</svg>"
    )
