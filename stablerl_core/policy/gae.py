"""Advantages from a critic: generalised advantage estimation and the λ it needs on long answers."""

import torch
from torch import Tensor

from ._checks import at_least_float32, boolean_mask, finite_where, same_shape


def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    lam: float | Tensor,
    gamma: float = 1.0,
) -> Tensor:
    """Advantage of each token by generalised advantage estimation.

        δ_t = r_t + γ V_{t+1} − V_t        Â_t = δ_t + γ λ Â_{t+1}

    rewards: (B,), one a completion, paid at its last counted token; or (B, T), one a token.
    values: (B, T), the critic's V of the prefix before token t, V_{T+1} = 0. mask: bool (B, T).
    lam: λ, one number or (B,), one a sequence (see `length_adaptive_lambda`). Returns (B, T),
    detached, float32 (float64 for float64), 0 where the mask is False.
    "t + 1" is the next *counted* token: padding and tokens that do not count (a tool's answer)
    are stepped over, and what stands there, NaN and rewards included, is not read.

    Who sampled: tokens from π_θ. With γ = λ = 1 the policy gradient is unbiased whatever V is.
    With λ < 1 it is off by E Σ_t s_t Σ_{k≥1} (1 − λ) λ^{k−1} b_{t+k}, s_t the score of token t and
    b = V − V^π the critic's error: for V = 0 a reward k tokens away counts λ^k (.95^100 = .006).

    Decoupled λ (VC-PPO, VAPO): train the critic on λ = 1, `value_targets`, and take a smaller λ
    here. Advantages are not whitened (verl's are; subtract the mean and divide by the std of the
    counted ones if you want that).

    Raises `ValueError`: shapes that do not fit; mask not bool; a counted entry that is not
    finite; lam or gamma outside [0, 1].
    Source: arXiv 1506.02438 Eq. 16; decoupled λ 2503.01491.
    """
    if values.ndim != 2:
        raise ValueError(f"values has shape {tuple(values.shape)}, expected (B, T)")
    same_shape(values=values, mask=mask)
    boolean_mask(mask)
    rewards, values = at_least_float32(rewards=rewards.detach(), values=values.detach())
    values, rewards = finite_where("values", values, mask), _per_token(rewards, mask)
    decay = _decay(lam, gamma, values)
    advantages = torch.zeros_like(values)
    next_value = next_advantage = values.new_zeros(len(values))
    for t in reversed(range(values.shape[1])):
        advantage = rewards[:, t] + gamma * next_value - values[:, t] + decay * next_advantage
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, advantages[:, t])
    return advantages


def value_targets(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """What the critic learns: the discounted return from each token on, that is GAE with λ = 1.

        G_t = r_t + γ G_{t+1}

    rewards: (B,) or (B, T), mask: bool (B, T), as for `gae`. Returns (B, T), detached, 0 where
    the mask is False. Unbiased for V^π whatever the critic says; `gae(…, lam=λ) + values` is the
    λ-return, which is not.

    Raises `ValueError`: as `gae`.
    Source: arXiv 2503.01491 and 2504.05118 (λ_critic = 1).
    """
    nothing = torch.zeros(mask.shape, dtype=rewards.dtype, device=mask.device)
    return gae(rewards, nothing, mask, lam=1.0, gamma=gamma)


def length_adaptive_lambda(lengths: Tensor, alpha: float = 0.05) -> Tensor:
    """VAPO's λ for the policy: the longer the answer, the closer to 1.

        λ = clip(1 − 1 / (alpha · l), 0, 1)

    lengths: (B,), counted tokens of each completion (`mask.sum(-1)`, not the padded length).
    Returns (B,), float32. So that Σ_k λ^k ≈ 1 / (1 − λ) = alpha · l: what a token's advantage
    sums over grows with the answer. It sets a decay; it does not normalise any reward.

    The formula is negative below l = 1/alpha = 20; the clip is ours, the paper names none. One
    more bias comes with it: l is decided by the tokens still to come, so λ is correlated with
    their TD errors, and not even a perfect critic makes the gradient unbiased.
    l = 100 → .8, 1,000 → .98, 16,000 → .99875.

    Raises `ValueError`: lengths not (B,), or negative; alpha not > 0.
    Source: arXiv 2504.05118 (VAPO), length-adaptive GAE.
    """
    if lengths.ndim != 1:
        raise ValueError(
            f"lengths has shape {tuple(lengths.shape)}, expected (B,): pass mask.sum(-1)"
        )
    if (lengths < 0).any():
        raise ValueError(f"lengths has {lengths.min().item()}, expected numbers ≥ 0")
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha!r}, expected a number > 0")
    return (1 - 1 / (alpha * lengths.float())).clamp(0, 1)  # 1 − 1/0 is −inf, clipped to 0


def _per_token(rewards: Tensor, mask: Tensor) -> Tensor:
    """Rewards (B, T) with 0 where the mask is False; (B,) goes to the last counted token."""
    if rewards.shape == mask.shape[:1]:
        rewards = finite_where("rewards", rewards, mask.any(-1))
        still_to_come = mask.flip(-1).cumsum(-1).flip(-1)  # counted tokens from t on
        last = mask & (still_to_come == 1)
        return torch.where(last, rewards[:, None], torch.zeros_like(rewards)[:, None])
    if rewards.shape != mask.shape:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}, expected ({mask.shape[0]},) or "
            f"{tuple(mask.shape)}, from mask"
        )
    return finite_where("rewards", rewards, mask)


def _decay(lam: float | Tensor, gamma: float, values: Tensor) -> float | Tensor:
    """γ λ, one number or (B,)."""
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma!r}, expected a number in [0, 1]")
    if isinstance(lam, Tensor):
        if lam.shape not in ((), values.shape[:1]):
            raise ValueError(
                f"lam has shape {tuple(lam.shape)}, expected one number or ({values.shape[0]},), "
                "one λ a sequence"
            )
        lam = lam.detach().to(values)
        if not ((lam >= 0) & (lam <= 1)).all():
            raise ValueError(f"lam has {lam.tolist()}, expected numbers in [0, 1]")
    elif not 0 <= lam <= 1:
        raise ValueError(f"lam is {lam!r}, expected a number in [0, 1]")
    return gamma * lam
