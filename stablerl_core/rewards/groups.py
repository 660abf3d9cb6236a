"""Groups of completions: who is compared with whom, and which groups have anything to say."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor


def group_rows(ids: Sequence[Hashable]) -> dict[Hashable, list[int]]:
    """Rows of each problem, by the id that the data set gave it, in order of first appearance.

    Two rows of a data set can have the same prompt and different gold answers, and a batch can
    come back in another order than it was sent: neither the text nor the position says whose
    sibling a completion is. Raises `ValueError` where every id occurs once (an id made for each
    completion leaves groups of one, and the advantage is the bare reward) and for a missing id.
    """
    rows: dict[Hashable, list[int]] = {}
    for row, name in enumerate(ids):
        if name is None:
            raise ValueError(f"ids[{row}] is None: give each completion the id of its problem")
        rows.setdefault(name, []).append(row)
    if len(rows) == len(ids) > 1:
        raise ValueError(
            f"all {len(ids)} ids differ, so no completion has a sibling to be compared with: "
            "use the id of the problem, not one of the completion"
        )
    return rows


def in_group_order(ids: Sequence[Hashable]) -> list[int]:
    """Order of the rows that makes siblings adjacent, as `group_advantages` wants them.

    Raises `ValueError` where the groups differ in size: fill them up first (`usable_rows`).
    """
    groups = list(group_rows(ids).values())
    sizes = sorted({len(rows) for rows in groups})
    if len(sizes) > 1:
        raise ValueError(f"groups have from {sizes[0]} to {sizes[-1]} completions; expected one G")
    return [row for rows in groups for row in rows]


@dataclass(frozen=True)
class GroupReport:
    """How many groups have a signal, and why the others have none.

    mixed: rewards differ. Of the groups without variance, `solved` got the highest reward that
    the verifier pays, `dead` the lowest, `tied` one between. `single` groups have one member.
    """

    mixed: int
    solved: int
    dead: int
    tied: int
    single: int

    @property
    def total(self) -> int:
        return self.mixed + self.solved + self.dead + self.tied + self.single

    @property
    def silent(self) -> float:
        """Share of groups that give no gradient."""
        return 1 - self.mixed / self.total


def group_report(
    rewards: Tensor, ids: Sequence[Hashable], *, lowest: float = 0.0, highest: float = 1.0
) -> GroupReport:
    """Count groups by the spread and the level of their rewards (B,), drawn from μ.

    A solved task wants harder problems, a dead one easier: the share of silent groups alone does
    not say which. `lowest` and `highest` are the verifier's levels. Give the verifier's rewards,
    before any penalty: a length penalty gives an all-wrong group a spread that is no signal.
    Raises `ValueError`: rewards not (B,) or not finite, another number of ids.
    """
    values = rewards.flatten().tolist()
    if rewards.shape != (len(ids),) or not all(map(math.isfinite, values)):
        raise ValueError(
            f"rewards of shape {tuple(rewards.shape)} for {len(ids)} ids: expected one finite "
            "number each; leave completions without a reward out (`usable_rows`)"
        )
    kinds = dict.fromkeys(("mixed", "solved", "dead", "tied", "single"), 0)
    for rows in group_rows(ids).values():
        group = [values[row] for row in rows]
        kinds[_kind(group, lowest, highest)] += 1
    return GroupReport(**kinds)


def _kind(group: Sequence[float], lowest: float, highest: float) -> str:
    if len(group) == 1:
        return "single"
    room = 1e-6 * (highest - lowest)
    if max(group) - min(group) > room:
        return "mixed"
    if min(group) >= highest - room:
        return "solved"
    return "dead" if max(group) <= lowest + room else "tied"


@dataclass(frozen=True)
class Usable:
    """Rows to train on after environment failures, and what was left out."""

    rows: list[int]
    failures: int
    dropped_groups: int


def usable_rows(ids: Sequence[Hashable], failed: Sequence[bool], group_size: int) -> Usable:
    """Rows of groups of `group_size` without the completions whose environment failed.

    A sandbox that did not start says nothing about an answer, and a reward of 0 for it would
    teach that the answer is wrong. A group more than half of which is left is filled up by
    repeating its valid rows in turn; any other is dropped (GLM-5, arXiv 2602.15763, agentic RL).
    Raises `ValueError`: lengths differ, a group larger than `group_size`.
    """
    if len(ids) != len(failed):
        raise ValueError(f"failed has {len(failed)} entries for {len(ids)} ids")
    rows, dropped = [], 0
    for name, group in group_rows(ids).items():
        if len(group) > group_size:
            raise ValueError(f"id {name!r} has {len(group)} completions, group_size={group_size}")
        valid = [row for row in group if not failed[row]]
        if 2 * len(valid) <= group_size:
            dropped += 1
            continue
        rows += [valid[i % len(valid)] for i in range(group_size)]
    return Usable(rows, sum(map(bool, failed)), dropped)


def no_signal_chance(pass_rate: float, group_size: int) -> float:
    """Chance that all completions of a group get the same reward, 0 or 1.

        p^G + (1 − p)^G

    `pass_rate` p of one completion drawn from μ; the G are independent.
    Raises `ValueError`: p outside [0, 1], G below 1.
    """
    if not 0 <= pass_rate <= 1:
        raise ValueError(f"pass_rate={pass_rate}: must lie in [0, 1]")
    if group_size < 1:
        raise ValueError(f"group_size={group_size}: must be ≥ 1")
    return pass_rate**group_size + (1 - pass_rate) ** group_size


def group_size_for(pass_rate: float, *, chance: float = 0.9, largest: int = 512) -> int:
    """Smallest group that has a signal with this chance: 1 − p^G − (1 − p)^G ≥ chance.

    Hard and easy problems need large groups, those in the middle small ones. `largest` where
    even that many do not suffice, as for p of 0 or 1 (GLM-4.5, arXiv 2508.06471, samples its
    hardest problems 512 times). Raises `ValueError`: p outside [0, 1], chance outside (0, 1).
    """
    if not 0 < chance < 1:
        raise ValueError(f"chance={chance}: must lie between 0 and 1")
    sizes = range(2, largest)
    fits = (size for size in sizes if no_signal_chance(pass_rate, size) <= 1 - chance)
    return next(fits, largest)


def draws_per_group(pass_rates: Sequence[float], group_size: int) -> float:
    """Groups that dynamic sampling draws for each one that it keeps, on average.

        1 / (1 − mean of p^G + (1 − p)^G over problems)

    Drawn again until the batch is full (DAPO, arXiv 2503.14476, Eq. 11). Infinite where no
    problem can give a signal. Raises `ValueError`: no pass rate, and as `no_signal_chance`.
    """
    if not pass_rates:
        raise ValueError("pass_rates is empty: expected one number a problem")
    silent = fmean(no_signal_chance(p, group_size) for p in pass_rates)
    return math.inf if silent == 1 else 1 / (1 - silent)
