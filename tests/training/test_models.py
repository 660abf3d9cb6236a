"""Small models: four families and what distinguishes them, seeds, saved checkpoints, refusals."""

import os

import pytest
import torch
from tiny import FAMILIES, sharp_moe
from transformers import LlamaConfig, LlamaForCausalLM

from stablerl_core.training import PRESETS, routers, small_moe
from stablerl_core.training.rollout import cache_argument
from stablerl_core.training.tokenizer import character_tokenizer

IDS = torch.tensor([[54, 20, 30, 10, 32], [55, 21, 22, 23, 32]])


def routed(model, ids=IDS):
    """(logits, gate weights, expert indices) of every router during one forward pass."""
    seen = []
    hooks = [
        r.register_forward_hook(lambda *a: seen.append(a[-1])) for r in routers(model).values()
    ]
    with torch.no_grad():
        model(ids)
    for hook in hooks:
        hook.remove()
    return seen


def names(model):
    return [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_builds_runs_and_routes(family):
    model, tokenizer = small_moe(f"{family}-cpu")
    assert not model.training and model.config.vocab_size == len(tokenizer)
    assert type(model).__name__.lower().startswith(family.replace("-", "").replace("moe", ""))
    count = sum(p.numel() for p in model.parameters())
    assert 0.2e6 < count < 0.3e6  # "about 0.25 million"
    assert model.config.eos_token_id == tokenizer.eos_token_id
    with torch.no_grad():
        logits = model(IDS).logits
    assert logits.shape == (2, 5, 99) and logits.dtype == torch.float32
    assert torch.isfinite(logits).all() and logits.std() > 0.05


@pytest.mark.parametrize("family", FAMILIES)
def test_routers_return_logits_weights_and_indices(family):
    model, _ = sharp_moe(family)
    assert len(routers(model)) == model.config.num_hidden_layers == 2  # no dense layer
    for logits, weights, chosen in routed(model):
        assert logits.shape == (10, 8) and weights.shape == chosen.shape == (10, 2)
        assert not chosen.is_floating_point() and 0 <= chosen.min() and chosen.max() < 8
        assert (chosen[:, 0] != chosen[:, 1]).all()


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe", "olmoe"])
def test_softmax_gates(family):
    """Mixtral and Qwen3 renormalise over the chosen experts, OLMoE does not."""
    for logits, weights, chosen in routed(sharp_moe(family)[0]):
        # Mixtral returns logits, the others may return the probabilities themselves.
        p = logits if torch.allclose(logits.sum(-1), torch.ones(10)) else logits.softmax(-1)
        expected = p.gather(1, chosen)
        assert torch.equal(expected, p.topk(2).values)
        if family == "olmoe":
            assert (weights.sum(1) < 0.999).all()
        else:
            expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_deepseek_gates_are_sigmoids_and_the_bias_only_selects():
    model, _ = sharp_moe("deepseek-v3")
    for router in routers(model).values():
        router.e_score_correction_bias.zero_()
        router.e_score_correction_bias[5] = 10
    for logits, weights, chosen in routed(model):
        assert (chosen == 5).any(1).all()
        scores = logits.sigmoid()
        other = scores.clone()
        other[:, 5] = 2
        assert (chosen.sort(1).values == other.topk(2).indices.sort(1).values).all()
        expected = scores.gather(1, chosen)
        expected = expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-6)


