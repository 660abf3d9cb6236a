"""QK-Clip: what it sees, its promise on the same batch, what it leaves alone and refuses."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Phi3Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.mixtral import modeling_mixtral as mixtral

from stablerl_core.numerics import (
    AttentionWatch,
    QKClip,
    add_qk_norm,
    attention_scores,
    clamp_attention_scores,
    max_attention_logits,
    soft_cap_scores,
)

HEADS, D = 4, 8
SIZE = dict(
    vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS,
    num_key_value_heads=2, intermediate_size=24, max_position_embeddings=64, pad_token_id=0,
    bos_token_id=None, eos_token_id=1,
)  # fmt: skip
MOE = dict(num_experts_per_tok=2, moe_intermediate_size=16)
MLA = dict(
    n_routed_experts=4, n_group=1, topk_group=1, q_lora_rank=12, kv_lora_rank=10,
    qk_nope_head_dim=D, qk_rope_head_dim=4, v_head_dim=6, first_k_dense_replace=0,
)  # fmt: skip
WHOLE = SIZE | {"num_key_value_heads": HEADS}
CONFIGS = {
    "mha": lambda **o: MixtralConfig(**(WHOLE | o), num_local_experts=4, head_dim=D),
    "gqa": lambda **o: MixtralConfig(**(SIZE | o), num_local_experts=4, head_dim=D),
    "gqa with biases": lambda **o: Qwen2MoeConfig(**(SIZE | MOE | o), num_experts=4),
    "gqa, fused": lambda **o: Phi3Config(**(SIZE | o)),
    "mla": lambda **o: DeepseekV3Config(**(WHOLE | MOE | MLA | o)),
    "mla, one query matrix": lambda **o: DeepseekV3Config(
        **(WHOLE | MOE | MLA | {"q_lora_rank": None} | o)
    ),
}
KINDS = tuple(CONFIGS)


@torch.no_grad()
def model_of(kind, layers=1, implementation="sdpa", dtype=torch.float64, seed=0):
    """A model with weights so large that attention looks at something."""
    config = CONFIGS[kind](num_hidden_layers=layers)
    config._experts_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation)
        for name, p in model.named_parameters():
            if name.endswith("bias"):
                p.copy_(torch.randn(p.shape))
            elif p.dim() > 1:
                p.mul_(12)
    return model.to(dtype).eval()


def tokens(rows=3, columns=9, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 50, (rows, columns), generator=generator)


PADDINGS = {
    "none": torch.ones(3, 9, dtype=torch.long),
    "left": torch.arange(9) >= torch.tensor([[0], [4], [6]]),
    "right": torch.arange(9) < torch.tensor([[9], [3], [5]]),
}


def forward(model, padding="none", seed=0):
    return model(tokens(seed=seed), attention_mask=PADDINGS[padding].long(), use_cache=False)


def projected(attention, hidden, embeddings):
    """Queries and keys (B, H or Hk, T, d) by the letter of the model's own weights."""
    shape = (*hidden.shape[:2], -1)

    def heads(x, d):
        return x.view(*shape, d).transpose(1, 2)

    if hasattr(attention, "kv_b_proj"):
        if attention.q_lora_rank is None:
            q = attention.q_proj(hidden)
        else:
            q = attention.q_b_proj(attention.q_a_layernorm(attention.q_a_proj(hidden)))
        q_c, q_r = heads(q, D + 4).split([D, 4], -1)
        latent, k_r = attention.kv_a_proj_with_mqa(hidden).split([10, 4], -1)
        k_c = heads(attention.kv_b_proj(attention.kv_a_layernorm(latent)), D + 6)[..., :D]
        q_r, k_r = deepseek.apply_rotary_pos_emb_interleave(q_r, heads(k_r, 4), *embeddings)
        return torch.cat([q_c, q_r], -1), torch.cat([k_c, k_r.expand(-1, HEADS, -1, -1)], -1)
    if hasattr(attention, "qkv_proj"):
        q, k, _ = attention.qkv_proj(hidden).split([32, 16, 16], -1)
    else:
        q, k = attention.q_proj(hidden), attention.k_proj(hidden)
    return mixtral.apply_rotary_pos_emb(heads(q, D), heads(k, D), *embeddings)


