"""Chapter 45, interrupted answers: whose tokens are these, and what does a push change?

`interruptions`: 40 steps of sorting, gradient norm at most 1. In the arms `part_…` a rollout gives
one update, new weights arrive every step and interrupt every completion after four tokens; 48
groups are on their way, and a step trains on those that are whole. Every token keeps the
log-probability of the version that drew it. What is done with it:

    part_trainer   nothing: ratios against the trainer's policy, as if it had drawn all tokens
    part_sampler   it is the denominator of the ratio
    part_tis       it gives the importance weight π_old/μ of each token, truncated at 2
    part_first     as part_tis, but with the log-probabilities of the oldest version, as if that
                   had drawn the whole completion: one version tag instead of one a token
    part_opsm      it goes into the off-policy sequence mask, δ = 0.1
    part_drop      as part_sampler, without completions whose oldest token is over 2 versions old

`reset_N` are the arms `sampler_4`, `sampler_16` and `once_1` of `staleness`, with the moments of
the optimizer forgotten after each push (every 4, 16 or 1 steps).

`version_tags`: two policies `step` training steps apart; the older draws four tokens, the newer
one the rest. What the completions say of the newer one's pass rate with weights from the version
of each token (`each`), of the first, or of the last, beside the pass rate itself (`true`); and the
mean weight, which is 1 if the weights are right.

Predictions, written after one seed of 24 steps of part_trainer and part_sampler and before the
repeated runs. Final accuracy is the mean of steps 30 and 40:

1. part_trainer collapses (ends below its start) in most seeds, although its tokens are at most a
   few versions old; part_sampler ends above it (paired interval above 0).
2. part_opsm does not collapse, and ends within 0.1 of part_sampler.
3. part_tis ends above part_trainer. part_first ends below part_tis: a wrong tag is worse than it
   looks, since it doubts the very tokens that are on-policy.
4. part_drop drops longer completions than it keeps, and ends within 0.1 of part_sampler.
5. reset_4 and reset_16 end within 0.1 of sampler_4 and sampler_16; reset_1, where every update is
   a first one, ends at least 0.1 below once_1.
6. version_tags: with `each` the mean weight is 1 and the estimate that of `true`, within their
   intervals, at every distance. With `first` the mean weight is above 1 and the effective sample
   size (`ess`, share) below that of `each`. With `last`, no weights, the estimate differs from
   `true` by nothing that five seeds can show: a pass rate is not where a wrong tag is seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..rewards import Problem
from ..system import fresh_sequences, reset_optimizer_state, staleness_report
from ..training import Rollout, Trainer, TrainerConfig, completion_logp
from ..training.partial import InFlight
from ..training.rollout import select_rows
from .measured import Measured
from .off_policy import stale

PIECE, ON_THEIR_WAY = 4, 48  # tokens until the next push, groups


LATER = """
`random_drop`, added when part_drop had collapsed, has one arm, part_thin: as part_drop, but each
batch loses as many completions as the tag would drop, chosen at random. Predicted before it ran:

7. part_thin collapses in at most one seed and ends above part_drop (paired interval above 0): what
   ruins part_drop is whom it drops, not how many. Its answers do not grow.
"""


class Interrupted(Trainer):
    """A trainer with one more rule for interrupted completions or for pushes.

    tag: `token`, the log-probabilities of the version that drew each token; `first`, those of
    the oldest version of the completion for all its tokens. max_age: τ of `fresh_sequences`;
    what is older keeps its place in its group and gets no advantage. at_random: as many get none,
    whoever they are. reset: forget the optimizer's moments after every push. `ages` is the
    staleness of the last step's batch.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        tag: Literal["token", "first"] = "token",
        max_age: int | None = None,
        at_random: bool = False,
        reset: bool = False,
    ):
        self.tag, self.max_age, self.at_random, self.reset = tag, max_age, at_random, reset
        self.past: dict[int, PreTrainedModel] = {}
        self.ages: dict[str, float] = {}
        super().__init__(config)

    def _sync(self, n):
        super()._sync(n)
        if self.sampler_version != n:
            return
        if self.tag == "first":
            self.past[n] = deepcopy(self.sampler)
            # Each step a completion grows by a piece, so it is done before this many pushes.
            pieces = self.config.data.max_new_tokens // self.config.system.partial_tokens
            self.past.pop(n - pieces - 1, None)
        if self.reset:
            reset_optimizer_state(self._optimizer)

    def _collect(self, n):
        batch, row, advantages = super()._collect(n)
        if batch.versions is None:
            return batch, row, advantages
        report = staleness_report(batch.versions, batch.mask, self.version)
        self.ages = {"oldest": report.oldest, "mixed": report.mixed}
        if self.tag == "first":
            batch = replace(batch, sampler_logp=as_if_first(self.past, batch))
        if self.max_age is not None:
            fresh = fresh_sequences(batch.versions, batch.mask, self.version, self.max_age)
            if self.at_random:
                fresh = fresh[torch.randperm(len(fresh), generator=self._generator(n, 7))]
            self.ages |= _dropped(batch, fresh)
            advantages = advantages * fresh
        return batch, row, advantages


def _dropped(batch: Rollout, fresh: Tensor) -> dict[str, float]:
    length, found = batch.mask.sum(1).float(), {"dropped": float((~fresh).float().mean())}
    for name, rows in (("length_kept", fresh), ("length_dropped", ~fresh)):
        if rows.any():
            found[name] = float(length[rows].mean())
    return found


