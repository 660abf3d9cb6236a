"""Every slider of every explorer on the built site, moved by the keyboard in Chromium."""

from __future__ import annotations

import re

import pytest
from bs4 import BeautifulSoup
from built_site import HTML, SHOTS, html_pages

from stablerl_core.explorers import EXPLORERS

pytestmark = pytest.mark.site

# What a frame may change: places in the drawings and words in the tables.
PLACES = ("d", "cx", "cy", "x1", "x2", "y", "height")
DRAWN = f"""figure => [...figure.querySelectorAll('[data-x]')].map(n => [
  n.tagName.toLowerCase(), n.style.visibility, n.tagName === 'TD' ? n.textContent : '',
  ...{list(PLACES)}.map(a => n.getAttribute(a) || '')])"""


def pages_with_explorers() -> list[str]:
    return [p for p in html_pages() if 'class="srl-explorer"' in (HTML / p).read_text("utf-8")]


def drawn_by_python(explorer, values) -> list[list[str]]:
    nodes = BeautifulSoup(explorer.picture(values), "html.parser").select("[data-x]")
    return [
        [n.name, re.sub("visibility:", "", n.get("style", "")), n.name == "td" and n.text or "",
         *(n.get(a, "") for a in PLACES)]
        for n in nodes
    ]  # fmt: skip


def assert_same_drawing(browser, python) -> None:
    """Equal but for the last digit of a pixel, which the two languages round differently."""
    assert len(browser) == len(python)
    for one, other in zip(browser, python, strict=True):
        assert [re.sub(r"[\d.]+", "", t) for t in one[:2] + one[3:]] == [
            re.sub(r"[\d.]+", "", t) for t in other[:2] + other[3:]
        ]
        assert one[2] == other[2]
        if one[1] == "hidden":
            continue  # where a hidden mark waits is nobody's business
        numbers = [[float(v) for t in row[3:] for v in re.findall(r"-?[\d.]+", t)]
                   for row in (one, other)]  # fmt: skip
        assert numbers[0] == pytest.approx(numbers[1], abs=0.11)


def test_every_explorer_of_the_package_is_on_a_page(site):
    text = "".join((HTML / page).read_text("utf-8") for page in pages_with_explorers())
    assert set(re.findall(r'class="srl-explorer" data-name="(\w+)"', text)) == set(EXPLORERS)


@pytest.mark.parametrize("with_explorers", pages_with_explorers() or ["(no page)"])
def test_every_slider_moves_picture_and_text(with_explorers, site, address, visit):
    seen = visit(address)
    page = seen.open(f"{address}/{with_explorers}")
    asked = seen.requests
    figures = page.locator("figure.srl-explorer")
    assert figures.count() > 0
    for figure in figures.all():
        explorer = EXPLORERS[figure.get_attribute("data-name")]
        sliders = figure.locator("input[type=range]").all()
        assert len(sliders) == len(explorer.sliders)
        for slider, control in zip(explorer.sliders, sliders, strict=True):
            move_through(page, figure, explorer, slider, control)
    assert seen.requests == asked, "moving a slider asked for a file"
    assert not seen.foreign and not seen.problems


def move_through(page, figure, explorer, slider, control) -> None:
    """All stops of one slider by the keyboard, then back; the others stay where they start."""
    control.focus()
    page.keyboard.press("Home")
    texts, pictures = set(), set()
    for i, value in enumerate(slider.values):
        if i:
            page.keyboard.press("ArrowRight")
        values = explorer.start | {slider.name: value}
        assert figure.locator("output").inner_text() == explorer.frame(values)[0]
        assert control.get_attribute("aria-valuetext") == slider.words(value)
        drawn = figure.evaluate(DRAWN)
        assert_same_drawing(drawn, drawn_by_python(explorer, values))
        texts.add(figure.locator("output").inner_text())
        pictures.add(str(drawn))
    assert len(texts) > 1 and len(pictures) > 1, f"{slider.name} moves nothing"
    page.keyboard.press("Home")
    for _ in range(list(slider.values).index(slider.start)):
        page.keyboard.press("ArrowRight")


@pytest.mark.parametrize("with_explorers", pages_with_explorers() or ["(no page)"])
def test_without_javascript_the_picture_is_there(with_explorers, site, address, visit):
    page = visit(address, java_script_enabled=False).page
    page.goto(f"{address}/{with_explorers}", wait_until="load")
    for figure in page.locator("figure.srl-explorer").all():
        explorer = EXPLORERS[figure.get_attribute("data-name")]
        assert figure.locator(".srl-panels svg[role=img], .srl-panels table").first.is_visible()
        assert figure.locator("output").inner_text() == explorer.frame(explorer.start)[0]
        assert figure.locator("noscript").inner_text().strip()
        assert all(control.is_disabled() for control in figure.locator("input").all())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("with_explorers", pages_with_explorers() or ["(no page)"])
def test_words_can_be_read_in_both_themes(with_explorers, scheme, site, address, visit):
    page = visit(address, color_scheme=scheme).open(f"{address}/{with_explorers}")
    figure = page.locator("figure.srl-explorer").first
    ink = brightness(figure.evaluate("f => getComputedStyle(f.querySelector('output')).color"))
    paper = brightness(figure.evaluate(BACKGROUND))
    assert abs(ink - paper) > 120
    assert (paper > 128) == (scheme == "light")
    SHOTS.mkdir(exist_ok=True)
    figure.screenshot(path=SHOTS / f"explorer_{with_explorers.split('/')[-1][:2]}_{scheme}.png")


# The first background that is not transparent, from the figure outwards.
BACKGROUND = """figure => {
  for (let n = figure; n; n = n.parentElement) {
    const colour = getComputedStyle(n).backgroundColor;
    if (!/, 0\\)$/.test(colour)) return colour;
  }
  return 'rgb(255, 255, 255)';
}"""


def brightness(colour: str) -> float:
    return sum(float(v) for v in re.findall(r"[\d.]+", colour)[:3]) / 3
