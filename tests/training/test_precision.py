"""Casts of the sampler's weights, activations and cache: bounded error, what is left alone."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny import FAMILIES, sharp_moe, tiny_config
from torch import nn
from transformers import DynamicCache

from stablerl_core.training import Trainer, completion_logp, routers, small_moe
from stablerl_core.training.config import ACTIVATIONS, PRECISIONS
from stablerl_core.training.precision import (
    cast_and_back,
    round_activations,
    round_weights,
    rounded_activations,
    rounded_cache,
)
from stablerl_core.training.rollout import cache_argument


def weights(seed=0, *shape, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    shape = shape or (16, 64)
    return (torch.randn(*shape, generator=g) * torch.rand(shape[-2], 1, generator=g)).to(dtype)


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_plain_casts_are_those_of_torch(name):
    w = weights()
    assert torch.equal(cast_and_back(w, name), w.to(getattr(torch, name)).float())
    assert torch.equal(cast_and_back(w, name), w) == (name == "float32")


def test_float8_scales_each_row_to_its_largest_value():
    w = weights()
    scale = w.abs().amax(-1, keepdim=True) / 448
    expected = (w / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(cast_and_back(w, "float8_e4m3"), expected)


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_float8_error_bound(seed, size):
    """Three mantissa bits: ≤ 2⁻⁴ relative, ≤ 2⁻¹⁰ · scale below the normal range."""
    w = weights(seed, 4, 32) * size
    rounded = cast_and_back(w, "float8_e4m3")
    scale = w.abs().amax(-1, keepdim=True) / 448
    assert torch.isfinite(rounded).all()
    assert ((rounded - w).abs() <= torch.maximum(w.abs() / 16, scale / 1024) * (1 + 1e-5)).all()


@given(st.integers(0, 1000), st.floats(1e-6, 1e6))
def test_int4_has_fifteen_levels_a_row_and_errs_by_half_a_step(seed, size):
    w = weights(seed, 4, 64) * size
    rounded = cast_and_back(w, "int4")
    step = w.abs().amax(-1, keepdim=True) / 7
    assert max(len(row.unique()) for row in rounded) <= 15
    levels = rounded / step
    torch.testing.assert_close(levels, levels.round(), rtol=0, atol=1e-5)
    assert ((rounded - w).abs() <= step / 2 * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["float8_e4m3", "int4"])
def test_the_largest_of_each_row_survives_and_expert_tensors_work(name):
    w = weights(1, 3, 8, 16)
    rounded = cast_and_back(w, name)
    torch.testing.assert_close(rounded.abs().amax(-1), w.abs().amax(-1), rtol=1e-6, atol=0)
    for expert, alone in zip(rounded, w, strict=True):
        assert torch.equal(expert, cast_and_back(alone, name))


@pytest.mark.parametrize("name", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_stays_and_zeros_stay_zero(name, dtype):
    w = weights(2, 4, 8, dtype=dtype)
    w[1] = 0
    rounded = cast_and_back(w, name)
    assert rounded.dtype == dtype and torch.isfinite(rounded).all()
    assert (rounded[1] == 0).all()


@pytest.mark.parametrize("name", PRECISIONS)
def test_rounding_what_is_rounded_changes_next_to_nothing(name):
    once = cast_and_back(weights(3), name)
    torch.testing.assert_close(cast_and_back(once, name), once, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("preset", ["mixtral-cpu", "deepseek-v3-cpu"])
def test_round_weights_casts_matrices_and_copies_vectors_and_buffers(preset):
    source, _ = small_moe(preset, seed=1)
    target, _ = small_moe(preset, seed=2)
    with torch.no_grad():
        for tensor in source.state_dict().values():
            tensor.add_(0.001 * torch.arange(tensor.numel()).view(tensor.shape) % 0.0137)
    before = {k: t.clone() for k, t in source.state_dict().items()}
    round_weights(source, target, "float8_e4m3")
    vectors = 0
    for name, tensor in target.state_dict().items():
        vectors += tensor.dim() < 2
        wanted = before[name] if tensor.dim() < 2 else cast_and_back(before[name], "float8_e4m3")
        assert torch.equal(tensor, wanted), name
        assert torch.equal(source.state_dict()[name], before[name]), name
    assert vectors >= 5
    assert all(p.requires_grad for p in target.parameters())


def test_skipped_tensors_keep_their_old_value():
    source, target = (
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
        nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    )
    old = copy.deepcopy(target.state_dict())
    with torch.no_grad():
        source[1].weight.fill_(3)
    round_weights(source, target, "float32", skip=("0.w", "1.bias"))
    new = target.state_dict()
    assert torch.equal(new["0.weight"], old["0.weight"])
    assert torch.equal(new["0.bias"], source[0].bias)
    assert torch.equal(new["1.weight"], source[1].weight)


# Blocks, and the error of each format

UNIT_ROUNDOFF = {  # 2^-(significant bits)
    **{"bfloat16": 2**-8, "float16": 2**-11, "float8_e4m3": 2**-4, "float8_e4m3_blocks": 2**-4}
}


@pytest.mark.parametrize("cast", [cast_and_back, round_activations])
@pytest.mark.parametrize("name", UNIT_ROUNDOFF)
def test_the_relative_error_is_the_unit_roundoff_and_is_reached(name, cast):
    """Largest over normal numbers: at most 2^-p, and nearly that much for some."""
    x = 1 + torch.rand(256, 256, generator=torch.Generator().manual_seed(0))
    x[:, ::128] = 2.0  # each row and block has the same scale
    error = ((cast(x, name) - x).abs() / x).max()
    assert 0.9 * UNIT_ROUNDOFF[name] < error <= UNIT_ROUNDOFF[name] * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(130, 300), (128, 128), (5, 7), (3, 129, 40)])
def test_weight_blocks_are_128_by_128(shape):
    w = weights(4, *shape) * torch.logspace(-2, 2, shape[-1])
    expected = torch.empty_like(w)
    for i in range(0, shape[-2], 128):
        for j in range(0, shape[-1], 128):
            for lead in range(len(w.view(-1, *shape[-2:]))):
                block = w.view(-1, *shape[-2:])[lead, i : i + 128, j : j + 128]
                scale = block.abs().max() / 448
                rounded = (block / scale).to(torch.float8_e4m3fn).float() * scale
                expected.view(-1, *shape[-2:])[lead, i : i + 128, j : j + 128] = rounded
    assert torch.equal(cast_and_back(w, "float8_e4m3_blocks"), expected)


def test_activation_blocks_are_1_by_128():
    x = weights(5, 2, 3, 300) * torch.logspace(-2, 2, 300)
    expected = torch.empty_like(x)
    for row in range(2):
        for token in range(3):
            for j in range(0, 300, 128):
                block = x[row, token, j : j + 128]
                scale = block.abs().max() / 448
                rounded = (block / scale).to(torch.float8_e4m3fn).float() * scale
                expected[row, token, j : j + 128] = rounded
    assert torch.equal(round_activations(x, "float8_e4m3_blocks"), expected)


def test_an_outlier_spoils_its_own_block_only():
    x = torch.rand(1, 256, generator=torch.Generator().manual_seed(6))
    x[0, 0] = 1e6
    rounded = {name: round_activations(x, name) for name in ("float8_e4m3", "float8_e4m3_blocks")}
    assert (rounded["float8_e4m3"][0, 1:] == 0).all()
    blocks = rounded["float8_e4m3_blocks"][0]
    assert (blocks[1:128] == 0).all()
    assert ((blocks[128:] - x[0, 128:]).abs() <= x[0, 128:] / 16 + 1e-3).all()


def test_float16_overflows_as_a_cast_does():
    assert torch.isinf(round_activations(torch.tensor([[1e5]]), "float16")).all()


# Activations


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_a_linear_layer_multiplies_rounded_inputs(name):
    model, x = nn.Sequential(nn.Linear(200, 8)), weights(7, 4, 200)
    with rounded_activations(model, name), torch.no_grad():
        actual = model(x)
    with torch.no_grad():
        expected = nn.functional.linear(round_activations(x, name), *model[0].parameters())
    if "16" in name:  # a 16-bit engine stores the product in 16 bits
        expected = round_activations(expected, name)
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3", "float8_e4m3_blocks"])
def test_fused_experts_round_before_both_products(name):
    """Mixtral's experts by hand: linear(silu(gate) · up) with what enters and leaves rounded."""
    model, _ = sharp_moe(experts_implementation="eager")
    experts = model.model.layers[0].mlp.experts
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(8))
    ids = torch.randint(0, 8, (40, 1), generator=torch.Generator().manual_seed(9))
    out = (lambda y: round_activations(y, name)) if "16" in name else (lambda y: y)
    expected = torch.empty_like(x)
    with torch.no_grad():
        for e in ids.unique().tolist():
            chosen = (ids == e)[:, 0]
            rounded = round_activations(x[chosen], name)
            gate, up = out(rounded @ experts.gate_up_proj[e].T).chunk(2, -1)
            inner = round_activations(nn.functional.silu(gate) * up, name)
            expected[chosen] = out(inner @ experts.down_proj[e].T)
        with rounded_activations(model, name):
            eager = experts(x, ids, torch.ones(40, 1))
            model.set_experts_implementation("grouped_mm")
            grouped = experts(x, ids, torch.ones(40, 1))
        plain = experts(x, ids, torch.ones(40, 1))
    for actual in (eager, grouped):
        # Another order of summation moves a few values over a rounding boundary.
        far = (actual - expected).abs() > 1e-5 * expected.abs().max()
        assert far.float().mean() < 0.02
        assert (actual - expected).norm() < 0.1 * (plain - expected).norm()


