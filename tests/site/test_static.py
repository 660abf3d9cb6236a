"""What can be read off the built files without a browser: sources, links, launch buttons."""

from __future__ import annotations

import re
from urllib.parse import parse_qs, unquote, urlparse

import pytest
import yaml
from bs4 import BeautifulSoup
from built_site import HTML, ROOT, html_pages

pytestmark = pytest.mark.site

LOADING = {
    "script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src",
    "audio": "src", "embed": "src", "object": "data", "image": "href",
}
LOADING_RELS = {"stylesheet", "icon", "preload", "prefetch", "modulepreload", "dns-prefetch",
                "preconnect", "shortcut", "manifest"}
SOUPS: dict[str, BeautifulSoup] = {}


def soup(name: str) -> BeautifulSoup:
    if name not in SOUPS:
        SOUPS[name] = BeautifulSoup((HTML / name).read_text(encoding="utf-8"), "html.parser")
    return SOUPS[name]


def is_foreign(url: str) -> bool:
    return bool(re.match(r"(?:[a-z]+:)?//", url.strip(), flags=re.I))


def test_page_loads_only_its_own_files(page_name, site):
    loaded = [
        tag.get(attribute, "")
        for tag_name, attribute in LOADING.items()
        for tag in soup(page_name).find_all(tag_name)
    ]
    loaded += [
        tag.get("href", "")
        for tag in soup(page_name).find_all("link")
        if set(tag.get("rel", [])) & LOADING_RELS
    ]
    loaded += [part for tag in soup(page_name).find_all(srcset=True)
               for part in tag["srcset"].split()]
    assert not [url for url in loaded if is_foreign(url)]


def test_stylesheets_load_only_their_own_files(site):
    for path in site.rglob("*.css"):
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"url\(\s*['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//", text), path


def test_internal_links_resolve(page_name, site):
    base = HTML / page_name
    broken = []
    for link in soup(page_name).find_all("a", href=True):
        url = urlparse(link["href"])
        if url.scheme or url.netloc:
            continue
        target = (base.parent / unquote(url.path)).resolve() if url.path else base.resolve()
        if not target.is_file() or not target.is_relative_to(HTML.resolve()):
            broken.append(link["href"])
        elif url.fragment and target.suffix == ".html":
            page = soup(target.relative_to(HTML.resolve()).as_posix())
            if page.find(id=unquote(url.fragment)) is None:
                broken.append(link["href"])
    assert not broken


def test_page_has_a_title_and_a_language(page_name, site):
    if page_name == "index.html":
        assert soup(page_name).find("meta", attrs={"http-equiv": re.compile("refresh", re.I)})
        return
    assert soup(page_name).title.get_text(strip=True)
    assert soup(page_name).html.get("lang") == "en"


def launch_files(name: str) -> list[str]:
    """Return the repository path that each launch button of a page opens."""
    repository = yaml.safe_load((ROOT / "_config.yml").read_text())["repository"]
    owner_name, branch = urlparse(repository["url"]).path.strip("/"), repository["branch"]
    files = []
    for link in soup(name).find_all("a", href=True):
        url = urlparse(link["href"])
        if url.netloc == "colab.research.google.com":
            prefix = f"/github/{owner_name}/blob/{branch}/"
            assert url.path.startswith(prefix), link["href"]
            files.append(url.path.removeprefix(prefix))
        elif url.netloc == "mybinder.org":
            assert url.path == f"/v2/gh/{owner_name}/{branch}", link["href"]
            files.append(parse_qs(url.query)["urlpath"][0].removeprefix("lab/tree/"))
    return files


def test_launch_buttons_open_files_of_the_tree(page_name, site):
    files = launch_files(page_name)
    assert all((ROOT / file).is_file() for file in files), files
    if page_name.startswith("notebooks/"):
        own = page_name.removesuffix(".html") + ".ipynb"
        assert files.count(own) == 2, "a notebook page has a Colab and a Binder button"


def test_every_page_of_the_contents_was_built(site):
    toc = yaml.safe_load((ROOT / "_toc.yml").read_text())
    files = [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]
    assert {f"{file}.html" for file in files} <= set(html_pages())


def test_build_output_is_not_committed():
    ignored = (ROOT / ".gitignore").read_text().split()
    assert {"_build/", "book/assets/vendor/", "book/_generated/", "tests/site/_shots/"} <= set(
        ignored
    )
