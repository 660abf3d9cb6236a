"""Layer 3 in the loop: Muon, QK-Clip, the seed's norm cap, and their checkpoints."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from tiny import tiny_config

from stablerl_core.numerics import AttentionWatch, Muon, QKClip, fused_splits, uses_muon
from stablerl_core.training import NumericsConfig, Trainer, TrainerConfig, small_moe
from stablerl_core.training import trainer as trainer_module
from stablerl_core.training.checkpoint import load_checkpoint

VARIANTS = {
    "muon": dict(numerics__optimizer="muon", numerics__weight_decay=0.1),
    "muon_clip": dict(numerics__optimizer="muon_clip", numerics__qk_clip=2.0),
    "update_norm_cap": dict(numerics__optimizer="update_norm_cap"),
    "adamw with qk_clip": dict(numerics__qk_clip=2.0, policy__epochs=2),
}


def lengths(texts, *_):
    return [float(len(text)) for text in texts]


def spied_pieces(monkeypatch):
    """The parts of rollouts that are differentiated, as they come."""
    pieces, plain = [], trainer_module.completion_scores
    monkeypatch.setattr(
        trainer_module, "completion_scores", lambda m, p: pieces.append(p) or plain(m, p)
    )
    return pieces


def rows(log):
    return [repr({k: v for k, v in row.items() if k != "seconds"}) for row in log]


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def equal(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, variant):
    config = tiny_config(steps=4, **VARIANTS[variant])
    whole = Trainer(config)
    whole.run(progress=False)
    Trainer(replace(config, out=str(tmp_path))).run(2, progress=False)
    resumed = Trainer.resume(tmp_path)
    resumed.run(progress=False)
    assert equal(weights(whole), weights(resumed)) and rows(whole.log) == rows(resumed.log)
    a, b = whole._optimizer.state_dict(), resumed._optimizer.state_dict()
    assert a["state"].keys() == b["state"].keys() and a["param_groups"] == b["param_groups"]
    assert all(equal(a["state"][i], b["state"][i]) for i in a["state"])


def test_the_update_is_that_of_muon_with_every_matrix_on_its_own(monkeypatch):
    trainer = Trainer(tiny_config(**VARIANTS["muon"], probe_every=9))
    before, gradients = weights(trainer), {}
    plain = trainer._optimizer.step

    def spy():
        gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()})
        plain()

    monkeypatch.setattr(trainer._optimizer, "step", spy)
    rate = trainer.step()["learning_rate"]
    assert {g["lr"] for g in trainer._optimizer.param_groups} == {rate}
    twin = Trainer(tiny_config())
    named = dict(twin.model.named_parameters())
    assert equal(before, named)
    for name, p in named.items():
        p.grad = gradients[name]
    options = {"lr": rate, "weight_decay": 0.1, "splits": fused_splits(twin.model)}
    Muon(named.items(), **options).step()
    assert equal(weights(trainer), named)


def test_the_seeds_norm_cap_moves_each_matrix_by_at_most_the_learning_rate():
    trainer = Trainer(tiny_config(numerics__optimizer="update_norm_cap", numerics__warmup=0))
    before = weights(trainer)
    rate, moved = trainer.step()["learning_rate"], []
    for name, p in weights(trainer).items():
        if uses_muon(name, p.shape):
            step = (p - before[name]).reshape(-1, *p.shape[-2:])
            halves = step.chunk(2, 1) if "gate_up" in name else (step,)
            moved += [half.flatten(1).norm(dim=1) for half in halves]
    norms = torch.cat(moved) / rate
    # An expert with one token or none has a gradient of rank one or zero, which stays below.
    assert len(norms) == 2 * (4 + 8 * 3) and norms.max() < 1.01
    assert (norms > 0.99).float().mean() > 0.7


def test_a_checkpoint_names_each_state_after_its_parameter(tmp_path):
    trainer = Trainer(tiny_config(steps=2, out=str(tmp_path), **VARIANTS["muon"]))
    trainer.run(progress=False)
    tensors, _ = load_checkpoint(tmp_path)
    for name, p in trainer.model.named_parameters():
        field = "momentum_buffer" if uses_muon(name, p.shape) else "exp_avg"
        saved = tensors[f"optimizer.{name}.{field}"]
        assert torch.equal(saved, trainer._optimizer.state[p][field]) and saved.shape == p.shape


def test_muon_clip_clips_what_the_trained_forward_saw_and_tells():
    """The bound of 2 holds, up to the update itself, from the first step on."""
    options = VARIANTS["muon_clip"]
    each = {"steps": 6, "probe_every": 1}
    free = tiny_config(**each, numerics__optimizer="muon", numerics__qk_clip=1e9)
    bound = tiny_config(**each, **options)
    logs = [Trainer(c, reward=lambda *_: [1, 0] * 12).run(progress=False) for c in (free, bound)]
    (_, hot), (_, cool) = (log.series("attention_logit_max") for log in logs)
    assert hot[0] == cool[0] and max(cool[2:]) < 3 < 6 < min(hot)
    assert len(cool) == 6 and sum(logs[0].series("clipped_heads")[1]) == 0
    assert logs[1].series("clipped_heads")[1][0] > 0


def test_only_what_was_trained_on_counts(monkeypatch):
    """The rollout, the probes and the evaluation are not seen; completions, one by one, are."""
    trainer = Trainer(tiny_config(numerics__qk_clip=50.0, probe_every=1, data__eval_every=1))
    pieces = spied_pieces(monkeypatch)
    row = trainer.step()
    model, found = Trainer(tiny_config()).model, []
    watch = AttentionWatch(model)
    for piece in pieces:
        for i in range(len(piece.tokens)):
            ids = piece.prompt[i][piece.prompt_mask[i]], piece.tokens[i][piece.mask[i]][:-1]
            watch.reset()
            model(torch.cat(ids)[None], use_cache=False)
            found.append(max(float(m.max()) for m in watch.maxima.values()))
    assert row["attention_logit_max"] == pytest.approx(max(found), rel=1e-5)


def test_padding_does_not_count(monkeypatch):
    """What stands before a prompt, and behind the end of an answer, is left out by name."""
    trainer = Trainer(
        tiny_config(numerics__qk_clip=50.0, policy__temperature=2.0, data__max_new_tokens=14),
        reward=lengths,
    )
    pieces, masks = spied_pieces(monkeypatch), []
    plain = trainer._qk_clip.counting
    monkeypatch.setattr(trainer._qk_clip, "counting", lambda *m: masks.append(m) or plain(*m))
    trainer.step()
    assert len(pieces) == len(masks) > 1
    for piece, (prompts, completions) in zip(pieces, masks, strict=True):
        assert torch.equal(completions, piece.mask[:, 1:])
        assert prompts.sum() * len(piece.mask) >= piece.prompt_mask.sum() > 0
    assert not all(completions.all() for _, completions in masks)


def test_between_probes_a_bound_is_enough_and_clips_the_same():
    """The logged logit is one that was searched for; what is clipped does not depend on it."""
    often, seldom = (
        Trainer(tiny_config(steps=5, probe_every=n, **VARIANTS["muon_clip"]), reward=lengths)
        for n in (1, 3)
    )
    logs = [trainer.run(progress=False) for trainer in (often, seldom)]
    assert logs[0].series("attention_logit_max")[0] == [1, 2, 3, 4, 5]
    assert logs[1].series("attention_logit_max")[0] == [1, 3]
    assert logs[0].series("clipped_heads") == logs[1].series("clipped_heads")
    assert equal(weights(often), weights(seldom))


def test_without_an_option_nothing_is_watched():
    trainer = Trainer(tiny_config())
    row = trainer.step()
    assert trainer._qk_clip is None and type(trainer._optimizer) is torch.optim.AdamW
    assert "attention_logit_max" not in row and not trainer.model._forward_pre_hooks


def test_the_sampler_gets_the_clipped_weights(monkeypatch):
    """Clipping after the push would leave the sampler with other weights than the trainer."""
    trainer = Trainer(tiny_config(**VARIANTS["muon_clip"], system__sync_skip=("no such tensor",)))
    trainer.step()
    assert trainer.sampler is not trainer.model
    sampler = dict(trainer.sampler.named_parameters())
    assert equal(weights(trainer), sampler)


@pytest.mark.parametrize("mode", ["skip", "apply"])
def test_a_skipped_update_clips_nothing_and_leaves_the_momentum(monkeypatch, mode):
    trainer = Trainer(tiny_config(**VARIANTS["muon_clip"], numerics__nonfinite=mode))
    trainer.step()
    trainer._qk_clip.tau = 0.5
    state = [t.clone() for s in trainer._optimizer.state.values() for t in s.values()]
    before, plain = weights(trainer), trainer_module.UpdateLoss.of

    def of(*args):
        value, seen = plain(*args)
        return value * math.nan, seen

    monkeypatch.setattr(trainer_module.UpdateLoss, "of", of)
    row = trainer.step()
    assert row["nonfinite"] == 1 and ("clipped_heads" in row) == (mode == "apply")
    if mode == "skip":
        after = [t for s in trainer._optimizer.state.values() for t in s.values()]
        assert equal(weights(trainer), before) and not trainer._qk_clip.watch.maxima
        assert all(torch.equal(a, b) for a, b in zip(state, after, strict=True))


def test_an_update_without_a_gradient_has_no_logit():
    trainer = Trainer(tiny_config(**VARIANTS["muon_clip"]), reward=lambda *_: [1.0] * 24)
    row = trainer.step()
    assert "attention_logit_max" not in row and row["grad_norm"] == 0


def test_qk_norm_models_refuse_the_bound_and_take_muon(tmp_path):
    model, tokenizer = small_moe("qwen3-moe-cpu")
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    for options in (VARIANTS["muon_clip"], {"numerics__qk_clip": 100.0}):
        with pytest.raises(ValueError, match="QK-norm"):
            Trainer(tiny_config(base=str(tmp_path), **options))
    trainer = Trainer(tiny_config(base=str(tmp_path), **VARIANTS["muon"]), reward=lengths)
    assert trainer.step()["grad_norm"] > 0


def test_defaults_and_refusals():
    trainer = Trainer(tiny_config(numerics__optimizer="muon_clip"))
    assert isinstance(trainer._qk_clip, QKClip) and trainer._qk_clip.tau == 100
    with pytest.raises(ValueError, match="numerics.optimizer='sgd'"):
        NumericsConfig(optimizer="sgd")
    for tau in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"numerics.qk_clip={tau}"):
            NumericsConfig(qk_clip=tau)


def test_a_log_from_before_these_settings_is_read():
    text = TrainerConfig().to_json().replace('"optimizer": "adamw", ', "")
    text = text.replace('"qk_clip": null, ', "")
    assert "optimizer" not in text and "qk_clip" not in text
    assert TrainerConfig.from_json(text) == TrainerConfig()
