"""Rules of layer 3, numerical updates: can the parameters be updated at all?"""

from __future__ import annotations

import numpy as np

from .evidence import Evidence, number, step_name
from .findings import Finding
from .trends import departure, level

UPDATED = ("loss", "policy_loss", "grad_norm")


def nonfinite(e: Evidence) -> Finding | None:
    """A loss or gradient that is no number."""
    found = []
    for name in UPDATED:
        series = e.raw(name)
        bad = ~np.isfinite(series.values)
        if bad.any():
            found.append((float(series.steps[bad][0]), name, int(bad.sum()), len(series)))
    counted = e.get("nonfinite")
    if len(counted) and counted.values.any():
        bad = counted.values > 0
        found.append((float(counted.steps[bad][0]), "nonfinite", int(bad.sum()), len(counted)))
    if not found:
        return None
    step, name, count, rows = min(found)
    rare = count <= max(1, rows // 50) and rows > 20 and not e.fallen and _goes_on(e, step)
    cut = e.at("truncated", step)
    all_cut = " All answers of that step were cut: a mean over no token is 0/0." if cut == 1 else ""
    return Finding(
        *(3, name, step),
        f"{name} is not finite at {step_name(step)} and in {count} of {rows} steps.{all_cut}",
        "one such update makes every parameter NaN unless it is skipped",
        "weak" if rare else "proof",
        check_first="Repeat the step on the same batch: if it repeats, bisect the batch by rows, "
        "then tokens; if not, it is low precision. Then the first module whose output is not "
        "finite.",
        do_not="Gradient clipping, nan_to_num or nanmean: NaN times anything is NaN, and a "
        "mean without it hides it.",
    )


def _goes_on(e: Evidence, step: float) -> bool:
    series = e.raw("grad_norm") if len(e.raw("grad_norm")) else e.raw("loss")
    later = series.values[series.steps > step]
    return bool(len(later)) and bool(np.isfinite(later).mean() > 0.9)


def metric_only(e: Evidence) -> Finding | None:
    """A metric is NaN while loss and gradient are numbers: a fault of the log."""
    if any((~np.isfinite(e.raw(n).values)).any() for n in UPDATED) or not e.has("grad_norm"):
        return None
    for name in ("kl_ref", "clip_fraction", "entropy", "ratio_mean", "kl_step"):
        series = e.raw(name)
        bad = ~np.isfinite(series.values)
        if bad.any():
            return Finding(
                *(0, name, float(series.steps[bad][0])),
                f"{name} is not finite in {int(bad.sum())} of {len(series)} rows while loss and "
                "gradient norm are",
                "a mean over no token is 0/0 in the metric alone",
                "weak",
                check_first="How the metric is averaged over ranks and micro-batches.",
            )
    return None


def no_update(e: Evidence) -> Finding | None:
    """The gradient is exactly zero although rewards differ, or the learning rate is."""
    gradient = e.get("grad_norm")
    rate = e.get("learning_rate")
    if len(rate) >= 5 and not np.any(rate.values):
        return _frozen("learning_rate", rate, "the learning rate is 0 at every step")
    if len(gradient) < 3 or np.any(gradient.values[len(gradient) // 2 :]):
        return None
    zero = gradient.values == 0
    start = float(gradient.steps[len(zero) - int(np.argmin(zero[::-1])) if not zero.all() else 0])
    spread, tied = e.get("reward_std"), e.get("zero_variance_groups")
    differ = (len(spread) and level(spread, "last") > 1e-4) or (
        len(tied) and level(tied, "last") < 0.95
    )
    if not len(spread) and not len(tied):
        during = e.reward.values[e.reward.steps >= start]
        differ = len(during) > 2 and np.ptp(during) > 0
    if not differ:
        return None
    if e.has("trained_tokens") and e.end("trained_tokens") == 0:
        return Finding(
            *(4, "trained_tokens", start),
            "no token enters the loss, with rewards that differ",
            "an empty loss mask gives loss 0 and gradient 0 without an error",
            "proof",
            check_first="The completion ids that the engine returned, and the mask.",
            do_not="A higher learning rate.",
        )
    return _frozen(
        "grad_norm",
        gradient,
        f"the gradient norm is exactly 0 from {step_name(start)} on, while "
        "rewards within groups differ",
        start,
    )


def _frozen(name: str, series, seen: str, start: float | None = None) -> Finding:
    return Finding(
        *(3, name, float(series.steps[0]) if start is None else start),
        seen,
        "advantages that differ have a gradient, however small: the parameters are not updated",
        "proof" if len(series) >= 3 else "strong",
        check_first="requires_grad and the optimizer's parameter groups, the distributed "
        "gradient partition, a detached ratio, and the number of tokens in the loss mask.",
        do_not="A higher learning rate: zero stays zero.",
    )


def gradient_explodes(e: Evidence) -> Finding | None:
    """The gradient norm leaves its baseline by orders of magnitude."""
    series = e.get("grad_norm")
    if not len(series):
        return None
    first = level(series, "first")
    if first > 1e5 and abs(e.first("loss") if e.has("loss") else 0.0) < 100:
        return _explosion(
            series,
            float(series.steps[0]),
            f"is {number(first)} from the start with an ordinary loss",
            "proof",
        )
    moved = departure(series, up=True, least=1e-6, factor=20.0)
    if not moved or moved.after < 1:
        return None
    if e.has("trained_tokens") or e.has("zero_variance_groups"):
        if moved.factor < 100 and _fewer_tokens(e):
            return None
    loss = departure(e.get("loss"), up=True, least=1.0, factor=5.0)
    bad = bool(e.fallen or loss) or moved.factor > 1000
    return _explosion(
        series,
        moved.step,
        f"goes from {number(moved.before)} to {number(moved.after)}",
        "strong" if bad else "weak",
    )


def _fewer_tokens(e: Evidence) -> bool:
    """Whether the loss is averaged over ever fewer tokens or groups, which raises the norm."""
    tokens = departure(e.get("trained_tokens"), up=False, least=1.0, factor=2.0)
    tied = departure(e.get("zero_variance_groups"), up=True, least=0.3)
    return bool(tokens or tied)


def _explosion(series, step: float, seen: str, strength: str) -> Finding:
    return Finding(
        *(3, "grad_norm", step),
        f"the gradient norm {seen} (largest {number(float(series.values.max()))})",
        "a norm that grows by orders of magnitude before reward, KL and entropy move is a fault "
        "of the update, not of the policy",
        strength,
        check_first="The step size and its warm-up, the denominator of the loss (tokens, "
        "micro-batches, accumulation), and the norms by layer.",
        do_not="Only clipping: it sets the length and keeps the direction.",
    )


def loss_explodes(e: Evidence) -> Finding | None:
    """The loss becomes a hundred times as large, as sums in place of means do."""
    series = e.get("loss")
    if len(series) < 2:
        return None
    base = float(np.median(np.abs(series.values[: max(1, len(series) // 10)])))
    big = np.abs(series.values) > max(50.0, 100 * base)
    if not big.any():
        return None
    step = float(series.steps[big][0])
    return Finding(
        *(3, "loss", step),
        f"the loss is {number(float(series.values[big][0]))} at {step_name(step)}, "
        f"{number(base)} at first",
        "a clipped loss on normalised advantages is of order one",
        "strong",
        check_first="Sums over a sequence where a mean belongs: the exponent of the ratio and of "
        "k3, and the denominator of the loss.",
        do_not="A smaller learning rate before the exponent is checked.",
    )


def loss_scale_falls(e: Evidence) -> Finding | None:
    """The fp16 loss scale falls towards 1: gradients overflow again and again."""
    series = e.get("loss_scale")
    if len(series) < 3 or level(series, "last") > 2:
        return None
    return Finding(
        *(3, "loss_scale", float(series.steps[int(np.argmin(series.values))])),
        f"the loss scale falls from {number(series.values[0])} to {number(level(series, 'last'))}",
        "each halving is a skipped update",
        "strong",
        check_first="Which tensor overflows in fp16 (65504).",
        do_not="Fixing the loss scale: the overflow stays.",
    )
