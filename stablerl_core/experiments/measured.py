"""An experiment whose arms are functions: for what is not a run of the `Trainer`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .repeated import Repeated


@dataclass(frozen=True)
class Measured(Repeated):
    """A comparison like `Experiment`, in which an arm is a function of the seed.

    The function returns rows of numbers, each with a `step`, which counts whatever the prediction
    says it counts and rises from row to row. It must be importable (a function of a module, or a
    `functools.partial` of one), since every run has its own process. Other names in a row are the
    experiment's own and need not be signals of the run log.
    """

    name: str
    prediction: str
    arms: Mapping[str, Callable[[int], Sequence[Mapping[str, float]]]]

    def at_scale(self, scale: str) -> Measured:
        """Itself (`cpu`); there is no larger one. Raises `ValueError` for any other scale."""
        if scale != "cpu":
            raise ValueError(f"SCALE={scale!r}: {self.name} has one scale, 'cpu'; leave SCALE out")
        return self

    def rows(self, arm: str, seed: int = 0) -> list[dict]:
        """The rows of one run. Raises `ValueError`: an unknown arm, steps that do not rise."""
        if arm not in self.arms:
            raise ValueError(f"arm={arm!r} is not in {self.name}; arms: {', '.join(self.arms)}")
        rows = [dict(row) for row in self.arms[arm](seed)]
        steps = [row.get("step") for row in rows]
        if None in steps or any(b <= a for a, b in zip(steps, steps[1:], strict=False)):
            raise ValueError(f"arm={arm!r} returned the steps {steps}; they must rise in every row")
        return rows
