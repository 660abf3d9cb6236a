"""The trainer: repeatable, resumable, one gradient however it is split, clear when stopped."""

import json
import math
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import sharp_moe, step_gradients, tiny_config
from transformers import MixtralConfig, MixtralForCausalLM

from stablerl_core.rewards import Problem, task_by_name
from stablerl_core.runlog import SIGNALS, RunLog
from stablerl_core.training import Trainer, TrainerConfig, load_base, routers
from stablerl_core.training import loss as loss_module
from stablerl_core.training import trainer as trainer_module
from stablerl_core.training.rollout import completion_logits, select_rows

STEP = {
    "step",
    "seconds",
    "reward",
    "length",
    "truncated",
    "zero_variance_groups",
    "solved_groups",
    "entropy",
    "clip_fraction",
    "positive_share",
    "ratio_max",
    "loss",
    "grad_norm",
    "learning_rate",
    "nonfinite",
    "logp_gap",
    "logp_gap_max",
    "mismatch_kl",
    "staleness",
}
PROBE = {"kl_ref", "kl_step", "update_norm", "expert_load_max"}
VARIANTS = {
    "plain": {},
    "separate sampler": dict(
        system__sampler_precision="float8_e4m3",
        system__sync_every=3,
        system__old_logp="sampler",
    ),
    "stale tensors": dict(system__sync_skip=("lm_head",), policy__top_p=0.9),
    "many updates": dict(policy__epochs=2, policy__minibatches=2, numerics__micro_batch=5),
    "kl and schedule": dict(
        policy__kl_coef=0.1, policy__kl_estimator="unbiased", numerics__schedule="linear"
    ),
}


def rows(log):
    """Rows without the time they took, comparable where NaN equals NaN."""
    return [repr({k: v for k, v in row.items() if k != "seconds"}) for row in log]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def state(trainer):
    """Everything that decides how a run goes on."""
    optimizer = trainer._optimizer.state_dict()["state"]
    flat = {
        f"{i}.{k}": torch.as_tensor(v) for i, fields in optimizer.items() for k, v in fields.items()
    }
    numbers = torch.tensor([trainer.version, trainer.sampler_version, trainer.updates])
    models = {f"model.{k}": t for k, t in weights(trainer.model).items()}
    sampler = {f"sampler.{k}": t for k, t in weights(trainer.sampler).items()}
    return models | sampler | flat | {"numbers": numbers}


def run(config, **options):
    trainer = Trainer(config, **options)
    trainer.run(progress=False)
    return trainer


# --- the same seed, the same run -------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_seed_decides_every_number(variant):
    first, again = run(tiny_config(steps=2, **variant)), run(tiny_config(steps=2, **variant))
    other = run(tiny_config(steps=2, seed=1, **variant))
    assert rows(first.log) == rows(again.log) and len(first.log) == 3
    assert equal(state(first), state(again))
    assert rows(first.log)[1] != rows(other.log)[1]
    assert not torch.equal(first.model.lm_head.weight, other.model.lm_head.weight)


def test_global_streams_are_neither_used_nor_touched():
    torch.default_generator.manual_seed(1)
    before = torch.get_rng_state()
    first = run(tiny_config(steps=1))
    assert torch.equal(torch.get_rng_state(), before)
    torch.default_generator.manual_seed(2)
    assert rows(first.log) == rows(run(tiny_config(steps=1)).log)


def test_measuring_changes_nothing():
    """Probes, held-out accuracy and checkpoints look; only training trains."""
    often = run(tiny_config(steps=3, probe_every=1, data__eval_every=1))
    seldom = run(tiny_config(steps=3, probe_every=9, data__eval_every=9))
    assert equal(weights(often.model), weights(seldom.model))
    assert [row["reward"] for row in often.log.rows[1:]] == seldom.log.series("reward")[1]


# --- a row -----------------------------------------------------------------------------------


def test_rows_have_the_signals_they_should():
    trainer = run(tiny_config(steps=4, probe_every=3, data__eval_every=2))
    log = trainer.log
    assert [set(row) for row in log] == [
        {"step", "heldout_accuracy"},
        STEP | PROBE,
        STEP | {"heldout_accuracy"},
        STEP | PROBE,
        STEP | {"heldout_accuracy"},
    ]
    assert all(set(row) <= set(SIGNALS) for row in log)
    assert all(type(v) in (int, float) for row in log for v in row.values())
    assert json.loads(json.dumps(log.rows)) == log.rows
    assert log.header["config"] == trainer.config.to_json()
    assert {"torch", "hardware", "commit"} <= set(log.header["provenance"])


