"""`stablerl run`: the opening run in a terminal, with a table, a log and a page at its end."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..four_curves import to_html
from ..runlog import SIGNALS, RunLog
from .config import DataConfig, NumericsConfig, SystemConfig, TrainerConfig
from .trainer import Trainer

LAYERS = {1: "data and rewards", 2: "policy change", 3: "numerical updates", 4: "training system"}


def run_with_report(options: argparse.Namespace) -> int:
    """Train as the options of `stablerl run` say, then print the table and write the page."""
    out = Path(options.out)
    trainer = Trainer.resume(out) if options.resume else Trainer(_config(options))
    log = trainer.run(options.steps)
    print(signal_table(log))
    facts = {"command": options.command_line} | _facts(log)
    page = out / "report.html"
    page.write_text(to_html(log.rows, "A GRPO run of a small mixture of experts", facts))
    print(f"\nlog     {out / 'run.jsonl'}\nreport  {page}")
    return 0


def _config(options: argparse.Namespace) -> TrainerConfig:
    return TrainerConfig(
        base=options.preset,
        steps=TrainerConfig.steps if options.steps is None else options.steps,
        seed=options.seed,
        out=options.out,
        data=DataConfig(task=options.task, verifier=options.verifier),
        numerics=NumericsConfig(learning_rate=options.learning_rate),
        system=SystemConfig(device=options.device),
    )


def _facts(log: RunLog) -> dict:
    seconds = sum(log.series("seconds")[1])
    return {
        "steps": log.rows[-1]["step"],
        "training time": f"{seconds:.0f} s",
        **log.header["provenance"],
        "configuration": log.header["config"],
    }


def signal_table(log: RunLog, window: int = 10) -> str:
    """The signals of the four layers as text: first value, last value (mean of the last few)."""
    lines = [f"{'':24}{'first':>10}{'last':>10}  unit"]
    for layer, title in LAYERS.items():
        lines.append(f"Layer {layer}: {title}")
        for name, signal in SIGNALS.items():
            values = log.series(name)[1]
            if signal.layer == layer and values:
                last = log.last(name, window)
                lines.append(f"  {name:22}{values[0]:>10.3g}{last:>10.3g}  {signal.unit}")
    return "\n".join(lines)
