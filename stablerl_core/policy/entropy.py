"""How undecided the policy still is, what an update does to that, and rules that hold it up."""

from typing import Literal

import torch
from torch import Tensor

from ._checks import at_least_float32, boolean_mask, finite_where, same_shape
from .kl import log_softmax_of

EntropyGradient = Literal["natural", "softmax"]


def entropy(logits: Tensor) -> Tensor:
    """Entropy of the next-token distribution, in nats; nobody has to sample.

        H = −Σ_v π(v) log π(v)

    logits: (..., V), unnormalised. Returns (...), float32 (float64 for float64), with gradient.
    A −inf logit is a token of probability 0 and adds 0 (0·log 0 = 0), in value and gradient.
    H is that of the logits as given: divide by the temperature first if you sampled with one.

    Raises `ValueError`: a row without a finite logit, or with NaN or +inf.
    Source: Shannon 1948; as a training signal arXiv 2505.22617.
    """
    (logits,) = at_least_float32(logits=logits)
    logp = log_softmax_of("logits", logits)
    finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0 · (−inf) would be NaN
    return -(logp.exp() * finite).sum(dim=-1)


def sampled_entropy(logp: Tensor, mask: Tensor) -> Tensor:
    """Estimate the mean entropy a token from the sampled tokens alone, in nats.

        Ĥ = −Σ_t m_t log π_θ(o_t) / Σ_t m_t

    logp: any shape, usually (B, T); mask: bool, the same shape. Returns a scalar, detached,
    float32 (float64 for float64); 0 if no token counts.
    Who sampled: tokens from π_θ itself; otherwise it is a cross-entropy. It is noisier than
    `entropy` by the spread of log π. Detached, because as a bonus it would do nothing: the
    expected gradient of log π_θ(o) under π_θ is 0. Use `entropy` where a gradient is wanted.

    Raises `ValueError`: unequal shapes; mask not bool; a counted entry that is not finite.
    Source: Monte Carlo estimate of Shannon's sum.
    """
    same_shape(logp=logp, mask=mask)
    boolean_mask(mask)
    (logp,) = at_least_float32(logp=logp.detach())
    return -finite_where("logp", logp, mask).sum() / mask.sum().clamp(min=1)