def test_on_policy_the_printed_loss_is_zero_and_the_gradient_is_not():
    for row in run(tiny_config(steps=3)).log.rows[1:]:
        assert abs(row["loss"]) < 1e-6 < 1e-2 < row["grad_norm"]
        assert row["ratio_max"] == 1.0 and row["clip_fraction"] == 0.0 and row["nonfinite"] == 0


def test_signals_of_the_batch_are_those_of_the_batch(monkeypatch):
    trainer = Trainer(tiny_config(steps=1, data__verifier="any"))
    batches = []
    plain = trainer._collect
    monkeypatch.setattr(trainer, "_collect", lambda n: batches.append(plain(n)) or batches[-1])
    row = trainer.step()
    (batch, _, _) = batches[0]
    lengths = batch.mask.sum(1).float()
    assert row["length"] == lengths.mean() and lengths.max() <= 10
    assert row["truncated"] == (~batch.finished).float().mean() and 0 < row["truncated"] < 1
    assert row["entropy"] == pytest.approx(batch.entropy[batch.mask].mean().item(), rel=1e-6)
    assert 0 < row["logp_gap"] < row["logp_gap_max"] < 1e-5


@pytest.mark.parametrize(
    "rewards, flat, solved",
    [
        ([1, 0] * 6 + [1] * 6 + [0] * 6, 0.5, 0.25),
        ([1] * 24, 1.0, 1.0),
        ([0] * 24, 1.0, 0.0),  # all failed: nothing is solved
        ([0, 1] * 12, 0.0, 0.0),
    ],
)
def test_groups_without_variance_are_told_apart(rewards, flat, solved):
    trainer = Trainer(tiny_config(), reward=lambda *_: rewards)
    row = trainer.step()
    assert row["reward"] == pytest.approx(sum(rewards) / 24)
    assert (row["zero_variance_groups"], row["solved_groups"]) == (flat, solved)


def test_probes_are_exact():
    trainer = Trainer(tiny_config(steps=2, probe_every=1, probe_rows=6))
    trainer.step()
    before = weights(trainer.model)
    seen = []
    plain = trainer._before
    trainer._before = lambda batch: seen.append(select_rows(batch, torch.arange(6))) or plain(batch)
    row = trainer.step()
    piece = seen[0]
    after = weights(trainer.model)

    def logp(state):
        model, _ = load_base("mixtral-cpu-sort")
        model.load_state_dict(state)
        with torch.no_grad():
            return completion_logits(model, piece)[piece.mask].double().log_softmax(-1)

    old, new, reference = logp(before), logp(after), logp(weights(load_base("mixtral-cpu-sort")[0]))
    exact = {
        "kl_ref": (old.exp() * (old - reference)).sum(-1).mean(),
        "kl_step": (old.exp() * (old - new)).sum(-1).mean(),
        "update_norm": sum((after[k] - before[k]).square().sum() for k in after).sqrt(),
    }
    for name, value in exact.items():
        assert value > 1e-6 and row[name] == pytest.approx(value.item(), rel=1e-3), name


def test_expert_load_counts_tokens_and_no_padding():
    trainer = Trainer(tiny_config(probe_rows=24))
    batch, _, _ = trainer._collect(1)
    assert batch.mask[:, 1:].float().mean() < 0.95
    chosen = []
    hooks = [
        r.register_forward_hook(lambda *a: chosen.append(a[-1][-1]))
        for r in routers(trainer.model).values()
    ]
    first = batch.prompt[::6]  # a prompt is read once for its group
    with torch.no_grad():
        trainer.model(first)
        trainer.model(torch.cat([batch.prompt, batch.tokens[:, :-1]], 1))
    for hook in hooks:
        hook.remove()
    fed = torch.cat([torch.zeros_like(batch.prompt_mask), batch.mask[:, 1:]], 1).flatten()
    loads = []
    for prompt, completion in zip(chosen[:2], chosen[2:], strict=True):
        count = torch.cat([prompt, completion[fed]]).flatten().bincount(minlength=8).float()
        loads.append((count.max() / count.mean()).item())
    assert trainer._before(batch)["expert_load_max"] == pytest.approx(max(loads), rel=1e-6)
    padded = replace(
        batch,
        **{
            name: torch.cat([getattr(batch, name), getattr(batch, name).new_zeros(24, 60)], 1)
            for name in ("tokens", "mask", "sampler_logp", "entropy")
        },
    )
    assert trainer._before(padded)["expert_load_max"] == pytest.approx(max(loads), rel=1e-6)


