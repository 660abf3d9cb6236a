"""Chapter 33, QK-Clip: attention logits that grow, and four ways to bound them.

`qk_clip`: the supervised warm start of the sorting task from random weights, 64 demonstrations a
step, AdamW at .01 without decay, but query and key projections at ten times that, so that their
logits run away. All bounds are 30: seed 001/002's clamp value, and about twice what the run
without hot projections reaches. Kimi K2's τ of 100 belongs to its scale. Arms: `none`; `clamp` and
`soft_cap` of the scores; `qk_norm` with gains that start at a largest logit of 30; `qk_clip` (the
weights); `cool`, nothing hot and no bound; `all hot` and `all hot, qk_clip`, every parameter at
.03; `packed`, `none` with eight demonstrations in a row, so that the context is eight times as
long; `mla` and `mla, qk_clip`, latent attention; `cooled` and `cooled, qk_clip`, 60 steps, of
which the last 40 have a tenth of the rates. Numbers are means of steps 36-40 unless said
otherwise. Predictions, written after one seed of most arms had been looked at and before the
repeated runs:

1. The largest logit of `none` is above 300 in all seeds, that of `cool` below 30.
2. `clamp`: the logits under it are above 300 too, more than half of all visible ones lie beyond
   the clamp, and the loss is not below that of `none`. Attention entropy is higher than `none`'s.
3. `soft_cap`: logits above 300 too, but a loss below `none`'s.
4. `qk_norm`: no logit above 40 in any step; a loss below `none`'s.
5. `qk_clip`: from step 11 on the largest logit is below 90, and above 30 in most steps, since it
   is bounded after each step and grows in the next; a loss below `none`'s; heads are clipped in
   every step from 11 on.
6. The gradient's norm has a peak above 5 in steps 21-40 in most runs of `none` and `clamp`, and in
   at most one of `soft_cap` and `qk_clip`. The norm of the gradient to the query projections under
   `clamp` is not below that under `qk_clip`: it does not show what the clamp cuts off.
7. No bound reaches the loss of `cool`.
8. `all hot, qk_clip` does not differ from `all hot` in loss by anything that the seeds can show.
9. `packed`: the largest logit differs from that of `none` by nothing that the seeds can show: the
   long context by itself does not do it here.
10. `mla` above 100; `mla, qk_clip` below 90 in every step from 11 on.
11. `cooled, qk_clip`: fewer than 4 of 8 heads are clipped a step in steps 41-60, but not none. It
    fades; in 40 steps it does not switch itself off.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from ..numerics import (
    AttentionWatch,
    QKClip,
    add_qk_norm,
    attention_scores,
    clamp_attention_scores,
    clip_gradients,
    gradient_norm,
    soft_cap_scores,
)
from ..numerics.attention import attention_layers
from ..policy import entropy
from ..rewards import task_by_name
from ..training import RECIPES, small_moe
from ..training.base import demonstrations, imitation_loss
from .measured import Measured

RECIPE = replace(RECIPES["mixtral-cpu-sort"], batch=64)
BOUND = 30.0
QUERIES = ("q_proj.weight", "q_b_proj.weight")
HOT = (*QUERIES, "k_proj.weight", "kv_b_proj.weight")


@dataclass(frozen=True)
class Hot:
    """One arm: how attention logits are bounded while the model is taught too fast.

    bound: `none`, `clamp` and `soft_cap` (scores), `qk_norm` (gains that start at a largest logit
    of `limit`), or `qk_clip` (weights, τ = `limit`). rate: AdamW's for query and key projections;
    `others` is that of everything else. Both fall to a tenth after `hot` steps. packed:
    demonstrations that follow each other in one row.
    """

    bound: str = "none"
    rate: float = 1e-1
    others: float = 1e-2
    steps: int = 40
    hot: int = 40
    packed: int = 1
    limit: float = BOUND
    preset: str = "mixtral-cpu"

    def change(self) -> Callable[[Tensor], Tensor] | None:
        """What is done to the scores before the mask, if anything is."""
        if self.bound == "clamp":
            return partial(clamp_attention_scores, bound=self.limit)
        if self.bound == "soft_cap":
            return partial(soft_cap_scores, cap=self.limit)
        return None


class Spy:
    """Looks at what a bound does with the scores of every layer, where it is told to."""

    def __init__(self, change: Callable[[Tensor], Tensor] | None, limit: float):
        self.change, self.limit = change, limit
        self.look_at(None)

    def look_at(self, counted: Tensor | None) -> None:
        """From the next forward on look at these queries (B, Q), or at none."""
        self.counted, self.entropies, self.beyond = counted, [], []

    def inside(self, model: nn.Module):
        """Context in which the model's scores are bounded, and looked at."""
        if self.change is None and self.counted is None:
            return nullcontext()
        return attention_scores(model, self)

    def __call__(self, scores: Tensor) -> Tensor:
        changed = scores if self.change is None else self.change(scores)
        if self.counted is not None:
            self._look(scores.detach(), changed.detach())
        return changed

    def _look(self, scores: Tensor, changed: Tensor) -> None:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        rows = self.counted[:, None].expand(scores.shape[:3])
        self.entropies.append(entropy(changed.masked_fill(later, -math.inf))[rows].mean())
        pairs = rows[..., None] & ~later
        self.beyond.append((scores.abs() > self.limit)[pairs].float().mean())

    def found(self) -> dict[str, float]:
        """Means over the layers of what was looked at."""
        return {
            "attention_entropy": float(torch.stack(self.entropies).mean()),
            "beyond": float(torch.stack(self.beyond).mean()),
        }


