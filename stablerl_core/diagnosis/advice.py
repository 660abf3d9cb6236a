"""What a log does not hold, and how to log it in the framework that wrote it."""

from __future__ import annotations

from .log import SignalLog
from .readers import columns_of
from .readers.vocabulary import ALIASES

# Any one signal of a line makes its question answerable.
QUESTIONS: tuple[tuple[int, tuple[str, ...], str], ...] = (
    (1, ("heldout_accuracy", "heldout:"), "is the reward what is wanted"),
    (
        *(1, ("zero_variance_groups", "solved_groups", "mixed_groups", "reward_std")),
        "do groups give a gradient at all",
    ),
    (1, ("length", "sequence_length"), "do answers grow or shrink"),
    (2, ("kl_ref", "kl_ref_seq", "kl_step"), "how far and how fast does the policy move"),
    (2, ("entropy", "entropy_seq"), "does the policy still explore"),
    (3, ("grad_norm",), "are the updates sound"),
    (
        4,
        (
            *("logp_gap", "mismatch_kl", "mismatch_k1", "mismatch_js", "prob_gap"),
            *("prob_correlation", "prob_factor", "log_perplexity_gap", "weight_mean"),
            "weight_mean_capped",
        ),
        "do sampler and trainer hold the same policy",
    ),
)

# What has to be switched on, where the framework does not log it by itself.
SWITCH: dict[str, dict[str, str]] = {
    "trl": {
        "kl_ref": "beta above 0",
        "logp_gap": "use_vllm with vllm_importance_sampling_correction",
    },
    "verl": {
        "heldout_accuracy": "trainer.test_freq and data.val_files",
        "kl_ref": "actor_rollout_ref.actor.use_kl_loss",
        "entropy": "actor_rollout_ref.actor.calculate_entropy",
        "logp_gap": "actor_rollout_ref.rollout.calculate_log_probs",
    },
}

GENERAL = {
    "heldout_accuracy": "score a few hundred held-out prompts with a strict verifier every 10-50 "
    "steps",
    "zero_variance_groups": "the share of prompts whose completions all have the same reward",
    "length": "the mean number of completion tokens",
    "kl_ref": "the mean KL of the policy to its reference on the sampled tokens",
    "entropy": "the mean entropy of the sampled positions",
    "grad_norm": "the gradient norm before clipping",
    "logp_gap": "the mean |log π_old − log μ| over the sampled tokens: let the engine return "
    "log-probabilities and score the same tokens with the trainer before the update",
}


def missing_signals(log: SignalLog) -> tuple[dict[str, object], ...]:
    """Questions that the log cannot answer: layer, signal, the question, how to log it here."""
    out = []
    for layer, names, question in QUESTIONS:
        if any(s in log or any(k.startswith(s) for k in log.signals) for s in names):
            continue
        how = _how(log.format, names)
        out.append({"layer": layer, "signal": names[0], "question": question, "how": how})
    return tuple(out)


def _how(framework: str, names: tuple[str, ...]) -> str:
    """What to log, under which of the framework's own names, and what switches that on."""
    columns = [column for name in names for column in columns_of(framework, name)]
    told = f"; {framework} writes {columns[0]!r}" if columns else ""
    switch = SWITCH.get(ALIASES.get(framework, framework), {}).get(names[0])
    return GENERAL[names[0]] + told + (f" (set {switch})" if switch else "")


def unanswered(missing: tuple[dict[str, object], ...]) -> list[int]:
    """The layers about which a log answers none of the questions."""
    asked = [layer for layer, *_ in QUESTIONS]
    open_ = [m["layer"] for m in missing]
    return [layer for layer in sorted(set(asked)) if open_.count(layer) == asked.count(layer)]