@torch.no_grad()
def as_if_first(policies: dict[int, PreTrainedModel], batch: Rollout) -> Tensor:
    """log π (B, T) of each completion under the oldest version that drew any of its tokens."""
    logp, first = torch.zeros_like(batch.sampler_logp), batch.versions[:, 0]
    for version in first.unique().tolist():
        rows = (first == version).nonzero()[:, 0]
        piece = select_rows(batch, rows)
        logp[rows, : piece.mask.shape[1]] = completion_logp(policies[version], piece)
    return logp


def interrupted_run(seed: int, configs: tuple[TrainerConfig], **options) -> list[dict]:
    """Rows of a run of `Interrupted`: those of its log, every fifth, with its ages."""
    trainer, rows = Interrupted(replace(configs[0], seed=seed), **options), []
    rows.append(dict(trainer.log.rows[0]))
    while trainer.version < configs[0].steps:
        row = trainer.step() | trainer.ages
        if row["step"] % 5 == 0 or row["step"] == 1:
            rows.append(row)
    return rows


def in_pieces(**system) -> tuple[TrainerConfig]:
    """A run whose completions are interrupted; `system` as in its group."""
    (config,) = stale(1, updates=1, partial_tokens=PIECE, **system)
    return (replace(config, data=replace(config.data, prompts=ON_THEIR_WAY)),)


def batch_in_pieces(seed: int, step: int = 8, prompts: int = 48) -> tuple[Rollout, int]:
    """What step `step` of `part_sampler` would train on, and the version it would train."""
    (config,) = in_pieces(old_logp="sampler")
    data = replace(config.data, prompts=prompts, eval_prompts=1)
    trainer = Trainer(replace(config, seed=seed, data=data))
    trainer.run(step - 1, progress=False)
    return trainer._collect(step)[0], trainer.version


def interrupted_rollout(
    trainer: Trainer, policies: Sequence[PreTrainedModel], problems: list[Problem], number: int
) -> Rollout:
    """Groups of completions: each policy draws `PIECE` tokens of every one, the last the rest."""
    data, generator = trainer.config.data, trainer._generator(number, 0)
    origins = [(number, len(problems), i) for i in range(len(problems))]
    device = trainer.model.device
    flight = InFlight.begin(problems, origins, data.group_size, data.max_new_tokens, device)
    rest = data.max_new_tokens - PIECE * (len(policies) - 1)
    for version, policy in enumerate(policies):
        tokens = rest if version == len(policies) - 1 else PIECE
        flight.grow(policy, trainer.tokenizer, tokens, generator, 1.0, version)
    return flight.rollout(trainer.tokenizer, 1.0)


def estimates_by_tag(
    seed: int, apart: Sequence[int] = (1, 2, 4, 8), prompts: int = 128
) -> list[dict]:
    """A row a distance between the two policies; see the prediction."""
    (config,) = stale(1)
    trainer = Trainer(replace(config, seed=seed))
    past = [deepcopy(trainer.model)]
    for _ in range(2 * max(apart)):
        trainer.step()
        past.append(deepcopy(trainer.model))
    rows = []
    for steps in apart:
        rows.append({"step": steps} | _estimates(trainer, past[-1 - steps], prompts, 10_000))
    return rows


@torch.no_grad()
def _estimates(trainer: Trainer, older: PreTrainedModel, prompts: int, number: int) -> dict:
    """Pass rate of the trainer's policy by interrupted completions and by its own."""
    problems = trainer._draw(number, prompts)
    batch = interrupted_rollout(trainer, (older, trainer.model), problems, number)
    asked = [p for p in problems for _ in range(trainer.config.data.group_size)]
    rewards = trainer._judge(batch, asked)
    logp = completion_logp(trainer.model, batch)
    tags = {
        "each": batch.sampler_logp,
        "first": as_if_first({0: older}, batch),
        "last": logp,
    }
    size, sampling = trainer.config.data.group_size, trainer._sampling(trainer.config.policy)
    own = trainer._sample(trainer.model, problems, number + 1, 0, size, sampling)
    row = {"true": float(trainer._judge(own, asked).mean())}
    for name, drawn in tags.items():
        weight = ((logp - drawn) * batch.mask).sum(1).double().exp()
        row[f"weight_{name}"] = float(weight.mean())
        row[f"pass_{name}"] = float((weight * rewards).mean())
        row[f"ess_{name}"] = float(weight.mean() ** 2 / (weight**2).mean())
    return row


INTERRUPTIONS = Measured(
    name="interruptions",
    prediction=__doc__,
    arms={
        "part_trainer": partial(interrupted_run, configs=in_pieces()),
        "part_sampler": partial(interrupted_run, configs=in_pieces(old_logp="sampler")),
        "part_tis": partial(interrupted_run, configs=in_pieces(correction="tis")),
        "part_first": partial(interrupted_run, configs=in_pieces(correction="tis"), tag="first"),
        "part_opsm": partial(interrupted_run, configs=in_pieces(off_policy_threshold=0.1)),
        "part_drop": partial(interrupted_run, configs=in_pieces(old_logp="sampler"), max_age=2),
        "reset_1": partial(interrupted_run, configs=stale(1, updates=1), reset=True),
        "reset_4": partial(interrupted_run, configs=stale(4, old_logp="sampler"), reset=True),
        "reset_16": partial(interrupted_run, configs=stale(16, old_logp="sampler"), reset=True),
    },
)

RANDOM_DROP = Measured(
    name="random_drop",
    prediction=__doc__ + LATER,
    arms={
        "part_thin": partial(
            interrupted_run, configs=in_pieces(old_logp="sampler"), max_age=2, at_random=True
        )
    },
)

VERSION_TAGS = Measured(
    name="version_tags", prediction=__doc__, arms={"interrupted_once": estimates_by_tag}
)

ALL = (INTERRUPTIONS, RANDOM_DROP, VERSION_TAGS)
