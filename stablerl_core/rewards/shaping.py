"""Reward shaping: what is added to "right or wrong", one component at a time.

Each function returns one number a completion, (B,). The trainer adds them with weights
(`DataConfig.shaping`) and logs each by itself, unweighted, as `reward_part:NAME`: a sum that
rises does not say which of its parts does.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .final_text import THINK
from .tasks import final_answer


def overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """DAPO's soft punishment of long answers: 0, then falling to −1 over the last `buffer` tokens.

    0 for |y| ≤ L_max − L_cache; ((L_max − L_cache) − |y|) / L_cache up to L_max; −1 beyond.

    lengths: (B,) tokens. max_length L_max, buffer L_cache: 20 480 and 4 096 in the paper, whose
    rewards are ±1; added to rewards of 0 and 1 the same penalty weighs twice as much. A group of
    equal rewards gets an advantage from it: shape after filtering groups, or know that you did.
    If sampling stops at L_max the last case never happens. Source: 2503.14476, Eq. 13.
    Raises `ValueError`: buffer is not in 1 … max_length.
    """
    _require(1 <= buffer <= max_length, f"buffer={buffer}: expected 1 … max_length={max_length}")
    return ((max_length - buffer - lengths) / buffer).clamp(-1.0, 0.0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """DAPO's other answer: cut completions leave the loss, and the group's mean keeps them.

    mask (B, T) → (B, T), all false in rows where `truncated` (B,). A cut answer is neither right
    nor wrong, but a policy is then never told that it did not end. Source: 2503.14476, §3.4.
    """
    _require(
        truncated.shape == mask.shape[:1],
        f"truncated has shape {tuple(truncated.shape)}: expected one flag a row of mask "
        f"{tuple(mask.shape)}",
    )
    return mask & ~truncated.bool()[:, None]


def cosine_length(
    correct: Tensor,
    lengths: Tensor,
    max_length: int,
    *,
    right: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
) -> Tensor:
    """A reward that falls with length where the answer is right and rises where it is wrong.

    From the first value at length 0 to the second at L_max, along half a cosine:
    r(l) = r_L + ½ (r_0 − r_L)(1 + cos(π l / L_max)); `exceeded`, whatever was answered, from
    L_max on: the cap. It replaces the reward, it is not added to it.

    correct: bool (B,); lengths: (B,) tokens. Source: 2502.03373; the values are quoted from memory
    and could not be checked.
    Raises `ValueError`: shapes that differ, max_length < 1.
    """
    _require(max_length >= 1, f"max_length={max_length}: must be ≥ 1")
    _require(
        correct.shape == lengths.shape,
        f"correct {tuple(correct.shape)} and lengths {tuple(lengths.shape)} differ in shape",
    )
    share = 0.5 * (1 + torch.cos(math.pi * lengths / max_length))
    values = [last + (first - last) * share for first, last in (right, wrong)]
    value = torch.where(correct.bool(), *values)
    return torch.where(lengths >= max_length, torch.full_like(value, exceeded), value)


def format_reward(completion: str, pattern: str = r"#[^#]+", prefill: str = "") -> float:
    """1 iff the whole text has the form `pattern` (a regular expression), else 0.

    prefill: the end of the prompt, where a chat template opened what the form begins with; it is
    joined before matching, or no answer could ever have the form. `THINKING` is the form of
    R1-like templates. Write patterns that cannot backtrack: the text is a policy's.
    """
    return float(re.fullmatch(pattern, prefill + completion, re.DOTALL) is not None)


_INSIDE = r"(?:(?!</?think>).)*"
THINKING = rf"{THINK[0]}{_INSIDE}{THINK[1]}{_INSIDE}"


def syntax_penalty(completion: str, pattern: str = r"(?:#[^#]+)+") -> float:
    """−1 iff the text is not of the language `pattern`, else 0: seed 004's remedy for keywords.

    It forbids some of what a wrong reward pays for. It does not make the reward right.
    """
    return format_reward(completion, pattern) - 1.0


def self_verification_substring(answer: str, gold: str, verification: str) -> float:
    """Seed 002's reward, as printed there: 1, ½ or 0, by looking for words inside words.

    1 if "correct" occurs in the verification and the answer is right; ½ if "incorrect" occurs and
    it is wrong; 0 otherwise. "incorrect" contains "correct", so who calls a right answer incorrect
    gets 1 as well: right answers are paid whatever is said about them. Not in Seed1.5-Thinking's
    report (2504.13914). `self_verification` reads the words; see there for what stays.
    """
    if "correct" in verification and answer == gold:
        return 1.0
    return 0.5 if "incorrect" in verification and answer != gold else 0.0


def self_verification(correct: bool, judged_correct: bool | None) -> float:
    """Seed 002's three levels as they were meant: 1 right and said so, ½ wrong and said so, else 0.

    judged_correct: what the model says of its own answer; None where it says neither.
    A sure ½ can be had by answering wrong on purpose and saying so. Who answers as well as he can
    and says what pays more gets p if he calls it right, ½ (1 − p) if wrong, so with a chance p of
    being right, 0 < p < ½, the best that honest trying earns, max(p, ½ (1 − p)), is less than ½.
    """
    if judged_correct is None or judged_correct != correct:
        return 0.0
    return 1.0 if correct else 0.5


def says_correct(verification: str) -> bool | None:
    """Whether a verification says correct (True) or incorrect (False); None: neither, or both.

    Whole words: "incorrect" is not "correct", and "not correct" is "incorrect".
    """
    words = re.sub(r"\b(?:not|isn't) correct\b", "incorrect", verification.lower())
    found = set(re.findall(r"\b(?:in)?correct\b", words))
    return found == {"correct"} if len(found) == 1 else None


def proof_reward(
    quality: float,
    claimed: float,
    *,
    form: float = 1.0,
    meta: float = 1.0,
    alpha: float = 0.76,
    beta: float = 0.24,
) -> float:
    """DeepSeekMath-V2's reward of a proof with its self-evaluation: R_format (α R_Y + β R_Z).

    R_Y = `quality` is the score s of a *trained verifier*, in {0, ½, 1}; R_Z = R_score R_meta with
    R_score = 1 − |s′ − s|, s′ = `claimed`; `meta` in [0, 1] says whether the faults named are real,
    `form` in {0, 1} whether the format is kept. A wrong proof that says so earns β, a right one
    that says so α + β. Trying and calling it wrong earns α p + β (1 − p), so with α > β nobody
    gains by being wrong on purpose, unlike with `self_verification`'s sure ½.

    Source: 2511.22570; its form is quoted at second hand, α and β from memory, unchecked.
    Raises `ValueError`: a number outside [0, 1].
    """
    given = {"quality": quality, "claimed": claimed, "form": form, "meta": meta}
    for name, value in given.items():
        _require(0 <= value <= 1, f"{name}={value}: expected a number from 0 to 1")
    return form * (alpha * quality + beta * (1 - abs(claimed - quality)) * meta)


def test_difficulty_reward(
    passed: Sequence[bool], groups: Sequence[int], *, scheme: str = "strict"
) -> float:
    """MiMo's reward of code by the difficulty of the tests it passes, from 0 to 1.

    passed: one flag a test; groups: the difficulty group of each, 0 the easiest (clustered by pass
    rate). Every group is worth the same, 1 / (number of groups). `strict`: a group pays in full if
    all its tests *and those of all easier groups* pass. `soft`: a group's worth is divided evenly
    over its tests, each paid alone. Source: 2505.07608, §3 (shares of the groups are our choice).
    Raises `ValueError`: no tests, lengths that differ, an unknown scheme.
    """
    _require(scheme in ("strict", "soft"), f"scheme={scheme!r}: one of 'strict', 'soft'")
    _require(
        len(passed) == len(groups) > 0,
        f"{len(passed)} passed and {len(groups)} groups: one of each a test, at least one test",
    )
    shares, easier = [], True
    for group in sorted(set(groups)):
        flags = [bool(p) for p, g in zip(passed, groups, strict=True) if g == group]
        easier = easier and all(flags)
        shares.append(float(easier) if scheme == "strict" else sum(flags) / len(flags))
    return sum(shares) / len(shares)


test_difficulty_reward.__test__ = False  # pytest, it is no test


def positive_example_loss(
    logp: Tensor, mask: Tensor, rewards: Tensor, weight: float = 0.1
) -> Tensor:
    """VAPO's language-model loss on right answers: −weight · mean log π_θ over their tokens.

    logp, mask: (B, T); rewards: (B,), right means > 0; who sampled does not matter. On-policy its
    gradient is that of an advantage of `weight`, the same for all right answers, in REINFORCE
    averaged over those tokens; beside a loss averaged over all tokens that is `weight` divided by
    the share of right tokens. It has no baseline, so it pulls also where all answers are right.
    Without a right answer the loss is a finite 0. Source: 2504.05118, §4.3 (weight 0.1).
    Raises `ValueError`: rewards is not (B,).
    """
    _require(
        rewards.shape == logp.shape[:1],
        f"rewards has shape {tuple(rewards.shape)}: expected ({len(logp)},), one a row of logp",
    )
    counted = mask.bool() & (rewards > 0)[:, None]
    total = torch.where(counted, logp, torch.zeros_like(logp)).sum()
    return -weight * total / counted.sum().clamp(min=1)


@dataclass(frozen=True)
class Answers:
    """What a component may look at: texts, which were cut, tokens (B,), the limit, the reward."""

    texts: Sequence[str]
    truncated: Sequence[bool]
    lengths: Tensor
    max_length: int
    rewards: Tensor


def _overlong(answers: Answers, buffer: int = 8) -> Tensor:
    return overlong_penalty(answers.lengths, answers.max_length, buffer)


def _cosine(
    answers: Answers,
    right: tuple[float, float] = (2.0, 1.0),
    wrong: tuple[float, float] = (-10.0, 0.0),
    exceeded: float = -10.0,
) -> Tensor:
    """Not to be added to the answer's reward but to replace it: {"answer": {"weight": 0}}."""
    given = (answers.rewards > 0, answers.lengths, answers.max_length)
    return cosine_length(*given, right=right, wrong=wrong, exceeded=exceeded)