def test_the_learning_rate_warms_up_and_falls():
    constant = run(tiny_config(steps=4, numerics__warmup=3, numerics__learning_rate=3e-4))
    assert constant.log.series("learning_rate")[1] == pytest.approx([1e-4, 2e-4, 3e-4, 3e-4])
    linear = run(tiny_config(steps=4, numerics__warmup=0, numerics__schedule="linear"))
    fall = linear.log.series("learning_rate")[1]
    assert fall == pytest.approx([5e-4, 3.75e-4, 2.5e-4, 1.25e-4])


def test_on_step_is_called_with_each_row_and_run_stops_where_it_is_told():
    trainer, told = Trainer(tiny_config(steps=4)), []
    log = trainer.run(2, progress=False, on_step=told.append)
    assert [row["step"] for row in told] == [1, 2] and told == log.rows[1:]
    assert trainer.run(2, progress=False) is log and len(log) == 3
    trainer.run(progress=False, on_step=told.append)
    assert [row["step"] for row in told] == [1, 2, 3, 4] and trainer.version == 4


# --- layer 1: rewards and evaluation -----------------------------------------------------------


class Recording:
    """The digit task, remembering what it was asked for."""

    name = "sort"

    def __init__(self):
        self.asked = []

    def sample(self, split, n, seed):
        self.asked.append((split, n, seed))
        return task_by_name("sort").sample(split, n, seed)


def test_training_and_evaluation_see_their_own_split():
    task = Recording()
    trainer = Trainer(tiny_config(data__eval_every=1), task=task)
    trainer.step()
    trainer.step()
    splits = [(split, n) for split, n, _ in task.asked]
    assert splits == [("heldout", 8), ("train", 4), ("heldout", 8), ("train", 4), ("heldout", 8)]
    seeds = {
        split: [seed for s, _, seed in task.asked if s == split] for split in ("train", "heldout")
    }
    assert len(set(seeds["train"])) == 2 and len(set(seeds["heldout"])) == 1


def test_evaluation_is_strict_whatever_training_pays(monkeypatch):
    golds = []

    class Task(Recording):
        def sample(self, split, n, seed):
            golds[:] = [p.gold for p in super().sample(split, n, seed)]
            return super().sample(split, n, seed)

    def hedge(tokenizer, batch):
        each = len(batch.tokens) // len(golds)
        return [f"#{gold}#0" for gold in golds for _ in range(each)]

    monkeypatch.setattr(trainer_module, "decode_completions", hedge)
    trainer = Trainer(tiny_config(data__verifier="any", data__max_new_tokens=24), task=Task())
    row = trainer.step()
    assert row["reward"] > 0.5 and trainer.evaluate() == 0.0


def test_evaluation_is_of_the_trainer_not_of_its_sampler():
    plain = Trainer(tiny_config())
    rounded = Trainer(tiny_config(system__sampler_precision="int4"))
    assert plain.log.rows == rounded.log.rows
    with torch.no_grad():
        rounded.sampler.lm_head.weight.zero_()
    assert rounded.evaluate(0) == plain.evaluate(0) > 0


def test_a_reward_function_sees_texts_problems_and_cuts():
    seen = []

    def reward(texts, problems, cut):
        seen.append((list(texts), list(problems), list(cut)))
        return torch.arange(24.0)

    trainer = Trainer(tiny_config(), reward=reward)
    row = trainer.step()
    texts, problems, cut = seen[0]
    assert len(texts) == len(problems) == len(cut) == 24 and all(isinstance(t, str) for t in texts)
    assert [p.prompt for p in problems[:6]] == [problems[0].prompt] * 6
    assert len({p.prompt for p in problems}) == 4 and isinstance(problems[0], Problem)
    assert 0 < sum(cut) < 24 and all(len(t) == 10 for t, c in zip(texts, cut, strict=True) if c)
    assert row["reward"] == 11.5 and row["zero_variance_groups"] == 0


@pytest.mark.parametrize(
    "reward, message",
    [
        (lambda *_: [math.nan] * 24, "reward function returned nan for completion 0.*23 others"),
        (lambda *_: [0.0] * 23 + [math.inf], "reward function returned inf for completion 23"),
        (lambda *_: [1.0] * 23, "reward function returned 23 rewards for 24 completions"),
        (lambda *_: [], "reward function returned 0 rewards for 24 completions"),
        (lambda *_: None, "reward function returned None"),
        (lambda *_: 1.0, "reward function returned 1.0"),
        (lambda *_: [None] * 24, "reward function returned .*None"),
        (lambda *_: torch.zeros(24, 2), "reward function returned"),
    ],
)
def test_a_reward_that_is_no_number_is_told(reward, message):
    trainer = Trainer(tiny_config(), reward=reward)
    before = state(trainer)
    with pytest.raises(ValueError, match=message):
        trainer.step()
    assert equal(state(trainer), before) and len(trainer.log) == 1


