"""What a log does not hold, and how to log it in the framework that wrote it."""

from __future__ import annotations

from .log import SignalLog

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

HOW: dict[str, dict[str, str]] = {
    "trl": {
        "heldout_accuracy": "eval_dataset with eval_strategy='steps'",
        "zero_variance_groups": "frac_reward_zero_std (TRL ≥ 0.17)",
        "kl_ref": "beta > 0; with beta = 0 no KL is logged",
        "entropy": "entropy is logged by GRPOTrainer from 0.19 on",
        "grad_norm": "grad_norm comes with logging_steps",
        "logp_gap": "use_vllm=True with vllm_importance_sampling_correction=True logs "
        "sampling/sampling_logp_difference",
    },
    "verl": {
        "heldout_accuracy": "trainer.test_freq > 0 and data.val_files",
        "zero_variance_groups": "algorithm.filter_groups.enable=True, or group statistics of "
        "critic/score by uid",
        "kl_ref": "actor_rollout_ref.actor.use_kl_loss=True (a coefficient of 0 logs it too)",
        "entropy": "actor/entropy (actor_rollout_ref.actor.calculate_entropy=True)",
        "grad_norm": "actor/grad_norm",
        "logp_gap": "actor_rollout_ref.rollout.calculate_log_probs=True logs "
        "training/rollout_probs_diff_mean; algorithm.rollout_correction adds rollout_corr/*",
    },
    "slime": {
        "heldout_accuracy": "--eval-interval and --eval-prompt-data",
        "kl_ref": "--use-kl-loss (a coefficient of 0 logs it too)",
        "logp_gap": "--get-mismatch-metrics logs train/train_rollout_logprob_abs_diff",
    },
    "openrlhf": {"logp_gap": "--enable_vllm_is_correction logs vllm_kl"},
    "prime-rl": {"logp_gap": "mismatch_kl is in the trainer's log, not in the orchestrator's"},
    "nemo-rl": {"logp_gap": "train/token_mult_prob_error and train/gen_kl_error"},
    "skyrl": {"logp_gap": "trainer.algorithm.use_tis logs rollout_train_logprobs_abs_diff_mean"},
    "areal": {"logp_gap": "actor.use_decoupled_loss=true logs behave_approx_kl"},
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
        name = names[0]
        how = HOW.get(log.format.split()[0].lower(), {}).get(name, GENERAL[name])
        out.append({"layer": layer, "signal": name, "question": question, "how": how})
    return tuple(out)


def unanswered(missing: tuple[dict[str, object], ...]) -> list[int]:
    """The layers about which a log answers none of the questions."""
    asked = [layer for layer, *_ in QUESTIONS]
    open_ = [m["layer"] for m in missing]
    return [layer for layer in sorted(set(asked)) if open_.count(layer) == asked.count(layer)]