def _format(answers: Answers, pattern: str = r"#[^#]+", prefill: str = "") -> Tensor:
    return torch.tensor([format_reward(text, pattern, prefill) for text in answers.texts])


def _syntax(answers: Answers, pattern: str = r"(?:#[^#]+)+") -> Tensor:
    return torch.tensor([syntax_penalty(text, pattern) for text in answers.texts])


def _length(answers: Answers) -> Tensor:
    """A bonus for long answers, share of the limit: the mistake that chapter 10 makes."""
    paid = ~torch.tensor([bool(cut) for cut in answers.truncated])
    return paid * answers.lengths / answers.max_length


def _answered(answers: Answers) -> Tensor:
    return torch.tensor([float(bool(final_answer(text))) for text in answers.texts])


def _answer(answers: Answers) -> Tensor:
    return answers.rewards


COMPONENTS: dict[str, Callable[..., Tensor]] = {
    "answer": _answer,
    "overlong": _overlong,
    "cosine": _cosine,
    "format": _format,
    "syntax": _syntax,
    "length": _length,
    "answered": _answered,
}
"""Components that `DataConfig.shaping` may name, each with its options."""


def shaped(answers: Answers, shaping: dict[str, dict]) -> tuple[Tensor, dict[str, float]]:
    """Rewards with weighted components added, and the mean of each part unweighted.

    shaping: {component: {"weight": w, its options …}}, weight 1 where none is given; the reward
    itself has the weight 1 and is the part "answer", unless shaping has {"answer": {"weight": w}}.
    Raises `ValueError`: an unknown component or option.
    """
    total, parts = torch.zeros_like(answers.rewards, dtype=torch.float32), {}
    for name, options in ({"answer": {}} | shaping).items():
        weight, values = component(name, options, answers)
        total = total + weight * values.to(total)
        parts[name] = float(values.float().mean())
    return total, parts


def component(name: str, options: dict, answers: Answers) -> tuple[float, Tensor]:
    """The weight of one component, and its values (B,)."""
    known = ", ".join(COMPONENTS)
    _require(name in COMPONENTS, f"shaping has {name!r}: one of {known}")
    own = {key: value for key, value in options.items() if key != "weight"}
    try:
        return options.get("weight", 1.0), COMPONENTS[name](answers, **own)
    except TypeError as error:
        raise ValueError(f"shaping[{name!r}] has an option it does not know: {error}") from None


def _require(ok: bool, text: str) -> None:
    if not ok:
        raise ValueError(text)
