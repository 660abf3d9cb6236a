"""A log with the questions that several rules ask of it: did it fall, is the task solved?"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .log import Series, SignalLog
from .trends import Departure, departure, fall_from_peak, level, monotone, scatter

# Where a healthy engine stands: bf16 kernels of two engines differ by 0.01-0.02 nats a token.
# At first: worth a look (float8 reaches that), larger than any format in use, another policy.
GAP_LIMITS = {
    "logp_gap": (0.07, 0.1, 0.25),
    "mismatch_kl": (0.03, 0.06, 0.2),
    "mismatch_k1": (0.03, 0.06, 0.2),
    "mismatch_js": (0.01, 0.02, 0.1),
    "prob_gap": (0.03, 0.06, 0.1),
    "log_perplexity_gap": (0.07, 0.1, 0.3),
}


class Evidence:
    """What the rules see. Series are without NaN; `raw` has them."""

    def __init__(self, log: SignalLog):
        self.log = log
        self.steps = log.steps
        self.rows = len(self.steps)

    def get(self, signal: str) -> Series:
        """The finite values of a signal, empty where it was never logged."""
        return self.log.series(signal).finite()

    def raw(self, signal: str) -> Series:
        """The same with NaN and infinity."""
        return self.log.series(signal)

    def has(self, signal: str) -> bool:
        """Whether it was logged at all."""
        return len(self.get(signal)) > 0

    def first(self, signal: str) -> float:
        """Median of its first fifth, NaN without a value."""
        return level(self.get(signal), "first")

    def end(self, signal: str) -> float:
        """Median of its last fifth, NaN without a value."""
        return level(self.get(signal), "last")

    def at(self, signal: str, step: float) -> float:
        """The value last logged at or before a step; NaN before the first."""
        series = self.get(signal)
        place = np.searchsorted(series.steps, step, side="right") - 1
        return float(series.values[place]) if place >= 0 else float("nan")

    @cached_property
    def span(self) -> float:
        """Steps from the first row to the last."""
        return float(self.steps[-1] - self.steps[0]) if self.rows else 0.0

    @cached_property
    def heldout(self) -> dict[str, Series]:
        """Every evaluation with at least two points."""
        found = {"heldout_accuracy": self.get("heldout_accuracy")}
        found |= {f"heldout:{n}": s.finite() for n, s in self.log.family("heldout").items()}
        return {name: s for name, s in found.items() if len(s) >= 2}

    @cached_property
    def reward_name(self) -> str | None:
        """The column that stands for the training reward, the rawest that was logged."""
        return next((n for n in ("reward", "reward_shaped") if self.has(n)), None)

    @cached_property
    def reward(self) -> Series:
        """The training reward, the rawest that was logged."""
        return self.get(self.reward_name) if self.reward_name else self.get("reward")

    @cached_property
    def fallen(self) -> tuple[str, Departure] | None:
        """The outcome that fell first, and where: an evaluation, or the training reward."""
        series = {self.reward_name: self.reward} if self.reward_name else {}
        falls = [(n, fall_from_peak(s)) for n, s in (self.heldout | series).items()]
        falls = [(n, f) for n, f in falls if f is not None]
        return min(falls, key=lambda pair: pair[1].step) if falls else None

    @cached_property
    def shrunk(self) -> Departure | None:
        """Answers that become less than a seventh as long."""
        return departure(self.get("length"), up=False, least=5.0, factor=7.0)

    @cached_property
    def rising(self) -> bool:
        """Whether the training reward rises all over the run."""
        return monotone(self.reward) > 0.3 and self.risen

    @cached_property
    def risen(self) -> bool:
        """Whether the training reward ends above its start, by a tenth and more than noise."""
        if len(self.reward) < 3:
            return False
        first, last = level(self.reward, "first"), level(self.reward, "last")
        noise = scatter(self.reward.values) / np.sqrt(max(1, len(self.reward) // 5))
        return last - first > max(4 * noise, 0.1 * abs(first), 1e-6)

    @cached_property
    def sinks(self) -> bool:
        """Whether the training reward drifts down, by a fifth of its start or more."""
        first, last = level(self.reward, "first"), level(self.reward, "last")
        return monotone(self.reward) < -0.2 and last < first - max(0.2 * abs(first), 0.02)

    @cached_property
    def solved(self) -> bool:
        """The run ends with every answer paid: no spread, and no reward was ever higher."""
        if not len(self.reward) or self.fallen is not None:
            return False
        end, best = level(self.reward, "last"), float(self.reward.values.max())
        if end <= 0 or end < 0.97 * best:
            return False
        if self.has("solved_groups"):
            return self.end("solved_groups") >= 0.8
        if self.has("zero_variance_groups"):
            return self.end("zero_variance_groups") >= 0.95
        if self.has("reward_std"):
            return self.end("reward_std") <= 0.02 * abs(end)
        return abs(end - 1) < 0.03 and best <= 1 + 1e-6

    @cached_property
    def gap_is_healthy(self) -> str | None:
        """The signal that shows sampler and trainer to agree all along, or None."""
        for name, (look, *_) in GAP_LIMITS.items():
            series = self.get(name)
            if len(series) >= 3 and np.quantile(np.abs(series.values), 0.9) < look / 2:
                return name
        series = self.get("prob_correlation")
        if len(series) >= 3 and np.quantile(series.values, 0.1) > 0.99:
            return "prob_correlation"
        return None


def number(value: float) -> str:
    """Three significant digits, as a reader would write them."""
    return f"{value:.3g}"


def step_name(step: float) -> str:
    """ "step 12", without a needless .0."""
    return f"step {step:g}"
