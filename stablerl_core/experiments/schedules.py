"""Chapter 24, schedules: what may change while training goes on, against the same thing constant.

`schedules`: 40 steps of sorting, 16 prompts × 8 completions, four updates a rollout (four
minibatches, one pass), gradient norm at most 1. The KL penalty is the unbiased one, in the loss.
Final accuracy is held-out, the mean of steps 30 and 40.

    none · weak · even · strong          β = 0 · 0.05 · 0.275 · 0.5 throughout
    falling · rising                     β from 0.5 to 0.05, and back: both have the mean of `even`
    adaptive                             β from 0.275, steered to a KL of 0.1 (gain 0.5)
    refreshed                            β = 0.5, the reference becomes the policy every 10 steps
    wide · steered                       no KL; ε_high 0.5 instead of 0.2; or from 0.2 steered to an
                                         entropy of 0.35 within [0.1, 0.5]

`group_sizes`: 40 steps of one update on 128 completions: always 4, 8 or 32 a prompt, `shrinking`
32 → 16 → 8 → 4 every ten steps, `growing` the other way; prompts are 128 / group size.

Predictions, written after one seed of `none`, `adaptive`, `steered` and `shrinking`, and before
the repeated runs:

1. `none` ends with the largest KL to the reference (mean of steps 21-40) and not above any arm
   with a KL penalty in final accuracy.
2. `strong` has the smallest KL, and at step 10 no higher accuracy than `weak`.
3. Timing does not matter here: the paired intervals of final accuracy, `falling` − `even` and
   `falling` − `rising`, both contain 0.
4. `adaptive` holds its KL (steps 21-40) between 0.07 and 0.15; its final accuracy − that of `even`
   has an interval that contains 0.
5. `refreshed` ends above `strong` in final accuracy: a leash that is moved along costs less.
6. `wide` has a higher entropy than `none` at steps 31-40. In final accuracy neither `wide` nor
   `steered` differs from `none` by anything five seeds can show.
7. Group sizes: the share of groups without signal over steps 1-10 is above 0.2 with groups of 4
   and below 0.05 with groups of 32. Final accuracy: `shrinking` − `eight` and `shrinking` −
   `growing` both have intervals that contain 0. `thirty_two` (4 prompts a step) ends lowest.
"""

from __future__ import annotations

from ..policy import AdaptiveClip, AdaptiveKL, Linear, Piecewise, Schedule
from ..training import DataConfig, PolicyConfig, TrainerConfig
from .experiment import Experiment

STEPS, COMPLETIONS = 40, 128
STRONG, EVEN, WEAK = 0.5, 0.275, 0.05


def _reused(
    kl_coef: float = 0.0, schedules: dict[str, Schedule] | None = None, **policy
) -> tuple[TrainerConfig]:
    """Four updates a rollout."""
    return (
        TrainerConfig(
            steps=STEPS,
            data=DataConfig(prompts=16),
            policy=PolicyConfig(minibatches=4, kl_coef=kl_coef, kl_estimator="unbiased", **policy),
            schedules=schedules or {},
        ),
    )


def _kl(schedule: Schedule) -> tuple[TrainerConfig]:
    return _reused(schedules={"policy.kl_coef": schedule})


def _groups(*sizes: int) -> tuple[TrainerConfig]:
    """One update on 128 completions a step; the group sizes take equal parts of the run."""
    starts = range(1, STEPS + 1, STEPS // len(sizes))
    groups, prompts = [], []
    for start, size in zip(starts, sizes, strict=True):
        groups.append((start, size))
        prompts.append((start, COMPLETIONS // size))
    schedules = {"data.group_size": Piecewise(groups), "data.prompts": Piecewise(prompts)}
    return (TrainerConfig(steps=STEPS, schedules=schedules),)


SCHEDULES = Experiment(
    name="schedules",
    prediction=__doc__,
    arms={
        "none": _reused(),
        "weak": _reused(WEAK),
        "even": _reused(EVEN),
        "strong": _reused(STRONG),
        "falling": _kl(Linear(STRONG, WEAK, STEPS)),
        "rising": _kl(Linear(WEAK, STRONG, STEPS)),
        "adaptive": _kl(AdaptiveKL(EVEN, target=0.1, gain=0.5)),
        "refreshed": _reused(STRONG, reference_every=10),
        "wide": _reused(clip_high=0.5),
        "steered": _reused(
            schedules={"policy.clip_high": AdaptiveClip(target=0.35, start=0.2, gain=0.2)}
        ),
    },
)

GROUP_SIZES = Experiment(
    name="group_sizes",
    prediction=__doc__,
    arms={
        "four": _groups(4),
        "eight": _groups(8),
        "thirty_two": _groups(32),
        "shrinking": _groups(32, 16, 8, 4),
        "growing": _groups(4, 8, 16, 32),
    },
)

ALL = (SCHEDULES, GROUP_SIZES)
