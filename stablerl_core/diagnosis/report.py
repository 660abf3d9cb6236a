"""A diagnosis as text, as a page, and as a figure."""

from __future__ import annotations

import html
from dataclasses import replace

import numpy as np

from ..four_curves import PANELS, STYLE, colour_of, label_of, panel_svg
from .findings import LAYERS, Diagnosis, Finding
from .signals import signal_of

MOST_POINTS = 400
GAPS = ("logp_gap", "mismatch_kl", "prob_gap", "prob_correlation", "prob_factor", "weight_mean")
HEADINGS = {
    "findings": "What carries the verdict",
    "consequences": "What followed",
    "watch": "Worth watching",
    "cleared": "What speaks for a layer",
}


def text(diagnosis: Diagnosis) -> str:
    """The diagnosis for a terminal, 100 columns."""
    lines = [f"verdict     {diagnosis.verdict}"]
    lines[0] += f" ({LAYERS[diagnosis.layer]})" if diagnosis.layer else ""
    lines += [f"confidence  {diagnosis.confidence}", f"because     {diagnosis.reason}"]
    for name, heading in HEADINGS.items():
        part = getattr(diagnosis, name)
        if part:
            lines += ["", heading]
            lines += [line for finding in part for line in _lines(finding)]
    if diagnosis.missing_signals:
        lines += ["", "What this log cannot tell"]
        for missing in diagnosis.missing_signals:
            lines.append(f"  layer {missing['layer']}  {missing['question']}?")
            lines.append(f"           log {missing['signal']}: {missing['how']}")
    facts = diagnosis.facts
    lines += [
        "",
        f"read as {facts['format']}, {facts['rows']} rows, steps "
        f"{facts['first step']:g} to {facts['last step']:g} ({facts['step counts']})",
    ]
    lines += [
        f"guessed: {c} is taken for {facts['columns used'][c]} (--map to change)"
        for c in facts["columns guessed"]
    ]
    lines += [f"note: {warning}" for warning in facts["warnings"]]
    return _printable("\n".join(lines))


def _lines(finding: Finding) -> list[str]:
    where = f"layer {finding.layer}" if finding.layer else "the log"
    out = [f"  {where}  step {finding.first_step:g}  {finding.evidence}"]
    out += [f"           why    {finding.rule}"]
    if finding.check_first:
        out.append(f"           check  {finding.check_first}")
    if finding.do_not:
        out.append(f"           not    {finding.do_not}")
    return out


def _printable(text: str) -> str:
    """Without control characters: a log may hold what a terminal would obey."""
    return "".join(c if c == "\n" or c.isprintable() else "�" for c in text)


def page(diagnosis: Diagnosis) -> str:
    """A self-contained HTML page: verdict, four curves with the events, findings, gaps."""
    shown = html.escape(_printable(f"{diagnosis.verdict}: {diagnosis.reason}"))
    panels = "".join(panel_svg(panel, rows, marks) for panel, rows, marks in _panels(diagnosis))
    parts = "".join(
        f"<h2>{heading}</h2><ol>{''.join(map(_item, getattr(diagnosis, name)))}</ol>"
        for name, heading in HEADINGS.items()
        if getattr(diagnosis, name)
    )
    missing = "".join(
        f"<li>Layer {m['layer']}: {m['question']}? Log <code>{m['signal']}</code>: "
        f"{html.escape(str(m['how']))}</li>"
        for m in diagnosis.missing_signals
    )
    parts += f"<h2>What this log cannot tell</h2><ul>{missing}</ul>" if missing else ""
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width'><title>Diagnosis</title>"
        f"<style>{STYLE}</style><h1>{html.escape(diagnosis.verdict)}</h1>"
        f"<p>{shown}. Confidence: {diagnosis.confidence}.</p>"
        f"<div class='panels'>{panels}</div>{parts}<h2>The file</h2><table>{_table(diagnosis)}"
        "</table></html>"
    )


def _item(finding: Finding) -> str:
    where = f"Layer {finding.layer}" if finding.layer else "The log"
    text = [f"<strong>{where}, step {finding.first_step:g}:</strong> {_safe(finding.evidence)}"]
    text += [f"<br>Why: {_safe(finding.rule)}"]
    text += [f"<br>Check first: {_safe(finding.check_first)}"] if finding.check_first else []
    text += [f"<br>Do not: {_safe(finding.do_not)}"] if finding.do_not else []
    return f"<li>{''.join(text)}</li>"


def _safe(text: object) -> str:
    return html.escape(_printable(str(text)))


def _table(diagnosis: Diagnosis) -> str:
    facts = dict(diagnosis.facts)
    used = facts.pop("columns used")
    facts["columns used"] = ", ".join(f"{column} → {signal}" for column, signal in used.items())
    return "".join(
        f"<tr><th scope='row'>{_safe(k)}</th><td>{_safe(v)}</td></tr>" for k, v in facts.items()
    )


def _panels(diagnosis: Diagnosis):
    """The four panels with what this log has, their rows, and the events of their layer."""
    log = diagnosis.log
    gap = next((name for name in GAPS if name in log), "logp_gap")
    for panel in PANELS:
        if panel.layer == 4:
            panel = replace(panel, left=(gap,), left_label=signal_of(gap).unit)
        if panel.layer == 1 and "reward" not in log and "reward_shaped" in log:
            panel = replace(panel, left=("reward_shaped", "heldout_accuracy"))
        marks = [
            (finding.first_step, _printable(finding.evidence))
            for finding in (*diagnosis.findings, *diagnosis.consequences)
            if finding.layer == panel.layer
        ]
        yield panel, _rows(log, panel.left + panel.right), marks


def _rows(log, names) -> list[dict]:
    """At most `MOST_POINTS` rows: every so manieth step, and never a non-finite one left out."""
    rows: dict[float, dict] = {}
    for name in names:
        series = log.series(name)
        every = max(1, len(series) // MOST_POINTS)
        keep = (np.arange(len(series)) % every == 0) | ~np.isfinite(series.values)
        for step, value in zip(series.steps[keep], series.values[keep], strict=True):
            rows.setdefault(float(step), {"step": float(step)})[name] = float(value)
    return [rows[step] for step in sorted(rows)]


def figure(diagnosis: Diagnosis):
    """The four curves as a matplotlib figure, a vertical line at each event of a layer."""
    import matplotlib.pyplot as plt

    drawn, axes = plt.subplots(2, 2, figsize=(9, 5.5), layout="constrained")
    for axis, (panel, rows, marks) in zip(axes.flat, _panels(diagnosis), strict=True):
        measured = {name for row in rows for name in row}
        sides = [(axis, panel.left)]
        sides += [(axis.twinx(), panel.right)] if measured & set(panel.right) else []
        for side, names in sides:
            for name in names:
                points = [(row["step"], row[name]) for row in rows if name in row]
                if points:
                    style = {"color": colour_of(name), "label": label_of(name), "lw": 1.3}
                    side.plot(*zip(*points, strict=True), **style)
            side.set_ylabel(panel.left_label if side is axis else panel.right_label)
        for step, _ in marks:
            axis.axvline(step, color="black", lw=1, ls="--")
        axis.set_title(f"Layer {panel.layer}: {panel.title}", fontsize=10)
        axis.set_xlabel("step")
        lines = [
            line for side, _ in sides for line in side.get_lines() if line.get_label()[0] != "_"
        ]
        if lines:
            sides[-1][0].legend(handles=lines, fontsize=7, loc="best")
    drawn.suptitle(f"{diagnosis.verdict} (confidence: {diagnosis.confidence})")
    return drawn
