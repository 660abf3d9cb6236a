r"""Chapter 14, the same weights under seventeen configurations, and whose ranking survives them.

Four policies that sort digits: the `base` as it is shipped; `strict`, trained with the strict
verifier (8 prompts × 8 completions, learning rate 5e-4, 60 steps); `any`, the same with the
verifier that takes any marked answer; `framed`, trained strictly with a line break before every
prompt. Each answers the same 256 held-out problems of a seed, once each. `step` counts
`SETTINGS`, which differ from the reference (temperature 1, the template of the base, at most 24
tokens, strict) in one thing, or where samples are combined in two. `score` is the mean, `half`
half of its 95 % interval over problems. At three settings the base is scored beside: `paired`
and `unpaired` are half the interval of the difference, by problem and without pairs.

`evaluation_tries`: the base's reference score sixteen times, nothing changed but the sampling
seed; `step` is how many tries one may choose from, `claimed` the best of them, `plain` their
mean, `fresh` the score of the same configuration on 256 other problems.

Predictions, written after exploring one seed (100) of 40 steps and before the repeated runs:

1. The base: from the lowest to the highest of the 17 scores it is more than 0.8 in every seed;
   `half` at the reference is below 0.065. At least ten of the sixteen others differ from the
   reference by an interval over seeds that excludes zero.
2. Greedy, the base is above 0.85, more than 0.4 above its reference; top-p 0.9 alone gives more
   than 0.15.
3. One beginning token costs the base less than 0.1, a system prompt or no generation prompt
   leave it below 0.05.
4. Ranking by temperature: `strict` is above `base` at the reference and below it greedily, both
   with intervals that exclude zero. Greedy accuracy falls in training at this rate.
5. Ranking by format: `framed` − `strict` is larger with the line break than at the reference;
   the difference of the two differences excludes zero.
6. Ranking by verifier: `any` − `strict` is larger under `any` than under `strict`; the
   difference excludes zero. Whether the sign turns is open.
7. Averaging: over the formats `strict` is above `base`, over the ways to sample below.
8. The best setting for each, of those with one answer a problem: the base gains more than 0.4 on
   itself, and at its best is above `strict` at its best, though at the reference it is below.
9. Pairs: at temperature 1 with one sample the paired interval is hardly narrower (ratio above
   0.85), since both answers are draws; of the greedy answers and of the mean of eight samples the
   ratio is below that at the reference.
10. Tries: the best of sixteen claims more than 0.05 above the plain mean; on other problems
    nothing of it is left (`fresh` − `plain`: an interval with zero in it).
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..rewards import (
    MARKER,
    EvaluationConfig,
    EvaluationScore,
    Problem,
    compare_scores,
    data_fingerprint,
    final_answer,
    task_by_name,
    verify,
)
from ..training import DataConfig, NumericsConfig, Sampling, Trainer, TrainerConfig, load_base
from ..training.base import fingerprint
from ..training.rollout import decode_completions, encode_prompts, rollout
from .measured import Measured

BASE, PROBLEMS, STEPS = "mixtral-cpu-sort", 256, 60
EOS = 1  # the id of the end token; it also serves as a beginning token, as in GPT-2

# The task's prompts read as a chat: `S` opens the user's turn, `=` asks for the answer.
_TURNS = "{% for m in messages %}{% if m.role == 'user' %}S{% endif %}{{ m.content }}{% endfor %}"
TEMPLATE = _TURNS + "{% if add_generation_prompt %}={% endif %}"
NEWLINE = "{{ '\\n' }}" + TEMPLATE

REFERENCE = EvaluationConfig(
    weights="unset",
    data="unset",
    verifier="strict",
    chat_template=TEMPLATE,
    system_prompt="",
    prompt_format="{prompt}",
    bos=0,
    eos=(EOS,),
    engine="stablerl_core rollout, float32",
    temperature=1.0,
    top_p=1.0,
    top_k=0,
    max_new_tokens=24,
    samples=1,
    scoring="mean",
)
FORMATS = {
    "newline": {"chat_template": NEWLINE},
    "bos": {"bos": 1},
    "two_bos": {"bos": 2},
    "space": {"prompt_format": " {prompt}"},
    "system": {"system_prompt": "Sort."},
    "no_generation_prompt": {"chat_template": _TURNS},
}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 0.7},
    "hot": {"temperature": 1.3},
    "top_p": {"top_p": 0.9},
}
LIMITS = {"limit_8": {"max_new_tokens": 8}, "limit_16": {"max_new_tokens": 16}}
VERIFIER = {"any": {"verifier": "any"}}
SAMPLES = {
    f"{scoring}_8": {"samples": 8, "scoring": scoring} for scoring in ("mean", "best", "majority")
}
SETTINGS: dict[str, dict] = {"reference": {}} | FORMATS | SAMPLINGS | LIMITS | VERIFIER | SAMPLES
PAIRED = ("reference", "greedy", "mean_8")  # where the base is scored beside a policy


@dataclass(frozen=True)
class Framed:
    """The sorting task with a text before every prompt."""

    before: str = "\n"
    name: str = "framed"

    def sample(self, split: str, n: int, seed: int) -> list[Problem]:
        problems = task_by_name("sort").sample(split, n, seed)
        return [replace(p, prompt=self.before + p.prompt) for p in problems]


POLICIES = {
    "base": None,
    "strict": ("strict", None),
    "any": ("any", None),
    "framed": ("strict", Framed()),
}


def policy(name: str, seed: int = 0, steps: int = STEPS):
    """A policy by name, trained with this seed: (model, tokenizer)."""
    if POLICIES[name] is None:
        return load_base(BASE)
    verifier, task = POLICIES[name]
    data = DataConfig(
        prompts=8, max_new_tokens=24, verifier=verifier, eval_every=steps, eval_prompts=8
    )
    numerics = NumericsConfig(learning_rate=5e-4)
    config = TrainerConfig(steps=steps, seed=seed, probe_every=steps, data=data, numerics=numerics)
    trainer = Trainer(config, task=task)
    trainer.run(progress=False)
    return trainer.model, trainer.tokenizer


def problems_of(seed: int, n: int = PROBLEMS) -> list[Problem]:
    """The held-out problems that all policies of a seed answer."""
    return task_by_name("sort").sample("heldout", n, seed=seed)


def prompt_text(tokenizer, config: EvaluationConfig, problem: Problem) -> str:
    """What a model reads for a problem, beginning tokens included."""
    digits = problem.prompt.strip("S=")
    user = {"role": "user", "content": config.prompt_format.format(prompt=digits)}
    system = {"role": "system", "content": config.system_prompt}
    text = tokenizer.apply_chat_template(
        [system, user] if config.system_prompt else [user],
        chat_template=config.chat_template,
        tokenize=False,
        add_generation_prompt=True,
    )
    return tokenizer.eos_token * config.bos + text


def answers(model, tokenizer, config: EvaluationConfig, problems: Sequence[Problem], seed: int):
    """Answers in the order of the problems, `config.samples` each: (texts, which were cut)."""
    prompts = [prompt_text(tokenizer, config, problem) for problem in problems]
    greedy = config.temperature == 0
    sampling = Sampling(
        temperature=1.0 if greedy else config.temperature,
        top_p=config.top_p,
        top_k=1 if greedy else config.top_k,
    )
    ids, mask = encode_prompts(tokenizer, prompts, model.device)
    batch = rollout(
        model,
        ids,
        mask,
        group_size=config.samples,
        max_new_tokens=config.max_new_tokens,
        eos_token_id=config.eos[0],
        generator=torch.Generator().manual_seed(seed),
        sampling=sampling,
    )
    return decode_completions(tokenizer, batch), (~batch.finished).tolist()


def judged(
    config: EvaluationConfig, problems: Sequence[Problem], texts: list[str], cut: list[bool]
) -> EvaluationScore:
    """Answers as one number a problem: the mean, the best, or what the majority's answer gets."""
    k = config.samples
    if config.scoring == "majority":
        said = [None if c else final_answer(t) for t, c in zip(texts, cut, strict=True)]
        texts = [_majority(said[i : i + k]) for i in range(0, len(said), k)]
        cut, k = [False] * len(texts), 1
    golds = [problem.gold for problem in problems for _ in range(k)]
    paid = [verdict.reward for verdict in verify(config.verifier, texts, golds, cut)]
    groups = [paid[i : i + k] for i in range(0, len(paid), k)]
    reduce = max if config.scoring == "best" else statistics.fmean
    return EvaluationScore(config, tuple(float(reduce(group)) for group in groups))


