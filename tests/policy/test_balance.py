"""BAPO's search: the shares by hand, the path step by step, and that it always ends."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import balance_bounds, policy_objective

LOW, HIGH = (0.6, 0.9), (1.2, 3.0)
STATISTICS = ["objective", "code", "gradient"]
NAN = math.nan


def batch(seed, rows=4, columns=6, spread=1.0, shift=0.0):
    """logp, old_logp, advantages (B, T), mask in float64; `shift` lowers the advantages."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    logp = -normal().abs()
    lengths = torch.randint(0, columns + 1, (rows, 1), generator=generator)
    return logp, logp - spread * normal(), normal() - shift, torch.arange(columns) < lengths


def share_by_hand(statistic, tensors, low, high, sampler_logp=None):
    """The share of positive advantages, token by token in Python floats; 0 without a token."""
    logp, old_logp, advantages, mask = tensors
    sampler_logp = old_logp if sampler_logp is None else sampler_logp
    up = all_ = 0.0
    for i, t in mask.nonzero().tolist():
        r, a = (logp[i, t] - old_logp[i, t]).exp().item(), advantages[i, t].item()
        value = min(r * a, min(max(r, low), high) * a)
        if statistic == "objective":
            value *= sampler_logp[i, t].exp().item()
        if statistic == "gradient":
            value = 0.0 if (a > 0 and r > high) or (a < 0 and r < low) else r * a
        up += max(value, 0.0)
        all_ += value if statistic == "objective" else abs(value)
    return abs(up / all_) if all_ else 0.0


def search_by_hand(order, share, target, low_range, high_range, low_step, high_step):
    """Algorithm 1 (c_high first) or the released code (c_low first), as loops that read so."""
    low, high = low_range[0], high_range[0]

    def may_raise_low():
        return low + low_step <= low_range[1] + 1e-9

    def may_raise_high():
        return high + high_step <= high_range[1] + 1e-9

    while share(low, high) < target and (may_raise_low() or may_raise_high()):
        first_high = may_raise_high() if order == "paper" else not may_raise_low()
        if first_high:
            high += high_step
        else:
            low += low_step
    return low, high


@pytest.mark.parametrize("order", ["paper", "code"])
@pytest.mark.parametrize("statistic", STATISTICS)
@given(
    st.integers(0, 10_000),
    st.floats(0, 1.5),
    st.floats(0.1, 2.0),
    st.sampled_from([(LOW, HIGH, 0.02, 0.05), ((0.6, 0.8), (1.2, 2.0), 0.05, 0.05)]),
)
def test_the_search_is_the_published_loop(order, statistic, seed, shift, target, ranges):
    """Bounds and share equal those of a loop of one step at a time, with a share by hand."""
    tensors = batch(seed, shift=shift)
    low_range, high_range, low_step, high_step = ranges
    found = balance_bounds(
        *tensors,
        order=order,
        statistic=statistic,
        target=target,
        low_range=low_range,
        high_range=high_range,
        low_step=low_step,
        high_step=high_step,
    )

    def share(low, high):
        return share_by_hand(statistic, tensors, low, high)

    low, high = low_range[0], high_range[0]
    if share(low_range[1], high_range[1]) > 0:  # a positive advantage contributes
        low, high = search_by_hand(order, share, target, *ranges)
    assert (1 - found.clip_low, 1 + found.clip_high) == pytest.approx((low, high), abs=1e-9)
    assert found.share == pytest.approx(share(low, high), rel=1e-6, abs=1e-9)
    assert found.start_share == pytest.approx(share(low_range[0], high_range[0]), rel=1e-6)
    assert found.reached is (found.share >= target)
    assert low_range[0] <= 1 - found.clip_low <= low_range[1] + 1e-9
    assert high_range[0] <= 1 + found.clip_high <= high_range[1] + 1e-9


