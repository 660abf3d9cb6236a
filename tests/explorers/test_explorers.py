"""Explorers: the page's grid and the kernel's function show the same; what must fail, fails."""

from __future__ import annotations

import json
import math
import re
import textwrap

import pytest
import torch
from bs4 import BeautifulSoup

import stablerl_core.explorers as explorers
from stablerl_core.explorers import EXPLORERS, Bars, Curves, Explorer, Slider, Table
from stablerl_core.explorers.explorer import LARGEST
from stablerl_core.policy import entropy

every_explorer = pytest.mark.parametrize("explorer", EXPLORERS.values(), ids=EXPLORERS)
X = [0.0, 1.0, 2.0]


def lines_of(steep: float = 1, word: str = "up"):
    sign = 1 if word == "up" else -1
    panels = [
        Curves("Line", "x", "y", X, {"line": [sign * steep * v for v in X]}, {"end": (2, steep)},
               {"here": steep / 2}),
        Bars("Bar", "share", {"a": sign * steep, "b": 0.5}),
        Table("Words", ["value"], {"slope": [f"{sign * steep:.2f}"]}),
    ]  # fmt: skip
    return f"slope {steep:.2f}, {word}", panels


def toy(function=lines_of, **changes) -> Explorer:
    settings = {
        "sliders": [Slider("steep", "slope", [0.5, 1, 2], 1, "m", log=True),
                    Slider("word", "direction", ["up", "down"], "up")],
        "alt": "a line, a bar and a word",
    } | changes  # fmt: skip
    return Explorer("toy", "A toy", function, **settings)


def static(explorer: Explorer) -> dict:
    soup = BeautifulSoup(explorer._repr_html_(), "html.parser")
    return json.loads(soup.find("script", type="application/json").string)


def flat(frame) -> list:
    return [v for row in frame for v in (row if isinstance(row, list | tuple) else [row])]


@every_explorer
def test_page_and_kernel_show_the_same_numbers(explorer):
    data = static(explorer)
    assert len(data["frames"]) == len(explorer.stops())
    for frame, values in zip(data["frames"], explorer.stops(), strict=True):
        text, panels = explorer.function(**values)
        kernel = flat([text, *(row for panel in panels for row in panel.rows())])
        page = flat([data["pool"][k] for k in frame])
        assert len(page) == len(kernel)
        for shown, real in zip(page, kernel, strict=True):
            if isinstance(real, str) or shown is None:
                assert shown == real or not math.isfinite(real)
            else:
                assert shown == pytest.approx(real, rel=5.01e-4, abs=1e-15)


@every_explorer
def test_the_widget_draws_what_the_page_draws(explorer):
    box = explorer.widget()
    *controls, shown = box.children
    on_page = BeautifulSoup(explorer._repr_html_(), "html.parser")
    in_kernel = BeautifulSoup(shown.value, "html.parser")
    for part in (".srl-panels", "output"):
        assert str(on_page.select_one(part)) == str(in_kernel.select_one(part))
    for control, slider in zip(controls, explorer.sliders, strict=True):
        before, seen = control.value, set()
        for value in slider.values:
            control.value = value
            seen.add(shown.value)
        assert len(seen) > 1, f"{slider.name} changes nothing"
        control.value = before


@every_explorer
def test_every_slider_changes_picture_and_text(explorer):
    for slider in explorer.sliders:
        frames = [explorer.frame(explorer.start | {slider.name: v}) for v in slider.values]
        assert len({f[0] for f in frames}) > 1, f"{slider.name} changes no text"
        assert len({str(f[1:]) for f in frames}) > 1, f"{slider.name} changes no picture"


@every_explorer
def test_the_static_form_is_accessible_small_and_alone(explorer):
    html = explorer._repr_html_()
    assert len(html.encode()) <= LARGEST and len(explorer.alt) >= 20
    assert not re.search(r"https?:|\bsrc=|@import|url\(", html)
    soup = BeautifulSoup(html, "html.parser")
    assert soup.figure["aria-label"] == explorer.alt and soup.noscript.get_text()
    for drawing in soup.select(".srl-panels svg:not(.srl-keys svg)"):
        assert drawing["role"] == "img" and drawing["aria-label"]
    labels = [label for label in soup.select("label") if label.input]
    assert len(labels) == len(explorer.sliders)
    assert all(label.input["aria-valuetext"] in label.get_text() for label in labels)
    # On the element itself: JupyterLab would keep its arrow keys otherwise.
    assert all(label.input.has_attr("data-lm-suppress-shortcuts") for label in labels)


