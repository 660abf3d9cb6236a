"""From what a log shows to the layer that broke first."""

from __future__ import annotations

import numpy as np

from ..runlog import RunLog
from . import layer1, layer2, layer3, layer4
from .advice import missing_signals, unanswered
from .evidence import Evidence, number, step_name
from .findings import HEALTHY, INSUFFICIENT, LAYERS, Diagnosis, Finding
from .log import SignalLog, signal_log
from .signals import signal_of
from .trends import level

# In the order of causes: where two begin together, the one that stands first explains the other.
RULES = (
    *(layer1.group_of_one, layer1.cut_prompts, layer1.constant_reward, layer1.lost_groups),
    *(layer3.no_update, layer1.dead_part, layer1.cut_answers),
    *(layer4.gap_from_the_start, layer4.broken_resume, layer4.sawtooth, layer4.gap_grows),
    *(layer4.stale_spikes, layer2.kl_from_the_start, layer2.negative_kl),
    *(layer3.gradient_explodes, layer3.loss_explodes, layer2.kl_of_a_step, layer2.clipped),
    *(layer2.kl_to_reference, layer2.entropy_runs_up, layer1.paid_but_wrong, layer2.entropy_dies),
    *(layer1.traded_parts, layer1.tied_groups, layer2.ratio_off, layer2.long_weights),
    *(layer4.biased_ratio, layer4.stale, layer4.weights_degenerate, layer3.loss_scale_falls),
    *(layer3.nonfinite, layer3.metric_only, layer4.gap_is_healthy),
)


def diagnose(log: RunLog | SignalLog) -> Diagnosis:
    """Name the layer in which a run broke first, or say that it is healthy or cannot be told.

    Each rule compares a signal with the run's own baseline, or with a bound that holds in every
    sound run. The earliest fault is the candidate; what follows it is a consequence, and a fault
    that begins clearly after the outcome fell (two measurements, a tenth of the run) explains
    nothing. Of faults that begin together
    (within 2 % of the run) the one that can cause the other goes first.

    log: our `RunLog`, or what `read_log` returned. Raises `ValueError` for a log without a row.
    """
    log = signal_log(log)
    evidence = Evidence(log)
    if not evidence.rows:
        raise ValueError("log holds no row; a diagnosis needs at least one")
    found = [finding for rule in RULES if (finding := rule(evidence)) is not None]
    faults = [f for f in found if f.layer and f.strength in ("proof", "strong")]
    faults = _in_causal_order(faults, slack=0.02 * evidence.span)
    watch = tuple(f for f in found if f.strength == "weak")
    cleared = tuple(f for f in found if f.strength == "clears")
    harm = _harm(evidence)
    causes = [f for f in faults if _can_cause(f, evidence)]
    given = {"watch": watch, "cleared": cleared, "facts": _facts(log), "log": log}
    given["missing_signals"] = missing_signals(log)
    if causes:
        cause = causes[0]
        carried = [f for f in causes[1:] if f.layer == cause.layer]
        later = [f for f in faults if f is not cause and f not in carried]
        given["consequences"] = tuple(sorted(later + harm, key=lambda f: f.first_step))
        return _named(cause, carried, evidence, given)
    if harm:
        given["consequences"] = tuple(faults)
        reason = (
            "nothing in the log moved before it" if not faults else ("what moved, moved after it")
        )
        return _untold(f"{harm[0].evidence}, and {reason}", tuple(harm), given)
    return _healthy_or_untold(evidence, given)


def _in_causal_order(faults: list[Finding], slack: float) -> list[Finding]:
    """By first step; those within `slack` of the earliest keep the order of the rules."""

    def begin(fault: Finding) -> float:
        return fault.first_step if fault.earliest is None else fault.earliest

    ordered, rest = [], list(faults)
    while rest:
        start = min(map(begin, rest)) + slack
        together = [f for f in rest if begin(f) <= start]
        ordered += together[:1]
        rest = [f for f in rest if f is not together[0]]
    return ordered


def _can_cause(fault: Finding, evidence: Evidence) -> bool:
    if evidence.fallen is None or fault.strength == "proof":
        return True
    steps = evidence.get(fault.signal).steps
    apart = 2 * float(np.median(np.diff(steps))) if len(steps) > 1 else 1.0
    return fault.first_step <= evidence.fallen[1].step + max(apart, 0.1 * evidence.span)


def _harm(evidence: Evidence) -> list[Finding]:
    if evidence.fallen is None:
        return []
    name, fall = evidence.fallen
    told = name.split(":")[-1]
    return [
        Finding(
            *(signal_of(name).layer, name, fall.step),
            f"{told} falls from {number(fall.before)} to {number(fall.after)} at "
            f"{step_name(fall.step)}",
            "the outcome, not a cause",
            "strong",
            harm=True,
        )
    ]


def _named(cause: Finding, carried, evidence: Evidence, given: dict) -> Diagnosis:
    blind = set(unanswered(given["missing_signals"])) - {cause.layer}
    sure = "medium"
    if cause.strength == "proof":
        sure, why = "high", "no sound run can show this"
    elif given["consequences"] and not blind:
        sure, why = "high", "it comes first, other layers are logged, and what follows fits"
    elif blind:
        sure = "low" if 4 in blind and cause.layer in (2, 3) else "medium"
        why = "it comes first in the log, but the log is silent on layer " + " and ".join(
            str(layer) for layer in sorted(blind)
        )
    else:
        why = "it comes first, and every layer is logged"
    return Diagnosis(
        *(f"layer {cause.layer}", cause.layer, sure),
        f"{LAYERS[cause.layer]}: {cause.evidence}; {why}",
        (cause, *carried),
        **given,
    )


def _untold(reason: str, findings: tuple[Finding, ...], given: dict) -> Diagnosis:
    return Diagnosis(INSUFFICIENT, None, "low", reason, findings, **given)


def _healthy_or_untold(evidence: Evidence, given: dict) -> Diagnosis:
    outcome = evidence.reward_name or next(iter(evidence.heldout), None)
    if outcome is None:
        return _untold("the log has neither a reward nor an evaluation", (), given)
    if evidence.rows < 8 and not evidence.solved:
        return _untold(f"{evidence.rows} steps are too few for a baseline", (), given)
    blind = sorted(set(unanswered(given["missing_signals"])) - {1})
    if len(blind) == 3:
        return _untold("only rewards are logged: nothing would show why they moved", (), given)
    if evidence.sinks:
        first, last = level(evidence.reward, "first"), level(evidence.reward, "last")
        return _untold(
            f"the reward drifts from {number(first)} to {number(last)}, too little to call a fall",
            *((), given),
        )
    kind = "the task is solved" if evidence.solved else "no signal left its own baseline for worse"
    sure = "high" if not blind else "medium" if len(blind) == 1 else "low"
    note = f"; not logged: layer {', '.join(map(str, blind))}" if blind else ""
    return Diagnosis(HEALTHY, None, sure, kind + note, **given)


def _facts(log: SignalLog) -> dict[str, object]:
    steps = log.steps
    return {
        "format": log.format,
        "rows": len(steps),
        "first step": float(steps[0]),
        "last step": float(steps[-1]),
        "step counts": log.step_kind,
        "columns used": {m.column: m.signal for m in log.mapping},
        "columns guessed": [m.column for m in log.mapping if m.fuzzy],
        "warnings": list(log.warnings),
    }
