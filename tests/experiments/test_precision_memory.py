"""Chapter 34's runs: formats are what they are named after, and compression reaches the step."""

from dataclasses import replace

import pytest
import torch

from stablerl_core.experiments import precision_memory as pm
from stablerl_core.numerics import number_format, training_bytes
from stablerl_core.training import DataConfig, NumericsConfig, Trainer, TrainerConfig, load_base

DATA = DataConfig(prompts=4, group_size=4, eval_prompts=8)
NUMERICS = NumericsConfig(learning_rate=5e-4, warmup=0)
CONFIG = TrainerConfig(steps=2, data=DATA, numerics=NUMERICS, seed=3)


def weights(trainer):
    return [p.detach().float().clone() for p in trainer.model.parameters()]


def stepped(trainer, steps=2):
    trainer.run(steps, progress=False)
    return trainer


@pytest.fixture(scope="module")
def plain():
    return stepped(Trainer(CONFIG))


def test_float32_is_the_ordinary_trainer(plain):
    trainer = stepped(pm.FormatTrainer(CONFIG, pm.Format()))
    for a, b in zip(weights(trainer), weights(plain), strict=True):
        torch.testing.assert_close(a, b)


def test_the_weight_of_the_loss_changes_nothing_in_float32(plain):
    light = pm.FormatTrainer(CONFIG, pm.Format(weight=2.0**-12))
    for a, b in zip(weights(stepped(light)), weights(plain), strict=True):
        torch.testing.assert_close(a, b)
    scaled = pm.FormatTrainer(CONFIG, pm.Format(weight=2.0**-12, scaler=True))
    for a, b in zip(weights(stepped(scaled)), weights(plain), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", ["bfloat16", "bfloat16_master", "float16_tiny", "float16_scaled"])
def test_sixteen_bits_are_sixteen_bits_and_masters_are_not(name):
    form = pm.FORMATS[name]
    trainer = stepped(pm.FormatTrainer(CONFIG, form))
    assert {p.dtype for p in trainer.model.parameters()} == {form.dtype}
    assert trainer.sampler is trainer.model
    stepped_on = trainer._optimizer.param_groups[0]["params"]
    assert {p.dtype for p in stepped_on} == {torch.float32 if form.master else form.dtype}
    if form.master:
        for p, copy in zip(trainer.model.parameters(), stepped_on, strict=True):
            assert torch.equal(p, copy.to(form.dtype))
    assert 0 < trainer.lost < 1
    n = sum(p.numel() for p in trainer.model.parameters())
    bits = 32 if form.master else 16
    formula = training_bytes(n, weights=form.dtype, master=form.master, state_bits=bits)
    held = trainer.held()
    assert (held.weights, held.master, held.states) == (
        formula.weights,
        formula.master,
        formula.states,
    )


def test_a_light_loss_leaves_zeros_in_float16_that_scaling_takes_away():
    zeros = {
        name: stepped(pm.FormatTrainer(CONFIG, pm.FORMATS[name]), 1).zeros
        for name in ("float32", "float16_tiny", "float16_scaled")
    }
    assert zeros["float16_tiny"] > 0.5 > zeros["float16_scaled"]
    assert zeros["float16_scaled"] < zeros["float32"] + 0.05


@pytest.mark.parametrize("name", ["float8", "float8_master"])
def test_eight_bits_are_what_the_model_computes_with(name):
    trainer = stepped(pm.FormatTrainer(CONFIG, pm.FORMATS[name]))
    step = number_format(torch.float8_e4m3fn)
    for p in trainer.model.parameters():
        if p.dim() > 1:
            largest = p.abs().amax(-1, keepdim=True).clamp(min=1e-12)  # padding's row is 0
            units = p / largest * step.largest
            held = units.to(torch.float8_e4m3fn).float()
            torch.testing.assert_close(units, held, rtol=1e-5, atol=0)
    if name == "float8_master":
        apart = zip(trainer.model.parameters(), trainer.masters.copies, strict=True)
        assert any((p - copy).abs().max() > 1e-3 for p, copy in apart)


def test_without_a_codec_nothing_changes(plain):
    trainer = stepped(pm.CompressedTrainer(CONFIG, None, False))
    assert trainer.ratio == 1 and trainer.kept == pytest.approx(1)
    for a, b in zip(weights(trainer), weights(plain), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    "codec, least, most", [("4 bits", 7.4, 7.6), ("rank 4", 7, 11), ("top 1/256", 100, 128)]
)
def test_what_is_sent_is_what_the_optimizer_sees(plain, codec, least, most):
    trainer = stepped(pm.CompressedTrainer(CONFIG, codec, True), 1)
    assert least < trainer.ratio < most
    assert 0.1 < trainer.kept < 0.9999
    name, p = next((n, p) for n, p in trainer.model.named_parameters() if "down_proj" in n)
    if codec == "top 1/256":
        assert int((p.grad != 0).sum()) <= p.numel() / 256
    if codec == "rank 4":
        assert torch.linalg.matrix_rank(p.grad[0], rtol=1e-5) <= 4


def test_rows_hold_the_columns_that_are_read(monkeypatch):
    monkeypatch.setattr(pm, "EVERY", 1)
    config = replace(CONFIG, data=replace(DATA, eval_every=1))
    rows = pm.train(pm.CompressedTrainer(config, "4 bits", False), ("kept", "ratio"))
    assert [row["step"] for row in rows] == [0, 1, 2]
    for row in rows[1:]:
        assert {"heldout_accuracy", "kl_ref", "reward", "nonfinite", "kept", "ratio"} <= set(row)


def test_errors_of_a_format_on_one_rollout():
    model, tokenizer = load_base("mixtral-cpu-sort")
    batch, advantages = pm.problem_batch(model, tokenizer, 0)
    assert advantages.view(-1, 8).sum(1).abs().max() < 1e-5 and advantages.abs().max() > 0.1
    exact = pm.gradient(model, batch, advantages, 1.0)
    again = pm.compared(pm.gradient(model, batch, advantages, 2.0**-20), exact)
    assert again["cosine"] == pytest.approx(1) and again["error"] < 1e-5 and again["zeros"] < 1e-3
    half = pm.held_in(model, "float16")
    tiny = pm.compared(pm.gradient(half, batch, advantages, 2.0**-20), exact)
    assert tiny["zeros"] > 0.9 and tiny["cosine"] < 0.5
    head = pm.held_in(model, "bfloat16_head")
    assert head.lm_head.weight.dtype == torch.float32 != head.model.norm.weight.dtype


def test_small_steps_are_swallowed_and_large_ones_less():
    shares = {}
    for name in ("float32", "bfloat16", "float8"):
        w, u = torch.linspace(0.01, 0.1, 50)[None], torch.full((1, 50), 1e-5)
        shares[name] = [pm.of_one(w, size * u, name) for size in (1, 100)]
    assert shares["float32"] == [0, 0]
    assert shares["bfloat16"][0] > 0.9 and shares["bfloat16"][1] == 0
    assert shares["float8"][0] > 0.9 and shares["float8"][0] >= shares["float8"][1] > 0.3


def test_checkpointing_is_measured_on_one_and_the_same_gradient(monkeypatch):
    monkeypatch.setattr(pm, "DEPTHS", (1, 2))
    rows = pm.checkpointing(0, 256)
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["apart"] == 0 and row["saved_less"] < row["saved"] < row["copied"]
        assert 1.2 < row["flops_less"] / row["flops"] < 4 / 3
    assert rows[1]["adam"] > 1.5 * rows[0]["adam"]
