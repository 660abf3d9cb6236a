"""Adaptive clipping, seed 000's rule, skips that are counted, loss scaling: exact, and refusals."""

import math

import pytest
import torch
from torch import nn

from stablerl_core.numerics import (
    LossScale,
    Muon,
    SkipNonfinite,
    adaptive_clip_gradients,
    clip_gradients,
    halve_lr_on_gradient_outlier,
)


def parameter(weight, grad, dtype=torch.float32):
    out = nn.Parameter(torch.tensor(weight, dtype=dtype))
    out.grad = torch.tensor(grad, dtype=dtype)
    return out


# Adaptive clipping ------------------------------------------------------------------------------


def test_each_row_is_bounded_by_its_own_weights():
    p = parameter([[3.0, 4.0], [30.0, 40.0], [0.0, 0.0]], [[6.0, 8.0], [6.0, 8.0], [0.0, 2.0]])
    report = adaptive_clip_gradients([p], 0.5, eps=0.1)
    # bounds: 0.5·5, 0.5·50, 0.5·eps
    expected = torch.tensor([[1.5, 2.0], [6.0, 8.0], [0.0, 0.05]])
    torch.testing.assert_close(p.grad, expected)
    assert (report.clipped, report.units, report.nonfinite) == (2, 3, 0)
    assert adaptive_clip_gradients([p], 0.6, eps=0.1).clipped == 0


@pytest.mark.parametrize("shape, units", [((), 1), ((4,), 1), ((4, 3), 4), ((2, 4, 3), 8),
                                          ((5, 2, 3, 3), 5)])  # fmt: skip
def test_what_a_unit_is(shape, units):
    p = nn.Parameter(torch.ones(shape))
    p.grad = torch.full(shape, 7.0)
    report = adaptive_clip_gradients([p, nn.Parameter(torch.ones(2))], 0.1)
    assert (report.units, report.clipped) == (units, units)
    torch.testing.assert_close(p.grad, torch.full(shape, 0.1))


def test_a_unit_that_is_not_finite_is_left_and_counted():
    p = parameter([[1.0, 0.0], [1.0, 0.0]], [[math.nan, 5.0], [5.0, 0.0]])
    report = adaptive_clip_gradients([p], 1.0)
    assert (report.clipped, report.nonfinite) == (1, 1)
    assert math.isnan(p.grad[0, 0]) and p.grad[0, 1] == 5 and p.grad[1].tolist() == [1, 0]


def test_float16_is_measured_in_float32():
    p = parameter([[300.0] * 4], [[300.0] * 4], torch.float16)
    assert adaptive_clip_gradients([p], 0.5).clipped == 1
    assert p.grad.dtype == torch.float16 and p.grad.tolist() == [[150.0] * 4]


