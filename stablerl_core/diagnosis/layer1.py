"""Rules of layer 1, data and rewards: is the target right, and does it give a gradient at all?"""

from __future__ import annotations

import numpy as np

from .evidence import Evidence, number, step_name
from .findings import Finding
from .trends import departure, fall_from_peak, halved, level, monotone, scatter

SMALLER_RATE = "A smaller learning rate or tighter clipping: the target stays as it is."


def constant_reward(e: Evidence) -> Finding | None:
    """Every answer is paid the same, from the first step to the last."""
    values = e.reward.values
    if len(values) < 3 or np.ptp(values) > 1e-9 * max(1.0, abs(values[0])):
        return None
    spread = e.end("reward_std") if e.has("reward_std") else 0.0
    tied = e.end("zero_variance_groups") if e.has("zero_variance_groups") else 1.0
    if spread > 1e-6 or tied < 0.99:
        return None
    known = e.has("reward_std") or e.has("zero_variance_groups") or values[0] == 0
    length = f", while answers are {number(e.end('length'))} tokens long" if e.has("length") else ""
    return Finding(
        *(1, e.reward_name, float(e.reward.steps[0])),
        f"the reward is {number(values[0])} at all {len(values)} logged steps{length}",
        "a reward that no answer changes is a property of the verifier or of the data, and groups "
        "of equal rewards have no advantage",
        "proof" if known and len(values) >= 5 else "strong",
        check_first="Score ten logged completions by hand and with the verifier, in the process "
        "and thread in which training calls it: swallowed exceptions, timeouts off the main "
        "thread, a gold answer that does not parse, a format the template already opened.",
        do_not=SMALLER_RATE,
    )


def dead_part(e: Evidence) -> Finding | None:
    """One reward function of several never pays, although its name says that it could."""
    words = ("format", "acc", "correct", "answer", "parse", "tag", "math", "equation", "think")
    for name, series in e.log.family("reward_part").items():
        values = series.finite().values
        told = any(word in name.lower() for word in words)
        if told and len(values) >= 20 and not np.any(values) and not e.solved:
            return Finding(
                *(1, f"reward_part:{name}", float(series.steps[0])),
                f"{name} is exactly 0 at all {len(values)} steps",
                "a reward function that never pays a single answer does not read what is written",
                "strong",
                check_first=f"Call {name} on a completion that deserves it. If the chat template "
                "opens the tag in the prompt, join prompt and completion before matching.",
                do_not="Weighting it higher: its gradient is zero.",
            )
    return None


def tied_groups(e: Evidence) -> Finding | None:
    """Most groups have equal rewards: no gradient, without the task being solved."""
    series = e.get("zero_variance_groups")
    if len(series) < 3 or level(series, "last") < 0.8 or e.solved or not len(e.reward):
        return None
    if e.fallen and e.fallen[1].after < 0.2 * e.fallen[1].before:
        return None  # after a collapse all groups are tied; that is no cause
    moved = departure(series, up=True, least=0.2)
    end, worst = level(e.reward, "last"), float(e.reward.values.min())
    dead = end <= max(0.02, 0.02 * abs(float(e.reward.values.max()))) and worst >= -1e-9
    kind = "at the lowest reward: too hard, or never accepted" if dead else "some solved, some dead"
    return Finding(
        *(1, "zero_variance_groups", moved.step if moved else float(series.steps[0])),
        f"{level(series, 'last'):.0%} of the groups have equal rewards at the end, {kind}; the "
        f"mean reward is {number(end)}",
        "a group of equal rewards has no advantage, so these rollouts teach nothing",
        "weak" if _nearly_solved(e, moved) and not dead else "strong",
        check_first="The pass rate of each prompt: drop solved and dead ones and refill "
        "(dynamic sampling), or change the difficulty of the data.",
        do_not="A higher learning rate or entropy bonus: the gradient is not small, it is absent.",
    )


def _nearly_solved(e: Evidence, moved) -> bool:
    """Whether the ties are new, or are those of groups that get everything right."""
    late = moved is not None and moved.step > e.steps[0] + 0.6 * e.span
    right = e.end("solved_groups") if e.has("solved_groups") else 0.0
    return late or right > 0.7 * e.end("zero_variance_groups")