def test_after_a_bad_reward_the_log_is_whole_and_the_run_resumes(tmp_path):
    config = tiny_config(out=str(tmp_path))
    Trainer(config).run(2, progress=False)
    with pytest.raises(ValueError, match="reward function returned nan"):
        Trainer.resume(tmp_path, reward=lambda *_: [math.nan] * 24).run(progress=False)
    assert [row["step"] for row in RunLog.read(tmp_path / "run.jsonl")] == [0, 1, 2]
    resumed = Trainer.resume(tmp_path)
    resumed.run(progress=False)
    assert rows(resumed.log) == rows(run(replace(config, out=None)).log)


def test_an_error_of_the_reward_function_passes_through():
    def reward(*_):
        raise KeyError("my own bug")

    with pytest.raises(KeyError, match="my own bug"):
        Trainer(tiny_config(), reward=reward).step()


# --- layers 2 and 3: the gradient --------------------------------------------------------------

OBJECTIVES = [
    ("grpo", "sequence"),
    ("grpo", "token"),
    ("reinforce", "constant"),
]


def one_gradient(monkeypatch, **changes):
    return step_gradients(Trainer(tiny_config(probe_every=9, **changes)), monkeypatch)[0]


@pytest.mark.parametrize("objective, aggregation", OBJECTIVES)
@pytest.mark.parametrize("micro_batch", [1, 5, 23])
def test_micro_batches_do_not_change_the_gradient(monkeypatch, micro_batch, objective, aggregation):
    options = dict(
        policy__objective=objective,
        policy__aggregation=aggregation,
        policy__kl_coef=0.1,
        system__sampler_precision="int4",
        system__old_logp="sampler",  # so that ratios and the clip matter
    )
    whole = one_gradient(monkeypatch, **options)
    split = one_gradient(monkeypatch, numerics__micro_batch=micro_batch, **options)
    assert whole.norm() > 1e-2 and (whole - split).norm() < 1e-6 * whole.norm() + 1e-7


@pytest.mark.parametrize("objective, aggregation", OBJECTIVES)
def test_rows_without_advantage_are_left_out_without_a_trace(monkeypatch, objective, aggregation):
    """With a KL term too small to count they are kept: the gradient must be the same."""
    options = dict(policy__objective=objective, policy__aggregation=aggregation, data__prompts=8)
    lean = Trainer(tiny_config(probe_every=9, **options))
    full = Trainer(tiny_config(probe_every=9, policy__kl_coef=1e-30, **options))
    rows_scored = []
    places = {"completion_scores": trainer_module, "completion_logp": loss_module}
    for name, module in places.items():  # the policy's, the reference's
        plain = getattr(module, name)
        monkeypatch.setattr(
            module,
            name,
            lambda model, batch, plain=plain: (
                rows_scored.append(len(batch.tokens)) or plain(model, batch)
            ),
        )
    a, scored_by_lean = step_gradients(lean, monkeypatch)[0], sum(rows_scored)
    b, scored_by_full = step_gradients(full, monkeypatch)[0], sum(rows_scored) - scored_by_lean
    assert scored_by_lean < 48 and scored_by_full == 48 + 48  # policy and reference
    assert a.norm() > 1e-2 and (a - b).norm() < 1e-6 * a.norm()
    assert lean.log.rows[1]["loss"] == pytest.approx(full.log.rows[1]["loss"], rel=1e-6, abs=1e-7)


def test_the_gradient_is_that_of_the_formula(monkeypatch):
    """Dr. GRPO by hand: −Σ Â log π / (B · longest allowed) on the batch that was sampled."""
    trainer = Trainer(
        tiny_config(
            policy__objective="reinforce", policy__aggregation="constant", policy__scale="none"
        )
    )
    collected = []
    plain = trainer._collect
    monkeypatch.setattr(trainer, "_collect", lambda n: collected.append(plain(n)) or collected[-1])
    actual = step_gradients(trainer, monkeypatch)[0]
    (batch, row, _) = collected[0]
    model, tokenizer = load_base("mixtral-cpu-sort")
    texts = trainer_module.decode_completions(tokenizer, batch)
    problems = task_by_name("sort").sample("train", 4, seed=1)
    golds = [p.gold for p in problems for _ in range(6)]
    rewards = torch.tensor(
        [
            float(t.split("#")[-1] == g and f)
            for t, g, f in zip(texts, golds, batch.finished, strict=True)
        ]
    )
    assert rewards.mean().item() == pytest.approx(row["reward"]) and 0 < row["reward"] < 1
    advantages = rewards - rewards.view(4, 6).mean(1).repeat_interleave(6)
    for i in range(24):
        ids = torch.cat([batch.prompt[i], batch.tokens[i][batch.mask[i]]])[None]
        start = batch.prompt.shape[1]
        logp = model(ids).logits[0, start - 1 : -1].log_softmax(-1)
        chosen = logp.gather(1, ids[0, start:, None])
        (-advantages[i] * chosen.sum() / (24 * 10)).backward()
    expected = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (actual - expected).norm() < 1e-5 * expected.norm()


