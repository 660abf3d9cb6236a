"""Router logits, sizes of updates, Adam's moments and gradients by layer, against hand counts."""

import math

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig

from stablerl_core.numerics import (
    Muon,
    RouterWatch,
    adam_states,
    gradient_norm,
    gradient_statistics,
    update_ratios,
)

# Router logits ----------------------------------------------------------------------------------


class TopKRouter(nn.Module):
    """Its logits are twice half its input."""

    def forward(self, x):
        return 2 * (x / 2), x.softmax(-1), x.argmax(-1)


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = TopKRouter()

    def forward(self, x):
        return self.gate(x)[1]


def logits(*rows):
    return torch.tensor(rows, requires_grad=True)


def test_router_logits_by_hand():
    model = Routed()
    watch = RouterWatch(model)
    model(logits([3.0, -5.0, 0.0], [1.0, 1.0, 1.0]))
    model(logits([0.0, 4.0, 0.0]))
    seen = watch.report()["gate"]
    assert (seen.largest, seen.spread, seen.nonfinite, seen.tokens) == (5.0, 8.0, 0, 3)
    rows = [[3.0, -5.0, 0.0], [1.0, 1.0, 1.0], [0.0, 4.0, 0.0]]
    z = sum(math.log(sum(math.exp(x) for x in row)) ** 2 for row in rows) / 3
    assert seen.z == pytest.approx(z, rel=1e-12)
    watch.reset()
    assert watch.report() == {}


def test_a_nan_of_the_router_is_counted_and_hides_nothing():
    model = Routed()
    watch = RouterWatch(model)
    model(logits([math.nan, 1.0], [2.0, -7.0], [math.inf, 0.0]))
    seen = watch.report()["gate"]
    assert (seen.nonfinite, seen.tokens, seen.largest, seen.spread) == (2, 3, 7.0, 9.0)
    watch.reset()
    model(logits([math.nan, 1.0]))
    seen = watch.report()["gate"]
    assert seen.nonfinite == seen.tokens == 1
    assert all(math.isnan(value) for value in (seen.largest, seen.spread, seen.z))


def test_only_passes_that_train_count():
    model = Routed()
    watch = RouterWatch(model)
    with torch.no_grad():
        model(logits([9.0, 0.0]))
    assert watch.report() == {}
    watch.remove()
    model(logits([9.0, 0.0]))
    assert watch.report() == {}


MOE = dict(
    vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, intermediate_size=8, max_position_embeddings=16, pad_token_id=0,
)  # fmt: skip
MLA = dict(
    moe_intermediate_size=8, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    q_lora_rank=8, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8,
    first_k_dense_replace=0,
)  # fmt: skip


@pytest.mark.parametrize("family", ["mixtral", "deepseek"])
def test_routers_of_transformers(family):
    config = MixtralConfig(**MOE, num_local_experts=4) if family == "mixtral" else None
    model = AutoModelForCausalLM.from_config(config or DeepseekV3Config(**MOE, **MLA))
    layers = model.model.layers
    routers = [layer.mlp.gate for layer in layers]
    with torch.no_grad():
        for i, router in enumerate(routers):
            nn.init.normal_(router.weight, std=1.0 + i)
    inputs = {}
    for i, router in enumerate(routers):
        router.register_forward_pre_hook(lambda m, args, i=i: inputs.update({i: args[0].detach()}))
    watch = RouterWatch(model)
    model(input_ids=torch.arange(1, 11).view(2, 5))
    report = watch.report()
    assert len(report) == 2 and all(seen.tokens == 10 for seen in report.values())
    for i, seen in enumerate(report.values()):
        values = inputs[i].flatten(0, -2) @ routers[i].weight.detach().T
        assert seen.largest == pytest.approx(values.abs().max().item(), rel=1e-5)


def test_a_model_without_router_is_refused():
    with pytest.raises(ValueError, match="model is Linear"):
        RouterWatch(nn.Linear(2, 2))