def paid_but_wrong(e: Evidence) -> Finding | None:
    """The reward rises while an evaluation, or the part that measures success, falls.

    Where an evaluation halves, a reward that merely holds is enough, if sampler and trainer are
    known to agree: otherwise the reward is that of another policy, and layer 4 says so.
    """
    paid = e.risen or _all_up(e.reward.values) or level(e.reward, "last") >= _ceiling(e)
    first, last = level(e.reward, "first"), level(e.reward, "last")
    holds = last >= first - 0.1 * abs(first) and e.gap_is_healthy
    if not paid and not holds:
        return None
    for name, series in e.heldout.items():
        if not paid and not halved(series):
            continue
        lost = fall_from_peak(series) if len(series) >= 4 else None
        if lost and lost.after < level(series, "first"):
            good, bad = _leaves(series, lost.before)
            # Stale data, too, parts the reward from the evaluation, and is seen in every row.
            return _hack(e, name, series, bad, good if e.gap_is_healthy else bad)
        if len(series) >= 5 and _parted(e, series):
            return _hack(e, name, series, float(series.steps[-1]))
    for name, series in e.log.family("reward_part").items():
        values = series.finite().values
        if not _success(name) or len(values) < 3 or values[0] <= 0:
            continue
        sinks = monotone(series) < -0.5 or (len(values) < 8 and np.all(np.diff(values) < 0))
        if paid and sinks and level(series, "last") <= 0.6 * values[0]:
            return _hack(e, f"reward_part:{name}", series, float(series.steps[1]))
    return None


def _success(name: str) -> bool:
    return any(word in name.lower() for word in ("acc", "correct", "answer", "solve"))


def traded_parts(e: Evidence) -> Finding | None:
    """Of the parts of a reward, the one that measures success pays for the rise of another."""
    if len(e.reward) < 10 or level(e.reward, "last") < 0.8 * level(e.reward, "first"):
        return None
    parts = {n: s.finite() for n, s in e.log.family("reward_part").items()}
    tells = {n: (monotone(s), level(s, "first"), level(s, "last")) for n, s in parts.items()}
    sunk = [n for n, (t, a, b) in tells.items() if _success(n) and t < -0.3 and 0 < b < 0.7 * a]
    for name in sunk:
        lost = tells[name][1] - tells[name][2]
        rose = [n for n, (t, a, b) in tells.items() if t > 0.3 and b - a > 0.5 * lost]
        if rose:
            return _hack(e, f"reward_part:{name}", parts[name], float(parts[name].steps[1]))
    return None


def _ceiling(e: Evidence) -> float:
    """What a reward must reach to be called high: 95 % of its largest value ever logged."""
    return 0.95 * float(e.reward.values.max()) if len(e.reward) else np.inf


def _leaves(series, peak: float) -> tuple[float, float]:
    """The last step at which an evaluation reached nine tenths of its peak, and the one after."""
    last = int(np.flatnonzero(series.values >= 0.9 * peak)[-1])
    return float(series.steps[last]), float(series.steps[min(last + 1, len(series) - 1)])


