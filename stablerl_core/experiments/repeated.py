"""Every arm with many seeds, into one results file: shared by all kinds of experiment."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import torch
from tqdm.auto import tqdm

from ..training import provenance


class Repeated:
    """What an experiment needs to be repeated: `name`, `prediction`, `arms`, and `rows`."""

    name: str
    prediction: str
    arms: Mapping

    def at_scale(self, scale: str) -> Repeated:
        """The same arms on the larger preset and a GPU (`gpu`), or as they are (`cpu`)."""
        raise NotImplementedError

    def rows(self, arm: str, seed: int) -> list[dict]:
        """What one run of one arm leaves behind: rows of numbers, each with its `step`."""
        raise NotImplementedError

    def repeat(self, seeds: int, folder: Path, command: str) -> Path:
        """Run every arm with seeds 0 … seeds−1, one process a core, into `<folder>/<name>.json`.

        Numbers are kept to four significant digits. The file is rewritten as each run ends, so
        an interruption keeps what was finished.
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
                pool.submit(_rounded_rows, self, arm, seed): (arm, seed)
                for seed in range(seeds)
                for arm in self.arms
            }
            for job in as_completed(jobs):
                yield *jobs[job], job.result()


def _rounded_rows(experiment: Repeated, arm: str, seed: int) -> list[dict]:
    rows = experiment.rows(arm, seed)
    return [{k: float(f"{v:.4g}") if k != "step" else v for k, v in r.items()} for r in rows]
