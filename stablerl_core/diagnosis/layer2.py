"""Rules of layer 2, policy change: how fast does the policy move, and where to?"""

from __future__ import annotations

import numpy as np

from .evidence import Evidence, number, step_name
from .findings import Finding
from .log import Series
from .trends import Departure, departure, level


def kl_to_reference(e: Evidence) -> Finding | None:
    """The policy runs away from its reference, far beyond where it was useful."""
    series = e.get("kl_ref")
    moved = departure(series, up=True, least=0.05, factor=4.0)
    after = max(moved.after, level(series, "last")) if moved else 0.0
    if after < 0.3:
        return None
    return Finding(
        *(2, "kl_ref", moved.step),
        f"KL to the reference leaves {number(moved.before)} and reaches {number(after)} nats a "
        f"token",
        "0.3 nats on every token is another policy; this book's healthy runs stand at 0.1 to 0.2",
        "strong" if after > 1 or e.fallen else "weak",
        check_first="The learning rate, the number of updates a rollout, and the KL coefficient "
        "with its estimator (k3 and k1 as a loss have the wrong gradient).",
        do_not="Changing the reward: it is judged on a policy that no longer speaks the language.",
    )


def kl_from_the_start(e: Evidence) -> Finding | None:
    """KL to the reference is not zero although policy and reference are the same weights."""
    series = e.get("kl_ref")
    if len(series) < 2 or series.steps[0] > 2 or abs(series.values[0]) < 0.1:
        return None
    later = level(series, "last")
    if abs(series.values[0]) > 3 * abs(np.median(series.values)):
        return None  # one odd first row
    return Finding(
        *(2, "kl_ref", float(series.steps[0])),
        f"KL to the reference is {number(series.values[0])} nats a token at "
        f"{step_name(series.steps[0])} and {number(later)} at the end",
        "before the first update policy and reference are the same weights: KL is 0 up to rounding",
        "strong" if abs(series.values[0]) > 1 else "weak",
        check_first="Dropout in the scored forward pass, another template or precision for the "
        "reference, and whether the run resumed from a checkpoint.",
        do_not="A smaller KL coefficient: the penalty pulls towards noise.",
    )


def kl_of_a_step(e: Evidence) -> Finding | None:
    """Single updates move the policy by more than their trust region can mean."""
    series = e.get("kl_step")
    if len(series) < 3:
        return None
    moved = departure(series, up=True, least=0.02, factor=5.0)
    large = level(series, "last")
    if not moved and abs(level(series, "first")) < 0.05:
        return None
    start = moved.step if moved else float(series.steps[0])
    peak = moved.after if moved else max(level(series, "first"), large)
    if peak < 0.03:
        return None
    return Finding(
        *(2, "kl_step", start),
        f"one step moves the policy by {number(peak)} nats a token from {step_name(start)} on",
        "a step of this book's healthy runs moves it by 0.002 to 0.03, and their learning rate is "
        "high",
        "strong" if e.fallen or (peak > 0.08 and not e.risen) else "weak",
        check_first="The learning rate and the updates a rollout: halve one of them.",
        do_not="A wider clip.",
    )


def entropy_runs_up(e: Evidence) -> Finding | None:
    """Entropy leaves its baseline upwards: the policy turns into noise."""
    series = e.get("entropy")
    moved = departure(series, up=True, least=0.3, factor=1.5)
    if moved is None and len(series) >= 4:
        moved = _in_and_out(series)
    if not moved:
        return None
    bad = bool(e.fallen or e.shrunk) or moved.after > 3
    return Finding(
        *(2, "entropy", moved.step),
        f"entropy goes from {number(moved.before)} to {number(moved.after)} nats a token",
        "a policy that is being sharpened on a reward does not become more random",
        "strong" if bad else "weak",
        check_first="The entropy bonus (0.005 can be too much), the sign of the loss, the KL term, "
        "and the noise of the gradient (rows of a batch).",
        do_not="A longer answer limit, or a reward for staying short.",
    )


