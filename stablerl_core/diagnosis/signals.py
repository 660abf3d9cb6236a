"""The signals a diagnosis knows: those of our own run log, and those only other logs have."""

from __future__ import annotations

from ..runlog import FAMILIES as OWN_FAMILIES
from ..runlog import SIGNALS as OWN
from ..runlog import Signal

# Two numbers that mean different things are two signals, so a rule never has to ask which one it
# holds. μ drew the tokens, π_old is the trainer before the step, w = π_old/μ is the weight that
# corrects for the difference. "Capped" is after truncation or masking, where w tells little.
FOREIGN: dict[str, Signal] = {
    "reward_std": Signal(1, "reward", "spread of the rewards within a group, mean over groups"),
    "reward_spread": Signal(1, "reward", "standard deviation of the rewards over the whole batch"),
    "reward_min": Signal(1, "reward", "lowest reward of the step"),
    "reward_max": Signal(1, "reward", "highest reward of the step"),
    "reward_shaped": Signal(
        1, "reward", "mean reward after shaping: a KL penalty, an overlong penalty is in it"
    ),
    "reward_centred": Signal(
        1, "reward", "mean reward after its group's mean is taken off: 0 is normal"
    ),
    "length_min": Signal(1, "tokens", "shortest completion of the step"),
    "length_max": Signal(1, "tokens", "longest completion of the step"),
    "length_terminated": Signal(1, "tokens", "mean length of the completions that ended"),
    "sequence_length": Signal(1, "tokens", "mean length of prompt and completion together"),
    "prompt_truncated": Signal(1, "share", "prompts that were cut at the prompt limit"),
    "prompt_length": Signal(1, "tokens", "mean prompt length"),
    "repetition": Signal(1, "share", "completions that repeat themselves"),
    "dead_groups": Signal(1, "share", "zero-variance groups at the lowest reward"),
    "mixed_groups": Signal(1, "share", "groups with different rewards: those that give gradient"),
    "advantage_mean": Signal(1, "1", "mean advantage: near 0 where groups are centred"),
    "advantage_std": Signal(1, "1", "standard deviation of the advantages"),
    "advantage_min": Signal(1, "1", "lowest advantage"),
    "advantage_max": Signal(1, "1", "highest advantage"),
    "kl_ref_seq": Signal(2, "nats/sequence", "KL(policy ‖ reference) summed over a completion"),
    "kl_penalty": Signal(
        2, "reward", "KL penalty as it enters the reward or the loss, coefficient included"
    ),
    "logp_mean": Signal(2, "nats/token", "mean log-probability of the sampled tokens, trainer"),
    "ref_logp_mean": Signal(2, "nats/token", "the same under the reference"),
    "entropy_seq": Signal(2, "nats/sequence", "entropy summed over a completion"),
    "ratio_mean": Signal(2, "ratio", "mean policy ratio π_θ/π_old; 1 on-policy"),
    "ratio_min": Signal(2, "ratio", "smallest policy ratio π_θ/π_old"),
    "clip_fraction_low": Signal(2, "share", "trained tokens clipped at 1 − ε_low"),
    "clip_fraction_high": Signal(2, "share", "trained tokens clipped at 1 + ε_high"),
    "policy_loss": Signal(3, "loss", "the policy part of the loss, without KL or entropy terms"),
    "value_loss": Signal(3, "loss", "the critic's loss"),
    "explained_variance": Signal(2, "share", "variance of the returns that the critic explains"),
    "value_clip_fraction": Signal(2, "share", "critic values that their clip changed"),
    "critic_grad_norm": Signal(3, "2-norm", "gradient norm of the critic before clipping"),
    "loss_scale": Signal(3, "1", "fp16 loss scale in force; a fall is a skipped update"),
    "weight_norm": Signal(3, "2-norm", "norm of the parameters"),
    "aux_loss": Signal(3, "loss", "load-balancing loss of a mixture of experts"),
    "trained_tokens": Signal(3, "tokens", "tokens that entered the loss at this step"),
    "sampler_logp_mean": Signal(
        4, "nats/token", "mean log-probability of the sampled tokens, as the sampler reported it"
    ),
    "prob_gap": Signal(4, "probability", "mean |π_old(token) − μ(token)|: blind at rare tokens"),
    "prob_gap_max": Signal(4, "probability", "largest |π_old(token) − μ(token)|; at most 1"),
    "prob_gap_std": Signal(4, "probability", "standard deviation of |π_old(token) − μ(token)|"),
    "prob_gap_signed": Signal(
        4, "probability", "mean π_old(token) − μ(token), with its sign: 0 without a bias"
    ),
    "prob_correlation": Signal(
        4, "1", "Pearson correlation of π_old(token) and μ(token); 1 is best"
    ),
    "prob_factor": Signal(
        4,
        "factor",
        "mean exp|log π_old(token) − log μ(token)|; 1 is agreement, one outlier rules it",
    ),
    "mismatch_js": Signal(4, "nats/token", "Jensen–Shannon divergence of μ and π_old"),
    "mismatch_k1": Signal(
        4,
        "nats/token",
        "mean log μ − log π_old (k1 estimate of KL(μ ‖ π_old)): a bias keeps its sign",
    ),
    "mismatch_k2": Signal(4, "nats²/token", "mean ½(log π_old − log μ)²"),
    "mismatch_kl_reverse": Signal(
        4, "nats/token", "k3 estimate of KL(π_old ‖ μ) from tokens drawn from μ: outliers rule it"
    ),
    "mismatch_chi2": Signal(4, "1", "χ² of the token weights: E w² − 1"),
    "mismatch_chi2_seq": Signal(4, "1", "χ² of the sequence weights, product over the tokens"),
    "mismatch_chi2_geo": Signal(4, "1", "χ² of the geometric-mean weights of the sequences"),
    "perplexity_ratio": Signal(4, "ratio", "trainer perplexity over sampler perplexity"),
    "log_perplexity_gap": Signal(
        4, "nats/token", "mean over sequences of |mean log π_old − mean log μ|"
    ),
    "weight_mean": Signal(4, "ratio", "mean weight π_old/μ before its cap; 1 without mismatch"),
    "weight_min": Signal(4, "ratio", "smallest weight before its cap"),
    "weight_max": Signal(4, "ratio", "largest weight before its cap"),
    "weight_mean_capped": Signal(
        4, "ratio", "mean weight after truncation or masking: near 0 says masked, not mismatched"
    ),
    "weight_min_capped": Signal(4, "ratio", "smallest weight after truncation or masking"),
    "weight_max_capped": Signal(4, "ratio", "largest weight after truncation or masking"),
    "weight_ess_capped": Signal(
        4, "share", "effective sample size after the cap, which bounds it from below"
    ),
    "weight_clip_fraction": Signal(4, "share", "weights that the cap changed"),
    "masked_sequences": Signal(4, "share", "completions that a correction set to 0"),
    "staleness_max": Signal(4, "versions", "oldest weights that drew a token of the step"),
    "sampler_version": Signal(4, "versions", "version of the weights that the sampler holds"),
}

SIGNALS: dict[str, Signal] = OWN | FOREIGN

# One signal a name, for what every run names itself: `reward_part:format`, `heldout:aime`.
FAMILIES: dict[str, Signal] = OWN_FAMILIES | {
    "reward_part_std": Signal(1, "reward", "spread of one reward function of several"),
    "heldout": Signal(1, "score", "one evaluation of several"),
    "tied_groups": Signal(1, "groups", "groups whose rewards all equal this value: a count"),
}


def signal_of(name: str) -> Signal | None:
    """Layer, unit and meaning of a signal, or of a member of a family; None if unknown."""
    if name in SIGNALS:
        return SIGNALS[name]
    family, colon, member = name.partition(":")
    return FAMILIES.get(family) if colon and member else None