def test_adaptive_bounds_are_refused():
    for bad in ({"clipping": 0.0}, {"clipping": math.nan}, {"eps": -1.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            adaptive_clip_gradients([], **bad)


# Seed 000's rule --------------------------------------------------------------------------------


def test_the_rule_halves_once_for_each_outlier():
    norms = torch.tensor([1.0] * 18 + [50.0, 40.0])  # mean 5.4
    rate, outliers = halve_lr_on_gradient_outlier(norms, 1.0)
    assert rate == 0.25 and outliers.tolist() == [False] * 18 + [True, True]


def test_the_rule_compares_strictly():
    norms = torch.tensor([0.0, 0.0, 0.0, 3.0, 2.0, 1.0, 0.0, 0.0])  # mean 0.75
    assert halve_lr_on_gradient_outlier(norms, 1.0)[0] == 0.5
    assert halve_lr_on_gradient_outlier(norms, 1.0, factor=4.0)[0] == 1.0
    assert halve_lr_on_gradient_outlier(norms, 1.0, factor=2.0)[0] == 0.25


def test_three_gradients_have_no_outlier_and_four_can():
    three, four = torch.tensor([0.0, 0.0, 1e9]), torch.tensor([0.0, 0.0, 0.0, 1e9])
    assert halve_lr_on_gradient_outlier(three, 1.0)[0] == 1.0
    assert halve_lr_on_gradient_outlier(four, 1.0)[0] == 0.5


def test_the_rate_never_rises_and_the_gradient_is_not_touched():
    p, rate = parameter([1.0], [100.0]), 1.0
    history = []
    for norm in [1.0, 1.0, 1.0, 1.0, 100.0, 1.0, 1.0, 1.0]:
        history.append(norm)
        _, outliers = halve_lr_on_gradient_outlier(torch.tensor(history), rate)
        rate *= 0.5 if outliers[-1] else 1.0
    assert rate == 0.5 and p.grad.item() == 100
    clip_gradients([p], 1.0)
    assert p.grad.item() == pytest.approx(1.0), "clipping bounds the step that carries it"


@pytest.mark.parametrize("norms", [[1.0, math.nan], [1.0, math.inf], [1.0, -1.0], [], [[1.0]]])
def test_norms_that_the_rule_does_not_see_are_refused(norms):
    with pytest.raises(ValueError, match="norms has shape"):
        halve_lr_on_gradient_outlier(torch.tensor(norms), 1.0)


def test_other_bad_input_of_the_rule():
    with pytest.raises(ValueError, match="learning_rate=0"):
        halve_lr_on_gradient_outlier(torch.ones(4), 0.0)
    with pytest.raises(ValueError, match="factor=inf"):
        halve_lr_on_gradient_outlier(torch.ones(4), 1.0, factor=math.inf)


# Skipping ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss, norm", [(math.nan, 1.0), (1.0, math.nan), (math.inf, 1.0),
                                        (1.0, -math.inf)])  # fmt: skip
def test_a_step_that_is_not_finite_is_skipped_and_counted(loss, norm):
    guard = SkipNonfinite(limit=3)
    assert guard.allows(1.0, torch.tensor(2.0))
    assert not guard.allows(torch.tensor(loss), norm)
    assert guard.allows(0.0, 0.0)
    assert (guard.steps, guard.skipped, guard.in_a_row, guard.first) == (3, 1, 0, 2)


def test_skips_in_a_row_end_the_run():
    guard = SkipNonfinite(limit=2)
    assert not guard.allows(math.nan, 1.0) and guard.allows(1.0, 1.0)
    assert not guard.allows(math.nan, 1.0)
    with pytest.raises(FloatingPointError, match="step 4: loss nan, norm 1.0; 2 steps in a row"):
        guard.allows(math.nan, 1.0)
    assert (guard.skipped, guard.first) == (3, 1)
    with pytest.raises(ValueError, match="limit=0"):
        SkipNonfinite(0)


def test_counts_survive_a_checkpoint():
    guard, other = SkipNonfinite(5), SkipNonfinite(5)
    for loss in (1.0, math.nan):
        guard.allows(loss, 1.0)
    other.load_state_dict(guard.state_dict())
    assert vars(other) == vars(guard)


# Loss scaling -----------------------------------------------------------------------------------


def scaled(weight=1.0, **options):
    model = nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(weight)
    options = {"init_scale": 2.0**16, **options}
    return model, torch.optim.SGD(model.parameters(), lr=1.0), LossScale("cpu", **options)


def backward(model, scaler, slope, dtype=torch.float32):
    """Gradient `slope`, carried through the backward pass in `dtype`."""
    model.zero_grad()
    out = (model.weight.to(dtype) * torch.tensor(slope, dtype=dtype)).sum()
    scaler.scaled(out.float()).backward()


def test_the_scale_is_taken_out_before_clipping():
    model, optimizer, scaler = scaled()
    backward(model, scaler, 4.0)
    step = scaler.step(optimizer, max_norm=0.5)
    assert (step.norm, step.skipped, step.scale, step.next_scale) == (4.0, False, 2**16, 2**16)
    assert model.weight.item() == 0.5


