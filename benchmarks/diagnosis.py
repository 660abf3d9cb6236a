"""Planted faults, diagnosed by us and by two other tools from the same rows.

    python -m pip install --target RIVALS rldoctor rlwatch
    python benchmarks/diagnosis.py --rivals RIVALS [--seeds 1] [--first-seed 0] [--logs FOLDER]

Each tool gets the rows under the names that it documents. Its verdict is the layer of its first
warning (rlwatch), or of its most severe one (rldoctor); `LAYER_OF` says which detector speaks about
which layer. A verdict on a faulty run is right, wrong, or none; a healthy run is accused or not.
With `--logs` runs are kept as JSONL, and read from there if they are there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import torch

from stablerl_core.diagnosis import diagnose
from stablerl_core.experiments.fault_suite import ARMS, NAMES, log_of
from stablerl_core.runlog import RunLog

# rldoctor knows an evaluation under this name.
TRL_NAMES = NAMES["trl"] | {"step": "step", "heldout_accuracy": "eval_score"}
LAYER_OF = {
    "advantage_collapse": 1,
    "reward_hacking": 1,
    "reward_composition": 1,
    "length_pathology": 1,
    "reward_mean_drift": 1,
    "advantage_variance": 1,
    "entropy_collapse": 2,
    "kl_drift": 2,
    "kl_explosion": 2,
    "clip_saturation": 2,
    "gradient_pathology": 3,
    "loss_nan": 3,
    "gradient_norm_spike": 3,
}


def ours(log: RunLog) -> int | None:
    """Our verdict: a layer, 0 for healthy, None for insufficient evidence."""
    found = diagnose(log)
    return 0 if found.verdict == "healthy" else found.layer


def rldoctor(log: RunLog) -> int | None:
    """The layer of the most severe warning, 0 without one."""
    from rl_doctor import Severity, run_from_records
    from rl_doctor import diagnose as examine

    rows = [{TRL_NAMES[k]: v for k, v in row.items() if k in TRL_NAMES} for row in log]
    findings = examine(run_from_records(rows)).findings
    bad = [f for f in findings if f.severity >= Severity.WARNING]
    worst = max(bad, key=lambda f: f.severity, default=None)
    return 0 if worst is None else LAYER_OF.get(worst.detector, 0)


def rlwatch(log: RunLog) -> int | None:
    """The layer of the first alert, 0 without one."""
    from rlwatch.config import RLWatchConfig
    from rlwatch.detectors import DetectorSuite

    suite = DetectorSuite(RLWatchConfig())
    names = {"entropy": "entropy", "kl_ref": "kl_divergence", "reward": "reward_mean"}
    names |= {"loss": "loss", "grad_norm": "grad_norm"}
    for row in log:
        alerts = suite.check_step(row["step"], **{names[k]: row[k] for k in names if k in row})
        if alerts:
            return LAYER_OF.get(alerts[0].detector, 0)
    return 0


def read_or_train(arm: str, seed: int, folder: Path | None) -> RunLog:
    path = None if folder is None else folder / f"{arm}-{seed}.jsonl"
    if path is not None and path.exists():
        log = RunLog()
        log.rows = [json.loads(line) for line in path.read_text().splitlines()]
        return log
    log = log_of(arm, seed)
    if path is not None:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in log))
    return log


def outcome(truth: int, verdict: int | None) -> str:
    """How a verdict compares with the truth; 0 is healthy, None abstains."""
    if truth == 0:
        return "healthy, accused" if verdict else "healthy, not accused"
    if not verdict:
        return "faulty, missed" if verdict == 0 else "faulty, abstained"
    return "faulty, right layer" if verdict == truth else "faulty, wrong layer"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rivals", help="folder that holds rldoctor and rlwatch")
    parser.add_argument("--logs", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tools = {"stablerl": ours}
    if options.rivals:
        sys.path.append(options.rivals)
        tools |= {"rldoctor": rldoctor, "rlwatch": rlwatch}
    counts = {name: Counter() for name in tools}
    for arm in ARMS:
        truth = 0 if arm.startswith("healthy") else int(arm[len("layer")])
        for seed in range(options.first_seed, options.first_seed + options.seeds):
            log = read_or_train(arm, seed, options.logs)
            verdicts = {name: tool(log) for name, tool in tools.items()}
            print(f"{arm:30} {seed:4} ", verdicts, flush=True)
            for name, verdict in verdicts.items():
                counts[name][outcome(truth, verdict)] += 1
    for name, seen in counts.items():
        print(name, dict(sorted(seen.items())))


if __name__ == "__main__":
    main()
