"""An experiment of training runs: its arms, its prediction, and one live run of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..training import RunLog, Trainer, TrainerConfig
from .repeated import Repeated


@dataclass(frozen=True)
class Experiment(Repeated):
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

    def rows(self, arm: str, seed: int) -> list[dict]:
        """The thinned rows of one run."""
        log = self.train(arm, self.trainer(arm, seed), progress=False)
        return [
            row
            for row in log
            if row["step"] % self.log_every == 0 or row["step"] == 1 or "heldout_accuracy" in row
        ]


def _larger(arms: Mapping[str, Sequence[TrainerConfig]]) -> dict[str, list[TrainerConfig]]:
    return {
        arm: [
            replace(p, base="mixtral-gpu", system=replace(p.system, device="cuda")) for p in phases
        ]
        for arm, phases in arms.items()
    }
