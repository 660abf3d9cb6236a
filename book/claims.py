"""The ledger of claims: what five widely read texts say, who says otherwise, and what was measured.

Numbers are read from `results/` when the page is made, so a repeated experiment changes the page.
A finding without a number rests on a computation that the linked chapter does in full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from stablerl_core.experiments import Interval, interval, load
from stablerl_core.experiments.evaluation_settings import SETTINGS

TEXTS = {
    "000": 'A text on DeepSeek-V3.2 and a "triple dilemma"',
    "001": "A course chapter on training stability",
    "002": "A course chapter on optimizers and stability",
    "003": "Posts on BAPO",
    "004": 'A text on DeepSeek-R1\'s "disclosure"',
}
VERDICTS = {
    "reproduced": "seen here too",
    "partly": "true of a part, or with a condition that the text leaves out",
    "refuted": "tried here, and not so at this scale",
    "not seen here": "tried here; no difference was measurable",
    "contradicts its source": "the primary source says something else",
    "not testable here": "no source was found, or the scale does not allow a test",
}


@dataclass(frozen=True)
class Claim:
    """One claim: the texts that make it, their words in short, the source, the finding."""

    texts: str
    says: str
    source: str
    verdict: str
    chapter: str
    finding: Callable[[], str] | str

    def found(self) -> str:
        return self.finding if isinstance(self.finding, str) else self.finding()


def at(name: str, arm: str, signal: str, first: int, last: int) -> Interval:
    """Interval over seeds of a signal over steps first … last of a stored experiment."""
    return load(name).over(arm, signal, first, last)


def less(name: str, arm: str, other: str, signal: str, first: int, last: int) -> Interval:
    """The same of arm − other, paired by seed."""
    return load(name).change(arm, other, signal, first, last)


def across(left: tuple, right: tuple) -> Interval:
    """`less` for arms of two experiments with the same seeds: (name, arm, signal, first, last)."""
    pairs = [load(name).per_seed(*rest) for name, *rest in (left, right)]
    return interval([a - b for a, b in zip(*pairs, strict=True)])


ACC = "heldout_accuracy"
END_4 = (36, 50)
GRPO_4 = ("clipping_4", "grpo", ACC, *END_4)
GRPO_ENTROPY = ("clipping_4", "grpo", "entropy", *END_4)

LAYER_2 = (
    Claim(
        "000",
        "K3 is Σ δ log δ and overflows about every thousand steps",
        "k₃ = δ − 1 − log δ {cite}`schulman2020kl`; the report's reason for a correction is a "
        "biased and unbounded gradient, not overflow {cite}`deepseek2025v32`",
        "contradicts its source",
        "21_which_kl_gradient",
        "δ log δ has the mean of the forward KL and the gradient of neither. A policy's own "
        "tokens have δ ≥ x with a chance of at most 1/x, so float32 does not overflow.",
    ),
    Claim(
        "000",
        "the unbiased KL cuts the variance of the gradient by 76 %",
        "only that it is unbiased {cite}`deepseek2025v32`",
        "partly",
        "21_which_kl_gradient",
        lambda: (
            "Exactly, the saving runs from nothing to nearly all as the policy drifts, and with "
            "an old sampler it can be negative near the reference. In runs, k₃ minus unbiased "
            f"at β = 0.3: KL {less('kl_gradient', 'k3', 'unbiased', 'kl_ref', 21, 40)} nats, "
            f"accuracy {less('kl_gradient', 'k3', 'unbiased', ACC, 21, 40)}."
        ),
    ),
    Claim(
        "001",
        "KL that rises while entropy falls means that the policy moves too fast",
        "a rule of thumb, without a source",
        "partly",
        "20_reading_kl_and_entropy",
        lambda: (
            "Data that is too easy gives the same picture. Held-out accuracy tells: at the usual "
            f"rate {at('kl_entropy', 'healthy', ACC, 50, 60)}, ten times too fast "
            f"{at('kl_entropy', 'large', ACC, 50, 60)}, on easy data "
            f"{at('kl_entropy', 'easy', ACC, 50, 60)}; entropy falls in all three."
        ),
    ),
    Claim(
        "001",
        "from [0.80, 0.20] to [0.95, 0.05] KL goes from 0.19 to 0.49, entropy from 0.50 to 0.20",
        "arithmetic, against a reference of one half",
        "reproduced",
        "20_reading_kl_and_entropy",
        "Both pairs are right to two digits.",
    ),
    Claim(
        "001",
        "constrain strongly early and relax later (dynamic KL)",
        "not in the report that the text names {cite}`seed2025thinking`; a controller that holds "
        "a KL is older {cite}`ziegler2019finetuning`",
        "not seen here",
        "24_schedules_and_stages",
        lambda: (
            "β that falls minus the same mean β throughout: accuracy "
            f"{less('schedules', 'falling', 'even', ACC, 30, 40)}; minus β that rises: "
            f"{less('schedules', 'falling', 'rising', ACC, 30, 40)}. No difference was measurable."
        ),
    ),
    Claim(
        "001",
        "change the clip range over training (adaptive clipping)",
        "not in the report that the text names {cite}`seed2025thinking`",
        "not seen here",
        "24_schedules_and_stages",
        lambda: (
            "A range that widens minus a constant one: accuracy "
            f"{less('schedules', 'wide', 'none', ACC, 30, 40)}; one that is steered by the clip "
            f"fraction: {less('schedules', 'steered', 'none', ACC, 30, 40)}."
        ),
    ),
    Claim(
        "001",
        "large groups early, for instance 32, and small ones later",
        "no source; GLM-4.5 goes the other way for hard problems {cite}`glm2025`",
        "not seen here",
        "24_schedules_and_stages",
        lambda: (
            "At one budget of answers: 32 throughout minus 8 throughout "
            f"{less('group_sizes', 'thirty_two', 'eight', ACC, 30, 40)}; shrinking minus growing "
            f"{less('group_sizes', 'shrinking', 'growing', ACC, 30, 40)}."
        ),
    ),
    Claim(
        "001",
        "a later stage overwrites an earlier skill; replay or distillation across stages keeps it",
        "GLM-5 distils across stages, on-policy {cite}`glm2026`",
        "reproduced",
        "24_schedules_and_stages",
        lambda: (
            "The old skill at the end of the new stage, the paths compared: clipped gradients "
            f"{at('stages', 'clipped', 'sort', 80, 80)}, a KL penalty on the new prompts "
            f"{at('stages', 'kl_new', 'sort', 80, 80)}, replay "
            f"{at('stages', 'replay', 'sort', 80, 80)}, distillation "
            f"{at('stages', 'distil', 'sort', 80, 80)}."
        ),
    ),
    Claim(
        "001",
        "VAPO's length-adaptive GAE normalizes the reward scale across lengths",
        "it sets λ = 1 − 1/(αl) and leaves rewards alone {cite}`yue2025vapo`",
        "contradicts its source",
        "25_long_sequences",
        lambda: (
            "On chains of 2 000 tokens with a blind critic it earns "
            f"{at('credit_arrival', 'blind_adaptive', 'reward_2000', 101, 120)}, λ = 1 "
            f"{at('credit_arrival', 'blind_1', 'reward_2000', 101, 120)}; with a critic that sees "
            f"{at('credit_arrival', 'seeing_adaptive', 'reward_2000', 101, 120)} and "
            f"{at('credit_arrival', 'seeing_1', 'reward_2000', 101, 120)}."
        ),
    ),
    Claim(
        "004",
        "PPO needs λ between 0.95 and 0.99; a wrong one costs more than 40 %",
        "R1's appendix: λ = 0.95 is much worse than GRPO, λ = 1 nearly equal "
        "{cite}`deepseek2025r1`",
        "contradicts its source",
        "25_long_sequences",
        lambda: (
            "With a blind critic at 2 000 tokens λ = 0.95 earns "
            f"{at('credit_arrival', 'blind_0.95', 'reward_2000', 101, 120)}, 0.99 "
            f"{at('credit_arrival', 'blind_0.99', 'reward_2000', 101, 120)}, 1 "
            f"{at('credit_arrival', 'blind_1', 'reward_2000', 101, 120)}, GRPO "
            f"{at('credit_arrival', 'grpo', 'reward_2000', 101, 120)}. A critic that sees turns "
            "the order round: 0.95 earns "
            f"{at('credit_arrival', 'seeing_0.95', 'reward_2000', 101, 120)}."
        ),
    ),
    Claim(
        "003",
        "negative samples dominate, and a balance of 1:1 restores them and the entropy",
        "the paper asks for a positive share of at least 0.4; 1:1 is the released configuration "
        "{cite}`xi2025bapo`",
        "refuted",
        "23_balance_and_entropy",
        lambda: (
            "The share of positive pull begins at one half by construction. A balance of 1:1 by "
            "gradient, minus GRPO, four updates a rollout: accuracy "
            f"{across(('balance', 'replay_even', ACC, *END_4), GRPO_4)}, entropy "
            f"{across(('balance', 'replay_even', 'entropy', *END_4), GRPO_ENTROPY)} nats. A third "
            "of the learning rate repairs the same run: accuracy "
            f"{across(('balance', 'replay_slower', ACC, *END_4), GRPO_4)} more."
        ),
    ),
    Claim(
        "003",
        "a model of 32 billion parameters so trained beats closed ones",
        "AIME 2024 and 2025 scores of 87.1 and 80.0 are reported {cite}`xi2025bapo`",
        "not testable here",
        "",
        "",
    ),
)

LAYER_1 = (
    Claim(
        "001",
        "clipping and optimizers treat loss spikes, not a reward that pays for the wrong thing",
        "a principle, without a source",
        "reproduced",
        "10_reward_hacking",
        lambda: (
            "Three wrong rewards. Clipped minus unclipped, in held-out accuracy: keywords "
            f"{less('reward_hacking', 'keywords_clip', 'keywords', ACC, 50, 60)}, a bonus for "
            f"length {less('reward_hacking', 'length_clip', 'length', ACC, 50, 60)}, a hole "
            f"{less('reward_hacking', 'hole_clip', 'hole', ACC, 50, 60)}. A strict verifier from "
            "the middle on, minus none, with keywords: "
            f"{less('reward_hacking', 'keywords_repaired', 'keywords', ACC, 50, 60)}."
        ),
    ),
    Claim(
        "004",
        "keyword matching produced invalid outputs; a syntax penalty is the countermeasure",
        "not found in the report {cite}`deepseek2025r1`",
        "partly",
        "10_reward_hacking",
        lambda: (
            "The first half is so. The penalty makes answers valid: "
            f"{at('reward_hacking', 'keywords_syntax', 'valid', 50, 60)} of them, against "
            f"{at('reward_hacking', 'keywords', 'valid', 50, 60)}. It does not make them right: "
            "accuracy minus that under the strict verifier "
            f"{less('reward_hacking', 'keywords_syntax', 'strict', ACC, 50, 60)}."
        ),
    ),
    Claim(
        "001, 002",
        "self-verification pays 1, ½ and 0, and gives hard groups a useful gradient",
        "not in the report that the texts name {cite}`seed2025thinking`; DeepSeekMath-V2 pays for "
        "the quality first {cite}`shao2025deepseekmathv2`",
        "refuted",
        "13_shaping",
        lambda: (
            "Whoever is right in less than half of the tries earns a sure ½ by being wrong on "
            "purpose. Right first answers end at "
            f"{at('shaping', 'sv_levels', 'first_right', 41, 50)}, with V2's form "
            f"{at('shaping', 'sv_proof', 'first_right', 41, 50)}, paid right or wrong "
            f"{at('shaping', 'add_strict', 'first_right', 41, 50)}."
        ),
    ),
    Claim(
        "004",
        "rewards are normalized by quantiles, which mitigates outliers",
        "mean and standard deviation {cite}`deepseek2025r1`; a quantile baseline is another "
        "paper's {cite}`wu2025quantile`",
        "contradicts its source",
        "13_shaping",
        lambda: (
            "With one reward in fifty 20 too large: quantile minus mean, accuracy "
            f"{less('shaping', 'outlier_quantile', 'outlier_mean', ACC, 40, 50)}; and the outliers "
            f"cost nothing measurable, {less('shaping', 'outlier_mean', 'plain', ACC, 40, 50)}, "
            "since the division bounds every advantage."
        ),
    ),
    Claim(
        "001",
        "problems that the policy solves 30 to 70 % of the time are worth most",
        "not in the report that the text names {cite}`seed2025thinking`; 20 to 80 % elsewhere "
        "{cite}`bae2025online`",
        "partly",
        "12_where_the_gradient_vanishes",
        lambda: (
            "At one budget of completions, minus uniform draws, accuracy on what is in reach: a "
            f"bucket that is measured once {_curriculum('frozen bucket')}, one that follows the "
            f"policy {_curriculum('moving bucket')}."
        ),
    ),
    Claim(
        "001, 002",
        "begin with easy problems, and make them harder as the pass rate rises",
        "not in the report that the texts name {cite}`seed2025thinking`",
        "partly",
        "12_where_the_gradient_vanishes",
        lambda: (
            "The pass rate has to decide. Minus uniform draws at the same budget: levels in a "
            f"fixed order {_curriculum('easy first')}, a bucket that follows the policy "
            f"{_curriculum('moving bucket')}. There was no rung between what is solved and what "
            "is never solved."
        ),
    ),
    Claim(
        "004",
        "groups below 8 have 2.1 times the variance",
        "not found in the report {cite}`deepseek2025r1`",
        "refuted",
        "12_where_the_gradient_vanishes",
        lambda: (
            "Without the division the error of an advantage is p(1 − p)/G, so 8 is no threshold. "
            "Noise of a step's gradient, groups of 4 over groups of 8: "
            f"{_over('noise_prompts', 4, 8)} for as many groups, {_over('noise', 4, 8)} for as "
            "many completions."
        ),
    ),
    Claim(
        "001",
        "scores of different templates, prompts and sampling parameters cannot be compared",
        "the case of Llama 4, as the texts tell it",
        "reproduced",
        "14_same_weights_different_score",
        lambda: (
            "Two policies under seventeen configurations, accuracy of the trained one minus that "
            f"of its base: {_gap('reference')} as it was trained, {_gap('greedy')} answering "
            "greedily. The order turns round."
        ),
    ),
)

LAYER_3 = (
    Claim(
        "001",
        "a NaN that one fixed batch reproduces comes from that batch or a deterministic path; one "
        "that appears at random, from low precision",
        "a rule of thumb, without a source",
        "refuted",
        "30_the_first_nan",
        lambda: (
            "Of six planted faults all are reproduced. "
            f"{_wider()} of them are finite in a wider format, an overflow of float16 among them. "
            "The replay in another format tells precision, repetition does not."
        ),
    ),
    Claim(
        "000",
        "filter gradients above three times the mean, and halve the learning rate there",
        "not in the report {cite}`deepseek2025v32`",
        "partly",
        "31_gradients_before_the_spike",
        lambda: (
            "Five bad batches in forty, accuracy minus that without them: nothing done "
            f"{less('gradient_spikes', 'free', 'none', 'accuracy', 40, 40)}, halved "
            f"{less('gradient_spikes', 'halve', 'none', 'accuracy', 40, 40)}, clipped "
            f"{less('gradient_spikes', 'clip', 'none', 'accuracy', 40, 40)}, skipped "
            f"{less('gradient_spikes', 'skip', 'none', 'accuracy', 40, 40)}. Leaving the step out "
            "is enough; the halvings are for good."
        ),
    ),
    Claim(
        "000",
        "gradient checkpointing reduces memory by 60 %",
        "not in the report {cite}`deepseek2025v32`; a third more arithmetic "
        "{cite}`chen2016training`",
        "partly",
        "34_precision_and_memory",
        lambda: (
            "The same switch saves from "
            f"{_saved('256_tokens', 2)} % to {_saved('2048_tokens', 8)} % of what a run holds at "
            "its peak, by tokens and depth. The gradient is the same to the last bit."
        ),
    ),
    Claim(
        "000",
        "8:1 gradient compression reduces latency by 70 %",
        "not in the report {cite}`deepseek2025v32`",
        "partly",
        "34_precision_and_memory",
        lambda: (
            "Four bits with their scales are "
            f"{at('compression_slow', '4bit', 'ratio', 20, 30).mean:.1f} : 1 from float32 and half "
            "of that from bfloat16. Minus no compression, accuracy "
            f"{less('compression_slow', '4bit', 'none', ACC, 20, 30)}: no difference was "
            "measurable. Latency was not measured."
        ),
    ),
    Claim(
        "000",
        "an FP16/FP8 hybrid improves utilization by 45 %",
        "DeepSeek-V3 trained in FP8 and bfloat16 {cite}`deepseek2024v3`; no such number",
        "not testable here",
        "",
        "",
    ),
    Claim(
        "004",
        "4-bit gradient compression reduces the storage of optimizer states",
        "not found in the report {cite}`deepseek2025r1`",
        "refuted",
        "34_precision_and_memory",
        "States are computed from gradients that have arrived and been unpacked; how they "
        "travelled does not occur in the account of bytes.",
    ),
    Claim(
        "004",
        "offloading, compression and sharding raise the parameters of a GPU from 13B to 37B",
        "models that a phase does not use leave the GPU {cite}`deepseek2025r1`; no such numbers",
        "not testable here",
        "",
        "",
    ),
    Claim(
        "001",
        "Muon makes the singular values of an update even, so that no few directions dominate",
        "so it is, about {cite}`jordan2024muon`; five steps leave the smallest behind",
        "reproduced",
        "32_muon",
        lambda: (
            "Each at its best of five rates, Muon minus AdamW in the loss of a warm start: "
            f"{less('muon_sweep', 'muon 0.03', 'adamw 0.01', 'loss', 36, 40)}."
        ),
    ),
    Claim(
        "001, 002",
        "MuonClip limits the norm of Muon's update",
        "it has no such limit; its clip is QK-Clip {cite}`kimi2025k2`",
        "contradicts its source",
        "32_muon",
        lambda: (
            "The norm of the update does not depend on that of the gradient, so the limit acts on "
            "nearly every matrix at every step: a smaller learning rate. At the same rate it "
            f"costs {less('muon_sweep', 'norm_cap 0.01', 'muon 0.01', 'loss', 36, 40)} in loss, "
            "with steps of about the same length "
            f"{less('muon_sweep', 'norm_cap same size', 'muon 0.01', 'loss', 36, 40)}."
        ),
    ),
    Claim(
        "002",
        "the limit stops a single outlier gradient from wrecking a run",
        "not in the report {cite}`kimi2025k2`",
        "refuted",
        "32_muon",
        lambda: (
            "One bad batch costs Muon "
            f"{less('muon_outlier', 'muon', 'muon, no outlier', 'loss', 36, 40)} in loss, with the "
            "gradient clipped "
            f"{less('muon_outlier', 'muon, gradient clipped', 'muon, no outlier', 'loss', 36, 40)}"
            ". With the limit the same run, minus Muon's without it, ends at "
            f"{less('muon_outlier', 'norm_cap', 'muon', 'loss', 36, 40)}."
        ),
    ),
    Claim(
        "001, 002",
        "QK-clip clamps attention scores before the softmax (in 002 to ±30)",
        "it rescales the query and key weights of a hot head after the step, with a bound of 100 "
        "{cite}`kimi2025k2`",
        "contradicts its source",
        "33_qk_clip",
        lambda: (
            "With hot queries and keys, loss minus that without any bound: the clamp "
            f"{less('qk_clip', 'clamp', 'none', 'loss', 36, 40)}, QK-Clip "
            f"{less('qk_clip', 'qk_clip', 'none', 'loss', 36, 40)}, a soft-cap "
            f"{less('qk_clip', 'soft_cap', 'none', 'loss', 36, 40)}. Largest logit under the clamp "
            f"{at('qk_clip', 'clamp', 'attention_logit_max', 36, 40).mean:.0f}, with QK-Clip "
            f"{at('qk_clip', 'qk_clip', 'attention_logit_max', 36, 40).mean:.0f}."
        ),
    ),
    Claim(
        "001, 002",
        "attention scores blow up in long contexts",
        "the report sees logits above 1,000 with Muon at scale {cite}`kimi2025k2`",
        "partly",
        "33_qk_clip",
        lambda: (
            "Ten times the learning rate for queries and keys does it in a short context. A "
            "context eight times as long raises the largest logit from "
            f"{at('qk_clip', 'none', 'attention_logit_max', 36, 40).mean:.0f} to "
            f"{at('qk_clip', 'packed', 'attention_logit_max', 36, 40).mean:.0f}."
        ),
    ),
    Claim(
        "001, 002",
        "one loss spike per 10T tokens instead of one per 1T, and 15 % faster than Adam",
        "no loss spike in 15.5T tokens {cite}`kimi2025k2`; neither rate is in a report, and "
        "Moonlight's figure is half of AdamW's compute {cite}`liu2025moonlight`",
        "not testable here",
        "",
        "",
    ),
)

LAYER_4 = (
    Claim(
        "000",
        "mask what has an importance weight above 0.95",
        "whole sequences, only with a negative advantage and a mean log-ratio beyond δ "
        "{cite}`deepseek2025v32`",
        "contradicts its source",
        "45_off_policy_and_async",
        lambda: (
            "On fresh data every weight is 1, so nothing is learned: gradient norm "
            f"{at('seed_rules', 'threshold_1', 'grad_norm', 1, 40)}. The report's mask, with data "
            "up to fifteen steps old, minus no mask: accuracy "
            + str(
                across(("opsm", "0.0001_16", ACC, 30, 40), ("staleness", "trainer_16", ACC, 30, 40))
            )
            + "."
        ),
    ),
    Claim(
        "000",
        "weights of exp(−0.1 · position) lengthen the effective context by 40 %",
        "not in the report",
        "refuted",
        "45_off_policy_and_async",
        lambda: (
            "Tokens past the fiftieth get less than a hundredth of the gradient. In answers of "
            "eight tokens, with minus without: accuracy "
            + str(
                across(
                    ("seed_rules", "decay_1", ACC, 30, 40), ("staleness", "trainer_1", ACC, 30, 40)
                )
            )
            + "."
        ),
    ),
    Claim(
        "000",
        "Keep Routing loads the routing of training at deployment; throughput +18 %, balance +32 %",
        "the experts chosen while sampling are enforced while training; no numbers "
        "{cite}`deepseek2025v32,ma2025r3`",
        "contradicts its source",
        "43_keep_routing",
        lambda: (
            "A table of the trainer's routing serves an accuracy of "
            f"{at('routing_fault', 'table', 'served', 30, 40)}, exact routers minus the table with "
            f"replay {less('routing_fault', 'exact', 'table_R3', 'served', 30, 40)}. Replay in the "
            "right direction, minus none, in the run whose routers are rounded: accuracy "
            f"{less('routing_fault', 'R3', 'none', ACC, 30, 40)}. It costs time instead of "
            "saving it, and no load of an expert changes by as much as 32 %."
        ),
    ),
    Claim(
        "000",
        "Keep Sampling Mask enforces patterns of training at generation; consistency 3.2 to 4.7",
        "the set of tokens that top-p kept while sampling is applied in training "
        "{cite}`deepseek2025v32`",
        "contradicts its source",
        "44_keep_sampling_mask",
        lambda: (
            "Under a sampler restricted to a grammar, accuracy at full vocabulary: "
            f"{at('mask_grammar', 'grammar_stored', ACC, 30, 40)} with the stored sets, "
            f"{at('mask_grammar', 'grammar_none', ACC, 30, 40)} without. Under top-p 0.9, with "
            "minus without, sampled as in training: "
            f"{less('mask_top_p', 'top_p_stored', 'top_p_none', 'own_accuracy', 30, 40)}: no "
            "difference was measurable."
        ),
    ),
    Claim(
        "001",
        "a log-probability gap of 0.19 moves the ratio by 17 %",
        "arithmetic",
        "reproduced",
        "40_two_policies_one_name",
        lambda: (
            "Share of tokens with such a gap before any update: bfloat16 "
            f"{_percent(at('two_policies', 'bfloat16', 'at_least_0.19', 0, 9))}, weights in 4 bits "
            f"{_percent(at('two_policies', 'int4', 'at_least_0.19', 0, 9))}."
        ),
    ),
    Claim(
        "002",
        "the same token can differ by tens of percentage points between engines",
        "a k₃ of about 0.001 a token, with a long tail {cite}`ma2025r3`",
        "partly",
        "40_two_policies_one_name",
        "Single tokens do, mostly where an expert was exchanged; the mean gap of bfloat16 is some "
        "thousandths of a nat.",
    ),
    Claim(
        "002",
        "sample in FP16 or BF16 instead of FP8, and the mismatch is gone",
        "bfloat16 is itself the problem, float16 in both engines the cure {cite}`qi2025fp16`",
        "contradicts its source",
        "40_two_policies_one_name",
        "float16 on one side only is no better than bfloat16 on both; on both sides it leaves a "
        "fraction of the gap. What weights have lost in 8 or 4 bits no trainer brings back.",
    ),
    Claim(
        "002",
        "the bias is proportional to 1 − p, so rare tokens have the most",
        "a bound of 2ε(1 − p) {cite}`li2025pruning`",
        "partly",
        "40_two_policies_one_name",
        "No token breaks the bound. The mean gap is largest between p = 0.01 and 0.3, never in "
        "the rarest bin.",
    ),
    Claim(
        "002",
        "recomputing log-probabilities with the trainer is the most reliable correction",
        "it defines π_old, and tokens still come from μ {cite}`yao2025offpolicy,liu2025speed`",
        "partly",
        "42_corrections",
        lambda: (
            "Bias of the exact gradient on chains of eight tokens, over its length: recomputing "
            f"{at('correction_bias', 'recompute', 'bias', 8, 8)}, token weights "
            f"{at('correction_bias', 'token_is', 'bias', 8, 8)}, the product "
            f"{at('correction_bias', 'sequence_is', 'bias', 8, 8)}. In training with a sampler of "
            "4 bits, truncated weights minus recomputing: accuracy "
            f"{less('corrections_1', 'int4_tis', 'int4_recompute', ACC, 30, 40)}. Under strong "
            "noise the truncated weights have more bias than recomputing."
        ),
    ),
    Claim(
        "002",
        "TIS, MIS, MinPRO and dynamic vocabulary pruning correct the mismatch",
        "each bounds or bans what it cannot weigh {cite}`yao2025offpolicy,liu2025speed,"
        "lei2026minpro,li2025pruning`",
        "partly",
        "42_corrections",
        lambda: (
            "Bias on the same chains: TIS "
            f"{at('correction_bias', 'tis', 'bias', 8, 8)}, MIS "
            f"{at('correction_bias', 'mis', 'bias', 8, 8)}, our reading of MinPRO "
            f"{at('correction_bias', 'minimum_prefix', 'bias', 8, 8)}, pruning "
            f"{at('correction_bias', 'pruned', 'bias', 8, 8)}, against "
            f"{at('correction_bias', 'recompute', 'bias', 8, 8)} of recomputing."
        ),
    ),
    Claim(
        "002",
        "routing replay repairs off-policy training of mixtures of experts",
        "gains at several updates a rollout, none strictly on-policy {cite}`zheng2025stabilizing`",
        "partly",
        "43_keep_routing",
        lambda: (
            "With routers rounded to two bits, yes (see above). With an exact sampler and eight "
            "updates, R2 minus none: accuracy "
            f"{less('keep_routing_exact', 'R2_8_fast', 'none_8_fast', ACC, 20, 40)}; half the "
            "learning rate minus the whole: "
            f"{less('keep_routing_exact', 'none_8_slow', 'none_8_fast', ACC, 20, 40)}."
        ),
    ),
    Claim(
        "004",
        "asynchronous queues with a limit on their length keep data fresh",
        "a cap on admission {cite}`fu2025areal`; a limit on a queue was not found in the report",
        "partly",
        "45_off_policy_and_async",
        lambda: (
            "In the model of three queues a limit bounds the age too (oldest "
            f"{at('queues', 'backlog_limit', 'oldest', 200, 200)} versions, with a cap of 4 "
            f"{at('queues', 'backlog_cap', 'oldest', 200, 200)}, without either "
            f"{at('queues', 'backlog_jitter', 'oldest', 200, 200)}), and deadlocks if batches are "
            "filled in order and the limit is below the batches that the cap admits."
        ),
    ),
    Claim(
        "002",
        "decay the learning rate when answers surge in length",
        "so in the paper {cite}`zhang2026beyond`",
        "not testable here",
        "",
        "",
    ),
    Claim(
        "002",
        "FP8 throughout makes training 44 % faster",
        "FP8 for the sampler and its cache, up to 44 % more tokens, with corrections "
        "{cite}`qiu2026fp8rl`",
        "not testable here",
        "",
        "",
    ),
    Claim(
        "004",
        "prediction of several tokens makes sampling 40 % more efficient",
        "speculative sampling keeps the distribution; no such number was found",
        "not testable here",
        "",
        "",
    ),
    Claim(
        "000, 004",
        "hours between failures, throughput, latency and benchmark scores of large clusters",
        "no source was found for any of these numbers",
        "not testable here",
        "",
        "",
    ),
)

CLAIMS: tuple[Claim, ...] = LAYER_1 + LAYER_2 + LAYER_3 + LAYER_4


def _percent(found: Interval) -> str:
    return f"{found.mean:.1%} [{found.low:.1%}, {found.high:.1%}]"


def _curriculum(arm: str) -> Interval:
    """Accuracy on the levels in reach after the whole budget of chapter 12, minus uniform draws."""
    return less("curricula", arm, "uniform", "reached", 3072, 3072)


def _over(signal: str, size: int, other: int) -> Interval:
    """Ratio of a gradient's noise with groups of two sizes, paired by seed."""
    sides = [load("gradient_noise").per_seed("base", signal, g, g) for g in (size, other)]
    return interval([a / b for a, b in zip(*sides, strict=True)])


