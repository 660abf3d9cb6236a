"""The batch that every objective sees: checked, in float32 or better, 0 where nothing counts."""

from typing import NamedTuple

from torch import Tensor

from ._checks import at_least_float32, boolean_mask, finite_where, same_shape


class TokenBatch(NamedTuple):
    """A batch made safe: float32 or better, all (B, T), 0 where the mask is False."""

    logp: Tensor  # log π_θ, with gradient
    log_ratio: Tensor  # log π_θ/π_old, with gradient
    old_logp: Tensor  # log π_old, detached
    sampler_logp: Tensor  # log μ, detached
    advantages: Tensor  # detached
    mask: Tensor


def token_batch(
    logp: Tensor,
    old_logp: Tensor | None,
    sampler_logp: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
) -> TokenBatch:
    """Check shapes and finiteness, cast, and put 0 where the mask is False.

    old_logp None stands for logp.detach(), sampler_logp None for old_logp.
    """
    if logp.ndim != 2:
        raise ValueError(f"logp has shape {tuple(logp.shape)}, expected (B, T)")
    same_shape(logp=logp, old_logp=old_logp, sampler_logp=sampler_logp, mask=mask)
    boolean_mask(mask)
    if advantages.shape == logp.shape[:1]:
        advantages = advantages[:, None].expand(logp.shape)
    if advantages.shape != logp.shape:
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, expected ({logp.shape[0]},) or "
            f"{tuple(logp.shape)}, from logp: pass advantages.squeeze(1) for (B, 1)"
        )
    logp, old_logp, sampler_logp = at_least_float32(
        logp=logp, old_logp=old_logp, sampler_logp=sampler_logp
    )
    logp = finite_where("logp", logp, mask)
    old_logp = finite_where("old_logp", (logp if old_logp is None else old_logp).detach(), mask)
    drawn = old_logp if sampler_logp is None else sampler_logp.detach()
    drawn = finite_where("sampler_logp", drawn, mask)
    advantages = finite_where("advantages", advantages.detach().to(logp.dtype), mask)
    return TokenBatch(logp, logp - old_logp, old_logp, drawn, advantages, mask)
