"""Every page of the built site, opened in Chromium: it renders, and it asks for nothing foreign."""

from __future__ import annotations

import pytest
from built_site import HTML, SHOTS

pytestmark = pytest.mark.site

PHONE = {"width": 390, "height": 844}

# Run in the page: what a reader would see as broken.
BROKEN_MATH = r"""() => {
  const raw = [...document.querySelectorAll('.math')]
    .filter(n => !n.querySelector('mjx-container'));
  const bad = [...document.querySelectorAll('mjx-merror, [data-mjx-error]')];
  return [...raw, ...bad].map(n => n.textContent.slice(0, 80));
}"""
RAW_TEX = r"""() => {
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  for (let n = walker.nextNode(); n; n = walker.nextNode()) {
    if (n.parentElement.closest('pre, code, script, style, mjx-container')) continue;
    if (/\\\(|\\\[|\$\$|\{(cite|ref|term|eq|numref)\}/.test(n.data))
      found.push(n.data.slice(0, 80));
  }
  return found;
}"""
BROKEN_IMAGES = """() => [...document.images]
  .filter(i => !i.naturalWidth || (!i.alt.trim() && !i.closest('[aria-hidden=true]')))
  .map(i => `${i.getAttribute('src')} width ${i.naturalWidth} alt '${i.alt}'`)"""
TOO_WIDE = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


def assert_sound(visit) -> None:
    assert not visit.foreign, f"requests that leave the site: {visit.foreign}"
    assert not visit.problems
    assert visit.requests > 0
    assert not visit.page.evaluate(BROKEN_MATH), "equations that are not drawn"
    assert not visit.page.evaluate(RAW_TEX), "TeX or MyST source shown as text"
    assert not visit.page.evaluate(BROKEN_IMAGES), "pictures without alt text or not loaded"


def test_page_is_sound_and_fits_a_phone(page_name, address, visit):
    seen = visit(address)
    page = seen.open(f"{address}/{page_name}")
    assert_sound(seen)
    page.set_viewport_size(PHONE)
    assert page.evaluate(TOO_WIDE) <= 0, "the page scrolls sideways; wide tables must scroll alone"


@pytest.mark.parametrize("name", ["index.html", "book/notation.html", "book/signals.html"])
def test_page_from_a_folder(name, site, visit):
    seen = visit(f"file://{site}/")
    seen.open(f"file://{site}/{name}")
    assert_sound(seen)


def test_notebook_pages_from_a_folder(site, visit):
    for path in sorted((HTML / "notebooks").glob("*.html")):
        seen = visit(f"file://{site}/")
        seen.open(f"file://{path}")
        assert_sound(seen)


def test_there_are_equations_at_all(address, visit):
    page = visit(address).open(f"{address}/book/notation.html")
    assert page.locator("mjx-container").count() > 5
    # A web font of MathJax is really in use: the glyphs would be boxes without it.
    assert page.evaluate("[...document.fonts].some(f => /^MJX/.test(f.family.replace(/['\"]/g,"
                         " '')) && f.status === 'loaded')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_index_in_light_and_dark(scheme, address, visit):
    seen = visit(address, color_scheme=scheme, viewport={"width": 1280, "height": 900})
    page = seen.open(f"{address}/book/index.html")
    assert_sound(seen)
    assert page.evaluate("document.documentElement.dataset.theme") == scheme
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    channels = [int(c) for c in colour.strip("rgba()").split(",")[:3]]
    assert (sum(channels) / 3 > 128) == (scheme == "light"), colour
    SHOTS.mkdir(exist_ok=True)
    page.screenshot(path=SHOTS / f"index_{scheme}.png", full_page=True)
    phone = visit(address, color_scheme=scheme, viewport=PHONE).open(f"{address}/book/index.html")
    phone.screenshot(path=SHOTS / f"index_{scheme}_phone.png", full_page=True)


def test_a_reader_can_switch_the_theme(address, visit):
    page = visit(address, color_scheme="light").open(f"{address}/book/index.html")
    seen = set()
    for _ in range(3):  # auto, light, dark in some order
        page.locator("button.theme-switch-button:visible").first.click()
        seen.add(page.evaluate("document.documentElement.dataset.theme"))
    assert seen == {"light", "dark"}


def test_search_finds_a_page(address, visit):
    seen = visit(address)
    page = seen.open(f"{address}/book/index.html")
    page.keyboard.press("Control+k")
    page.locator("input[type=search]:visible").first.fill("entropy")
    page.keyboard.press("Enter")
    page.wait_for_url("**/search.html?q=entropy*")
    page.locator("#search-results li a").first.wait_for()
    links = page.locator("#search-results li a").evaluate_all("nodes => nodes.map(n => n.href)")
    assert any("glossary" in link for link in links), links
    assert not seen.foreign and not seen.problems


def test_search_says_when_it_finds_nothing(address, visit):
    page = visit(address).open(f"{address}/search.html?q=zzzunfindable")
    page.wait_for_function(
        "() => /did not match|no results/i"
        ".test(document.querySelector('#search-results').innerText)"
    )