def test_a_kernel_reaches_values_between_the_stops():
    explorer = toy()
    *controls, shown = explorer.widget().children
    controls[0].value = 1.37
    assert "slope 1.37, up" in shown.value
    controls[1].value = "down"
    assert "slope 1.37, down" in shown.value and "<td" in shown.value


def test_whole_numbers_stay_whole_and_others_do_not():
    kinds = [
        type(Slider("n", "n", values, values[0], log=values == [1, 10]).control()).__name__
        for values in ([1, 2], [0.5, 1], [1, 10], ["a", "b"])
    ]
    assert kinds == ["IntSlider", "FloatSlider", "FloatLogSlider", "SelectionSlider"]


def test_axes_stand_still_and_hold_the_whole_grid():
    x, y = toy().axes[0]
    assert x == (0.0, 2.0, False)
    assert y[0] <= -4 and y[1] >= 4
    slopes = [toy().frame(values)[2] for values in toy().stops()]
    assert slopes[0] == [0, 0.5, 1] and slopes[1] == [0, -0.5, -1] and slopes[-1] == [0, -2, -4]


def test_what_is_not_finite_or_out_of_range_is_a_gap():
    def broken(steep):
        lines = {"line": [1.0, math.nan, 3.0, math.inf, 2.0, 9.0]}
        curves = Curves("Gap", "x", "y", [0, 1, 2, 3, 4, 5], lines, {"far": (9.0, 1.0)},
                        y_range=(0, 4))  # fmt: skip
        return "gaps", [curves]

    html = toy(broken, sliders=[Slider("steep", "s", [1, 2], 1)])._repr_html_()
    (path,) = BeautifulSoup(html, "html.parser").select("path[data-x]")
    assert path["d"].count("M") == 3 and "L" not in path["d"]
    assert "visibility:hidden" in html and "NaN" not in html and "Infinity" not in html


def test_a_logarithmic_axis_has_decades_and_no_place_for_zero():
    def decades(steep):
        lines = {"line": [0.0, steep, -1.0, 10.0, 100.0]}
        return f"{steep}", [Curves("Log", "x", "y", range(5), lines, log_y=True)]

    explorer = toy(decades, sliders=[Slider("steep", "s", [1, 2], 1)])
    soup = BeautifulSoup(explorer._repr_html_(), "html.parser")
    (path,) = soup.select("path[data-x]")
    assert path["d"].count("M") == 2 and path["d"].count("L") == 1
    ticks = [t.get_text() for t in soup.select("svg text[text-anchor=end]")]
    assert ticks == ["1", "10", "100"]


def test_text_cannot_end_the_script_or_become_html():
    def rude(steep):
        return f"</script><b>{steep}</b>", [Bars("<i>", "y", {"a": steep})]

    explorer = toy(rude, sliders=[Slider("steep", "<u>", [1, 2], 1)])
    soup = BeautifulSoup(explorer._repr_html_(), "html.parser")
    assert soup.output.get_text() == "</script><b>1</b>"
    assert not soup.find_all(["i", "u"]) and len(soup.find_all("script")) == 2
    assert "</script><b>2</b>" in static(explorer)["pool"]


def test_bad_explorers_say_what_is_wrong():
    with pytest.raises(ValueError, match="start=3 must be one of"):
        Slider("steep", "slope", [1, 2], 3)
    with pytest.raises(ValueError, match=r"lines\['a'\] has 2 values for 3 x"):
        Curves("t", "x", "y", X, {"a": [1, 2]})
    with pytest.raises(ValueError, match="expected 1 texts"):
        Table("t", ["a"], {"row": [1.0]})
    renamed = toy(lambda steep, word: ("t", [Bars(word, "y", {"a": steep})]))
    with pytest.raises(ValueError, match="changes a title, label, range or name"):
        _ = renamed.grid
    with pytest.raises(ValueError, match="bytes, at most"):
        many = [i / 7 for i in range(4000)]
        toy(lambda steep: (f"{steep}" * 20, [Bars("t", "y", {"a": steep})]),
            sliders=[Slider("steep", "s", many, 0.0)])._repr_html_()  # fmt: skip


def test_it_has_a_short_name_and_its_html_never_changes():
    assert repr(toy()) == "Explorer 'toy': steep, word"
    assert toy()._repr_html_() == toy()._repr_html_()


def test_the_example_of_the_docstring_works():
    code = explorers.__doc__.split("panels:\n\n")[1].split("Put it into")[0]
    code = textwrap.dedent(code)
    assert len(code.strip().splitlines()) <= 16
    scope = dict(vars(explorers), torch=torch, entropy=entropy)
    exec(code, scope)
    text = BeautifulSoup(scope["COIN"]._repr_html_(), "html.parser").output.get_text()
    assert text == f"1 tosses carry {math.log(2):.2f} nats."
