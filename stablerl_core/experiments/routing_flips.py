"""Chapter 43, keep routing: which tokens are served by other experts, and what that does.

A *decision* is one token in one layer. It flips when the trainer, reading what the sampler read,
chooses another set of experts than the sampler did. Every seed has a model of its own: a warm
start from other random weights, then (`by_updates_*`) three GRPO steps. `step` counts what the
sampler was, in the order of `SAMPLERS`, or in `by_updates_*` the updates since the rollout.

Predictions, written after looking at one or two seeds, before the repeated run:

1. Flips in 100 decisions: float16 fewer than 0.2 and bfloat16 fewer than 2, in weights alone or
   throughout; float8 1 to 5; int4 5 to 15; a router rounded to two bits, all else exact, more
   than 20.
2. With float8 the gap of the tokens with a flip is more than twice that of the others. The finer
   the rounding, the rarer the flips and the larger this factor: above 10 in 16 bits.
3. Replaying the sampler's routing brings the gap of flipped tokens to less than twice that of the
   others with float8, and lowers k3: by more than half in 16 bits, where a few flips are most of
   it; by more than a fifth with float8; by more than nine tenths where only the router was
   rounded. F(2), the share of tokens whose ratio exceeds 2, falls with float8 everywhere.
4. No family is free of it: with float8 each has more than 0.5 flips in 100, and replay lowers k3.
5. Updates flip as much as an 8-bit sampler: more than 2 decisions in 100 after two updates at
   5e-4, and more after eight than after one. Half the learning rate flips fewer.
6. Replay removes less of what updates did than of what rounding did: after eight updates at 5e-4
   the gap falls by less than a quarter, because the weights themselves have moved.
7. The reversed direction, the sampler's tokens scored again by the sampler with the *trainer's*
   experts, reports a gap as small as replay does (within a quarter with float8), though the
   tokens were drawn from μ all the same: a number made better, and no sample.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..rewards import task_by_name
from ..system import mismatch_report
from ..training import (
    RECIPES,
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Rollout,
    Trainer,
    TrainerConfig,
    completion_logits,
    completion_logp,
    round_weights,
    rounded_activations,
    routers,
    train_base,
)
from ..training.models import FAMILIES
from ..training.rollout import with_own_routing
from .measured import Measured
from .sampled import completions_of

RECIPE = RECIPES["mixtral-cpu-sort"]
PROMPTS, GROUP = 32, 8


def known_positions(batch: Rollout) -> Tensor:
    """(B, S+T−1) bool: positions that were fed and hold a token."""
    return torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1)


def flips(batch: Rollout, other: Rollout) -> Tensor:
    """(B, S+T−1, L) bool: decisions in which two routings of the same tokens differ as sets."""
    first, second = (r.routing.sort(-1).values for r in (batch, other))
    return (first != second).any(-1)


def at_tokens(per_position: Tensor, batch: Rollout) -> Tensor:
    """Of (B, S+T−1, …) the positions whose logits drew the completion tokens, (B, T, …)."""
    start = batch.prompt.shape[1] - 1
    return per_position[:, start : start + batch.mask.shape[1]]


def changed_experts(batch: Rollout, other: Rollout) -> Tensor:
    """(B, S+T−1, L): share of the k experts that the other routing does not have."""
    kept = (batch.routing[..., :, None] == other.routing[..., None, :]).any(-1)
    return 1 - kept.float().mean(-1)


def busiest(batch: Rollout, experts: int) -> float:
    """Load of the busiest expert over the mean load, in the worst layer; 1 is balance."""
    chosen = batch.routing[known_positions(batch)].long()
    loads = [ids.flatten().bincount(minlength=experts) for ids in chosen.unbind(1)]
    return max(float(load.max() / load.float().mean()) for load in loads)


@torch.no_grad()
def look(model: nn.Module, batch: Rollout) -> dict[str, float]:
    """What flips between the sampler that drew `batch`, with its routing, and the trainer `model`.

    `flips_l` share of decisions of layer l, `experts` share of experts that differ, `flipped`
    share of completion tokens whose own position has a flip in any layer; `gap`, `gap_flip`,
    `gap_same` mean |log π − log μ| of all tokens, of those with a flip and of the others; `k3`
    and `extreme` of the mismatch report (F(2)); the same with `_replay` when the trainer scores
    with the sampler's routing; `load`, `load_sampler` the busiest expert's. Tokens drawn from μ.
    """
    free = replace(batch, routing=None)
    own = with_own_routing(model, free)
    differ, known = flips(batch, own), known_positions(batch)
    flip, mask = at_tokens(differ, batch).any(-1), batch.mask
    row = {
        f"flips_{i}": float(differ[..., i][known].float().mean()) for i in range(differ.shape[2])
    }
    row["experts"] = float(changed_experts(batch, own)[known].mean())
    row["flipped"] = float(flip[mask].float().mean())
    for scored, name in ((free, ""), (batch, "_replay")):
        logp = completion_logp(model, scored)
        seen, gap = (
            mismatch_report(logp, batch.sampler_logp, mask),
            (logp - batch.sampler_logp).abs(),
        )
        row |= {f"gap{name}": seen.mean_abs, f"k3{name}": seen.k3, f"extreme{name}": seen.extreme}
        for chosen, which in ((flip, "flip"), (~flip, "same")):
            if bool((mask & chosen).any()):
                row[f"gap_{which}{name}"] = float(gap[mask & chosen].mean())
    experts = len(next(iter(routers(model).values())).weight)
    return row | {"load": busiest(own, experts), "load_sampler": busiest(batch, experts)}


@torch.no_grad()
def look_reversed(model: nn.Module, sampler: nn.Module, batch: Rollout) -> dict[str, float]:
    """The reversed direction, on a rollout: the sampler scores again with the trainer's experts.

    Its tokens stay those that μ drew; what changes is the log-probability that is reported for
    them, μ′. `gap_reversed` mean |log π − log μ′| of the sampled tokens; `miss_reversed` the mean
    over their positions of |Σ_a μ(a) π(a)/μ′(a) − 1|, which is 0 for weights π/μ.
    """
    free = replace(batch, routing=None)
    own = with_own_routing(model, free)
    pi, mu, said = (
        completion_logits(m, b).log_softmax(-1)[batch.mask].double()
        for m, b in ((model, free), (sampler, free), (sampler, own))
    )
    tokens = batch.tokens[batch.mask][:, None]
    missed = (mu + pi - said).exp().sum(-1) - 1
    return {
        "gap_reversed": float((pi - said).gather(1, tokens).abs().mean()),
        "miss_reversed": float(missed.abs().mean()),
    }


def low_bits(weight: Tensor, bits: int) -> Tensor:
    """The nearest of 2^bits − 1 values, spread evenly between ± the largest of each row."""
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


def round_router(model: nn.Module, bits: int) -> None:
    """Round the routers of `model` in place, and nothing else: the fault of this chapter."""
    for router in routers(model).values():
        router.weight.data = low_bits(router.weight.data, bits)


@dataclass(frozen=True)
class Sampler:
    """How a sampler differs from the trainer whose weights it has: real casts."""

    weights: str = "float32"
    activations: str = "float32"
    dtype: torch.dtype | None = None
    router_bits: int = 0

    def of(self, model: nn.Module) -> nn.Module:
        """A copy of `model` as this sampler holds it."""
        copied = copy.deepcopy(model)
        round_weights(model, copied, self.weights)
        if self.router_bits:
            round_router(copied, self.router_bits)
        return copied if self.dtype is None else copied.to(self.dtype)

    def computing(self, sampler: nn.Module):
        """The context in which it computes."""
        return rounded_activations(sampler, self.activations)


SAMPLERS = {
    "float16 weights": Sampler("float16"),
    "float16 throughout": Sampler(dtype=torch.float16),
    "bfloat16 weights": Sampler("bfloat16"),
    "bfloat16 throughout": Sampler(dtype=torch.bfloat16),
    "float8 blocks": Sampler("float8_e4m3_blocks", "float8_e4m3_blocks"),
    "float8 everywhere": Sampler("float8_e4m3", "float8_e4m3"),
    "int4 weights": Sampler("int4"),
    "router in 4 bits": Sampler(router_bits=4),
    "router in 2 bits": Sampler(router_bits=2),
}


def roll(model: nn.Module, tokenizer, seed: int) -> Rollout:
    """Completions of training problems with the routing that drew them."""
    problems = task_by_name(RECIPE.task, RECIPE.task_options).sample("train", PROMPTS, seed)
    return completions_of(model, tokenizer, problems, seed, group_size=GROUP, record_routing=True)


def by_precision(
    seed: int, family: str = "mixtral", names: Sequence[str] = tuple(SAMPLERS)
) -> list[dict]:
    """One warm start of a family, and the same weights as every sampler holds them."""
    recipe = replace(RECIPE, preset=f"{family}-cpu", seed=seed)
    model, tokenizer = train_base(recipe, progress=False)
    rows = []
    for name in names:
        how = SAMPLERS[name]
        sampler = how.of(model)
        with how.computing(sampler):
            batch = roll(sampler, tokenizer, 1000 + seed)
            row = look_reversed(model, sampler, batch) if how.dtype is None else {}
        rows.append({"step": list(SAMPLERS).index(name)} | look(model, batch) | row)
    return rows


class Watched(Trainer):
    """A trainer that calls `after_update` with the rollout after each of its updates."""

    after_update: Callable[[Rollout], None] | None = None

    def _one_update(self, batch, *rest):
        done = super()._one_update(batch, *rest)
        if self.after_update is not None:
            self.after_update(batch)
        return done


def by_updates(seed: int, rate: float, updates: int = 8, warm_up: int = 3) -> list[dict]:
    """Flips against one's own routing at the rollout, after each update on it; exact sampler."""
    data = DataConfig(prompts=16, eval_every=100, eval_prompts=1)
    config = TrainerConfig(
        steps=warm_up,
        seed=seed,
        data=data,
        policy=PolicyConfig(minibatches=updates),
        numerics=NumericsConfig(learning_rate=rate),
    )
    trainer, rows = Watched(config), []
    trainer.run(progress=False)
    batch, _, advantages = trainer._collect(warm_up + 1)
    drawn = with_own_routing(trainer.model, batch)
    trainer.after_update = lambda _: rows.append(
        {"step": len(rows) + 1} | look(trainer.model, drawn)
    )
    trainer._update(batch, advantages)
    return rows


FLOAT8 = ("float8 blocks", "float8 everywhere")
FLIPS = Measured(
    name="routing_flips",
    prediction=__doc__,
    arms={"mixtral": by_precision}
    | {
        family: partial(by_precision, family=family, names=FLOAT8)
        for family in FAMILIES
        if family != "mixtral"
    }
    | {
        "by_updates_slow": partial(by_updates, rate=2.5e-4),
        "by_updates_fast": partial(by_updates, rate=5e-4),
    },
)
ALL = (FLIPS,)