def test_experts_that_cannot_be_rounded_are_refused():
    model, _ = small_moe(experts_implementation="batched_mm")
    with pytest.raises(ValueError, match="MixtralExperts has no product"):
        with rounded_activations(model, "bfloat16"), torch.no_grad():
            model(torch.tensor([[5, 6, 7]]))


@pytest.mark.parametrize("family", FAMILIES)
def test_blocks_spare_head_embeddings_and_routers(family):
    """As FP8-RL does (2601.18150): W8A8 for the linear layers and experts inside the model."""
    model, _ = sharp_moe(family)
    rounded = copy.deepcopy(model)
    round_weights(model, rounded, "float8_e4m3_blocks")
    gates = routers(model)
    spared = {f"{name}.weight" for name in (*gates, "lm_head", "model.embed_tokens")}
    for (name, old), new in zip(model.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(old, new) == (old.dim() < 2 or name in spared), name
    x = weights(10, 6, 64)
    gate = next(iter(gates.values()))
    with torch.no_grad():
        head, scores = model.lm_head(x), gate(x)[0]
        for name, same in (("float8_e4m3_blocks", True), ("float8_e4m3", False)):
            with rounded_activations(model, name):
                assert torch.equal(model.lm_head(x), head) == same
                assert torch.equal(gate(x)[0], scores) == same


def hooks(model) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "float32"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_rounded_is_whole_again(family, name):
    """Weights and other models untouched; hooks gone, also after an error inside."""
    model, _ = sharp_moe(family)
    other, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    ids = torch.tensor([[40, 41, 42, 50, 60]])
    with torch.no_grad():
        plain = model(ids).logits
        for rounding in (rounded_activations, rounded_cache):
            with rounding(model, name):
                assert not torch.equal(model(ids, use_cache=True).logits, plain)
                assert torch.equal(other(ids, use_cache=True).logits, plain)
            with pytest.raises(IndexError), rounding(model, name):
                model(torch.tensor([[10_000]]), use_cache=True)
            assert hooks(model) == 0 and torch.equal(model(ids, use_cache=True).logits, plain)
    assert all(torch.equal(t, before[k]) for k, t in model.state_dict().items())


def test_an_error_inside_a_product_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(RuntimeError), rounded_activations(model, "bfloat16"):
        model(torch.zeros(2, 5))
    x = weights(11, 2, 4)
    assert torch.equal(nn.functional.linear(x, torch.eye(4)), x)  # no mode is left on


@pytest.mark.parametrize("rounding", [rounded_activations, rounded_cache])
def test_unknown_precisions_are_named(rounding):
    model, _ = small_moe()
    for name in ("int4", "float7"):
        with pytest.raises(ValueError, match=f"precision='{name}'"), rounding(model, name):
            pass
    with rounding(model, "float32"):
        assert hooks(model) == 0


def test_a_model_without_attention_has_no_cache_to_round():
    with pytest.raises(ValueError, match="no attention layer"):
        with rounded_cache(nn.Linear(2, 2), "bfloat16"):
            pass


# The cache


@pytest.mark.parametrize("name", ["bfloat16", "float16", "float8_e4m3"])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_keys_and_values_are_rounded_once_as_they_enter(family, name):
    model, _ = sharp_moe(family)
    ids = torch.randint(3, 99, (2, 6), generator=torch.Generator().manual_seed(12))
    plain, rounded, fed = (DynamicCache(config=model.config) for _ in range(3))
    key = cache_argument(model)
    model(ids, use_cache=True, **{key: plain})
    with rounded_cache(model, name):
        model(ids, use_cache=True, **{key: rounded})
        for t in range(6):
            model(ids[:, t : t + 1], use_cache=True, **{key: fed})
    for what in ("keys", "values"):
        first = round_activations(getattr(plain.layers[0], what), name)
        assert torch.equal(getattr(rounded.layers[0], what), first)
        for layer, token_by_token in zip(rounded.layers, fed.layers, strict=True):
            kept, stepwise = getattr(layer, what), getattr(token_by_token, what)
            torch.testing.assert_close(round_activations(kept, name), kept, rtol=1e-6, atol=0)
            assert ((kept - stepwise).abs() > 1e-4 * kept.abs().max()).float().mean() < 0.05


@torch.no_grad()
def test_attention_reads_the_rounded_keys_of_the_tokens_just_fed():
    """What is returned from the cache is what stays in it: a prompt is not scored in float32."""
    model, _ = sharp_moe()
    ids = torch.tensor([[40, 41, 42, 50, 60, 33]])
    key = cache_argument(model)
    with rounded_cache(model, "float8_e4m3"):
        together = model(ids, use_cache=True).logits[:, -1]
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], use_cache=True, **{key: cache})
    after = model(ids[:, -1:], use_cache=True, **{key: cache}).logits[:, -1]
    with rounded_cache(model, "float8_e4m3"):
        model(ids[:, :-1], use_cache=True, **{key: (again := DynamicCache(config=model.config))})
        inside = model(ids[:, -1:], use_cache=True, **{key: again}).logits[:, -1]
    torch.testing.assert_close(together, inside, rtol=0, atol=1e-3)
    assert (after - inside).abs().max() > 1e-2  # the last token's own key was not rounded