def test_an_overflow_halves_the_scale_until_it_fits():
    model, optimizer, scaler = scaled()
    steps = []
    for _ in range(4):
        backward(model, scaler, 4.0, torch.float16)  # 4·2¹⁶ and 2¹⁶·2 > 65504
        steps.append(scaler.step(optimizer))
    assert [s.skipped for s in steps] == [True, True, True, False]
    assert [s.scale for s in steps] == [2.0**16, 2.0**15, 2.0**14, 2.0**13]
    assert all(math.isinf(s.norm) for s in steps[:3]) and steps[3].norm == 4.0
    assert (scaler.skipped, scaler.in_a_row, scaler.steps) == (3, 0, 4)
    assert model.weight.item() == 1.0 - 4.0


def test_without_a_scale_the_same_gradient_underflows():
    """float16(1)·1e-8 is 0; times 2¹⁶ it is a number."""
    for scale, moved in ((1.0, False), (2.0**16, True)):
        model, optimizer, scaler = scaled(init_scale=scale)
        model.zero_grad()
        half = model.weight.half()
        scaler.scaled((half.float() * 1e-8).sum()).backward()
        assert (scaler.step(optimizer).norm > 0) is moved


def test_a_nan_is_no_overflow_and_does_not_go_on_for_ever():
    model, optimizer, scaler = scaled(limit=4)
    for _ in range(3):
        backward(model, scaler, math.nan)
        assert scaler.step(optimizer).skipped
    backward(model, scaler, math.nan)
    with pytest.raises(FloatingPointError, match="norm nan at the loss scale 8192.0; 4 steps"):
        scaler.step(optimizer)
    assert model.weight.item() == 1.0 and scaler.skipped == 4


def test_a_norm_that_overflows_is_not_applied_though_each_gradient_is_finite():
    weight, scaler = nn.Parameter(torch.ones(4)), LossScale("cpu", init_scale=1.0)
    scaler.scaled((weight * 1e30).sum()).backward()
    assert bool(weight.grad.isfinite().all())
    step = scaler.step(torch.optim.SGD([weight], lr=1.0), 1.0)
    assert step.skipped and math.isinf(step.norm) and weight.tolist() == [1.0] * 4


def test_the_scale_grows_again_and_survives_a_checkpoint():
    model, optimizer, scaler = scaled(init_scale=4.0, growth_interval=2)
    for _ in range(2):
        backward(model, scaler, 1.0)
        last = scaler.step(optimizer)
    assert last.next_scale == 8.0
    other = LossScale("cpu")
    other.load_state_dict(scaler.state_dict())
    backward(model, other, 1.0)
    assert other.step(optimizer).scale == 8.0 and other.steps == 3


def test_a_skipped_step_leaves_the_momentum_untouched():
    model = nn.Linear(3, 3, bias=False)
    optimizer, scaler = Muon(model.named_parameters()), LossScale("cpu", init_scale=1.0)
    scaler.scaled(model(torch.ones(1, 3)).sum()).backward()
    scaler.step(optimizer)
    before = {k: v.clone() for k, v in optimizer.state[model.weight].items()}
    assert before
    model.weight.grad[0, 0] = math.inf
    assert scaler.step(optimizer).skipped
    assert all(torch.equal(v, before[k]) for k, v in optimizer.state[model.weight].items())


def test_bad_input_of_the_loss_scale():
    model, optimizer, scaler = scaled()
    with pytest.raises(ValueError, match="no gradient"):
        scaler.step(optimizer)
    for bad in ({"init_scale": 0.0}, {"growth_interval": 0}, {"limit": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            LossScale("cpu", **bad)
    half = nn.Parameter(torch.ones(1, dtype=torch.float16))
    half.grad = torch.ones(1, dtype=torch.float16)
    with pytest.raises(ValueError, match="FP16"):
        scaler.scaled(torch.ones(()))
        scaler.step(torch.optim.SGD([half], lr=1.0))
