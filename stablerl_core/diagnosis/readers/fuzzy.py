"""Columns of a log that no known framework wrote: guessed from their words, and said to be."""

from __future__ import annotations

import re
from functools import lru_cache

from ..signals import signal_of
from .vocabulary import Entry

# The words of a name after these spellings are made one; then the first rule that fits the whole
# name. What could be two different numbers (a bare `ratio`, a `kl_loss` that rises and falls with
# its coefficient, an `accuracy` without a split) is listed only under its more common reading, and
# the reading stands in `MappedColumn.meaning`, where `--map` corrects it.
_WORDS = {
    "avg": "mean",
    "average": "mean",
    "maximum": "max",
    "minimum": "min",
    "stdev": "std",
    "rewards": "reward",
    "resp": "completion",
    "response": "completion",
    "responses": "completion",
    "completions": "completion",
    "gen": "completion",
    "generation": "completion",
    "generated": "completion",
    "output": "completion",
    "len": "length",
    "lengths": "length",
    "toks": "tokens",
    "adv": "advantage",
    "advantages": "advantage",
    "ent": "entropy",
    "gradient": "grad",
    "gradnorm": "grad norm",
    "gnorm": "grad norm",
    "lr": "learning rate",
    "clipfrac": "clip fraction",
    "cliprate": "clip fraction",
    "acc": "accuracy",
    "val": "heldout",
    "valid": "heldout",
    "validation": "heldout",
    "eval": "heldout",
    "evaluation": "heldout",
    "test": "heldout",
    "logprob": "logp",
    "logprobs": "logp",
    "logps": "logp",
    "probs": "prob",
    "diff": "gap",
    "difference": "gap",
    "reference": "ref",
    "frac": "fraction",
    "clipped": "clip",
    "pct": "percent",
    "sampling": "sampler",
    "rollout": "sampler",
    "inference": "sampler",
    "infer": "sampler",
    "vllm": "sampler",
    "sglang": "sampler",
    "training": "train",
    "trainer": "train",
    "truncation": "truncated",
}

