"""Three queues, sampling → reward → training, as a discrete-event model: speed against age.

A model of time, not of learning: completions have lengths, weights have versions, nothing is
computed. Needs `simpy` (extra `queues`) when a simulation starts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

from .staleness import Admission, may_admit, too_old

Lengths = Callable[[random.Random], int]
PUSHES = ("interrupt", "finish")
ORDERS = ("admitted", "finished", "oldest")
COUNTS = ("admitted", "finished")


@dataclass(frozen=True)
class LengthTail:
    """Tokens of a completion: lognormal, so that `sigma` makes the tail and leaves the mean.

        T = mean · exp(sigma·z − sigma²/2),  z ~ N(0, 1), rounded, at least 1, at most `limit`

    sigma 0: all alike; 1: one in a hundred has 6 times the mean. A limit lowers the mean.
    For measured lengths use `lambda generator: generator.choice(lengths)`.
    """

    mean: float
    sigma: float = 0.0
    limit: int | None = None

    def __post_init__(self):
        if not (self.mean >= 1 and self.sigma >= 0 and (self.limit is None or self.limit >= 1)):
            raise ValueError(
                f"mean={self.mean}, sigma={self.sigma}, limit={self.limit}: expected mean ≥ 1 "
                "token, sigma ≥ 0, limit ≥ 1 or None"
            )

    def __call__(self, generator: random.Random) -> int:
        z = generator.gauss(0, 1)
        drawn = round(self.mean * math.exp(self.sigma * z - self.sigma**2 / 2))
        return max(1, min(drawn, self.limit or drawn))


@dataclass(frozen=True)
class QueueRates:
    """How fast each stage is; all times in seconds.

    workers: completions that are sampled side by side, each at `seconds_per_token`, however many
    run (a real engine slows down in a larger batch: measure at the size you mean).
    reward_workers, reward_seconds: rewards and reference log-probabilities, time a completion.
    train_seconds: one update on one batch. jitter: its standard deviation as a share of itself
    (gamma; the mean stays). push_seconds: from a finished update to its weights in the sampler;
    the trainer waits, and nothing starts with them before. reread_seconds_per_token: what an
    interrupted completion pays for each token so far, because its cache is of the old weights.
    Raises `ValueError` for a count below 1 or a time that is negative or not finite.
    """

    workers: int
    seconds_per_token: float
    train_seconds: float
    reward_workers: int = 1
    reward_seconds: float = 0.0
    push_seconds: float = 0.0
    reread_seconds_per_token: float = 0.0
    jitter: float = 0.0

    def __post_init__(self):
        for f in fields(self):
            value, least = getattr(self, f.name), int(f.name.endswith("workers"))
            if not least <= value < math.inf:
                raise ValueError(f"{f.name}={value}: must be ≥ {least} and finite")
        if self.seconds_per_token == 0 or self.train_seconds == 0:
            raise ValueError("seconds_per_token and train_seconds must be above 0")

    @classmethod
    def measured(
        cls,
        completions: int,
        longest: Sequence[float],
        rollout_seconds: Sequence[float],
        reward_seconds: Sequence[float],
        train_seconds: Sequence[float],
    ) -> QueueRates:
        """Rates of a synchronous run, from what it took in each step.

        completions: a step, all sampled side by side, so that a rollout lasts as long as its
        longest one: `longest`, tokens. The four lists have one entry a step; leave out the first
        steps, which warm up. Raises `ValueError` if their lengths differ or they are empty.
        """
        steps = len(longest)
        if not steps or {len(rollout_seconds), len(reward_seconds), len(train_seconds)} != {steps}:
            raise ValueError(
                f"longest, rollout_seconds, reward_seconds, train_seconds have {steps}, "
                f"{len(rollout_seconds)}, {len(reward_seconds)}, {len(train_seconds)} entries, "
                "expected one for each step"
            )
        mean = sum(train_seconds) / steps
        return cls(
            workers=completions,
            seconds_per_token=sum(rollout_seconds) / sum(longest),
            train_seconds=mean,
            reward_seconds=sum(reward_seconds) / steps / completions,
            jitter=math.sqrt(sum((s - mean) ** 2 for s in train_seconds) / steps) / mean,
        )


@dataclass(frozen=True)
class QueueRules:
    """Who may start, who is trained next, and what happens to the rest.

    batch_size: B completions an update. max_staleness: AReaL's η, see `may_admit`; 0 is the
    synchronous loop, None admits without end. push: what new weights do to running completions:
    `interrupt` (AReaL: the rest is sampled by the new weights) or `finish` (DORA: each is
    finished by the version that started it, several versions are served at once).
    order: in which batches are filled. `admitted` waits for the oldest, `finished` takes who comes
    first, `oldest` takes the oldest of those that are ready. Only with `admitted` is η a cap on
    the age of each completion. max_age: GLM-5's τ; what is older when its turn comes is dropped.
    queue_limit: places in each queue; a full one makes the stage before it wait (back-pressure).
    count: what N_r counts; `finished` is the common error. Raises `ValueError` for bad values.
    Sources: arXiv 2505.24298, 2509.18883 (DORA), 2602.15763 (GLM-5).
    """

    batch_size: int
    max_staleness: int | None = None
    push: str = "interrupt"
    order: str = "admitted"
    max_age: int | None = None
    queue_limit: int | None = None
    count: str = "admitted"

    def __post_init__(self):
        may_admit(1, self.batch_size, 0, self.max_staleness)
        too_old(0, 0, self.max_age)
        if self.queue_limit is not None and self.queue_limit < 1:
            raise ValueError(f"queue_limit={self.queue_limit}: must be ≥ 1, or None for no limit")
        for name, known in (("push", PUSHES), ("order", ORDERS), ("count", COUNTS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {known}")


@dataclass
class Completion:
    """One completion on its way: times in seconds (None = not yet), versions with their tokens.

    number: from 1, in the order of admission. versions: [w, tokens] in their order. progress:
    tokens sampled so far. trained_version: weights that its batch updated. batch: from 0.
    """

    number: int
    length: int
    begun: float
    progress: float = 0.0
    flows_from: float = 0.0
    versions: list[list[int]] = field(default_factory=list)
    sampled: float | None = None
    scored: float | None = None
    trained: float | None = None
    dropped: float | None = None
    batch: int | None = None
    trained_version: int | None = None

    @property
    def state(self) -> str:
        """`trained`, `dropped`, `waiting` (for a batch), `scoring` or `sampling`."""
        names = {"trained": "trained", "dropped": "dropped", "scored": "waiting"}
        names["sampled"] = "scoring"
        return next((s for f, s in names.items() if getattr(self, f) is not None), "sampling")

    @property
    def staleness(self) -> int:
        """Age of its oldest token when it was trained, in versions."""
        return self.trained_version - self.versions[0][0]

    def advance(self, now: float, pace: float) -> None:
        """Credit the tokens since `flows_from` to the last version."""
        before = math.floor(self.progress + _TINY)
        self.progress = min(self.length, self.progress + max(0.0, now - self.flows_from) / pace)
        if self.length - self.progress < _TINY:
            self.progress = self.length
        self.flows_from = max(now, self.flows_from)
        self.versions[-1][1] += math.floor(self.progress + _TINY) - before

    def continues(self, version: int, at: float) -> None:
        """From time `at` on the tokens are those of `version`."""
        if self.versions and self.versions[-1][1] == 0:
            self.versions.pop()
        self.versions.append([version, 0])
        self.flows_from = at


_TINY = 1e-6  # of a token: sums of times do not hit whole tokens exactly


@dataclass(frozen=True)
class TrainedBatch:
    """One update: when it began and ended, its tokens, and who still waited as it began."""

    began: float
    ended: float
    tokens: int
    to_score: int
    ready: int


@dataclass(frozen=True)
class QueueRun:
    """What happened: every completion that was admitted, every update, and the summaries.

    seconds: until the last update ended. live_versions: most versions that were sampling at once.
    stuck: nothing could happen any more before all updates were done (a deadlock of the rules).
    `skip` leaves out the first updates, in which the queues fill.
    """

    rates: QueueRates
    completions: tuple[Completion, ...]
    batches: tuple[TrainedBatch, ...]
    seconds: float
    live_versions: int
    stuck: bool

    def trained(self, skip: int = 0) -> list[Completion]:
        """Completions of the updates from `skip` on, in the order of admission."""
        return [c for c in self.completions if c.batch is not None and c.batch >= skip]

    def throughput(self, skip: int = 0) -> float:
        """Trained tokens a second; 0 if there was no update."""
        counted = self.batches[skip:]
        start = self.batches[skip - 1].ended if skip else 0.0
        return sum(b.tokens for b in counted) / (counted[-1].ended - start) if counted else 0.0

    def staleness(self, skip: int = 0) -> list[int]:
        """Age of each trained completion's oldest token, in versions."""
        return [c.staleness for c in self.trained(skip)]

    def token_staleness(self, skip: int = 0) -> float:
        """Mean age of a trained token; below that of the oldest if pushes interrupt."""
        parts = [(c.trained_version - w, n) for c in self.trained(skip) for w, n in c.versions]
        return sum(age * n for age, n in parts) / max(1, sum(n for _, n in parts))

    def use(self) -> dict[str, float]:
        """Share of the time in which each stage did its work: sampling, reward, training."""
        rates, all_of_it = self.rates, max(self.seconds, 1e-300)
        tokens = sum(c.progress for c in self.completions)
        scored = sum(c.scored is not None for c in self.completions)
        return {
            "sampling": tokens * rates.seconds_per_token / rates.workers / all_of_it,
            "reward": scored * rates.reward_seconds / rates.reward_workers / all_of_it,
            "training": sum(b.ended - b.began for b in self.batches) / all_of_it,
        }

    def length_bias(self, updates: int = 1) -> float:
        """Mean length in the first updates over the mean length of all that were admitted.

        Below 1: who answers short is trained first. NaN if there was no update.
        """
        first = [c.length for c in self.completions if c.batch is not None and c.batch < updates]
        everyone = [c.length for c in self.completions]
        return _mean(first) / _mean(everyone)

    def staleness_by_length(self, skip: int = 0) -> tuple[float, float]:
        """Mean staleness of the shortest and of the longest quarter of what was trained."""
        ranked = [c.staleness for c in sorted(self.trained(skip), key=lambda c: c.length)]
        quarter = len(ranked) // 4
        return _mean(ranked[:quarter]), _mean(ranked[len(ranked) - quarter :])

    def dropped(self) -> tuple[int, int]:
        """Completions and tokens that were sampled, scored and thrown away."""
        gone = [c.length for c in self.completions if c.dropped is not None]
        return len(gone), sum(gone)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def simulate_queues(
    rates: QueueRates,
    rules: QueueRules,
    lengths: Lengths,
    updates: int,
    generator: random.Random,
) -> QueueRun:
    """Run the three queues until so many updates are done.

    lengths: draws the tokens of a completion, see `LengthTail`; they are drawn in the order of
    admission, so that the n-th completion is the same under all rates and rules. generator: makes
    all that is random. A batch that begins after i updates is trained at version i.
    Raises `ValueError` for updates below 1, `ModuleNotFoundError` without simpy.
    """
    if updates < 1:
        raise ValueError(f"updates={updates}: must be ≥ 1")
    model = _Model(rates, rules, lengths, generator)
    trainer = model.start(updates)
    while trainer.is_alive and model.env.peek() < math.inf:
        model.env.step()
    for job in model.running.values():
        job.advance(model.env.now, rates.seconds_per_token)
    return QueueRun(
        rates=rates,
        completions=tuple(model.jobs),
        batches=tuple(model.batches),
        seconds=model.env.now,
        live_versions=model.live_versions,
        stuck=trainer.is_alive,
    )


