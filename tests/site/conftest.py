"""The built site, a server for it on this machine, and a headless Chromium to open it with."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import threading
from pathlib import Path

import pytest
from built_site import (
    BUILT,
    CHROMIUM_FLAGS,
    CHROMIUM_NAMES,
    HTML,
    Visit,
    absent,
    html_pages,
    sources,
)


def pytest_generate_tests(metafunc):
    if "page_name" in metafunc.fixturenames:
        metafunc.parametrize("page_name", html_pages() or ["index.html"])


@pytest.fixture(scope="session")
def site() -> Path:
    """The folder of the built site."""
    if not BUILT.exists():
        absent("the site is not built: run `make book`")
    changed = [p.name for p in sources() if p.stat().st_mtime > BUILT.stat().st_mtime]
    if changed:
        absent(f"the site is older than {changed}: run `make book`")
    return HTML


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Serves the site; a browser asks for /favicon.ico by itself, which is no fault of a page."""

    def do_GET(self):
        if self.path == "/favicon.ico":
            self.send_response(204)
            self.end_headers()
        else:
            super().do_GET()

    def log_message(self, *_):
        pass


class _Server(http.server.ThreadingHTTPServer):
    def handle_error(self, request, client_address):
        pass  # a page that was closed before its last file arrived


@pytest.fixture(scope="session")
def address(site):
    """The address of a server of the site's files, on this machine only."""
    handler = functools.partial(_Handler, directory=str(site))
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def browser(site):
    """A headless Chromium that is installed on the system."""
    playwright = pytest.importorskip("playwright.sync_api")
    named = os.environ.get("CHROMIUM")
    path = named or next((p for n in CHROMIUM_NAMES if (p := shutil.which(n))), None)
    if path is None:
        absent("no Chromium on this machine: install it, or name it in CHROMIUM")
    with playwright.sync_playwright() as p:
        chromium = p.chromium.launch(executable_path=path, headless=True, args=CHROMIUM_FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser):
    """Return a function that makes a fresh `Visit` which may ask only below an address."""
    contexts = []

    def make(allowed: str, **options) -> Visit:
        context = browser.new_context(**options)
        contexts.append(context)
        return Visit(context.new_page(), allowed)

    yield make
    for context in contexts:
        context.close()
