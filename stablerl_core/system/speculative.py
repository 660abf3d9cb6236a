"""Speculative rollout: a cheap draft proposes tokens, the policy verifies many in one pass.

Accepting and rejecting by rejection sampling leaves the policy's own distribution unchanged, so
the tokens are the verifier's and so are their log-probabilities. A head that predicts several
tokens ahead (multi-token prediction) is such a draft; here a small model stands in for it.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from .sampling import _check_temperature, sample_tokens


class Verified(NamedTuple):
    """`tokens` (B, k+1): the first `accepted` (B,) of k proposals, then one token of the verifier.

    What stands behind that one is filler. `logp` (B, k+1) is the verifier's log-probability of
    each token, 0 at filler.
    """

    tokens: Tensor
    logp: Tensor
    accepted: Tensor


def draft_acceptance(logits: Tensor, draft_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Probability that a token drawn from the draft q is accepted by the verifier p, exactly.

    α = Σ_a min(p(a), q(a)) = 1 − TV(p, q), over the last dimension of (…, V). Both are sampled
    at `temperature`. (…,) in float32 or better. Raises `ValueError` where shapes differ, and for
    a temperature that is not > 0 and finite. Source: arXiv 2211.17192, Theorem 3.5.
    """
    if logits.shape != draft_logits.shape:
        raise ValueError(
            f"draft_logits has shape {tuple(draft_logits.shape)}, expected that of logits, "
            f"{tuple(logits.shape)}"
        )
    p, q = _log_probs(logits, temperature).exp(), _log_probs(draft_logits, temperature).exp()
    return torch.minimum(p, q).sum(-1)


