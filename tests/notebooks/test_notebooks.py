"""What nbval does not check: that the committed notebooks are complete, clean and readable.

nbval runs a cell without an execution count but compares nothing, so a stripped notebook passes
it with any output. The guards here close that hole and keep the conventions of CONTRIBUTING.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

MAX_CELL_LINES = 15
MAX_TEXT_OUTPUT = 200_000  # bytes of text; an image may be larger
MAX_UNCHECKED_CELLS = 4  # cells a notebook may hide from nbval's comparison
MIN_ALT_LENGTH = 20
UNCHECKED_TAGS = {"nbval-ignore-output", "nbval-skip"}
ERROR_TAGS = {"raises-exception", "nbval-raises-exception"}
WIDGET = "application/vnd.jupyter.widget-view+json"
ABSOLUTE_PATH = re.compile(
    r"(?<![\w.:/])/(?:home|work|tmp|root|Users|content|opt|usr|var|mnt|data)/\w|\b[A-Z]:\\\w"
)

if not NOTEBOOKS:
    pytest.skip("there is no notebook in notebooks/ yet", allow_module_level=True)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)


def load(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in load(path).cells if cell.cell_type == "code"]


def tags(cell: nbformat.NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def name(cell: nbformat.NotebookNode) -> str:
    """Return how a message names a cell: its count and its first line."""
    first = cell.source.splitlines()[0] if cell.source else "(empty)"
    return f"cell [{cell.get('execution_count')}] {first!r}"


def output_texts(cell: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Yield (mime, text) of every output that is not a raster image."""
    for out in cell.outputs:
        if out.output_type == "stream":
            yield "text/plain", out.text
        elif out.output_type == "error":
            yield "text/plain", "\n".join([out.ename, out.evalue, *out.traceback])
        else:
            for mime, data in out.data.items():
                if not (mime.startswith("image/") and mime != "image/svg+xml"):
                    yield mime, data if isinstance(data, str) else str(data)


@every_notebook
def test_is_valid_and_runs_on_any_python3_kernel(path):
    notebook = load(path)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"


@every_notebook
def test_every_code_cell_was_executed_in_order(path):
    counts = [cell.execution_count for cell in code_cells(path)]
    assert counts == list(range(1, len(counts) + 1)), (
        f"execution counts {counts}: run `make execute`; nbval compares nothing in a cell "
        "without a count"
    )


@every_notebook
def test_no_cell_failed_unless_tagged(path):
    failed = [
        name(cell)
        for cell in code_cells(path)
        if any(out.output_type == "error" for out in cell.outputs) and not tags(cell) & ERROR_TAGS
    ]
    assert not failed, f"error outputs in {failed}; tag them `raises-exception` if intended"


@every_notebook
def test_no_warning_or_progress_bar_on_stderr(path):
    noisy = [
        f"{name(cell)}: {out.text[:80]!r}"
        for cell in code_cells(path)
        for out in cell.outputs
        if out.output_type == "stream" and out.name == "stderr"
    ]
    assert not noisy, f"stderr output in {noisy}"


@every_notebook
def test_outputs_name_no_absolute_path(path):
    found = [
        f"{name(cell)}: …{text[max(0, hit.start() - 20):hit.end() + 30]}"
        for cell in code_cells(path)
        for _, text in output_texts(cell)
        for hit in ABSOLUTE_PATH.finditer(text)
    ]
    assert not found, f"absolute paths of one machine in {found}"


@every_notebook
def test_outputs_are_small(path):
    large = [
        f"{name(cell)}: {len(text.encode())} bytes of {mime}"
        for cell in code_cells(path)
        for mime, text in output_texts(cell)
        if len(text.encode()) > MAX_TEXT_OUTPUT
    ]
    assert not large, f"outputs over {MAX_TEXT_OUTPUT} bytes: {large}"