def _saved(arm: str, layers: int) -> str:
    """What checkpointing takes off peak memory and Adam's states, in per cent."""
    runs = load("checkpointing").runs[arm].values()
    rows = [row for run in runs for row in run if row["step"] == layers]
    sides = [(r["peak_less"] + r["adam"], r["peak"] + r["adam"]) for r in rows]
    return f"{interval([100 * (1 - a / b) for a, b in sides]).mean:.0f}"


def _gap(setting: str) -> Interval:
    """The trained policy's score minus the base's, at one configuration of chapter 14."""
    place = list(SETTINGS).index(setting)
    return less("evaluation_settings", "strict", "base", "score", place, place)


def _wider() -> int:
    """How many faults of chapter 30 a wider format does not have, in every seed."""
    found = load("first_nan")
    return sum(min(found.per_seed(arm, "wider", 1, 1)) == 1 for arm in found.arms)


def claims_markdown() -> str:
    """The ledger as MyST: how many of each verdict, then claim by claim, text by text."""
    counts = Counter(claim.verdict for claim in CLAIMS)
    lines = ["| verdict | meaning | claims |", "| --- | --- | --- |"]
    lines += [f"| **{name}** | {text} | {counts[name]} |" for name, text in VERDICTS.items()]
    for text, title in TEXTS.items():
        lines += ["", f"## {text}: {title}", ""]
        for claim in CLAIMS:
            if claim.texts.startswith(text):
                lines += _entry(claim)
    return "\n".join(lines)


def _entry(claim: Claim) -> list[str]:
    also = claim.texts.partition(", ")[2]
    says = claim.says[0].upper() + claim.says[1:] + (f" (also {also})" if also else "")
    lines = [f"{says}", f": **{claim.verdict}.** Source: {claim.source}."]
    if claim.chapter:
        lines += [
            "",
            f"  {claim.found()} [Chapter {claim.chapter[:2]}](../notebooks/{claim.chapter}.ipynb)",
        ]
    return [*lines, ""]