def expected_maxima(model, padding="none", seed=0):
    """The largest logit of each head and layer, pair of tokens by pair of tokens."""
    caught = {}

    def catch(name):
        return lambda m, args, kwargs: caught.update({name: (m, kwargs)})

    handles = [
        m.register_forward_pre_hook(catch(n), with_kwargs=True)
        for n, m in model.named_modules()
        if n.endswith("self_attn")
    ]
    real, found = PADDINGS[padding].bool(), {}
    with torch.no_grad():
        forward(model, padding, seed)
        for handle in handles:
            handle.remove()
        for name, (m, given) in caught.items():
            q, k = projected(m, given["hidden_states"], given["position_embeddings"])
            k = k.repeat_interleave(HEADS // k.shape[1], 1)
            found[name] = torch.tensor(
                [
                    max(
                        float(q[b, h, i] @ k[b, h, j]) * m.scaling
                        for b in range(3)
                        for i in range(9)
                        for j in range(i + 1)
                        if real[b, i] and real[b, j]
                    )
                    for h in range(HEADS)
                ],
                dtype=torch.float64,
            )
    return found


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


# --- what it sees --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_it_sees_the_largest_logit_of_each_head(kind, padding):
    model = model_of(kind, layers=2)
    expected = expected_maxima(model, padding)
    watch = AttentionWatch(model)
    forward(model, padding)
    assert list(watch.maxima) == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    for name, maxima in expected.items():
        torch.testing.assert_close(watch.maxima[name], maxima, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mla"])
@pytest.mark.parametrize("padding", PADDINGS)
def test_eager_attention_is_seen_too(kind, padding):
    model = model_of(kind, layers=2, implementation="eager", dtype=torch.float32)
    expected = expected_maxima(model, padding)
    watch = AttentionWatch(model)
    forward(model, padding)
    for name, maxima in expected.items():
        torch.testing.assert_close(watch.maxima[name].double(), maxima, rtol=1e-5, atol=0)


def brute_force(query, key, allowed, scale):
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.mT * scale).masked_fill(~allowed, -math.inf)
    return scores.amax((0, 2, 3))


@given(
    b=st.integers(1, 3),
    groups=st.integers(1, 2),
    keys=st.integers(1, 2),
    q=st.integers(1, 6),
    more=st.integers(0, 3),
    causal=st.booleans(),
    mask=st.sampled_from([None, "bool", "float"]),
    counting=st.booleans(),
    chunk=st.sampled_from([1, 7, 2**20]),
    seed=st.integers(0, 99),
)
def test_the_largest_logit_in_pieces(b, groups, keys, q, more, causal, mask, counting, chunk, seed):
    g = torch.Generator().manual_seed(seed)
    s = q if causal else q + more
    query = torch.randn(b, groups * keys, q, 4, generator=g, dtype=torch.float64)
    key = torch.randn(b, keys, s, 4, generator=g, dtype=torch.float64)
    allowed = torch.ones(q, s, dtype=torch.bool).tril(0 if causal else s).expand(b, 1, q, s)
    visible = counted = None
    if mask:
        own = torch.eye(q, s).roll(s - q, 1).bool()
        visible = (torch.rand(b, 1, q, s, generator=g) < 0.6) | own
        allowed = allowed & visible
        if mask == "float":
            hidden = torch.full(visible.shape, torch.finfo(torch.float64).min, dtype=torch.float64)
            visible = hidden.masked_fill(visible, 0.5)
    if counting:
        counted = torch.rand(b, q, generator=g) < 0.7
        allowed = allowed & counted[:, None, :, None]
    found = max_attention_logits(
        query, key, visible, scale=0.3, causal=causal, counted=counted, chunk=chunk
    )
    torch.testing.assert_close(found, brute_force(query, key, allowed, 0.3), rtol=1e-12, atol=0)


def test_the_scores_never_exist_all_at_once(monkeypatch):
    sizes = []

    class Sizes(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                sizes.append(out.numel())
            return out

    query, key = torch.randn(2, 4, 128, 4), torch.randn(2, 2, 128, 4)
    with Sizes():
        small = max_attention_logits(query, key, causal=True, chunk=16_384)
    assert max(sizes) <= 16_384 < 2 * 4 * 128 * 128
    torch.testing.assert_close(small, max_attention_logits(query, key, causal=True))


def test_a_cache_with_room_behind_what_is_in_it():
    """Two new tokens in a static cache for eight, of which five keys are filled."""
    query, key = torch.randn(1, 1, 2, 4), torch.randn(1, 1, 8, 4)
    visible = torch.arange(8) <= torch.tensor([[3], [4]])
    found = max_attention_logits(query, key, visible[None, None])
    torch.testing.assert_close(found, brute_force(query, key, visible, 0.5))


def test_half_precision_logits_beyond_65504_are_numbers():
    q = torch.full((1, 1, 1, 4), 200.0, dtype=torch.float16)
    assert max_attention_logits(q, q).item() == pytest.approx(200.0**2 * 4 / 2)


def test_nothing_to_see_is_minus_infinity_and_nan_is_nan():
    q = torch.randn(1, 2, 3, 4)
    none = torch.zeros(1, 1, 3, 3, dtype=torch.bool)
    assert max_attention_logits(q, q, none).tolist() == [-math.inf] * 2
    q[0, 1, 2, 0] = math.nan
    found = max_attention_logits(q, q)
    assert torch.isfinite(found[0]) and torch.isnan(found[1])


@pytest.mark.parametrize("kind", KINDS)
def test_watching_changes_no_bit_of_forward_and_backward(kind):
    plain, watched = model_of(kind, layers=2), model_of(kind, layers=2)
    QKClip(watched, tau=1.0)
    outputs = [forward(model, "left").logits for model in (plain, watched)]
    assert torch.equal(*outputs)
    for out in outputs:
        out.square().sum().backward()
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_the_maximum_is_over_all_forwards_that_train_since_the_last_step():
    model = model_of("gqa", layers=2)
    each = [expected_maxima(model, seed=seed) for seed in (0, 1, 2)]
    clip = QKClip(model, tau=1e6, exact=True)
    with torch.no_grad():
        forward(model, seed=0)  # a rollout
    assert not clip.watch.maxima
    forward(model, seed=1)
    forward(model, seed=2)
    report = clip.step()
    for name in each[0]:
        expected = torch.maximum(each[1][name], each[2][name])
        torch.testing.assert_close(report.max_logits[name], expected, rtol=1e-10, atol=0)
    assert report.max_logit == max(float(m.max()) for m in report.max_logits.values())
    forward(model, seed=1)
    for name, maxima in clip.step().max_logits.items():
        torch.testing.assert_close(maxima, each[1][name], rtol=1e-10, atol=0)
    forward(model, seed=2)
    clip.reset()
    assert clip.step().max_logit == -math.inf


def test_counting_says_which_queries_of_which_forward():
    """Completions padded on the right without an attention mask, as in this package's loop."""
    model = model_of("gqa")
    expected = {p: expected_maxima(model, p)["model.layers.0.self_attn"] for p in PADDINGS}
    clip = QKClip(model, tau=1e6, exact=True)
    (name,) = clip.watch.layers
    with clip.counting(PADDINGS["right"], PADDINGS["none"].bool()):
        with torch.no_grad():  # inside, also a forward without a gradient counts
            model(tokens(), use_cache=False)
        torch.testing.assert_close(clip.watch.maxima[name], expected["right"], rtol=1e-10, atol=0)
        model(tokens(), use_cache=False)
    torch.testing.assert_close(clip.watch.maxima[name], expected["none"], rtol=1e-10, atol=0)
    model(tokens(seed=5), use_cache=False)  # outside nothing counts any more …
    torch.testing.assert_close(clip.watch.maxima[name], expected["none"], rtol=1e-10, atol=0)
    clip.step()
    model(tokens(seed=5), use_cache=False)  # … until the next step
    assert name in clip.watch.maxima
    with clip.counting():  # without masks everything counts
        model(tokens(seed=6), use_cache=False)
    assert (expected["right"] < expected["none"]).any()


def test_counting_refuses_masks_that_do_not_fit():
    model = model_of("gqa")
    clip, modes = QKClip(model, exact=True), torch._C._len_torch_function_stack()
    with clip.counting(PADDINGS["right"][:, 1:]), pytest.raises(ValueError, match=r"\(3, 8\)"):
        model(tokens(), use_cache=False)
    with clip.counting(PADDINGS["right"]):
        model(tokens(), use_cache=False)
        with pytest.raises(ValueError, match="fewer entries than the model had forwards"):
            model(tokens(), use_cache=False)
    # After an error the model still runs, and nothing goes on listening.
    model(tokens(), use_cache=False)
    assert torch._C._len_torch_function_stack() == modes


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("explicit", [True, False])
def test_gradient_checkpointing_is_seen(reentrant, explicit):
    model = model_of("gqa", layers=2).train()
    expected = expected_maxima(model, "right")
    enable = getattr(model, "activation_checkpointing_enable", None)
    (enable or model.gradient_checkpointing_enable)({"use_reentrant": reentrant})
    clip = QKClip(model, tau=1e6, exact=True)
    if explicit:
        with clip.counting(PADDINGS["right"]):
            loss = model(tokens(), use_cache=False).logits.sum()
    else:
        loss = forward(model, "right").logits.sum()
    loss.backward()
    report = clip.step()
    for name, maxima in expected.items():
        torch.testing.assert_close(report.max_logits[name], maxima, rtol=1e-10, atol=0)


@pytest.mark.parametrize("kind", ["mha", "gqa", "mla"])
@pytest.mark.parametrize("padding", ["none", "left"])
def test_a_single_new_token_with_a_cache(kind, padding):
    """Where there is padding, transformers then packs the heads of a group into queries."""
    model = model_of(kind)
    (expected,) = expected_maxima(model, padding).values()
    clip, mask = QKClip(model, tau=1e6, exact=True), PADDINGS[padding].long()
    out = model(tokens()[:, :1], attention_mask=mask[:, :1], use_cache=True)
    key = "cache" if "cache" in out else "past_key_values"
    for t in range(1, 9):
        given = {"attention_mask": mask[:, : t + 1], key: out[key]}
        model(tokens()[:, t : t + 1], use_cache=True, **given)
    (found,) = clip.watch.maxima.values()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_a_copied_model_is_watched_by_itself():
    model = model_of("gqa")
    clip = QKClip(model)
    other = copy.deepcopy(model)
    forward(other)
    assert not clip.watch.maxima
    clip.remove()
    forward(model)
    assert not clip.watch.maxima and not model._forward_pre_hooks


# --- the promise ---------------------------------------------------------------------------------


def between(maxima):
    """A bound that two of the four heads exceed."""
    return maxima.sort().values[1:3].mean().item()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("alpha", [0.5, 0.3, 1.0])
def test_on_the_same_batch_no_head_exceeds_tau_and_hot_ones_reach_it(kind, padding, alpha):
    model = model_of(kind)
    (before,) = expected_maxima(model, padding).values()
    tau = between(before)
    clip = QKClip(model, tau=tau, alpha=alpha)
    forward(model, padding)
    report = clip.step()
    (after,) = expected_maxima(model, padding).values()
    expected = before.clamp(max=tau)
    if "gqa" in kind:  # heads of a group share a factor
        group = before.view(2, -1).amax(1, keepdim=True).expand(2, 2).reshape(-1)
        expected = before * (tau / group).clamp(max=1)
    assert (before > tau).any() and after.max() <= tau * (1 + 1e-12)
    torch.testing.assert_close(after, expected, rtol=1e-10, atol=0)
    assert report.heads == HEADS and report.clipped == int((expected < before).sum())
    assert report.smallest == pytest.approx(tau / before.max().item()) and report.nonfinite == 0
    forward(model, padding)
    unchanged = weights(model)
    clip.step()  # rounding may leave τ·(1 + 1e-16)
    for name, p in weights(model).items():
        torch.testing.assert_close(p, unchanged[name], rtol=1e-14, atol=0)


@pytest.mark.parametrize("kind", ["gqa", "gqa with biases", "gqa, fused", "mha", "mla"])
def test_scaling_queries_alone_keeps_other_heads_of_the_group(kind):
    model = model_of(kind)
    (before,) = expected_maxima(model).values()
    tau = between(before)
    clip = QKClip(model, tau=tau, shared_keys="query")
    forward(model)
    kept = weights(model)
    report = clip.step()
    (after,) = expected_maxima(model).values()
    torch.testing.assert_close(after, before.clamp(max=tau), rtol=1e-10, atol=0)
    assert report.clipped == int((before > tau).sum()) < HEADS
    changed = {n for n, p in weights(model).items() if not torch.equal(p, kept[n])}
    assert changed and not any(".k_proj" in name or ".kv_" in name for name in changed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_without_a_search_it_clips_the_same_and_bounds_the_rest(kind, padding):
    exact, other = model_of(kind, layers=2), model_of(kind, layers=2)
    first = list(expected_maxima(exact, padding).values())
    for tau in (first[0].max().item() * 0.7, 1e3):
        clips = [QKClip(exact, tau=tau, exact=True), QKClip(other, tau=tau)]
        reports = []
        for model, clip in zip((exact, other), clips, strict=True):
            forward(model, padding)
            reports.append(clip.step())
            clip.remove()
        left, right = weights(exact), weights(other)
        assert all(torch.equal(left[name], right[name]) for name in left)
        assert reports[0].clipped == reports[1].clipped
        pairs = zip(*(r.max_logits.values() for r in reports), strict=True)
        for sure, bound in pairs:
            assert (bound >= sure * (1 - 1e-6)).all()
            assert (sure.max() > tau) <= torch.equal(sure, bound)
    assert reports[1].max_logit > reports[0].max_logit and reports[1].clipped == 0


def test_the_numbers_of_the_paper():
    """S = 250 at τ = 100: γ = .4, the square root .632 on queries and keys of that head only."""
    model = model_of("mha")
    attention = model.model.layers[0].self_attn
    (before,) = expected_maxima(model).values()
    with torch.no_grad():
        for h, s in enumerate(before):
            attention.q_proj.weight[h * D : (h + 1) * D] *= (250 if h == 2 else 90) / s
    kept = weights(model)
    clip = QKClip(model)
    forward(model)
    report = clip.step()
    assert report.smallest == pytest.approx(0.4) and report.clipped == 1
    (after,) = expected_maxima(model).values()
    assert after.tolist() == pytest.approx([90, 90, 100, 90])
    for name, p in weights(model).items():
        if "q_proj" in name or "k_proj" in name:
            factor = torch.ones(HEADS * D, 1, dtype=torch.float64)
            factor[2 * D : 3 * D] = math.sqrt(0.4)
            torch.testing.assert_close(p, kept[name] * factor, rtol=1e-12, atol=0)
            assert torch.equal(p[: 2 * D], kept[name][: 2 * D])
        else:
            assert torch.equal(p, kept[name])


@pytest.mark.parametrize("kind", ["mla", "mla, one query matrix"])
def test_latent_attention_row_by_row(kind):
    """q^C and k^C take √γ, q^R takes γ; values, latents and the shared k^R stay as they are."""
    model = model_of(kind)
    (before,) = expected_maxima(model).values()
    tau = between(before)
    kept, clip = weights(model), QKClip(model, tau=tau)
    forward(model)
    clip.step()
    gamma = (tau / before).clamp(max=1)
    query = "q_proj" if "one" in kind else "q_b_proj"
    for name, p in weights(model).items():
        factor = torch.ones(len(p), dtype=torch.float64)
        if f"{query}.weight" in name:
            rows = factor.view(HEADS, D + 4)
            rows[:, :D], rows[:, D:] = gamma.sqrt()[:, None], gamma[:, None]
        elif "kv_b_proj" in name:
            factor.view(HEADS, D + 6)[:, :D] = gamma.sqrt()[:, None]
        factor = factor.view(-1, *[1] * (p.dim() - 1))
        torch.testing.assert_close(p, kept[name] * factor, rtol=1e-12, atol=0)


def test_fused_rows_and_biases():
    for kind in ("gqa, fused", "gqa with biases"):
        model = model_of(kind)
        (before,) = expected_maxima(model).values()
        tau = between(before)
        kept, clip = weights(model), QKClip(model, tau=tau)
        forward(model)
        report = clip.step()
        (s,) = report.max_logits.values()
        root = (tau / s.view(2, 2).amax(1)).clamp(max=1).sqrt()
        query, key = root.repeat_interleave(2 * D), root.repeat_interleave(D)
        one = torch.ones(2 * D, dtype=torch.float64)
        rows = {"qkv_proj": torch.cat([query, key, one]), "q_proj": query, "k_proj": key}
        seen = 0
        for name, p in weights(model).items():
            factor = next((f for part, f in rows.items() if part in name), None)
            if factor is not None:
                seen += 1
                kept[name] *= factor.view(-1, *[1] * (p.dim() - 1))
            torch.testing.assert_close(p, kept[name], rtol=1e-12, atol=0)
        assert seen == (1 if "fused" in kind else 4)


def test_layer_by_layer_a_deep_model_arrives():
    """A clipped layer changes the inputs of the next: after as many steps as layers all obey."""
    model = model_of("gqa", layers=3)
    tau = 0.5 * min(float(m.max()) for m in expected_maxima(model).values())
    clip, largest = QKClip(model, tau=tau), []
    for _ in range(3):
        forward(model)
        largest.append(clip.step().max_logit)
        found = expected_maxima(model)
    assert all(float(m.max()) <= tau * (1 + 1e-12) for m in found.values())
    assert largest[0] > 2 * tau


def test_heads_without_a_positive_logit_are_left_alone():
    """A single token with k = −q: every logit is negative, γ would be too."""
    model = model_of("mha")
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        attention.k_proj.weight.copy_(-attention.q_proj.weight)
    kept, clip = weights(model), QKClip(model, tau=1e-3)
    model(tokens(3, 1), use_cache=False)
    report = clip.step()
    assert report.max_logit < 0 and report.clipped == 0 and report.smallest == 1
    assert all(torch.equal(p, kept[name]) for name, p in weights(model).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_master_weights_are_scaled_too(dtype):
    model = model_of("gqa", dtype=dtype)
    masters = {p: p.detach().double() for p in model.parameters()}
    forward(model)
    watch = AttentionWatch(model)
    forward(model)
    (before,) = watch.maxima.values()
    tau = between(before)
    clip = QKClip(model, tau=tau, masters=masters)
    forward(model)
    clip.step()
    with torch.no_grad():
        for p, master in masters.items():
            assert (p.double() - master).abs().max() <= 2 ** (-8) * master.abs().max()
            p.copy_(master)
    forward(model)
    assert before.max() > 1.05 * tau and clip.step().max_logit < 1.01 * tau


def test_a_step_without_a_forward_does_nothing():
    model = model_of("gqa")
    kept, clip = weights(model), QKClip(model, tau=1e-3)
    report = clip.step()
    assert report.max_logit == -math.inf and report.clipped == 0
    forward(model)
    clip.step()
    moved = weights(model)
    assert not torch.equal(
        moved["model.layers.0.self_attn.q_proj.weight"],
        kept["model.layers.0.self_attn.q_proj.weight"],
    )
    clip.step()
    assert all(torch.equal(p, moved[name]) for name, p in weights(model).items())


def test_a_fault_in_one_head_is_counted_and_poisons_no_weight():
    model = model_of("mha")
    attention = model.model.layers[0].self_attn
    (finite,) = expected_maxima(model).values()
    tau = between(finite)
    clip = QKClip(model, tau=tau)
    forward(model)
    with torch.no_grad():
        good = attention.q_proj.weight[0, 0].item()
        attention.q_proj.weight[0, 0] = math.nan
    forward(model, seed=1)
    with torch.no_grad():
        attention.q_proj.weight[0, 0] = good
    report = clip.step()
    (maxima,) = report.max_logits.values()
    assert report.nonfinite == 1 and maxima[0].item() == pytest.approx(finite[0].item())
    assert all(torch.isfinite(p).all() for p in model.parameters())
    (after,) = expected_maxima(model).values()
    assert after.max() <= tau * (1 + 1e-12)


# --- LoRA ----------------------------------------------------------------------------------------


class LoraLinear(nn.Module):
    """W + s·B A, with the attribute names of peft."""

    def __init__(self, base, rank=3, bias=False, dora=False):
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        make = dict(dtype=base.weight.dtype)
        self.lora_A = nn.ModuleDict({"a": nn.Linear(base.in_features, rank, bias=False, **make)})
        self.lora_B = nn.ModuleDict({"a": nn.Linear(rank, base.out_features, bias=bias, **make)})
        self.lora_magnitude_vector = nn.ParameterDict()
        if dora:
            self.lora_magnitude_vector["a"] = nn.Parameter(torch.ones(base.out_features))

    def forward(self, x):
        return self.base_layer(x) + 2.0 * self.lora_B["a"](self.lora_A["a"](x))


def with_lora(model, **options):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        for layer in model.modules():
            for name in ("q_proj", "k_proj", "q_b_proj", "kv_b_proj"):
                if isinstance(getattr(layer, name, None), nn.Linear):
                    setattr(layer, name, LoraLinear(getattr(layer, name), **options))
    return model


@pytest.mark.parametrize("kind", ["gqa", "gqa with biases", "mla"])
@pytest.mark.parametrize("bias", [True, False])
def test_with_lora_the_sum_obeys(kind, bias):
    model = with_lora(model_of(kind), bias=bias)
    (before,) = expected_maxima(model).values()
    tau = between(before)
    kept, clip = weights(model), QKClip(model, tau=tau)
    forward(model)
    clip.step()
    (after,) = expected_maxima(model).values()
    assert before.max() > tau and after.max().item() == pytest.approx(tau)
    changed = {n for n, p in weights(model).items() if not torch.equal(p, kept[n])}
    assert not any("lora_A" in name for name in changed)
    assert any("lora_B" in n for n in changed) and any("base_layer" in n for n in changed)


# --- refusals ------------------------------------------------------------------------------------

NORMED = {
    "qwen3-moe": lambda: Qwen3MoeConfig(**SIZE, **MOE, num_experts=4, head_dim=D),
    "olmoe": lambda: OlmoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2),
}
OTHERS = {
    "soft": (lambda: Gemma2Config(**SIZE, head_dim=D), "caps its logits softly at 50.0"),
    "sinks": (
        lambda: GptOssConfig(**SIZE, head_dim=D, num_local_experts=4, num_experts_per_tok=2),
        "has attention sinks",
    ),
}


@pytest.mark.parametrize("family", NORMED)
def test_qk_norm_is_refused_with_the_reason_and_still_watched(family):
    model = AutoModelForCausalLM.from_config(NORMED[family]())
    with pytest.raises(ValueError, match=r"self_attn has a QK-norm \(q_norm\).*change nothing"):
        QKClip(model)
    watch = AttentionWatch(model)
    forward(model)
    assert len(watch.maxima) == 2


def test_the_reason_is_true():
    """Smaller query and key weights leave the logits of a QK-norm model where they were."""
    model = AutoModelForCausalLM.from_config(NORMED["qwen3-moe"](), attn_implementation="sdpa")
    model.config._experts_implementation = "eager"
    watch = AttentionWatch(model.double())
    forward(model)
    before = dict(watch.maxima)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_norm.variance_epsilon = layer.self_attn.k_norm.variance_epsilon = 0.0
            layer.self_attn.q_proj.weight *= 0.5
            layer.self_attn.k_proj.weight *= 0.25
    watch.reset()
    forward(model)
    for name, maxima in watch.maxima.items():
        torch.testing.assert_close(maxima, before[name], rtol=0.02, atol=0)


@pytest.mark.parametrize("case", OTHERS)
def test_other_softmaxes_are_refused(case):
    config, message = OTHERS[case]
    with pytest.raises(ValueError, match=message):
        QKClip(AutoModelForCausalLM.from_config(config(), attn_implementation="eager"))


def test_clamped_projections_are_refused():
    model = model_of("gqa")
    model.config.clip_qkv = 8.0
    with pytest.raises(ValueError, match="clamps its projections at 8.0"):
        QKClip(model)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tau": 0.0}, "tau=0.0: must be > 0"),
        ({"tau": math.nan}, "tau=nan"),
        ({"tau": math.inf}, "tau=inf"),
        ({"alpha": 1.5}, r"alpha=1.5: must lie in \[0, 1\]"),
        ({"shared_keys": "mean"}, "shared_keys='mean': group or query"),
    ],
)
def test_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        QKClip(model_of("gqa"), **options)


def test_models_and_wrappers_it_does_not_know_are_refused():
    with pytest.raises(ValueError, match="model is Linear, in which no module has q_proj"):
        QKClip(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="something other than LoRA"):
        QKClip(with_lora(model_of("gqa"), dora=True))
    model = model_of("gqa")
    model.model.layers[0].self_attn.head_dim = 7
    with pytest.raises(ValueError, match="no known layout"):
        QKClip(model)
    model = model_of("gqa")
    whole = model.model.layers[0].self_attn.k_proj
    whole.weight = nn.Parameter(whole.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(ValueError, match="weights of torch.int8, which cannot be scaled"):
        QKClip(model)


class Own(nn.Module):
    """Attention written by hand, with a softmax that nobody can see."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.head_dim = nn.Linear(8, 8), nn.Linear(8, 8), 4

    def forward(self, x):
        scores = self.q_proj(x) @ self.k_proj(x).mT
        return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ x


def test_attention_that_was_not_seen_is_told():
    model = nn.Sequential(Own())
    clip = QKClip(model)
    model(torch.randn(2, 3, 8))
    with pytest.raises(ValueError, match="0 and 0 other layers ran without torch's"):
        clip.step()


# --- beside it: clamp, soft-cap, QK-norm ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", PADDINGS)
def test_scores_left_as_they_are_give_torchs_attention(kind, padding):
    model = model_of(kind, layers=2)
    real = PADDINGS[padding].bool()
    plain = forward(model, padding).logits[real]
    with attention_scores(model, lambda scores: scores):
        found = forward(model, padding).logits[real]
    torch.testing.assert_close(found, plain, rtol=1e-8, atol=1e-8)
    assert torch.equal(forward(model, padding).logits[real], plain)  # and it ends


def test_changed_scores_are_what_attention_uses_and_the_mask_comes_after():
    model, seen = model_of("gqa"), []

    def change(scores):
        seen.append(scores.shape)
        return torch.zeros_like(scores)

    with attention_scores(model, change):
        out = forward(model, "right").logits
    assert seen == [(3, HEADS, 9, 9)]
    other = tokens()
    other[:, -1] = 7  # uniform attention over what was before: the future has no weight
    with attention_scores(model, change):
        again = model(other, attention_mask=PADDINGS["right"].long(), use_cache=False).logits
    assert torch.equal(again[0, :-1], out[0, :-1]) and not torch.equal(again[0, -1], out[0, -1])


def test_the_watch_sees_the_logits_before_the_clamp_whoever_came_first():
    model = model_of("gqa")
    (expected,) = expected_maxima(model).values()
    clamp = attention_scores(model, lambda s: clamp_attention_scores(s, 0.5))
    watch = AttentionWatch(model)
    with clamp:
        forward(model)
        (found,) = watch.maxima.values()
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)
        watch.remove()
        watch = AttentionWatch(model)
        forward(model)
    (found,) = watch.maxima.values()
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=0)


def test_eager_scores_cannot_be_changed():
    model = model_of("gqa", implementation="eager")
    with attention_scores(model, clamp_attention_scores), pytest.raises(ValueError, match="sdpa"):
        forward(model)
    forward(model)


def test_the_seeds_clamp_has_no_gradient_beyond_its_bound():
    scores = torch.tensor([-31.0, -29.0, 0.0, 29.0, 31.0], requires_grad=True)
    clamped = clamp_attention_scores(scores)
    clamped.sum().backward()
    assert clamped.tolist() == [-30, -29, 0, 29, 30] and scores.grad.tolist() == [0, 1, 1, 1, 0]
    # After the mask it would bring hidden keys back: e^−30 is small, e^−inf is nothing.
    assert clamp_attention_scores(torch.tensor(-math.inf)) == -30


def test_the_slope_of_the_soft_cap():
    scores = torch.tensor([0.0, 25.0, 50.0, 100.0], requires_grad=True)
    soft_cap_scores(scores).sum().backward()
    assert scores.grad.tolist() == pytest.approx([1, 0.786, 0.420, 0.071], abs=1e-3)
    assert soft_cap_scores(torch.tensor(1e6), cap=30.0) == 30


@pytest.mark.parametrize("kind", ["mha", "gqa", "gqa with biases"])
@pytest.mark.parametrize("gain", [1.0, 1.5])
def test_qk_norm_as_a_knob(kind, gain):
    model = model_of(kind, layers=2)
    caught = []
    rope = SimpleNamespace(q=None, k=None)
    attention = model.model.layers[0].self_attn
    for side in "qk":
        plain = getattr(attention, f"{side}_proj")
        plain.register_forward_hook(lambda m, a, out, side=side: caught.append((side, out)))
    add_qk_norm(model, gain=gain, eps=1e-12)
    for side in "qk":
        normed = getattr(attention, f"{side}_proj")
        normed.register_forward_hook(lambda m, a, out, side=side: setattr(rope, side, out))
    watch = AttentionWatch(model)
    forward(model)
    for side, raw in caught:
        heads = raw.unflatten(-1, (-1, D))
        expected = gain * heads / heads.square().mean(-1, keepdim=True).sqrt()
        torch.testing.assert_close(getattr(rope, side), expected.flatten(-2), rtol=1e-8, atol=1e-10)
    largest = max(float(m.max()) for m in watch.maxima.values())
    assert 0.5 * gain**2 * math.sqrt(D) < largest <= gain**2 * math.sqrt(D) * (1 + 1e-9)
    gains = {n for n, _ in model.named_parameters() if "q_norm" in n or "k_norm" in n}
    assert len(gains) == 4 and gains <= set(model.state_dict())
    with pytest.raises(ValueError, match="has a QK-norm"):
        QKClip(model)
    with pytest.raises(ValueError, match="has a QK-norm already"):
        add_qk_norm(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].self_attn.q_norm.weight.zero_()
    assert not torch.equal(forward(twin).logits, forward(model).logits)


@pytest.mark.parametrize("kind", ["mla", "gqa, fused"])
def test_qk_norm_is_refused_where_there_is_no_key_to_normalise(kind):
    with pytest.raises(ValueError, match="no separate q_proj and k_proj"):
        add_qk_norm(model_of(kind))


def test_dropout_in_changed_attention():
    q = torch.randn(1, 1, 4, 8)
    model = nn.Sequential(Attends(0.5))
    with attention_scores(model, lambda s: s), torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        dropped = model(q)
    assert not torch.allclose(dropped, F.scaled_dot_product_attention(q, q, q))


class Attends(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.q_proj = self.k_proj = nn.Identity()
        self.dropout = dropout

    def forward(self, x):
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.dropout)
