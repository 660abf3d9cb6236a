"""Exact references: all actions, or all sequences, of a small softmax policy, in float64.

Everything here is a closed form or a finite sum, and nothing imports stablerl_core: a test that
compares with these numbers compares with mathematics.
"""

from collections.abc import Callable, Iterator
from itertools import product

import torch
from torch import Tensor

ACTIONS = 5


def logits(seed: int, *shape: int, spread: float = 1.0) -> Tensor:
    """Reproducible float64 logits, by default (ACTIONS,)."""
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(*(shape or (ACTIONS,)), dtype=torch.float64, generator=generator)


def gradient(f: Callable[[Tensor], Tensor], theta: Tensor) -> Tensor:
    """∇_θ f(θ)."""
    theta = theta.clone().requires_grad_()
    (grad,) = torch.autograd.grad(f(theta), theta)
    return grad


def expected_gradient(loss: Callable[[Tensor], Tensor], theta: Tensor, sampler: Tensor) -> Tensor:
    """E_{a ~ sampler} ∇_θ loss(log π_θ(a)): the sampler's probabilities are constants.

    `loss` maps the log-probabilities of all actions, (V,), to one value an action, (V,).
    """
    return gradient(lambda t: (sampler.detach() * loss(torch.log_softmax(t, -1))).sum(), theta)


def kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log(p/q) for probability vectors."""
    return (p * (p / q).log()).sum()


def grad_reverse_kl(pi: Tensor, ref: Tensor) -> Tensor:
    """∇_θ KL(π_θ ‖ ref) of a softmax, by hand: π ⊙ (log π/ref − KL)."""
    return pi * ((pi / ref).log() - kl(pi, ref))


def grad_forward_kl(pi: Tensor, ref: Tensor) -> Tensor:
    """∇_θ KL(ref ‖ π_θ) of a softmax, by hand: π − ref."""
    return pi - ref


def grad_return(pi: Tensor, rewards: Tensor) -> Tensor:
    """∇_θ E_π[R] of a softmax, by hand: π ⊙ (R − E R)."""
    return pi * (rewards - (pi * rewards).sum())


STEPS, TOKENS, END = 3, 3, 2  # at most three tokens out of {0, 1, END}; END ends a sequence


def all_sequences() -> tuple[Tensor, Tensor]:
    """Tokens (15, 3) and mask (15, 3) of every sequence that the small policy can produce."""
    found = {}
    for tokens in product(range(TOKENS), repeat=STEPS):
        length = tokens.index(END) + 1 if END in tokens else STEPS
        found[tokens[:length]] = length
    padded = [[*tokens] + [0] * (STEPS - len(tokens)) for tokens in found]
    lengths = torch.tensor(list(found.values()))
    return torch.tensor(padded), torch.arange(STEPS) < lengths[:, None]


def sequence_logp(theta: Tensor, tokens: Tensor) -> Tensor:
    """log π_θ of each token, (N, 3), for logits θ (3, 3) that depend on the position."""
    table = torch.log_softmax(theta, -1)
    return table[torch.arange(STEPS), tokens]


def sequence_probabilities(theta: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    """π_θ of each whole sequence, (N,); they sum to one."""
    return torch.where(mask, sequence_logp(theta, tokens), 0.0).sum(-1).exp()


def all_groups(pi: Tensor, group_size: int) -> Iterator[tuple[list[int], float]]:
    """Every ordered group of actions that can be drawn, with its probability."""
    for group in product(range(len(pi)), repeat=group_size):
        yield list(group), pi[list(group)].prod().item()