# Updates ----------------------------------------------------------------------------------------


def test_update_ratios_by_hand():
    before = {"a": torch.tensor([3.0, 4.0]), "b": torch.zeros(2), "c": torch.ones(2)}
    after = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, 1.0]), "c": torch.ones(2)}
    ratios = update_ratios(before, after)
    assert (ratios["a"].ratio, ratios["a"].unchanged) == (0.1, 0.5)
    assert (ratios["b"].ratio, ratios["c"].ratio) == (math.inf, 0.0)
    assert ratios["c"].unchanged == 1.0


def test_an_update_that_bfloat16_swallows():
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    before = {"w": p.detach().clone()}
    p.grad = torch.ones_like(p)
    torch.optim.AdamW([p], lr=6e-4, weight_decay=0.0).step()
    assert update_ratios(before, {"w": p})["w"].unchanged == 1.0
    wide = nn.Parameter(torch.ones(4))
    wide.grad = torch.ones_like(wide)
    torch.optim.AdamW([wide], lr=6e-4, weight_decay=0.0).step()
    ratio = update_ratios({"w": torch.ones(4)}, {"w": wide})["w"]
    assert ratio.unchanged == 0 and ratio.ratio == pytest.approx(6e-4, rel=1e-3)


def test_a_nan_update_is_nan():
    ratio = update_ratios({"w": torch.ones(2)}, {"w": torch.tensor([1.0, math.nan])})["w"]
    assert math.isnan(ratio.ratio) and ratio.unchanged == 0.5


def test_bad_input_of_update_ratios():
    w = torch.ones(2)
    with pytest.raises(ValueError, match=r"differ in \['b'\]"):
        update_ratios({"a": w}, {"a": w.clone(), "b": w})
    with pytest.raises(ValueError, match=r"a has shape \(2,\)"):
        update_ratios({"a": w}, {"a": torch.ones(3)})
    with pytest.raises(ValueError, match="same memory"):
        update_ratios({"a": w}, {"a": w})


# Adam -------------------------------------------------------------------------------------------


def stepped(*grads, optimizer=torch.optim.AdamW, **options):
    """An Adam of one parameter after these gradients."""
    p = nn.Parameter(torch.zeros(len(grads[0])))
    made = optimizer([p], lr=0.1, **options)
    for grad in grads:
        p.grad = torch.tensor(grad)
        made.step()
    return p, made


def test_the_share_below_epsilon_is_of_the_corrected_moment():
    """After one step √v̂ = |g|; √v alone would be smaller by √(1 − β₂)."""
    _, made = stepped([1e-3, 2e-8, 5e-9, 0.0])
    (state,) = adam_states(made).values()
    assert (state.step, state.eps, state.below_eps, state.zeros) == (1, 1e-8, 0.5, 0.25)
    assert state.smallest == 0.0 and state.largest_step == pytest.approx(1.0, rel=1e-4)
    _, made = stepped([1e-3, 2e-8, 5e-9, 0.0], eps=1e-15)  # MiniMax-M1's
    (state,) = adam_states(made).values()
    assert state.below_eps == 0.25


def test_two_steps_by_hand():
    _, made = stepped([1.0], [3.0], betas=(0.5, 0.75))
    m, v = (0.5 * 0.5 * 1 + 0.5 * 3) / (1 - 0.25), (0.75 * 0.25 + 0.25 * 9) / (1 - 0.5625)
    (state,) = adam_states(made).values()
    assert state.median == pytest.approx(math.sqrt(v), rel=1e-6)
    assert state.largest_step == pytest.approx(m / math.sqrt(v), rel=1e-6)
    assert not state.poisoned


