"""Where the built site is, and a browser page that remembers what went wrong on it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BOOK = ROOT / "book"
HTML = ROOT / "_build" / "html"
BUILT = ROOT / "_build" / ".built"  # written by `make book` when a build succeeds
SHOTS = Path(__file__).parent / "_shots"
CHROMIUM_NAMES = ["chromium", "chromium-browser", "google-chrome", "google-chrome-stable"]
CHROMIUM_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def sources() -> list[Path]:
    book = [p for pattern in ("*.*", "assets/*.*", "assets/css/*") for p in BOOK.glob(pattern)]
    return [*book, *(ROOT / "notebooks").glob("*.ipynb"), ROOT / "_config.yml", ROOT / "_toc.yml"]


def absent(reason: str) -> None:
    """Skip with the reason; fail instead where a site and a browser are required (CI)."""
    if os.environ.get("STABLERL_REQUIRE_BROWSER"):
        pytest.fail(reason)
    pytest.skip(reason)


def html_pages() -> list[str]:
    """Return every page of the built site, relative to it; empty before the first build."""
    return sorted(p.relative_to(HTML).as_posix() for p in HTML.rglob("*.html") if is_page(p))


def is_page(path: Path) -> bool:
    return "_static" not in path.relative_to(HTML).parts  # the theme keeps templates in there


class Visit:
    """A browser page that remembers what went wrong and what was asked for from elsewhere."""

    def __init__(self, page, allowed: str):
        self.page, self.problems, self.foreign, self.requests = page, [], [], 0
        self._allowed = allowed
        page.on("request", self._request)
        page.on("requestfailed", lambda r: self.problems.append(f"failed: {r.url} {r.failure}"))
        page.on("pageerror", lambda error: self.problems.append(f"page error: {error}"))
        page.on("response", self._response)
        page.on(
            "console",
            lambda m: self.problems.append(f"console: {m.text}") if m.type == "error" else None,
        )

    def _request(self, request):
        self.requests += 1
        if not request.url.startswith((self._allowed, "data:", "blob:")):
            self.foreign.append(request.url)

    def _response(self, response):
        if response.status >= 400:
            self.problems.append(f"{response.status}: {response.url}")

    def open(self, url: str):
        """Open a page and wait until its equations are drawn and its pictures are loaded."""
        self.page.goto(url, wait_until="load")
        # The front page forwards to the first page of the book.
        self.page.wait_for_function(
            "() => document.body && !document.querySelector('meta[http-equiv=refresh i]')"
        )
        self.page.wait_for_load_state("load")
        self.page.wait_for_function(
            "() => !document.querySelector('.math') ||"
            " (window.MathJax && window.MathJax.startup && window.MathJax.startup.promise)"
        )
        self.page.evaluate(
            """async () => {
              if (document.querySelector('.math')) await window.MathJax.startup.promise;
              for (const img of document.images) img.loading = 'eager';
              await Promise.allSettled([...document.images].map(img => img.decode()));
              await document.fonts.ready;
            }"""
        )
        return self.page
