"""The other side: TRL's `GRPOTrainer`, its loop untouched, and laps between the parts of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from workload import GROUP, Case, Stopwatch

from stablerl_core.policy import OBJECTIVES
from stablerl_core.rewards import Problem, task_by_name
from stablerl_core.training import NumericsConfig, PolicyConfig

# What TRL switches on by default and our side does not do: activation checkpointing, and the
# load-balancing loss that Mixtral's configuration asks for.
DEFAULTS = {}
FAIR = {"gradient_checkpointing": False, "router_aux_loss_coef": 0.0}


class Theirs(GRPOTrainer):
    """A `GRPOTrainer` set to the same loss, optimizer, precision and prompts as our defaults.

    `between` is called after every step, outside the clock. No logging, saving or evaluation.
    """

    def __init__(self, case: Case, checkpoint: Path, steps: int, options: dict, between: Callable):
        policy, numerics = PolicyConfig(), NumericsConfig()
        clip = OBJECTIVES[policy.objective].options
        self.case, self.watch = case, Stopwatch()
        self.tokens, self.rewards, self.asked = [], [], []
        config = GRPOConfig(
            output_dir=str(checkpoint / "trl"),
            max_steps=steps,
            per_device_train_batch_size=case.rows,
            num_generations=GROUP,
            max_completion_length=case.new_tokens,
            shuffle_dataset=False,
            loss_type="grpo",
            scale_rewards="group",
            beta=0.0,
            epsilon=clip["clip_low"],
            epsilon_high=clip["clip_high"],
            temperature=policy.temperature,
            learning_rate=numerics.learning_rate,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=numerics.warmup,
            optim="adamw_torch_fused",
            adam_beta1=numerics.betas[0],
            adam_beta2=numerics.betas[1],
            adam_epsilon=numerics.eps,
            weight_decay=numerics.weight_decay,
            max_grad_norm=numerics.max_grad_norm,
            bf16=False,
            use_cpu=True,
            report_to="none",
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **options,
        )
        super().__init__(
            model=str(checkpoint),
            args=config,
            reward_funcs=self._judge,
            train_dataset=_prompts(case, steps),
            callbacks=[_Between(self, between)],
        )
        self.remove_callback(PrinterCallback)

    def _judge(self, completions, completion_ids, prompts, gold, **_) -> list[float]:
        problems = [Problem(p, g) for p, g in zip(prompts, gold, strict=True)]
        cut = [ids[-1] not in self.eos_token_ids for ids in completion_ids]
        rewards = self.case.reward(completions, problems, cut)
        self.rewards.append(sum(rewards) / len(rewards))
        return rewards

    def _generate_and_score_completions(self, inputs):
        self.watch.lap("other")
        batch = super()._generate_and_score_completions(inputs)
        self.watch.lap("generate")
        return batch

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.watch.lap("forward")
        tokens = int(inputs["completion_mask"].sum())
        self.tokens.append((tokens, tokens))
        self.asked.append(inputs["prompt_ids"])
        return loss

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.watch.lap("backward")
        return loss


def _prompts(case: Case, steps: int) -> Dataset:
    """The problems that our `Trainer` draws with seed 0, step after step."""
    task = task_by_name("sort")
    problems = [p for n in range(1, steps + 1) for p in task.sample("train", case.prompts, seed=n)]
    return Dataset.from_dict(
        {"prompt": [p.prompt for p in problems], "gold": [p.gold for p in problems]}
    )


class _Between(TrainerCallback):
    """Stops the clock after each step; everything in TRL's loop between two stops is on it."""

    def __init__(self, trainer: Theirs, between: Callable):
        self.watch, self.between = trainer.watch, between

    def on_train_begin(self, *_, **__):
        self.watch.start()

    def on_step_end(self, *_, **__):
        self.watch.lap("optimizer")
        self.between()
        self.watch.start()