# In the loop


@pytest.mark.parametrize("setting", ["sampler_activations", "sampler_cache"])
@pytest.mark.parametrize("partial", [0, 5])
def test_the_gap_of_a_rounding_sampler_is_in_the_log(setting, partial):
    gaps = {}
    for name in ("float32", "float16", "bfloat16", "float8_e4m3_blocks"):
        options = {f"system__{setting}": name, "system__partial_tokens": partial}
        trainer = Trainer(tiny_config(probe_every=9, **options))
        gaps[name] = trainer.step()["logp_gap"]
        assert trainer.sampler is trainer.model and hooks(trainer.model) == 0
    assert gaps["float32"] < 2e-6 < 5e-5 < gaps["float16"] < gaps["bfloat16"] / 2
    assert gaps["bfloat16"] < gaps["float8_e4m3_blocks"] / 4 < 0.1


def test_only_sampling_for_training_is_rounded(monkeypatch):
    """The sampler's log-probabilities are those under rounding; evaluation and scoring are not."""
    options = {f"system__sampler_{name}": "bfloat16" for name in ("activations", "cache")}
    options["policy__minibatches"] = 2  # then the log has the gap of all rows
    trainer = Trainer(tiny_config(**options))
    seen, sample = [], trainer._sample

    def spy(model, problems, n, purpose, *args, **kwargs):
        seen.append((purpose, hooks(model) > 0))
        return sample(model, problems, n, purpose, *args, **kwargs)

    monkeypatch.setattr(trainer, "_sample", spy)
    model, (batch, _, _) = copy.deepcopy(trainer.model), trainer._collect(1)
    trainer.evaluate(1)
    assert seen == [(0, True), (1, False)]
    with torch.no_grad():
        plain = completion_logp(model, batch)
        with rounded_activations(model, "bfloat16"), rounded_cache(model, "bfloat16"):
            rounded = completion_logp(model, batch)
    gap = [(lp - batch.sampler_logp)[batch.mask].abs().mean() for lp in (plain, rounded)]
    assert gap[1] < gap[0] / 10 and 1e-3 < gap[0] < 1e-2
    assert Trainer(tiny_config(**options)).step()["logp_gap"] == pytest.approx(float(gap[0]), 1e-3)


@pytest.mark.parametrize("setting", ["sampler_activations", "sampler_cache"])
def test_precisions_without_activations_are_refused_by_the_configuration(setting):
    with pytest.raises(ValueError, match=f"system.{setting}='int4'"):
        tiny_config(**{f"system__{setting}": "int4"})