def test_a_dead_entry_never_moves_again_while_its_weight_is_finite():
    """(1 − β₂)·1e25² overflows float32: v = inf for ever, and every later step is 0."""
    p, made = stepped([1.0, 1e25])
    where = p.detach().clone()
    for _ in range(3):
        p.grad = torch.ones(2)
        made.step()
    (state,) = adam_states(made).values()
    assert (state.dead, state.nonfinite, state.poisoned) == (1, 0, True)
    assert bool(p.isfinite().all()) and p[0] != where[0]
    torch.testing.assert_close(p[1], where[1], rtol=0, atol=0)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_poisoned_entry_is_counted(fault):
    p, made = stepped([1.0, fault])
    (state,) = adam_states(made).values()
    assert (state.nonfinite, state.dead) == (1, 0) and math.isnan(state.largest_step)
    assert math.isnan(p[1].item()) and state.poisoned


def test_a_negative_second_moment_is_counted():
    p, made = stepped([1.0, 1.0])
    made.state[p]["exp_avg_sq"][0] = -1.0
    (state,) = adam_states(made).values()
    assert state.negative == 1 and state.poisoned


def test_amsgrad_divides_by_the_largest():
    _, made = stepped([4.0], [0.0], amsgrad=True, betas=(0.9, 0.5))
    (state,) = adam_states(made).values()
    assert state.median == pytest.approx(math.sqrt(8.0 / 0.75), rel=1e-6)


def test_names_and_the_adam_part_of_muon():
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    made = Muon(model.named_parameters())
    model(torch.randn(2, 4, generator=torch.Generator().manual_seed(0))).square().sum().backward()
    made.step()
    names = {p: name for name, p in model.named_parameters()}
    assert set(adam_states(made, names)) == {"0.bias", "1.weight", "1.bias"}
    assert all("." in name for name in adam_states(made))


def test_an_optimizer_without_second_moments_is_refused():
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        made = optimizer([nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(ValueError, match=f"optimizer is {optimizer.__name__}"):
            adam_states(made)


# Gradients by layer -----------------------------------------------------------------------------


def graded(**grads):
    out = []
    for name, grad in grads.items():
        p = nn.Parameter(torch.zeros(2))
        p.grad = None if grad is None else torch.tensor(grad)
        out.append((name.replace("__", "."), p))
    return out


def test_statistics_of_a_layer_by_hand():
    found = gradient_statistics(
        graded(m__layers__0__q__weight=[3.0, 0.0], m__layers__0__k=[0.0, -4.0],
               m__layers__1__q=None, lm_head__weight=[1.0, 1.0], scale=[0.0, 2.0])
    )  # fmt: skip
    assert list(found) == ["m.layers.0", "m.layers.1", "lm_head", "scale"]
    first, empty = found["m.layers.0"], found["m.layers.1"]
    assert (first.norm, first.largest, first.zeros) == (5.0, 4.0, 0.5)
    assert (first.nonfinite, first.size, first.missing) == (0, 4, 0)
    assert (empty.norm, empty.size, empty.missing) == (0.0, 0, 1) and math.isnan(empty.zeros)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_a_fault_stays_in_its_layer_and_is_seen_there(fault):
    found = gradient_statistics(graded(a__w=[9.0, 1.0], b__w=[fault, 1.0], b__v=[7.0, 1.0]))
    assert found["b"].nonfinite == 1 and found["a"].nonfinite == 0 and found["a"].largest == 9.0
    for value in (found["b"].norm, found["b"].largest):
        assert math.isnan(value) if math.isnan(fault) else value == math.inf


def test_layers_and_parameters_add_up_to_the_whole():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    model(x).square().sum().backward()
    for by, count in (("layer", 2), ("parameter", 4)):
        found = gradient_statistics(model.named_parameters(), by=by)
        assert len(found) == count
        whole = math.sqrt(sum(part.norm**2 for part in found.values()))
        assert whole == pytest.approx(float(gradient_norm(model.parameters())), rel=1e-12)
    with pytest.raises(ValueError, match="by='module'"):
        gradient_statistics(model.named_parameters(), by="module")
