"""Objectives: what must not change the loss, what must not leak into it, what is refused.

Values and expected gradients are in tests/exact/test_enumerated_objectives.py.
"""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.policy import (
    OBJECTIVES,
    ObjectiveDiagnostics,
    aggregate,
    balance_bounds,
    loss_denominator,
    merge_diagnostics,
    policy_objective,
)

AGGREGATIONS = ["token", "sequence", "constant"]
NAMES = sorted(OBJECTIVES)
CASES = [(n, s) for n in NAMES for s in ("rows", "tokens") if (n, s) != ("gspo", "tokens")]
INF, NAN = math.inf, math.nan


def batch(seed, rows, columns, shape="rows"):
    """(logp, old_logp, advantages, mask) in float64; some rows may be empty, ratios 0.4 to 2.5."""
    generator = torch.Generator().manual_seed(seed)
    logp = -3 * torch.rand(rows, columns, generator=generator, dtype=torch.float64)
    old_logp = (
        logp + torch.rand(rows, columns, generator=generator, dtype=torch.float64) * 1.8 - 0.9
    )
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    size = (rows,) if shape == "rows" else (rows, columns)
    advantages = torch.randn(size, generator=generator, dtype=torch.float64)
    return logp, old_logp, advantages, torch.arange(columns) < lengths


def run(name, logp, *rest, **options):
    """Loss, gradient with respect to logp, and diagnostics."""
    logp = logp.clone().requires_grad_()
    loss, seen = policy_objective(name, logp, *rest, **options)
    (grad,) = torch.autograd.grad(loss, logp)
    return loss.detach(), grad, seen


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def same(actual, expected):
    """Equal loss, gradient and diagnostics, to rounding."""
    close(actual[0], expected[0])
    close(actual[1], expected[1])
    numbers = [
        torch.tensor(dataclasses.astuple(seen)).double() for seen in (actual[2], expected[2])
    ]
    torch.testing.assert_close(*numbers, rtol=1e-6, atol=1e-9)


def drawn_by_another(name, logp, seed):
    """A sampler's log-probabilities, for the objectives that read them."""
    if not OBJECTIVES[name].sampler:
        return {}
    generator = torch.Generator().manual_seed(seed + 7)
    return {"sampler_logp": logp + torch.randn(logp.shape, generator=generator).double()}


def every(test):
    """All objectives, advantages a sequence and a token; sizes and numbers by hypothesis."""
    sizes = st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6)
    test = settings(max_examples=25)(given(*sizes, st.sampled_from(AGGREGATIONS))(test))
    return pytest.mark.parametrize("name, shape", CASES)(test)


@every
def test_padding_changes_nothing(name, shape, seed, rows, columns, aggregation):
    """Columns appended on the right, full of NaN and infinities, with mask False."""
    logp, old_logp, advantages, mask = batch(seed, rows, columns, shape)
    drawn = drawn_by_another(name, logp, seed)
    expected = run(name, logp, old_logp, advantages, mask, aggregation=aggregation, **drawn)

    def padded(x, *values):
        return torch.cat([x, torch.tensor(values, dtype=x.dtype).expand(rows, -1)], dim=1)

    if shape == "tokens":
        advantages = padded(advantages, NAN, 1e30, INF)
    actual = run(
        name,
        padded(logp, NAN, -INF, 1e30),
        padded(old_logp, -INF, NAN, -1e30),
        advantages,
        padded(mask, False, False, False),
        aggregation=aggregation,
        **{key: padded(x, NAN, INF, -INF) for key, x in drawn.items()},
    )
    assert torch.equal(actual[1][:, columns:], torch.zeros(rows, 3, dtype=torch.float64))
    same((actual[0], actual[1][:, :columns], actual[2]), expected)


