"""Sampling completions: batched, cached, and with everything needed to score them later."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from ..policy import entropy
from ..system import (
    RoutingRecord,
    masked_log_probs,
    record_routing,
    replay_routing,
    rerun_filter,
    sample_tokens,
)
from .models import routers


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 1 and no truncation sample the policy itself.

    `allowed` are the ids that may be drawn at all, () for all.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    allowed: tuple[int, ...] = ()

    def options(self, logits: Tensor) -> dict:
        """These settings as arguments of `sample_tokens` and `rerun_filter`, for such logits."""
        if not self.allowed:
            return vars(self) | {"allowed": None}
        allowed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
        allowed[list(self.allowed)] = True
        return vars(self) | {"allowed": allowed}


@dataclass(frozen=True)
class Rollout:
    """B = P·G completions of P prompts, the G of one prompt adjacent.

    `prompt` (B, S) ids padded on the left with `prompt_mask`; `tokens` (B, T) the completion,
    end token included, with `mask` (B, T) True at its tokens; `sampler_logp` (B, T) log μ of
    each token under the distribution that was sampled; `entropy` (B, T) of that distribution
    before truncation, nats; `finished` (B,) False where the token limit cut the completion;
    `version` of the weights that sampled, the oldest if they changed underway, which `versions`
    (B, T) tell token by token; `routing` (B, S+T−1, L, k) uint8 or int16 expert ids
    for every position that was fed to the model, or None; `kept` (B, T, K) int32 ids left by
    truncation (−1 filler), or None; with `refilter` whoever scores the tokens truncates its own
    logits anew instead.
    """

    prompt: Tensor
    prompt_mask: Tensor
    tokens: Tensor
    mask: Tensor
    sampler_logp: Tensor
    entropy: Tensor
    finished: Tensor
    version: int
    sampling: Sampling
    routing: Tensor | None = None
    kept: Tensor | None = None
    versions: Tensor | None = None
    refilter: bool = False


def encode_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[str], device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Prompts to ids and mask (P, S), padded on the left. An empty prompt raises `ValueError`."""
    if not all(prompts):
        raise ValueError("prompts has an empty string; a policy needs at least one token to read")
    batch = tokenizer(
        list(prompts),
        padding=True,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    )
    return batch.input_ids.to(device), batch.attention_mask.bool().to(device)


def decode_completions(tokenizer: PreTrainedTokenizerBase, rollout: Rollout) -> list[str]:
    """Completion texts in row order, without the end token that finished them.

    Any other special token that was sampled stays visible: a verifier must not be paid for
    `#1<pad>2` as if it were `#12`.
    """
    ends = rollout.mask.sum(1) - rollout.finished.long()
    rows = zip(rollout.tokens.tolist(), ends.tolist(), strict=True)
    return tokenizer.backend_tokenizer.decode_batch(
        [row[:end] for row, end in rows], skip_special_tokens=False
    )


def cache_argument(model: PreTrainedModel) -> str:
    """Name of the cache argument: transformers renamed `past_key_values` to `cache` in 5.24."""
    return _cache_argument(type(model))


@functools.cache
def _cache_argument(kind: type[PreTrainedModel]) -> str:
    names = inspect.signature(inspect.unwrap(kind.forward)).parameters
    return "cache" if "cache" in names else "past_key_values"


@dataclass
class _State:
    """The rows still growing: finished ones leave, so the batch shrinks as answers end."""

    rows: Tensor  # index into the full batch
    cache: DynamicCache
    attention: Tensor | None  # (rows, tokens read so far), None when no prompt is padded
    logits: Tensor  # (rows, V) of the next token


