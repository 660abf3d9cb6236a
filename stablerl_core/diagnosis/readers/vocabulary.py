"""What the columns of each framework mean: names as they are written, and the signal they are.

Read from the frameworks' code as of August 2026, and from older versions where the names changed.
A line is a column, its signal and, where the signal's own definition does not say it all, after a
semicolon what this framework writes. `{}` stands for a part of a name, `x-1` and `+1` for a factor
and an offset. Of several columns for one signal the first in the list is taken.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache

from ..signals import signal_of

TRL = """
reward                              reward ; weighted sum of the reward functions, per completion
objective/scores                    reward ; score of the reward model, without the KL penalty
rewards/{}/mean                     reward_part:{}
rewards/{}/std                      reward_part_std:{}
rewards/{}                          reward_part:{}
objective/rlhf_reward               reward_shaped ; score minus KL penalty
reward_std                          reward_std ; old versions: within groups; new: over the batch
frac_reward_zero_std                zero_variance_groups
eval_reward                         heldout_accuracy ; mean reward in evaluation
eval_rewards/{}/mean                heldout:{}
completions/mean_length             length
completion_length                   length
completions/min_length              length_min
completions/max_length              length_max
completions/mean_terminated_length  length_terminated
completions/clipped_ratio           truncated ; completions without an end token
kl                                  kl_ref ; k3 estimate; logged only where beta is not 0
objective/kl                        kl_ref_seq
policy/approxkl_avg                 kl_step ; k2 estimate of the step, not of the reference
entropy                             entropy ; exact, mean over tokens
entropy/mean                        entropy ; exact, mean over tokens
policy/entropy_avg                  entropy
objective/entropy                   entropy_seq ; minus log-probability, summed over a completion
clip_ratio/region_mean              clip_fraction ; both sides, the side the advantage's sign allows
clip_ratio                          clip_fraction
policy/clipfrac_avg                 clip_fraction
cispo_clip_ratio                    clip_fraction ; upper side only
clip_ratio/low_mean                 clip_fraction_low
clip_ratio/high_mean                clip_fraction_high
ratio                               ratio_mean
val/ratio                           ratio_mean
objective/non_score_reward          kl_penalty x-1 ; per completion, coefficient included
entropy_coef                        entropy_coef
loss                                loss
policy_loss                         policy_loss
loss/policy_avg                     policy_loss
loss/value_avg                      value_loss
val/clipfrac_avg                    value_clip_fraction
grad_norm                           grad_norm
learning_rate                       learning_rate
lr                                  learning_rate
aux_loss                            aux_loss
sampling/sampling_logp_difference/mean        logp_gap ; before truncation and masking
sampling/sampling_logp_difference/max         logp_gap_max ; before truncation and masking
sampling/importance_sampling_ratio/mean       weight_mean_capped
sampling/importance_sampling_ratio/min        weight_min_capped
sampling/importance_sampling_ratio/max        weight_max_capped
rollout_correction/kl               mismatch_k1
rollout_correction/k3_kl            mismatch_kl ; each token's term capped at 10
rollout_correction/chi2_token       mismatch_chi2
rollout_correction/chi2_seq         mismatch_chi2_geo ; geometric mean over tokens, not the product
rollout_correction/ppl_ratio        perplexity_ratio
rollout_correction/log_ppl_abs_diff log_perplexity_gap
rollout_correction/training_log_ppl logp_mean x-1
rollout_correction/rollout_log_ppl  sampler_logp_mean x-1
rollout_correction/is_weight_mean   weight_mean_capped
rollout_correction/ess              weight_ess_capped
rollout_correction/clipped_frac     weight_clip_fraction
step_time                           seconds
"""

# In TRL's asynchronous trainer the same names compare with the sampler, not with a reference.
TRL_ASYNC = """
kl      mismatch_kl ; k3 estimate of KL(μ ‖ π_θ): staleness and mismatch together
ratio   weight_mean ; mean π_θ/μ: staleness and mismatch together
"""

VERL = """
critic/score/mean                   reward ; before any KL penalty
critic/score/max                    reward_max
critic/score/min                    reward_min
critic/rewards/mean                 reward_shaped ; a KL penalty in the reward is in it
val-core/{}/mean@{}                 heldout:{}/mean@{}
val/test_score/{}                   heldout:{}
critic/advantages/mean              advantage_mean
critic/advantages/max               advantage_max
critic/advantages/min               advantage_min
response_length/mean                length
response_length_non_aborted/mean    length ; aborted completions left out
response_length/max                 length_max
response_length/min                 length_min
response_length/clip_ratio          truncated ; completions of the greatest length allowed
prompt_length/mean                  prompt_length
prompt_length/clip_ratio            prompt_truncated ; prompts of the greatest length allowed
actor/kl_loss                       kl_ref ; before its coefficient
actor/reward_kl_penalty             kl_ref ; the penalty in the reward, before its coefficient
critic/kl                           kl_ref ; the penalty in the reward, before its coefficient
actor/kl_coef                       kl_coef
actor/reward_kl_penalty_coeff       kl_coef
critic/kl_coeff                     kl_coef
actor/ppo_kl                        kl_step ; mean log π_old − log π_θ within the step, sign kept
actor/entropy                       entropy ; of the old policy, aggregated like the loss
actor/entropy_loss                  entropy ; plus entropy, aggregated like the loss
actor/pg_clipfrac                   clip_fraction ; mean over micro-batches
actor/pg_clipfrac_lower             clip_fraction_low ; the dual clip at negative advantages
actor/loss                          loss
actor/pg_loss                       policy_loss
actor/grad_norm                     grad_norm
actor/lr                            learning_rate
actor/lr(1e-4)                      learning_rate x1e-4
critic/vf_loss                      value_loss
critic/vf_clipfrac                  value_clip_fraction
critic/vf_explained_var             explained_variance
critic/grad_norm                    critic_grad_norm
training/rollout_probs_diff_mean    prob_gap
training/rollout_probs_diff_max     prob_gap_max
training/rollout_probs_diff_std     prob_gap_std
training/rollout_actor_probs_pearson_corr     prob_correlation
rollout_corr/kl                     mismatch_k1
rollout_corr/k3_kl                  mismatch_kl
rollout_corr/chi2_token             mismatch_chi2
rollout_corr/chi2_seq               mismatch_chi2_seq
rollout_corr/ppl_ratio              perplexity_ratio
rollout_corr/log_ppl_abs_diff       log_perplexity_gap
rollout_corr/training_log_ppl       logp_mean x-1
rollout_corr/rollout_log_ppl        sampler_logp_mean x-1
rollout_corr/rollout_is_mean        weight_mean ; token or sequence weights, as configured
rollout_corr/rollout_is_min         weight_min
rollout_corr/rollout_is_max         weight_max
rollout_corr/rollout_is_eff_sample_size       weight_ess_capped
rollout_corr/rollout_is_ratio_fraction_high   weight_clip_fraction
rollout_corr/rollout_rs_masked_fraction       masked_tokens
rollout_corr/rollout_rs_seq_masked_fraction   masked_sequences
mismatch/mismatch_kl                mismatch_k1
mismatch/mismatch_k3_kl             mismatch_kl
mismatch/mismatch_ppl_ratio         perplexity_ratio
mismatch/mismatch_log_ppl_abs_diff  log_perplexity_gap
mismatch/mismatch_training_log_ppl  logp_mean x-1
mismatch/mismatch_rollout_log_ppl   sampler_logp_mean x-1
mismatch/rollout_is_mean            weight_mean
mismatch/rollout_is_min             weight_min
mismatch/rollout_is_max             weight_max
mismatch/rollout_is_eff_sample_size weight_ess_capped
mismatch/rollout_is_ratio_fraction_high       weight_clip_fraction
mismatch/rollout_is_masked_fraction masked_tokens
mismatch/rollout_is_seq_masked_fraction       masked_sequences
training/off_policy/trajectory_staleness/mean staleness
training/off_policy/trajectory_staleness/max  staleness_max
fully_async/count/current_param_version       sampler_version
rollout/moe/max_vio/max             expert_load_max +1 ; worst layer
rollout/moe/max_vio/avg             expert_load_max +1 ; mean over layers
perf/time_per_step                  seconds
timing_s/step                       seconds
"""

SLIME = """
rollout/raw_reward                  reward
rollout/rewards                     reward_centred ; normalised within groups, so 0 is normal
rollout/zero_std/count_{}           tied_groups:{}
eval/{}                             heldout:{}
rollout/response_len/mean           length
rollout/response_lengths            length
rollout/response_len/max            length_max
rollout/response_len/min            length_min
rollout/truncated_ratio             truncated
rollout/truncated                   truncated
rollout/repetition_frac             repetition
rollout/advantages                  advantage_mean ; centred, so 0 is normal
train/kl_loss                       kl_ref ; before its coefficient
rollout/kl                          kl_ref ; the penalty in the reward
train/ppo_kl                        kl_step ; mean log π_old − log π_θ within the step, sign kept
train/entropy_loss                  entropy ; plus entropy
rollout/entropy                     entropy ; of the old policy
train/pg_clipfrac                   clip_fraction
train/ois                           ratio_mean ; per completion; one without tokens counts as 0
train/loss                          loss
train/pg_loss                       policy_loss
train/grad_norm                     grad_norm
train/lr-pg_0                       learning_rate
train/value_loss                    value_loss
train/value_clipfrac                value_clip_fraction
train/train_rollout_logprob_abs_diff          logp_gap
train/tis                           weight_mean ; per completion, before truncation
train/tis_clipfrac                  weight_clip_fraction
rollout/log_probs                   logp_mean
rollout/rollout_log_probs           sampler_logp_mean
rollout/ref_log_probs               ref_logp_mean
perf/step_time                      seconds
"""

OPENRLHF = """
rollout/reward_mean                 reward ; after length penalties
reward                              reward ; after length penalties
score                               reward_part:score
rollout/reward_std                  reward_spread
group_reward_std                    reward_std
dynamic_filtering_pass_rate         mixed_groups ; share of the prompts that passed the filter
eval_{}_pass1                       heldout:{}
rollout/response_length_mean        length
response_length                     length
total_length                        sequence_length
rollout/truncated_rate              truncated
truncated                           truncated
response_clip_ratio                 truncated
kl                                  kl_ref ; estimator as configured (k1, k2 or k3)
logprobs_diff                       kl_ref ; mean log π_θ − log π_ref, sign kept
ppo_kl                              kl_step ; mean log π_old − log π_θ within the step, sign kept
entropy_loss                        entropy ; plus entropy
ppo_clip_ratio                      clip_fraction
clip_ratio                          clip_fraction
policy_loss                         policy_loss
act_loss                            policy_loss
actor_grad_norm                     grad_norm
actor_lr                            learning_rate
critic_loss                         value_loss
critic_grad_norm                    critic_grad_norm
vllm_kl                             mismatch_k1
timing/step_total                   seconds
"""

PRIME_RL = """
train/agg/effective/{}/reward/mean  reward ; rollouts that were trained on
train/agg/all/{}/reward/mean        reward ; all finished rollouts
reward/all/mean                     reward
reward/mean                         reward
eval/{}/effective/{}/avg@{}         heldout:{}
eval/{}/avg@{}                      heldout:{}
train/agg/all/{}/solved_none        dead_groups
train/agg/all/{}/solved_all         solved_groups
train/agg/all/{}/solved_some        mixed_groups
solved_none/all                     dead_groups
solved_all/all                      solved_groups
solve_none/all                      dead_groups
solve_all/all                       solved_groups
batch/solve_none                    dead_groups
batch/solve_all                     solved_groups
train/agg/effective/num_output_tokens/mean    length ; tokens of an episode, over its turns
num_output_tokens/mean              length
decode_len/all/mean                 length
completion_len/mean                 length
completion_len/max                  length_max
train/agg/effective/num_total_tokens/mean     sequence_length
seq_len/all/mean                    sequence_length
seq_len/mean                        sequence_length
train/agg/effective/{}/is_truncated/mean      truncated
train/agg/all/{}/is_truncated/mean  truncated
is_truncated/all/mean               truncated
is_truncated/mean                   truncated
entropy/all/mean                    entropy
entropy/mean                        entropy
is_masked/mean                      clip_fraction ; DPPO's mask on π_θ/μ: step, staleness, mismatch
is_masked_low/mean                  clip_fraction_low
is_masked_high/mean                 clip_fraction_high
ref_kl/mean                         kl_ref
loss/mean                           loss
optim/grad_norm                     grad_norm
optim/lr                            learning_rate
mismatch_kl/all/mean                mismatch_kl ; the sampler's weights may be older: staleness too
mismatch_kl/mean                    mismatch_kl ; the sampler's weights may be older: staleness too
off_policy/mean                     staleness
off_policy/max                      staleness_max
dispatcher/off_policy/mean          staleness
dispatcher/off_policy/max           staleness_max
watcher/policy_version              sampler_version
max_vio/mean                        expert_load_max +1 ; mean over layers
time/step                           seconds
"""

NEMO_RL = """
train/reward                        reward
train/filtered_reward               reward_shaped ; groups without a spread left out
validation/accuracy                 heldout:accuracy
train/baseline_reward/pct_0         dead_groups x0.01
train/baseline_reward/pct_1         solved_groups x0.01
train/baseline_reward/pct_mixed     mixed_groups x0.01
train/mean_gen_tokens_per_sample    length
train/max_gen_tokens_per_sample     length_max
train/mean_prompt_length            prompt_length
train/truncation_rate               truncated
train/advantages/mean               advantage_mean
train/advantages/max                advantage_max
train/advantages/min                advantage_min
train/kl_penalty                    kl_ref ; before its coefficient
train/approx_entropy                entropy ; estimate from sampled tokens
train/probs_ratio                   ratio_mean
train/probs_ratio_min               ratio_min
train/probs_ratio_max               ratio_max
train/loss                          loss
train/grad_norm                     grad_norm
train/lr                            learning_rate
train/global_valid_toks             trained_tokens
train/gen_kl_error                  mismatch_kl ; k3 estimate of KL(μ ‖ π_old)
train/policy_kl_error               mismatch_kl_reverse
train/js_divergence_error           mismatch_js
train/token_mult_prob_error         prob_factor
train/sampling_importance_ratio     weight_mean
train/is_oob_ratio                  weight_clip_fraction ; tokens or sequences, by the correction
train/avg_trajectory_age            staleness
timing/train/total_step_time        seconds
"""

SKYRL = """
reward/avg_raw_reward               reward
loss/avg_final_rewards              reward_shaped
eval/{}/avg_score                   heldout:{}
generate/avg_num_tokens             length
generate/max_num_tokens             length_max
generate/min_num_tokens             length_min
loss/avg_raw_advantages             advantage_mean
policy/policy_kl                    kl_ref ; the KL loss, before its coefficient
loss/avg_kl                         kl_ref ; the penalty in the reward
loss/kl_loss_coef                   kl_coef
policy/policy_entropy               entropy
policy/loss_metrics/clip_ratio      clip_fraction
policy/ppo_clip_ratio               clip_fraction
policy/final_loss                   loss
policy/policy_loss                  policy_loss
policy/grad_norm                    grad_norm
policy/raw_grad_norm                grad_norm
policy/policy_lr                    learning_rate
critic/critic_loss                  value_loss
policy/rollout_train_logprobs_abs_diff_mean   logp_gap
policy/rollout_train_logprobs_abs_diff_max    logp_gap_max
policy/loss_metrics/is_ratio_mean   weight_mean
policy/loss_metrics/is_ratio_max    weight_max
policy/loss_metrics/tis_token_clip_high_ratio weight_clip_fraction
policy/loss_metrics/tis_seq_clip_high_ratio   weight_clip_fraction
policy/loss_metrics/outlier_seq_masked_ratio  masked_sequences
async/staleness_mean                staleness
async/staleness_max                 staleness_max
timing/step                         seconds
"""

AREAL = """
task_reward/avg                     reward
rollout/reward                      reward
task_reward/max                     reward_max
task_reward/min                     reward_min
final_reward/avg                    reward_shaped ; per token
eval-rollout/reward                 heldout:reward
seq_len/avg                         sequence_length
prompt_len/avg                      prompt_length
no_eos_ratios/avg                   truncated ; sequences as long as the longest of the batch
advantages/avg                      advantage_mean
advantages/max                      advantage_max
advantages/min                      advantage_min
kl_rewards/avg                      kl_penalty x-1 ; per token, coefficient included
update/approx_kl/avg                kl_step x-1 ; mean log π_prox − log π_θ, sign kept
update/entropy/avg                  entropy
update/clip_ratio/avg               clip_fraction
update/importance_weight/avg        ratio_mean
update/importance_weight/max        ratio_max
update/importance_weight/min        ratio_min
update/actor_loss/avg               policy_loss
update/grad_norm                    grad_norm
update/lr                           learning_rate
update/old_logp/avg                 sampler_logp_mean
update/new_logp/avg                 logp_mean
update/behave_approx_kl/avg         mismatch_k1 x-1 ; kept tokens only
update/behave_imp_weight/avg        weight_mean_capped
update/behave_imp_weight/max        weight_max_capped
update/behave_imp_weight/min        weight_min_capped
update/compute_logp/kl_div_dual/avg mismatch_kl ; π_θ against μ: staleness and mismatch
update/rs_filtered_fraction         masked_tokens
update/version_stats/sample_staleness_proximal_avg staleness ; against the policy before
update/version_stats/sample_staleness_proximal_max staleness_max
timeperf/train_step                 seconds
"""

ROLL = """
critic/score/mean                   reward
critic/score/max                    reward_max
critic/score/min                    reward_min
critic/rewards/mean                 reward_shaped ; after normalisation, clipping and a KL penalty
critic/correct/mean                 reward_part:correct
val_correct/all/mean                heldout:all
val_correct/{}/mean                 heldout:{}
group/all_correct_groups_ratio      solved_groups
group/all_incorrect_groups_ratio    dead_groups
group/mixed_groups_ratio            mixed_groups
tokens/response_length/mean         length
token/response_length/mean          length
tokens/response_length/max          length_max
token/response_length/max           length_max
tokens/response_length/min          length_min
token/response_length/min           length_min
tokens/prompt_length/mean           prompt_length
token/prompt_length/mean            prompt_length
critic/advantages/mean              advantage_mean
critic/advantages/max               advantage_max
critic/advantages/min               advantage_min
actor/kl_loss                       kl_ref ; before its coefficient
critic/kl                           kl_ref ; the penalty in the reward, before its coefficient
critic/kl_coef                      kl_coef
actor/policykl                      kl_step ; k1 estimate within the step
actor/approxkl                      kl_step ; k2 estimate within the step
critic/entropy/mean                 entropy ; of the old policy
actor/ppo_ratio_clipfrac            clip_fraction ; outside the clip whatever the advantage's sign
actor/clipfrac                      clip_fraction
actor/ppo_ratio_low_clipfrac        clip_fraction_low
actor/ppo_ratio_high_clipfrac       clip_fraction_high
actor/ratio_mean                    ratio_mean
actor/ratio_max                     ratio_max
actor/ratio_min                     ratio_min
actor/total_loss                    loss
actor/pg_loss                       policy_loss
actor_train/grad_norm               grad_norm
actor/grad_norm                     grad_norm
actor/lr                            learning_rate
critic/old_log_prob/mean            logp_mean
critic/ref_log_prob/mean            ref_logp_mean
actor/train_infer_diff_token_mean   prob_gap_signed
actor/train_infer_ratio_token_mean  weight_mean
actor/is_weight_clipfrac            weight_clip_fraction
actor/train_infer_final_mask_mean   masked_tokens x-1 +1 ; the kept share is logged
time/step_total                     seconds
"""

TINKER = """
env/all/reward/total                reward
env/all/correct                     reward_part:correct
env/all/format                      reward_part:format
test/env/all/reward/total           heldout:reward
test/env/all/correct                heldout:correct
env/all/by_group/frac_mixed         mixed_groups
env/all/by_group/frac_all_good      solved_groups ; tied at a reward of 0.5 or more
env/all/by_group/frac_all_bad       dead_groups ; tied at a reward below 0.5
by_group/frac_mixed                 mixed_groups
by_group/frac_all_good              solved_groups ; tied at a reward of 0.5 or more
by_group/frac_all_bad               dead_groups ; tied at a reward below 0.5
env/all/ac_tokens_per_turn          length ; per turn
env/all/stop/max_tokens             truncated
kl_policy_base                      kl_ref
optim/entropy                       entropy ; estimate: minus the sampler's mean log-probability
kl_pre_post_v1                      kl_step ; k1 estimate across the update
kl_pre_post_v2                      kl_step ; k2 estimate across the update
optim/lr                            learning_rate
optim/kl_sample_train_v1            mismatch_k1 ; before the update: staleness and mismatch together
optim/kl_sample_train_v2            mismatch_k2 ; before the update: staleness and mismatch together
sampling_client/step_mean           sampler_version
time/total                          seconds
"""

SB3 = """
rollout/ep_rew_mean                 reward ; mean return of the last 100 episodes
eval/mean_reward                    heldout:mean_reward
rollout/ep_len_mean                 length ; environment steps, not tokens
train/approx_kl                     kl_step
train/entropy_loss                  entropy x-1 ; minus entropy is logged
train/clip_fraction                 clip_fraction
train/loss                          loss
train/policy_gradient_loss          policy_loss
train/value_loss                    value_loss
train/explained_variance            explained_variance
train/learning_rate                 learning_rate
"""


@dataclass(frozen=True)
class Entry:
    """One line: a column's name as a pattern, and what it is."""

    column: str
    signal: str
    meaning: str
    factor: float
    offset: float
    rank: int  # position in its list: the lower, the rather it is taken

    @property
    def exact(self) -> bool:
        return "{}" not in self.column