def _in_and_out(series: Series) -> Departure | None:
    """A run-up that is over when the log ends: 1.3 times the baseline, then a collapse."""
    top = int(np.argmax(series.values))
    before, peak = series.values[0], series.values[top]
    grown = before > 0.5 and peak > 1.3 * before and peak - before > 0.3
    if not grown or series.values[-1] > 0.1 * before:
        return None
    return Departure(float(series.steps[top]), float(before), float(peak))


def entropy_dies(e: Evidence) -> Finding | None:
    """Entropy falls to almost nothing before the task is solved."""
    series = e.get("entropy")
    lost = departure(series, up=False, least=0.05, factor=5.0)
    if not lost or e.solved or lost.after > 0.15:
        return None
    flat = not e.rising
    return Finding(
        *(2, "entropy", lost.step),
        f"entropy falls from {number(lost.before)} to {number(lost.after)} nats a token with a "
        f"reward of {number(level(e.reward, 'last'))}",
        "a policy that always says the same explores nothing; at the ceiling of the reward it "
        "would be normal",
        "strong" if flat and (e.fallen or e.shrunk or lost.after < 0.02) else "weak",
        check_first="Updates a rollout, the upper clip (clip-higher), and whether groups still "
        "differ.",
        do_not="A higher sampling temperature alone: sampler and loss then differ.",
    )


def clipped(e: Evidence) -> Finding | None:
    """A large and growing part of the tokens is at the clip."""
    series = e.get("clip_fraction")
    moved = departure(series, up=True, least=0.1, factor=3.0)
    if not moved or moved.after < 0.2:
        return None
    return Finding(
        *(2, "clip_fraction", moved.step),
        f"the clip removes {moved.after:.0%} of the tokens, {moved.before:.0%} at first",
        "more than a fifth of the tokens leave the trust region within one rollout",
        "strong" if e.fallen else "weak",
        check_first="Updates a rollout, the learning rate, and the clip against the scale of this "
        "ratio (sequence ratios need clips of 1e-4).",
        do_not="A wider clip: it lets the ratio go on.",
    )


def ratio_off(e: Evidence) -> Finding | None:
    """The policy ratio is far from 1 on average."""
    series = e.get("ratio_mean")
    if len(series) < 5:
        return None
    off = np.abs(np.log(np.clip(series.values, 1e-9, None)))
    if np.median(off) < 0.2:
        return None
    start = series.steps[int(np.argmax(off > 0.2))]
    return Finding(
        *(2, "ratio_mean", float(start)),
        f"the mean policy ratio is off 1 by a factor of {number(np.exp(np.median(off)))} "
        f"in half of the steps",
        "E[π_θ/π_old] is 1 for tokens that π_old drew",
        "weak" if not e.fallen else "strong",
        check_first="Whose log-probabilities are the denominator, and at which temperature.",
        do_not="A clip: it hides the ratio and keeps the bias.",
    )


def negative_kl(e: Evidence) -> Finding | None:
    """A mean KL that is clearly below zero is no KL."""
    series = e.get("kl_ref")
    if len(series) < 3 or np.median(series.values) > -0.05:
        return None
    return Finding(
        *(2, "kl_ref", float(series.steps[0])),
        f"the mean KL to the reference is {number(float(np.median(series.values)))}",
        "a KL is never negative; its k1 estimate is, where the tokens came from another "
        "distribution than the one that is scored",
        "strong",
        check_first="The sign of the difference, padding in the mean, and top-p, top-k, "
        "temperature or a minimum length that only the sampler knows.",
        do_not="Clamping it at 0.",
    )


def long_weights(e: Evidence) -> Finding | None:
    """Sequence weights vanish although the tokens agree: the product over a long answer."""
    mean = e.get("weight_mean")
    if len(mean) < 1 or np.median(mean.values) > 0.5 or e.gap_is_healthy is None:
        return None
    return Finding(
        *(2, "weight_mean", float(mean.steps[0])),
        f"the mean weight is {number(float(np.median(mean.values)))} while "
        f"{e.gap_is_healthy} is healthy",
        "a product over thousands of tokens is far from 1 even where each factor is near it",
        "strong",
        check_first="Use token weights, or the geometric mean of a sequence.",
        do_not="Repairing the engine: its tokens agree.",
    )