def clip_cov(
    advantages: Tensor,
    logp: Tensor,
    mask: Tensor,
    *,
    ratio: float = 2e-4,
    low: float = 1.0,
    high: float = 5.0,
    clipped: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Clip-Cov: take the gradient from a few tokens that are likely and good, chosen at random.

        c_t = (Â_t − mean Â) (log π_t − mean log π)
        Â_t ← 0  for max(1, ⌊ratio · N⌋) tokens, drawn from those with low < c_t < high

    advantages: (B,) or (B, T). logp: (B, T). mask: bool (B, T), N counted tokens; the means are
    over them. Returns advantages (B, T), detached, 0 where the mask is False. A token with
    advantage 0 still counts in the denominator of the loss, as it does in verl.
    clipped: optional bool (B, T), tokens the ratio clip has already silenced; not chosen again.
    generator: of the choice; None is torch's global one. Fewer candidates than wanted: all go.
    Who sampled: tokens from π_θ, or from π_old shortly before.

    low and high are in nats times advantage: with std-scaled advantages a c_t above 1 is an
    outlier. Below 10,000 counted tokens the default ratio chooses one token, if there is one.

    Raises `ValueError`: shapes that do not fit; masks not bool; a counted entry that is not
    finite; ratio not in (0, 1]; low > high.
    Source: arXiv 2505.22617; defaults as verl's `clip_cov`.
    """
    if not low <= high:
        raise ValueError(f"low is {low!r} and high {high!r}, expected low ≤ high")
    wide, covariance = _covariances(advantages, logp, mask, ratio)
    candidates = mask & (covariance > low) & (covariance < high)
    if clipped is not None:
        same_shape(mask=mask, clipped=clipped)
        if clipped.dtype != torch.bool:
            raise ValueError(f"clipped has dtype {clipped.dtype}, expected torch.bool")
        candidates &= ~clipped
    at = candidates.nonzero()
    wanted = max(1, int(ratio * mask.sum()))
    order = torch.randperm(len(at), generator=generator, device=_device_of(generator, at))
    rows, columns = at[order[:wanted].to(at.device)].T
    wide[rows, columns] = 0
    return wide


def kl_cov(advantages: Tensor, logp: Tensor, mask: Tensor, *, ratio: float = 2e-4) -> Tensor:
    """KL-Cov: the tokens that get a KL penalty, those with the largest covariance term.

        the max(1, ⌊ratio · N⌋) tokens with the largest c_t = (Â_t − mean Â) (log π_t − mean log π)

    advantages: (B,) or (B, T). logp: (B, T). mask: bool (B, T), N counted tokens. Returns bool
    (B, T). The source adds coef · |log π_θ/π_old| to the loss of these tokens: zero at the first
    update of a rollout, and then a pull back to π_old. coef is 1 in verl's function and in public
    scripts, .1 in verl's configuration.
    Who sampled: tokens from π_θ, or from π_old shortly before.

    Raises `ValueError`: shapes that do not fit; mask not bool; a counted entry that is not
    finite; ratio not in (0, 1].
    Source: arXiv 2505.22617; default as verl's `kl_cov`.
    """
    _, covariance = _covariances(advantages, logp, mask, ratio)
    chosen = torch.zeros_like(mask)
    if mask.any():
        wanted = max(1, int(ratio * mask.sum()))
        largest = covariance.masked_fill(~mask, -torch.inf).flatten().topk(wanted).indices
        chosen.view(-1)[largest] = True
    return chosen


def entropy_change(
    logits: Tensor,
    tokens: Tensor,
    advantages: Tensor,
    *,
    step_size: float,
    old_logp: Tensor | None = None,
    clip_low: float | None = None,
    clip_high: float | None = None,
    gradient: EntropyGradient = "natural",
) -> Tensor:
    """First-order change of the entropy at each position, from the update its token asks for.

        natural   ΔH_t = −η w_t Â_t (log π(o_t) + H_t)
        softmax   ΔH_t = −η w_t Â_t (π(o_t) (log π(o_t) + H_t) − Σ_a π(a)² (log π(a) + H_t))

    w = 𝒳 · r with r = π_θ/π_old, and 𝒳 = 1 iff (Â > 0 and r < 1 + clip_high) or (Â < 0 and
    r > 1 − clip_low): a token that the clip has silenced moves no entropy. Without old_logp
    w = 1, without a clip bound that side is open.

    logits: (..., V) at the positions of tokens (...), as sampled from (divided by the
    temperature). advantages, old_logp: (...). step_size: η. Returns (...), nats, detached.

    What it is exact for: a table of logits, one row a position, moved by Δz = η ∇J, J = w Â log
    π(o) — "softmax" — or by the natural gradient Δz = η w Â e_o / π(o), the Fisher inverse of it.
    To first order in η the entropy of that row then moves by ΔH_t. Averaged over tokens drawn
    from π_θ (or from π_old, with old_logp) "natural" is

        ΔH = −η Cov_{a∼π_θ}(log π_θ(a), 𝒳(a) Â(a) + C)   for any C,

    the rule of BAPO and of Cui et al.; ordinary gradients of the logits follow "softmax", the
    same with π 𝒳 (Â − mean) in place of Â. A network shares its parameters between positions and
    Adam rescales them: there both are a prediction of the sign, not of the size.

    Raises `ValueError`: shapes that do not fit; a row of logits that is no distribution; a token
    of probability 0; an advantage or old_logp that is not finite; clip bounds without old_logp.
    Source: arXiv 2510.18927 (entropy-clip rule), 2505.22617 (vanilla and natural gradient).
    """
    if gradient not in ("natural", "softmax"):
        raise ValueError(f"gradient is {gradient!r}, expected 'natural' or 'softmax'")
    same_shape(tokens=tokens, advantages=advantages, old_logp=old_logp)
    logp, token_logp, entropies = _at_tokens(logits, tokens)
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    advantages = finite_where("advantages", advantages.detach().to(logp.dtype), everywhere)
    weight = advantages * _unclipped_ratio(token_logp, advantages, old_logp, clip_low, clip_high)
    effect = token_logp + entropies
    if gradient == "softmax":
        finite = logp.clamp(min=torch.finfo(logp.dtype).min)  # 0² · (−inf) would be NaN
        surprise = (logp.exp() ** 2 * (finite + entropies[..., None])).sum(-1)
        effect = token_logp.exp() * effect - surprise
    return -step_size * weight * effect


def _covariances(
    advantages: Tensor, logp: Tensor, mask: Tensor, ratio: float
) -> tuple[Tensor, Tensor]:
    """Advantages (B, T) and (Â − mean Â)(log π − mean log π), both 0 where the mask is False."""
    if not 0 < ratio <= 1:
        raise ValueError(f"ratio is {ratio!r}, expected a share in (0, 1]")
    if logp.ndim != 2:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, expected (B, T)")
    same_shape(logp=logp, mask=mask)
    boolean_mask(mask)
    if advantages.shape == logp.shape[:1]:
        advantages = advantages[:, None].expand(logp.shape)
    same_shape(logp=logp, advantages=advantages)
    logp, advantages = at_least_float32(logp=logp.detach(), advantages=advantages.detach())
    count = mask.sum().clamp(min=1)
    product = mask.to(logp.dtype)
    for name, x in (("advantages", advantages), ("logp", logp)):
        x = finite_where(name, x, mask)
        product = product * (x - x.sum() / count)
    return finite_where("advantages", advantages, mask), product


def _device_of(generator: torch.Generator | None, like: Tensor) -> torch.device:
    return like.device if generator is None else generator.device


def _at_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log π over the vocabulary (…, V), log π of the token (…) and the entropy (…)."""
    if logits.ndim == 0 or logits.shape[:-1] != tokens.shape:
        raise ValueError(
            f"logits has shape {tuple(logits.shape)}, expected {(*tokens.shape, 'V')}, the shape "
            "of tokens and the vocabulary"
        )
    (logits,) = at_least_float32(logits=logits.detach())
    logp = log_softmax_of("logits", logits)
    token_logp = logp.gather(-1, tokens[..., None])[..., 0]
    everywhere = torch.ones_like(tokens, dtype=torch.bool)
    return logp, finite_where("log π of tokens", token_logp, everywhere), entropy(logits)


def _unclipped_ratio(
    token_logp: Tensor,
    advantages: Tensor,
    old_logp: Tensor | None,
    clip_low: float | None,
    clip_high: float | None,
) -> Tensor:
    """𝒳 · π_θ/π_old, with 𝒳 = 0 where the clip has taken the gradient away."""
    if old_logp is None:
        if clip_low is not None or clip_high is not None:
            raise ValueError("old_logp is missing: clip_low and clip_high bound π_θ/π_old")
        return torch.ones_like(token_logp)
    everywhere = torch.ones_like(token_logp, dtype=torch.bool)
    old_logp = finite_where("old_logp", old_logp.detach().to(token_logp.dtype), everywhere)
    ratio = (token_logp - old_logp).exp()
    silenced = torch.zeros_like(ratio, dtype=torch.bool)
    if clip_high is not None:
        silenced |= (advantages > 0) & (ratio >= 1 + clip_high)
    if clip_low is not None:
        silenced |= (advantages < 0) & (ratio <= 1 - clip_low)
    return ratio.masked_fill(silenced, 0)
