"""Logs of every format, written the way the framework writes them: names, wrappers, noise.

Each `FIXTURES` entry is a writer of (folder) → path and what must come out: the format, and
signals with their values at the steps 1, 2, 3 (or those given).
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

NAN = math.nan
BLUE, END = "\x1b[36m", "\x1b[0m"
RAY = f"{BLUE}(TaskRunner pid=4217){END} "


@dataclass
class Fixture:
    write: Callable[[Path], Path]
    format: str
    values: dict[str, list[float]]
    steps: list[float] = field(default_factory=lambda: [1.0, 2.0, 3.0])
    step_kind: str = "step"


def _text(name: str, text: str, encoding: str = "utf-8") -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(text.encode(encoding))
        return path

    return write


def _rows(**columns: list) -> list[dict]:
    names = list(columns)
    return [dict(zip(names, row, strict=True)) for row in zip(*columns.values(), strict=True)]


# --- TRL, unsloth, ms-swift --------------------------------------------------------------------

TRL_ROWS = _rows(
    loss=[0.0, 0.001, -0.002],
    grad_norm=[0.5, NAN, math.inf],
    learning_rate=[1e-6, 9e-7, 8e-7],
    num_tokens=[100.0, 210.0, 330.0],
    reward=[0.25, 0.5, 0.75],
    reward_std=[0.1, 0.2, 0.3],
    frac_reward_zero_std=[0.5, 0.25, 0.0],
    kl=[0.0, 0.01, 0.02],
    entropy=[0.9, 0.8, 0.7],
)
TRL_NESTED = {
    "rewards/format_reward/mean": 0.5,
    "rewards/format_reward/std": 0.25,
    "completions/mean_length": 120.5,
    "completions/clipped_ratio": 0.125,
    "clip_ratio/low_mean": 0.01,
    "clip_ratio/high_mean": 0.02,
    "clip_ratio/region_mean": 0.03,
    "sampling/sampling_logp_difference/mean": 0.015,
    "sampling/sampling_logp_difference/max": 1.5,
    "sampling/importance_sampling_ratio/mean": 0.98,
    "step_time": 4.5,
}
TRL_VALUES = {
    "loss": [0.0, 0.001, -0.002],
    "grad_norm": [0.5, NAN, math.inf],
    "reward": [0.25, 0.5, 0.75],
    "reward_std": [0.1, 0.2, 0.3],
    "zero_variance_groups": [0.5, 0.25, 0.0],
    "kl_ref": [0.0, 0.01, 0.02],
    "entropy": [0.9, 0.8, 0.7],
    "reward_part:format_reward": [0.5] * 3,
    "reward_part_std:format_reward": [0.25] * 3,
    "length": [120.5] * 3,
    "truncated": [0.125] * 3,
    "clip_fraction": [0.03] * 3,
    "clip_fraction_low": [0.01] * 3,
    "clip_fraction_high": [0.02] * 3,
    "logp_gap": [0.015] * 3,
    "logp_gap_max": [1.5] * 3,
    "weight_mean_capped": [0.98] * 3,
    "seconds": [4.5] * 3,
}


def _trainer_state(folder: Path) -> Path:
    history = []
    for step, row in enumerate(TRL_ROWS, 1):
        history.append({"epoch": step / 3, **row, **TRL_NESTED, "step": step})
        history.append({"epoch": step / 3, "eval_reward": 0.4, "eval_runtime": 2.0, "step": step})
    history.append({"epoch": 1.0, "step": 3, "total_flos": 0.0, "train_runtime": 60.0})
    state = {"best_metric": None, "epoch": 1.0, "global_step": 3, "log_history": history}
    path = folder / "trainer_state.json"
    path.write_text(json.dumps(state | {"max_steps": 3}, indent=2) + "\n")
    return path


def _trl_console(folder: Path) -> Path:
    """Progress bars in between, no step in the dictionaries, floats as text (Transformers 5)."""
    lines = ["Some weights were not initialized", f"{BLUE}INFO{END} vLLM engine started"]
    for step, row in enumerate(TRL_ROWS, 1):
        shown = {k: f"{v:.4g}" for k, v in (row | TRL_NESTED).items()} | {"epoch": "0.1"}
        bar = f"\r {step * 10}%|█         | {step * 10}/300 [00:1{step}<05:00,  1.50s/it]"
        lines.append(f"{bar}\r{' ' * 40}\r{shown}")
        lines.append(
            f"\r{' ' * 40}\r" + str({"eval_reward": "0.4", "eval_runtime": "2", "epoch": "1"})
        )
    lines.append("{'train_runtime': '60.1', 'train_loss': '0.001', 'epoch': '1'}")
    path = folder / "train.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8", newline="")
    return path


def _unsloth_console(folder: Path) -> Path:
    """Literal nan and inf, spaces around the slashes, as its patched trainer prints."""
    lines = []
    for row in TRL_ROWS:
        nested = {k.replace("/", " / "): v for k, v in TRL_NESTED.items()}
        lines.append(str(row | nested | {"epoch": 0.1}))
    path = folder / "unsloth.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def _swift(folder: Path) -> Path:
    path = folder / "logging.jsonl"
    with open(path, "w") as file:
        for step, row in enumerate(TRL_ROWS, 1):
            extra = {
                "rollout_correction/kl": 0.002,
                "rollout_correction/chi2_seq": 0.004,
                "rollout_correction/ess": 0.97,
                "memory(GiB)": 20.1,
                "elapsed_time": "3m 2s",
                "global_step/max_steps": f"{step}/3",
            }
            row = {k: v for k, v in row.items() if k != "entropy"} | {
                "entropy/mean": row["entropy"]
            }
            file.write(json.dumps(row | TRL_NESTED | extra) + "\n")
        file.write(json.dumps({"train_runtime": 9.0, "global_step/max_steps": "3/3"}) + "\n")
        file.write(
            json.dumps({"model_parameter_info": "PeftModel", "last_model_checkpoint": "x"}) + "\n"
        )
    return path


PPO_ROWS = _rows(
    step=[1, 2, 3],
    episode=[8, 16, 24],
    **{
        "objective/kl": [10.5, 11.0, 11.5],
        "objective/entropy": [99.0, 98.0, 97.0],
        "objective/non_score_reward": [-0.5, -0.55, -0.6],
        "objective/rlhf_reward": [1.0, 1.1, 1.2],
        "objective/scores": [1.5, 1.65, 1.8],
        "policy/approxkl_avg": [0.002, 0.003, 0.004],
        "policy/clipfrac_avg": [0.006, 0.005, 0.004],
        "val/ratio": [0.97, 0.98, 0.99],
        "loss/value_avg": [0.2, 0.1, 0.05],
        "lr": [3e-6, 2e-6, 1e-6],
    },
)


def _jsonl(name: str, rows: list[dict]) -> Callable[[Path], Path]:
    return _text(name, "".join(json.dumps(row) + "\n" for row in rows))


ASYNC_ROWS = _rows(
    step=[1, 2, 3],
    loss=[0.1, 0.2, 0.3],
    reward=[0.5, 0.5, 0.5],
    reward_std=[0.2, 0.2, 0.2],
    kl=[0.01, 0.02, 0.03],
    ratio=[1.0, 0.99, 0.98],
    weight_sync_time_s=[1.0, 1.0, 1.0],
)

# --- verl ------------------------------------------------------------------------------------


def _verl_line(step: int, score: float, wrap: bool = True) -> str:
    number = (lambda v: f"np.float64({v})") if wrap else str
    parts = {
        "global_seqlen/mean": "40532.0",
        "actor/entropy": number(0.32 + step / 100),
        "actor/kl_loss": number(0.001),
        "actor/pg_loss": number(-0.02),
        "actor/pg_clipfrac": number(0.0005),
        "actor/ppo_kl": number(-3.5e-05),
        "actor/grad_norm": number(0.11),
        "actor/lr": number(1e-06),
        "training/rollout_probs_diff_mean": number(0.003),
        "training/rollout_probs_diff_max": number(0.62),
        "training/rollout_actor_probs_pearson_corr": number(0.9991),
        "rollout_corr/k3_kl": number(0.0012),
        "rollout_corr/chi2_seq": number(1.7),
        "rollout_corr/rollout_is_eff_sample_size": number(0.99),
        "training/global_step": f"np.int64({step})" if wrap else str(step),
        "critic/score/mean": number(score),
        "critic/rewards/mean": number(score - 0.1),
        "critic/advantages/max": number(2.47),
        "response_length/mean": number(812.4),
        "response_length/clip_ratio": number(0.06),
        "val-core/openai/gsm8k/acc/mean@1": number(0.61),
        "timing_s/step": number(52.1),
    }
    return f"step:{step} - " + " - ".join(f"{k}:{v}" for k, v in parts.items())


def _verl_console(folder: Path) -> Path:
    """Colours, Ray prefixes, a glued line, a crash after step 3 and a resume at 2."""
    lines = [
        f"{RAY}Initial validation metrics: {{'val-core/openai/gsm8k/acc/mean@1': 0.5}}",
        f"{RAY}step:0 - val-core/openai/gsm8k/acc/mean@1:np.float64(0.5)",
        f"{BLUE}(WorkerDict pid=9){END} INFO:2026-01-01:before optimizer step:3",
        RAY + _verl_line(1, 0.1),
        RAY + _verl_line(2, 0.9) + f"{BLUE}(WorkerDict pid=77, ip=10.0.0.2){END} NCCL timeout",
        f"{RAY}Training Progress:   2%|▏         | 2/100 [01:44<1:25:10, 52.15s/it]",
        RAY + _verl_line(3, 0.9),
        "ray.exceptions.RayTaskError: killed",
        RAY + _verl_line(2, 0.2) + RAY + _verl_line(3, 0.3),
    ]
    path = folder / "verl.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


VERL_VALUES = {
    "reward": [0.1, 0.2, 0.3],
    "reward_shaped": [0.0, 0.1, 0.2],
    "entropy": [0.33, 0.34, 0.35],
    "kl_ref": [0.001] * 3,
    "kl_step": [-3.5e-05] * 3,
    "policy_loss": [-0.02] * 3,
    "clip_fraction": [0.0005] * 3,
    "grad_norm": [0.11] * 3,
    "learning_rate": [1e-6] * 3,
    "prob_gap": [0.003] * 3,
    "prob_gap_max": [0.62] * 3,
    "prob_correlation": [0.9991] * 3,
    "mismatch_kl": [0.0012] * 3,
    "mismatch_chi2_seq": [1.7] * 3,
    "weight_ess_capped": [0.99] * 3,
    "advantage_max": [2.47] * 3,
    "length": [812.4] * 3,
    "truncated": [0.06] * 3,
    "seconds": [52.1] * 3,
}

VERL_FILE = "".join(
    json.dumps(
        {
            "step": s,
            "data": {"critic/score/mean": s / 10, "actor/grad_norm": None, "actor/ppo_kl": 0.0},
        }
    )
    + "\n"
    for s in (1, 2, 3)
)
VERL_WRAPPED = "".join(
    json.dumps({"log": RAY + _verl_line(s, s / 10) + "\n", "stream": "stdout", "time": "2026"})
    + "\n"
    for s in (1, 2, 3)
)

OLD_VERL = [
    f"(main_task pid=1) step:{s} - actor/entropy_loss:0.{s} - actor/lr(1e-4):0.010 - "
    f"critic/kl:0.00{s} - critic/score/mean:0.{s} - val/test_score/openai/gsm8k:0.5 - "
    "actor/pg_clipfrac:0.001 - response_length/mean:100.0"
    for s in (1, 2, 3)
]

# --- slime: four dictionaries, two counts ------------------------------------------------------


def _slime_console(folder: Path) -> Path:
    lines = []
    for n in range(3):
        head = f"{BLUE}(RolloutManager pid=55){END} [2026-01-0{n + 1} 10:00:00] rollout.py:1 - "
        rollout = {
            "rollout/raw_reward": 0.1 * n,
            "rollout/rewards": -1e-9,
            "rollout/log_probs": -0.3,
            "rollout/rollout_log_probs": -0.31,
        }
        perf = {
            "rollout/response_len/mean": 900.0,
            "rollout/truncated_ratio": 0.1,
            "rollout/zero_std/count_0.0": 3,
            "rollout/zero_std/count_1.0": 5,
            "perf/step_time": 30.0,
        }
        lines += [f"{head}rollout {n}: {rollout}", f"{head}perf {n}: {perf}"]
        for m in range(2):
            step = {
                "train/loss": 0.01,
                "train/pg_loss": 0.02,
                "train/entropy_loss": 0.26,
                "train/pg_clipfrac": 0.0,
                "train/ppo_kl": 0.0,
                "train/train_rollout_logprob_abs_diff": 0.0127,
                "train/kl_loss": 0.0001,
                "train/grad_norm": 0.36,
                "train/lr-pg_0": 1e-6,
                "train/ois": 1.0,
                "train/tis": 1.0001,
                "train/step": 2 * n + m,
            }
            lines.append(f"{BLUE}(Actor pid=7){END} [2026] model.py:918 - step {2 * n + m}: {step}")
        lines.append(
            f"{head}eval {n}: {{'eval/aime': {0.2 + n / 10}, 'eval/aime/response_len/mean': 1.0}}"
        )
    path = folder / "slime.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


SLIME_ROWS = _rows(
    **{
        "train/step": [1, 2, 3],
        "train/loss": [0.1, 0.2, 0.3],
        "train/train_rollout_logprob_abs_diff": [0.02, 0.02, 0.02],
        "train/entropy_loss": [0.5, 0.4, 0.3],
    }
)

# --- OpenRLHF, prime-rl, NeMo-RL, SkyRL, AReaL, ROLL, tinker, SB3 --------------------------------


def _openrlhf(folder: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        status = {
            "policy_loss": -0.01,
            "entropy_loss": 0.4,
            "actor_lr": 1e-6,
            "actor_grad_norm": 0.7,
            "ppo_clip_ratio": 0.003,
            "ppo_kl": 0.0001,
            "vllm_kl": 0.0005,
            "kl": 0.02,
            "logprobs_diff": 0.01,
            "reward": 0.1 * step,
            "rollout/reward_mean": 0.1 * step,
            "rollout/reward_std": 0.45,
            "group_reward_std": 0.2,
            "response_length": 300.0,
            "rollout/truncated_rate": 0.05,
            "timing/step_total": 61.0,
        }
        lines.append(f"(PPOTrainer pid=3) 2026 INFO ✨ Global step {step}: {status}")
    path = folder / "openrlhf.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _prime_trainer(folder: Path) -> Path:
    lines = [
        "10:00:00    INFO Starting",
        "10:00:01   DEBUG Micro Step 1/8 | Loss 9.0 | Entropy 9.0",
    ]
    for step in (1, 2, 3):
        lines.append(
            f"10:00:0{step} SUCCESS Step {step} |   3.21s | Loss 0.0{step}00 | Entropy 0.4000 | "
            f"Mismatch KL 0.0010 | Grad. Norm 0.1200 | LR 1.00e-06 | Throughput 5000 tokens/s | "
            f"MFU 30.1% | Peak Mem. 60.1 GiB | Max Vio 0.5000 | Routing Conf. 0.9000"
        )
    path = folder / "trainer.log"
    path.write_text("\n".join(lines) + "\n")
    return path


PRIME_OLD = "".join(
    f"SUCCESS Step {s} | Time: 3.21s | Loss: 0.0{s} | Entropy: 0.4 | Mismatch KL: 0.001 | "
    "Grad. Norm: 0.12 | LR: 1.00e-06 | Throughput: 5000 tokens/s | MFU: 30.1% | Peak Mem.: 6 GiB\n"
    for s in (1, 2, 3)
)
PRIME_ORCHESTRATOR = "".join(
    f"SUCCESS Step {s} |   9.00s | Reward 0.{s}000 | Trainable 60/64 (93.8%) | Turns 1.0 | "
    f"Branches 1.0 | Max Off-Policy {s} | Error 0.0% | Cancelled 0.0% | Truncation 12.5%\n"
    f"\t\t ╰─ gsm8k | Ratio 100.0% | Reward 0.9 | Turns 1.0\n"
    f"SUCCESS Evaluated aime (Step {s}) | Policy v{s} | 9s | Reward 0.4{s} | Turns 1.0\n"
    for s in (1, 2, 3)
)
PRIME_ORCHESTRATOR_OLD = "".join(
    f"SUCCESS Step {s} | Time: 9.00s | Reward: 0.{s} | Throughput: 99.1 tokens/s | "
    "Seq. Length: 812.5 tokens/sample | Max. Off-Policy Level: 1\n"
    for s in (1, 2, 3)
)
PRIME_ROWS = _rows(
    step=[1, 2, 3],
    **{
        "train/agg/effective/agent/reward/mean": [0.1, 0.2, 0.3],
        "train/agg/all/agent/reward/mean": [0.0, 0.1, 0.2],
        "train/agg/all/agent/solved_none": [0.5, 0.4, 0.3],
        "train/agg/effective/agent/is_truncated/mean": [0.1, 0.1, 0.1],
        "eval/aime/effective/agent/avg@8": [0.2, 0.2, 0.25],
        "off_policy/mean": [1.0, 1.5, 2.0],
    },
)


def _nemo_console(folder: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        lines += [
            f"{'=' * 25} Step {step}/100 {'=' * 25}",
            "▶ Preparing batch...",
            "📊 Validation Results:",
            f"    • Accuracy: 0.5{step}00",
            "    • Samples processed: 256",
            "📊 Training Results:",
            f"  • Loss: 0.0{step}00",
            "  • Generation KL Error: 0.0008",
            f"  • Avg Reward: 0.{step}000",
            "  • Mean Generation Length: 512.0000",
            "⏱️  Timing:",
            "  • Total step time: 44.10s",
            "  • generation: 20.00s (45.4%)",
        ]
    path = folder / "nemo.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


NEMO_DUMP = {
    "train/reward": {"1": 0.1, "2": 0.2, "3": 0.3},
    "train/gen_kl_error": {"1": 0.001, "2": 0.001, "3": NAN},
    "train/policy_kl_error": {"1": 0.002, "2": 0.002, "3": 0.002},
    "train/token_mult_prob_error": {"1": 1.01, "2": 1.02, "3": 38565.0},
    "train/baseline_reward/pct_0": {"1": 50.0, "2": 40.0, "3": 30.0},
    "train/approx_entropy": {"1": 0.5, "2": 0.5, "3": 0.5},
    "validation/accuracy": {"1": 0.4, "2": 0.4, "3": 0.4},
}


def _skyrl_console(folder: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        lines += [
            f"2026-01-01 10:00 | INFO | skyrl.train.utils.tracking:log:189 - Step {step}: ",
            "{'async/staleness_mean': '0.5000',",
            " 'generate/avg_num_tokens': '700.0000',",
            " 'loss/avg_final_rewards': '0.1500',",
            " 'policy/final_loss': '0.0100',",
            " 'policy/grad_norm': '0.0500',",
            " 'policy/loss_metrics/clip_ratio': '0.0020',",
            " 'policy/loss_metrics/is_ratio_mean': '0.9900',",
            " 'policy/loss_metrics/is_ratio_min': '0.0000',",
            " 'policy/policy_entropy': '0.1480',",
            " 'policy/policy_lr': '1.0000e-06',",
            " 'policy/rollout_train_logprobs_abs_diff_mean': '0.0170',",
            f" 'reward/avg_raw_reward': '0.{step}000',",
            f" 'trainer/global_step': {step}}}",
            "2026 | INFO | other - 'reward/avg_raw_reward': '9.0'",
        ]
    path = folder / "skyrl.log"
    path.write_text("\n".join(lines) + "\n")
    return path


def _areal_console(folder: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        pairs = [
            ("ppo_actor/task_reward/avg", 0.1 * step),
            ("ppo_actor/seq_len/avg", 900.0),
            ("ppo_actor/no_eos_ratios/avg", 0.01),
            ("ppo_actor/kl_rewards/avg", -0.002),
            ("ppo_actor/update/entropy/avg", 0.25),
            ("ppo_actor/update/grad_norm", 0.3),
            ("ppo_actor/update/behave_approx_kl/avg", -0.004),
            ("ppo_actor/update/version_stats/sample_staleness_proximal_avg", 1.5),
        ]
        cells = [f"{n} │ {v:.4e}" for n, v in pairs]
        lines += [
            f"20260101 StatsLogger INFO: Epoch 1/1 Step {step}/9 Train step {step}/9 done.",
            "20260101 StatsLogger INFO: Stats (1/1):",
            "╒══════════╤══════╤═══════╤═════╕",
            *(f"│ {a} │ {b} │" for a, b in zip(cells[::2], cells[1::2], strict=True)),
            "╘══════════╧══════╧═══════╧═════╛",
        ]
    path = folder / "areal.log"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _roll_console(folder: Path) -> Path:
    lines = []
    for step in (1, 2, 3):
        metrics = {
            "critic/score/mean": 0.1 * step,
            "critic/rewards/mean": 0.05,
            "critic/kl": 0.01,
            "critic/entropy/mean": 0.4,
            "actor/pg_loss@sum": -0.02,
            "actor/total_loss@sum": -0.01,
            "actor/ppo_ratio_clipfrac@sum": 0.02,
            "actor/approxkl@sum": 0.0002,
            "actor/policykl@sum": 0.0001,
            "actor/max_len_mask_ratio": 1.0,
            "actor/train_infer_diff_token_mean@sum": -0.0004,
            "actor/train_infer_ratio_token_mean@sum": 1.0002,
            "actor/train_infer_final_mask_mean": 0.97,
            "actor_train/grad_norm": 0.2,
            "tokens/response_length/mean": 640.0,
            "val_correct/all/mean": 0.5,
            "system/step": step,
        }
        payload = json.dumps({"step": step, "metrics": metrics})
        lines.append(f"[2026-01-01 10:00:00] [tracking.py (161)] [INFO] metrics_tag: {payload}")
    path = folder / "roll.log"
    path.write_text("\n".join(lines) + "\n")
    return path


TINKER_ROWS = [
    {
        "step": step,
        "progress/batch": step,
        "progress/done_frac": step / 3,
        "env/all/reward/total": 0.1 * step,
        "env/all/by_group/frac_mixed": 0.5,
        "env/all/by_group/frac_all_good": 0.2,
        "env/all/by_group/frac_all_bad": 0.3,
        "env/all/ac_tokens_per_turn": 200.0,
        "test/env/all/reward/total": 0.4,
        "optim/lr": 1e-5,
        "optim/entropy": 0.35,
        "optim/kl_sample_train_v1": 0.0004,
        "optim/kl_sample_train_v2": 0.0008,
        "kl_policy_base": 0.02,
        "kl_pre_post_v1": 0.003,
        "time/total": 30.0,
    }
    for step in (1, 2, 3)
]

SB3_ROWS = [
    {
        "time/total_timesteps": 100 * step,
        "rollout/ep_rew_mean": 10.0 * step,
        "rollout/ep_len_mean": 20.0,
        "train/approx_kl": 0.01,
        "train/clip_fraction": 0.1,
        "train/entropy_loss": -0.6,
        "train/explained_variance": -2.5,
        "train/loss": 3.0,
    }
    for step in (1, 2, 3)
]

# --- trackers and plain tables -----------------------------------------------------------------


def _csv(name: str, rows: list[list], **options) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / name
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, **options).writerows(rows)
        return path

    return write


WANDB_CHART = [
    [
        "Step",
        "run - seven - train/reward",
        "run - seven - train/reward__MIN",
        "run - seven - train/reward__MAX",
    ],
    ["1", "0.1", "0.05", "0.15"],
    ["2", "NaN", "NaN", "NaN"],
    ["3", "0.3", "0.3", "0.3"],
]
WANDB_HISTORY = [
    [
        "_step",
        "_runtime",
        "_timestamp",
        "train/global_step",
        "train/reward",
        "train/rewards/f/mean",
        "eval/reward",
    ],
    ["0", "1.5", "1.7e9", "1", "0.1", "0.5", ""],
    ["1", "2.5", "1.7e9", "", "", "", "0.7"],
    ["2", "3.5", "1.7e9", "2", "NaN", "0.5", ""],
    ["3", "4.5", "1.7e9", "3", "Infinity", "0.5", ""],
]


def _tensorboard(tags: dict[str, list[float]]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        from tensorboardX import SummaryWriter

        with SummaryWriter(str(folder / "events"), max_queue=1) as writer:
            writer.add_text("config", "lr: 1e-6")
            for step in (1, 2, 3):
                for tag, values in tags.items():
                    writer.add_scalar(tag, values[step - 1], step)
        return folder / "events"

    return write


OWN_LOG = '{"header": {"config": {"seed": 3}}}\n' + "".join(
    json.dumps({"step": s, "reward": 0.1 * s, "kl_ref": 0.01, "logp_gap": 0.0, "loss": NAN}) + "\n"
    for s in (1, 2, 3)
)

FIXTURES: dict[str, Fixture] = {
    "trl trainer_state": Fixture(
        _trainer_state,
        "trl",
        TRL_VALUES | {"heldout_accuracy": [0.4] * 3, "learning_rate": [1e-6, 9e-7, 8e-7]},
    ),
    "trl console": Fixture(
        _trl_console,
        "trl",
        TRL_VALUES | {"heldout_accuracy": [0.4] * 3},
        [10, 20, 30],
        "step of the progress bar",
    ),
    "unsloth console": Fixture(_unsloth_console, "trl", TRL_VALUES, step_kind="row"),
    "ms-swift logging.jsonl": Fixture(
        _swift,
        "trl",
        TRL_VALUES
        | {
            "mismatch_k1": [0.002] * 3,
            "mismatch_chi2_geo": [0.004] * 3,
            "weight_ess_capped": [0.97] * 3,
        },
    ),
    "trl ppo": Fixture(
        _jsonl("ppo.jsonl", PPO_ROWS),
        "trl",
        {
            "kl_ref_seq": [10.5, 11.0, 11.5],
            "entropy_seq": [99.0, 98.0, 97.0],
            "kl_penalty": [0.5, 0.55, 0.6],
            "reward_shaped": [1.0, 1.1, 1.2],
            "reward": [1.5, 1.65, 1.8],
            "kl_step": [0.002, 0.003, 0.004],
            "ratio_mean": [0.97, 0.98, 0.99],
            "learning_rate": [3e-6, 2e-6, 1e-6],
        },
    ),
    "trl async": Fixture(
        _jsonl("async.jsonl", ASYNC_ROWS),
        "trl",
        {
            "mismatch_kl": [0.01, 0.02, 0.03],
            "weight_mean": [1.0, 0.99, 0.98],
            "loss": [0.1, 0.2, 0.3],
        },
    ),
    "verl console": Fixture(_verl_console, "verl", VERL_VALUES),
    "verl console, old": Fixture(
        _text("old.log", "\n".join(OLD_VERL)),
        "verl",
        {
            "entropy": [0.1, 0.2, 0.3],
            "learning_rate": [1e-6] * 3,
            "kl_ref": [0.001, 0.002, 0.003],
            "heldout_accuracy": [0.5] * 3,
        },
    ),
    "verl file logger": Fixture(
        _text("verl.jsonl", VERL_FILE),
        "verl",
        {"reward": [0.1, 0.2, 0.3], "grad_norm": [NAN] * 3, "kl_step": [0.0] * 3},
    ),
    "verl console in a container's log": Fixture(
        _text("pod.log", VERL_WRAPPED), "verl", VERL_VALUES
    ),
    "slime console": Fixture(
        _slime_console,
        "slime",
        {
            "reward": [0.0, 0.1, 0.2],
            "reward_centred": [-1e-9] * 3,
            "tied_groups:0.0": [3, 3, 3],
            "tied_groups:1.0": [5, 5, 5],
            "heldout:aime": [0.2, 0.3, 0.4],
            "logp_mean": [-0.3] * 3,
            "sampler_logp_mean": [-0.31] * 3,
            "truncated": [0.1] * 3,
        },
        [0, 2, 4],
    ),
    "slime jsonl": Fixture(
        _jsonl("slime.jsonl", SLIME_ROWS),
        "slime",
        {"loss": [0.1, 0.2, 0.3], "logp_gap": [0.02] * 3, "entropy": [0.5, 0.4, 0.3]},
    ),
    "openrlhf": Fixture(
        _openrlhf,
        "openrlhf",
        {
            "reward": [0.1, 0.2, 0.3],
            "reward_std": [0.2] * 3,
            "reward_spread": [0.45] * 3,
            "kl_ref": [0.02] * 3,
            "kl_step": [0.0001] * 3,
            "mismatch_k1": [0.0005] * 3,
            "entropy": [0.4] * 3,
            "grad_norm": [0.7] * 3,
            "clip_fraction": [0.003] * 3,
            "truncated": [0.05] * 3,
        },
    ),
    "prime-rl trainer": Fixture(
        _prime_trainer,
        "prime-rl",
        {
            "loss": [0.01, 0.02, 0.03],
            "entropy": [0.4] * 3,
            "mismatch_kl": [0.001] * 3,
            "grad_norm": [0.12] * 3,
            "learning_rate": [1e-6] * 3,
            "expert_load_max": [1.5] * 3,
        },
    ),
    "prime-rl trainer, old": Fixture(
        _text("old.log", PRIME_OLD),
        "prime-rl",
        {"loss": [0.01, 0.02, 0.03], "mismatch_kl": [0.001] * 3, "grad_norm": [0.12] * 3},
    ),
    "prime-rl orchestrator": Fixture(
        _text("orchestrator.log", PRIME_ORCHESTRATOR),
        "prime-rl",
        {
            "reward": [0.1, 0.2, 0.3],
            "truncated": [0.125] * 3,
            "staleness_max": [1, 2, 3],
            "heldout_accuracy": [0.41, 0.42, 0.43],
        },
    ),
    "prime-rl orchestrator, old": Fixture(
        _text("old.log", PRIME_ORCHESTRATOR_OLD),
        "prime-rl",
        {"reward": [0.1, 0.2, 0.3], "sequence_length": [812.5] * 3, "staleness_max": [1] * 3},
    ),
    "prime-rl jsonl": Fixture(
        _jsonl("metrics.jsonl", PRIME_ROWS),
        "prime-rl",
        {
            "reward": [0.1, 0.2, 0.3],
            "dead_groups": [0.5, 0.4, 0.3],
            "truncated": [0.1] * 3,
            "heldout_accuracy": [0.2, 0.2, 0.25],
            "staleness": [1.0, 1.5, 2.0],
        },
    ),
    "nemo-rl console": Fixture(
        _nemo_console,
        "nemo-rl",
        {
            "loss": [0.01, 0.02, 0.03],
            "mismatch_kl": [0.0008] * 3,
            "reward": [0.1, 0.2, 0.3],
            "length": [512.0] * 3,
            "heldout_accuracy": [0.51, 0.52, 0.53],
            "seconds": [44.1] * 3,
        },
    ),
    "nemo-rl dump": Fixture(
        _text("metrics.json", json.dumps(NEMO_DUMP, indent=2)),
        "nemo-rl",
        {
            "reward": [0.1, 0.2, 0.3],
            "mismatch_kl": [0.001, 0.001, NAN],
            "mismatch_kl_reverse": [0.002] * 3,
            "prob_factor": [1.01, 1.02, 38565.0],
            "dead_groups": [0.5, 0.4, 0.3],
            "entropy": [0.5] * 3,
        },
    ),
    "skyrl console": Fixture(
        _skyrl_console,
        "skyrl",
        {
            "reward": [0.1, 0.2, 0.3],
            "reward_shaped": [0.15] * 3,
            "staleness": [0.5] * 3,
            "length": [700.0] * 3,
            "loss": [0.01] * 3,
            "clip_fraction": [0.002] * 3,
            "entropy": [0.148] * 3,
            "logp_gap": [0.017] * 3,
            "weight_mean": [0.99] * 3,
            "learning_rate": [1e-6] * 3,
        },
    ),
    "areal console": Fixture(
        _areal_console,
        "areal",
        {
            "reward": [0.1, 0.2, 0.3],
            "sequence_length": [900.0] * 3,
            "truncated": [0.01] * 3,
            "kl_penalty": [0.002] * 3,
            "entropy": [0.25] * 3,
            "grad_norm": [0.3] * 3,
            "mismatch_k1": [0.004] * 3,
            "staleness": [1.5] * 3,
        },
    ),
    "roll console": Fixture(
        _roll_console,
        "roll",
        {
            "reward": [0.1, 0.2, 0.3],
            "reward_shaped": [0.05] * 3,
            "kl_ref": [0.01] * 3,
            "kl_step": [0.0001] * 3,
            "loss": [-0.01] * 3,
            "policy_loss": [-0.02] * 3,
            "prob_gap_signed": [-0.0004] * 3,
            "weight_mean": [1.0002] * 3,
            "masked_tokens": [0.03] * 3,
            "length": [640.0] * 3,
            "heldout_accuracy": [0.5] * 3,
        },
    ),
    "tinker": Fixture(
        _jsonl("metrics.jsonl", TINKER_ROWS),
        "tinker",
        {
            "reward": [0.1, 0.2, 0.3],
            "mixed_groups": [0.5] * 3,
            "solved_groups": [0.2] * 3,
            "dead_groups": [0.3] * 3,
            "entropy": [0.35] * 3,
            "mismatch_k1": [0.0004] * 3,
            "mismatch_k2": [0.0008] * 3,
            "kl_ref": [0.02] * 3,
            "kl_step": [0.003] * 3,
            "heldout_accuracy": [0.4] * 3,
        },
    ),
    "stable-baselines3": Fixture(
        _jsonl("progress.json", SB3_ROWS),
        "sb3",
        {
            "reward": [10, 20, 30],
            "entropy": [0.6] * 3,
            "kl_step": [0.01] * 3,
            "explained_variance": [-2.5] * 3,
        },
        [100, 200, 300],
        "environment step",
    ),
    "wandb chart": Fixture(
        _csv("chart.csv", WANDB_CHART, quoting=csv.QUOTE_ALL),
        "wandb chart",
        {"reward": [0.1, NAN, 0.3]},
    ),
    "wandb history": Fixture(
        _csv("history.csv", WANDB_HISTORY),
        "trl",
        {"reward": [0.1, NAN, math.inf], "reward_part:f": [0.5] * 3},
    ),
    "tensorboard": Fixture(
        _tensorboard(
            {
                "actor/pg_clipfrac": [0.0, 0.5, 0.25],
                "critic/score/mean": [0.5, 0.25, 0.125],
                "actor/grad_norm": [1.0, NAN, math.inf],
                "training/rollout_probs_diff_mean": [0.5, 0.5, 0.5],
            }
        ),
        "verl",
        {
            "clip_fraction": [0.0, 0.5, 0.25],
            "reward": [0.5, 0.25, 0.125],
            "grad_norm": [1.0, NAN, math.inf],
            "prob_gap": [0.5] * 3,
        },
    ),
    "tensorboard scalar csv": Fixture(
        _csv(
            "run-a-tag-train_reward.csv",
            [["Wall time", "Step", "Value"], *([1.7e9, s, s / 10] for s in (1, 2, 3))],
        ),
        "tensorboard scalar",
        {"reward": [0.1, 0.2, 0.3]},
    ),
    "tensorboard scalar json": Fixture(
        _text("run-a-tag-train_loss.json", json.dumps([[1.7e9, s, s / 10] for s in (1, 2, 3)])),
        "tensorboard scalar",
        {"loss": [0.1, 0.2, 0.3]},
    ),
    "unsloth table": Fixture(
        _text(
            "table.tsv",
            "Step\tTraining Loss\treward\treward_std\tcompletions / mean_length\tkl\t"
            "rewards / f / mean\n1\t0.000000\t0.1\t0.2\t99.5\t0\t0.5\n2\t0.1\tnan\t0.2\t99.5\t"
            "No Log\t0.5\n3\t0.2\t0.3\t0.2\t99.5\t0.25\t0.5\n",
        ),
        "trl",
        {"reward": [0.1, NAN, 0.3], "length": [99.5] * 3, "reward_part:f": [0.5] * 3},
    ),
    "plain csv": Fixture(
        _csv(
            "table.csv",
            [
                [
                    "step",
                    "total_steps",
                    "loss",
                    "reward_avg",
                    "avg_response_len",
                    "entropy_avg",
                    "eval_acc",
                ],
                ["1", "500", "-0.03", "0.1", "38.4", "1.27", "15.6"],
                ["2", "500", "nan", "0.2", "384.0", "0.72", ""],
                ["3", "500", "-1.7", "0.3", "23.3", "0.89", "25"],
            ],
        ),
        "csv",
        {"loss": [-0.03, NAN, -1.7], "reward": [0.1, 0.2, 0.3], "length": [38.4, 384.0, 23.3]},
    ),
    "semicolons and decimal commas": Fixture(
        _text("t.csv", "Step;Reward;KL\n1;0,1;0,5\n2;0,2;0,5\n3;0,3;1e-3\n"),
        "csv",
        {"reward": [0.1, 0.2, 0.3], "kl_ref": [0.5, 0.5, 0.001]},
    ),
    "tabs in UTF-16": Fixture(
        _text("t.tsv", "step\tmean_reward\tgrad_norm\n1\t0.1\t1\n2\t0.2\t2\n3\t0.3\t3\n", "utf-16"),
        "csv",
        {"reward": [0.1, 0.2, 0.3], "grad_norm": [1, 2, 3]},
    ),
    "columns as json": Fixture(
        _text(
            "t.json",
            json.dumps({"step": [1, 2, 3], "reward": [0.1, 0.2, 0.3], "kl": [0.0, None, 0.1]}),
        ),
        "json columns",
        {"reward": [0.1, 0.2, 0.3]},
    ),
    "list of rows": Fixture(
        _text("t.json", json.dumps([{"iteration": s, "mean_reward": s / 10} for s in (1, 2, 3)])),
        "json",
        {"reward": [0.1, 0.2, 0.3]},
    ),
    "our own": Fixture(
        _text("run.jsonl", OWN_LOG),
        "stablerl",
        {"reward": [0.1, 0.2, 0.3], "loss": [NAN] * 3, "logp_gap": [0.0] * 3},
    ),
}
