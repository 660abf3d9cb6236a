"""What a diagnosis says: findings, and the verdict over them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

HEALTHY, INSUFFICIENT = "healthy", "insufficient evidence"
LAYERS = {
    1: "data and rewards",
    2: "policy change",
    3: "numerical updates",
    4: "training system",
}


@dataclass(frozen=True)
class Finding:
    """One thing that the log shows.

    layer        1-4, or 0 for what is about the log and not about the training
    signal       the canonical signal that shows it
    first_step   where it begins
    evidence     what was seen: values and steps
    rule         what it was held against, and why that means something
    strength     "proof" (impossible in a sound run), "strong", "weak" (worth watching), or
                 "clears" (speaks for this layer)
    harm         whether it is damage to the outcome, which has its cause elsewhere
    check_first  the next thing to look at
    do_not       what would only hide it
    earliest     where it can have begun at the earliest, if the signal is measured rarely
    """

    layer: int
    signal: str
    first_step: float
    evidence: str
    rule: str
    strength: str
    harm: bool = False
    check_first: str = ""
    do_not: str = ""
    earliest: float | None = None


@dataclass(frozen=True)
class Diagnosis:
    """The verdict on a run log, in causal order.

    verdict          "healthy", "layer 1" … "layer 4", or "insufficient evidence"
    layer            1-4, or None
    confidence       "high", "medium" or "low", and `reason` says why
    findings         those that carry the verdict, the cause first
    consequences     what came later and follows from it
    watch            what is worth watching and is no fault yet
    cleared          what speaks for a layer
    missing_signals  what the log does not hold, the layer it would speak about, how to log it
    """

    verdict: str
    layer: int | None
    confidence: str
    reason: str
    findings: tuple[Finding, ...] = ()
    consequences: tuple[Finding, ...] = ()
    watch: tuple[Finding, ...] = ()
    cleared: tuple[Finding, ...] = ()
    missing_signals: tuple[Mapping[str, object], ...] = ()
    facts: Mapping[str, object] = field(default_factory=dict)
    log: object = field(default=None, repr=False, compare=False)

    @property
    def exit_code(self) -> int:
        """0 healthy · 1 a layer is named · 3 insufficient evidence."""
        return {HEALTHY: 0, INSUFFICIENT: 3}.get(self.verdict, 1)

    def to_json(self) -> str:
        """The diagnosis as JSON text; NaN and infinite steps do not occur."""
        parts = ("findings", "consequences", "watch", "cleared")
        out = {
            "verdict": self.verdict,
            "layer": self.layer,
            "confidence": self.confidence,
            "reason": self.reason,
            **{name: [asdict(f) for f in getattr(self, name)] for name in parts},
            "missing_signals": [dict(m) for m in self.missing_signals],
            "facts": dict(self.facts),
        }
        return json.dumps(out, indent=1, allow_nan=False, ensure_ascii=False)

    def to_text(self) -> str:
        """The diagnosis for a terminal."""
        from .report import text

        return text(self)

    def to_html(self) -> str:
        """The diagnosis as a self-contained page with the four curves, marked at the events."""
        from .report import page

        return page(self)

    def plot(self):
        """The four curves with the events marked, as a matplotlib figure."""
        from .report import figure

        return figure(self)