_ENGINES = r"(?:train sampler|sampler train|sampler|mismatch|engine)"
_RULES: tuple[tuple[str, str, str], ...] = (
    (rf"(?:{_ENGINES} logp (?:abs )?|logp abs )gap(?: abs)?(?: mean)?", "logp_gap", ""),
    (rf"(?:{_ENGINES} logp (?:abs )?|logp abs )gap(?: abs)? max", "logp_gap_max", ""),
    (rf"{_ENGINES} prob (?:abs )?gap(?: mean)?", "prob_gap", ""),
    (rf"{_ENGINES} prob (?:abs )?gap max", "prob_gap_max", ""),
    (r"mismatch kl(?: mean)?|kl mismatch|kl (?:train sampler|sampler train)", "mismatch_kl", ""),
    (r"(?:.* )?pearson(?: corr| correlation)?(?: .*)?", "prob_correlation", ""),
    (r"(?:weight |is )?ess(?: fraction| ratio)?|effective sample size", "weight_ess", ""),
    (r"t?is (?:weight|ratio)(?: mean)?|mean t?is (?:weight|ratio)", "weight_mean", ""),
    (r"t?is (?:weight|ratio) max|max t?is (?:weight|ratio)", "weight_max", ""),
    (r"(?:mean )?(?:staleness|off policy steps|policy lag|policy age)(?: mean)?", "staleness", ""),
    (r"(?:max )?(?:staleness|policy lag|policy age)(?: max)?", "staleness_max", ""),
    (
        r"(?:train )?(?:mean )?(?:raw |total |train |env )?reward(?: mean| total| raw)?",
        "reward",
        "",
    ),
    (r"(?:mean )?(?:scores?|return|episode reward|ep reward)(?: mean)?", "reward", ""),
    (r"rlhf reward", "reward_shaped", "score minus KL penalty"),
    (r"reward std|std reward", "reward_std", "which spread, of a group or the batch, is unknown"),
    (r"reward max|max reward", "reward_max", ""),
    (r"reward min|min reward", "reward_min", ""),
    (
        r"heldout (?:mean )?(?:accuracy|score|reward|pass 1|pass at 1)(?: mean)?(?: percent)?",
        "heldout_accuracy",
        "",
    ),
    (r"(?:train )?accuracy(?: mean| reward)?(?: percent)?", "reward_part:accuracy", ""),
    (
        r"(?:zero (?:std|variance|spread)|tied) group(?:s)?(?: fraction| share)?"
        r"|fraction (?:zero std|reward zero std|tied)(?: groups)?",
        "zero_variance_groups",
        "",
    ),
    (r"(?:mean )?completion (?:mean )?(?:length|tokens)(?: mean)?", "length", ""),
    (r"(?:mean )?length(?: mean)?", "length", ""),
    (r"completion (?:length )?max(?: length)?|max completion length", "length_max", ""),
    (
        r"(?:completion )?truncated(?: fraction| ratio| rate| percent)?|completion clip ratio",
        "truncated",
        "",
    ),
    (r"advantage mean|mean advantage", "advantage_mean", ""),
    (r"advantage std|std advantage", "advantage_std", ""),
    (r"advantage max|max advantage", "advantage_max", ""),
    (r"advantage min|min advantage", "advantage_min", ""),
    (r"approx ?kl|ppo kl|kl (?:old|step|update|old new)|policy kl step", "kl_step", ""),
    (
        r"(?:mean )?(?:ref )?kl(?: ref| div| divergence| loss| penalty| to ref)?(?: mean)?",
        "kl_ref",
        "taken to be against the reference",
    ),
    (r"(?:policy |actor |mean |token )?entropy(?: loss| mean)?", "entropy", ""),
    (r"(?:policy |ppo |pg )?clip (?:fraction|ratio)(?: mean)?", "clip_fraction", ""),
    (r"(?:policy )?ratio max|max (?:policy )?ratio", "ratio_max", ""),
    (r"(?:policy )?ratio(?: mean)?|mean (?:policy )?ratio", "ratio_mean", ""),
    (r"(?:pg|policy|actor|policy gradient) loss", "policy_loss", ""),
    (r"(?:value|critic|vf) loss", "value_loss", ""),
    (r"(?:train |total )?loss(?: mean)?", "loss", ""),
    (r"(?:actor |policy |total |global )?grad norm(?: mean)?", "grad_norm", ""),
    (r"(?:actor |policy )?learning rate", "learning_rate", ""),
    (r"(?:param|weight|parameter) norm", "weight_norm", ""),
    (r"update norm", "update_norm", ""),
    (r"(?:max attention|attention max|max attn) logits?(?: max)?", "attention_logit_max", ""),
    (r"loss scale", "loss_scale", ""),
    (r"aux loss|load balancing loss|router aux loss", "aux_loss", ""),
    (r"max vio(?:lation)?|(?:expert )?load violation", "expert_load_max", ""),
    (r"(?:step time|time per step|seconds)", "seconds", ""),
)
_COMPILED = tuple((re.compile(pattern), signal, note) for pattern, signal, note in _RULES)
_PART = re.compile(r"(?:mean )?(\w+(?: \w+)?) reward(?: func)?(?: mean)?")
_PART_OF = re.compile(r"(?:train/)?rewards?/([^/]+)(?:/mean)?")
_NO_PART = re.compile(
    r"\b(?:mean|max|min|std|heldout|sampler|total|shaped|penalty|model|fraction|non|rlhf)\b"
)


def words(column: str) -> str:
    """The words of a column's name in one spelling: "train/avg_respLen" → "train mean …"."""
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", column)
    parts = re.findall(r"[a-z]+|\d+", split.lower())
    return " ".join(_WORDS.get(p, p) for p in parts)


@lru_cache(maxsize=8192)
def guess(column: str) -> Entry | None:
    """What an unknown column probably is, or None; the earlier rule and shorter name go first."""
    name = words(column)
    for rank, (pattern, signal, note) in enumerate(_COMPILED):
        if pattern.fullmatch(name):
            return _entry(column, signal, note, rank)
    found = _PART_OF.fullmatch(column) or _PART.fullmatch(name)
    part = found[1] if found else ""
    if part and not _NO_PART.search(part):
        return _entry(column, f"reward_part:{part.replace(' ', '_')}", "", len(_COMPILED))
    return None


def _entry(column: str, signal: str, note: str, rank: int) -> Entry:
    meaning = signal_of(signal).meaning
    text = f"{meaning}; {note}" if note else meaning
    offset = 1.0 if signal == "expert_load_max" else 0.0
    return Entry(column, signal, text, 1.0, offset, 1000 * rank + len(column))