@every_notebook
def test_no_output_needs_a_kernel_or_a_content_network(path):
    widgets = [
        name(cell)
        for cell in code_cells(path)
        if any(mime == WIDGET for mime, _ in output_texts(cell))
    ]
    assert not widgets, f"widget outputs are dead on the static page: {widgets}"


@every_notebook
def test_every_picture_has_alt_text(path):
    mute: list[str] = []
    for cell in code_cells(path):
        mimes = {mime for out in cell.outputs for mime in out.get("data", {})}
        alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
        if any(mime.startswith("image/") for mime in mimes) and len(alt) < MIN_ALT_LENGTH:
            mute.append(f"{name(cell)}: cell metadata needs mystnb.image.alt")
        for mime, text in output_texts(cell):
            if mime == "text/html":
                mute += [f"{name(cell)}: {tag}" for tag in mute_tags(text)]
    for cell in load(path).cells:
        if cell.cell_type == "markdown":
            mute += re.findall(r"!\[\s*\]\([^)]*\)", cell.source)
            mute += mute_tags(cell.source)
    assert not mute, f"pictures without alt text: {mute}"


def mute_tags(html: str) -> list[str]:
    """Return the opening of every img without alt, and of every svg without role and label."""
    soup = BeautifulSoup(html, "html.parser")
    images = [tag for tag in soup.find_all("img") if not (tag.get("alt") or "").strip()]
    drawings = [
        tag
        for tag in soup.find_all("svg")
        if not tag.find_parent("svg")
        and tag.get("aria-hidden") != "true"
        and not (tag.get("role") == "img" and (tag.get("aria-label") or tag.find("title")))
    ]
    return [str(tag)[:80] for tag in images + drawings]


@every_notebook
def test_code_cells_are_short(path):
    long = [
        f"{name(cell)}: {len(cell.source.splitlines())} lines"
        for cell in code_cells(path)
        if len(cell.source.splitlines()) > MAX_CELL_LINES
    ]
    assert not long, f"over {MAX_CELL_LINES} lines, move logic into the package: {long}"


@every_notebook
def test_first_cell_sets_up_and_last_gives_provenance(path):
    cells = code_cells(path)
    assert "setup" in tags(cells[0]), "the first code cell installs and seeds: tag it `setup`"
    assert "provenance" in tags(cells[-1]), "the last code cell must be tagged `provenance`"
    assert cells[-1].outputs, "the provenance cell printed nothing"


@every_notebook
def test_few_cells_are_hidden_from_nbval(path):
    hidden = [name(cell) for cell in code_cells(path) if tags(cell) & UNCHECKED_TAGS]
    assert len(hidden) <= MAX_UNCHECKED_CELLS, f"budget {MAX_UNCHECKED_CELLS}, hidden: {hidden}"
    by_comment = [name(c) for c in code_cells(path) if re.search(r"(?m)^\s*#\s*NBVAL_", c.source)]
    assert not by_comment, f"use tags, which readers do not see, not comments: {by_comment}"


@every_notebook
def test_metadata_keeps_no_trace_of_one_run(path):
    volatile = [
        name(cell)
        for cell in load(path).cells
        if {"execution", "ExecuteTime", "collapsed"} & set(cell.metadata)
    ]
    assert not volatile, f"timings in the metadata of {volatile}: run `make execute`"
    assert "widgets" not in load(path).metadata


@every_notebook
def test_each_number_in_the_prose_is_glued_once(path):
    notebook = load(path)
    glued = [
        out.metadata["scrapbook"]["name"]
        for cell in code_cells(path)
        for out in cell.outputs
        if "scrapbook" in out.get("metadata", {})
    ]
    twice = sorted({key for key in glued if glued.count(key) > 1})
    assert not twice, f"{path.stem} glues {', '.join(twice)} twice; the later one would be shown"
    prose = "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")
    missing = sorted(set(re.findall(r"\{glue:text\}`([^`]+)`", prose)) - set(glued))
    assert not missing, f"{path.stem} shows {', '.join(missing)}, which no cell glues"
