"""Chapter 41, the silent collapse: a sampler that never receives one kind of tensor.

The sampler gets the trainer's weights after every step, except the value projections of its
attention (two tensors of 21, 1.7 % of the parameters): a loader that packs queries, keys and
values into one matrix and forgets a part does that. π_old is computed again by the trainer,
as frameworks do, so with one update a rollout the policy ratio is 1 and the loss 0 whatever the
sampler holds. 16 sorting problems a step, 8 completions each. `healthy` is the same run with
every tensor sent, `lr_zero` the faulty one at learning rate 0.

Predictions, written after exploring two seeds (one for the fixes) and before the repeated runs;
"end" is steps 51 to 70, and a signal "leaves the band" as in `first_alarms`:

1. `silent`: reward, which the sampler earns, ends less than 0.1 below that of `healthy`, and
   held-out accuracy of the trainer more than 0.1 below.
2. Loss, largest ratio and clip fraction leave the band in no seed, entropy, length and gradient
   norm in fewer than half of the seeds. KL to the reference leaves it in half of them or more.
3. The sampler-trainer gap leaves it in the first window in every seed, accuracy in at least
   seven of ten, 20 steps later or more.
4. With a floor of 0.01 nats, where real engines disagree by that much anyway, the gap still
   passes it by step 15 in every seed.
5. lr = 0: the gap does not grow. The control calls `silent` suspected in every seed and clears
   `healthy` in every seed.

`silent_fixes`, five seeds, paired with the first five of the above:

6. `clipped` (gradient norm at most 0.1) ends with an accuracy no better than `silent`.
7. `slower` (0.3 of the rate, 120 steps): accuracy ends (steps 101 to 120) below `slower_healthy`,
   and the gap grows from steps 21-40 to steps 101-120. The rate postpones.
8. `kl` (penalty 0.3) ends above `silent`, with less than half its gap: held near its start, the
   policy stays near the tensor that was not sent. What is left of the damage cannot be told from
   `kl_healthy` with five seeds.
9. `repaired` (all tensors sent from step 41): the gap is at rounding from step 42, and
   accuracy of steps 61 to 70 ends above `silent`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from ..training import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .experiment import Experiment
from .results import Results

RATE = 5e-4
UNSENT = ("v_proj",)
ALL_SENT = ("a separate sampler that skips no tensor",)
WINDOW = 5  # steps whose mean is one value of a signal


def _phase(
    until: int = 70,
    *,
    skip: tuple[str, ...] = UNSENT,
    rate: float = RATE,
    max_grad_norm: float = math.inf,
    kl_coef: float = 0.0,
) -> TrainerConfig:
    return TrainerConfig(
        steps=until,
        data=DataConfig(prompts=16, eval_every=WINDOW),
        policy=PolicyConfig(kl_coef=kl_coef),
        numerics=NumericsConfig(learning_rate=rate, max_grad_norm=max_grad_norm),
        system=SystemConfig(sync_skip=skip),
    )


SLOW = {"until": 120, "rate": 0.3 * RATE}

SILENT = Experiment(
    name="silent_collapse",
    prediction=__doc__,
    arms={
        "healthy": (_phase(skip=ALL_SENT),),
        "silent": (_phase(),),
        "lr_zero": (_phase(30, rate=0.0),),
    },
    log_every=1,
)

FIXES = Experiment(
    name="silent_fixes",
    prediction=__doc__,
    arms={
        "clipped": (_phase(max_grad_norm=0.1),),
        "slower": (_phase(**SLOW),),
        "slower_healthy": (_phase(**SLOW, skip=ALL_SENT),),
        "kl": (_phase(kl_coef=0.3),),
        "kl_healthy": (_phase(kl_coef=0.3, skip=ALL_SENT),),
        "repaired": (_phase(40), _phase(skip=ALL_SENT)),
    },
)

ALL = (SILENT, FIXES)


def windows(rows: Sequence[Mapping[str, float]], signal: str) -> dict[int, float]:
    """Means of a signal over windows of `WINDOW` steps, by the last step of each."""
    grouped: dict[int, list[float]] = {}
    for row in rows:
        if row["step"] and signal in row:
            grouped.setdefault(-(-row["step"] // WINDOW) * WINDOW, []).append(row[signal])
    return {step: fmean(values) for step, values in grouped.items()}


def first_alarms(
    results: Results, arm: str, signal: str, healthy: str = "healthy", sd: float = 3.0
) -> list[int | None]:
    """For each seed the step at which a signal leaves the band of the healthy runs, or None.

    The band is mean ± `sd` √(1 + 1/n) standard deviations of the n healthy runs in the same
    window, where one more healthy run would lie. The alarm is the end of the first of two
    windows in a row outside it. A healthy run is judged by the band of the others.
    """
    runs = {seed: windows(rows, signal) for seed, rows in results.runs[healthy].items()}
    alarms = []
    for seed, rows in results.runs[arm].items():
        others = [run for other, run in runs.items() if arm != healthy or other != seed]
        alarms.append(_first_outside(windows(rows, signal), others, sd))
    return alarms


def _first_outside(run: dict[int, float], others: list[dict[int, float]], sd: float) -> int | None:
    before = None
    for step, value in run.items():
        values = [other[step] for other in others]
        half = sd * math.sqrt(1 + 1 / len(values)) * stdev(values)
        outside = not abs(value - fmean(values)) <= half
        if outside and before is not None:
            return before
        before = step if outside else None
    return None