def test_the_sampler_weighs_the_objective_and_nothing_else():
    """Eq. 8 has π_rollout as a factor: μ where it is known, π_old otherwise."""
    tensors = batch(3)
    sampler_logp = tensors[1] - batch(4)[0].abs()
    for statistic in STATISTICS:
        found = balance_bounds(*tensors, statistic=statistic, target=1e-9)
        other = balance_bounds(
            *tensors, statistic=statistic, target=1e-9, sampler_logp=sampler_logp
        )
        expected = share_by_hand(statistic, tensors, LOW[0], HIGH[0], sampler_logp)
        assert other.share == pytest.approx(expected, rel=1e-12)
        assert (other.share != pytest.approx(found.share, rel=0.01)) is (statistic == "objective")


def tilted():
    """Ratios from 0.3 to 3.5 of both signs, three negative advantages to two positive."""
    ratio = torch.linspace(0.3, 3.5, 50, dtype=torch.float64).repeat(5, 1)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64)
    old_logp = torch.full_like(ratio, -4.0)
    return old_logp + ratio.log(), old_logp, advantages, torch.ones_like(ratio, dtype=torch.bool)


def shares_at(statistic, bounds):
    """The share at each (c_low, c_high), by ranges of one point."""
    return [
        balance_bounds(
            *tilted(), statistic=statistic, low_range=(low, low), high_range=(high, high)
        ).share
        for low, high in bounds
    ]


def test_vector_14_which_move_raises_which_share():
    """Raising c_high helps by every statistic; raising c_low by gradient, but hurts by value."""
    lows = [(0.6 + 0.02 * k, 1.2) for k in range(16)]
    highs = [(0.6, 1.2 + 0.05 * k) for k in range(37)]
    for statistic in STATISTICS:
        rising = shares_at(statistic, highs)
        assert rising == sorted(rising) and rising[-1] > 1.1 * rising[0]
    gradient = shares_at("gradient", lows)
    assert gradient == sorted(gradient) and gradient[-1] > 1.01 * gradient[0]
    by_value = shares_at("code", lows)
    assert by_value == sorted(by_value, reverse=True) and by_value[-1] < 0.999 * by_value[0]
    signed = shares_at("objective", lows)  # |up / (up − down)| with down > up: the same direction
    assert signed == sorted(signed, reverse=True) and signed[-1] < 0.999 * signed[0]


def test_the_signed_share_passes_1_near_balance():
    """Eq. 8 at up/down = 0.48 is 0.92, and at balance inf: more than any target."""
    logp = torch.full((1, 2), -1.0, dtype=torch.float64)
    for up, share, honest in (
        (0.48, 0.48 / 0.52, 0.48 / 1.48),
        (0.6, 1.5, 0.375),
        (1.0, math.inf, 0.5),
    ):
        arguments = logp, logp, torch.tensor([[up, -1.0]]).double(), torch.ones(1, 2).bool()
        assert balance_bounds(*arguments, target=0.01).share == pytest.approx(share)
        for statistic in ("gradient", "code"):
            found = balance_bounds(*arguments, statistic=statistic, target=0.01)
            assert found.share == pytest.approx(honest)


@pytest.mark.parametrize("order", ["paper", "code"])
@pytest.mark.parametrize("statistic", STATISTICS)
def test_batches_of_one_sign_stay_at_the_start(order, statistic):
    """Without positives no bound could help; without negatives none has to."""
    logp, old_logp, advantages, mask = batch(5)
    start = (pytest.approx(0.4), pytest.approx(0.2))
    for values, share in ((-advantages.abs(), 0), (advantages.abs(), 1), (0 * advantages, 0)):
        found = balance_bounds(logp, old_logp, values, mask, order=order, statistic=statistic)
        assert (found.clip_low, found.clip_high) == start
        assert found.share == found.start_share == pytest.approx(share)
        assert found.reached is bool(share)
    nothing = balance_bounds(logp, old_logp, advantages, mask & False, order=order)
    assert (nothing.clip_low, nothing.clip_high, nothing.share) == (*start, 0)


