"""Completions for an experiment that measures instead of training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..rewards import Problem
from ..training import Rollout, Sampling, rollout
from ..training.rollout import encode_prompts


def completions_of(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    seed: int,
    *,
    group_size: int = 1,
    record_routing: bool = False,
    sampling: Sampling | None = None,
) -> Rollout:
    """`group_size` completions of each problem, drawn from `model` (so it is μ).

    At most 24 tokens each; with its cache, and the experts it chose where `record_routing`.
    `sampling` None is temperature 1 without truncation.
    """
    prompt, mask = encode_prompts(tokenizer, [p.prompt for p in problems], model.device)
    return rollout(
        model,
        prompt,
        mask,
        group_size=group_size,
        max_new_tokens=24,
        eos_token_id=tokenizer.eos_token_id,
        generator=torch.Generator(device=model.device).manual_seed(seed),
        record_routing=record_routing,
        sampling=sampling,
    )