def _majority(said: list[str | None]) -> str:
    """The answer most samples gave, as a completion; the first of them where several tie."""
    given = Counter(answer for answer in said if answer is not None)
    return MARKER + given.most_common(1)[0][0] if given else ""


def scores(
    model, tokenizer, problems: Sequence[Problem], names: Sequence[str], seed: int
) -> Mapping[str, EvaluationScore]:
    """Scores of one model under some of the `SETTINGS`, each with its whole configuration.

    What is only judged in another way is judged on the same answers.
    """
    fixed = replace(
        REFERENCE, weights=fingerprint(model.state_dict()), data=data_fingerprint(problems)
    )
    found, drawn = {}, {}
    for name in names:
        config = replace(fixed, **SETTINGS[name])
        sampled = replace(config, verifier="unset", scoring="mean")
        if sampled not in drawn:
            drawn[sampled] = answers(model, tokenizer, config, problems, seed)
        found[name] = judged(config, problems, *drawn[sampled])
    return found


def half(score: EvaluationScore) -> float:
    """Half the width of a score's interval."""
    low, high = score.interval
    return (high - low) / 2


def widths(a: EvaluationScore, b: EvaluationScore) -> dict[str, float]:
    """Half the interval of a − b, with pairs, and as of two separate samples of problems."""
    paired = compare_scores(a, b)
    return {
        "paired": (paired.high - paired.low) / 2,
        "unpaired": (half(a) ** 2 + half(b) ** 2) ** 0.5,
    }


