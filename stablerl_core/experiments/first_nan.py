"""Chapter 30, the first NaN: where it comes from, what announced it, and what hides it.

The small model sorts; a step is one update on 8 problems × 8 answers, gradient norm at most 1, a
KL penalty (k3, β = 0.1) in `first_nan_warning`. Predictions, written after exploring seed 0 of
most arms and before the repeated runs:

`first_nan`, six planted faults, and what `find_nonfinite` says of each:
1. All are named (module and operation), with the right answer of the batch where one is to blame.
2. All repeat on the same batch, three times of three. Two of them are questions of precision all
   the same, since a wider format is finite at that place: so the first seed's rule ("reproduces
   reliably: the batch or a deterministic path; appears randomly: low precision") is wrong for them.

`first_nan_warning`. A signal warns at the first step at which it leaves the range that the healthy
runs of the other seeds had in their 40 steps, widened by a tenth of its width on each side; its
lead is the number of steps from there to the first NaN.
3. `hot_half` (learning rate 0.2, float16 products) ends in a NaN in every seed, before step 40. The
   largest activation leads by more than 10 steps. The gradient norm gives a warning by *falling*:
   in the five steps before the NaN it is below a tenth of its healthy median, in every seed.
4. `hot_half_tight` (gradient norm at most 0.01) ends in a NaN too, and not later by more than 5
   steps: Adam divides the bound out again.
5. `hot_bfloat16` has no NaN in 40 steps, and a reward of 0 at the end: the range of the format was
   not what was wrong with the run.
6. `sentinel` (one padding token with a log μ of −100) gives no warning: no signal leads by more
   steps than it does in healthy runs that are cut at the same step. Its loss is finite in the step
   of the NaN.

`first_nan_aftermath`, one faulty batch in step 15:
7. `nan_skip` and `huge_skip` end like `clean`: paired intervals of the reward of steps 21-30 and of
   the accuracy contain 0. One step was not taken.
8. `nan_clip` (torch's clipping, then the step): no weight is finite afterwards.
9. `nan_replace` logs nothing unusual: loss and norm of step 15 are within the range of the steps
   before, and the accuracy does not differ from `clean` by anything five seeds can show.
10. `huge_clip` logs an infinite norm, and does nothing in that step but follow its momentum: no
   difference from `clean`.
11. `huge_apply`: loss and weights stay finite for ever, more than four fifths of the weights have
   an infinite second moment and do not move again, and steps 21-30 move the weights by less than
   half of what `clean` moves them. Five seeds of 30 steps do not show a loss of accuracy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from ..numerics import clip_gradients, find_nonfinite
from ..policy import group_advantages
from ..rewards import Problem, strict_reward, task_by_name
from ..training import Sampling, load_base, pass_rate, rounded_activations
from ..training.rollout import decode_completions
from .measured import Measured
from .results import Results
from .sampled import completions_of

BASE, GROUP, BETAS = "mixtral-cpu-sort", 8, (0.9, 0.95)
RATE = 5e-4
Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Seen:
    """What the sampler of a step tells: means over its answers."""

    reward: float
    entropy: float
    length: float


def collect(
    model, tokenizer, problems: Sequence[Problem], seed: int, sampling: Sampling | None = None
) -> tuple[Batch, Seen]:
    """Eight answers a problem, drawn from `model` (so it is μ), judged strictly.

    The batch holds `input_ids` and `mask` (B, S+T), true at the tokens of the answer,
    `sampler_logp` (B, S+T), 0 where nothing was sampled, and `advantages` (B,). Prompts are of one
    length, so nothing is padded on the left.
    """
    answers = completions_of(model, tokenizer, problems, seed, group_size=GROUP, sampling=sampling)
    texts = decode_completions(tokenizer, answers)
    repeated = [problem for problem in problems for _ in range(GROUP)]
    rewards = torch.tensor(strict_reward(texts, repeated, (~answers.finished).tolist()))
    before, counted = torch.zeros_like(answers.prompt), answers.mask
    batch = {
        "input_ids": torch.cat([answers.prompt, answers.tokens], 1),
        "mask": torch.cat([before.bool(), counted], 1),
        "sampler_logp": torch.cat([before.float(), answers.sampler_logp], 1),
        "advantages": group_advantages(rewards, GROUP),
    }
    length = counted.sum(1).float().mean()
    return batch, Seen(*map(float, (rewards.mean(), answers.entropy[counted].mean(), length)))


# Losses: one that is right, and five formulas that people write -----------------------------------


def scored(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Logits (B, T, V) of each next token, its log π_θ and log μ (B, T), in float32."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logp = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return logits, logp, batch["sampler_logp"][:, 1:]


def policy_loss(model: nn.Module, batch: Batch) -> Tensor:
    """−Σ m r Â / Σ m with r = π_θ/μ: the policy gradient over the counted tokens."""
    _, logp, drawn = scored(model, batch)
    terms = -batch["advantages"][:, None] * (logp - drawn).exp()
    mask = batch["mask"][:, 1:]
    return torch.where(mask, terms, 0.0).sum() / mask.sum().clamp(min=1)


def mean_of_means(model: nn.Module, batch: Batch) -> Tensor:
    """A mean within each answer, then over answers: 0/0 for one without a counted token."""
    _, logp, drawn = scored(model, batch)
    terms, mask = -batch["advantages"][:, None] * (logp - drawn).exp(), batch["mask"][:, 1:]
    return ((terms * mask).sum(1) / mask.sum(1)).mean()


def guarded_mean(model: nn.Module, batch: Batch) -> Tensor:
    """The same, with `where` instead of the NaN: right in the forward pass, NaN in the backward."""
    _, logp, drawn = scored(model, batch)
    terms, mask = -batch["advantages"][:, None] * (logp - drawn).exp(), batch["mask"][:, 1:]
    count = mask.sum(1)
    return torch.where(count > 0, (terms * mask).sum(1) / count, 0.0).mean()


def log_advantage(model: nn.Module, batch: Batch) -> Tensor:
    """Large advantages tamed by log(1 + Â): the logarithm of a negative number below −1."""
    return policy_loss(model, batch | {"advantages": batch["advantages"].log1p()})


def ratio_of_answers(model: nn.Module, batch: Batch) -> Tensor:
    """One ratio an answer, exp Σ (log π_θ − log μ): e^89 is more than float32 can hold."""
    _, logp, drawn = scored(model, batch)
    ratio = torch.where(batch["mask"][:, 1:], logp - drawn, 0.0).sum(1).exp()
    return -(ratio * batch["advantages"]).mean()


# Faults: what is done to a batch or a model, and what has to be named ---------------------------


@dataclass(frozen=True)
class Fault:
    """A loss, the damage that makes it fail (in place, at a row), and what a finder has to say."""

    loss: Callable[[nn.Module, Batch], Tensor]
    plant: Callable[[nn.Module, Batch, int], None]
    module: str
    operation: str
    cause: str
    at_row: bool = True


def _nothing_counts(model: nn.Module, batch: Batch, row: int) -> None:
    batch["mask"][row] = False


def _below_minus_one(model: nn.Module, batch: Batch, row: int) -> None:
    batch["advantages"].clamp_(min=-0.9)[row] = -1.3


def _of_another_model(model: nn.Module, batch: Batch, row: int) -> None:
    batch["sampler_logp"][row].sub_(12.0 * batch["mask"][row])


@torch.no_grad()
def loud_expert(model: nn.Module, batch: Batch | None = None, row: int = 0, by: float = 2.0**15):
    """Multiply one branch of the last layer's experts and divide what follows by as much.

    silu(gate) · up · by, then down / by: in exact arithmetic the same function.
    """
    experts = model.model.layers[-1].mlp.experts
    experts.gate_up_proj[:, experts.gate_up_proj.shape[1] // 2 :].mul_(by)
    experts.down_proj.div_(by)


def _halved(model: nn.Module, batch: Batch, row: int) -> None:
    loud_expert(model)
    model.half()


def _negative_moment(model: nn.Module, batch: Batch, row: int) -> None:
    """An Adam whose second moment came back from storage with one entry below zero; one step."""
    optimizer = adam(model)
    policy_loss(model, batch).backward()
    optimizer.step()
    weight = model.get_parameter(POISONED)
    optimizer.state[weight]["exp_avg_sq"][3, 5] = -1e-6
    optimizer.step()


def adam(model: nn.Module, rate: float = RATE) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), rate, BETAS, weight_decay=0.0)


POISONED = "model.layers.0.self_attn.q_proj.weight"
FAULTS = {
    "zero_over_zero": Fault(mean_of_means, _nothing_counts, "(loss)", "div", "path"),
    "log_of_negative": Fault(log_advantage, _below_minus_one, "(loss)", "log1p", "path"),
    "untaken_branch": Fault(guarded_mean, _nothing_counts, "(loss)", "DivBackward0", "path"),
    "extreme_answer": Fault(ratio_of_answers, _of_another_model, "(loss)", "exp", "precision"),
    "half_overflow": Fault(
        policy_loss, _halved, "model.layers.1.mlp.experts", "mm", "precision", False
    ),
    "optimizer_state": Fault(
        policy_loss, _negative_moment, "model.layers.0.self_attn.q_proj", "", "given", False
    ),
}


def planted(name: str, seed: int) -> tuple[nn.Module, Batch, int]:
    """The small model and a batch of 2 problems × 8 answers with a fault in them, and its row."""
    model, tokenizer = load_base(BASE)
    batch, _ = collect(model, tokenizer, task_by_name("sort").sample("train", 2, seed=seed), seed)
    row = (5 * seed + 3) % len(batch["mask"])
    FAULTS[name].plant(model, batch, row)
    return model, batch, row


def found(seed: int, name: str) -> list[dict]:
    """One row: what `find_nonfinite` says of a planted fault; 1 is yes.

    `named`: the right module and operation. `row`: the right answer of the batch, alone, where the
    fault is in one. `repeats`: on the same batch, three times. `wider`: finite at that place in a
    wider format. `cause`: the right one of the report's words.
    """
    fault, (model, batch, row) = FAULTS[name], planted(name, seed)
    report = find_nonfinite(model, batch, loss=fault.loss)
    first = report.first
    named = first and first.module == fault.module and fault.operation in first.operation
    told = {"named": bool(named), "repeats": bool(report.repeatable)}
    told |= {"wider": report.cause == "precision", "cause": report.cause == fault.cause}
    told |= {"row": report.sequences == (row,)} if fault.at_row else {}
    return [{"step": 1} | {key: float(value) for key, value in told.items()}]


# Runs --------------------------------------------------------------------------------------------

STEPS, WARMUP, PROMPTS = 40, 10, 8
KL = 0.1  # weight of the KL penalty


class Run:
    """The small model, its reference, Adam, and what a step of 8 problems × 8 answers needs."""

    def __init__(self, seed: int, rate: float = RATE):
        self.model, self.tokenizer = load_base(BASE)
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizer, self.rate, self.seed = adam(self.model, rate), rate, seed
        self.task = task_by_name("sort")

    def draw(self, n: int) -> tuple[Batch, Seen]:
        """The batch of step n, with `ref_logp` (B, S+T). Raises `ValueError` for NaN logits."""
        problems = self.task.sample("train", PROMPTS, seed=self.seed * 1_000_003 + n)
        batch, seen = collect(self.model, self.tokenizer, problems, self.seed * 1000 + n)
        with torch.no_grad():
            logp = scored(self.reference, batch)[1]
        batch["ref_logp"] = torch.cat([torch.zeros_like(logp[:, :1]), logp], 1)
        return batch, seen

    def gradient(self, batch: Batch, loss) -> float:
        """Leave the gradient of a loss in the parameters, and return the loss."""
        self.optimizer.zero_grad()
        value = loss(self.model, batch)
        value.backward()
        return value.item()

    def step(self, n: int) -> float:
        """Step with the gradients there are; returns the norm of the change."""
        before = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer.param_groups[0]["lr"] = self.rate * min(1.0, n / WARMUP)
        self.optimizer.step()
        moved = [p.detach() - b for p, b in zip(self.model.parameters(), before, strict=True)]
        return float(torch.nn.utils.get_total_norm(moved))

    def accuracy(self) -> float:
        """Strict accuracy of one answer each to 256 held-out problems."""
        return pass_rate(self.model, self.tokenizer, self.task, 256)


class Largest:
    """Keeps, while entered, the largest |output| of the layers that multiply."""

    def __init__(self, model: nn.Module):
        self.model, self.value = model, 0.0

    def __enter__(self) -> Largest:
        kinds = [m for n, m in self.model.named_modules() if n.endswith(("proj", "experts"))]
        self._handles = [m.register_forward_hook(self._see) for m in kinds]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, module, args, output) -> None:
        largest = output.detach().abs().amax()
        self.value = float(torch.maximum(largest, largest.new_tensor(self.value)))  # NaN stays


def penalised_loss(model: nn.Module, batch: Batch) -> Tensor:
    """`policy_loss` + β · mean of k3 = δ − 1 − log δ, δ = π_ref/π_θ, over counted tokens."""
    log_delta = batch["ref_logp"][:, 1:] - scored(model, batch)[1]
    k3 = log_delta.exp() - 1 - log_delta
    return policy_loss(model, batch) + KL * k3[batch["mask"][:, 1:]].mean()


# How much warning there is ----------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """Learning rate; format of what the trainer's layers multiply; bound of the gradient norm.

    With `sentinel`, one batch after step 15 has a log μ of −100, which a data loader wrote for
    "ignore", at one token that is padding: e^100 is more than float32 can hold, and 0 · ∞ is NaN.
    """

    rate: float = RATE
    precision: str = "float32"
    max_norm: float = 1.0
    sentinel: bool = False


HOT = 0.2
SETTINGS = {
    "healthy": Setting(),
    "hot_half": Setting(HOT, "float16"),
    "hot_half_tight": Setting(HOT, "float16", max_norm=0.01),
    "hot_bfloat16": Setting(HOT, "bfloat16"),
    "sentinel": Setting(sentinel=True),
}


def until_nan(seed: int, setting: Setting, steps: int = STEPS) -> list[dict]:
    """Train until something is not finite; a row a step.

    `nonfinite` is 1 from the first loss or gradient norm on that is NaN or inf; the run stops
    there and later rows hold nothing else. `largest` is the largest |output| of a layer.
    """
    run, rows = Run(seed, setting.rate), []
    bad = 16 + (7 * seed) % 20 if setting.sentinel else 0
    for n in range(1, steps + 1):
        if rows and rows[-1]["nonfinite"]:
            rows.append({"step": n, "nonfinite": 1})
            continue
        batch, seen = run.draw(n)
        if n == bad:
            batch["sampler_logp"][batch["mask"].sum(1).argmin(), -1] = -100.0
        with Largest(run.model) as layers, rounded_activations(run.model, setting.precision):
            loss = run.gradient(batch, penalised_loss)
        norm = float(clip_gradients(run.model.parameters(), setting.max_norm))
        row = {"step": n, "nonfinite": int(not math.isfinite(loss + norm)), "loss": loss}
        row |= {"grad_norm": norm, "largest": layers.value} | vars(seen)
        rows.append(row | ({} if row["nonfinite"] else {"update_norm": run.step(n)}))
    return rows


WATCHED = ("update_norm", "reward", "length", "entropy", "largest", "loss", "grad_norm")


def first_nan(results: Results, arm: str, seed: str) -> int | None:
    """The step of the first NaN of one run of `first_nan_warning`."""
    return next((r["step"] for r in results.runs[arm][seed] if r["nonfinite"]), None)


def first_warning(results: Results, arm: str, seed: str, signal: str) -> int | None:
    """The first step before the NaN at which a signal leaves its healthy range, or None.

    That range is what the healthy runs of the other seeds had, a tenth wider on each side.
    """
    healthy = [rows for other, rows in results.runs["healthy"].items() if other != seed]
    values = [row[signal] for rows in healthy for row in rows]
    low, high = min(values), max(values)
    wider = 0.1 * (high - low)
    for row in results.runs[arm][seed]:
        if row["nonfinite"]:
            return None
        if not low - wider <= row[signal] <= high + wider:
            return row["step"]
    return None


# What is done about it, and what that hides ------------------------------------------------------

FAULT_AT, AFTER = 15, 30


def apply_guard(guard: str, parameters: list[nn.Parameter]) -> tuple[float, bool]:
    """What a trainer does between gradient and step: the norm that it logs, and whether it steps.

    skip: no step if the norm is not finite. apply: always, as it is. clip: torch's clipping to
    norm 1. replace: NaN becomes 0 and ±inf the largest number, then clipping.
    """
    if guard == "skip":
        norm = float(clip_gradients(parameters, 1.0))
        return norm, math.isfinite(norm)
    if guard == "replace":
        for p in parameters:
            torch.nan_to_num_(p.grad)
    bound = math.inf if guard == "apply" else 1.0
    if guard == "apply":
        return float(clip_gradients(parameters, bound)), True
    return float(torch.nn.utils.clip_grad_norm_(parameters, bound)), True


def aftermath(seed: int, fault: str | None, guard: str = "skip") -> list[dict]:
    """30 steps with a fault in step 15 only; what the log says, and what it does not.

    fault nan: one answer without a counted token in `guarded_mean`, whose loss is finite and whose
    gradient is NaN. huge: an advantage of 1e30, with which loss and gradient are finite.

    `logged_norm` and `loss` are what a trainer with this guard would log, `update_norm` how far the
    weights moved; `sampled` 1 while the policy can still answer; `dead` the share of weights whose
    second moment is infinite. The last row has the held-out `accuracy`, if there is any.
    """
    run, rows = Run(seed), []
    parameters = list(run.model.parameters())
    for n in range(1, AFTER + 1):
        row = {"step": n, "dead": _dead(run.optimizer), "sampled": int(_finite(parameters))}
        rows.append(row)
        if not row["sampled"]:
            continue
        batch, seen = run.draw(n)
        at = n == FAULT_AT and fault
        if at:
            _break(batch, fault, row=seed % len(batch["mask"]))
        loss = run.gradient(batch, guarded_mean if at == "nan" else policy_loss)
        norm, taken = apply_guard(guard, parameters)
        row |= {"loss": loss, "logged_norm": norm, "reward": seen.reward}
        row |= {"taken": int(taken), "update_norm": run.step(n) if taken else 0.0}
    if _finite(parameters):
        rows[-1]["accuracy"] = run.accuracy()
    return rows


def _break(batch: Batch, fault: str, row: int) -> None:
    if fault == "nan":
        batch["mask"][row] = False
    else:
        batch["advantages"][row] = 1e30


def _finite(parameters: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(p).all()) for p in parameters)


def _dead(optimizer: torch.optim.Optimizer) -> float:
    """Share of the weights that Adam can never move again."""
    states = optimizer.state.values()
    total = sum(s["exp_avg_sq"].numel() for s in states)
    return sum(int(s["exp_avg_sq"].isinf().sum()) for s in states) / total if total else 0.0


FOUND = Measured(
    name="first_nan",
    prediction=__doc__,
    arms={name: partial(found, name=name) for name in FAULTS},
)

WARNING = Measured(
    name="first_nan_warning",
    prediction=__doc__,
    arms={name: partial(until_nan, setting=setting) for name, setting in SETTINGS.items()},
)

AFTERMATH = Measured(
    name="first_nan_aftermath",
    prediction=__doc__,
    arms={
        "clean": partial(aftermath, fault=None),
        **{
            f"{fault}_{guard}": partial(aftermath, fault=fault, guard=guard)
            for fault in ("nan", "huge")
            for guard in ("skip", "apply", "clip", "replace")
            if (fault, guard) not in {("nan", "apply"), ("huge", "replace")}
        },
    },
)

ALL = (FOUND, WARNING, AFTERMATH)
