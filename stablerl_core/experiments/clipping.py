"""Chapter 22, clipping and its relatives: ten objectives, one rollout used 1, 4 or 16 times.

All arms have the same learning rate, 5e-4, the same rollouts of 16 prompts × 8 completions, no
gradient clipping, and each objective its source's clips, aggregation and advantage scale.
`clipping_1` makes one update of each rollout, `clipping_4` four (four minibatches, one pass),
`clipping_16` sixteen (four minibatches, four passes). "Collapse" is held-out accuracy that ends
below where the run began (mean of the last two evaluations, start about 0.43).

Predictions, written after two objectives had been looked at with one seed and 16 updates, and
before the repeated runs:

1. One update: the clip never acts, so grpo, dapo, bapo, sapo and gspo differ by aggregation at
   most and end within 0.1 of each other. No arm collapses.
2. Four updates: every objective with a clip learns at least as fast per rollout as with one.
   reinforce, which has no ratio, is worse than grpo.
3. Sixteen updates: reinforce, grpo and dapo collapse in most seeds. gspo and gspo_token, whose
   clip removes most of the tokens' gradient, collapse least. cispo, which never removes a
   gradient, collapses at least as often as grpo. sapo lies between grpo and cispo.
4. With the dual clip grpo's largest ratios are smaller but it collapses as often: what the clip
   leaves open is not what ruins the run.
5. Gradient clipping at 1 does not save grpo; a third of the learning rate does.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..policy import OBJECTIVES
from ..training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Trainer,
    TrainerConfig,
    completion_logp,
)
from .experiment import Experiment

RATE = 5e-4
REUSE = {1: (1, 1), 4: (4, 1), 16: (4, 4)}  # updates a rollout: (minibatches, epochs)
STEPS = {1: 60, 4: 50, 16: 20}
EVAL_EVERY = {1: 15, 4: 10, 16: 5}


def arm(
    objective: str,
    updates: int,
    *,
    rate: float = RATE,
    max_grad_norm: float = math.inf,
    **options,
) -> tuple[TrainerConfig, ...]:
    """One objective with so many updates a rollout, everything else at its source's default."""
    minibatches, epochs = REUSE[updates]
    return (
        TrainerConfig(
            steps=STEPS[updates],
            data=DataConfig(prompts=16, eval_every=EVAL_EVERY[updates]),
            policy=PolicyConfig(
                objective=objective, minibatches=minibatches, epochs=epochs, options=options
            ),
            numerics=NumericsConfig(learning_rate=rate, max_grad_norm=max_grad_norm),
        ),
    )


def _every(updates: int) -> dict[str, tuple[TrainerConfig, ...]]:
    return {objective: arm(objective, updates) for objective in OBJECTIVES}


ALL = (
    Experiment("clipping_1", __doc__, _every(1)),
    Experiment("clipping_4", __doc__, _every(4)),
    Experiment(
        "clipping_16",
        __doc__,
        _every(16)
        | {
            "grpo_dual_clip": arm("grpo", 16, dual_clip=3.0),
            "grpo_clipped_gradient": arm("grpo", 16, max_grad_norm=1.0),
            "grpo_slower": arm("grpo", 16, rate=RATE / 3),
        },
    ),
)


def reuse_once(objective: str, updates: int, seed: int = 0) -> dict[str, Tensor]:
    """One rollout of the base model used for so many updates: its tokens before and after.

    Returns flat tensors over the counted tokens: `old_logp`, `logp`, `advantages`. The learning
    rate is in force from the first update.
    """
    (config,) = arm(objective, updates)
    numerics = replace(config.numerics, warmup=0)
    trainer = Trainer(replace(config, numerics=numerics, seed=seed))
    batch, _, advantages = trainer._collect(1)
    with torch.no_grad():
        before = completion_logp(trainer.model, batch)
    trainer._update(batch, advantages)
    with torch.no_grad():
        after = completion_logp(trainer.model, batch)
    wide = advantages[:, None].expand(batch.mask.shape)
    values = {"old_logp": before, "logp": after, "advantages": wide}
    return {name: tensor[batch.mask] for name, tensor in values.items()}
