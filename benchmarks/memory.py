"""Peak memory of one side, in a process of its own: python memory.py SIDE CASE CHECKPOINT STEPS.

CASE is its place in `CASES`.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import psutil
from workload import CASES, Case

SIDES = ("ours", "same settings", "defaults")


def measure(side: str, case: Case, checkpoint: Path, steps: int) -> float:
    """MB of resident memory that `steps` steps reach over what importing the library takes."""
    command = [sys.executable, __file__, side, str(CASES.index(case)), str(checkpoint), str(steps)]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{run.stderr}")
    return float(run.stdout.splitlines()[-1])


class Peak(threading.Thread):
    """Looks at the resident memory every two milliseconds until stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.process, self.done = psutil.Process(), threading.Event()
        self.first = self.peak = self.process.memory_info().rss

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.peak = max(self.peak, self.process.memory_info().rss)


def main(side: str, number: str, checkpoint: str, steps: str) -> None:
    case = CASES[int(number)]
    if side == "ours":
        from ours import Ours

        peak = Peak()
        peak.start()
        trainer = Ours(case, Path(checkpoint))
        for _ in range(int(steps)):
            trainer.step()
    else:
        from theirs import DEFAULTS, FAIR, Theirs

        peak = Peak()
        peak.start()
        options = DEFAULTS if side == "defaults" else FAIR
        Theirs(case, Path(checkpoint), int(steps), options, lambda: None).train()
    peak.done.set()
    print((peak.peak - peak.first) / 2**20)


if __name__ == "__main__":
    main(*sys.argv[1:])