def test_a_group_of_one_has_no_signal_and_no_nan():
    start = weights(load_base("mixtral-cpu-sort")[0])
    trainer = run(tiny_config(steps=2, data__group_size=1, data__prompts=8, probe_every=1))
    for row in trainer.log.rows[1:]:
        assert row["zero_variance_groups"] == 1 and row["loss"] == row["grad_norm"] == 0
        assert row["update_norm"] == row["kl_step"] == row["nonfinite"] == 0
        assert not any(math.isnan(value) for value in row.values())
    assert equal(weights(trainer.model), start)


@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_completions_of_one_token(kl_coef):
    trainer = Trainer(
        tiny_config(steps=2, data__max_new_tokens=1, policy__kl_coef=kl_coef, probe_every=1),
        reward=lambda texts, *_: [len(text) * i for i, text in enumerate(texts)],
    )
    for row in trainer.run(progress=False).rows[1:]:
        assert row["length"] == 1 and row["grad_norm"] > 0
        assert not any(math.isnan(value) for value in row.values())


def test_later_passes_over_a_rollout_move_the_ratio_from_the_start_of_the_step():
    row = Trainer(
        tiny_config(policy__epochs=4, numerics__warmup=0, numerics__learning_rate=2e-3)
    ).step()
    assert row["ratio_max"] > 1.05 and row["clip_fraction"] > 0
    row = Trainer(tiny_config(policy__minibatches=2, numerics__warmup=0)).step()
    assert row["ratio_max"] > 1.001 and abs(row["loss"]) > 1e-6


def test_every_update_counts():
    trainer = Trainer(tiny_config(policy__epochs=2, policy__minibatches=2, numerics__warmup=8))
    rates = [trainer.step()["learning_rate"], trainer.step()["learning_rate"]]
    assert trainer.updates == 8 and rates == pytest.approx([2.5e-4, 5e-4])


def test_gradients_are_clipped_to_the_bound(monkeypatch):
    trainer = Trainer(tiny_config(numerics__max_grad_norm=0.1))
    applied = []
    plain = trainer._optimizer.step

    def spy():
        applied.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]).norm())
        plain()

    monkeypatch.setattr(trainer._optimizer, "step", spy)
    row = trainer.step()
    assert row["grad_norm"] > 0.2 and applied[0].item() == pytest.approx(0.1, rel=1e-4)


# --- layer 3: faults -------------------------------------------------------------------------


def with_fault(trainer, monkeypatch, at):
    """The loss of step `at` is NaN, and so is its gradient."""
    plain = trainer_module.UpdateLoss.of

    def of(*args):
        value, seen = plain(*args)
        return (value * math.nan if trainer.version + 1 == at else value), seen

    monkeypatch.setattr(trainer_module.UpdateLoss, "of", of)
    return trainer


def test_skip_counts_a_fault_and_leaves_the_weights(monkeypatch):
    trainer = with_fault(Trainer(tiny_config(probe_every=1)), monkeypatch, at=2)
    trainer.step()
    before, moments = weights(trainer.model), state(trainer)
    row = trainer.step()
    assert row["nonfinite"] == 1 and math.isnan(row["loss"]) and math.isnan(row["grad_norm"])
    assert equal(weights(trainer.model), before) and row["update_norm"] == 0
    changed = {k for k, t in state(trainer).items() if not torch.equal(t, moments[k])}
    assert changed == {"numbers"}
    row = trainer.step()
    assert row["nonfinite"] == 0 and math.isfinite(row["loss"])
    assert not equal(weights(trainer.model), before)


def test_raise_stops_before_anything_is_applied(monkeypatch, tmp_path):
    config = tiny_config(numerics__nonfinite="raise", out=str(tmp_path / "a"))
    trainer = with_fault(Trainer(config), monkeypatch, at=2)
    trainer.step()
    before = weights(trainer.model)
    with pytest.raises(FloatingPointError, match="step 2: loss nan.*nothing was applied"):
        trainer.step()
    assert equal(weights(trainer.model), before)
    assert [row["step"] for row in RunLog.read(tmp_path / "a" / "run.jsonl")] == [0, 1]


