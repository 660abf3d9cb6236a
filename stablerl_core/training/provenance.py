"""Where a number came from: versions, hardware, commit."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path

import torch
import transformers

from .. import __version__


def provenance() -> dict[str, str]:
    """Versions, hardware and commit of this process, for a log, a result file or a page."""
    if torch.cuda.is_available():
        hardware = torch.cuda.get_device_name()
    else:
        hardware = f"CPU, {torch.get_num_threads()} threads, {platform.machine()}"
    return {
        "stablerl_core": __version__,
        "commit": _commit(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "hardware": hardware,
        "cores": str(os.cpu_count()),
    }


def _commit() -> str:
    """Short commit of the source tree, `+` when it has changes; `unknown` outside a clone."""
    root = Path(__file__).parents[2]
    if not (root / "pyproject.toml").is_file():
        return "unknown"  # installed: a repository around it would be somebody else's
    git = ["git", "-C", str(root / "stablerl_core")]
    try:
        head = subprocess.run(
            [*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True
        )
        if head.returncode:
            return "unknown"
        dirty = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True)
    except OSError:
        return "unknown"
    return head.stdout.strip() + ("+" if dirty.stdout.strip() else "")
