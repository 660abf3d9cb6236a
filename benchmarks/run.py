"""One GRPO step of our Trainer next to one of TRL's GRPOTrainer, interleaved in one process.

python benchmarks/run.py [--case fixed|live|all] [--rounds N] [--quick] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import statistics
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")

import torch
from memory import SIDES, measure
from ours import Ours
from theirs import DEFAULTS, FAIR, Theirs
from workload import CASES, PARTS, Case, save_checkpoint

from stablerl_core.training.provenance import provenance

WARM_UP = 2
SETTINGS = {"same settings": FAIR, "its defaults, float32": DEFAULTS}


def compare(case: Case, settings: str, checkpoint: Path, rounds: int) -> dict:
    """TRL step, our step, TRL step, … on one checkpoint; the first pairs are not counted."""
    ours = Ours(case, checkpoint)
    theirs = Theirs(case, checkpoint, rounds + WARM_UP, SETTINGS[settings], ours.step)
    _same_model(ours.model, theirs.model)
    theirs.train()
    _same_work(case, ours, theirs)
    sides = {"ours": ours, "trl": theirs}
    steps = {k: side.watch.steps[WARM_UP : WARM_UP + rounds] for k, side in sides.items()}
    seconds = {k: [sum(step.values()) for step in steps[k]] for k in sides}
    pairs = [t / o for t, o in zip(seconds["trl"], seconds["ours"], strict=True)]
    return {
        "case": case.name,
        "settings": settings,
        "rounds": rounds,
        "ratio": statistics.median(pairs),
        "ratio_quartiles": _quartiles(pairs),
        "ratio_range": [min(pairs), max(pairs)],
        "ratio_of_fastest": min(seconds["trl"]) / min(seconds["ours"]),
        "ratio_of_totals": sum(seconds["trl"]) / sum(seconds["ours"]),
        **{k: _summary(side, steps[k], seconds[k]) for k, side in sides.items()},
    }


def _summary(side, steps: list[dict], seconds: list[float]) -> dict:
    generated, trained = zip(*side.tokens[WARM_UP:], strict=True)
    return {
        "ms": 1000 * statistics.median(seconds),
        "ms_quartiles": [1000 * s for s in _quartiles(seconds)],
        "parts_ms": {p: 1000 * statistics.median(s[p] for s in steps) for p in PARTS},
        "generated_tokens": statistics.mean(generated),
        "trained_tokens": statistics.mean(trained),
        "reward": [statistics.mean(side.rewards[:5]), statistics.mean(side.rewards[-5:])],
    }


def _quartiles(values: list[float]) -> list[float]:
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]


def _same_model(ours, theirs) -> None:
    """Raise if anything that decides the speed of a forward pass differs."""

    def facts(model) -> dict:
        return {
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "dtype": {str(p.dtype) for p in model.parameters()},
            "experts": model.config._experts_implementation,
            "attention": model.config._attn_implementation,
        }

    if facts(ours) != facts(theirs):
        raise RuntimeError(f"not the same model: {facts(ours)} and {facts(theirs)}")


def _same_work(case: Case, ours: Ours, theirs: Theirs) -> None:
    """Raise if prompts differ, or if a step of a fixed case has another number of tokens."""
    for step, (a, b) in enumerate(zip(ours.asked, theirs.asked, strict=True)):
        # TRL shuffles the rows of a batch between sampling and training.
        if not torch.equal(a.unique(dim=0), b.unique(dim=0)):
            raise RuntimeError(f"not the same prompts in step {step}")
    expected = (case.tokens, case.tokens)
    for name, side in (("ours", ours), ("TRL", theirs)):
        if case.tokens and set(side.tokens) != {expected}:
            seen = set(side.tokens)
            raise RuntimeError(f"{name}: tokens (generated, trained) {seen}, not {expected}")


def machine() -> dict:
    """Processor, load and versions."""
    import trl

    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if "model name" in line]
    facts = {"processor": names[0] if names else platform.processor()}
    return facts | provenance() | {"trl": trl.__version__, "load": f"{os.getloadavg()[0]:.1f}"}


def table(rows: list[dict]) -> str:
    """The rows as a Markdown table."""
    lines = [
        "| case | TRL with | TRL ms | ours ms | TRL / ours | quartiles | range | fastest | total |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["ratio_quartiles"]
        least, most = r["ratio_range"]
        lines.append(
            f"| {r['case']} | {r['settings']} | {_ms(r['trl'])} | {_ms(r['ours'])} | "
            f"**{r['ratio']:.2f}** | {low:.2f}-{high:.2f} | {least:.2f}-{most:.2f} | "
            f"{r['ratio_of_fastest']:.2f} | {r['ratio_of_totals']:.2f} |"
        )
    return "\n".join(lines)


def _ms(side: dict) -> str:
    parts = " / ".join(f"{side['parts_ms'][p]:.0f}" for p in PARTS)
    return f"{side['ms']:.0f} ({parts})"


def work(rows: list[dict]) -> str:
    """What was processed, one line a row and side."""
    return "\n".join(
        f"{r['case']}, {r['settings']}, {k}: a step generates "
        f"{r[k]['generated_tokens']:.0f} tokens and trains on {r[k]['trained_tokens']:.0f}; reward "
        f"{r[k]['reward'][0]:.2f} in the first 5 steps, {r[k]['reward'][1]:.2f} in the last"
        for r in rows
        for k in ("trl", "ours")
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", choices=["fixed", "live", "all"], default="all")
    parser.add_argument("--rounds", type=int, help="counted pairs of steps (20; quick: 3)")
    parser.add_argument("--quick", action="store_true", help="few rounds, no memory")
    parser.add_argument("--threads", type=int, default=2, help="1 is steadier on a busy machine")
    parser.add_argument("--json", type=Path, help="also write everything here")
    given = parser.parse_args()
    given.rounds = given.rounds or (3 if given.quick else 20)
    return given


def main() -> None:
    given = options()
    torch.set_num_threads(given.threads)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    result = {"machine": machine(), "rows": [], "memory_mb": {}}
    print(", ".join(f"{k} {v}" for k, v in result["machine"].items()), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for case in (c for c in CASES if given.case in (c.kind, "all")):
            checkpoint = save_checkpoint(Path(folder) / case.name, case.ends)
            for settings in SETTINGS:
                result["rows"].append(compare(case, settings, checkpoint, given.rounds))
        if not given.quick:
            result["memory_mb"] = {s: measure(s, case, checkpoint, 3) for s in SIDES}
    print(f"\nms a step ({' / '.join(PARTS)}), medians of {given.rounds} interleaved pairs\n")
    print(table(result["rows"]) + "\n\n" + work(result["rows"]))
    if result["memory_mb"]:
        text = ", ".join(f"{side} {mb:.0f} MB" for side, mb in result["memory_mb"].items())
        print(f"peak memory over imports, {case.name}: {text}")
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
