"""Weight versions: who may still be sampled, how old each token is, and what a push resets."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ._checks import boolean_mask


def may_admit(number: int, batch_size: int, version: int, max_staleness: int | None) -> bool:
    """Whether completion `number` may be started while the weights have `version`.

        ⌊(N_r − 1) / B⌋ ≤ i + η

    number: N_r ≥ 1, this completion included; it counts all that were ever *admitted*, running
    ones too. Counting finished ones lets every worker start one too many. batch_size: B, in
    completions. version: i, the updates so far. max_staleness: η, None = no cap.
    If batches are filled in the order of admission, completion N_r is trained at version
    ⌊(N_r − 1)/B⌋, so none is older than η. Filled in another order (as they finish, say), the rule
    bounds how many are on their way, (η + 1)·B, and not how old one of them becomes.
    Raises `ValueError` for a number or batch_size below 1, a negative version or max_staleness.
    Source: AReaL, arXiv 2505.24298, staleness control.
    """
    if number < 1 or batch_size < 1 or version < 0:
        raise ValueError(
            f"number={number}, batch_size={batch_size}, version={version}: the first completion "
            "is number 1, a batch has at least 1, versions count from 0"
        )
    if max_staleness is None:
        return True
    if max_staleness < 0:
        raise ValueError(f"max_staleness={max_staleness}: must be ≥ 0 (0 = synchronous) or None")
    return (number - 1) // batch_size <= version + max_staleness


@dataclass
class Admission:
    """AReaL's rule with its count: `admit` when one is started, `release` when one is dropped.

    A completion that is dropped leaves the count. Otherwise it holds a place in a batch that it
    will never fill, and after enough of them nothing is admitted and nothing trained any more.
    """

    batch_size: int
    max_staleness: int | None
    counted: int = 0

    def room(self, version: int) -> float:
        """How many more may be started at this version: (i + η + 1)·B − counted, not below 0."""
        may_admit(1, self.batch_size, version, self.max_staleness)  # refuses bad arguments
        if self.max_staleness is None:
            return math.inf
        return max(0, (version + self.max_staleness + 1) * self.batch_size - self.counted)

    def admit(self, version: int) -> bool:
        """Count one more and return True, or return False if the rule forbids it."""
        allowed = may_admit(self.counted + 1, self.batch_size, version, self.max_staleness)
        self.counted += allowed
        return allowed

    def release(self, dropped: int = 1) -> None:
        """Take back the places of completions that were dropped."""
        if not 0 <= dropped <= self.counted:
            raise ValueError(f"dropped={dropped}: only {self.counted} are counted")
        self.counted -= dropped


def too_old(first_version: int, version: int, max_age: int | None) -> bool:
    """GLM-5's version tag: drop a trajectory if w' − w_0 > τ.

    first_version: w_0, the oldest weights that drew any of its tokens. version: w', the weights
    about to be trained. max_age: τ ≥ 0, None = nothing is dropped. Raises `ValueError` for a
    version from the future or a negative τ. Source: GLM-5, arXiv 2602.15763, asynchronous RL.
    """
    if first_version > version:
        raise ValueError(f"first_version={first_version} is newer than version={version}")
    if max_age is not None and max_age < 0:
        raise ValueError(f"max_age={max_age}: must be ≥ 0, or None to drop nothing")
    return max_age is not None and version - first_version > max_age


def token_staleness(versions: Tensor, mask: Tensor, version: int) -> Tensor:
    """Age of each token in weight versions, (B, T) int64: version − versions, 0 at padding.

    versions: (B, T) integer, the weights that drew each token (`Rollout.versions`). mask: (B, T)
    bool. version: of the weights that are trained. One number a completion is not enough once
    generation was interrupted: its tokens have several.
    Raises `ValueError` for a wrong shape or dtype, or a counted token newer than `version`.
    """
    boolean_mask(mask)
    if versions.shape != mask.shape or versions.is_floating_point() or versions.is_complex():
        raise ValueError(
            f"versions has dtype {versions.dtype} and shape {tuple(versions.shape)}, expected "
            f"integers of shape {tuple(mask.shape)}, the shape of mask"
        )
    age = (version - versions.long()).masked_fill(~mask, 0)
    if (age < 0).any():
        newest = int(versions[mask].max())
        raise ValueError(
            f"versions has a token of version {newest}, but version={version} is trained: "
            "count a version when its weights are pushed, not when they are received"
        )
    return age


def fresh_sequences(versions: Tensor, mask: Tensor, version: int, max_age: int) -> Tensor:
    """(B,) bool: False where the oldest token is more than τ versions old, see `too_old`.

    A sequence without a counted token is fresh. Shapes and errors as in `token_staleness`.
    """
    too_old(version, version, max_age)  # refuses a negative τ
    age = token_staleness(versions, mask, version)
    return (age <= max_age).all(1)


def version_lists(versions: Tensor, mask: Tensor) -> list[list[tuple[int, int]]]:
    """For each sequence its versions w_0 … w_k and how many tokens each drew, in their order.

    Shapes as in `token_staleness`. Raises `ValueError` where versions go backwards: the sampler
    was given older weights, or tokens were stored in the wrong place.
    """
    token_staleness(versions, mask, int(versions.max()) if versions.numel() else 0)
    lists = []
    for row, counted in zip(versions, mask, strict=True):
        found, tokens = row[counted].unique_consecutive(return_counts=True)
        if (found.diff() < 0).any():
            raise ValueError(f"versions of row {len(lists)} go backwards: {found.tolist()}")
        lists.append(list(zip(found.tolist(), tokens.tolist(), strict=True)))
    return lists


@dataclass(frozen=True)
class StalenessReport:
    """How old a batch is, in weight versions.

    mean: over tokens. oldest: mean over sequences of their oldest token. highest: the oldest
    token of all. mixed: share of sequences that more than one version drew. Zeros if the batch
    has no counted token.
    """

    mean: float
    oldest: float
    highest: int
    mixed: float


def staleness_report(versions: Tensor, mask: Tensor, version: int) -> StalenessReport:
    """Summary of `token_staleness`; same arguments and errors."""
    age = token_staleness(versions, mask, version)
    rows = mask.any(1)
    if not rows.any():
        return StalenessReport(0.0, 0.0, 0, 0.0)
    oldest = age.amax(1)[rows]
    newest = age.masked_fill(~mask, torch.iinfo(age.dtype).max).amin(1)[rows]
    return StalenessReport(
        mean=float(age[mask].double().mean()),
        oldest=float(oldest.double().mean()),
        highest=int(oldest.max()),
        mixed=float((oldest != newest).double().mean()),
    )


def reset_optimizer_state(optimizer: torch.optim.Optimizer) -> None:
    """Forget moments and step counts, as GLM-5 does after each push of weights to the sampler.

    Learning rate, betas and the other settings stay; the next step is that of a new optimizer.
    With Adam that step moves every parameter with a gradient by about the learning rate, however
    small the gradient: bias correction makes m̂/√v̂ = ±1. A reset after every single update is
    therefore sign descent; the option is meant for several updates between pushes.
    Raises `ValueError` for `Adagrad`, which makes its state when it is built.
    Source: GLM-5, arXiv 2602.15763, asynchronous RL (every K updates).
    """
    if isinstance(optimizer, torch.optim.Adagrad):
        raise ValueError("optimizer is Adagrad, whose state is made when it is built: build anew")
    optimizer.state.clear()
