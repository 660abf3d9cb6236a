"""Chapter 40, two policies of one name: the same weights, and six ways to compute a log-prob.

An engine of some precision draws answers to sorting problems with its cache and logs log μ. The
same engine scores the same tokens in other ways (kernels, one row at a time, padding on the other
side, in chunks), and trainers of other precisions score them. Gaps are means of |Δ log p| in nats.
Predictions, written after one seed of each arm of `two_policies`, of one family and of one arm of
the split, and before the repeated runs:

1. `float32`: every way is within 1e-6 of the one pass, and no token's ratio leaves 1 ± 0.2.
2. `bfloat16`: other kernels, the cache and chunks each make a gap above 5e-4 in every seed, one row
   at a time less than 5e-4. The padding side makes none at all, in any format.
3. `float16` against a float32 trainer: 5 to 16 times less than `bfloat16`, in every seed (its
   rounding is 8 times finer).
4. Changing one engine only does not help: a float16 sampler with a bfloat16 trainer has more than
   half of the gap of a bfloat16 sampler with a float32 trainer. Both in float16 have less than a
   third of the gap of both in bfloat16.
5. Tokens with p ≤ 0.3 are fewer than a fifth and carry more than a third of Σ|Δ|, in every arm. The
   gap is not proportional to 1 − p: the rarest bin (p ≤ 0.01) never has the largest mean gap of the
   five, in `bfloat16`, `float8_e4m3` and `int4`. The bound with the measured error of the logits is
   broken by no token.
6. Flipped experts: in `bfloat16` fewer than 3 % of the tokens, with a mean gap more than five times
   that of the others. Replaying the sampler's choice makes the mean gap 10 to 40 % smaller.
7. Tokens outside of 1 ± 0.2 with no update made: less than 0.2 % in `bfloat16`, 1 to 3 % in
   `float8_e4m3`, more than 10 % in `int4`.
8. The output layer in float32 makes the gap of `bfloat16` 20 to 45 % smaller.
9. The hidden states differ by less than 0.5 % after the embedding and by about 1 % after the first
   layer; the second adds less than the first.
10. `mismatch_families` (other weights for every seed): every family has a gap between 0.001 and
    0.03 in bfloat16, and in every family flipped tokens differ by more than the others.
11. `staleness_split`: one update moves the tokens further than the mismatch of `bfloat16` does, and
    less far than that of `int4`. In `int4` more than 5 % of the tokens leave 1 ± 0.2 unseen after
    one update: the ratio that the clip looks at is inside. With eight updates fewer do.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from ..rewards import task_by_name
from ..system import compare_routing, mismatch_report, record_routing, replay_routing
from ..training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    Rollout,
    Trainer,
    TrainerConfig,
    completion_logp,
    load_base,
    pass_rate,
    train_base,
)
from ..training.base import RECIPES
from ..training.precision import round_weights
from ..training.rollout import cache_argument
from .measured import Measured
from .sampled import completions_of

CLIP = 0.2  # PPO's and GRPO's
COMPUTE = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RARE = 0.3  # a token is called rare when its probability is at most this


def engine(model: nn.Module, precision: str) -> nn.Module:
    """A copy of `model` that another engine would hold.

    `float32`, `bfloat16`, `float16`: everything is stored and computed in that format.
    `bfloat16_head`: the same with the output layer in float32. `bfloat16_weights`,
    `float8_e4m3`, `int4`: matrices are rounded, and computed with in float32.
    Raises `ValueError` for any other name.
    """
    held = copy.deepcopy(model)
    if precision in COMPUTE:
        return held.to(COMPUTE[precision])
    if precision == "bfloat16_head":
        held.to(torch.bfloat16).lm_head.float()
        held.lm_head.register_forward_pre_hook(lambda _, args: (args[0].float(),))
        return held
    if precision not in ("bfloat16_weights", "float8_e4m3", "int4"):
        raise ValueError(f"precision={precision!r} is none that `engine` knows")
    round_weights(model, held, precision.removesuffix("_weights"))
    return held


# Six ways to score the tokens of a rollout, all (B, T), all of the same weights.


def whole(model: nn.Module, batch: Rollout, *, left: bool = False, masked: bool = True) -> Tensor:
    """log π of each token from one pass over prompt and completion, padded on one side.

    `masked` False forgets to tell the model what is padding: a mistake to be recognised.
    """
    ids, known, counted = _columns(batch, left)
    given = {"attention_mask": known.long(), "position_ids": _positions(known)}
    logits = model(ids, **given if masked else {}).logits
    return _place(_next_logp(logits, ids), counted, batch)


def by_row(model: nn.Module, batch: Rollout) -> Tensor:
    """The same, one sequence at a time and without padding."""
    ids, known, counted = _columns(batch, False)
    scored = torch.zeros(ids.shape)
    for row, held in enumerate(known):
        one = ids[row, held][None]
        scored[row, held] = _next_logp(model(one).logits, one)[0]
    return _place(scored, counted, batch)


def in_chunks(model: nn.Module, batch: Rollout, width: int = 4) -> Tensor:
    """The same, `width` columns at a time with a key-value cache: chunked prefill."""
    ids, known, counted = _columns(batch, False)
    position, cache, logits = _positions(known), DynamicCache(config=model.config), []
    for start in range(0, ids.shape[1], width):
        stop = min(start + width, ids.shape[1])
        out = model(
            ids[:, start:stop],
            attention_mask=known[:, :stop].long(),
            position_ids=position[:, start:stop],
            use_cache=True,
            **{cache_argument(model): cache},
        )
        logits.append(out.logits)
    return _place(_next_logp(torch.cat(logits, 1), ids), counted, batch)


@contextmanager
def plain_kernels(model: nn.Module):
    """Attention as matrix products and a softmax, experts one after the other."""
    before = model.config._attn_implementation, model.get_experts_implementation()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(before[0])
        model.set_experts_implementation(before[1])


def in_plain_kernels(model: nn.Module, batch: Rollout) -> Tensor:
    """The one pass of `whole` with other kernels for attention and experts."""
    with plain_kernels(model):
        return whole(model, batch)


WAYS: Mapping[str, Callable[[nn.Module, Rollout], Tensor]] = {
    "kernel": in_plain_kernels,
    "cache": lambda model, batch: batch.sampler_logp,  # as the tokens were drawn
    "batch": by_row,
    "padding": partial(whole, left=True),
    "chunks": in_chunks,
}


def _columns(batch: Rollout, left: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, what is known, and what counts (B, S + T); `left` moves all padding to the left."""
    ids = torch.cat([batch.prompt, batch.tokens], 1)
    known = torch.cat([batch.prompt_mask, batch.mask], 1)
    counted = torch.cat([torch.zeros_like(batch.prompt_mask), batch.mask], 1)
    if not left:
        return ids, known, counted
    order = known.long().argsort(dim=1, stable=True)
    return ids.gather(1, order), known.gather(1, order), counted.gather(1, order)


