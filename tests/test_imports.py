"""Who imports whom, and what must start without torch."""

import subprocess
import sys
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).resolve().parents[1]


def python(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)


def test_the_import_contracts_of_pyproject_hold(capsys):
    failed = lint_imports(str(ROOT / "pyproject.toml"), no_cache=True)
    told = capsys.readouterr().out
    assert not failed and "0 broken" in told, told


@pytest.mark.parametrize(
    "statement",
    [
        "import stablerl_core",
        "import stablerl_core.runlog",
        "import stablerl_core.four_curves",
        "import stablerl_core.cli",
        "from stablerl_core.cli import main\ntry: main(['--help'])\nexcept SystemExit: pass",
        "from stablerl_core.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_starts_without_torch(statement):
    done = python(
        f"{statement}\nimport sys\n"
        "heavy = {'torch', 'transformers', 'numpy', 'matplotlib'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "HEAVY []"


def test_the_core_needs_no_extra():
    """Everything but the extras' own functions imports with the core dependencies alone."""
    blocked = "reasoning_gym math_verify simpy matplotlib IPython ipywidgets trl hypothesis pytest"
    done = python(
        f"import sys\nfor name in {blocked.split()}: sys.modules[name] = None\n"
        "import stablerl_core.training, stablerl_core.cli, stablerl_core.training.report\n"
        "from stablerl_core.training import live_plot\nlive_plot([])({'step': 10})\n"
    )
    assert done.returncode == 0, done.stderr
