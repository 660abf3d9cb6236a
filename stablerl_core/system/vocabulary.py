"""A vocabulary without its extreme tail, the same one for sampler and trainer."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor


class SafeVocabulary(NamedTuple):
    """`kept` (…, K) int32 ids in ascending order, −1 as filler, and their probability `mass`
    (…): 1 − mass is the total variation between the pruned and the whole distribution."""

    kept: Tensor
    mass: Tensor


def safe_vocabulary(
    logits: Tensor, threshold: float = 1e-3, temperature: float = 1.0
) -> SafeVocabulary:
    """Dynamic vocabulary pruning: the tokens with p ≥ threshold · max p, at every position.

    Tokens far in the tail are where trainer and sampler disagree most (`logit_noise_bound`), and
    where the disagreement of those that get sampled is biased. Without them sampler and trainer
    both renormalise over what is left, and pay with a bias of at most 2 · max|R| · (1 − mass) a
    token in the expected reward.

    The sampler decides: `sample_tokens(…, min_p=threshold)` has this kept set and stores it, or
    call this on its logits. The trainer must not call it again, for its own logits give another
    set, in which the sampled token may be missing; it scores with
    `masked_log_probs(logits, tokens, kept, temperature)`.

    logits: (…, V), computed in float32 or better, detached. Raises `ValueError`: a threshold
    outside [0, 1], a temperature that is not > 0 and finite, a row with NaN, +inf or only −inf.
    Source: arXiv 2512.23087 (min-p style, from its abstract). The paper's threshold could not be
    verified: the default is ours.
    """
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold={threshold}: must lie in [0, 1] (0 keeps all)")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature}: must be > 0 and finite")
    scores = logits.detach().to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    if scores.dim() == 0 or not torch.isfinite(scores.amax(-1)).all():
        raise ValueError("logits must be (…, V), each row without NaN or +inf and not all −inf")
    probs = scores.softmax(-1)
    keep = (probs >= threshold * probs.amax(-1, keepdim=True)) & torch.isfinite(scores)
    width = int(keep.sum(-1).max()) if keep.numel() else 0
    order = keep.int().argsort(dim=-1, descending=True, stable=True)[..., :width]
    kept = order.masked_fill(~keep.gather(-1, order), -1).int()
    return SafeVocabulary(kept, (probs * keep).sum(-1))