def _positions(known: Tensor) -> Tensor:
    return (known.cumsum(1) - 1).clamp(min=0)


def _next_logp(logits: Tensor, ids: Tensor) -> Tensor:
    """log π of each column's token given the columns before; 0 at the first. float32 or better."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    logp = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    return torch.cat([logp.new_zeros(len(logp), 1), logp], 1)


def _place(scored: Tensor, counted: Tensor, batch: Rollout) -> Tensor:
    """The counted columns of any layout, in their order, where the rollout has its tokens."""
    out = scored.new_zeros(batch.mask.shape)
    out[batch.mask] = scored[counted]
    return out


# What one sampler and one trainer make of the same tokens


def sample(
    model: nn.Module, tokenizer, seed: int, prompts: int = 32, group_size: int = 8
) -> Rollout:
    """Sorting problems of `seed`, answered by `model` with its cache, at temperature 1."""
    problems = task_by_name("sort", {}).sample("train", prompts, seed=seed)
    return completions_of(model, tokenizer, problems, seed, group_size=group_size)


@torch.no_grad()
def compare(model: nn.Module, tokenizer, precision: str, seed: int) -> list[dict]:
    """One row: what an engine of that precision, which samples, differs by from its trainers.

    `gap_<way>`, `max_<way>`: mean and largest |Δ log p| in nats between two ways of one and the
    same engine. `gap_precision`, …: between it and a trainer in float32; `gap_<format>` between
    it and a trainer that computes in another format. The rest is about the float32 trainer.
    """
    sampler = engine(model, precision)
    batch = sample(sampler, tokenizer, seed)
    exact, own = whole(model, batch), whole(sampler, batch)
    row = {"step": 0, "tokens": int(batch.mask.sum())}
    for name, way in WAYS.items():
        row |= _sizes(name, own, way(sampler, batch), batch)
    row |= _sizes("precision", exact, batch.sampler_logp, batch)
    for name in ("bfloat16", "float16"):
        row |= _sizes(name, whole(engine(model, name), batch), batch.sampler_logp, batch)
    row |= seen(exact, batch) | by_layer(model, sampler, batch) | routed(model, sampler, batch)
    return [row]


def _sizes(name: str, trainer_logp: Tensor, sampler_logp: Tensor, batch: Rollout) -> dict:
    gap = (trainer_logp - sampler_logp)[batch.mask].abs()
    return {f"gap_{name}": float(gap.mean()), f"max_{name}": float(gap.max())}


def seen(trainer_logp: Tensor, batch: Rollout) -> dict:
    """Where the gap sits by probability, and what a clip sees if μ passes for π_old.

    `outside`: tokens whose ratio π_old/μ leaves 1 ± 0.2 before any update; `at_least_0.19`: those
    as far off as a ratio of 0.83 or more; `rare_tokens`, `rare_gap`: the share of tokens with
    p ≤ 0.3, and their share of Σ|Δ|; `bin_<i>`, `signed_<i>`, `noise_<i>` as in `mismatch_report`.
    """
    report = mismatch_report(trainer_logp, batch.sampler_logp, batch.mask)
    delta = (trainer_logp - batch.sampler_logp)[batch.mask].double()
    rare = batch.sampler_logp[batch.mask].exp() <= RARE
    row = {
        "k3": report.k3,
        "ess_seq": report.ess_seq,
        "extreme": report.extreme,
        "outside": float((delta.exp() - 1).abs().gt(CLIP).double().mean()),
        "at_least_0.19": float((delta.abs() >= 0.19).double().mean()),
        "rare_tokens": float(rare.double().mean()),
        "rare_gap": float(delta[rare].abs().sum() / delta.abs().sum()),
    }
    for i, part in enumerate(report.bins):
        row |= {f"bin_{i}": part.mean_abs, f"signed_{i}": part.mean, f"noise_{i}": part.logit_noise}
    return row


def by_layer(model: nn.Module, sampler: nn.Module, batch: Rollout) -> dict:
    """How the difference between two engines grows through the model.

    `hidden_<i>`: ‖h − h'‖ / ‖h‖ over the known columns, after the embedding (0), each layer, and
    the last layer's norm; `logits`: the same of the logits less their mean.
    """
    ids, known, counted = _columns(batch, False)
    given = {"attention_mask": known.long(), "position_ids": _positions(known)}
    a, b = (m(ids, output_hidden_states=True, **given) for m in (model, sampler))
    states = [*zip(a.hidden_states, b.hidden_states, strict=True), (a.logits, b.logits)]
    states = [tuple(x[known].double() for x in pair) for pair in states]
    states[-1] = tuple(x - x.mean(-1, keepdim=True) for x in states[-1])
    names = [*(f"hidden_{i}" for i in range(len(a.hidden_states))), "logits"]
    row = {n: float((x - y).norm() / x.norm()) for n, (x, y) in zip(names, states, strict=True)}
    pairs = [out.logits[:, :-1][counted[:, 1:]].double() for out in (a, b)]
    return row | against_bound(*pairs, ids[counted])


def against_bound(logits: Tensor, other: Tensor, tokens: Tensor) -> dict:
    """How much of |Δ log p| ≤ log(p + (1 − p) e^{2ε}) is used, and how often it is broken.

    logits, other (N, V) of two engines, tokens (N,) drawn from `other`, whose p it is. ε is half
    the range of the N-th row's errors: a shift of all logits changes nothing. `bound_used`:
    Σ|Δ| over the sum of the bounds; `bound_broken`: the share of tokens above theirs.
    """
    logp = [x.log_softmax(-1).gather(1, tokens[:, None])[:, 0] for x in (logits, other)]
    error = logits - other
    twice = error.amax(-1) - error.amin(-1)
    bound = torch.log1p(-torch.expm1(logp[1]) * torch.expm1(twice))
    gap = (logp[0] - logp[1]).abs()
    broken = gap > bound * (1 + 1e-9) + 1e-12
    return {
        "bound_used": float(gap.sum() / bound.sum()) if bound.any() else 0.0,
        "bound_broken": float(broken.double().mean()),
    }


def routed(model: nn.Module, sampler: nn.Module, batch: Rollout) -> dict:
    """Experts that the sampler chooses and the float32 trainer does not, on the same tokens.

    `agree_<layer>`: share of tokens with the same experts; `flipped`: completion tokens predicted
    from a column with a changed choice in any layer; `gap_flipped`, `gap_kept` (nats): their mean
    |Δ| and that of the others; `gap_replayed`: of all, when the trainer replays the choices.
    """
    logp, records = [], []
    for one in (model, sampler):
        with record_routing(one) as recording:
            logp.append(whole(one, batch))
        records.append(recording.record())
    sets = [record.indices.sort(-1).values for record in records]
    changed = (sets[0] != sets[1]).any(-1).any(-1)
    counted = torch.cat([torch.zeros_like(batch.prompt_mask), batch.mask], 1)
    flip = changed[:, :-1][counted[:, 1:]]
    with replay_routing(model, records[1]):
        replayed = whole(model, batch)
    gap = (logp[0] - logp[1])[batch.mask].abs()
    row = {f"agree_{i}": share for i, share in enumerate(compare_routing(*records).layers)}
    row |= {"flipped": float(flip.double().mean())}
    row |= _sizes("replayed", replayed, logp[1], batch)
    for name, chosen in (("flipped", flip), ("kept", ~flip)):
        row |= {f"gap_{name}": float(gap[chosen].mean())} if chosen.any() else {}
    return row


def shipped(seed: int, precision: str) -> list[dict]:
    """The shipped Mixtral-like base; the seed decides problems and tokens."""
    return compare(*load_base("mixtral-cpu-sort"), precision, seed)


def family(seed: int, preset: str, precision: str = "bfloat16") -> list[dict]:
    """A base of that family, taught briefly; the seed decides its weights too."""
    recipe = replace(RECIPES["mixtral-cpu-sort"], preset=preset, batch=64, seed=seed)
    model, tokenizer = train_base(recipe, progress=False)
    (row,) = compare(model, tokenizer, precision, seed)
    return [row | {"right": pass_rate(model, tokenizer, task_by_name("sort", {}), 256)}]


def split(seed: int, precision: str, counts: Sequence[int] = (1, 2, 4, 8)) -> list[dict]:
    """The two factors of π_θ/μ after a rollout of an engine was used for n updates, a row an n.

    The rollout is that of step 16 of an ordinary run, the same for every n. `stale`, `mismatch`,
    `total`: mean |log| of π_θ/π_old, π_old/μ and π_θ/μ in nats; `outside_<name>`: tokens whose
    ratio leaves 1 ± 0.2; `unseen`: those whose whole ratio does and whose first factor, which the
    clip looks at, does not.
    """
    trainer = Trainer(replace(ORDINARY, seed=seed))
    trainer.run(progress=False)
    trainer.sampler = engine(trainer.model, precision)
    batch, _, advantages = trainer._collect(16)
    with torch.no_grad():
        before = completion_logp(trainer.model, batch)
    rows = []
    for updates in counts:
        used = copy.deepcopy(trainer)
        used.config = replace(ORDINARY, policy=PolicyConfig(epochs=updates))
        used._update(batch, advantages)
        with torch.no_grad():
            after = completion_logp(used.model, batch)
        logs = (after - before, before - batch.sampler_logp, after - batch.sampler_logp)
        rows.append({"step": updates} | _factors(*(x[batch.mask].double() for x in logs)))
    return rows


def _factors(stale: Tensor, mismatch: Tensor, total: Tensor) -> dict:
    sizes = {"stale": stale, "mismatch": mismatch, "total": total}
    outside = {name: (x.exp() - 1).abs() > CLIP for name, x in sizes.items()}
    row = {name: float(x.abs().mean()) for name, x in sizes.items()}
    row |= {f"outside_{name}": float(x.double().mean()) for name, x in outside.items()}
    return row | {"unseen": float((outside["total"] & ~outside["stale"]).double().mean())}


ORDINARY = TrainerConfig(
    steps=15,
    data=DataConfig(prompts=16, eval_every=15),
    numerics=NumericsConfig(max_grad_norm=math.inf),
)
PRECISIONS = (*COMPUTE, "bfloat16_weights", "bfloat16_head", "float8_e4m3", "int4")
FAMILIES = ("mixtral", "qwen3-moe", "olmoe", "deepseek-v3")

WEIGHTS = Measured(
    name="two_policies",
    prediction=__doc__,
    arms={precision: partial(shipped, precision=precision) for precision in PRECISIONS},
)
OTHERS = Measured(
    name="mismatch_families",
    prediction=__doc__,
    arms={name: partial(family, preset=f"{name}-cpu") for name in FAMILIES},
)
SPLIT = Measured(
    name="staleness_split",
    prediction=__doc__,
    arms={name: partial(split, precision=name) for name in ("bfloat16", "float8_e4m3", "int4")},
)

ALL = (WEIGHTS, OTHERS, SPLIT)
