"""The names that each framework writes, and the signal each of them is.

Read from the frameworks' code as of August 2026, and from older versions where the names changed.
A line is a column, its signal and, where the signal's own definition does not say it all, after a
semicolon what this framework writes. `{}` stands for a part of a name, `x-1` and `+1` for a factor
and an offset. Of several columns for one signal the first in the list is taken.
"""

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