def _entry(line: str, rank: int) -> Entry:
    left, _, meaning = line.partition(" ; ")
    column, signal, *extra = left.split()
    factor = next((float(e[1:]) for e in extra if e[0] == "x"), 1.0)
    offset = next((float(e) for e in extra if e[0] == "+"), 0.0)
    known = signal_of(signal.replace("{}", "any"))
    if known is None:
        raise ValueError(f"{column}: {signal!r} is no signal")
    text = f"{known.meaning}; {meaning.strip()}" if meaning.strip() else known.meaning
    return Entry(column, signal, text, factor, offset, rank)


@dataclass(frozen=True)
class Dialect:
    """A framework's vocabulary, and what tells that a file is in it.

    `marks` matches names that no other framework writes; `steps` are the names of its step
    columns, best first; `prefixes` are what trackers put before a name, and what stands there
    instead without them; `notes` say what no log of it can show.
    """

    name: str
    entries: tuple[Entry, ...]
    marks: re.Pattern
    steps: tuple[str, ...]
    prefixes: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()

    def lookup(self, column: str) -> Entry | None:
        """What a column is, its `{}` filled in; None if the framework writes no such name."""
        for name in self.names(column):
            entry = _exact(self.name).get(name) or _match(self.name, name)
            if entry is not None:
                return entry
        return None

    def names(self, column: str) -> list[str]:
        """The column's name, and without a tracker's prefix."""
        column = tidy(column)
        bare = (new + column[len(old) :] for old, new in self.prefixes if column.startswith(old))
        return [column, *bare]