def test_the_end_of_the_path_when_the_target_is_out_of_reach():
    tensors = tilted()
    for order in ("paper", "code"):
        found = balance_bounds(*tensors, order=order, statistic="gradient", target=0.999)
        assert (found.clip_low, found.clip_high) == (pytest.approx(0.1), pytest.approx(2.0))
        assert not found.reached and found.start_share < found.share < 0.999


def test_all_whole_steps_of_a_range_are_taken():
    """Also where (0.9 − 0.8) / 0.02 is 4.999…; a step that does not fit is not taken."""
    ranges = {"low_range": (0.8, 0.9), "high_range": (1.2, 1.29)}
    steps = {"low_step": 0.02, "high_step": 0.05, "statistic": "gradient", "target": 0.999}
    found = balance_bounds(*tilted(), **ranges, **steps)
    assert (found.clip_low, found.clip_high) == (pytest.approx(0.1), pytest.approx(0.25))


def test_a_share_equal_to_the_target_is_enough():
    logp = torch.full((1, 2), -1.0)
    arguments = logp, logp, torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = balance_bounds(*arguments, statistic="gradient", target=0.5)
    assert found.reached and (found.clip_low, found.clip_high, found.share) == (0.4, 0.2, 0.5)


@pytest.mark.parametrize("order", ["paper", "code"])
def test_the_order_decides_which_bound_moves(order):
    """A target that either move alone reaches: the paper opens the top, the code closes below."""
    found = balance_bounds(*tilted(), order=order, statistic="gradient", target=0.069)
    assert found.start_share < 0.069 <= found.share
    low, high = found.clip_low != pytest.approx(0.4), found.clip_high != pytest.approx(0.2)
    assert (low, high) == ((False, True) if order == "paper" else (True, False))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_ranks_that_add_up_their_sums_choose_alike(statistic):
    """Two ranks with different rows and one all-reduce: the bounds of the whole batch, on both."""
    options = {"statistic": statistic, "target": 0.6}
    logp, old_logp, advantages, mask = tensors = batch(11, rows=6, shift=0.4)
    whole = balance_bounds(*tensors, **options)
    parts = [tuple(x[piece] for x in tensors) for piece in (slice(0, 2), slice(2, None))]
    sent = []
    for part in parts:
        part[0].requires_grad_()
        balance_bounds(*part, reduce=lambda x: sent.append(x) or x, **options)
    assert not any(x.requires_grad for x in sent)
    assert sent[0].shape == sent[1].shape == (37 + 15, 2)
    alone = [balance_bounds(*part, **options) for part in parts]
    together = [
        balance_bounds(*part, reduce=lambda _: sent[0] + sent[1], **options) for part in parts
    ]
    assert alone[0] != alone[1]
    for found in together:
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(whole), rel=1e-12)


@pytest.mark.parametrize(
    "shift, clip_low, clip_high", [(0, 0.4, 0.2), (0.5, 0.4, None), (0.7, 0.1, 2)]
)
def test_bapo_searches_when_it_gets_no_bounds(shift, clip_low, clip_high):
    """`policy_objective` finds the paper's bounds on the batch, and takes any that are given."""
    tensors = batch(14, shift=shift)
    drawn = {"sampler_logp": tensors[1] - batch(4)[0].abs()}
    logp = tensors[0].requires_grad_()
    found = balance_bounds(*tensors, **drawn)
    assert found.clip_low == clip_low and found.clip_high == (clip_high or found.clip_high)
    if clip_high is None:  # a place on the path that depends on μ
        assert found.clip_high != balance_bounds(*tensors).clip_high
    bounds = {"clip_low": found.clip_low, "clip_high": found.clip_high}
    ours, seen = policy_objective("bapo", *tensors, **drawn)
    theirs, expected = policy_objective("grpo", *tensors, **bounds)
    assert torch.equal(ours, theirs) and seen == expected
    grads = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    assert torch.equal(*grads)
    assert torch.equal(policy_objective("bapo", *tensors, **bounds)[0], theirs)