def _parted(e: Evidence, series) -> bool:
    """Reward and evaluation, alike at the start, are apart at the end."""
    begun = abs(level(e.reward, "first") - level(series, "first"))
    ended = level(e.reward, "last") - level(series, "last")
    alike = begun < 0.5 * max(abs(level(series, "first")), 0.05)
    noise = sum(scatter(s.values) / np.sqrt(max(1, len(s) // 5)) for s in (series, e.reward))
    return alike and e.risen and ended > max(0.2, 4 * noise, 2 * begun)


def _all_up(values: np.ndarray) -> bool:
    return 3 <= len(values) < 8 and values[-1] > 1.15 * values[0] > 0


def _hack(e: Evidence, name: str, series, step: float, earliest: float | None = None) -> Finding:
    first, last = level(e.reward, "first"), level(e.reward, "last")
    return Finding(
        *(1, name, step),
        f"the reward {'rises' if last > first else 'goes'} from {number(first)} to "
        f"{number(last)} while {name.split(':')[-1]} goes from "
        f"{number(level(series, 'first'))} to {number(level(series, 'last'))}",
        "what is paid and what is wanted move apart: the reward is being bought",
        "strong",
        check_first="Read the best-paid completions of the last steps, and score them with an "
        "independent strict verifier.",
        do_not="A KL penalty, clipping or a lower rate: they delay the hack and keep the target.",
        earliest=earliest,
    )


def cut_prompts(e: Evidence) -> Finding | None:
    """Prompts are cut before the policy sees them."""
    share = e.get("prompt_truncated")
    if not len(share) or np.median(share.values) < 0.05:
        return None
    return Finding(
        *(1, "prompt_truncated", float(share.steps[0])),
        f"{np.median(share.values):.0%} of the prompts are cut at the prompt limit",
        "a policy cannot follow instructions it does not get",
        "proof" if np.median(share.values) > 0.5 else "strong",
        check_first="The longest prompts in tokens against the limit; filter or raise it.",
        do_not="Changing the reward for the behaviour that the missing text would have asked for.",
    )


def group_of_one(e: Evidence) -> Finding | None:
    """The spread within groups is NaN while rewards are numbers: one completion a group."""
    spread, reward = e.raw("reward_std"), e.raw(e.reward_name or "reward")
    broken = spread.steps[~np.isfinite(spread.values)]
    if not len(broken) or not len(reward) or not np.isfinite(reward.values[0]):
        return None
    if broken[0] > spread.steps[0]:
        return None
    return Finding(
        *(1, "reward_std", float(broken[0])),
        f"the spread of rewards is NaN at {step_name(broken[0])} while the reward is "
        f"{number(reward.values[0])}",
        "a standard deviation of one value is 0/0: each group holds a single completion",
        "proof",
        check_first="The number of completions a prompt, and how groups are built after filtering.",
        do_not="nan_to_num or dropping the step: every advantage is still missing.",
    )


def lost_groups(e: Evidence) -> Finding | None:
    """Advantages that equal rewards, or that vanish although rewards differ: grouping is wrong."""
    mean, reward = e.get("advantage_mean"), e.reward
    if len(mean) >= 5 and len(reward) >= 5:
        shared = np.intersect1d(mean.steps, reward.steps)
        a = mean.values[np.isin(mean.steps, shared)]
        r = reward.values[np.isin(reward.steps, shared)]
        if np.median(np.abs(r)) > 0.05 and np.mean(np.abs(a - r) < 0.02 * np.abs(r)) > 0.8:
            return _grouping(e, "advantage_mean", mean, "the mean advantage is the mean reward")
    low, high = e.get("advantage_min"), e.get("advantage_max")
    spread = e.get("reward_std")
    if len(low) >= 2 and len(high) >= 2 and len(reward):
        end = float(np.median(reward.values))
        inside = 0.02 < end < 0.98 and not e.solved
        if not np.any(low.values) and not np.any(high.values) and (inside or np.any(spread.values)):
            return _grouping(
                e, "advantage_max", high, f"all advantages are 0 at a mean reward of {number(end)}"
            )
    return None


def _grouping(e: Evidence, name: str, series, seen: str) -> Finding:
    return Finding(
        *(1, name, float(series.steps[0])),
        seen,
        "within a group of different rewards, advantages sum to 0 and are not all 0",
        "strong",
        check_first="The ids by which completions are grouped: one id a prompt, shared by all its "
        "completions, and at least two of them.",
        do_not="Another advantage normalisation: the groups themselves are wrong.",
    )


def cut_answers(e: Evidence) -> Finding | None:
    """From the first step nearly all answers are cut at the limit, and none is paid."""
    cut = e.get("truncated")
    if len(cut) < 3 or level(cut, "first") < 0.9 or not len(e.reward):
        return None
    if level(e.reward, "first") > 0.05 or e.rising:
        return None
    return Finding(
        *(1, "truncated", float(cut.steps[0])),
        f"{level(cut, 'first'):.0%} of the answers are cut at the token limit from the start, "
        f"with a mean reward of {number(level(e.reward, 'first'))}",
        "an answer that cannot end cannot be right",
        "strong",
        check_first="The token limit against the length of right answers, and the stop token.",
        do_not="A length penalty before the limit is right.",
    )
