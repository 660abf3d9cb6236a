"""Make what the site needs and the repository does not hold: MathJax, the signals, the claims.

All are written into folders that git ignores, so `make book` always shows the installed MathJax,
the signals of the present code and the numbers of the present results. Nothing is downloaded.
"""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

BOOK = Path(__file__).resolve().parent
sys.path[:0] = [str(BOOK.parent), str(BOOK)]

# The repository root and this folder must be on the path first.
from claims import claims_markdown  # noqa: E402

from stablerl_core.runlog import SIGNALS  # noqa: E402

# One script renders TeX; the fonts and the rarer TeX extensions are loaded when a page needs them.
MATHJAX_PARTS = ["tex-chtml.js", "output/chtml/fonts", "input/tex/extensions"]

LAYER_TITLES = {
    0: "Bookkeeping",
    1: "Layer 1: data and rewards",
    2: "Layer 2: policy change",
    3: "Layer 3: numerical updates",
    4: "Layer 4: training system",
}


def copy_mathjax(target: Path) -> None:
    """Copy the needed parts of MathJax from its installed wheel; FileNotFoundError if absent."""
    spec = find_spec("mathjax")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("MathJax is not installed: pip install -r requirements.lock")
    root = Path(spec.origin).parent / "static" / "mathjax"
    shutil.rmtree(target, ignore_errors=True)
    for part in MATHJAX_PARTS:
        source, copy = root / "es5" / part, target / part
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copyfile(source, copy)
    shutil.copyfile(root / "LICENSE", target / "LICENSE")


def signals_markdown() -> str:
    """Return the table of canonical signals, one section a layer, as MyST."""
    lines: list[str] = []
    for layer, title in LAYER_TITLES.items():
        rows = [(name, s) for name, s in SIGNALS.items() if s.layer == layer]
        lines += [f"## {title}", "", "| signal | unit | meaning |", "| --- | --- | --- |"]
        lines += [
            f"| `{name}` | {_cell(s.unit)} | {_cell(s.meaning)} |" for name, s in rows
        ] + [""]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Escape what would end a table cell or open a formula."""
    return text.replace("|", "\\|").replace("$", "\\$")


def main() -> None:
    copy_mathjax(BOOK / "assets" / "vendor" / "mathjax")
    generated = BOOK / "_generated"
    generated.mkdir(exist_ok=True)
    (generated / "signals.md").write_text(signals_markdown(), encoding="utf-8")
    (generated / "claims.md").write_text(claims_markdown(), encoding="utf-8")


if __name__ == "__main__":
    main()
