"""Chapter 44, Keep Sampling Mask: over which tokens the trainer normalises what a filter left.

An arm that ends in `_none` scores tokens over the whole vocabulary, `_stored` over the set that
was kept, `_rerun` over what the same filter leaves of the trainer's own logits. The training arms:
40 steps of sorting, 16 prompts × 8 completions, GRPO with one update a rollout, rate 5e-4. "Own"
answers are sampled as in training, "full" ones from the whole distribution at temperature 1; the
end is the mean of steps 30 and 40. Differences are paired by seed, "differ" means that the 95 %
interval of the difference leaves out 0. All predictions were written after one seed of most arms
and before the repeated runs.

`mask_ratios` (exact and sampled, no training; step = place in MISMATCH):
1. `none`: the mean ratio is the kept mass, within 0.01 at every filter and mismatch but `updated`
   (which has trained on the same tokens).
2. `stored`: the mean ratio is 1 within 0.02, with the same exception.
3. `rerun` loses nothing on the sampler's own logits, less than 0.5 % of the tokens in bfloat16,
   between 0.2 % and 5 % in int4, more after four updates than in int4. With the grammar it loses
   nothing anywhere, since that set depends on the text and not on logits.
4. Replacing −inf by 0 gives ratios above 5 in int4 for top-p, top-k and min-p.
5. On the sampler's own logits GSPO's clip silences, OPSM with δ = 0.01 drops, and the band of
   1.001 rejects more than 95 % of what they can with `none` and nothing with `stored`; GRPO's
   clip at 0.2 is left by no token for top-p 0.9, and by more than 5 % for top-p 0.7.
6. The ratio's spread is no larger with `rerun` than with `stored` in int4: what would be far out
   is lost.

`mask_grammar`: sampled at temperature 1.5 with nothing but `#`, digits and the end allowed; `hot`
without the grammar.
1. `grammar_none`: the kept mass falls below 0.8 and entropy rises, in every seed, and full
   accuracy ends below that of `grammar_stored` (differ), below the start in most seeds.
2. `grammar_stored` ends above it in own accuracy (differ).
3. Wrong layer: a third of the rate (`_slow`) and a KL penalty of 0.1 (`_kl`) slow the leak but the
   kept mass still ends below its start; own accuracy of `_slow` ends below `grammar_stored`.
4. TIS (`_tis`) does not repair it: kept mass below its start, own accuracy below `stored`.
5. `grammar_rerun` does not differ from `grammar_stored` in anything.
6. Full entropy of `grammar_stored` rises too, though its own entropy falls: the signal counts
   tokens that cannot be drawn.
7. `hot` ends below `grammar_stored` in own accuracy.

`mask_top_p`: top-p 0.9 at temperature 1, and top-k 2, min-p 0.1 with the same names; `whole` has no
truncation. `_band` adds geometric rejection (1.001), `_wide` the same at 1.2, `_opsm` the
sequence mask at δ = 0.01, `noisy` N(0, 0.3²) on the sampler's logits and TIS; `positive` is the
stored set with every completion of negative advantage dropped.
1. `top_p_none_band` learns nothing: all tokens masked, own accuracy within 0.05 of its start;
   `top_p_stored_band` masks none and ends above it (differ). `top_p_none_wide` learns again.
2. `top_p_none_opsm` drops more than 95 % of the mistakes. Its entropy and distinct own answers end
   below those of `top_p_stored_opsm` (differ), its full accuracy not below: the fault does not
   show in the score. It does not differ from `positive` in entropy.
3. `top_p_none` ends with a lower entropy than `top_p_stored` (differ); full accuracy does not
   differ.
4. `top_p_rerun` does not differ from `top_p_stored` in accuracy, nor `noisy_rerun` from
   `noisy_stored`; `noisy_rerun` loses more than 0.2 % of the tokens.
5. `top_k` and `min_p`: accuracy of `none` and `stored` does not differ.
6. Truncation itself costs diversity: `top_p_stored` gives fewer distinct own answers than `whole`,
   at every step, and ends no higher in full accuracy.

`mask_follow_up`, predicted after the results of the three above and before its own run:
1. `whole_as_top_p` is trained without truncation and its own answers are sampled with top-p 0.9:
   it does not end below `top_p_stored` of `mask_top_p`.
2. `hot_as_grammar` is trained as `hot` and answers under the grammar: it ends below
   `grammar_stored` of `mask_grammar` (differ).
3. `grammar_stored_kl` has the stored set and a KL penalty of 0.1, which then looks at the kept
   tokens only: its kept mass ends within 0.05 of that of `grammar_stored`, far below its start.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from ..policy import entropy
from ..rewards import strict_reward
from ..system import (
    KeptSets,
    geometric_rejection,
    kept_mass,
    masked_log_probs,
    off_policy_sequence_mask,
    rerun_filter,
)
from ..training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Sampling,
    SystemConfig,
    Trainer,
    TrainerConfig,
    completion_logits,
)
from ..training.rollout import Rollout, decode_completions
from .experiment import Experiment
from .measured import Measured

DIGITS = "#0123456789"
FILTERS = {
    "top_p_9": {"top_p": 0.9},
    "top_p_7": {"top_p": 0.7},
    "top_k_2": {"top_k": 2},
    "min_p_1": {"min_p": 0.1},
    "grammar": {"allowed": DIGITS, "temperature": 1.5},
}
# How the trainer may differ from the policy that sampled; the step of a row is the place here.
MISMATCH = ("same", "bfloat16", "float8_e4m3", "int4", "updated")
BAND, DELTA, GSPO_LOW = 1.001, 0.01, 3e-4
RATE = 5e-4


# What the ratios of a rollout are, under each way to normalise


def sampled_and_scored(
    options: dict, mismatch: str, seed: int, prompts: int = 64
) -> tuple[Trainer, Rollout, Tensor]:
    """A rollout of the base model with a filter, and the trainer that is to learn from it.

    `mismatch` is a precision of the sampler (weights, activations and cache, int4 weights only),
    `same`, or `updated`: the trainer has already made four updates with the rollout.
    """
    low = mismatch in ("bfloat16", "float8_e4m3")
    rounds = {"sampler_activations": mismatch, "sampler_cache": mismatch} if low else {}
    system = SystemConfig(**rounds)
    if mismatch not in ("same", "updated"):
        system = replace(system, sampler_precision=mismatch)
    config = TrainerConfig(
        seed=seed,
        data=DataConfig(prompts=prompts, eval_prompts=1),
        policy=PolicyConfig(minibatches=4, **options),
        numerics=NumericsConfig(learning_rate=RATE, warmup=0),
        system=system,
    )
    trainer = Trainer(config)
    batch, _, advantages = trainer._collect(1)
    if mismatch == "updated":
        trainer._update(batch, advantages)
    return trainer, batch, advantages


@torch.no_grad()
def log_ratios(model, batch: Rollout) -> dict[str, Tensor]:
    """log π/μ (B, T) of each token with π over all tokens, the stored set, the trainer's own.

    `rerun` is −inf where the trainer's filter lost the token. `kept_mass` (B, T) is S; `differs`
    (B, T) is 1 where the trainer's own set is another than the stored one.
    """
    logits, sampling = completion_logits(model, batch), batch.sampling
    given = (batch.tokens, batch.kept, sampling.temperature)
    again = rerun_filter(logits, batch.tokens, **sampling.options(logits))
    stored = torch.zeros_like(again.keep).scatter(-1, batch.kept.long().clamp(min=0), True)
    stored[..., 0] = (batch.kept == 0).any(-1)  # the filler was clamped to token 0
    return {
        "none": masked_log_probs(logits, batch.tokens, None, given[2]) - batch.sampler_logp,
        "stored": masked_log_probs(logits, *given) - batch.sampler_logp,
        "rerun": again.logp - batch.sampler_logp,
        "kept_mass": kept_mass(logits, batch.kept, given[2]),
        "differs": (again.keep != stored).any(-1).float(),
    }


def ratio_rows(options: dict, seed: int) -> list[dict]:
    """One row a mismatch: mean and tails of the ratios, and what reads them."""
    rows = []
    for step, mismatch in enumerate(MISMATCH):
        trainer, batch, advantages = sampled_and_scored(options, mismatch, seed)
        found = log_ratios(trainer.model, batch)
        row = _about_tokens(found, batch) | _readers(found, batch, advantages)
        rows.append({"step": step} | row)
    return rows


def _about_tokens(found: dict[str, Tensor], batch: Rollout) -> dict:
    mask, sets = batch.mask, KeptSets.of(batch.kept, batch.mask)
    flat = {name: values[mask].double() for name, values in found.items()}
    lost = flat["rerun"] == -math.inf
    ways = {"none": flat["none"], "stored": flat["stored"], "rerun": flat["rerun"][~lost]}
    replaced = flat["rerun"].where(~lost, -batch.sampler_logp[mask].double())
    row = {
        "kept_mass": flat["kept_mass"].mean(),
        "lost": lost.double().mean(),
        "differs": flat["differs"].mean(),
        "replaced_max": replaced.max().exp(),
        "kept_ids": sets.counts[mask].double().mean(),
        "bytes": sets.bytes_per_token,
    }
    for way, logs in ways.items():
        row[f"ratio_{way}"] = logs.exp().mean()
        row[f"spread_{way}"] = logs.std()
        row[f"outside_{way}"] = ((logs.exp() - 1).abs() > 0.2).double().mean()
    return {name: float(value) for name, value in row.items()}


def _readers(found: dict[str, Tensor], batch: Rollout, advantages: Tensor) -> dict:
    """What is done to whole sequences by those that read the ratio, for `none` and `stored`."""
    mask, drawn, row = batch.mask, batch.sampler_logp, {}
    bad = advantages < 0
    for way in ("none", "stored"):
        logp = found[way] + drawn
        mean = (found[way] * mask).sum(1) / mask.sum(1)
        keep = off_policy_sequence_mask(logp, drawn, advantages, mask, DELTA)[:, 0]
        inside = geometric_rejection(logp, drawn, mask, low=1 / BAND, high=BAND)
        row |= {
            f"product_{way}": (found[way] * mask).sum(1).exp().mean(),
            f"gspo_{way}": (mean[bad].exp() < 1 - GSPO_LOW).double().mean(),
            f"opsm_{way}": (~keep[bad]).double().mean(),
            f"band_{way}": (~inside.bool()).double().mean(),
        }
    return {name: float(value) for name, value in row.items()}


# Training


@dataclass(frozen=True)
class Answering(Experiment):
    """Every tenth step also answers 64 held-out problems eight times, in two ways.

    `full_…` from the whole distribution at temperature 1, `own_…` as the arm samples in
    training, or with the settings that `own` has for it: `…_accuracy`, and `…_distinct`, the mean
    number of different answers among eight.
    `own_entropy` is that of the truncated distribution, `own_mass` the mass it keeps.
    """

    own: Mapping[str, dict] = field(default_factory=dict)

    def rows(self, arm: str, seed: int) -> list[dict]:
        trainer = self.trainer(arm, seed)
        policy = trainer.config.policy
        own = trainer._sampling(PolicyConfig(**self.own[arm]) if arm in self.own else policy)
        found = {0: answers(trainer, own)}

        def measure(row: dict) -> None:
            if row["step"] % 10 == 0:
                found[row["step"]] = answers(trainer, own)

        log = self.train(arm, trainer, progress=False, on_step=measure)
        every = self.log_every
        kept = (row for row in log if row["step"] % every == 0 or row["step"] == 1)
        return [row | found.get(row["step"], {}) for row in kept]


def answers(
    trainer: Trainer, own: Sampling, problems: int = 64, group_size: int = 8
) -> dict[str, float]:
    """Accuracy, and different answers a problem, of the present policy: see `Answering`."""
    asked = trainer.task.sample("heldout", problems, seed=1)
    repeated = [p for p in asked for _ in range(group_size)]
    ways = {"full": Sampling(), "own": own}
    row = {}
    for purpose, (way, sampling) in enumerate(ways.items(), 4):
        given = (trainer.model, asked, trainer.version, purpose, group_size, sampling)
        batch = trainer._sample(*given)
        texts = decode_completions(trainer.tokenizer, batch)
        right = strict_reward(texts, repeated, (~batch.finished).tolist())
        groups = [texts[i : i + group_size] for i in range(0, len(texts), group_size)]
        row[f"{way}_accuracy"] = sum(right) / len(right)
        row[f"{way}_distinct"] = sum(len(set(group)) for group in groups) / problems
    return row | _of_the_kept(trainer.model, batch)


@torch.no_grad()
def _of_the_kept(model, batch: Rollout) -> dict[str, float]:
    """Entropy of what a rollout was sampled from, nats a token, and the mass that was kept."""
    logits, sampling = completion_logits(model, batch)[batch.mask], batch.sampling
    kept = None if batch.kept is None else batch.kept[batch.mask]
    mass = kept_mass(logits, kept, sampling.temperature).mean()
    inside = rerun_filter(logits, batch.tokens[batch.mask], **sampling.options(logits)).keep
    spread = entropy((logits / sampling.temperature).masked_fill(~inside, -math.inf)).mean()
    return {"own_entropy": float(spread), "own_mass": float(mass)}


def arm(mask: str, rate: float = RATE, system: dict | None = None, **policy) -> tuple:
    """One run of forty steps with one update each; `policy` are the sampler's settings."""
    return (
        TrainerConfig(
            steps=40,
            data=DataConfig(prompts=16, eval_every=40),
            policy=PolicyConfig(**policy),
            numerics=NumericsConfig(learning_rate=rate),
            system=SystemConfig(sampling_mask=mask, **(system or {})),
        ),
    )


