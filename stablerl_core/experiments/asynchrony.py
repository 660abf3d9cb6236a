"""Chapter 45, asynchrony: three queues on the rates of a measured run, speed against age.

`queue_rates` times the small run: what one step of 128 completions costs in sampling, judging and
training, one update a rollout. `queues` simulates, on the means of that file, three systems with
batches of 128 and 128 places to sample in: `small` has the run's own lengths; `long` has answers
100 times as long on average with a tail (lognormal, σ = 1), and the same cost a token; `balanced`
has as many places as keep up with training, and answers of one length. Speeds are trained tokens a
second, ages those of a completion's oldest token, both without the first 20 of 60 updates.

    SYSTEM_admitted, _finished, _oldest   order in which batches are filled; `step` is the cap η
    long_dora                             as long_admitted; whoever started an answer finishes it
    long_miscounted                       as long_admitted; the rule counts finished answers
    long_tag                              η = 4, as finished; `step` is τ of the version tag
    limit_admitted, limit_finished        long, η = 4; `step` is the limit of each queue
    backlog_still, _jitter, _cap, _limit  balanced; updates jitter by 100 % in the last three; no
                                          cap, or η = 4, or queues of at most 256; `step`: update

Predictions, written after one seed and before the repeated runs:

1. small: a cap of 1 trains at least 1.7 times what the synchronous loop (η = 0) does, and larger
   caps add less than 5 %: all they buy is age.
2. long, in order of admission: no completion is older than η. η = 0 has less than 0.3 of the speed
   of η = 16, η = 1 less than half, η = 8 at least 0.9.
3. long, as finished: η = 1 has at least 0.85 of the speed of η = 16. For η = 1 to 8 the mean age is
   within 0.1 of η, the oldest at least 4 above it, and the longest quarter of the answers at
   least 0.5 older than the shortest.
4. oldest first is as fast as as-finished (within 5 %) for η ≥ 1, and at η = 4 its oldest is older
   than η and younger than with as-finished.
5. DORA: the speed of long_admitted within 1 %, at most η + 1 live versions, and older tokens.
6. Counting finished answers makes the mean age η + 1 (within 0.1) for η = 0 to 8.
7. The tag with τ = 2 drops more than a quarter of the answers, which are at least 1.5 times as long
   as the mean; what is trained is below 0.7 of the mean. τ = 12 drops next to nothing.
8. limit_admitted gets stuck in every seed at every limit below 640 = (η + 1)·B, since all the
   others may wait for one; limit_finished never does.
9. backlog_jitter has over 3 batches waiting, and a completion 8 versions old, at some time in most
   seeds; backlog_still has at most 3 versions; backlog_cap never more than 4, backlog_limit 6.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from ..system import LengthTail, QueueRates, QueueRules, QueueRun, simulate_queues
from ..training import Trainer
from .measured import Measured
from .off_policy import stale
from .results import Results, load

WARM = 2  # first steps of a timed run, which are left out
CAPS = (0, 1, 2, 4, 8, 16)
LIMITS = (64, 128, 256, 512, 640)
FACTOR = 100  # how much longer the answers of `long` are
UPDATES, FULL = 60, 20  # of a simulation, and those in which its queues fill


class Timed(Trainer):
    """A trainer that notes what sampling, judging and training took in the last step.

    `spent` is in seconds of processor time, which other programs on the machine do not lengthen;
    `lengths` are the tokens of the step's completions.
    """

    def __init__(self, config):
        self.spent: dict[str, float] = {}
        self.lengths: list[int] = []
        super().__init__(config)

    def _clocked(self, name: str, work: Callable, *given):
        started = time.process_time()
        done = work(*given)
        self.spent[name] = time.process_time() - started
        return done

    def _roll(self, n):
        batch, problems = self._clocked("rollout", super()._roll, n)
        self.lengths = batch.mask.sum(1).tolist()
        return batch, problems

    def _judge(self, *given):
        return self._clocked("reward", super()._judge, *given)

    def _update(self, *given):
        return self._clocked("train", super()._update, *given)


def timed_steps(seed: int, steps: int = 12) -> list[dict]:
    """Rows of a run with fresh data and one update a rollout: seconds, and counts `tokens_L`."""
    (config,) = stale(1, updates=1)
    trainer, rows = Timed(replace(config, seed=seed, steps=steps)), []
    for step in range(1, steps + 1):
        trainer.step()
        counts = {f"tokens_{n}": trainer.lengths.count(n) for n in sorted(set(trainer.lengths))}
        longest = {"longest": max(trainer.lengths)}
        rows.append({"step": step} | trainer.spent | longest | counts)
    return rows


@dataclass(frozen=True)
class Setting:
    """A system to simulate: its rates, its lengths, and how many completions a batch has."""

    rates: QueueRates
    lengths: Callable[[random.Random], int]
    mean_length: float
    batch_size: int

    def run(self, seed: int, updates: int = UPDATES, **rules) -> QueueRun:
        """Simulate it under rules; `rules` as in `QueueRules`."""
        chosen = QueueRules(self.batch_size, **rules)
        return simulate_queues(self.rates, chosen, self.lengths, updates, random.Random(seed))


def measured_setting(results: Results) -> Setting:
    """The small run: every completion sampled side by side, at its own lengths.

    results: of `queue_rates`; all seeds together.
    """
    rows = [row for run in results.runs["once"].values() for row in run if row["step"] > WARM]
    counts: dict[int, int] = {}
    for row in rows:
        for name, count in row.items():
            if name.startswith("tokens_"):
                length = int(name.removeprefix("tokens_"))
                counts[length] = counts.get(length, 0) + round(count)
    drawn = sorted(counts)
    size = sum(counts.values()) // len(rows)
    names = ("longest", "rollout", "reward", "train")
    rates = QueueRates.measured(size, *([row[name] for row in rows] for name in names))

    def lengths(generator: random.Random) -> int:
        return generator.choices(drawn, [counts[n] for n in drawn])[0]

    mean = sum(n * c for n, c in counts.items()) / sum(counts.values())
    return Setting(rates, lengths, mean, size)


def long_setting(small: Setting, factor: int = FACTOR, tail: float = 1.0) -> Setting:
    """The same machines with answers `factor` times as long on average, and a long tail.

    A token costs what it cost, in sampling and in training; no answer is over 16 times the mean.
    """
    mean = small.mean_length * factor
    rates = replace(small.rates, train_seconds=small.rates.train_seconds * factor)
    return Setting(rates, LengthTail(mean, tail, round(16 * mean)), mean, small.batch_size)


def balanced_setting(small: Setting) -> Setting:
    """So many workers that sampling just keeps up with training, and answers of one length."""
    length = round(small.mean_length)
    rates, size = small.rates, small.batch_size
    workers = round(size * length * rates.seconds_per_token / rates.train_seconds)
    seconds = size * length / workers * rates.seconds_per_token
    rates = replace(rates, workers=workers, train_seconds=seconds)
    return Setting(rates, LengthTail(length), length, size)


def settings() -> dict[str, Setting]:
    """`small`, `long` and `balanced`, from `results/queue_rates.json`."""
    small = measured_setting(load("queue_rates"))
    return {"small": small, "long": long_setting(small), "balanced": balanced_setting(small)}


def summary(done: QueueRun, skip: int = FULL) -> dict[str, float]:
    """Numbers of a simulation that trained, without its first updates."""
    ages, (short, long) = done.staleness(skip), done.staleness_by_length(skip)
    trained, (number, tokens) = done.trained(skip), done.dropped()
    return {
        "speed": done.throughput(skip),
        "mean_age": sum(ages) / len(ages),
        "oldest": max(ages),
        "token_age": done.token_staleness(skip),
        "live_versions": done.live_versions,
        "age_short": short,
        "age_long": long,
        "length": sum(c.length for c in trained) / len(trained),
        "first_bias": done.length_bias(4),
        "dropped": number / (number + len(done.trained())),
        "dropped_length": tokens / number if number else 0.0,
        "sampler_busy": done.use()["sampling"],
        "trainer_busy": done.use()["training"],
    }


def against_cap(seed: int, setting: str, **rules) -> list[dict]:
    """A row a cap η, which is its `step`."""
    system = settings()[setting]
    return [{"step": cap} | summary(system.run(seed, max_staleness=cap, **rules)) for cap in CAPS]


def against_tag(seed: int, ages: tuple[int, ...] = (2, 4, 6, 8, 12)) -> list[dict]:
    """A row an age limit τ of the version tag: long answers, η = 4, batches as they finish."""
    system, rules = settings()["long"], {"max_staleness": 4, "order": "finished"}
    return [{"step": tau} | summary(system.run(seed, max_age=tau, **rules)) for tau in ages]


def against_limit(seed: int, order: str) -> list[dict]:
    """A row a limit of the queues (`step`, in completions): was it `stuck`, how many updates."""
    system, rows = settings()["long"], []
    for limit in LIMITS:
        done = system.run(seed, updates=30, order=order, max_staleness=4, queue_limit=limit)
        rows.append({"step": limit, "stuck": done.stuck, "updates": len(done.batches)})
    return rows


def backlog(seed: int, jitter: float, **rules) -> list[dict]:
    """A row every 25 updates: waiting completions, in batches, and the oldest age since."""
    system, every = settings()["balanced"], 25
    system = replace(system, rates=replace(system.rates, jitter=jitter))
    done = system.run(seed, updates=200, **rules)
    rows = []
    for first in range(0, 200, every):
        waiting = [b.ready + b.to_score for b in done.batches[first : first + every]]
        ages = [c.staleness for c in done.trained() if first <= c.batch < first + every]
        mean = sum(waiting) / every / system.batch_size
        rows.append({"step": first + every, "waiting": mean, "oldest": max(ages)})
    return rows


QUEUE_RATES = Measured(name="queue_rates", prediction=__doc__, arms={"once": timed_steps})

ORDERS = ("admitted", "finished", "oldest")
JITTERED = partial(backlog, jitter=1.0, order="finished")
QUEUES = Measured(
    name="queues",
    prediction=__doc__,
    arms={
        f"{system}_{order}": partial(against_cap, setting=system, order=order)
        for system in ("small", "long")
        for order in ORDERS
    }
    | {
        "long_dora": partial(against_cap, setting="long", push="finish"),
        "long_miscounted": partial(against_cap, setting="long", count="finished"),
        "long_tag": against_tag,
        "limit_admitted": partial(against_limit, order="admitted"),
        "limit_finished": partial(against_limit, order="finished"),
        "backlog_still": partial(backlog, jitter=0.0, order="finished"),
        "backlog_jitter": JITTERED,
        "backlog_cap": partial(JITTERED, max_staleness=4),
        "backlog_limit": partial(JITTERED, queue_limit=256),
    },
)

ALL = (QUEUE_RATES, QUEUES)
