"""The notation page and the code use the same names, in both directions."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "stablerl_core"
LAYERS = ["rewards", "policy", "numerics", "system"]
TENSOR = {"Tensor", "torch.Tensor", "Tensor | None", "torch.Tensor | None"}


def page_names() -> set[str]:
    """Return the names in the column "in the code" of the tables of the notation page."""
    names: set[str] = set()
    column = None
    for line in (ROOT / "book" / "notation.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if not line.startswith("|"):
            column = None
        elif "in the code" in cells:
            column = cells.index("in the code")
        elif column is not None and not set(line) <= set("|-: "):
            names |= set(re.findall(r"`([a-z_][a-z0-9_]*)`", cells[column]))
    return names


def functions(tree: ast.Module) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def arguments(function: ast.FunctionDef) -> list[ast.arg]:
    return function.args.posonlyargs + function.args.args + function.args.kwonlyargs


def code_names() -> set[str]:
    """Return every argument name and every annotated field of the package."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {arg.arg for function in functions(tree) for arg in arguments(function)}
        names |= {
            node.target.id
            for node in ast.walk(tree)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return names


def tensor_arguments() -> dict[str, str]:
    """Return {argument: where} for the tensors that public functions of the layers take."""
    found: dict[str, str] = {}
    for layer in LAYERS:
        for path in (PACKAGE / layer).rglob("[!_]*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                    for arg in arguments(node):
                        if arg.annotation and ast.unparse(arg.annotation) in TENSOR:
                            found.setdefault(arg.arg, f"{layer}/{path.name}: {node.name}")
    return found


def test_the_page_names_the_policies():
    assert {"logp", "old_logp", "sampler_logp", "ref_logp", "mask", "advantages"} <= page_names()


def test_every_name_on_the_page_is_an_argument_or_field():
    missing = page_names() - code_names()
    assert not missing, f"book/notation.md names {sorted(missing)}, which no function takes"


def test_every_tensor_argument_of_a_layer_is_on_the_page():
    unnamed = {a: where for a, where in tensor_arguments().items() if a not in page_names()}
    assert not unnamed, f"add to book/notation.md, or use one of its names: {unnamed}"