def _dialect(name, table, marks, steps, prefixes=(), notes=()) -> Dialect:
    lines = [line for line in table.splitlines() if line.strip()]
    entries = tuple(_entry(line, rank) for rank, line in enumerate(lines))
    return Dialect(name, entries, re.compile(marks), steps, prefixes, notes)


_HF_NOTES = (
    "A NaN loss may be hidden: the Hugging Face Trainer logs the running mean in its place "
    "(logging_nan_inf_filter), and TRL leaves a metric out that was NaN.",
    "TRL writes `kl` only where beta is not 0: without it nothing is known of the reference.",
)

DIALECTS: dict[str, Dialect] = {
    d.name: d
    for d in (
        _dialect(
            "trl",
            TRL,
            r"(train/)?(eval_)?(reward_std|frac_reward_zero_std|completion_length|completions/.+"
            r"|rewards/.+|clip_ratio/.+|sampling/.+|rollout_correction/.+|objective/.+"
            r"|policy/approxkl_avg|global_step/max_steps)",
            ("step", "train/global_step", "global_step/max_steps", "iteration", "global_step"),
            (("train/", ""), ("eval/", "eval_")),
            _HF_NOTES,
        ),
        _dialect(
            "verl",
            VERL,
            r"actor/(pg_clipfrac|ppo_kl|entropy_loss|lr\(1e-4\)|reward_kl_penalty).*|critic/vf_.+"
            r"|response_length/.+|val-(core|aux)/.+|val/test_score/.+|training/.+|rollout_corr/.+"
            r"|mismatch/.+|timing_s/.+|global_seqlen/.+",
            ("training/global_step", "step"),
            (),
            ("verl's file logger writes null for NaN and for infinity: both are read as NaN.",),
        ),
        _dialect(
            "slime",
            SLIME,
            r"rollout/(raw_reward|response_len.*|truncated.*|zero_std/.+|log_probs)|train/ois"
            r"|train/(train_rollout_logprob_abs_diff|lr-pg_\d+|pg_clipfrac|tis.*)",
            ("train/step", "rollout/step", "eval/step"),
            (),
            ("`rollout/rewards` and advantages are centred in slime: a flat 0 is normal.",),
        ),
        _dialect(
            "openrlhf",
            OPENRLHF,
            r"(train/)?(actor_lr|actor_grad_norm|ppo_clip_ratio|vllm_kl|group_reward_std|act_loss"
            r"|dynamic_filtering_pass_rate|timing/(make_experience|ppo_train|step_total)"
            r"|rollout/(reward_mean|response_length_mean|truncated_rate))",
            ("train/global_step", "global_step", "eval/global_step"),
            (("train/", ""), ("eval/", "")),
        ),
        _dialect(
            "prime-rl",
            PRIME_RL,
            r"(mismatch_kl|is_masked|max_vio|ref_kl)/.+|train/agg/.+|optim/grad_norm|entropy/all/.+"
            r"|(seq_len|decode_len|reward|is_truncated|num_turns)/all/.+|off_policy/.+|solved?_.+",
            ("step", "progress/ckpt_step"),
            (),
            (
                "prime-rl writes two logs, trainer and orchestrator: each shows its own half.",
                "prime-rl's file logger leaves NaN and infinity out.",
            ),
        ),
        _dialect(
            "nemo-rl",
            NEMO_RL,
            r"train/(gen_kl_error|policy_kl_error|token_mult_prob_error|js_divergence_error"
            r"|probs_ratio.*|mean_gen_tokens_per_sample|global_valid_toks|approx_entropy)"
            r"|validation/accuracy|timing/train/.+",
            ("step", "train/step"),
        ),
        _dialect(
            "skyrl",
            SKYRL,
            r"policy/(policy_.+|final_loss|loss_metrics/.+|rollout_train_.+|raw_grad_norm"
            r"|ppo_clip_ratio)|reward/avg_.+|generate/.+|loss/avg_.+|trainer/global_step",
            ("trainer/global_step", "step"),
            (),
            (
                "SkyRL's is_ratio_min is 0 whenever a sequence is padded, and its is_ratio_std "
                "counts padding: neither is used.",
            ),
        ),
        _dialect(
            "areal",
            AREAL,
            r"(ppo|grpo)_actor/.+|eval-rollout/.+|timeperf/.+",
            ("step", "train_step"),
            (("ppo_actor/", ""), ("grpo_actor/", "")),
        ),
        _dialect(
            "roll",
            ROLL,
            r"actor/(ppo_ratio_.+|approxkl|policykl|total_loss|train_infer_.+|ratio_(mean|max|min)"
            r"|max_len_mask_ratio|difficulty_mask_ratio)|tokens?/.+|group/.+|val_correct/.+"
            r"|system/(global_step|samples|batch_size)|scheduler/.+|critic/entropy/mean",
            ("step", "system/global_step", "system/step"),
            (),
            (
                "ROLL's actor/max_len_mask_ratio is 1 also where the mask is switched off: it is "
                "not read as truncation.",
            ),
        ),
        _dialect(
            "tinker",
            TINKER,
            r"progress/(batch|done_frac)|optim/kl_sample_train_v\d|(test/)?env/all/.+"
            r"|kl_pre_post_v\d|by_group/.+|sampling_client/.+",
            ("step", "progress/batch"),
        ),
        _dialect(
            "sb3",
            SB3,
            r"rollout/ep_.+_mean|time/total_timesteps|train/(approx_kl|clip_fraction|n_updates"
            r"|policy_gradient_loss|explained_variance|clip_range)",
            ("time/total_timesteps", "step"),
            (),
            ("Stable-Baselines3 logs environment steps; its episodes are not completions.",),
        ),
    )
}