@every
def test_permuting_the_sequences_permutes_the_gradient(
    name, shape, seed, rows, columns, aggregation
):
    tensors = batch(seed, rows, columns, shape)
    drawn = drawn_by_another(name, tensors[0], seed)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed + 1))
    expected = run(name, *tensors, aggregation=aggregation, **drawn)
    drawn = {key: x[order] for key, x in drawn.items()}
    actual = run(name, *(x[order] for x in tensors), aggregation=aggregation, **drawn)
    same(actual, (expected[0], expected[1][order], expected[2]))


@every
def test_micro_batches_add_up_to_the_batch(name, shape, seed, rows, columns, aggregation):
    """Uneven parts, each with the whole batch's denominator and, for bapo, its bounds."""
    tensors = batch(seed, rows, columns, shape)
    drawn = drawn_by_another(name, tensors[0], seed)
    expected = run(name, *tensors, aggregation=aggregation, **drawn)
    whole = {"aggregation": aggregation, "denominator": loss_denominator(tensors[3], aggregation)}
    if name == "bapo":
        found = balance_bounds(*tensors, **drawn)
        whole |= {"clip_low": found.clip_low, "clip_high": found.clip_high}
    cut = 1 + seed % rows
    parts = []
    for piece in (slice(0, cut), slice(cut, None)):
        own = {key: x[piece] for key, x in drawn.items()}
        parts.append(run(name, *(x[piece] for x in tensors), **whole, **own))
    loss = sum(part[0] for part in parts)
    grad = torch.cat([part[1] for part in parts])
    same((loss, grad, merge_diagnostics([part[2] for part in parts])), expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_with_their_own_denominators_do_not_add_up(aggregation):
    """The mistake that the argument is there for: mean of the parts' means, uneven lengths."""
    logp, old_logp, advantages, _ = batch(0, 3, 4)
    tensors = logp, old_logp, advantages, torch.arange(4) < torch.tensor([[4], [1], [2]])
    expected = run("grpo", *tensors, aggregation=aggregation)[1]
    parts = [
        run("grpo", *(x[piece] for x in tensors), aggregation=aggregation)[1] / 2
        for piece in (slice(0, 1), slice(1, None))
    ]
    assert (torch.cat(parts) - expected).norm() / expected.norm() > 0.05


def test_the_three_aggregations_by_hand():
    """Sequences of 1, 3 and 0 tokens; the empty one counts among the three sequences."""
    values = torch.tensor([[1.0, 9.0, 9.0], [1.0, 2.0, 6.0], [9.0, 9.0, 9.0]])
    mask = torch.tensor([[True, False, False], [True, True, True], [False, False, False]])
    for aggregation, total, count in (("token", 10, 4), ("sequence", 4, 3), ("constant", 10, 3)):
        assert loss_denominator(mask, aggregation) == count
        assert aggregate(values, mask, aggregation).item() == pytest.approx(total / count)
        for denominator in (7, 7.0, torch.tensor(7)):
            actual = aggregate(values, mask, aggregation, denominator)
            assert actual.item() == pytest.approx(total / 7)


NO_DUAL = {"dual_clip": INF}
SOURCES = {  # aggregation, advantage scale, options
    "reinforce": ("constant", "none", {}),
    "grpo": ("sequence", "std", {"clip_low": 0.2, "clip_high": 0.2} | NO_DUAL),
    "dr_grpo": ("constant", "none", {"clip_low": 0.2, "clip_high": 0.2} | NO_DUAL),
    "dapo": ("token", "std", {"clip_low": 0.2, "clip_high": 0.28} | NO_DUAL),
    "gspo": ("sequence", "std", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "gspo_token": ("sequence", "std", {"clip_low": 3e-4, "clip_high": 4e-4}),
    "cispo": ("token", "std", {"clip_low": INF, "clip_high": 4.0}),
    "sapo": ("sequence", "std", {"tau_positive": 1.0, "tau_negative": 1.05}),
    "bapo": ("sequence", "std", {"clip_low": None, "clip_high": None} | NO_DUAL),
    "minirl": ("constant", "none", {"clip_low": 0.2, "clip_high": 0.27, "ratio_cap": 5.0}),
}


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_the_sources(name):
    aggregation, scale, options = SOURCES[name]
    entry = OBJECTIVES[name]
    assert (entry.aggregation, entry.scale, entry.options) == (aggregation, scale, options)
    tensors = batch(1, 4, 5)
    same(run(name, *tensors), run(name, *tensors, aggregation=aggregation, **options))
    others = [run(name, *tensors, aggregation=a)[0] for a in AGGREGATIONS if a != aggregation]
    assert all(abs(other - run(name, *tensors)[0]) > 1e-3 for other in others)


@pytest.mark.parametrize("name", NAMES)
def test_without_old_logp_the_step_is_on_policy(name):
    logp, _, advantages, mask = batch(2, 4, 5)
    actual = run(name, logp, None, advantages, mask)
    same(actual, run(name, logp, logp, advantages, mask))
    seen = actual[2]
    assert (seen.ratio_min, seen.ratio_mean, seen.ratio_max) == (1, 1, 1)
    assert (seen.step_kl_k1, seen.step_kl_k3, seen.clip_fraction) == (0, 0, 0)


def test_a_loss_of_zero_with_a_gradient_is_healthy():
    """On-policy with centred advantages GRPO prints 0 (not −0) and still learns."""
    logp = torch.full((2, 3), -1.0)
    loss, grad, _ = run(
        "grpo", logp, None, torch.tensor([1.0, -1.0]), torch.ones(2, 3, dtype=torch.bool)
    )
    assert str(loss.item()) == "0.0"
    close(grad, torch.tensor([[-1.0] * 3, [1.0] * 3]) / 6)


def test_advantages_a_sequence_are_the_same_as_advantages_a_token():
    logp, old_logp, advantages, mask = batch(3, 4, 4)  # B = T: where a wrong broadcast would hide
    for name in NAMES:  # gspo too: what it refuses is a difference within a sequence
        expected = run(name, logp, old_logp, advantages[:, None].repeat(1, 4), mask)
        same(run(name, logp, old_logp, advantages, mask), expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("shape", [(2, 3), (2, 0), (0, 3)])
@pytest.mark.parametrize("fill", [-1.0, NAN])
def test_no_counted_token_gives_a_connected_zero(name, aggregation, shape, fill):
    logp = torch.full(shape, fill, requires_grad=True)
    mask = torch.zeros(shape, dtype=torch.bool)
    loss, seen = policy_objective(
        name, logp, logp, torch.ones(shape[0]), mask, aggregation=aggregation
    )
    loss.backward()
    assert str(loss.item()) == "0.0"
    assert torch.equal(logp.grad, torch.zeros(shape))
    assert seen == ObjectiveDiagnostics(0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("aggregation", ["sequence", "constant"])
def test_an_empty_row_keeps_its_place_in_the_denominator(name, aggregation):
    """So a sequence that a filter masks does not raise the weight of its neighbours."""
    logp, old_logp, advantages, _ = batch(4, 3, 2)
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    others = [0, 2]
    expected = run(
        name, *(x[others] for x in (logp, old_logp, advantages, mask)), aggregation=aggregation
    )
    actual = run(name, logp, old_logp, advantages, mask, aggregation=aggregation)
    close(actual[0], expected[0] * 2 / 3)
    close(actual[1][others], expected[1] * 2 / 3)
    assert actual[1][1].tolist() == [0, 0]
    assert actual[2] == expected[2]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(name, dtype):
    logp, old_logp, advantages, mask = batch(5, 4, 6)
    half = logp.to(dtype), old_logp.to(dtype), advantages.to(dtype), mask
    loss, grad, seen = run(name, *half)
    exact_loss, exact_grad, exact = run(
        name, *(x.double() if x.is_floating_point() else x for x in half)
    )
    assert loss.dtype == torch.float32 and exact_loss.dtype == torch.float64
    assert grad.dtype == dtype  # the gradient goes back in the type that came in
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grad, exact_grad.to(dtype), rtol=0.01, atol=1e-3)
    assert dataclasses.astuple(seen) == pytest.approx(
        dataclasses.astuple(exact), rel=1e-5, abs=1e-7
    )


def test_diagnostics_by_hand():
    """Ratios ½, 2, 1, 2: clipped where the sign of Â makes the clip's gradient zero."""
    ratio = torch.tensor([[0.5, 2.0], [1.0, 2.0]], dtype=torch.float64)
    mask = torch.ones(2, 2, dtype=torch.bool)
    old_logp = torch.full((2, 2), -2.0, dtype=torch.float64)
    advantages = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    loss, _, seen = run("grpo", old_logp + ratio.log(), old_logp, advantages, mask)
    assert loss.item() == pytest.approx(((0.8 + 2) / 2 + (-1 - 1.2) / 2) / 2)
    log_2 = math.log(2)
    assert dataclasses.asdict(seen) == pytest.approx(
        dict(
            tokens=4,
            ratio_mean=1.375,
            ratio_min=0.5,
            ratio_max=2.0,
            clip_fraction=0.5,
            clip_fraction_low=0.25,
            clip_fraction_high=0.25,
            step_kl_k1=-log_2 / 4,
            step_kl_k3=(5.5 - 4 - log_2) / 4,
            gate_mean=0.5,
        )
    )


@every
def test_the_clip_fraction_is_the_share_of_tokens_without_gradient(
    name, shape, seed, rows, columns, aggregation
):
    """Except for cispo, which leaves none without: see the next test."""
    tensors = batch(seed, rows, columns, shape)
    _, grad, seen = run(name, *tensors, aggregation=aggregation)
    mask = tensors[3]
    without = (grad[mask] == 0).sum().item()
    assert seen.tokens == mask.sum()
    clipped = seen.clip_fraction * max(1, seen.tokens)
    assert 0 == without if name == "cispo" else clipped == pytest.approx(without)
    assert seen.clip_fraction == pytest.approx(seen.clip_fraction_low + seen.clip_fraction_high)


def test_capped_weights_count_as_clipped_in_cispo_and_the_gate_tells_how_much_is_left():
    """Ratios ¼, 1, 5, 10, of both signs, bounds ½ and 4: weights ½, 1, 4, 4."""
    ratio = torch.tensor([[0.25, 1.0, 5.0, 10.0], [0.25, 1.0, 5.0, 10.0]], dtype=torch.float64)
    advantages, mask = torch.tensor([1.0, -1.0]).double(), torch.ones(2, 4, dtype=torch.bool)
    options = {"clip_low": 0.5, "clip_high": 3.0}
    _, grad, seen = run("cispo", ratio.log(), torch.zeros_like(ratio), advantages, mask, **options)
    close(-8 * grad, torch.tensor([[0.5, 1, 4, 4], [-0.5, -1, -4, -4]]).double())
    assert (seen.clip_fraction_low, seen.clip_fraction_high) == (0.25, 0.5)
    assert seen.gate_mean == pytest.approx((2 + 1 + 0.8 + 0.4) / 4)
    _, _, seen = run("cispo", ratio.log(), torch.zeros_like(ratio), 0 * advantages, mask, **options)
    assert seen.clip_fraction == 0


def test_the_gate_of_sapo_and_of_minirl():
    """Ratios 1 and 2; MiniRL's mask takes the second, its cap halves what is left of the first."""
    ratio = torch.tensor([[1.0, 2.0]], dtype=torch.float64)
    rest = torch.zeros_like(ratio), torch.ones(1).double(), torch.ones(1, 2, dtype=torch.bool)
    _, _, seen = run("sapo", ratio.log(), *rest)
    assert seen.gate_mean == pytest.approx((1 + math.cosh(0.5) ** -2) / 2)
    _, _, seen = run("minirl", ratio.log(), *rest, sampler_logp=torch.full_like(ratio, 0.1).log())
    assert (seen.clip_fraction_high, seen.gate_mean) == (0.5, pytest.approx(0.25))


def test_diagnostics_are_frozen_and_detached():
    logp = torch.full((1, 2), -1.0, requires_grad=True)
    _, seen = policy_objective("grpo", logp, None, torch.ones(1), torch.ones(1, 2).bool())
    assert all(isinstance(value, (int, float)) for value in dataclasses.astuple(seen))
    with pytest.raises(dataclasses.FrozenInstanceError):
        seen.tokens = 0


UNBOUNDED = ["bapo", "dapo", "dr_grpo", "grpo", "gspo", "gspo_token"]  # for Â < 0 and a large r


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("log_ratio", [-1e3, -100.0, 100.0, 1e3])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_that_overflows_leaves_no_nan(name, log_ratio, advantage):
    """e^100 is inf in float32. Where the term has a flat side or a cap, all is finite."""
    logp, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    arguments = logp, logp - log_ratio, torch.tensor([advantage]), mask
    loss, grad, seen = run(name, *arguments)
    assert not loss.isnan() and not grad.isnan().any()
    unbounded = name in UNBOUNDED and advantage < 0 and log_ratio > 0
    assert bool(loss.isfinite()) is not unbounded and bool(grad.isfinite().all()) is not unbounded
    assert seen.ratio_max == (INF if log_ratio > 0 else 0) or log_ratio == -100
    if unbounded and "dual_clip" in OBJECTIVES[name].options:
        loss, grad, seen = run(name, *arguments, dual_clip=3.0, denominator=1)
        assert loss.item() == pytest.approx(
            3 * (1 if OBJECTIVES[name].aggregation == "sequence" else 2)
        )
        assert grad.tolist() == [[0.0, 0.0]] and seen.clip_fraction_high == 1


@pytest.mark.parametrize(
    "name, options, advantage",
    [
        ("cispo", {"clip_high": INF}, 0.0),
        ("minirl", {"ratio_cap": INF}, 0.0),
        ("minirl", {"ratio_cap": INF}, 1.0),  # masked: π_θ/π_old is above its range too
    ],
)
def test_an_infinite_weight_times_nothing_is_nothing(name, options, advantage):
    logp, mask = torch.full((1, 2), -1.0), torch.ones(1, 2, dtype=torch.bool)
    loss, grad, _ = run(name, logp, logp - 100, torch.tensor([advantage]), mask, **options)
    assert loss.item() == 0 and grad.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("name", NAMES)
def test_one_token_rows(name):
    """A sequence of one token is the token: gspo has grpo's term, whatever the aggregation."""
    logp, old_logp, advantages, _ = batch(7, 6, 1)
    mask = torch.ones(6, 1, dtype=torch.bool)
    runs = [run(name, logp, old_logp, advantages, mask, aggregation=a) for a in AGGREGATIONS]
    for other in runs[1:]:
        same(other, runs[0])
    if name.startswith("gspo"):
        options = OBJECTIVES[name].options
        same(runs[0], run("grpo", logp, old_logp, advantages, mask, **options))


def test_gradient_reaches_logp_only():
    for name in NAMES:
        tensors = [x.requires_grad_() if x.is_floating_point() else x for x in batch(6, 2, 3)]
        drawn = {
            k: x.detach().requires_grad_() for k, x in drawn_by_another(name, tensors[0], 6).items()
        }
        policy_objective(name, *tensors, **drawn)[0].backward()
        assert tensors[0].grad is not None
        assert all(x.grad is None for x in [*tensors[1:3], *drawn.values()])


def test_merging_nothing():
    with pytest.raises(ValueError, match="parts is empty"):
        merge_diagnostics([])


def call(**changes):
    arguments = dict(
        name="grpo",
        logp=torch.full((3, 2), -1.0),
        old_logp=torch.full((3, 2), -1.0),
        advantages=torch.ones(3),
        mask=torch.ones(3, 2, dtype=torch.bool),
    )
    return policy_objective(**(arguments | changes))


def with_one(value, at):
    x = torch.full((3, 2), -1.0)
    x[at] = value
    return x


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(name="ppo"), "name is 'ppo', expected one of"),
        (dict(name="reinforce", clip_low=0.2), "reinforce has no clip_low"),
        (dict(clip_high=-0.1), "clip_high is -0.1, expected a number ≥ 0"),
        (dict(clip_low=NAN), "clip_low is nan"),
        (dict(name="gspo", dual_clip=3.0), "gspo has no dual_clip"),
        (dict(dual_clip=1.0), "dual_clip is 1.0, expected a number > 1"),
        (dict(name="sapo", tau_negative=0.0), "tau_negative is 0.0, expected a number > 0"),
        (dict(name="minirl", ratio_cap=-5.0), "ratio_cap is -5.0, expected a number > 0"),
        (dict(name="bapo", clip_low=0.4), "bapo got clip_low=0.4 and clip_high=None"),
        (dict(sampler_logp=torch.zeros(3, 2)), "grpo does not read sampler_logp"),
        (dict(name="minirl", sampler_logp=torch.zeros(3, 1)), r"sampler_logp has shape \(3, 1\)"),
        (dict(name="minirl", sampler_logp=with_one(-INF, (1, 1))), r"sampler_logp is -inf at"),
        (
            dict(name="gspo", advantages=torch.tensor([[1.0, 1.0], [1.0, 2.0], [0.0, 0.0]])),
            "advantages differ between the tokens of 1 sequences",
        ),
        (dict(aggregation="mean"), "aggregation is 'mean', expected 'token'"),
        (dict(denominator=0), "denominator is 0.0, expected a finite number > 0"),
        (dict(denominator=NAN), "denominator is nan"),
        (dict(denominator=torch.ones(3)), r"denominator has shape \(3,\), expected one number"),
        (dict(logp=torch.full((6,), -1.0)), r"logp has shape \(6,\), expected \(B, T\)"),
        (dict(old_logp=torch.zeros(3, 1)), r"old_logp has shape \(3, 1\), expected \(3, 2\)"),
        (dict(old_logp=torch.zeros(2)), r"old_logp has shape \(2,\)"),
        (dict(mask=torch.ones(3, dtype=torch.bool)), r"mask has shape \(3,\), expected \(3, 2\)"),
        (dict(mask=torch.ones(3, 2)), "mask has dtype torch.float32, expected torch.bool"),
        (dict(advantages=torch.ones(3, 1)), r"advantages has shape \(3, 1\), expected \(3,\) or"),
        (dict(advantages=torch.ones(1, 2)), r"advantages has shape \(1, 2\)"),
        (dict(advantages=torch.ones(2)), r"advantages has shape \(2,\)"),
        (dict(advantages=torch.tensor(1.0)), r"advantages has shape \(\)"),
        (dict(logp=torch.ones(3, 2).long()), "logp has dtype torch.int64"),
        (dict(logp=with_one(NAN, (1, 0))), r"logp is nan at \[1, 0\] \(1 of 6"),
        (dict(logp=with_one(-INF, (2, 1))), r"logp is -inf at \[2, 1\]"),
        (dict(old_logp=with_one(-INF, (0, 1))), r"old_logp is -inf at \[0, 1\]"),
        (dict(advantages=torch.tensor([0, NAN, 0])), r"advantages is nan at \[1, 0\] \(2 of 6"),
    ],
)
def test_bad_input_is_named(changes, message):
    call()  # the unchanged call is fine
    with pytest.raises(ValueError, match=message):
        call(**changes)