@torch.no_grad()
def rollout(
    model: PreTrainedModel,
    prompt: Tensor,
    prompt_mask: Tensor,
    *,
    group_size: int,
    max_new_tokens: int,
    eos_token_id: int,
    generator: torch.Generator,
    sampling: Sampling | None = None,
    version: int = 0,
    record_routing: bool = False,
    logit_noise: float = 0.0,
) -> Rollout:
    """Sample `group_size` completions of each prompt from `model`, the policy μ.

    Each prompt is read once and its cache repeated for its group; a row that emits the end token
    leaves the batch. `prompt` and `prompt_mask` are (P, S) as `encode_prompts` makes them. On
    the same weights and precision `sampler_logp` equals `completion_logp` up to rounding.
    `logit_noise` σ (nats) makes μ another policy on purpose: fresh N(0, σ²) on every logit before
    a token is drawn, and log μ and the entropy are those of the noised distribution.

    Raises `ValueError` for sizes below one, and NaN logits.
    """
    if group_size < 1 or max_new_tokens < 1:
        raise ValueError(f"group_size={group_size}, max_new_tokens={max_new_tokens}: must be ≥ 1")
    if not 0 <= logit_noise < math.inf:
        raise ValueError(f"logit_noise={logit_noise}: must be ≥ 0 and finite")
    sampling = sampling or Sampling()
    total, device = len(prompt) * group_size, prompt.device
    out = {
        "tokens": torch.zeros(total, max_new_tokens, dtype=torch.long, device=device),
        "mask": torch.zeros(total, max_new_tokens, dtype=torch.bool, device=device),
        "sampler_logp": torch.zeros(total, max_new_tokens, device=device),
        "entropy": torch.zeros(total, max_new_tokens, device=device),
    }
    finished = torch.zeros(total, dtype=torch.bool, device=device)
    kept: list[tuple[Tensor, Tensor]] = []
    with _RouterTap(model, record_routing) as tap:
        owner = torch.arange(len(prompt), device=device).repeat_interleave(group_size)
        state = _prefill(model, prompt, prompt_mask, owner)
        options = sampling.options(state.logits)
        tap.take(None)
        for t in range(max_new_tokens):
            if logit_noise:
                state.logits = _noised(state.logits, logit_noise, generator)
            sample = sample_tokens(state.logits, **options, generator=generator)
            out["tokens"][state.rows, t] = sample.tokens
            out["mask"][state.rows, t] = True
            out["sampler_logp"][state.rows, t] = sample.logp.to(torch.float32)
            out["entropy"][state.rows, t] = entropy(state.logits / sampling.temperature).float()
            kept.append((state.rows, sample.kept))
            ended = sample.tokens == eos_token_id
            finished[state.rows[ended]] = True
            if ended.all() or t + 1 == max_new_tokens:
                break
            _advance(model, state, sample.tokens, ~ended)
            tap.take(state.rows)
        routing = tap.assemble(total, prompt.shape[1], group_size, t)
    return Rollout(
        prompt=prompt.repeat_interleave(group_size, 0),
        prompt_mask=prompt_mask.repeat_interleave(group_size, 0),
        finished=finished,
        version=version,
        sampling=sampling,
        routing=routing,
        kept=_stack_kept(kept, total),
        **{name: tensor[:, : t + 1] for name, tensor in out.items()},
    )


