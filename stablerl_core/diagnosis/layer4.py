"""Rules of layer 4, the training system: did the log-probabilities come from the sampler?"""

from __future__ import annotations

import numpy as np

from .evidence import GAP_LIMITS, Evidence, number, step_name
from .findings import Finding
from .trends import departure, level, monotone, period, scatter, spikes

HIDES = (
    "Clipping, a lower learning rate or truncated weights alone: they hide how far apart they are."
)
SYNC = (
    "Run a few steps with learning rate 0. If the gap still grows, the sync or the cache is at "
    "fault and no optimizer is; if it stays, compare fingerprints of the weights, tensor by tensor."
)


def gap_from_the_start(e: Evidence) -> Finding | None:
    """Sampler and trainer disagree before the first update: another definition of the policy."""
    for name, (look, strong, never) in GAP_LIMITS.items():
        value = abs(e.first(name))
        if value > look:
            return _definition(e, name, value, value > strong, value > never)
    value = e.first("prob_correlation")
    if value < 0.97:
        return _definition(e, "prob_correlation", value, value < 0.95, value < 0.9)
    value = e.first("prob_factor")
    if value > 1.1:
        return _definition(e, "prob_factor", value, value > 1.3, value > 2)
    return None


def _definition(e: Evidence, name: str, value: float, strong: bool, proven: bool) -> Finding:
    start = float(e.get(name).steps[0])
    return Finding(
        *(4, name, start),
        f"{name} is {number(value)} at {step_name(start)}",
        "in public logs two engines with the same bf16 weights differ by 0.01 to 0.02 nats; this "
        "is there before any update, so no update caused it",
        "proof" if proven else "strong" if strong or e.fallen else "weak",
        check_first="One prompt, the same weights, both engines: temperature and top-p in the "
        "returned log-probabilities, template and special tokens, precision, kernels (RoPE, "
        "attention sinks, fused MoE), then the first layer that differs.",
        do_not=HIDES,
    )


def gap_grows(e: Evidence) -> Finding | None:
    """Sampler and trainer move apart while training goes on."""
    floors = {"logp_gap": 0.02, "mismatch_kl": 0.004, "mismatch_k1": 0.004, "prob_gap": 0.008}
    floors |= {"mismatch_js": 0.002, "log_perplexity_gap": 0.02, "mismatch_k2": 0.004}
    for name, floor in floors.items():
        series = e.get(name)
        moved = departure(series, up=True, least=floor / 2, factor=2.0)
        if moved and level(series, "last") > floor and (len(series) < 6 or monotone(series) > 0.3):
            return _growth(e, name, moved, "prob_gap" in name or moved.factor > 2.5)
    lost = departure(e.get("prob_correlation"), up=False, least=0.03, noises=4.0)
    if lost and lost.after < 0.97:
        return _growth(e, "prob_correlation", lost, lost.after < 0.93)
    moved = departure(e.get("prob_factor"), up=True, least=0.05, factor=1.05)
    return _growth(e, "prob_factor", moved, moved.after > 1.2) if moved else None


def _growth(e: Evidence, name: str, moved, clear: bool) -> Finding:
    loud = departure(e.get("entropy"), up=True, least=0.3, factor=1.5)
    later = loud is not None and loud.step < moved.step
    return Finding(
        *(4, name, moved.step),
        f"{name} goes from {number(moved.before)} to {number(moved.after)}",
        "with a working sync every step starts again at the floor of precision; a gap that grows "
        "keeps something from the steps before" + ("; entropy rose first" if later else ""),
        "strong" if clear and not later else "weak",
        check_first=SYNC,
        do_not=HIDES,
    )


def sawtooth(e: Evidence) -> Finding | None:
    """The gap rises and drops back at a fixed interval: that of the weight sync."""
    for name in ("logp_gap", "mismatch_kl", "prob_gap", "kl_step"):
        series = e.get(name)
        lag = period(series)
        if lag is None:
            continue
        low, high = np.quantile(series.values, [0.1, 0.9])
        if high > max(3 * abs(low), 0.01):
            return Finding(
                *(4, name, float(series.steps[0])),
                f"{name} swings between {number(low)} and {number(high)} every {lag} rows",
                "policies drift; only a sync brings the two back together at one stroke",
                "strong",
                check_first=f"The interval of the weight sync: is it {lag} steps, and does the "
                "loss know the sampler's log-probabilities?",
                do_not=HIDES,
            )
    return None


