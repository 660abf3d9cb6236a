"""Partial rollouts: generation is interrupted after some tokens and goes on with newer weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ..rewards import Problem
from .rollout import Rollout, Sampling, encode_prompts, rollout

Origin = tuple[int, int, int]  # the step that drew the problem, how many it drew, its place


@dataclass
class InFlight:
    """Groups of completions that were begun, G rows each; some rows may have ended already.

    `tokens`, `sampler_logp`, `entropy` and `versions` are (N, limit), valid up to `length` (N,):
    every token keeps the log-probability and the weight version of the policy that drew it, so
    a completion has as many versions as it had interruptions. `problems` and `origins` have one
    entry a group.
    """

    problems: list[Problem]
    origins: list[Origin]
    tokens: Tensor
    sampler_logp: Tensor
    entropy: Tensor
    versions: Tensor
    length: Tensor
    finished: Tensor

    @classmethod
    def begin(
        cls,
        problems: Sequence[Problem],
        origins: Sequence[Origin],
        group_size: int,
        limit: int,
        device: torch.device | str,
    ) -> InFlight:
        """Groups of which nothing has been sampled yet."""
        rows = len(problems) * group_size

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        floats = {name: zeros(limit, dtype=torch.float32) for name in ("sampler_logp", "entropy")}
        whole = {name: zeros(limit) for name in ("tokens", "versions")}
        ended = zeros(dtype=torch.bool)
        return cls(list(problems), list(origins), length=zeros(), finished=ended, **floats, **whole)

    @property
    def done(self) -> Tensor:
        """(N,) bool: rows that ended, or that reached the limit."""
        return self.finished | (self.length == self.tokens.shape[1])

    def tensors(self) -> dict[str, Tensor]:
        """What a checkpoint keeps; `problems` follow from `origins`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _PER_GROUP}

    def plus(self, other: InFlight) -> InFlight:
        """These groups and then those."""
        joined = {k: torch.cat([t, other.tensors()[k]]) for k, t in self.tensors().items()}
        return InFlight(self.problems + other.problems, self.origins + other.origins, **joined)

    def groups(self, chosen: Sequence[int]) -> InFlight:
        """Some of the groups."""
        size = len(self.length) // len(self.problems) if self.problems else 1
        rows = torch.tensor([g * size + i for g in chosen for i in range(size)], dtype=torch.long)
        rows = rows.to(self.length.device)
        return InFlight(
            [self.problems[g] for g in chosen],
            [self.origins[g] for g in chosen],
            **{name: tensor[rows] for name, tensor in self.tensors().items()},
        )

    def split(self) -> tuple[InFlight, InFlight]:
        """The groups whose rows are all done, and the others."""
        ready = self.done.view(len(self.problems), -1).all(1).tolist()
        return (
            self.groups([g for g, is_ready in enumerate(ready) if is_ready]),
            self.groups([g for g, is_ready in enumerate(ready) if not is_ready]),
        )

    def grow(
        self,
        model,
        tokenizer,
        tokens: int,
        generator: torch.Generator,
        temperature: float,
        version: int,
    ) -> None:
        """Sample up to `tokens` more of every row that goes on, from `model` of that version."""
        rows = (~self.done).nonzero()[:, 0]
        prompt, mask = self._prompts(tokenizer)
        prompt, mask = _append(prompt[rows], mask[rows], self.tokens[rows], self.length[rows])
        piece = rollout(
            model,
            prompt,
            mask,
            group_size=1,
            max_new_tokens=tokens,
            eos_token_id=tokenizer.eos_token_id,
            generator=generator,
            sampling=Sampling(temperature),
            version=version,
        )
        at, step = piece.mask.nonzero(as_tuple=True)
        place = (rows[at], self.length[rows[at]] + step)
        for name in ("tokens", "sampler_logp", "entropy"):
            getattr(self, name)[place] = getattr(piece, name)[at, step]
        self.versions[place] = version
        self.length[rows] += piece.mask.sum(1)
        self.finished[rows] = piece.finished

    def rollout(self, tokenizer, temperature: float) -> Rollout:
        """These rows as a rollout; its version is the oldest that drew any of their tokens."""
        width = int(self.length.max())
        mask = torch.arange(width, device=self.length.device) < self.length[:, None]
        prompt, prompt_mask = self._prompts(tokenizer)
        return Rollout(
            prompt=prompt,
            prompt_mask=prompt_mask,
            tokens=self.tokens[:, :width],
            mask=mask,
            sampler_logp=self.sampler_logp[:, :width],
            entropy=self.entropy[:, :width],
            finished=self.finished,
            version=int(self.versions[:, :width][mask].min()),
            sampling=Sampling(temperature),
            versions=self.versions[:, :width],
        )

    def _prompts(self, tokenizer) -> tuple[Tensor, Tensor]:
        size = len(self.length) // len(self.problems)
        texts = [problem.prompt for problem in self.problems]
        prompt, mask = encode_prompts(tokenizer, texts, self.tokens.device)
        return prompt.repeat_interleave(size, 0), mask.repeat_interleave(size, 0)


_PER_GROUP = ("problems", "origins")


def restore(
    tensors: dict[str, Tensor], origins: Sequence[Origin], problem: Callable[[Origin], Problem]
) -> InFlight:
    """The groups of a checkpoint; `problem` draws again what an origin names."""
    origins = [tuple(origin) for origin in origins]
    return InFlight([problem(origin) for origin in origins], origins, **tensors)


def _append(prompt: Tensor, mask: Tensor, tokens: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts (N, S) with the first `length` tokens of (N, T) after them, padded on the left."""
    given = torch.arange(tokens.shape[1], device=length.device) < length[:, None]
    ids, mask = torch.cat([prompt, tokens], 1), torch.cat([mask, given], 1)
    order = mask.long().argsort(dim=1, stable=True)  # False first: what pads moves to the left
    width = int(mask.sum(1).max())
    return ids.gather(1, order)[:, -width:], mask.gather(1, order)[:, -width:]