def packed(ids: Tensor, counted: Tensor, per_row: int, pad: int) -> tuple[Tensor, Tensor]:
    """Rows of `per_row` demonstrations, one after the other; padding only at their ends.

    ids (B, W) padded on the right with `pad`, counted (B, W) bool. Each demonstration sees those
    before it in its row: a longer context, and no more tokens in the batch.
    """
    ends = (ids != pad).sum(1).tolist()
    pieces = [(ids[i, :end], counted[i, :end]) for i, end in enumerate(ends)]
    rows = [pieces[i : i + per_row] for i in range(0, len(pieces), per_row)]
    both = []
    for column, fill in ((0, pad), (1, False)):
        joined = [torch.cat([piece[column] for piece in row]) for row in rows]
        both.append(nn.utils.rnn.pad_sequence(joined, True, fill))
    return both[0], both[1]


def hot_start(arm: Hot, seed: int, every: int = 5) -> list[dict]:
    """Teach a fresh model the sorting answers with hot query and key projections.

    A row each `every` steps: the mean `loss` (nats a token) and norm of the gradient to all query
    projections (`query_grad`), the peak of the gradient's whole norm (`grad_peak`) and the largest
    attention logit before any change to it, how many heads QK-Clip scaled a step, and, at the last
    of the steps, the mean entropy of attention (nats a query) and the share of visible logits
    `beyond` the bound. Padding does not count.
    """
    model, tokenizer = small_moe(arm.preset, seed=seed)
    if arm.bound == "qk_norm":
        add_qk_norm(model, gain=math.sqrt(arm.limit / math.sqrt(_head_dim(model))))
    task, rng = task_by_name(RECIPE.task, RECIPE.task_options), random.Random(seed)
    clip = QKClip(model, arm.limit, exact=True) if arm.bound == "qk_clip" else None
    watch = clip.watch if clip else AttentionWatch(model)
    optimizer, rates = _optimizer(arm, model)
    spy, rows, seen = Spy(arm.change(), arm.limit), [], []
    for step in range(1, arm.steps + 1):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * min(1, step / 10) * (1 if step <= arm.hot else 0.1)
        batch = demonstrations(tokenizer, task, RECIPE, rng, seed * 1_000_003 + step)
        ids, counted = packed(*batch, arm.packed, tokenizer.pad_token_id)
        real = (ids != tokenizer.pad_token_id)[:, :-1]
        spy.look_at(real if step % every == 0 else None)
        with watch.counting(real), spy.inside(model):
            loss = imitation_loss(model, ids, counted)
        loss.backward()
        seen.append({"loss": loss.item()} | _update(model, optimizer, watch, clip))
        if step % every == 0:
            rows.append({"step": step} | _summary(seen) | spy.found())
            seen = []
    return rows


def _update(model: nn.Module, optimizer, watch: AttentionWatch, clip: QKClip | None) -> dict:
    """One update from the gradients that are there, and what was seen."""
    queries = [p for name, p in model.named_parameters() if name.endswith(QUERIES)]
    row = {
        "attention_logit_max": max(float(heads.max()) for heads in watch.maxima.values()),
        "query_grad": float(gradient_norm(queries)),
        "grad_peak": float(clip_gradients(model.parameters(), 1.0)),
    }
    optimizer.step()
    optimizer.zero_grad()
    row["clipped_heads"] = clip.step().clipped if clip else 0
    watch.reset()
    return row


def _summary(seen: list[dict]) -> dict:
    """Means over some steps, but the largest of what is a maximum."""
    largest = ("attention_logit_max", "grad_peak")
    return {
        name: max(values) if name in largest else math.fsum(values) / len(values)
        for name, values in ((name, [row[name] for row in seen]) for name in seen[0])
    }


def _optimizer(arm: Hot, model: nn.Module) -> tuple[torch.optim.Optimizer, list[float]]:
    """AdamW, and the full rates of its groups: query and key projections, everything else."""
    groups: tuple[list, list] = ([], [])
    for name, p in model.named_parameters():
        groups[not name.endswith(HOT)].append(p)
    rates = [arm.rate, arm.others]
    named = [{"params": params} for params in groups]
    return torch.optim.AdamW(named, betas=(0.9, 0.95), weight_decay=0.0), rates


def _head_dim(model: nn.Module) -> int:
    return next(iter(attention_layers(model).values())).head_dim


def _arm(bound: str = "none", **options):
    return partial(hot_start, Hot(bound, **options))


ALL_HOT = {"rate": 3e-2, "others": 3e-2}
LATENT = {"preset": "deepseek-v3-cpu"}
COOLED = {"steps": 60, "hot": 20}

QK_CLIP = Measured(
    "qk_clip",
    __doc__,
    {bound: _arm(bound) for bound in ("none", "clamp", "soft_cap", "qk_norm", "qk_clip")}
    | {
        "cool": _arm(rate=1e-2),
        "all hot": _arm(**ALL_HOT),
        "all hot, qk_clip": _arm("qk_clip", **ALL_HOT),
        "packed": _arm(packed=8),
        "mla": _arm(**LATENT),
        "mla, qk_clip": _arm("qk_clip", **LATENT),
        "cooled": _arm(**COOLED),
        "cooled, qk_clip": _arm("qk_clip", **COOLED),
    },
)

ALL = (QK_CLIP,)