HOT = {"temperature": 1.5}
GRAMMAR = HOT | {"allowed": DIGITS}
TOP_P, TOP_K, MIN_P = {"top_p": 0.9}, {"top_k": 2}, {"min_p": 0.1}
REJECT = {"correction": "geometric_rejection", "correction_cap": BAND}
WIDE = REJECT | {"correction_cap": 1.2}
OPSM, POSITIVE = {"off_policy_threshold": DELTA}, {"off_policy_threshold": -1000.0}
NOISY = {"logit_noise": 0.3, "correction": "tis"}

ALL = (
    Measured(
        "mask_ratios", __doc__, {name: partial(ratio_rows, of) for name, of in FILTERS.items()}
    ),
    Answering(
        "mask_grammar",
        __doc__,
        {
            "hot": arm("stored", **HOT),
            "grammar_stored": arm("stored", **GRAMMAR),
            "grammar_rerun": arm("rerun", **GRAMMAR),
            "grammar_none": arm("none", **GRAMMAR),
            "grammar_none_slow": arm("none", RATE / 3, **GRAMMAR),
            "grammar_none_kl": arm("none", **GRAMMAR, kl_coef=0.1),
            "grammar_none_tis": arm("none", system={"correction": "tis"}, **GRAMMAR),
            "grammar_none_opsm": arm("none", system=OPSM, **GRAMMAR),
        },
    ),
    Answering(
        "mask_top_p",
        __doc__,
        {
            "whole": arm("stored"),
            "top_p_stored": arm("stored", **TOP_P),
            "top_p_rerun": arm("rerun", **TOP_P),
            "top_p_none": arm("none", **TOP_P),
            "top_p_none_band": arm("none", system=REJECT, **TOP_P),
            "top_p_none_wide": arm("none", system=WIDE, **TOP_P),
            "top_p_stored_band": arm("stored", system=REJECT, **TOP_P),
            "top_p_none_opsm": arm("none", system=OPSM, **TOP_P),
            "top_p_stored_opsm": arm("stored", system=OPSM, **TOP_P),
            "positive": arm("stored", system=POSITIVE, **TOP_P),
            "noisy_none": arm("none", system=NOISY, **TOP_P),
            "noisy_rerun": arm("rerun", system=NOISY, **TOP_P),
            "noisy_stored": arm("stored", system=NOISY, **TOP_P),
            "top_k_none": arm("none", **TOP_K),
            "top_k_stored": arm("stored", **TOP_K),
            "min_p_none": arm("none", **MIN_P),
            "min_p_stored": arm("stored", **MIN_P),
        },
    ),
    Answering(
        "mask_follow_up",
        __doc__,
        {
            "whole_as_top_p": arm("stored"),
            "hot_as_grammar": arm("stored", **HOT),
            "grammar_stored_kl": arm("stored", **GRAMMAR, kl_coef=0.1),
        },
        own={"whole_as_top_p": TOP_P, "hot_as_grammar": GRAMMAR},
    ),
)