@pytest.mark.parametrize("eval_every", [1, 9])
def test_apply_ruins_the_weights_and_the_log_tells(monkeypatch, eval_every):
    config = tiny_config(
        numerics__nonfinite="apply", probe_every=1, data__eval_every=eval_every, steps=9
    )
    trainer = with_fault(Trainer(config), monkeypatch, at=2)
    trainer.step()
    row = trainer.step()
    assert trainer.log.rows[-1] == row and row["nonfinite"] == 1 and math.isnan(row["update_norm"])
    assert "kl_step" not in row and "heldout_accuracy" not in row
    assert all(torch.isnan(p).any() for p in trainer.model.parameters())
    with pytest.raises(ValueError, match="logits have a row with NaN"):
        trainer.step()


@pytest.mark.parametrize("mode", ["skip", "apply"])
def test_a_weight_that_is_nan_is_a_counted_fault_not_a_crash(mode):
    """The sampler still holds good weights, so the fault first shows in the update."""
    trainer = Trainer(tiny_config(system__sync_every=9, numerics__nonfinite=mode))
    with torch.no_grad():
        trainer.model.model.norm.weight[3] = math.nan
    row = trainer.step()
    assert row["nonfinite"] == 1 and math.isnan(row["loss"]) and "logp_gap" not in row


# --- layer 4: the sampler --------------------------------------------------------------------


def test_staleness_counts_the_steps_since_the_last_sync():
    trainer = run(tiny_config(steps=7, system__sync_every=3, probe_every=9, data__eval_every=9))
    assert trainer.log.series("staleness")[1] == [0, 1, 2, 0, 1, 2, 0]
    gaps = trainer.log.series("logp_gap")[1]
    fresh = [gaps[i] for i in (0, 3, 6)]
    assert max(fresh) < 1e-5 < 1e-3 < min(gaps[i] for i in (1, 2, 4, 5))


@pytest.mark.parametrize("old_logp", ["trainer", "sampler"])
def test_a_rounded_sampler_shows_in_the_gap_and_the_ratio_where_it_is_the_denominator(old_logp):
    trainer = Trainer(
        tiny_config(system__sampler_precision="float8_e4m3", system__old_logp=old_logp)
    )
    row = trainer.step()
    assert row["logp_gap"] > 1e-3 and row["mismatch_kl"] > 1e-6 and row["staleness"] == 0
    if old_logp == "trainer":
        assert row["ratio_max"] == 1.0 and abs(row["loss"]) < 1e-6
    else:
        assert row["ratio_max"] > 1.01


@pytest.mark.parametrize(
    "change", [dict(numerics__micro_batch=1), dict(policy__minibatches=4), dict(policy__epochs=2)]
)
def test_the_gap_is_that_of_all_trained_rows_however_they_are_split(change):
    options = dict(system__sampler_precision="int4", policy__kl_coef=0.01)
    whole, split = (Trainer(tiny_config(**options, **c)).step() for c in ({}, change))
    for name in ("logp_gap", "logp_gap_max", "mismatch_kl"):
        assert split[name] == pytest.approx(whole[name], rel=1e-4), name


def test_the_sampler_holds_rounded_weights_and_the_trainer_does_not():
    trainer = Trainer(tiny_config(system__sampler_precision="bfloat16"))
    trainer.step()
    for name, tensor in trainer.model.state_dict().items():
        sent = trainer.sampler.state_dict()[name]
        expected = tensor.bfloat16().float() if tensor.dim() > 1 else tensor
        assert torch.equal(sent, expected), name
    assert not torch.equal(trainer.model.lm_head.weight, trainer.sampler.lm_head.weight)


def test_a_broken_sync_leaves_tensors_behind():
    trainer = Trainer(tiny_config(system__sync_skip=("lm_head",)))
    start = trainer.model.lm_head.weight.clone()
    first, second = trainer.step(), trainer.step()
    assert torch.equal(trainer.sampler.lm_head.weight, start)
    assert not torch.equal(trainer.model.lm_head.weight, start)
    assert torch.equal(trainer.sampler.model.norm.weight, trainer.model.model.norm.weight)
    assert first["logp_gap"] < 1e-5 < 1e-4 < second["logp_gap"] and second["staleness"] == 0


def test_without_a_reason_the_sampler_is_the_trainers_model():
    assert (trainer := Trainer(tiny_config())).sampler is trainer.model
    assert (trainer := Trainer(tiny_config(system__sync_every=2))).sampler is not trainer.model


def test_the_reference_stays():
    trainer = Trainer(tiny_config(policy__kl_coef=0.1))
    before = weights(trainer.reference)
    trainer.run(2, progress=False)
    assert equal(weights(trainer.reference), before)
    assert not equal(weights(trainer.model), before)
    assert all(p.grad is None for p in trainer.reference.parameters())


# --- stop and go on --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=VARIANTS, ids=list(VARIANTS))
def uninterrupted(request):
    config = tiny_config(steps=5, **VARIANTS[request.param])
    return config, run(config)