def test_what_does_not_count_does_not_count_and_no_gradient_stays():
    logp, old_logp, advantages, mask = batch(13, shift=0.5)
    expected = balance_bounds(logp, old_logp, advantages, mask)
    hole = torch.where(mask, 0.0, NAN)
    found = balance_bounds((logp + hole).requires_grad_(), old_logp + hole, advantages + hole, mask)
    assert found == expected
    assert all(type(x) in (float, bool) for x in dataclasses.astuple(found))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.share = 1.0
    rows = advantages[:, 0]  # one a sequence, and rows in another order
    order = torch.tensor([2, 0, 3, 1])
    a = balance_bounds(logp, old_logp, rows, mask)
    b = balance_bounds(logp[order], old_logp[order], rows[order], mask[order])
    assert dataclasses.astuple(a) == pytest.approx(dataclasses.astuple(b))


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("log_ratio", [-200.0, 100.0, 200.0])
def test_ratios_that_overflow(statistic, log_ratio):
    """In float32: no NaN in the share. Against an infinite negative side the share is 0."""
    logp = torch.tensor([[-1.0, -1.0]])
    old_logp = torch.tensor([[-1.0, -1.0 - log_ratio]])
    advantages, mask = torch.tensor([[1.0, -1.0]]), torch.ones(1, 2, dtype=torch.bool)
    found = balance_bounds(logp, old_logp, advantages, mask, statistic=statistic)
    assert not math.isnan(found.share)
    nothing = balance_bounds(logp, old_logp, 0 * advantages, mask, statistic=statistic)
    assert (nothing.share, nothing.clip_low, nothing.clip_high) == (0, 0.4, 0.2)
    if log_ratio > 0 and statistic != "objective":
        assert (found.share, found.reached) == (0, False)
    if log_ratio < 0 and statistic == "gradient":
        assert found.share == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    logp, old_logp, advantages, mask = batch(14, shift=0.3)
    half = logp.to(dtype), old_logp.to(dtype), advantages.to(dtype)
    for statistic in STATISTICS:
        found = balance_bounds(*half, mask, statistic=statistic)
        exact = balance_bounds(*(x.double() for x in half), mask, statistic=statistic)
        assert dataclasses.astuple(found) == pytest.approx(dataclasses.astuple(exact), rel=1e-5)


@pytest.mark.parametrize(
    "changes, message",
    [
        (dict(order="reverse"), "order is 'reverse', expected 'paper' or 'code'"),
        (dict(statistic="value"), "statistic is 'value', expected 'objective'"),
        (dict(target=0.0), "target is 0.0, expected a finite number > 0"),
        (dict(target=NAN), "target is nan"),
        (dict(low_step=0.0), "low_step is 0.0"),
        (dict(high_step=-0.05), "high_step is -0.05"),
        (dict(high_step=math.inf), "high_step is inf"),
        (dict(low_range=(0.9, 0.6)), r"low_range is \(0.9, 0.6\), expected 0 ≤ low ≤ high ≤ 1"),
        (dict(low_range=(0.6, 1.2)), r"low_range is \(0.6, 1.2\)"),
        (dict(low_range=(NAN, 0.9)), "low_range is"),
        (dict(high_range=(0.2, 2.0)), r"high_range is \(0.2, 2.0\), expected 1 ≤ low ≤ high"),
        (dict(high_range=(1.2, math.inf)), "high_range is"),
        (dict(mask=torch.ones(4, 6)), "mask has dtype torch.float32"),
        (dict(advantages=torch.ones(4, 1)), r"advantages has shape \(4, 1\)"),
        (dict(sampler_logp=torch.zeros(4)), r"sampler_logp has shape \(4,\)"),
        (dict(logp=torch.full((4, 6), NAN)), r"logp is nan at \[0, 0\]"),
    ],
)
def test_bad_input_is_named(changes, message):
    logp, old_logp, advantages, _ = batch(15)
    arguments = dict(
        logp=logp, old_logp=old_logp, advantages=advantages, mask=torch.ones(4, 6).bool()
    )
    balance_bounds(**arguments)  # the unchanged call is fine
    with pytest.raises(ValueError, match=message):
        balance_bounds(**(arguments | changes))