def stale_spikes(e: Evidence) -> Finding | None:
    """KL jumps by orders of magnitude for single steps and is back in the next."""
    series = e.get("kl_ref")
    found = spikes(series, 300.0, 3.0)
    calm = len(series) >= 8 and float(np.median(np.abs(series.values))) < 0.1
    if len(found) < 2 or not calm:
        return None
    return Finding(
        *(4, "kl_ref", float(found.steps[0])),
        f"KL is {', '.join(number(v) for v in found.values[:4])} at steps "
        f"{', '.join(f'{s:g}' for s in found.steps[:4])} and "
        f"{number(float(np.median(series.values)))} in between",
        "no policy runs so far in one step and comes back in the next: those tokens were drawn by "
        "other weights",
        "strong",
        check_first="How often weights are pushed to the sampler, against how the steps with "
        "spikes are spaced.",
        do_not="Clamping the KL: the data of those steps stay stale.",
    )


def biased_ratio(e: Evidence) -> Finding | None:
    """The weights π_old/μ do not average to 1: the sampler drew from another distribution."""
    series = e.get("weight_mean")
    if len(series) < 1 or e.gap_is_healthy is not None:
        return None
    off = float(np.median(series.values))
    if 0.85 < off < 1.15 or off <= 0:
        return None
    return Finding(
        *(4, "weight_mean", float(series.steps[0])),
        f"the mean of π_old/μ is {number(off)}",
        "E_μ[π_old/μ] is 1; a constant value below it is the mass that top-p, top-k or a grammar "
        "kept",
        "strong",
        check_first="Truncation and temperature of the sampler against what the trainer scores; "
        "store the kept sets.",
        do_not=HIDES,
    )


def weights_degenerate(e: Evidence) -> Finding | None:
    """Most of a batch is weighted or masked away by the correction."""
    few = departure(e.get("weight_ess"), up=False, least=0.1, factor=1.5)
    if few and few.after < 0.5:
        return _away(e, "weight_ess", few.step, f"the effective sample falls to {few.after:.0%}")
    for name in ("masked_sequences", "masked_tokens", "weight_clip_fraction"):
        grown = departure(e.get(name), up=True, least=0.15, factor=2.0)
        if grown and grown.after > 0.3:
            return _away(e, name, grown.step, f"{name} rises to {grown.after:.0%}")
    return None


def _away(e: Evidence, name: str, step: float, seen: str) -> Finding:
    return Finding(
        *(4, name, step),
        seen,
        "the correction does its work, and says that the data come from another policy",
        "strong" if e.fallen else "weak",
        check_first="What makes the weights so wide: staleness, precision, or length (sequence "
        "weights).",
        do_not="A larger cap.",
    )


def stale(e: Evidence) -> Finding | None:
    """The sampler's weights grow older."""
    series = e.get("staleness")
    grown = departure(series, up=True, least=2.0, factor=2.0)
    if not grown or grown.after < 3:
        return None
    return Finding(
        *(4, "staleness", grown.step),
        f"the data are {number(grown.after)} versions old, {number(grown.before)} at first",
        "a queue that fills faster than it is emptied",
        "strong" if e.fallen else "weak",
        check_first="The backlog between sampler and trainer; cap the age by admission.",
        do_not="Dropping old answers only: the long ones are the old ones.",
    )


def broken_resume(e: Evidence) -> Finding | None:
    """Something jumps exactly where the run was resumed."""
    for step in e.log.restarts:
        for name in ("loss", "grad_norm", "reward", "learning_rate", "entropy", "kl_ref"):
            series = e.get(name)
            before, after = series.values[series.steps < step], series.values[series.steps >= step]
            if len(before) < 5 or len(after) < 3:
                continue
            jump = abs(np.median(after[:3]) - np.median(before[-5:]))
            if jump > max(8 * scatter(before), 0.2 * abs(np.median(before[-5:]))):
                return Finding(
                    *(4, name, float(step)),
                    f"{name} jumps from {number(np.median(before[-5:]))} to "
                    f"{number(np.median(after[:3]))} where the run was resumed",
                    "a resume that restores everything is invisible in the curves",
                    "strong",
                    check_first="Optimizer moments, scheduler, random state, data position and "
                    "the sampler's weights after loading.",
                    do_not="A new warm-up on top: it covers the lost state.",
                )
    return None


def gap_is_healthy(e: Evidence) -> Finding | None:
    """The control: sampler and trainer agree all along."""
    name = e.gap_is_healthy
    if name is None:
        return None
    series = e.get(name)
    return Finding(
        *(4, name, float(series.steps[0])),
        f"{name} stays at {number(float(np.median(series.values)))} over {len(series)} steps",
        "that is the floor of two engines in low precision",
        "clears",
    )