@pytest.mark.parametrize("stop", [1, 2, 3, 5])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, uninterrupted, stop):
    config, whole = uninterrupted
    out = tmp_path / "run"
    first = Trainer(replace(config, out=str(out)))
    for _ in range(stop):  # and then the process is gone, without a word
        first.step()
    trainer = Trainer.resume(out)
    assert trainer.version == (stop if stop == 5 else 2 * (stop // 2))
    trainer.run(progress=False)
    assert rows(trainer.log) == rows(RunLog.read(out / "run.jsonl")) == rows(whole.log)
    assert equal(state(trainer), state(whole))
    assert trainer.config == replace(config, out=str(out))


def test_resume_twice(tmp_path):
    config = tiny_config(steps=5, checkpoint_every=1, out=str(tmp_path))
    Trainer(config).step()
    Trainer.resume(tmp_path).step()
    Trainer.resume(tmp_path).run(progress=False)
    assert rows(RunLog.read(tmp_path / "run.jsonl")) == rows(run(replace(config, out=None)).log)
    done = Trainer.resume(tmp_path)
    before = (tmp_path / "run.jsonl").read_bytes()
    done.run(progress=False)
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_a_run_that_is_told_where_to_stop_can_go_on_from_there(tmp_path):
    config = tiny_config(steps=2, checkpoint_every=100, out=str(tmp_path))
    Trainer(config).run(1, progress=False)
    trainer = Trainer.resume(tmp_path)
    assert trainer.version == 1
    trainer.run(3, progress=False)
    assert Trainer.resume(tmp_path).version == 3


def test_a_tied_checkpoint_trains_saves_and_resumes(tmp_path):
    """Input and output embedding are one tensor, as in many real models."""
    config = MixtralConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        MixtralForCausalLM(config).save_pretrained(tmp_path / "tied")
    sharp_moe()[1].save_pretrained(tmp_path / "tied")
    config = tiny_config(base=str(tmp_path / "tied"), steps=3, out=str(tmp_path / "run"))
    reward = lambda texts, *_: [text.count("7") for text in texts]  # noqa: E731
    whole = Trainer(replace(config, out=None), reward=reward)
    assert whole.model.lm_head.weight is whole.model.model.embed_tokens.weight
    whole.run(progress=False)
    Trainer(config, reward=reward).run(2, progress=False)
    trainer = Trainer.resume(tmp_path / "run", reward=reward)
    trainer.run(progress=False)
    assert rows(trainer.log) == rows(whole.log) and equal(state(trainer), state(whole))
    assert trainer.log.rows[-1]["grad_norm"] > 0


def test_a_torn_last_line_is_computed_again(tmp_path):
    config = tiny_config(steps=4, out=str(tmp_path))
    Trainer(config).run(3, progress=False)
    log = tmp_path / "run.jsonl"
    os.truncate(log, log.stat().st_size - 7)
    Trainer.resume(tmp_path).run(progress=False)
    assert rows(RunLog.read(log)) == rows(run(replace(config, out=None)).log)


def test_a_truncated_checkpoint_is_named_and_the_older_one_goes_on(tmp_path):
    config = tiny_config(steps=5, out=str(tmp_path))
    trainer = Trainer(config)
    for _ in range(4):
        trainer.step()
    newest = tmp_path / "checkpoint-000004.safetensors"
    os.truncate(newest, newest.stat().st_size // 2)
    with pytest.raises(ValueError, match="checkpoint-000004.*delete it.*checkpoint-000002"):
        Trainer.resume(tmp_path)
    newest.unlink()
    trainer = Trainer.resume(tmp_path)
    assert trainer.version == 2
    trainer.run(progress=False)
    assert rows(RunLog.read(tmp_path / "run.jsonl")) == rows(run(replace(config, out=None)).log)


def test_before_the_first_checkpoint_a_run_starts_anew_and_keeps_its_log(tmp_path):
    config = tiny_config(steps=3, checkpoint_every=100, out=str(tmp_path))
    trainer = Trainer(config)
    trainer.step()
    logged = RunLog.read(tmp_path / "run.jsonl").rows
    resumed = Trainer.resume(tmp_path)
    assert resumed.version == 0 and not list(tmp_path.glob("checkpoint*"))
    resumed.run(progress=False)
    assert RunLog.read(tmp_path / "run.jsonl").rows[:2] == logged
    assert rows(resumed.log) == rows(run(replace(config, out=None)).log)


def test_a_run_killed_before_its_first_row_starts_anew(tmp_path):
    config = tiny_config(steps=1, out=str(tmp_path))
    Trainer(config)
    lines = (tmp_path / "run.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "run.jsonl").write_bytes(lines[0])
    trainer = Trainer.resume(tmp_path)
    trainer.run(progress=False)
    assert rows(RunLog.read(tmp_path / "run.jsonl")) == rows(run(replace(config, out=None)).log)


def test_a_header_that_is_torn_is_told(tmp_path):
    Trainer(tiny_config(out=str(tmp_path)))
    os.truncate(tmp_path / "run.jsonl", 40)
    with pytest.raises(ValueError, match=r"run\.jsonl has no header.*delete"):
        Trainer.resume(tmp_path)


def test_an_empty_log_is_no_run(tmp_path):
    """What a full disk leaves of a run that could not even write its header."""
    (tmp_path / "run.jsonl").touch()
    assert len(Trainer(tiny_config(out=str(tmp_path))).log) == 1


def test_a_folder_that_holds_a_run_is_not_written_over(tmp_path):
    Trainer(tiny_config(out=str(tmp_path)))
    before = (tmp_path / "run.jsonl").read_bytes()
    with pytest.raises(ValueError, match=r"already holds a run.*Trainer\.resume"):
        Trainer(tiny_config(out=str(tmp_path)))
    assert (tmp_path / "run.jsonl").read_bytes() == before


def test_resuming_nothing_and_saving_nowhere(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run log there"):
        Trainer.resume(tmp_path)
    with pytest.raises(ValueError, match="config.out is None"):
        Trainer(tiny_config()).save()


def limited(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    return lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("what", ["checkpoint", "log"])
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_room(tmp_path, what):
    """A limit on the size of a file stands for the disk."""
    config = tiny_config(steps=4, out=str(tmp_path))
    trainer = Trainer(config)
    trainer.run(2 if what == "checkpoint" else 3, progress=False)
    log = tmp_path / "run.jsonl"
    restore = limited(200_000 if what == "checkpoint" else log.stat().st_size + 50)
    try:
        with pytest.raises(OSError, match="free some space and resume the run"):
            trainer.run(progress=False)
    finally:
        restore()
    steps = [row["step"] for row in RunLog.read(log)]
    assert steps == ([0, 1, 2, 3, 4] if what == "checkpoint" else [0, 1, 2, 3])
    assert not list(tmp_path.glob("*.tmp"))
    Trainer.resume(tmp_path).run(progress=False)
    assert rows(RunLog.read(log)) == rows(run(replace(config, out=None)).log)


def test_a_kill_at_any_moment_loses_no_finished_step(tmp_path):
    """SIGKILL from outside while it works; what it said was finished is in the log."""
    config = tiny_config(steps=60, checkpoint_every=3, out=str(tmp_path / "run"))
    code = (
        "import sys, torch\ntorch.set_num_threads(1)\n"
        "from stablerl_core.training import Trainer, TrainerConfig\n"
        "trainer = Trainer(TrainerConfig.from_json(sys.argv[1]))\n"
        "trainer.run(progress=False, on_step=lambda row: print(row['step'], flush=True))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, config.to_json()], stdout=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if int(line) == 5:
            break
    process.send_signal(signal.SIGKILL)
    said = [5, *map(int, process.stdout.read().split())]
    assert process.wait() == -9
    logged = [row["step"] for row in RunLog.read(tmp_path / "run" / "run.jsonl")]
    assert logged == list(range(len(logged))) and logged[-1] in (said[-1], said[-1] + 1)
    trainer = Trainer.resume(tmp_path / "run")
    trainer.run(logged[-1] + 2, progress=False)
    whole = Trainer(replace(config, out=None))
    whole.run(logged[-1] + 2, progress=False)
    assert rows(RunLog.read(tmp_path / "run" / "run.jsonl")) == rows(whole.log)
    assert equal(state(trainer), state(whole))


# --- bad input -------------------------------------------------------------------------------


def test_the_default_configuration_is_used_without_one(monkeypatch):
    monkeypatch.setattr(Trainer, "evaluate", lambda self, n=0: 0.0)
    assert Trainer().config == TrainerConfig()


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(base="mixtral"), "preset='mixtral' is neither a preset nor a checkpoint"),
        (
            dict(base="olmoe-cpu", data__task="countdown"),
            "task='countdown' has no warm start for base='olmoe-cpu'",
        ),
        (dict(data__verifier="kind"), "verifier='kind' is unknown"),
        (dict(system__device="gpu0"), "system.device='gpu0'"),
        (dict(system__device="cuda:99"), "system.device='cuda:99'"),
    ],
)
def test_names_are_checked_before_anything_is_written(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        Trainer(tiny_config(out=str(tmp_path / "run"), **change))
    assert not Path(tmp_path / "run").exists()
