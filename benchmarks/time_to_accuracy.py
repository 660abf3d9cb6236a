"""Seconds until the default run answers nine held-out problems in ten, for five seeds.

    python benchmarks/time_to_accuracy.py [--seeds N] [--threads N]
"""

from __future__ import annotations

import argparse
import time

import torch

from stablerl_core.training import Trainer, TrainerConfig, provenance


def seconds_to(accuracy: float, seed: int, limit: int) -> tuple[float, int, float]:
    """(seconds, step, held-out accuracy) when it is first reached, or at step `limit`."""
    started = time.perf_counter()
    trainer = Trainer(TrainerConfig(seed=seed, steps=limit))
    while trainer.version < limit:
        reached = trainer.step().get("heldout_accuracy", 0.0)
        if reached >= accuracy:
            break
    return time.perf_counter() - started, trainer.version, reached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(*(f"{key} {value}" for key, value in provenance().items()), sep=", ")
    for seed in range(options.seeds):
        seconds, step, accuracy = seconds_to(0.9, seed, limit=300)
        print(f"seed {seed}: {accuracy:.3f} at step {step} after {seconds:.0f} s", flush=True)


if __name__ == "__main__":
    main()