def test_what_distinguishes_the_families():
    built = {family: small_moe(f"{family}-cpu")[0] for family in FAMILIES}
    with_qk_norm = {f for f, m in built.items() if any("q_norm" in n for n in names(m))}
    assert with_qk_norm == {"qwen3-moe", "olmoe"}
    attention = {f: m.model.layers[0].self_attn for f, m in built.items()}
    assert attention["qwen3-moe"].q_norm.weight.shape == (16,)  # a head
    assert attention["olmoe"].q_norm.weight.shape == (64,)  # the whole projection
    for family in ("mixtral", "qwen3-moe"):  # grouped queries: half as many key heads
        assert attention[family].k_proj.weight.shape == (32, 64)
    assert attention["olmoe"].k_proj.weight.shape == (64, 64)
    assert hasattr(attention["deepseek-v3"], "kv_a_proj_with_mqa")  # latent attention
    assert any("shared_experts" in n for n in names(built["deepseek-v3"]))
    biased = {
        f for f, m in built.items() if any("correction_bias" in n for n, _ in m.named_buffers())
    }
    assert biased == {"deepseek-v3"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gpu_scale_builds_on_the_meta_device(family):
    with torch.device("meta"):
        model, tokenizer = small_moe(f"{family}-gpu", device="meta")
    assert all(p.is_meta for p in model.parameters())
    count = sum(p.numel() for p in model.parameters())
    assert 90e6 < count < 130e6  # "about 107 million"
    assert len(routers(model)) == 8 and model.config.num_experts_per_tok == 4


def test_presets_are_families_times_scales():
    assert set(PRESETS) == {f"{f}-{s}" for f in FAMILIES for s in ("cpu", "gpu")}


def test_the_seed_decides_the_weights_and_no_global_stream_is_touched(monkeypatch):
    def refuse(seed):
        raise AssertionError("the accelerators' global streams were reseeded")

    for module in (torch.cuda, torch.mps, torch.xpu):
        for name in ("manual_seed", "manual_seed_all"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, refuse)
    before = torch.get_rng_state()
    first, again, other = (small_moe("mixtral-cpu", seed=s)[0].state_dict() for s in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    matrices = [name for name, tensor in first.items() if tensor.dim() > 1]
    assert all(torch.equal(first[n], again[n]) for n in first)
    assert not any(torch.equal(first[n], other[n]) for n in matrices)
    torch.default_generator.manual_seed(99)
    assert torch.equal(small_moe("mixtral-cpu", seed=3)[0].lm_head.weight, first["lm_head.weight"])


@pytest.mark.parametrize("family", FAMILIES)
def test_expert_implementations_agree(family):
    grouped, eager = (
        sharp_moe(family, experts_implementation=name)[0] for name in ("grouped_mm", "eager")
    )
    double = sharp_moe(family, experts_implementation="eager", dtype=torch.float64)[0]
    with torch.no_grad():
        a, b, c = grouped(IDS).logits, eager(IDS).logits, double(IDS).logits
    assert c.dtype == torch.float64 and c.std() > 1
    torch.testing.assert_close(a, b, rtol=0, atol=1e-4)
    torch.testing.assert_close(b.double(), c, rtol=0, atol=1e-4)


def test_dtype_is_that_asked_for():
    model, _ = small_moe("mixtral-cpu", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_checkpoint_loads_by_its_path(family, tmp_path):
    model, tokenizer = sharp_moe(family, seed=5)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    loaded, its_tokenizer = small_moe(str(tmp_path))
    assert type(loaded) is type(model) and not loaded.training
    ids = its_tokenizer("S31 4=\n", return_tensors="pt").input_ids
    assert ids.tolist() == [tokenizer("S31 4=\n").input_ids]
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=0, atol=1e-5)


def test_a_dense_checkpoint_is_refused(tmp_path):
    config = LlamaConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    character_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=f"preset='{tmp_path}'.*LlamaForCausalLM.*(experts|router)"
    ):
        small_moe(str(tmp_path))


@pytest.mark.parametrize(
    "fault", ["truncated weights", "no weights", "only a pickle", "no tokenizer"]
)
def test_a_damaged_checkpoint_is_named(fault, tmp_path):
    model, tokenizer = small_moe("mixtral-cpu")
    model.save_pretrained(tmp_path)
    if fault != "no tokenizer":
        tokenizer.save_pretrained(tmp_path)
    if fault == "truncated weights":
        os.truncate(tmp_path / "model.safetensors", 1000)
    if fault == "only a pickle":
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    if fault in ("no weights", "only a pickle"):
        (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=f"preset='{tmp_path}' does not load") as caught:
        small_moe(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["mixtral", "mixtral-tpu", "gpt-cpu", "", "./nowhere", "/no/where"]
)
def test_a_wrong_preset_names_the_right_ones(name):
    with pytest.raises(ValueError, match=f"preset='{name}'.*mixtral-cpu.*deepseek-v3-gpu"):
        small_moe(name)


def test_the_cache_argument_is_found_under_either_name():
    class Old:
        def forward(self, input_ids, past_key_values=None): ...

    class New:
        def forward(self, input_ids, cache=None): ...

    assert cache_argument(Old()) == "past_key_values"
    assert cache_argument(New()) == "cache"
    model, _ = small_moe("mixtral-cpu")
    assert cache_argument(model) in ("cache", "past_key_values")