def _noised(logits: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    noise = torch.randn(logits.shape, generator=generator, device=logits.device)
    return logits + sigma * noise.to(logits.dtype)


def _prefill(model, prompt: Tensor, prompt_mask: Tensor, owner: Tensor) -> _State:
    """Read each prompt once; row i goes on from prompt `owner[i]`."""
    cache = DynamicCache(config=model.config)
    attention = None if bool(prompt_mask.all()) else prompt_mask.long()
    logits = _read(model, cache, prompt, attention, logits_to_keep=1)[:, -1]
    cache.batch_select_indices(owner)
    return _State(
        rows=torch.arange(len(owner), device=prompt.device),
        cache=cache,
        attention=None if attention is None else attention[owner],
        logits=logits[owner],
    )


def _read(model, cache, tokens: Tensor, attention: Tensor | None, logits_to_keep: int = 0):
    """Append tokens (rows, n) to the cache; returns their logits (rows, n, V), or the last ones.

    Without padding all rows stand at the same position, which the model counts for itself, once.
    """
    position = None
    if attention is not None:
        position = (attention.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return model(
        tokens,
        attention_mask=attention,
        position_ids=position,
        use_cache=True,
        logits_to_keep=logits_to_keep,
        **{cache_argument(model): cache},
    ).logits


def _feed(model, state: _State, tokens: Tensor) -> Tensor:
    """Go on with tokens (rows, n); returns their logits (rows, n, V)."""
    if state.attention is not None:
        state.attention = torch.cat([state.attention, torch.ones_like(tokens)], 1)
    return _read(model, state.cache, tokens, state.attention)


def _advance(model, state: _State, tokens: Tensor, alive: Tensor) -> None:
    """Feed the sampled tokens of the rows that go on; drop the others from the batch."""
    if not bool(alive.all()):
        keep = alive.nonzero()[:, 0]
        state.cache.batch_select_indices(keep)
        state.rows, tokens = state.rows[keep], tokens[keep]
        if state.attention is not None:
            state.attention = state.attention[keep]
    state.logits = _feed(model, state, tokens[:, None])[:, -1]


class _RouterTap:
    """Collects the expert ids that every router chooses while completions are sampled."""

    def __init__(self, model: PreTrainedModel, active: bool):
        self.modules = tuple(routers(model).values()) if active else ()
        wide = any(len(m.weight) > 256 for m in self.modules)
        self.dtype = torch.int16 if wide else torch.uint8
        self.handles, self.buffer, self.steps = [], [], []

    def __enter__(self) -> _RouterTap:
        self.handles = [m.register_forward_hook(self._hook) for m in self.modules]
        return self

    def __exit__(self, *_) -> None:
        for handle in self.handles:
            handle.remove()

    def _hook(self, module, args, output) -> None:
        self.buffer.append(output[-1])

    def take(self, rows: Tensor | None) -> None:
        """Close one forward pass: its layers become one (tokens, L, k) record."""
        if self.buffer:
            self.steps.append((rows, torch.stack(self.buffer, 1)))
            self.buffer = []

    def assemble(self, total: int, width: int, group_size: int, decoded: int) -> Tensor | None:
        """(B, S + decoded, L, k): the prompt's record repeated, then a column a decoded token."""
        if not self.steps:
            return None
        (_, first), *rest = self.steps
        record = first.new_zeros((total, width + decoded, *first.shape[1:]), dtype=self.dtype)
        first = first.reshape(-1, width, *first.shape[1:]).to(self.dtype)
        record[:, :width] = first.repeat_interleave(group_size, 0)
        for t, (rows, ids) in enumerate(rest):
            record[rows, width + t] = ids.to(self.dtype)
        return record


def _stack_kept(kept: list[tuple[Tensor, Tensor | None]], total: int) -> Tensor | None:
    if kept[0][1] is None:
        return None
    width = max(ids.shape[1] for _, ids in kept)
    out = kept[0][1].new_full((total, len(kept), width), -1)
    for t, (rows, ids) in enumerate(kept):
        out[rows, t, : ids.shape[1]] = ids
    # Padding positions hold token 0; a set that contains it keeps them scorable and masked out.
    out[..., 0] = out[..., 0].clamp(min=0)
    return out


def select_rows(batch: Rollout, rows: Tensor) -> Rollout:
    """Some rows of a rollout, cut to the longest completion among them."""
    width = int(batch.mask[rows].sum(1).max())
    read = batch.prompt.shape[1] + width - 1
    return replace(
        batch,
        prompt=batch.prompt[rows],
        prompt_mask=batch.prompt_mask[rows],
        finished=batch.finished[rows],
        routing=None if batch.routing is None else batch.routing[rows, :read],
        kept=None if batch.kept is None else batch.kept[rows, :width],
        versions=None if batch.versions is None else batch.versions[rows, :width],
        **{
            name: getattr(batch, name)[rows, :width]
            for name in ("tokens", "mask", "sampler_logp", "entropy")
        },
    )


def joined(parts: Sequence[Rollout]) -> Rollout:
    """Rollouts of one sampler and version as one, as wide as the widest of them."""
    if len(parts) == 1:
        return parts[0]
    read = max(p.prompt.shape[1] for p in parts)
    told = max(p.tokens.shape[1] for p in parts)
    before = [read - p.prompt.shape[1] for p in parts]
    after = [told - p.tokens.shape[1] for p in parts]

    def together(name: str, left: Sequence[int], right: Sequence[int], filler: int = 0) -> Tensor:
        sides = zip(parts, left, right, strict=True)
        return torch.cat([_padded(getattr(p, name), a, b, filler) for p, a, b in sides])

    none = [0] * len(parts)
    prompts = {name: together(name, before, none) for name in ("prompt", "prompt_mask")}
    own = ("tokens", "mask", "sampler_logp", "entropy")
    return replace(
        parts[0],
        finished=torch.cat([p.finished for p in parts]),
        routing=None if parts[0].routing is None else together("routing", before, after),
        kept=None if parts[0].kept is None else _joined_kept([p.kept for p in parts], after),
        **prompts,
        **{name: together(name, none, after) for name in own},
    )


def _padded(tensor: Tensor, left: int, right: int, filler: int) -> Tensor:
    """Columns of `filler` on both sides of dimension 1."""
    return pad(tensor, [0, 0] * (tensor.dim() - 2) + [left, right], value=filler)


def _joined_kept(kept: Sequence[Tensor], after: Sequence[int]) -> Tensor:
    wide = max(k.shape[2] for k in kept)
    out = [pad(k, [0, wide - k.shape[2], 0, b], value=-1) for k, b in zip(kept, after, strict=True)]
    out = torch.cat(out)
    out[..., 0] = out[..., 0].clamp(min=0)  # as in _stack_kept
    return out


def micro_batches(batch: Rollout, rows: Tensor, limit: int = 0) -> list[Tensor]:
    """Split `rows` into parts to be differentiated one at a time, at most `limit` each (0 = any).

    Completions whose lengths round up to the same power of two stay together, in their order:
    short ones are not padded to the longest of all, and no part computes twice what it counts.
    """
    parts: dict[int, list[int]] = {}
    for row, length in zip(rows.tolist(), batch.mask[rows].sum(1).tolist(), strict=True):
        parts.setdefault((length - 1).bit_length(), []).append(row)
    return [
        chunk
        for _, part in sorted(parts.items())
        for chunk in torch.tensor(part, device=rows.device).split(limit or len(part))
    ]


def completion_logits(model: PreTrainedModel, batch: Rollout) -> Tensor:
    """Logits (B, T, V) that score each completion token, all in one pass.

    As in sampling, the prompt of adjacent rows is read once and its cache serves them all; the
    gradient flows back through it. Experts that the rollout recorded (`routing`) are used again,
    with gates of the current logits. Values at padding are arbitrary but finite.
    """
    prompts, owner = _distinct_prompts(batch)
    routed = batch.routing is not None
    with replay_routing(model, _record(batch, owner)) if routed else nullcontext():
        state = _prefill(model, prompts.clamp(min=0), prompts >= 0, owner)
        if batch.tokens.shape[1] == 1:
            return state.logits[:, None]
        return torch.cat([state.logits[:, None], _feed(model, state, batch.tokens[:, :-1])], 1)


def _record(batch: Rollout, owner: Tensor) -> list[RoutingRecord]:
    """The record of a rollout in the order in which it is scored: prompts, then completions."""
    known = torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1)  # a last token is never read
    record, width = RoutingRecord.of(batch.routing, known), batch.prompt.shape[1]
    first = torch.cat([owner.new_ones(1), owner.diff()]).nonzero()[:, 0]
    return [record[first, :width], record[:, width:]]


def with_own_routing(model: PreTrainedModel, batch: Rollout) -> Rollout:
    """The rollout with the experts that `model` itself chooses when it scores it (R2)."""
    batch = replace(batch, routing=None)
    with torch.no_grad(), record_routing(model) as recording:
        completion_logits(model, batch)
    (prompts, *completions), (_, owner) = recording.parts, _distinct_prompts(batch)
    record = RoutingRecord.joined([prompts[owner], *completions])
    return replace(batch, routing=record.indices)


def _distinct_prompts(batch: Rollout) -> tuple[Tensor, Tensor]:
    """Prompts (P, S), −1 at padding, without repeats of a neighbour; and the prompt of each row."""
    known = batch.prompt.masked_fill(~batch.prompt_mask, -1)
    return known.unique_consecutive(dim=0, return_inverse=True)


def fed_masks(batch: Rollout) -> tuple[Tensor, Tensor]:
    """Which positions hold a token in the two forwards of `completion_logits`: (P, S), (B, T−1)."""
    prompts, _ = _distinct_prompts(batch)
    return prompts >= 0, batch.mask[:, 1:]


def fed_positions(batch: Rollout) -> Tensor:
    """The same, bool and flat, in the order in which they are fed."""
    return torch.cat([mask.flatten() for mask in fed_masks(batch)])


def completion_logp(model: PreTrainedModel, batch: Rollout) -> Tensor:
    """log π of each completion token (B, T) under `model`, with its gradient.

    The distribution is the one that was sampled from: same temperature, same kept sets; with
    `refilter` the kept sets of the model's own logits, and −inf for a token they do not have.
    Values at padding are arbitrary but finite.
    """
    return completion_scores(model, batch)[1]


def completion_scores(model: PreTrainedModel, batch: Rollout) -> tuple[Tensor, Tensor]:
    """Logits (B, T, V) of `completion_logits` and the log π (B, T) of `completion_logp`."""
    logits = completion_logits(model, batch)
    if batch.refilter:
        again = rerun_filter(logits, batch.tokens, **batch.sampling.options(logits))
        return logits, again.logp.masked_fill(~batch.mask, 0)
    kept, temperature = batch.kept, batch.sampling.temperature
    return logits, masked_log_probs(logits, batch.tokens, kept, temperature)
