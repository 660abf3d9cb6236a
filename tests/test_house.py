"""The top level keeps its promises: one lock, one version, links and commands that exist."""

from __future__ import annotations

import ast
import doctest
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Not verl: it brings its own torch.
LOCKED_EXTRAS = ["book", "queues", "tasks", "tensorboard", "test", "trl"]
PROSE = [ROOT / n for n in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(
    (ROOT / "book").glob("*.md")
)


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def lock_lines() -> list[str]:
    lines = [line.strip() for line in read("requirements.lock").splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def lock() -> dict[str, str]:
    return {canonicalize_name(n): v for n, v in (line.split("==") for line in lock_lines())}


def declared() -> list[Requirement]:
    extras = PROJECT["optional-dependencies"]
    texts = list(PROJECT["dependencies"]) + [t for extra in LOCKED_EXTRAS for t in extras[extra]]
    return [Requirement(text) for text in texts]


# --- one set of versions ---------------------------------------------------------------------


def test_lock_pins_exact_versions_and_names_no_place_to_get_them():
    odd = [line for line in lock_lines() if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.!]+", line)]
    assert not odd, "only `name==version`: no address, path, marker or local build label"
    names = [line.split("==")[0] for line in lock_lines()]
    assert len({canonicalize_name(n) for n in names}) == len(names)


@pytest.mark.parametrize("requirement", declared(), ids=str)
def test_lock_satisfies_pyproject(requirement):
    version = lock().get(canonicalize_name(requirement.name))
    assert version is not None, f"{requirement.name} is in pyproject.toml but not in the lock"
    assert requirement.specifier.contains(version, prereleases=True)


def test_verl_is_an_extra_that_the_lock_leaves_out():
    assert "verl" in PROJECT["optional-dependencies"]
    assert set(PROJECT["optional-dependencies"]) == {*LOCKED_EXTRAS, "verl"}
    assert "verl" not in lock()


def test_oracles_are_installed_beside_the_environment_and_required_in_ci():
    lines = [line for line in read("tests/oracles.txt").splitlines() if not line.startswith("#")]
    assert lines and all(re.fullmatch(r"[a-z0-9-]+==[\d.]+", line) for line in lines)
    assert not {line.split("==")[0] for line in lines} & set(lock())
    (rule,) = re.findall(r"(?m)^\$\(VENV\)/\.installed:(.*(?:\n\t.*)+)", read("Makefile"))
    assert "tests/oracles.txt" in rule.split("\n")[0], "a new version must be installed"
    assert re.search(r"--no-deps .*--target \$\(VENV\)/oracles -r tests/oracles\.txt", rule)
    assert "export STABLERL_REQUIRE_ORACLES=1" in read(".ci/run")


def test_lock_holds_no_package_of_the_project_or_of_the_installer():
    assert not {"stablerl-core", "pip", "setuptools", "wheel"} & set(lock())


def test_environment_installs_the_lock_and_the_package():
    environment = yaml.safe_load(read("environment.yml"))
    conda = [d for d in environment["dependencies"] if isinstance(d, str)]
    (pip,) = [d["pip"] for d in environment["dependencies"] if isinstance(d, dict)]
    assert pip == ["-r requirements.lock", "-e ."]
    assert [d.split("=")[0] for d in conda] == ["python", "pip"], "all else comes from the lock"
    (python,) = [d.split("=")[1] for d in conda if d.startswith("python")]
    assert SpecifierSet(PROJECT["requires-python"]).contains(f"{python}.0")


def test_one_version():
    version = PROJECT["version"]
    tree = ast.parse(read("stablerl_core/__init__.py"))
    values = [
        node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id == "__version__"
    ]
    assert values == [version]
    assert str(yaml.safe_load(read("CITATION.cff"))["version"]) == version
    assert f"## [{version}]" in read("CHANGELOG.md")


def test_license():
    text = read("LICENSE")
    assert "Apache License" in text and "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == yaml.safe_load(read("CITATION.cff"))["license"] == "Apache-2.0"


# --- the house -------------------------------------------------------------------------------


def toc_files() -> list[str]:
    toc = yaml.safe_load(read("_toc.yml"))
    return [toc["root"]] + [c["file"] for part in toc["parts"] for c in part["chapters"]]


def test_contents_list_every_page_and_notebook_once():
    pages = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "book").glob("*.md")]
    notebooks = [p.relative_to(ROOT).with_suffix("") for p in (ROOT / "notebooks").glob("*.ipynb")]
    assert sorted(toc_files()) == sorted(p.as_posix() for p in [*pages, *notebooks])


def test_contents_list_notebooks_in_the_order_of_their_numbers():
    notebooks = [f for f in toc_files() if f.startswith("notebooks/")]
    assert notebooks == sorted(notebooks)
    assert all(re.match(r"notebooks/\d\d_[a-z0-9_]+$", f) for f in notebooks)


def test_every_subpackage_has_a_folder_of_tests():
    packages = {
        p.parent.name
        for p in (ROOT / "stablerl_core").glob("*/__init__.py")
        if len(list(p.parent.glob("*.py"))) > 1
    }
    tested = {p.name for p in (ROOT / "tests").iterdir() if p.is_dir()}
    assert packages <= tested, f"no tests/ folder for {sorted(packages - tested)}"


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z]+):(?!=)", read("Makefile"), flags=re.MULTILINE))


def test_makefile_has_the_promised_targets():
    promised = "book test lab execute lint bench base clean"
    assert set(promised.split()) <= make_targets()


@pytest.mark.parametrize("page", [p for p in PROSE if p.exists()], ids=lambda p: p.name)
def test_every_make_command_in_the_prose_exists(page):
    named = set(re.findall(r"(?m)(?:^|`)make ([a-z]+)\b", page.read_text(encoding="utf-8")))
    assert named <= make_targets(), f"{page.name} names {sorted(named - make_targets())}"


@pytest.mark.parametrize("page", [p for p in PROSE if p.exists()], ids=lambda p: p.name)
def test_relative_links_resolve(page):
    text = re.sub(r"(?s)```.*?```|<!--.*?-->|`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    local = [t.split("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    missing = [t for t in local if t and not (page.parent / t).exists()]
    assert not missing, f"{page.name} links to {missing}"


def test_readme_opens_with_the_two_commands():
    text = read("README.md")
    assert 0 < text.index("make book") < text.index("make test") < text.index("stablerl run")
    assert text.index("stablerl run") < text.index("\n## ")


def test_ci_runs_the_readme_commands():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    commands = [line for line in script.read_text().splitlines() if line.startswith("make ")]
    assert commands == ["make book", "make test"]


def test_the_example_in_the_readme_prints_what_it_says():
    failed, tried = doctest.testfile(str(ROOT / "README.md"), module_relative=False)
    assert tried > 0 and failed == 0
