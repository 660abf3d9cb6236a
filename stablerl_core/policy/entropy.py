"""How undecided the policy still is."""

import torch
from torch import Tensor

from ._checks import at_least_float32
from .kl import log_softmax_of


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