TRL_ASYNC_ENTRIES = {
    entry.column: entry
    for entry in (_entry(line, 0) for line in TRL_ASYNC.splitlines() if line.strip())
}

ALIASES = {
    "unsloth": "trl",
    "ms-swift": "trl",
    "swift": "trl",
    "nemo": "nemo-rl",
    "prime": "prime-rl",
}


@cache
def _exact(dialect: str) -> dict[str, Entry]:
    entries = DIALECTS[dialect].entries
    return {e.column: e for e in reversed(entries) if e.exact}


@cache
def _patterns(dialect: str) -> tuple[tuple[re.Pattern, Entry], ...]:
    found = [e for e in DIALECTS[dialect].entries if not e.exact]
    return tuple((_pattern(e.column), e) for e in found)


def _pattern(column: str) -> re.Pattern:
    """`{}` is a part of a path; in `val-core/{}/mean@{}` the first may hold slashes."""
    one = r"(.+)" if column.startswith(("val-core/", "val/test_score/")) else r"([^/]+)"
    return re.compile(re.escape(column).replace(re.escape("{}"), one))


@lru_cache(maxsize=4096)
def _match(dialect: str, column: str) -> Entry | None:
    for pattern, entry in _patterns(dialect):
        found = pattern.fullmatch(column)
        if found:
            signal = entry.signal
            for part in found.groups():
                signal = signal.replace("{}", part, 1)
            return Entry(column, signal, entry.meaning, entry.factor, entry.offset, entry.rank)
    return None


def tidy(column: str) -> str:
    """A name without unsloth's blanks around its slashes and ROLL's `@sum` at its end."""
    return _UNTIDY.sub(lambda m: "/" if "/" in m[0] else "", column)


_UNTIDY = re.compile(r"\s*/\s*|@(?:sum|mean|max|min)$")


def recognise(columns) -> Dialect | None:
    """The framework whose names most of the columns are; None without a name only it writes."""
    columns = [tidy(c) for c in columns]
    best, most = None, 0
    for dialect in DIALECTS.values():
        if not any(dialect.marks.fullmatch(c) for c in columns):
            continue
        known = sum(dialect.lookup(c) is not None for c in columns)
        marked = sum(dialect.marks.fullmatch(c) is not None for c in columns)
        if known and known + marked > most:
            best, most = dialect, known + marked
    return best


def columns_of(dialect: str, signal: str) -> list[str]:
    """The names under which a framework logs a signal: what to switch on where it is missing."""
    name = ALIASES.get(dialect, dialect)
    return (
        [e.column for e in DIALECTS[name].entries if e.signal == signal] if name in DIALECTS else []
    )
