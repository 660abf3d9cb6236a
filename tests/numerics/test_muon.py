"""Muon: its formula, who updates what, glued matrices, experts, state, and what it refuses."""

import io
import math
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import GptOssConfig, GptOssForCausalLM, Phi3Config, Phi3ForCausalLM

from stablerl_core.numerics import (
    Muon,
    MuonClip,
    QKClip,
    fused_splits,
    muon,
    newton_schulz,
    update_norm_cap,
    uses_muon,
)
from stablerl_core.training import small_moe

ETA, LAMBDA, MU = 0.02, 0.3, 0.9
OPTIONS = {"lr": ETA, "weight_decay": LAMBDA, "momentum": MU}


def gaussian(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def parameters(shapes, seed=0):
    """Named float64 parameters of these shapes."""
    return {name: nn.Parameter(gaussian(*s, seed=seed + i)) for i, (name, s) in enumerate(shapes)}


def set_gradients(named, step):
    for i, p in enumerate(named.values()):
        p.grad = gaussian(*p.shape, seed=1000 + 17 * step + i).to(p.dtype)


def train(optimizer, named, steps, start=0):
    for step in range(start, start + steps):
        set_gradients(named, step)
        optimizer.step()
    return {name: p.detach().clone() for name, p in named.items()}


def by_hand(w, gradients, nesterov=True, size=None):
    """Algorithm 1 of Kimi K2 on one matrix: M ← μM + G, W ← W − η(s·NS(M) + λW)."""
    rows, columns = w.shape
    size = 0.2 * math.sqrt(max(rows, columns)) if size is None else size
    m = torch.zeros_like(w)
    for g in gradients:
        m = MU * m + g
        o = newton_schulz(g + MU * m if nesterov else m)
        w = w - ETA * (size * o + LAMBDA * w)
    return w


def gradients_of(named, name, steps):
    i = list(named).index(name)
    return [gaussian(*named[name].shape, seed=1000 + 17 * step + i) for step in range(steps)]


def same(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 1e-10, "atol": 1e-12}
    for name in a:
        torch.testing.assert_close(a[name], b[name], **tolerance)


# --- the formula ---------------------------------------------------------------------------------

MIXED = [
    ("layers.0.q_proj.weight", (6, 9)),
    ("layers.0.o_proj.weight", (9, 6)),
    ("layers.0.up.weight", (6, 9)),
    ("layers.0.experts.w1", (4, 6, 9)),
    ("layers.0.experts.w2", (4, 9, 6)),
    ("embed.weight", (11, 6)),
    ("layers.0.norm.weight", (6,)),
]


@pytest.mark.parametrize("nesterov", [True, False])
def test_every_matrix_and_every_expert_obeys_the_formula(nesterov):
    """Whatever else is in its batch: matrices of one shape, lying or standing, and experts."""
    named, start = parameters(MIXED), parameters(MIXED)
    after = train(Muon(named.items(), nesterov=nesterov, **OPTIONS), named, 4)
    for name, _ in MIXED[:5]:
        gradients = gradients_of(named, name, 4)
        w = start[name].detach()
        if w.dim() == 2:
            expected = by_hand(w, gradients, nesterov)
        else:
            slices = [by_hand(w[i], [g[i] for g in gradients], nesterov) for i in range(len(w))]
            expected = torch.stack(slices)
        torch.testing.assert_close(after[name], expected, rtol=1e-10, atol=1e-12)
        assert (after[name] - w).norm() > 0.1


def test_torch_muon_is_the_same_in_its_own_precision():
    """bfloat16 and its rounding; its adjusted learning rate is our scale."""
    for scale, theirs in (("match_rms", "match_rms_adamw"), ("original", "original")):
        for shape in ((48, 32), (32, 48)):
            a, b = (parameters([("w.weight", shape)]) for _ in range(2))
            a, b = ({k: nn.Parameter(p.float()) for k, p in x.items()} for x in (a, b))
            start = a["w.weight"].detach().clone()
            other = torch.optim.Muon(b.values(), **OPTIONS, adjust_lr_fn=theirs)
            train(other, b, 3)
            ours = Muon(a.items(), **OPTIONS, scale=scale, dtype=torch.bfloat16)
            train(ours, a, 3)
            moved = b["w.weight"] - start
            assert (a["w.weight"] - b["w.weight"]).norm() < 0.01 * moved.norm()


def test_the_other_half_is_torchs_adamw_bit_for_bit():
    shapes = [("embed.weight", (11, 6)), ("norm.weight", (6,)), ("lm_head.weight", (11, 6))]
    for dtype in (torch.float32, torch.float64):
        a, b = ({k: nn.Parameter(p.to(dtype)) for k, p in parameters(shapes).items()} for _ in "ab")
        ours = Muon(a.items(), **OPTIONS, adamw_betas=(0.8, 0.97), adamw_eps=1e-6)
        rest = {"lr": ETA, "weight_decay": LAMBDA, "betas": (0.8, 0.97), "eps": 1e-6}
        theirs = torch.optim.AdamW(b.values(), fused=True, **rest)
        ours, theirs = train(ours, a, 4), train(theirs, b, 4)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_decay_is_decoupled_and_of_the_unscaled_learning_rate():
    named = parameters(MIXED)
    before = {k: p.detach().clone() for k, p in named.items()}
    for p in named.values():
        p.grad = torch.zeros_like(p)
    Muon(named.items(), **OPTIONS).step()
    for name, p in named.items():
        expected = before[name] * (1 - ETA * LAMBDA)
        torch.testing.assert_close(p.detach(), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("shape", [(64, 64), (48, 96), (96, 48), (32, 128)])
def test_the_update_has_the_rms_of_adamw(shape):
    """0.2, times what Newton-Schulz leaves short of 1: ‖O‖_F/√min(m, n), about .87."""
    named = parameters([("w.weight", shape)])
    before = named["w.weight"].detach().clone()
    train(Muon(named.items(), lr=1.0, weight_decay=0), named, 1)
    rms = (named["w.weight"] - before).square().mean().sqrt().item()
    short = newton_schulz(gradients_of(named, "w.weight", 1)[0]).norm() / math.sqrt(min(shape))
    assert rms == pytest.approx(0.2 * short.item(), rel=1e-9) and 0.8 < short < 0.9


def test_the_scale_of_the_gradient_and_the_sum_or_mean_of_momentum_make_no_difference():
    a, b = parameters(MIXED[:5]), parameters(MIXED[:5])
    one, other = Muon(a.items(), **OPTIONS), Muon(b.items(), **OPTIONS)
    for step in range(3):
        set_gradients(a, step)
        set_gradients(b, step)
        for p in b.values():
            p.grad *= 1e-9
        one.step()
        other.step()
    same(a, b, rtol=1e-9, atol=1e-9)


def test_without_a_gradient_it_stands_still_and_with_zeros_it_goes_on_at_full_speed():
    """The size of the momentum is not in the step: an expert without tokens keeps moving."""
    named = parameters([("experts.w1", (3, 6, 9)), ("w.weight", (6, 9))])
    optimizer = Muon(named.items(), lr=0.1, weight_decay=0.0)
    train(optimizer, named, 1)
    before = {k: p.detach().clone() for k, p in named.items()}
    w = gaussian(3, 6, 9, seed=5)
    w[1] = 0
    named["experts.w1"].grad, named["w.weight"].grad = w, None
    optimizer.step()
    moved = (named["experts.w1"] - before["experts.w1"]).flatten(1).norm(dim=1)
    assert torch.equal(named["w.weight"], before["w.weight"])
    assert moved[1] > 0.9 * moved[0] > 0.1


def test_a_fault_stays_in_its_expert():
    clean, faulty = parameters(MIXED[:5]), parameters(MIXED[:5])
    for named in (clean, faulty):
        set_gradients(named, 0)
    faulty["layers.0.experts.w1"].grad[2, 1, 1] = math.nan
    for named in (clean, faulty):
        Muon(named.items(), **OPTIONS).step()
    assert torch.isnan(faulty["layers.0.experts.w1"][2]).all()
    faulty["layers.0.experts.w1"].data[2] = clean["layers.0.experts.w1"].data[2]
    assert all(torch.equal(clean[name], faulty[name]) for name in clean)


def test_order_and_portions_do_not_matter(monkeypatch):
    forward, backward, small = parameters(MIXED), parameters(MIXED), parameters(MIXED)
    whole = train(Muon(forward.items(), **OPTIONS), forward, 2)
    same(whole, train(Muon(reversed(backward.items()), **OPTIONS), backward, 2))
    sizes, optimizer, plain = [], Muon(small.items(), **OPTIONS), muon.newton_schulz
    monkeypatch.setattr(muon, "MAX_ELEMENTS", 60)
    monkeypatch.setattr(muon, "newton_schulz", lambda m, **o: sizes.append(len(m)) or plain(m, **o))
    same(whole, train(optimizer, small, 2))
    assert sizes == 2 * [1, 1, 1, 4, 4]  # one parameter is not divided


def test_matrices_of_one_shape_are_one_batch(monkeypatch):
    named, batches = parameters(MIXED), []
    optimizer, plain = Muon(named.items(), **OPTIONS), muon.newton_schulz
    monkeypatch.setattr(
        muon, "newton_schulz", lambda m, **o: batches.append(m.shape) or plain(m, **o)
    )
    train(optimizer, named, 1)
    assert batches == [(11, 6, 9)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_parameters(dtype):
    low = {k: nn.Parameter(p.to(dtype)) for k, p in parameters(MIXED).items()}
    high = {k: nn.Parameter(p.detach().double()) for k, p in low.items()}
    start = {k: p.detach().clone() for k, p in high.items()}
    for named in (low, high):
        train(Muon(named.items(), lr=0.5, weight_decay=0.1), named, 2)
    for name in low:
        moved = (high[name] - start[name]).norm()
        assert low[name].dtype == dtype
        assert (low[name].double() - high[name]).norm() < 0.1 * moved


def test_matrices_of_one_shape_and_two_precisions():
    dtypes = {"layers.0.q_proj.weight": torch.float32, "layers.0.up.weight": torch.float64}
    mixed = {k: nn.Parameter(p.to(dtypes.get(k, p.dtype))) for k, p in parameters(MIXED).items()}
    alone = parameters(MIXED)
    found, expected = (train(Muon(n.items(), **OPTIONS), n, 2) for n in (mixed, alone))
    for name in expected:
        tolerance = 1e-5 if found[name].dtype == torch.float32 else 1e-12
        torch.testing.assert_close(
            found[name].double(), expected[name], rtol=tolerance, atol=tolerance
        )


# --- who updates what ----------------------------------------------------------------------------

MUON_NAMES = {
    "mixtral": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    "qwen3-moe": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    "olmoe": {"q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"},
    "deepseek-v3": {
        *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_up_proj"),
        *("down_proj", "gate_proj", "up_proj"),
    },
}


@cache
def moe(family):
    return small_moe(f"{family}-cpu")[0]


@pytest.mark.parametrize("family", MUON_NAMES)
def test_hidden_matrices_go_to_muon_and_everything_else_to_adamw(family):
    model = moe(family)
    optimizer = Muon(model.named_parameters())
    names = {g["muon"]: g["param_names"] for g in optimizer.param_groups}
    leaf = {muon: {n.removesuffix(".weight").split(".")[-1] for n in names[muon]} for muon in names}
    assert leaf[True] == MUON_NAMES[family]
    rest = {"embed_tokens", "lm_head", "gate", "input_layernorm", "post_attention_layernorm"}
    assert rest <= leaf[False] and {p for p in leaf[False] - rest if "norm" not in p} <= {"norm"}
    everything = [p for g in optimizer.param_groups for p in g["params"]]
    assert {id(p) for p in everything} == {id(p) for p in model.parameters()}


@pytest.mark.parametrize(
    "name, shape, expected",
    [
        ("model.layers.0.mlp.gate_proj.weight", (4, 6), True),
        ("model.layers.0.mlp.gate.weight", (8, 6), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (1, 6), False),
        ("model.layers.0.mlp.shared_expert_gate.weight", (2, 6), False),
        ("model.layers.0.mlp.router.weight", (8, 6), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (8, 6), False),
        ("model.layers.0.mlp.experts.down_proj", (8, 4, 6), True),
        ("model.layers.0.self_attn.q_proj.bias", (6,), False),
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", (2, 6), True),
        ("model.layers.0.self_attn.o_proj.weight", (6, 1), False),
        ("transformer.wte.weight", (50, 6), False),
        ("value_head.weight", (3, 6), False),
        ("score.weight", (3, 6), False),
        ("output.weight", (50, 6), False),
        ("bert.output.weight", (6, 6), True),
        ("mixer.conv1d.weight", (6, 4, 4), False),
        ("patch.weight", (6, 3, 4, 4), False),
        ("scale", (), False),
    ],
)
def test_names_and_shapes_that_are_told_apart(name, shape, expected):
    assert uses_muon(name, shape) == expected


def test_a_caller_decides_otherwise_by_name_or_by_group():
    named = parameters(MIXED)
    optimizer = Muon(named.items(), adamw=("q_proj", "w2"), adamw_lr=0.5, adamw_weight_decay=0.0)
    groups = {g["muon"]: g for g in optimizer.param_groups}
    assert groups[True]["param_names"] == [MIXED[i][0] for i in (1, 2, 3)]
    assert (groups[False]["lr"], groups[False]["weight_decay"]) == (0.5, 0.0)
    assert (groups[True]["lr"], groups[True]["weight_decay"]) == (2e-4, 0.1)
    pairs = list(named.items())
    optimizer = Muon(
        [{"params": pairs[:2], "muon": False, "lr": 3.0}, {"params": pairs[2:6], "lr": 2.0}]
    )
    told = [(g["muon"], g["lr"], len(g["params"])) for g in optimizer.param_groups]
    assert told == [(False, 3.0, 2), (True, 2.0, 3), (False, 2.0, 1)]
    optimizer.add_param_group({"params": pairs[6:]})
    assert optimizer.param_groups[-1]["muon"] is False and len(optimizer.param_groups) == 4


# --- glued matrices ------------------------------------------------------------------------------


def one_step(name, shape, splits):
    """What lr = 1 without decay subtracts from one parameter."""
    named = parameters([(name, shape)])
    before = named[name].detach().clone()
    train(Muon(named.items(), lr=1.0, weight_decay=0.0, splits=splits, scale="none"), named, 1)
    return before - named[name].detach(), gradients_of(named, name, 1)[0]


@pytest.mark.parametrize("lead", [(), (3,)])
def test_gate_and_up_are_two_matrices(lead):
    moved, g = one_step("mlp.experts.gate_up_proj", (*lead, 8, 10), None)
    expected = torch.cat([newton_schulz(half) for half in g.chunk(2, -2)], -2)
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)
    whole, _ = one_step("mlp.experts.gate_up_proj", (*lead, 8, 10), {})
    assert (whole - newton_schulz(g)).norm() < 1e-9 < 0.1 < (whole - expected).norm()


def test_queries_keys_and_values_of_one_projection():
    moved, g = one_step("attn.qkv_proj.weight", (12, 7), {"qkv_proj": (-2, (6, 3, 3))})
    expected = torch.cat([newton_schulz(part) for part in g.split([6, 3, 3])])
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


def test_sizes_repeat_head_by_head():
    """GPT-NeoX: (q, k, v) of head 0, then of head 1, …: each matrix has rows from everywhere."""
    splits = {"query_key_value": (-2, [4, 4, 4])}
    moved, g = one_step("query_key_value.weight", (2 * 3 * 4, 7), splits)
    heads = g.view(2, 3, 4, 7)
    parts = [newton_schulz(heads[:, i].reshape(8, 7)).view(2, 4, 7) for i in range(3)]
    expected = torch.stack(parts, 1).reshape(24, 7)
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


def test_columns_can_be_split_and_interleaved():
    """gpt-oss: experts (E, in, 2·out) with gate and up in turn along the last dimension."""
    moved, g = one_step("experts.gate_up_proj", (3, 5, 12), {"gate_up_proj": (-1, (1, 1))})
    for offset in (0, 1):
        torch.testing.assert_close(
            moved[..., offset::2], newton_schulz(g[..., offset::2]), rtol=1e-10, atol=1e-10
        )


def test_a_full_name_goes_before_a_part_and_one_keeps_it_whole():
    name, splits = "a.qkv_proj.weight", {"a.qkv_proj.weight": 1, "qkv_proj": 2}
    moved, g = one_step(name, (6, 7), splits)
    torch.testing.assert_close(moved, newton_schulz(g), rtol=1e-10, atol=1e-10)


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    repeats=st.integers(1, 3),
    columns=st.integers(1, 5),
    lead=st.sampled_from([(), (2,)]),
    dim=st.sampled_from([-1, -2]),
)
def test_blocks_hold_every_entry_once(sizes, repeats, columns, lead, dim):
    shape = [sum(sizes) * repeats, columns]
    update = torch.zeros(*lead, *(shape if dim == -2 else shape[::-1]))
    for i, block in enumerate(muon._blocks("w", update, {"w": (dim, tuple(sizes))})):
        assert block.shape == (*lead, repeats, sizes[i], columns)
        block += 1
    assert (update == 1).all()


SMALL = dict(
    vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=24, pad_token_id=0, bos_token_id=None, eos_token_id=1,
)  # fmt: skip


def test_the_splits_of_a_model_are_found():
    assert fused_splits(moe("mixtral"))["model.layers.1.mlp.experts.gate_up_proj"] == (-2, (64, 64))
    latent = fused_splits(moe("deepseek-v3"))
    assert latent["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"] == (-2, (32, 8))
    assert latent["model.layers.0.self_attn.kv_b_proj.weight"] == (-2, (16, 16))
    phi = Phi3ForCausalLM(Phi3Config(**SMALL))
    assert fused_splits(phi)["model.layers.0.self_attn.qkv_proj.weight"] == (-2, (16, 8, 8))
    oss = GptOssForCausalLM(
        GptOssConfig(**SMALL, head_dim=4, num_local_experts=4, num_experts_per_tok=2)
    )
    assert fused_splits(oss)["model.layers.0.mlp.experts.gate_up_proj"] == (-1, (1, 1))
    for model in (phi, oss, moe("deepseek-v3")):
        Muon(model.named_parameters(), splits=fused_splits(model))
    with pytest.raises(ValueError, match="splits says nothing about .*qkv_proj.weight"):
        Muon(phi.named_parameters())


# --- state, schedules, faults --------------------------------------------------------------------


@pytest.mark.parametrize("before", [0, 3])
def test_state_goes_through_a_file_and_the_run_continues_bit_for_bit(before):
    named, again = parameters(MIXED), parameters(MIXED, seed=50)
    optimizer = Muon(named.items(), **OPTIONS)
    train(optimizer, named, before)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    for p, q in zip(named.values(), again.values(), strict=True):
        q.data.copy_(p.data)
    other = Muon(again.items(), lr=9.0)
    other.load_state_dict(torch.load(file, weights_only=True))
    expected, found = (
        train(o, n, 3, start=before) for o, n in ((optimizer, named), (other, again))
    )
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert other.param_groups[0]["lr"] == ETA


def test_state_is_one_buffer_for_muon_and_two_for_adamw():
    named = parameters(MIXED)
    optimizer = Muon(named.items(), **OPTIONS)
    train(optimizer, named, 1)
    fields = {name: set(optimizer.state[p]) for name, p in named.items()}
    assert all(fields[name] == {"momentum_buffer"} for name, _ in MIXED[:5])
    assert all(fields[name] == {"step", "exp_avg", "exp_avg_sq"} for name, _ in MIXED[5:])


def test_schedulers_move_both_halves():
    named = parameters(MIXED)
    optimizer = Muon(named.items(), lr=0.1, adamw_lr=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (1 + n))
    train(optimizer, named, 1)
    schedule.step()
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([0.05, 0.005])


def test_a_step_that_the_scaler_skips_leaves_momentum_and_weights():
    named = {k: nn.Parameter(p.float()) for k, p in parameters(MIXED).items()}
    optimizer, scaler = Muon(named.items(), **OPTIONS), torch.amp.GradScaler("cpu", init_scale=8.0)

    def go(fault):
        loss = sum(scaler.scale(p.square().sum()) for p in named.values())
        optimizer.zero_grad()
        loss.backward()
        if fault:
            named["layers.0.o_proj.weight"].grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        state = [t.clone() for p in named.values() for t in optimizer.state[p].values()]
        return state + [p.detach().clone() for p in named.values()]

    before, skipped, after = go(False), go(True), go(False)
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(a, b) for a, b in zip(before, skipped, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(skipped, after, strict=True))


def test_a_closure_is_called_with_gradients_on():
    named = parameters(MIXED)
    optimizer = Muon(named.items(), **OPTIONS)

    def closure():
        loss = sum(p.square().sum() for p in named.values())
        loss.backward()
        return loss

    before = {k: p.detach().clone() for k, p in named.items()}
    assert optimizer.step(closure) > 0
    assert not any(torch.equal(p, before[k]) for k, p in named.items())


def test_it_learns_on_a_mixture_of_experts():
    model = small_moe("mixtral-cpu")[0]
    optimizer = Muon(model.named_parameters(), lr=3e-3, splits=fused_splits(model))
    ids = torch.randint(3, 99, (4, 12), generator=torch.Generator().manual_seed(0))
    losses = []
    for _ in range(15):
        optimizer.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


# --- MuonClip and the seed's ---------------------------------------------------------------------


def test_muon_clip_is_muon_and_then_qk_clip():
    plain, clipped = small_moe("mixtral-cpu")[0], small_moe("mixtral-cpu")[0]
    ids = torch.randint(3, 99, (2, 8), generator=torch.Generator().manual_seed(0))
    optimizers = {}
    for model in (plain, clipped):
        with torch.no_grad():
            for n, p in model.named_parameters():
                if "q_proj" in n or "k_proj" in n:
                    p.mul_(20)
        optimizers[model] = (
            Muon(model.named_parameters(), lr=1e-3)
            if model is plain
            else MuonClip(model.named_parameters(), lr=1e-3, qk_clip=QKClip(model, tau=2.0))
        )
        model(ids, labels=ids).loss.backward()
        optimizers[model].step()
    report = optimizers[clipped].clipped
    assert report.max_logit > 2 and report.clipped > 0 and report.heads == 8
    pairs = zip(plain.named_parameters(), clipped.parameters(), strict=True)
    changed = {n for (n, p), q in pairs if not torch.equal(p, q)}
    assert changed and {n.split(".")[-2] for n in changed} == {"q_proj", "k_proj"}
    assert not optimizers[clipped].qk_clip.watch.maxima  # the next step begins anew


def test_the_seeds_muon_clip_is_an_option_and_shrinks_every_update():
    """Seed 002: momentum = β·momentum + (1−β)·grad, orthogonalize, norm ≤ 1, W −= lr·O."""
    named = parameters([("w.weight", (24, 32))])
    w, m = named["w.weight"].detach().clone(), torch.zeros(24, 32, dtype=torch.float64)
    options = {"scale": "none", "nesterov": False, "weight_decay": 0.0, "momentum": 0.9}
    optimizer = Muon(named.items(), lr=0.1, update_norm_cap=1.0, **options)
    for step in range(3):
        g = gradients_of(named, "w.weight", step + 1)[-1]
        m = 0.9 * m + 0.1 * g
        o = newton_schulz(m)
        assert o.norm() > 4  # .87·√24: the cap always acts
        w = w - 0.1 * (o / o.norm())
        train(optimizer, named, 1, start=step)
    torch.testing.assert_close(named["w.weight"].detach(), w, rtol=1e-10, atol=1e-12)


def test_update_norm_cap_cuts_each_matrix_to_the_bound_and_no_other():
    batch = torch.stack([torch.eye(4), 0.1 * torch.eye(4), torch.zeros(4, 4)]).double()
    capped = update_norm_cap(batch, 1.0)
    torch.testing.assert_close(capped[0], torch.eye(4).double() / 2)
    assert torch.equal(capped[1:], batch[1:])


# --- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr=-1.0: must be ≥ 0 and finite"),
        ({"lr": math.nan}, "lr=nan"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"adamw_eps": -1e-8}, "eps=-1e-08"),
        ({"momentum": 1.0}, r"momentum=1.0: must lie in \[0, 1\)"),
        ({"adamw_betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\)"),
        ({"scale": "rms"}, "scale='rms': one of match_rms, original, none"),
        ({"steps": 0}, "steps=0"),
        ({"coefficients": "cubic"}, "coefficients='cubic'"),
        ({"update_norm_cap": 0.0}, "update_norm_cap=0.0: must be > 0"),
        ({"splits": {"up": (-2, (4, 4))}}, r"splits gives .* for layers.0.up.weight .*\(6, 9\)"),
        ({"splits": {"up": 4}}, "splits gives 4 for layers.0.up.weight"),
        ({"splits": {"up": (0, (3, 3))}}, "in dimension -2 or -1"),
    ],
)
def test_settings_that_no_step_could_use_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        Muon(parameters(MIXED).items(), **options)


@pytest.mark.parametrize(
    "params",
    [
        lambda: parameters(MIXED).values(),
        lambda: [{"params": list(parameters(MIXED).values())}],
        lambda: [{"params": nn.Parameter(torch.ones(2, 2))}],
    ],
)
def test_parameters_without_names_are_refused(params):
    with pytest.raises(ValueError, match="without names.*model.named_parameters"):
        Muon(params())


@pytest.mark.parametrize("name", ["qkv_proj", "query_key_value", "Wqkv", "c_attn"])
def test_a_fused_projection_without_a_split_is_refused(name):
    with pytest.raises(ValueError, match=f"splits says nothing about attn.{name}.weight"):
        Muon(parameters([(f"attn.{name}.weight", (12, 4))]).items())
