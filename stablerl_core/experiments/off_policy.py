"""Chapter 45, old data: what staleness does to a run, and what leaving old mistakes out does.

All training arms: 40 steps of sorting, 16 prompts × 8 completions, gradient norm at most 1, four
updates a rollout (four minibatches, one pass). The sampler gets the trainer's weights every 1, 4,
8 or 16 steps, so that its weights are 0 to 15 steps old. Final accuracy is held-out, the mean of
steps 30 and 40; a run has collapsed if that is below where the run began.

`staleness`: `trainer_N`, `sampler_N` say every how many steps weights are sent, and whose
log-probabilities are the denominator of the policy ratio. `once_N` makes one update a rollout.
With N = 16: `slow` and `slower` have a third and a tenth of the learning rate. `tis` multiplies
by the importance weight π_old/μ of each token, truncated at 2. These have the trainer's.

`opsm`: `DELTA_N` are the arms `trainer_N` with the off-policy sequence mask at that δ. `pos_N`
drops every completion with a negative advantage, however far it is. `sampler_DELTA` has
N = 16 and the sampler's log-probabilities in the ratio, as DeepSeek-V3.2 writes its objective.

Predictions, written after one seed of most arms and before the repeated runs:

staleness
1. The older the data, the lower the final accuracy: trainer_1 > trainer_4 > trainer_8 >
   trainer_16, which ends below 0.2 and collapses in all seeds.
2. sampler_16 ends above trainer_16 (paired interval above 0), and no higher than its start.
3. One update a rollout does not make old data harmless: once_16 collapses in most seeds, and
   once_1 ends highest of all arms.
4. A third of the learning rate does not save the run (slow_16 collapses in most seeds). A tenth
   does, and learns nothing: slower_16 ends within 0.1 of its start.
5. tis_16 collapses in most seeds: at this age the weights have an effective sample size below
   0.6. tis_4 ends above trainer_4.
6. In steps 9-16, before the first new weights arrive, the training reward of trainer_16 is within
   0.05 of that of steps 1-8, while its held-out accuracy at step 10 is at least 0.1 below its
   start: the reward is that of the old policy.

opsm
7. With N = 16 every δ up to 0.1 ends above trainer_16 by at least 0.3, and these end within 0.1 of
   each other: the values in use are one algorithm here, since old mistakes are far off.
8. δ = 0.5 ends below δ = 0.0001 and above trainer_16.
9. pos_16 ends within 0.1 of 0.0001_16: at this age the mask drops nearly all mistakes, and what
   helps is not to learn from them.
10. With fresh data (N = 1) 0.0001 drops fewer than half of what it drops with N = 16, and does
    not end below trainer_1.
11. pos_N has a lower entropy than 0.0001_N in steps 21-40, for N = 1 and N = 16.
12. sampler_0.1 ends above sampler_16, and not above 0.1_16.
"""

from __future__ import annotations

from ..training import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .experiment import Experiment

RATE, STEPS = 5e-4, 40
AGES = (1, 4, 8, 16)  # weights are sent every so many steps
DELTAS = (1e-4, 0.01, 0.1, 0.5)
ALL_MISTAKES = -100.0  # a δ below any mean log-ratio: every negative completion is dropped


def stale(
    sync_every: int, *, updates: int = 4, rate: float = RATE, **system
) -> tuple[TrainerConfig]:
    """A run whose sampler gets new weights every `sync_every` steps; `system` as in its group."""
    return (
        TrainerConfig(
            steps=STEPS,
            data=DataConfig(prompts=16),
            policy=PolicyConfig(minibatches=updates),
            numerics=NumericsConfig(learning_rate=rate),
            system=SystemConfig(sync_every=sync_every, **system),
        ),
    )


STALENESS = Experiment(
    name="staleness",
    prediction=__doc__,
    arms={f"trainer_{n}": stale(n) for n in AGES}
    | {f"sampler_{n}": stale(n, old_logp="sampler") for n in AGES[1:]}
    | {f"once_{n}": stale(n, updates=1) for n in (1, 16)}
    | {"slow_16": stale(16, rate=RATE / 3), "slower_16": stale(16, rate=RATE / 10)}
    | {f"tis_{n}": stale(n, correction="tis") for n in (4, 16)},
)


def masked(n: int, delta: float, **system) -> tuple[TrainerConfig]:
    """`stale` with the off-policy sequence mask."""
    return stale(n, off_policy_threshold=delta, **system)


OPSM = Experiment(
    name="opsm",
    prediction=__doc__,
    arms={f"{d:g}_1": masked(1, d) for d in (1e-4, 0.1)}
    | {f"{d:g}_{n}": masked(n, d) for n in (4, 16) for d in DELTAS}
    | {f"pos_{n}": masked(n, ALL_MISTAKES) for n in (1, 4, 16)}
    | {f"sampler_{d:g}": masked(16, d, old_logp="sampler") for d in (1e-4, 0.1)},
)

ALL = (STALENESS, OPSM)
