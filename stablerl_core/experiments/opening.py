"""Chapter 00, a run that looks healthy: one rising reward, four explanations.

Predictions for `opening`, written after exploring two seeds and before the repeated runs:

1. `hole` pays for any marked answer. Reward ends above 0.8, responses nearly double, and held-out
   accuracy (strict) ends no higher than it began.
2. `story` is what a team does about it. From step 61 the learning rate is 0.3 of what it was:
   reward goes on rising, accuracy stays where it is. From step 91 the rate is restored and each
   rollout used for 16 updates: the numbers blow up. The largest policy ratio passes 10, the
   gradient norm triples, reward falls below its start.
3. `story_clip` adds gradient clipping in the last phase. It bounds the update and not the fault:
   reward and accuracy end no better than in `story`.
4. `repaired` replaces the verifier at step 61 by the strict one, the fix at the right layer:
   accuracy rises at once, responses shorten.
5. `strict` has the right verifier from the start: accuracy ends above 0.7.
6. `overused` (right verifier, four updates a rollout at the full rate): reward rises at first and
   falls; KL to the reference leaves that of `strict` first, the gradient norm shows nothing.
7. `stale` (right verifier; the sampler never receives new embeddings, and its log-probabilities
   are taken for those of the old policy): reward rises as in `strict` and then falls behind; the
   sampler-trainer gap is more than a thousand times the rounding of `strict` from the start.
"""

from __future__ import annotations

import math

from ..training import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .experiment import Experiment

RATE = 5e-4


def _phase(
    until: int = 120,
    *,
    verifier: str = "strict",
    rate: float = RATE,
    epochs: int = 1,
    minibatches: int = 1,
    max_grad_norm: float = math.inf,
    system: SystemConfig | None = None,
) -> TrainerConfig:
    """Settings in force up to a step: 16 prompts of 8 completions, a tenth of a second a step."""
    return TrainerConfig(
        steps=until,
        data=DataConfig(verifier=verifier, prompts=16, max_new_tokens=32),
        policy=PolicyConfig(epochs=epochs, minibatches=minibatches),
        numerics=NumericsConfig(learning_rate=rate, max_grad_norm=max_grad_norm),
        system=system or SystemConfig(),
    )


HOLE = _phase(60, verifier="any")
SLOWER = _phase(90, verifier="any", rate=0.3 * RATE)
REUSE = {"verifier": "any", "epochs": 4, "minibatches": 4}
NO_EMBEDDINGS = SystemConfig(sync_skip=("embed_tokens",), old_logp="sampler")

OPENING = Experiment(
    name="opening",
    prediction=__doc__,
    arms={
        "story": (HOLE, SLOWER, _phase(**REUSE)),
        "story_clip": (HOLE, SLOWER, _phase(**REUSE, max_grad_norm=1.0)),
        "hole": (_phase(verifier="any"),),
        "repaired": (HOLE, _phase()),
        "strict": (_phase(),),
        "overused": (_phase(epochs=4),),
        "stale": (_phase(system=NO_EMBEDDINGS),),
    },
)

LEARNS = Experiment(
    name="learns",
    prediction="""The default run: from the shipped base, held-out accuracy reaches 0.9 in every
seed, in under a minute on two cores.""",
    arms={"default": (TrainerConfig(steps=200),)},
)

ALL = (OPENING, LEARNS)