class _Model:
    """The processes: workers sample, scorers score, one trainer fills batches and pushes."""

    def __init__(self, rates, rules, lengths, generator):
        import simpy

        self.rates, self.rules, self.lengths = rates, rules, lengths
        self.draw, self.shake = (random.Random(generator.getrandbits(64)) for _ in range(2))
        self.env, self.item = simpy.Environment(), simpy.PriorityItem
        self.interrupt = simpy.Interrupt
        places = rules.queue_limit or math.inf
        self.to_score = simpy.Store(self.env, places)
        self.ready = simpy.PriorityStore(self.env, places)
        self.opened, self.arrived = self.env.event(), self.env.event()
        self.admission = Admission(rules.batch_size, rules.max_staleness)
        self.jobs: list[Completion] = []
        self.batches: list[TrainedBatch] = []
        self.running: dict[object, Completion] = {}
        self.version = self.taken = self.done = self.scored = self.live_versions = 0
        self.pushed_at = 0.0

    def start(self, updates: int):
        """Start all processes and return the trainer's."""
        for _ in range(self.rates.workers):
            self.env.process(self._worker())
        for _ in range(self.rates.reward_workers):
            self.env.process(self._scorer())
        return self.env.process(self._trainer(updates))

    def _signal(self, name: str) -> None:
        event = getattr(self, name)
        setattr(self, name, self.env.event())
        event.succeed()

    def _worker(self):
        while True:
            while not self._admit():
                yield self.opened
            job = Completion(len(self.jobs) + 1, self.lengths(self.draw), self.env.now)
            self.jobs.append(job)
            yield from self._sample(job)
            yield self.to_score.put(job)

    def _admit(self) -> bool:
        if self.rules.count == "finished":
            rules = self.rules
            return may_admit(self.done + 1, rules.batch_size, self.version, rules.max_staleness)
        return self.admission.admit(self.version)

    def _sample(self, job: Completion):
        """All tokens of one completion, across the pushes that interrupt it."""
        env, pace = self.env, self.rates.seconds_per_token
        me = env.active_process
        self.running[me] = job
        while job.progress < job.length:
            reread = math.floor(job.progress + _TINY) * self.rates.reread_seconds_per_token
            job.continues(self.version, max(env.now, self.pushed_at) + reread)
            self._count_versions()
            try:
                end = job.flows_from + (job.length - job.progress) * pace
                yield env.timeout(end - env.now)
                job.advance(math.inf, pace)
            except self.interrupt:
                job.advance(env.now, pace)
        del self.running[me]
        job.sampled, self.done = env.now, self.done + 1

    def _count_versions(self) -> None:
        live = {job.versions[-1][0] for job in self.running.values()}
        served = 1 if self.rules.push == "interrupt" else len(live)
        self.live_versions = max(self.live_versions, served)

    def _scorer(self):
        while True:
            job = yield self.to_score.get()
            yield self.env.timeout(self.rates.reward_seconds)
            job.scored, self.scored = self.env.now, self.scored + 1
            place = {"admitted": (job.number,), "finished": (self.scored,)}
            place["oldest"] = (job.versions[0][0], self.scored)
            yield self.ready.put(self.item(place[self.rules.order], job))
            self._signal("arrived")

    def _next(self):
        """The next completion of the order; in that of admission nobody overtakes."""
        if self.rules.order == "admitted":
            while not self.ready.items or self.ready.items[0].priority != (self.taken + 1,):
                yield self.arrived
        item = yield self.ready.get()
        self.taken += 1
        return item.item

    def _batch(self):
        """Completions for one update; those that are too old make room for others."""
        batch: list[Completion] = []
        while len(batch) < self.rules.batch_size:
            job = yield from self._next()
            if too_old(job.versions[0][0], self.version, self.rules.max_age):
                job.dropped = self.env.now
                self._give_back()
            else:
                batch.append(job)
        return batch

    def _give_back(self) -> None:
        if self.rules.count == "finished":
            self.done -= 1
        else:
            self.admission.release()
        self._signal("opened")

    def _trainer(self, updates: int):
        for step in range(updates):
            batch = yield from self._batch()
            began, waiting = self.env.now, (_queued(self.to_score), _queued(self.ready))
            for job in batch:
                job.trained, job.batch, job.trained_version = began, step, self.version
            yield self.env.timeout(self.rates.train_seconds * self._shaken())
            tokens = sum(job.length for job in batch)
            self.batches.append(TrainedBatch(began, self.env.now, tokens, *waiting))
            if step + 1 < updates:
                yield from self._push()

    def _push(self):
        self.version += 1
        self.pushed_at = self.env.now + self.rates.push_seconds
        if self.rules.push == "interrupt":
            for process in self.running:
                process.interrupt()
        self._signal("opened")
        yield self.env.timeout(self.rates.push_seconds)

    def _shaken(self) -> float:
        if self.rates.jitter == 0:
            return 1.0
        spread = self.rates.jitter**2
        return self.shake.gammavariate(1 / spread, spread)


def _queued(store) -> int:
    return len(store.items) + len(store.put_queue)
