"""The loop that joins the four layers: sample, judge, compare, update, log."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm

from ..numerics import QKClipReport, clip_gradients
from ..policy import (
    OBJECTIVES,
    ObjectiveDiagnostics,
    exact_kl,
    group_advantages,
    kl_in_reward,
    merge_diagnostics,
)
from ..rewards import (
    Answers,
    Problem,
    Reward,
    Task,
    overlong_filter,
    reward_by_name,
    shaped,
    strict_reward,
    task_by_name,
)
from ..runlog import RunLog
from ..system import mismatch_report
from .base import options_of, starting_point
from .checkpoint import load_checkpoint, optimizer_tensors, restore_optimizer, save_checkpoint
from .config import PolicyConfig, TrainerConfig
from .loss import (
    NOTHING_SEEN,
    UpdateLoss,
    correction_weights,
    decide_together,
    found_tokens,
    update_denominator,
)
from .models import ExpertLoad
from .optimizers import make_optimizer, make_qk_clip, parameter_names
from .partial import InFlight, Origin, restore
from .precision import round_weights, rounded_activations, rounded_cache
from .provenance import provenance
from .rollout import (
    Rollout,
    Sampling,
    completion_logits,
    completion_logp,
    completion_scores,
    decode_completions,
    encode_prompts,
    fed_masks,
    fed_positions,
    joined,
    micro_batches,
    rollout,
    select_rows,
    with_own_routing,
)

LOG = "run.jsonl"
REFILL = 2**40  # a refill draws from the generators of a step that no run will ever reach


class Trainer:
    """Group-relative policy optimisation of a small model, one process, one device.

    Everything random in step n is drawn from generators seeded by (seed, n), so a run that
    resumes from a checkpoint repeats the uninterrupted one bit for bit on the same machine.
    `task` and `reward` replace what `config.data` names; a reward function takes completion
    texts, their problems and which texts were cut, and returns one finite number each.

    Attributes a reader may look at between steps: `model`, `sampler` (the same object unless
    the system group makes it differ), `reference`, `log`, `version`. `config` may be replaced
    between steps by one that differs in what a step reads: data, policy, the learning rate.
    """

    def __init__(
        self,
        config: TrainerConfig | None = None,
        *,
        task: Task | None = None,
        reward: Reward | None = None,
    ):
        config = config or TrainerConfig()
        data, system = config.data, config.system
        _check_device(system.device)
        self.config = config
        self.task = task or task_by_name(data.task, data.task_options or options_of(data.task))
        reward_by_name(data.verifier)  # an unknown name is an error now, not at the first step
        self.reward = reward
        self.model, self.tokenizer = starting_point(config.base, data.task, system.device)
        self.reference = copy.deepcopy(self.model).requires_grad_(False)
        self.sampler = copy.deepcopy(self.reference) if system.separate_sampler else self.model
        self.version = self.sampler_version = self.updates = 0
        self._in_flight: InFlight | None = None
        self._optimizer = make_optimizer(self.model, config.numerics)
        self._names = parameter_names(self._optimizer, self.model)
        self._qk_clip = make_qk_clip(self.model, config.numerics)
        self._out = None if config.out is None else Path(config.out)
        log = None if self._out is None else self._out / LOG
        if log and log.exists() and log.stat().st_size:
            raise ValueError(
                f"out={config.out!r} already holds a run: continue it with "
                "Trainer.resume(out), or choose another folder"
            )
        header = {"config": config.to_json(), "provenance": provenance()}
        self.log = RunLog(log, header)
        self._sync(0)
        self._record({"step": 0, "heldout_accuracy": self.evaluate(0)})

    @classmethod
    def resume(
        cls, out: str | Path, *, task: Task | None = None, reward: Reward | None = None
    ) -> Trainer:
        """Continue the run in folder `out` from its newest checkpoint, with its configuration.

        Steps that the log already holds are computed again, identically, and not logged twice;
        before the first checkpoint that is all of them. Raises `ValueError` for a log without a
        header and for a damaged checkpoint, `FileNotFoundError` where there is no log.
        """
        log = RunLog.read(Path(out) / LOG)
        if "config" not in log.header:
            raise ValueError(f"{log.path} has no header; delete the folder and start the run anew")
        config = TrainerConfig.from_json(log.header["config"])
        trainer = cls(replace(config, out=None), task=task, reward=reward)
        for row in trainer.log:
            log.append(row)
        trainer.config, trainer._out, trainer.log = config, Path(out), log
        try:
            tensors, facts = load_checkpoint(Path(out), at_most=log.rows[-1]["step"])
        except FileNotFoundError:
            return trainer
        models = (trainer.model, trainer.sampler, trainer.reference)
        for model, prefix in zip(models, ("model.", "sampler.", "reference."), strict=True):
            own = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
            if own:
                model.load_state_dict(own)
        restore_optimizer(trainer._optimizer, trainer._names, tensors)
        trainer.version, trainer.updates = facts["version"], facts["updates"]
        trainer.sampler_version = facts["sampler_version"]
        flight = {k[len("flight.") :]: t for k, t in tensors.items() if k.startswith("flight.")}
        if flight:
            flight = {k: t.to(trainer.model.device) for k, t in flight.items()}
            trainer._in_flight = restore(flight, facts["flight"], trainer._redraw)
        return trainer

    def _redraw(self, origin: Origin) -> Problem:
        step, count, place = origin
        return self._draw(step, count)[place]

    def run(
        self,
        steps: int | None = None,
        *,
        progress: bool = True,
        on_step: Callable[[dict], None] | None = None,
    ) -> RunLog:
        """Train to step `steps` (default: the configured number) and return the log.

        `on_step` is called with each row. The bar shows reward and held-out accuracy, and is
        silent when `TQDM_DISABLE` is set.
        """
        steps = self.config.steps if steps is None else steps
        start = self.version
        silent = {} if progress else {"disable": True}  # absent, TQDM_DISABLE decides
        bar = tqdm(total=steps, initial=start, desc="GRPO", **silent)
        with bar:
            while self.version < steps:
                row = self.step()
                bar.set_postfix(
                    reward=f"{row['reward']:.2f}",
                    heldout=f"{self.log.last('heldout_accuracy'):.2f}",
                )
                bar.update()
                if on_step is not None:
                    on_step(row)
        if self._out and self.version > start and not self._due(self.config.checkpoint_every):
            self.save()
        return self.log

    def step(self) -> dict:
        """One step: sample, judge, update, measure, log, and a checkpoint when it is due."""
        configured, started, n = self.config, time.perf_counter(), self.version + 1
        scheduled = self._scheduled(n)
        self.config = configured.at(scheduled)
        try:
            row = self._step(n) | {path.split(".")[1]: v for path, v in scheduled.items()}
        finally:
            self.config = configured
        row["seconds"] = time.perf_counter() - started
        self._record(row)
        if self._out and self._due(self.config.checkpoint_every):
            self.save()
        return row

    def _scheduled(self, n: int) -> dict[str, float]:
        """What the schedules set for step n, from the logged steps before it and nothing else."""
        rows = [row for row in self.log if row["step"] < n]
        values = {}
        for path, schedule in self.config.schedules.items():
            name = path.split(".")[1]
            previous = next((row[name] for row in reversed(rows) if name in row), None)
            values[path] = schedule(n, previous, rows)
        return values

    def _step(self, n: int) -> dict:
        batch, row, advantages = self._collect(n)
        due = n % self.config.probe_every == 0 or n == 1
        probe = self._before(batch) if due else None
        if self._qk_clip:
            self._qk_clip.exact = due
        row |= self._update(batch, advantages)
        self.version = n
        if probe is not None:
            row |= self._after(probe)
        self._sync(n)
        finite = all(bool(torch.isfinite(p).all()) for p in self.model.parameters())
        if finite and self._due(self.config.data.eval_every):  # a policy of NaN answers nothing
            row["heldout_accuracy"] = self.evaluate(n)
        if self.config.policy.reference_every and n % self.config.policy.reference_every == 0:
            self.reference.load_state_dict(self.model.state_dict())
        return row

    def _due(self, every: int) -> bool:
        return self.version % every == 0 or self.version == self.config.steps

    # Layer 1: what was sampled and what it is worth

    def _generator(self, n: int, purpose: int) -> torch.Generator:
        seed = (self.config.seed * 1_000_003 + n) * 8 + purpose
        return torch.Generator(device=self.model.device).manual_seed(seed)

    def _sample(
        self, model, problems, n: int, purpose: int, group_size: int, sampling, **sampler
    ) -> Rollout:
        prompt, mask = encode_prompts(
            self.tokenizer, [p.prompt for p in problems], self.model.device
        )
        return rollout(
            model,
            prompt,
            mask,
            group_size=group_size,
            max_new_tokens=self.config.data.max_new_tokens,
            eos_token_id=self.tokenizer.eos_token_id,
            generator=self._generator(n, purpose),
            sampling=sampling,
            version=self.sampler_version,
            **sampler,
        )

    def _draw(self, n: int, count: int) -> list[Problem]:
        return self.task.sample("train", count, seed=self.config.seed * 1_000_003 + n)

    def _roll(self, n: int) -> tuple[Rollout, list[Problem]]:
        """What step n trains on: completions of the sampler, and the problem of each."""
        data, policy = self.config.data, self.config.policy
        if self.config.system.partial_tokens:
            return self._roll_partly(n)
        problems = self._draw(n, data.prompts)
        sampling = self._sampling(policy)
        system = self.config.system
        sampler = {
            "record_routing": system.replay_routing == "R3",
            "logit_noise": system.logit_noise,
        }
        batch = self._sample(self.sampler, problems, n, 0, data.group_size, sampling, **sampler)
        if system.sampling_mask != "stored":
            batch = replace(batch, kept=None, refilter=system.sampling_mask == "rerun")
        return batch, [p for p in problems for _ in range(data.group_size)]

    def _sampling(self, policy: PolicyConfig) -> Sampling:
        allowed = ()
        if policy.allowed:
            allowed = self.tokenizer(policy.allowed, add_special_tokens=False).input_ids
            allowed = tuple(sorted({*allowed, self.tokenizer.eos_token_id}))
        return Sampling(policy.temperature, policy.top_p, policy.top_k, policy.min_p, allowed)

    def _roll_partly(self, n: int) -> tuple[Rollout, list[Problem]]:
        """Let the groups in flight, and new ones in the place of those trained on, grow."""
        data, heat = self.config.data, self.config.policy.temperature
        generator, flight = self._generator(n, 0), self._in_flight
        drawn = data.prompts - (len(flight.problems) if flight else 0)
        origins = [(n, drawn, place) for place in range(drawn)]
        new = (self._draw(n, drawn), origins, data.group_size, data.max_new_tokens)
        begun = InFlight.begin(*new, self.model.device)
        flight = flight.plus(begun) if flight else begun
        whole = None
        while not (whole and whole.problems):
            flight.grow(
                *(self.sampler, self.tokenizer, self.config.system.partial_tokens),
                *(generator, heat, self.sampler_version),
            )
            whole, flight = flight.split()
        self._in_flight = flight if flight.problems else None
        problems = [p for p in whole.problems for _ in range(data.group_size)]
        return whole.rollout(self.tokenizer, heat), problems

    @contextmanager
    def _sampling_precision(self) -> Iterator[None]:
        """Activations and cache of the sampler as the system group rounds them."""
        system, sampler = self.config.system, self.sampler
        with rounded_activations(sampler, system.sampler_activations):
            with rounded_cache(sampler, system.sampler_cache):
                yield

    def _collect(self, n: int) -> tuple[Rollout, dict, Tensor]:
        data, policy = self.config.data, self.config.policy
        batch, judged = self._drawn(n)
        rewards, parts = self._shaped(judged, batch)
        groups = rewards.view(-1, data.group_size)
        first = groups[:, 0]
        flat = self._flat(rewards)
        solved = flat & (first >= rewards.max()) & (first > 0)
        row = {
            "step": n,
            "reward": float(rewards.mean()),
            "length": float(batch.mask.sum(1).float().mean()),
            "truncated": float((~batch.finished).float().mean()),
            "zero_variance_groups": float(flat.float().mean()),
            "solved_groups": float(solved.float().mean()),
            "entropy": float(batch.entropy[batch.mask].mean()),
            "staleness": self._staleness(batch),
            **parts,
        }
        if self.config.system.partial_tokens:
            row["prompts"] = len(groups)
        if data.dynamic_sampling:
            row["drawn_groups"] = len(groups)
            kept = self._with_signal(judged).to(batch.tokens.device)
            batch, rewards = select_rows(batch, kept), rewards[kept.cpu()]
        advantages = group_advantages(
            self._penalised(rewards, batch),
            data.group_size,
            scale=policy.scale or OBJECTIVES[policy.objective].scale,
            baseline=policy.baseline,
        )
        return batch, row, advantages.to(self.model.device, self.model.dtype)

    def _shaped(self, rewards: Tensor, batch: Rollout) -> tuple[Tensor, dict[str, float]]:
        """What the verifier pays with `data.shaping` added, and each part as a row's entry."""
        data = self.config.data
        if not data.shaping:
            return rewards, {}
        texts, cut = decode_completions(self.tokenizer, batch), (~batch.finished).tolist()
        lengths = batch.mask.sum(1).cpu()
        rewards, parts = shaped(
            Answers(texts, cut, lengths, data.max_new_tokens, rewards), data.shaping
        )
        return rewards, {f"reward_part:{name}": value for name, value in parts.items()}

    def _drawn(self, n: int) -> tuple[Rollout, Tensor]:
        """All completions of step n and what the verifier pays: a batch, and its refills."""
        data, drawn, missing = self.config.data, [], self.config.data.prompts
        for refill in range(1 + data.max_refills * data.dynamic_sampling):
            with self._sampling_precision():
                batch, problems = self._roll(n + refill * REFILL)
            drawn.append((batch, self._judge(batch, problems)))
            missing -= int((~self._flat(drawn[-1][1])).sum())
            if missing <= 0:
                break
        batches, rewards = zip(*drawn, strict=True)
        return joined(batches), torch.cat(rewards)

    def _flat(self, rewards: Tensor) -> Tensor:
        """Which groups have no variance, and so no gradient, (P,)."""
        advantages = group_advantages(rewards, self.config.data.group_size)
        return (advantages.view(-1, self.config.data.group_size) == 0).all(1)

    def _with_signal(self, rewards: Tensor) -> Tensor:
        """Rows of the first `prompts` groups that have variance; the first of all if none has."""
        data = self.config.data
        flat = self._flat(rewards)
        chosen = (flat if bool(flat.all()) else ~flat).nonzero()[: data.prompts]
        return (chosen * data.group_size + torch.arange(data.group_size)).flatten()

    def _staleness(self, batch: Rollout) -> float:
        if batch.versions is None:
            return self.version - batch.version
        return float((self.version - batch.versions[batch.mask]).float().mean())

    def _penalised(self, rewards: Tensor, batch: Rollout) -> Tensor:
        """The rewards, less the KL penalty where it belongs to them; μ sampled the tokens."""
        policy = self.config.policy
        if policy.kl_in != "reward" or policy.kl_coef == 0:
            return rewards
        with torch.no_grad():
            ref_logp = completion_logp(self.reference, batch)
        logp, estimator = batch.sampler_logp, policy.kl_estimator
        rewards = rewards.to(logp.device)
        return kl_in_reward(rewards, logp, ref_logp, batch.mask, policy.kl_coef, estimator)

    def _judge(self, batch: Rollout, problems: list[Problem]) -> Tensor:
        texts, cut = decode_completions(self.tokenizer, batch), (~batch.finished).tolist()
        reward = self.reward or reward_by_name(self.config.data.verifier)
        returned = reward(texts, problems, cut)
        try:
            rewards = torch.as_tensor([float(r) for r in returned])
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"reward function returned {returned!r:.80}; expected one number a completion"
            ) from error
        if rewards.shape != (len(texts),):
            raise ValueError(
                f"reward function returned {len(rewards)} rewards for {len(texts)} completions"
            )
        bad = (~torch.isfinite(rewards)).nonzero()[:, 0].tolist()
        if bad:
            raise ValueError(
                f"reward function returned {rewards[bad[0]].item()} for completion {bad[0]} "
                f"({texts[bad[0]]!r}) and {len(bad) - 1} others; return a finite number, or leave "
                "the group out"
            )
        return rewards

    def answer(self, problems: list[Problem]) -> list[str]:
        """One completion of each problem, sampled at temperature 1 from the trainer's weights."""
        batch = self._sample(self.model, problems, self.version, 2, 1, Sampling())
        return decode_completions(self.tokenizer, batch)

    def evaluate(self, n: int = 0) -> float:
        """Share of held-out problems answered right by one sample each at temperature 1.

        Always the trainer's own weights and the strict verifier, whatever training pays for.
        """
        problems = self.task.sample("heldout", self.config.data.eval_prompts, seed=0)
        batch = self._sample(self.model, problems, n, 1, 1, Sampling())
        texts, cut = decode_completions(self.tokenizer, batch), (~batch.finished).tolist()
        rewards = strict_reward(texts, problems, cut)
        return sum(rewards) / len(rewards)

    # Layers 2 and 3: the update

    def _update(self, batch: Rollout, advantages: Tensor) -> dict:
        policy, system, old_logp, gap = self.config.policy, self.config.system, None, None
        if self.config.data.mask_truncated:
            batch = replace(batch, mask=overlong_filter(batch.mask, ~batch.finished))
        if system.replay_routing == "R2":
            batch = with_own_routing(self.model, batch)
        if system.old_logp == "sampler":
            old_logp = batch.sampler_logp
        elif policy.epochs * policy.minibatches > 1 or system.correction:
            with torch.no_grad():
                old_logp = completion_logp(self.model, batch)
            gap = _gap(old_logp, batch)
        minibatches = torch.arange(len(advantages), device=advantages.device).chunk(
            policy.minibatches
        )
        corrected = correction_weights(system, old_logp, batch)
        weights = None if corrected is None else corrected[0]
        done = [
            self._one_update(batch, advantages, old_logp, weights, rows)
            for _ in range(policy.epochs)
            for rows in minibatches
        ]
        seen = merge_diagnostics([part for update in done for part in update.diagnostics])
        row = {
            "loss": done[-1].loss,
            "grad_norm": max((u.grad_norm for u in done), key=lambda g: (math.isnan(g), g)),
            "nonfinite": sum(not u.finite for u in done),
            "learning_rate": self._optimizer.param_groups[0]["lr"],
            "clip_fraction": seen.clip_fraction,
            "ratio_max": seen.ratio_max,
        }
        positive, total = sum(update.pull for update in done).tolist()
        if total:
            row["positive_share"] = positive / total
        silenced, all_of_them = sum(update.silenced for update in done).tolist()
        if all_of_them:
            row["masked_tokens"] = silenced / all_of_them
        lost, all_of_them = sum(update.lost for update in done).tolist()
        if all_of_them:
            row["lost_tokens"] = lost / all_of_them
        if corrected is not None:
            row["weight_ess"] = corrected[1]
        clips = [u.clipped for u in done if u.clipped and u.clipped.max_logit > -math.inf]
        if clips:
            if self._qk_clip.exact:  # else some are bounds
                row["attention_logit_max"] = max(clip.max_logit for clip in clips)
            row["clipped_heads"] = sum(clip.clipped for clip in clips)
        if policy.objective == "bapo":
            for name in ("clip_low", "clip_high"):  # an update without rows searched nothing
                found = [u.clip[name] for u in done if u.clip[name] is not None]
                row |= {name: sum(found) / len(found)} if found else {}
        return row | (done[0].gap if gap is None else gap)

    def _one_update(self, batch, advantages, old_logp, weights, rows) -> _Update:
        """One optimizer step on some rows; what it saw before stepping."""
        policy = self.config.policy
        denominator = update_denominator(policy, batch.mask[rows], self.config.data.max_new_tokens)
        if (policy.kl_coef == 0 or policy.kl_in == "reward") and policy.entropy_coef == 0:
            # Without an advantage these rows have no gradient; the denominator counts them.
            rows = rows[advantages[rows] != 0]
        rows = rows[batch.mask[rows].any(1)]
        clip = {"clip_low": policy.clip_low, "clip_high": policy.clip_high}
        given = (policy, self.config.system, self.reference, denominator)
        loss = UpdateLoss(*given, old_logp, advantages, clip, weights)
        decide_together(loss, self.model, batch, rows, self._generator(self.updates, 3))
        total, diagnostics = 0.0, [NOTHING_SEEN]
        scored = torch.zeros_like(batch.sampler_logp)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for chunk in micro_batches(batch, rows, self.config.numerics.micro_batch):
            piece = select_rows(batch, chunk)
            with self._qk_clip.counting(*fed_masks(piece)) if self._qk_clip else nullcontext():
                logits, logp = completion_scores(self.model, piece)
            value, seen = loss.of(logits, logp, piece, chunk)
            scored[chunk, : logp.shape[1]] = logp.detach()
            self._backward(value)
            total += value.item()
            diagnostics.append(seen)
        norm, finite = self._apply(total)
        clipped = self._clip_heads(finite)
        gap = _gap(scored[rows], select_rows(batch, rows)) if len(rows) else {}
        seen = (gap, diagnostics, loss.clip, loss.pull, loss.silenced, loss.lost, clipped)
        return _Update(total, norm, finite, *seen)

    def _backward(self, loss: Tensor) -> None:
        """The gradient of a micro-batch's loss, added to the parameters'."""
        loss.backward()

    def _apply(self, loss: float) -> tuple[float, bool]:
        """Clip, decide about faults, step; returns the gradient norm and whether all was finite."""
        numerics = self.config.numerics
        norm = float(clip_gradients(self.model.parameters(), numerics.max_grad_norm))
        finite = math.isfinite(loss) and math.isfinite(norm)
        if not finite and numerics.nonfinite == "raise":
            raise FloatingPointError(
                f"step {self.version + 1}: loss {loss}, gradient norm {norm}; nothing was applied"
            )
        self.updates += 1
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate()
        if finite or numerics.nonfinite == "apply":
            self._optimizer.step()
        return norm, finite

    def _clip_heads(self, finite: bool) -> QKClipReport | None:
        """QK-Clip on the weights of an update that was applied; what it saw and did."""
        if self._qk_clip is None:
            return None
        if finite or self.config.numerics.nonfinite == "apply":
            return self._qk_clip.step()
        return self._qk_clip.reset()

    def _learning_rate(self) -> float:
        numerics, rate = self.config.numerics, self.config.numerics.learning_rate
        rate *= min(1.0, self.updates / max(1, numerics.warmup))
        if numerics.schedule == "linear":
            rate *= max(0.1, 1 - self.version / self.config.steps)
        return rate

    # Probes: exact distances on a few rows, before and after the update

    @torch.no_grad()
    def _before(self, batch: Rollout) -> dict:
        rows = torch.arange(min(self.config.probe_rows, len(batch.tokens)))
        piece = select_rows(batch, rows.to(batch.tokens.device))
        with ExpertLoad(self.model) as load:
            logits = completion_logits(self.model, piece)
        return {
            "piece": piece,
            "logits": logits,
            "weights": [p.clone() for p in self.model.parameters()],
            "expert_load_max": load.worst(fed_positions(piece)),
        }

    @torch.no_grad()
    def _after(self, probe: dict) -> dict:
        piece, counted = probe["piece"], probe["piece"].mask
        temperature = self.config.policy.temperature
        before = probe["logits"][counted] / temperature
        after = completion_logits(self.model, piece)[counted] / temperature
        reference = completion_logits(self.reference, piece)[counted] / temperature
        moved = [a - b for a, b in zip(self.model.parameters(), probe["weights"], strict=True)]
        row = {
            "update_norm": float(torch.nn.utils.get_total_norm(moved)),
            "expert_load_max": probe["expert_load_max"],
        }
        if torch.isfinite(after).all():
            row["kl_ref"] = float(exact_kl(before, reference).mean())
            row["kl_step"] = float(exact_kl(before, after).mean())
        return row

    # Layer 4: the sampler, the log, the checkpoint

    def _sync(self, n: int) -> None:
        """Send the trainer's weights to the sampler, as far as the system group allows."""
        system = self.config.system
        if n % system.sync_every:
            return
        self.sampler_version = n
        if self.sampler is not self.model:
            round_weights(self.model, self.sampler, system.sampler_precision, system.sync_skip)

    def _record(self, row: dict) -> None:
        self.log.append(row)

    def save(self) -> Path:
        """Write a checkpoint now; returns its path."""
        if self._out is None:
            raise ValueError("config.out is None: this run keeps nothing; give it a folder")
        tensors = {f"model.{k}": t for k, t in self.model.state_dict().items()}
        if self.sampler is not self.model:
            tensors |= {f"sampler.{k}": t for k, t in self.sampler.state_dict().items()}
        if self.config.policy.reference_every:
            tensors |= {f"reference.{k}": t for k, t in self.reference.state_dict().items()}
        tensors |= optimizer_tensors(self._optimizer, self._names)
        facts = {
            "version": self.version,
            "updates": self.updates,
            "sampler_version": self.sampler_version,
        }
        if self._in_flight:
            tensors |= {f"flight.{k}": t for k, t in self._in_flight.tensors().items()}
            facts["flight"] = self._in_flight.origins
        return save_checkpoint(self._out, self.version, tensors, facts)


@dataclass(frozen=True)
class _Update:
    loss: float
    grad_norm: float
    finite: bool
    gap: dict
    diagnostics: list[ObjectiveDiagnostics]
    clip: dict[str, float | None]
    pull: Tensor
    silenced: Tensor
    lost: Tensor
    clipped: QKClipReport | None


def _check_device(name: str) -> None:
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        why = str(error).split("\n")[0]
        raise ValueError(f"system.device={name!r} cannot be used here ({why})") from error


def _gap(logp: Tensor, piece: Rollout) -> dict:
    """Layer 4 signals of the rows; empty when a value is not finite, which layer 3 reports."""
    logp = logp.detach()[:, : piece.mask.shape[1]]
    mask = found_tokens(logp, piece)
    if not torch.isfinite(logp[mask]).all():
        return {}
    report = mismatch_report(logp, piece.sampler_logp, mask)
    return {
        "logp_gap": report.mean_abs,
        "logp_gap_max": report.max_abs,
        "mismatch_kl": report.k3,
    }
