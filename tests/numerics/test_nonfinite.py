"""Planted faults, each found by name; what is no fault; what is hidden; nothing left behind."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, MixtralConfig

from stablerl_core.numerics import find_nonfinite

BAD = 7  # the token that brings the fault
ROW, COLUMN = 2, 3


class Middle(nn.Module):
    """Some arithmetic of the hidden states x (B, T, d)."""

    def __init__(self, formula):
        super().__init__()
        self.formula = formula

    def forward(self, x):
        return self.formula(x)


class Planted(nn.Module):
    """Embedding, a formula, a linear head; token 7 is embedded as `value`, others as 1 to 2."""

    def __init__(self, formula, value, recompute=False):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.embed, self.middle = nn.Embedding(8, 4), Middle(formula)
        self.head = nn.Linear(4, 5)
        self.recompute = recompute
        with torch.no_grad():
            self.embed.weight.copy_(1 + torch.rand(8, 4, generator=generator))
            self.embed.weight[BAD] = value
            self.head.weight.copy_(torch.randn(5, 4, generator=generator))

    def forward(self, ids):
        x = self.embed(ids)
        x = checkpoint(self.middle, x, use_reentrant=False) if self.recompute else self.middle(x)
        return self.head(x)


def ids():
    out = torch.arange(4 * 6).view(4, 6) % BAD
    out[ROW, COLUMN] = BAD
    return out


def mean_square(model, batch):
    return model(batch).square().mean()


FORWARD = {
    "0/0": (lambda x: x / x.sum(-1, keepdim=True), 0.0, "aten.div", "nan"),
    "log of a negative": (lambda x: torch.log(x), -1.0, "aten.log", "nan"),
    "root of a negative": (lambda x: x.sqrt(), -1.0, "aten.sqrt", "nan"),
    "1/0": (lambda x: 1 / x, 0.0, "aten.reciprocal", "inf"),
}


@pytest.mark.parametrize("fault", FORWARD)
def test_a_fault_of_the_forward_is_found_by_module_operation_and_token(fault):
    formula, value, operation, kind = FORWARD[fault]
    report = find_nonfinite(Planted(formula, value), ids(), loss=mean_square)
    first = report.first
    assert (first.module, first.operation, first.phase) == ("middle", operation, "forward")
    assert (first.value, first.source) == (kind, "operation")
    assert (first.sequence, first.token) == (ROW, COLUMN) and first.index == (ROW, COLUMN, 0)
    assert report.sequences == (ROW,) and report.prefix == COLUMN + 1
    assert report.repeatable and report.repeats == (first,) * 3
    assert report.replays == {"float64": "nonfinite"} and report.cause == "path"
    assert "loss" in report.reached and "head.weight" in report.reached


TRAPS = {
    "root of zero": (lambda x: torch.where(x > 0, x.sqrt(), 0.0), "SqrtBackward0"),
    "norm of zero": (lambda x: x.pow(2).sum(-1, keepdim=True).sqrt() * x, "SqrtBackward0"),
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("trap", TRAPS)
def test_a_finite_loss_with_a_nan_gradient_is_named_by_the_forward_it_belongs_to(trap, recompute):
    formula, node = TRAPS[trap]
    model = Planted(formula, 0.0, recompute)
    report = find_nonfinite(model, ids(), loss=mean_square)
    assert report.first.phase == "backward" and report.first.module == "middle"
    assert report.first.operation.startswith(node + ": aten.")
    assert report.reached == ("embed.weight",), "head and loss are finite"
    assert (report.first.sequence, report.first.token) == (ROW, COLUMN)
    assert report.sequences == (ROW,) and report.prefix == COLUMN + 1


@pytest.mark.parametrize("recompute", [False, True])
def test_the_branch_not_taken_is_named_and_so_is_where_it_returns(recompute):
    """`where` hides 1/0 from the loss, not from the gradient: 0·∞."""
    model = Planted(lambda x: torch.where(x > 0, 1 / x, 0.0), 0.0, recompute)
    report = find_nonfinite(model, ids(), loss=mean_square, repeats=2)
    assert (report.first.operation, report.first.module) == ("aten.reciprocal", "middle")
    assert report.nan.operation.startswith("ReciprocalBackward0") and report.nan.module == "middle"
    assert report.first.value == "inf" and report.nan.phase == "backward"
    assert report.reached == ("embed.weight",) and report.sequences == (ROW,)


def test_infinity_that_becomes_nan_is_told_apart_from_what_made_the_nan():
    """0·inf: the mask hides nothing."""
    report = find_nonfinite(Planted(lambda x: x.log() * (x > 0), 0.0), ids(), loss=mean_square)
    assert (report.first.operation, report.first.value) == ("aten.log", "inf")
    assert (report.nan.operation, report.nan.value) == ("aten.mul", "nan")


def test_overflow_of_float16_repeats_and_only_the_replay_shows_it_is_the_precision():
    model = Planted(lambda x: x * x / 1000, 300.0).half()
    report = find_nonfinite(model, ids(), loss=lambda m, b: m(b).float().mean())
    assert (report.first.module, report.first.operation) == ("middle", "aten.mul")
    assert report.repeatable, "a fixed batch repeats it: that alone does not rule out precision"
    assert report.replays == {"float32": "finite", "float64": "finite"}
    assert report.cause == "precision"
    assert model.head.weight.dtype == torch.float16


def test_an_extreme_batch_of_numbers():
    model = nn.Sequential(nn.Linear(3, 3), Middle(torch.exp))
    batch = torch.ones(5, 3)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    batch[4, 1] = 1e4
    report = find_nonfinite(model, batch, loss=lambda m, b: m(b).mean())
    assert (report.first.module, report.first.operation) == ("1", "aten.exp")
    assert report.sequences == (4,) and report.prefix is None
    assert (report.first.sequence, report.first.token) == (4, None)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_poisoned_parameter_is_named_and_is_not_the_batch(value):
    model = Planted(lambda x: x, 1.0)
    with torch.no_grad():
        model.head.weight[3, 1] = value
    report = find_nonfinite(model, ids(), loss=mean_square)
    assert report.first.source == "parameter head.weight" and report.first.module == "head"
    assert report.cause == "given" and report.first.sequence is None


def test_a_poisoned_input_is_named_by_its_entry():
    model = nn.Linear(3, 2)
    batch = {"input": torch.ones(4, 3)}
    batch["input"][1, 2] = math.nan
    report = find_nonfinite(model, batch)
    assert report.first.source == "batch input" and report.first.index == (1, 2)
    assert report.reached == ("outputs",) and report.sequences == (1,)


class Flaky(nn.Module):
    """A kernel that fails on some calls."""

    def __init__(self, when):
        super().__init__()
        self.calls, self.when = 0, when

    def forward(self, x):
        self.calls += 1
        return x / (0.0 if self.calls in self.when else 1.0)


def test_a_fault_that_comes_and_goes_is_random_and_not_searched_for_in_the_batch():
    report = find_nonfinite(Flaky({2}), torch.ones(4, 2), loss=lambda m, b: m(b).sum())
    assert report.cause == "random" and report.repeatable is False
    assert [r is not None for r in report.repeats] == [False, True, False]
    assert report.sequences is None and report.first.operation == "aten.div"


def test_a_fault_that_moves_is_random():
    class Moving(Flaky):
        def forward(self, x):
            self.calls += 1
            return x / 0 if self.calls == 1 else (-x).log()

    report = find_nonfinite(Moving(()), torch.ones(2, 2), replay=False)
    assert report.cause == "random" and all(report.repeats)


def test_one_run_says_nothing_about_repeating():
    report = find_nonfinite(Flaky({1}), torch.ones(2, 2), repeats=1)
    assert report.found and report.repeatable is None and report.cause == "unknown"


# What is no fault, and what hides one ----------------------------------------------------------


def attention(x, last=False):
    """Causal attention with −inf above the diagonal; `last` hides all keys of the first query."""
    scores = x @ x.mT
    hidden = torch.ones(x.shape[1], x.shape[1]).triu(0 if last else 1).bool()
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1) @ x


def test_masking_with_infinity_is_no_fault():
    report = find_nonfinite(Planted(attention, 1.0), ids(), loss=mean_square)
    assert not report.found and report.cause == "none" and report.hidden == ()
    assert report.reached == () and report.replays == {} and report.sequences is None


@pytest.mark.parametrize("operation", ["aten.div", "aten.reciprocal"])
def test_the_mask_does_not_take_the_blame(operation):
    """Neither of a NaN nor of another infinity, though it was there before."""

    def formula(x):
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf).triu(1)
        bad = x[..., :1] / x[..., 1:2] if operation == "aten.div" else 1 / x[..., :1]
        return torch.softmax(x @ x.mT + mask + bad, -1) @ x

    report = find_nonfinite(Planted(formula, 0.0), ids(), loss=mean_square)
    assert report.first.operation == operation and report.first.token == COLUMN


def test_what_is_overwritten_is_no_cause():
    model = Planted(lambda x: torch.full_like(x, math.nan).copy_(1 / x), 0.0)
    report = find_nonfinite(model, ids(), loss=mean_square, repeats=1, bisect=False)
    assert report.first.operation == "aten.reciprocal"


def test_a_query_without_a_key_is_the_softmax():
    report = find_nonfinite(
        Planted(lambda x: attention(x, last=True), 1.0), ids(), loss=mean_square
    )
    assert report.first.operation == "aten._softmax" and report.first.value == "nan"
    assert report.first.token == 0


def test_banned_tokens_are_no_fault_of_the_outputs():
    class Banning(nn.Module):
        def forward(self, x):
            return x.masked_fill(x > 1, -math.inf)

    assert not find_nonfinite(Banning(), torch.arange(4.0).view(2, 2)).found


@pytest.mark.parametrize("hide", ["nan_to_num", "nanmean", "where"])
def test_a_nan_that_is_hidden_is_listed(hide):
    ways = {
        "nan_to_num": lambda y: y.nan_to_num().sum(),
        "nanmean": lambda y: y.nanmean(),
        "where": lambda y: torch.where(y.isnan(), 0.0, y).sum(),
    }
    rewards = torch.tensor([1.0, math.nan])

    def loss(model, batch):
        with torch.no_grad():
            constant = ways[hide](batch["rewards"])
        return model(batch["x"]).sum() * constant

    report = find_nonfinite(nn.Linear(2, 1), {"x": torch.ones(2, 2), "rewards": rewards}, loss=loss)
    assert not report.found
    assert report.hidden[0].source == "batch rewards" and report.hidden[0].index == (1,)


def test_a_captured_tensor_is_said_to_come_from_outside():
    advantages = torch.tensor([0.0, math.nan])
    model = nn.Linear(2, 1)
    report = find_nonfinite(
        model, torch.ones(2, 2), loss=lambda m, b: (m(b)[:, 0] * advantages).sum(), bisect=False
    )
    assert report.first.source == "a tensor from outside" and report.first.module == "(loss)"
    assert report.cause == "given"


# A real model, parts, and what is left behind --------------------------------------------------


def moe():
    config = MixtralConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=8, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=16, sliding_window=None, pad_token_id=0,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def test_a_mixture_of_experts_overflows_where_it_was_made_to():
    model, tokens = moe(), torch.arange(2 * 5).view(2, 5) + 1
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    assert not find_nonfinite(model, batch, repeats=1).found
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight.mul_(1e38)
        model.model.layers[1].self_attn.o_proj.weight.mul_(1e38)
    report = find_nonfinite(model, batch, repeats=2)
    assert report.first.module.startswith("model.layers.1.self_attn")
    assert report.first.value == "inf" and report.repeatable and "loss" in report.reached
    assert report.sequences == (0,) and report.prefix is not None
    # In float64 it passes there, and only the norm, which casts to float32, cannot take it.
    assert report.replays == {"float64": "elsewhere: model.layers.1.post_attention_layernorm"}
    assert report.cause == "precision"


def test_a_fault_that_takes_all_sequences_is_not_blamed_on_one():
    def loss(model, batch):
        return model(batch).mean() / float(len(batch) < 4)

    report = find_nonfinite(nn.Linear(2, 1), torch.ones(4, 2), loss=loss)
    assert report.found and report.sequences == (0, 1, 2, 3)


def test_nothing_is_left_behind():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), Middle(torch.log))
    model[0].weight.grad = torch.full((3, 3), 2.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    stream = torch.get_rng_state()
    report = find_nonfinite(model, torch.ones(4, 3) * torch.arange(4.0)[:, None])
    assert report.first.operation == "aten.log" and report.sequences is None
    assert report.not_split.startswith("part of the batch does not run: Expected more than 1")
    assert torch.equal(torch.get_rng_state(), stream)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(model[0].weight.grad, torch.full((3, 3), 2.0))
    assert model[0].bias.grad is None
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_an_error_of_the_model_leaves_nothing_behind_either():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    with pytest.raises(RuntimeError, match="shapes"):
        find_nonfinite(model, torch.ones(2, 3))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_replay_that_cannot_run_is_not_called_finite():
    class Only32(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2))

        def forward(self, x):
            if x.dtype == torch.float64:
                raise NotImplementedError("no such kernel")
            return F.relu(x) / self.weight

    report = find_nonfinite(Only32(), torch.ones(2, 2))
    assert report.replays == {"float64": "not run: no such kernel"} and report.cause == "unknown"


def test_bad_input():
    model = nn.Linear(2, 1)
    with pytest.raises(ValueError, match="repeats=0"):
        find_nonfinite(model, torch.ones(2, 2), repeats=0)
    with pytest.raises(ValueError, match="batch is a list"):
        find_nonfinite(model, [torch.ones(2, 2)])
    with pytest.raises(ValueError, match="batch holds no tensor"):
        find_nonfinite(model, {"x": 1})
    with pytest.raises(ValueError, match=r"loss returned \(2, 1\)"):
        find_nonfinite(model, torch.ones(2, 2), loss=lambda m, b: m(b))


def test_a_loss_that_cannot_take_part_of_the_batch_costs_only_the_bisection():
    weights = torch.tensor([1.0, math.inf])
    model = nn.Linear(2, 1)
    report = find_nonfinite(model, torch.ones(2, 2), loss=lambda m, b: m(b)[:, 0] @ weights)
    assert report.first.source == "a tensor from outside"
    assert report.sequences is None and "does not run" in report.not_split


def test_a_loss_that_cannot_take_fewer_tokens_keeps_the_sequence_that_was_found():
    def pairs(model, batch):  # needs an even number of tokens
        return model(batch)[..., 0].unflatten(1, (-1, 2)).sum(-1).mean()

    report = find_nonfinite(Planted(torch.log, -1.0), ids(), loss=pairs, repeats=1)
    assert report.sequences == (ROW,) and report.prefix is None
    assert report.not_split.startswith("part of the batch does not run")
