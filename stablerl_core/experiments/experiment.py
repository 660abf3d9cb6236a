"""An experiment: its arms, its prediction, one live run of it, or many into a results file."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..training import RunLog, Trainer, TrainerConfig, provenance


@dataclass(frozen=True)
class Experiment:
    """A comparison: named arms, and what was predicted before they ran.

    An arm is a sequence of phases, configurations of one and the same run: each is in force up
    to its own `steps`. Phases differ in the settings that a team changes while it trains.
    `log_every` thins the rows that go into the results file; rows with a held-out accuracy are
    always kept.
    """

    name: str
    prediction: str
    arms: Mapping[str, Sequence[TrainerConfig]]
    log_every: int = 5

    def at_scale(self, scale: str) -> Experiment:
        """The same arms on the larger preset and a GPU (`gpu`), or as they are (`cpu`)."""
        if scale not in ("cpu", "gpu"):
            raise ValueError(f"SCALE={scale!r}: expected 'cpu' or 'gpu'")
        return self if scale == "cpu" else replace(self, arms=_larger(self.arms))

    def trainer(self, arm: str, seed: int = 0) -> Trainer:
        """The trainer of one arm and seed, at the start of its first phase."""
        if arm not in self.arms:
            raise ValueError(f"arm={arm!r} is not in {self.name}; arms: {', '.join(self.arms)}")
        return Trainer(replace(self.arms[arm][0], seed=seed))

    def train(self, arm: str, trainer: Trainer, steps: int | None = None, **options) -> RunLog:
        """Run the trainer through the phases of the arm, at most to step `steps`.

        `options` go to `Trainer.run`. Returns the log.
        """
        for phase in self.arms[arm]:
            trainer.config = replace(phase, seed=trainer.config.seed)
            trainer.run(min(phase.steps, steps or phase.steps), **options)
        return trainer.log

    def repeat(self, seeds: int, folder: Path, command: str) -> Path:
        """Run every arm with seeds 0 … seeds−1, one process a core, into `<folder>/<name>.json`.

        The file is rewritten as each run ends, so an interruption keeps what was finished.
        """
        path, started = folder / f"{self.name}.json", time.perf_counter()
        folder.mkdir(parents=True, exist_ok=True)
        runs: dict[str, dict[str, list]] = {arm: {} for arm in self.arms}
        made = provenance() | {"command": command}
        for arm, seed, rows in tqdm(self._finished(seeds), total=seeds * len(self.arms)):
            runs[arm][str(seed)] = rows
            made["seconds"] = round(time.perf_counter() - started)
            record = {"name": self.name, "prediction": self.prediction, "made": made}
            ordered = {
                a: dict(sorted(of.items(), key=lambda x: int(x[0]))) for a, of in runs.items()
            }
            aside = path.with_suffix(".tmp")
            aside.write_text(json.dumps(record | {"runs": ordered}) + "\n")
            os.replace(aside, path)
        return path

    def _finished(self, seeds: int) -> Iterator[tuple[str, int, list[dict]]]:
        """Runs in the order they end. Fresh processes: torch's threads do not survive a fork."""
        context = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
            jobs = {
                pool.submit(_rows, self, arm, seed): (arm, seed)
                for seed in range(seeds)
                for arm in self.arms
            }
            for job in as_completed(jobs):
                yield *jobs[job], job.result()


def _larger(arms: Mapping[str, Sequence[TrainerConfig]]) -> dict[str, list[TrainerConfig]]:
    return {
        arm: [
            replace(p, base="mixtral-gpu", system=replace(p.system, device="cuda")) for p in phases
        ]
        for arm, phases in arms.items()
    }


def _seed(item: tuple[str, list]) -> int:
    return int(item[0])


def _rows(experiment: Experiment, arm: str, seed: int) -> list[dict]:
    """The thinned rows of one run, numbers to four significant digits."""
    log = experiment.train(arm, experiment.trainer(arm, seed), progress=False)
    kept = [
        row
        for row in log
        if row["step"] % experiment.log_every == 0 or row["step"] == 1 or "heldout_accuracy" in row
    ]
    return [{k: float(f"{v:.4g}") if k != "step" else v for k, v in r.items()} for r in kept]