def rows(name: str, seed: int) -> list[dict]:
    """One policy of one seed under every setting: `step` counts `SETTINGS`."""
    model, tokenizer = policy(name, seed)
    problems = problems_of(seed)
    found = scores(model, tokenizer, problems, tuple(SETTINGS), seed)
    beside = {} if name == "base" else scores(*load_base(BASE), problems, PAIRED, seed + 1000)
    return [
        {"step": i, "score": found[setting].mean, "half": half(found[setting])}
        | (widths(found[setting], beside[setting]) if setting in beside else {})
        for i, setting in enumerate(SETTINGS)
    ]


def tries(seed: int, most: int = 16) -> list[dict]:
    """The best of k scores of one configuration, over sampling seeds alone, k = 1, 2, 4 … most.

    Every block of k of the `most` tries gives a claim; `claimed` is their mean.
    """
    model, tokenizer = load_base(BASE)

    def score(problems, draw):
        return scores(model, tokenizer, problems, ("reference",), draw)["reference"].mean

    same, other = problems_of(seed), problems_of(seed + 500)
    first = [score(same, 100 * seed + draw) for draw in range(most)]
    fresh = statistics.fmean(score(other, 100 * seed + draw) for draw in range(4))
    found, k = [], 1
    while k <= most:
        best = [max(first[i : i + k]) for i in range(0, most, k)]
        claimed, plain = statistics.fmean(best), statistics.fmean(first)
        found.append({"step": k, "claimed": claimed, "plain": plain, "fresh": fresh})
        k *= 2
    return found


EVALUATION_SETTINGS = Measured(
    "evaluation_settings", __doc__, {name: partial(rows, name) for name in POLICIES}
)
EVALUATION_TRIES = Measured("evaluation_tries", __doc__, {"base": tries})

ALL = (EVALUATION_SETTINGS, EVALUATION_TRIES)
