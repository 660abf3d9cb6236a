"""A score together with everything that produced it, and a comparison that refuses to guess."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields

from .difficulty import Z95, wilson
from .tasks import Problem

SCORINGS = ("mean", "best", "majority")


@dataclass(frozen=True, kw_only=True)
class EvaluationConfig:
    """What decides a score. Nothing has a default: what is not known cannot be compared.

    weights, data: fingerprints (`data_fingerprint`; for weights any hash of the tensors).
    chat_template: the template's text, "" for none. system_prompt: "" for none. prompt_format:
    what is made of a problem before the template, with `{prompt}` in it. bos: how many beginning
    tokens the model reads. eos: ids that end an answer. engine: what computes and samples, with
    its precision. temperature (0 = the likeliest token), top_p, top_k (0 = off), max_new_tokens.
    samples a problem, and `scoring`, how they become one number: their `mean` (pass@1), the
    `best` (pass@k) or the `majority`'s answer. verifier: which one paid.
    Raises `ValueError` with the field, its value, and what was expected.
    """

    weights: str
    data: str
    verifier: str
    chat_template: str
    system_prompt: str
    prompt_format: str
    bos: int
    eos: tuple[int, ...]
    engine: str
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    samples: int
    scoring: str

    def __post_init__(self):
        for name in ("weights", "data", "verifier", "engine"):
            self._require(name, bool(getattr(self, name)), "a name or fingerprint, not empty")
        self._require("prompt_format", "{prompt}" in self.prompt_format, "'{prompt}' in it")
        self._require("bos", self.bos >= 0, "≥ 0")
        self._require("eos", isinstance(self.eos, tuple) and bool(self.eos), "a tuple of ids")
        self._require("temperature", 0 <= self.temperature < math.inf, "≥ 0 and finite")
        self._require("top_p", 0 < self.top_p <= 1, "in (0, 1]")
        self._require("top_k", self.top_k >= 0, "≥ 0, 0 for off")
        for name in ("max_new_tokens", "samples"):
            self._require(name, getattr(self, name) >= 1, "≥ 1")
        self._require("scoring", self.scoring in SCORINGS, f"one of {SCORINGS}")

    def _require(self, name: str, ok: bool, expected: str) -> None:
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)!r}: expected {expected}")


FIELDS = tuple(field.name for field in fields(EvaluationConfig))


class DifferentConfigurations(ValueError):
    """Two scores that nothing can be concluded from; `fields` names what differs."""

    def __init__(self, names: Sequence[str], text: str):
        super().__init__(text)
        self.fields = tuple(names)


@dataclass(frozen=True)
class EvaluationScore:
    """A configuration and one number in [0, 1] for each problem, in the order of the data.

    Raises `ValueError`: no problem, a number outside of [0, 1].
    """

    config: EvaluationConfig
    by_problem: tuple[float, ...]

    def __post_init__(self):
        if not self.by_problem:
            raise ValueError("by_problem is empty: a score needs at least one problem")
        bad = [value for value in self.by_problem if not 0 <= value <= 1]
        if bad:
            raise ValueError(f"by_problem has {bad[0]}: expected numbers from 0 to 1")

    @property
    def mean(self) -> float:
        return math.fsum(self.by_problem) / len(self.by_problem)

    @property
    def interval(self) -> tuple[float, float]:
        """95 % interval over problems like these, under this configuration and no other.

        Wilson's if every number is 0 or 1; else mean ± z s/√n with s the deviation between
        problems, so that samples of one problem do not count as independent (arXiv
        2411.00640). For about 30 problems or more.
        """
        n = len(self.by_problem)
        if set(self.by_problem) <= {0, 1}:
            rate = wilson(math.fsum(self.by_problem), n)
            return rate.low, rate.high
        half = _half_width(self.by_problem)
        return max(0.0, self.mean - half), min(1.0, self.mean + half)

    def report(self) -> str:
        """The score as it should be published: with its interval and every field."""
        low, high = self.interval
        values = asdict(self.config)
        lines = [f"{self.mean:.3f} [{low:.3f}, {high:.3f}] over {len(self.by_problem)} problems"]
        return "\n".join(lines + [f"  {name}: {_short(values[name])}" for name in FIELDS])

    def to_json(self) -> str:
        return json.dumps(asdict(self.config) | {"by_problem": list(self.by_problem)})

    @classmethod
    def from_json(cls, text: str) -> EvaluationScore:
        """Inverse of `to_json`. Raises `ValueError` with the fields that are missing or unknown."""
        try:
            values = json.loads(text)
            numbers = tuple(values.pop("by_problem"))
        except (AttributeError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError("text is no score of `to_json`: it needs by_problem") from error
        missing = [name for name in FIELDS if name not in values]
        unknown = sorted(set(values) - set(FIELDS))
        if missing or unknown:
            told = {"lacks": missing, "has the unknown": unknown}
            wrong = [f"{verb} {', '.join(names)}" for verb, names in told.items() if names]
            raise ValueError(
                f"text {' and '.join(wrong)}: a score is comparable only with all of its "
                "configuration; evaluate again and write down every field"
            )
        return cls(EvaluationConfig(**values | {"eos": tuple(values["eos"])}), numbers)


@dataclass(frozen=True)
class Comparison:
    """a − b over the same problems, with its 95 % interval; `vary` is what the two differ in."""

    difference: float
    low: float
    high: float
    n: int
    vary: str

    @property
    def better(self) -> str | None:
        """`a`, `b`, or None where the interval holds zero: no difference was measurable."""
        return "a" if self.low > 0 else "b" if self.high < 0 else None


def compare_scores(a: EvaluationScore, b: EvaluationScore, *, vary: str = "weights") -> Comparison:
    """Difference of two scores, paired by problem; refused unless only `vary` differs.

        d_i = a_i − b_i,   mean(d) ± z sd(d)/√n

    vary: the one field under test, `weights` for two models; another field for what a setting
    does to the same weights. Raises `DifferentConfigurations` (a `ValueError`) that names each
    other field in which they differ, with both values; `ValueError`: an unknown field, two score
    lengths for one data fingerprint, fewer than two problems. Source: arXiv 2411.00640, paired
    differences.
    """
    if vary not in FIELDS:
        raise ValueError(f"vary={vary!r}: expected one of {', '.join(FIELDS)}")
    names = [name for name in different_fields(a.config, b.config) if name != vary]
    if names:
        raise DifferentConfigurations(names, _refusal(a.config, b.config, names, vary))
    if vary == "data":
        raise ValueError("vary='data': scores on other problems have no pairs; report each alone")
    n = len(a.by_problem)
    if n != len(b.by_problem) or n < 2:
        raise ValueError(
            f"by_problem has {n} and {len(b.by_problem)} numbers: expected the same problems, at "
            "least two"
        )
    differences = [x - y for x, y in zip(a.by_problem, b.by_problem, strict=True)]
    mean, half = math.fsum(differences) / n, _half_width(differences)
    return Comparison(mean, mean - half, mean + half, n, vary)


def different_fields(a: EvaluationConfig, b: EvaluationConfig) -> tuple[str, ...]:
    """Names of the fields in which two configurations differ."""
    return tuple(name for name in FIELDS if getattr(a, name) != getattr(b, name))


def data_fingerprint(problems: Sequence[Problem]) -> str:
    """SHA-256 over prompts and gold answers in their order: pairs need the same order.

    Raises `ValueError` without a problem.
    """
    if not len(problems):
        raise ValueError("problems is empty: there is nothing to score")
    pairs = [[problem.prompt, problem.gold] for problem in problems]
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def _half_width(values: Sequence[float]) -> float:
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return math.inf
    return Z95 * math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (n - 1) / n)


def _refusal(a: EvaluationConfig, b: EvaluationConfig, names: Sequence[str], vary: str) -> str:
    pairs = [f"{name} ({_apart(getattr(a, name), getattr(b, name))})" for name in names]
    return (
        f"these scores differ in more than {vary}: {'; '.join(pairs)}. Evaluate both under one "
        f"configuration"
        + (
            f", or compare with vary={names[0]!r}"
            if len(names) == 1 and a.weights == b.weights and names[0] != "data"
            else ""
        )
    )


def _apart(a: object, b: object) -> str:
    """Two values; of long texts the parts where they begin to differ."""
    if isinstance(a, str) and isinstance(b, str) and max(len(a), len(b)) > 40:
        pairs = zip(a, b, strict=False)
        common = next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
        start = max(0, common - 10)
        a, b = a[start : start + 40], b[start : start + 40]
    return f"{a!r} and {b!r}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…' ({len(str(value))} characters)"
