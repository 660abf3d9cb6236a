"""Chapter 42, what corrections do to training: one injected mismatch, one real one, three reuses.

`noise_*`: the sampler has fresh N(0, 1.5²) on every logit, and the log-probabilities of what it
drew. `int4_*`: its weights have 4 bits. `exact`: trainer and sampler agree. `corrections_1` makes
one update of a rollout (rate 5e-4, 40 steps), `corrections_4` four (four minibatches; 2.5e-4, 30
steps), `corrections_8` eight (four minibatches, two passes; 2.5e-4, 20 steps); 16 sorting prompts
× 8 completions, GRPO, gradients clipped at 1.

`recompute`: π_old from the trainer and nothing else. `mu_as_old`: log μ stands for log π_old.
`unclipped`: the same without a clip. `slower`: the same at a third of the rate. `pruned`: tokens
below 5 % of the likeliest are not drawn, and trainer and sampler renormalise. `opsm`: δ = 0.05.
`geometric_rejection`: a band of 0.5 to 2, since verl's 1.001 would leave next to nothing. The
others as in `CORRECTIONS`. "Accuracy" is held-out accuracy, mean of the last two evaluations,
always of the trainer's own weights.

Predictions, written after a look at one seed of `exact`, `recompute`, `mu_as_old`, `tis`,
`sequence_tis` at each reuse, of `icepop_glm5`, `minimum_prefix`, `opsm` at four updates, and of
one seed of the gradients in `correction_gradient`; before the repeated runs:

1. Noise, `mu_as_old`: at 1, 4 and 8 updates accuracy below `recompute` in the paired interval, and
   at 1 below where it began. Already at one update the clip silences more than a fifth.
2. It is the clip: `unclipped` ends at least 0.1 above `mu_as_old`.
3. `slower` stays at least 0.1 below `recompute`: the learning rate is not what is wrong. No run of
   `mu_as_old` has a length above 1.5 times that of its first step, so a schedule that waits for a
   surge of length (`LengthSurgeDecay`) would never have come down.
4. Noise, `recompute` does not collapse at 1, 4 or 8 updates: bias is not collapse. At one update it
   ends below `exact`.
5. `tis` is not better than `recompute` at 1 and at 4 updates (paired intervals not above 0).
   `sequence_tis` is better than `tis` at 4.
6. At four updates the accuracy of the twelve noise arms follows the signal-to-noise ratio of their
   gradient in `correction_gradient`, (along)²/(size² · noise), measured before any training: rank
   correlation above 0.6. `pruned` is among the best three.
7. `int4`: `recompute`, `tis` and `sequence_tis` end within 0.1 of each other and of `exact` at each
   reuse: a mismatch of 0.02 nats a token asks for no correction here. `mu_as_old` is below them at
   four and eight updates.
"""

from __future__ import annotations

from ..training import DataConfig, NumericsConfig, PolicyConfig, SystemConfig, TrainerConfig
from .experiment import Experiment

REUSE = {1: (1, 1), 4: (4, 1), 8: (4, 2)}  # updates a rollout: (minibatches, epochs)
RATE = {1: 5e-4, 4: 2.5e-4, 8: 2.5e-4}
STEPS = {1: 40, 4: 30, 8: 20}
EVAL_EVERY = {1: 10, 4: 10, 8: 5}
MISMATCH = {"noise": {"logit_noise": 1.5}, "int4": {"sampler_precision": "int4"}}
UNCLIPPED = 1e6

ADDED = """
Added to `corrections_1` after five seeds of the rest: `recompute_slower`, and `slower` and
`unclipped` with 4-bit weights.

8. At a third of the rate `recompute_slower` ends above `slower` with either mismatch.
   `int4_unclipped` ends at least 0.1 above `int4_mu_as_old`.
"""

Arm = tuple[TrainerConfig, ...]


def arm(
    updates: int,
    *,
    rate: float | None = None,
    clipped: bool = True,
    min_p: float = 0.0,
    **system,
) -> Arm:
    """One system with so many updates a rollout; `clipped` is GRPO's clip, 0.2."""
    minibatches, epochs = REUSE[updates]
    rate = RATE[updates] if rate is None else rate
    policy = {"minibatches": minibatches, "epochs": epochs, "min_p": min_p}
    policy |= {} if clipped else {"clip_low": 1.0, "clip_high": UNCLIPPED}
    return (
        TrainerConfig(
            steps=STEPS[updates],
            probe_every=10,
            data=DataConfig(prompts=16, eval_every=EVAL_EVERY[updates]),
            policy=PolicyConfig(**policy),
            numerics=NumericsConfig(learning_rate=rate),
            system=SystemConfig(**system),
        ),
    )


# What is done about a mismatch; the names that are not of `CORRECTIONS` first.
SETTINGS: dict[str, dict] = {
    "recompute": {},
    "mu_as_old": {"old_logp": "sampler"},
    "tis": {"correction": "tis"},
    "sequence_tis": {"correction": "sequence_tis"},
    "mis": {"correction": "mis"},
    "sequence_mis": {"correction": "sequence_mis"},
    "icepop": {"correction": "icepop"},
    "icepop_glm5": {"correction": "icepop_glm5"},
    "minimum_prefix": {"correction": "minimum_prefix"},
    "geometric_rejection": {"correction": "geometric_rejection", "correction_cap": 2.0},
    "opsm": {"off_policy_threshold": 0.05},
    "pruned": {"min_p": 0.05},
}
MAIN = ("recompute", "mu_as_old", "tis", "sequence_tis")


def arms(updates: int, noise: tuple[str, ...] = MAIN) -> dict[str, Arm]:
    """No mismatch, some settings under noise, and the main ones with 4-bit weights."""
    found = {"exact": arm(updates)}
    for mismatch, names in (("noise", noise), ("int4", MAIN)):
        for name in names:
            options = MISMATCH[mismatch] | SETTINGS[name]
            found[f"{mismatch}_{name}"] = arm(updates, **options)
    return found


ALL = (
    Experiment(
        "corrections_1",
        __doc__ + ADDED,
        arms(1)
        | {
            **{
                f"{mismatch}_unclipped": arm(1, **options, **SETTINGS["mu_as_old"], clipped=False)
                for mismatch, options in MISMATCH.items()
            },
            **{
                f"{mismatch}{setting}_slower": arm(1, **options, **SETTINGS[name], rate=RATE[1] / 3)
                for mismatch, options in MISMATCH.items()
                for setting, name in (("", "mu_as_old"), ("_recompute", "recompute"))
            },
        },
    ),
    Experiment("corrections_4", __doc__, arms(4, tuple(SETTINGS))),
    Experiment("corrections_8", __doc__, arms(8)),
)