def verify_draft(
    logits: Tensor,
    draft_logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Verified:
    """Accept or replace k proposals a row so that what comes out was drawn from the verifier.

    Proposal x_i, drawn from q_i, is accepted with probability min(1, p_i(x_i)/q_i(x_i)). The
    first that is not is replaced by a token from max(0, p_i − q_i) / Σ max(0, p_i − q_i), and
    those after it are dropped. If all pass, one more token is drawn from p_{k+1}.

    `logits` (B, k+1, V) are the verifier's behind the last old token and each proposal,
    `draft_logits` (B, k, V) those that `tokens` (B, k) were really drawn from at `temperature`.
    Raises `ValueError` for shapes that disagree, and as `sample_tokens`. Source: arXiv
    2211.17192, Algorithm 1 and Appendix A.1; arXiv 2302.01318, Algorithm 2.
    """
    _check_shapes(logits, draft_logits, tokens)
    logp = _log_probs(logits, temperature)
    p, q = logp.exp().double(), _log_probs(draft_logits, temperature).exp().double()
    uniform = torch.rand(
        tokens.shape, dtype=torch.float64, device=logits.device, generator=generator
    )
    passes = uniform < _acceptance(p[:, :-1], q).gather(-1, tokens[..., None])[..., 0]
    accepted = passes.long().cumprod(-1).sum(-1)
    after = torch.cat([_residual(p[:, :-1], q), p[:, -1:]], 1)
    after = after.gather(1, accepted[:, None, None].expand(-1, 1, after.shape[-1]))[:, 0]
    last = sample_tokens(after.log(), generator=generator).tokens[:, None]
    tokens = torch.cat([tokens, last], 1).scatter(1, accepted[:, None], last)
    logp = logp.gather(-1, tokens[..., None])[..., 0]
    place = torch.arange(tokens.shape[1], device=tokens.device)
    return Verified(tokens, logp.masked_fill(place > accepted[:, None], 0.0), accepted)


def _check_shapes(logits: Tensor, draft_logits: Tensor, tokens: Tensor) -> None:
    b, k = tokens.shape if tokens.dim() == 2 else (-1, -1)
    v = logits.shape[-1]
    if tokens.dim() != 2 or logits.shape != (b, k + 1, v) or draft_logits.shape != (b, k, v):
        raise ValueError(
            f"tokens {tuple(tokens.shape)}, logits {tuple(logits.shape)}, draft_logits "
            f"{tuple(draft_logits.shape)}: expected (B, k), (B, k+1, V) and (B, k, V)"
        )


def _log_probs(logits: Tensor, temperature: float) -> Tensor:
    _check_temperature(temperature)
    scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
    return (scores / temperature).log_softmax(-1)


def _acceptance(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p/q); a token that the draft never draws counts as 1."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p − q), normalised; p where nothing is left, because then nothing is rejected."""
    rest = (p - q).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


@dataclass(frozen=True)
class SpeculativeRollout:
    """B completions drawn from the verifier with the help of a draft.

    `tokens` (B, T), the end token included, with `mask` (B, T); `sampler_logp` (B, T) the
    verifier's log-probability of each token: this is log μ. `draft_logp` (B, T) is the draft's
    of the same tokens: a diagnostic, the log-probability of no policy that sampled.
    `finished` (B,) False where the limit cut the completion. A row took `rounds` (B,) passes of
    the verifier, and `accepted` (B,) of its `examined` (B,) proposals passed; proposals behind a
    rejection or behind the end are not examined.
    """

    tokens: Tensor
    mask: Tensor
    sampler_logp: Tensor
    draft_logp: Tensor
    finished: Tensor
    accepted: Tensor
    examined: Tensor
    rounds: Tensor

    @property
    def acceptance(self) -> float:
        """Share of examined proposals that passed: an estimate of the mean Σ min(p, q)."""
        return int(self.accepted.sum()) / int(self.examined.sum())

    @property
    def tokens_per_pass(self) -> float:
        """Tokens for each pass of the verifier; 1 without a draft, k + 1 at most."""
        return int(self.mask.sum()) / int(self.rounds.sum())


@dataclass
class _Growing:
    """Rows that go on. Both caches hold the same columns; rejected ones are never attended to."""

    rows: Tensor  # index into the full batch
    last: Tensor  # (n,) the newest token, which neither model has read
    attention: Tensor  # (n, columns read) bool, False at padding and at rejected proposals
    length: Tensor  # (n,) tokens so far
    caches: tuple[DynamicCache, DynamicCache]


@torch.no_grad()
def speculative_rollout(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    prompt: Tensor,
    prompt_mask: Tensor,
    *,
    max_new_tokens: int,
    eos_token_id: int,
    generator: torch.Generator,
    proposals: int = 4,
    temperature: float = 1.0,
) -> SpeculativeRollout:
    """Sample one completion of each prompt from `model`, with proposals of `draft`.

    `prompt` and `prompt_mask` (B, S) are padded on the left; repeat a prompt for a group. In a
    round the draft proposes `proposals` tokens one by one and the model reads them all at once.
    The completions are those of `model` at `temperature` in distribution, whatever the draft is;
    a bad draft only costs time. A routing record taken meanwhile has the columns of rejected
    proposals too.

    Raises `ValueError` for sizes below one, another vocabulary, padding on the right, and a model
    with a sliding window, which would count rejected columns.
    """
    _check_rollout(model, draft, prompt, prompt_mask, max_new_tokens, proposals)
    out = _empty(*prompt.shape[:1], max_new_tokens, prompt.device)
    state = _begin(model, draft, prompt, prompt_mask)
    while len(state.rows):
        read, draft_logits = _propose(draft, state, proposals, temperature, generator)
        logits = _read(model, state.caches[0], read, _longer(state.attention, read))
        drawn = (draft_logits[:, :-1], read[:, 1:])
        verified = verify_draft(logits, *drawn, temperature=temperature, generator=generator)
        chosen = verified.tokens[..., None]
        draft_logp = _log_probs(draft_logits, temperature).gather(-1, chosen)[..., 0]
        counted = _write(out, state, verified, draft_logp, eos_token_id)
        ended = (counted & (verified.tokens == eos_token_id)).any(1)
        out["finished"][state.rows[ended]] = True
        _go_on(state, verified, ~ended & (state.length < max_new_tokens))
    width = int(out["mask"].sum(1).max())
    cut = {name: x[:, :width] if x.dim() == 2 else x for name, x in out.items()}
    return SpeculativeRollout(**cut)


def _check_rollout(model, draft, prompt, prompt_mask, max_new_tokens, proposals) -> None:
    if max_new_tokens < 1 or proposals < 1:
        raise ValueError(f"max_new_tokens={max_new_tokens}, proposals={proposals}: must be ≥ 1")
    ours, theirs = (m.config.vocab_size for m in (model, draft))
    if ours != theirs:
        raise ValueError(f"draft has {theirs} tokens, the model {ours}: they must share them")
    if (
        prompt.numel() == 0
        or prompt_mask.shape != prompt.shape
        or not bool(prompt_mask[:, -1].all())
    ):
        raise ValueError(
            f"prompt {tuple(prompt.shape)} and prompt_mask {tuple(prompt_mask.shape)} must have "
            "the same shape (B, S), with padding on the left"
        )


def _empty(rows: int, limit: int, device: torch.device) -> dict[str, Tensor]:
    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(rows, *shape, dtype=dtype, device=device)

    return {
        "tokens": zeros(limit, dtype=torch.long),
        "mask": zeros(limit, dtype=torch.bool),
        **{name: zeros(limit, dtype=torch.float32) for name in ("sampler_logp", "draft_logp")},
        "finished": zeros(dtype=torch.bool),
        **{name: zeros(dtype=torch.long) for name in ("accepted", "examined", "rounds")},
    }


def _begin(model, draft, prompt: Tensor, prompt_mask: Tensor) -> _Growing:
    """Both models read the prompts, all but the last token."""
    caches = tuple(DynamicCache(config=m.config) for m in (model, draft))
    if any(getattr(layer, "is_sliding", False) for cache in caches for layer in cache.layers):
        raise ValueError("model or draft has a sliding window; use one with full attention")
    read, attention = prompt[:, :-1], prompt_mask[:, :-1].bool()
    if read.shape[1]:
        for reader, cache in zip((model, draft), caches, strict=True):
            _read(reader, cache, read, attention)
    rows = torch.arange(len(prompt), device=prompt.device)
    return _Growing(rows, prompt[:, -1], attention, torch.zeros_like(rows), caches)


def _read(model, cache: DynamicCache, tokens: Tensor, attention: Tensor) -> Tensor:
    """Append tokens (n, m) to the cache; logits (n, m, V). Positions count attended columns."""
    names = inspect.signature(inspect.unwrap(type(model).forward)).parameters
    position = (attention.long().cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
    return model(
        tokens,
        attention_mask=attention.long(),
        position_ids=position,
        use_cache=True,
        # transformers renamed the argument in 5.24
        **{"cache" if "cache" in names else "past_key_values": cache},
    ).logits


def _longer(attention: Tensor, tokens: Tensor) -> Tensor:
    return torch.cat([attention, torch.ones_like(tokens, dtype=torch.bool)], 1)


def _propose(
    draft, state: _Growing, proposals: int, temperature: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """The newest token and k proposals (n, k+1), and the draft's logits behind each of them."""
    tokens, logits, attention = [state.last], [], state.attention
    for step in range(proposals + 1):  # the last proposal is read too: it may be accepted
        attention = _longer(attention, tokens[-1][:, None])
        logits.append(_read(draft, state.caches[1], tokens[-1][:, None], attention)[:, -1])
        if step < proposals:
            sample = sample_tokens(logits[-1], temperature=temperature, generator=generator)
            tokens.append(sample.tokens)
    return torch.stack(tokens, 1), torch.stack(logits, 1)


def _write(
    out: dict[str, Tensor], state: _Growing, verified: Verified, draft_logp: Tensor, end: int
) -> Tensor:
    """Note a round, up to the end token or the limit; returns which (n, k+1) tokens count."""
    tokens, logp, accepted = verified
    place = torch.arange(tokens.shape[1], device=tokens.device)
    at = state.length[:, None] + place
    is_end = (tokens == end).long()
    behind_end = is_end.cumsum(1) - is_end > 0
    counted = (place <= accepted[:, None]) & ~behind_end & (at < out["tokens"].shape[1])
    slot = (state.rows[:, None].expand_as(at)[counted], at[counted])
    out["tokens"][slot], out["mask"][slot] = tokens[counted], True
    out["sampler_logp"][slot] = logp[counted].float()
    out["draft_logp"][slot] = draft_logp[counted].float()
    out["rounds"][state.rows] += 1
    out["examined"][state.rows] += counted[:, :-1].sum(1)
    out["accepted"][state.rows] += (counted & (place < accepted[:, None])).sum(1)
    state.length = state.length + counted.sum(1)
    return counted


def _go_on(state: _Growing, verified: Verified, alive: Tensor) -> None:
    """Hide the rejected columns, and let go of the rows that have ended."""
    tokens, _, accepted = verified
    place = torch.arange(tokens.shape[1], device=tokens.device)
    state.attention = torch.cat([state.attention, place <= accepted[:, None]], 1)
    state.last = tokens.gather(1, accepted[:, None])[:, 0]
    if not bool(alive.all()):
        kept = alive.nonzero()[:, 0]
        for name in ("rows", "last", "attention", "length"):
            setattr(state, name, getattr(state, name)[kept])
        for cache in state.caches:
            cache.batch_select_indices(kept)
