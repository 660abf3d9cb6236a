"""Schedules: values, controllers against their sources, missing signals, resuming, JSON."""

import json
import math
from dataclasses import FrozenInstanceError, fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import (
    SCHEDULES,
    AdaptiveClip,
    AdaptiveEntropy,
    AdaptiveKL,
    Constant,
    Linear,
    Piecewise,
    schedule_from_dict,
    schedule_to_dict,
)

NAN, INF = math.nan, math.inf

EXAMPLES = [
    Constant(0.3),
    Linear(0.1, 0.0, 50),
    Piecewise(((1, 8), (51, 16), (80, 32))),
    AdaptiveKL(start=0.04, target=0.1),
    AdaptiveEntropy(start=0.001, target=0.5, delta=0.01, maximum=0.1),
    AdaptiveClip(target=0.5),
]


def run(schedule, signals, name):
    """Values at steps 1, 2, … when step n logs signals[n − 1]; None is a probe not due."""
    rows, values = [], []
    for step, signal in enumerate(signals, start=1):
        values.append(schedule(step, values[-1] if values else None, rows))
        rows.append({"step": step} if signal is None else {"step": step, name: signal})
    return values


def test_constant_linear_and_piecewise():
    assert [Constant(0.3)(step, None, []) for step in (1, 99)] == [0.3, 0.3]
    line = Linear(0.1, 0.3, 5)
    values = [line(step, None, []) for step in (1, 2, 3, 4, 5, 6, 500)]
    assert values == pytest.approx([0.1, 0.15, 0.2, 0.25, 0.3, 0.3, 0.3], rel=1e-12)
    assert (values[0], values[4], values[6]) == (0.1, 0.3, 0.3)
    assert Linear(1.0, 0.1, 5)(5, None, []) == 0.1  # 1 + (0.1 − 1) is not
    stairs = Piecewise(((1, 8), (51, 16), (80, 4)))
    assert [stairs(n, None, []) for n in (1, 50, 51, 79, 80, 900)] == [8, 8, 16, 16, 4, 4]
    assert isinstance(stairs(1, None, []), int)


def test_adaptive_kl_by_hand():
    """On target nothing, twice the target + 2 %, half − 2 %, 10 % off ± 1 %."""
    schedule = AdaptiveKL(start=1.0, target=0.1)
    values = run(schedule, [0.1, 0.2, 0.05, 0.11, 0.09, INF, 0.0, 0.1], "kl_ref")
    factors = [b / a for a, b in zip(values, values[1:], strict=False)]
    assert values[0] == 1.0
    assert factors == pytest.approx([1, 1.02, 0.98, 1.01, 0.99, 1.02, 0.98], rel=1e-12)


def test_adaptive_kl_is_the_controller_of_verl():
    """Their update, re-typed: value *= 1 + clip(kl / target − 1, −.2, .2) · n / horizon."""
    target, n, horizon, value = 0.1, 256, 10_000, 0.05
    kls = [0.02, 0.3, 0.12, 0.1, 0.08, 1.0, 0.5, 0.09]
    expected = []
    for kl in kls:
        expected.append(value)
        value *= 1 + min(max(kl / target - 1, -0.2), 0.2) * n / horizon
    values = run(AdaptiveKL(start=0.05, target=target, gain=n / horizon), kls, "kl_ref")
    assert values == pytest.approx(expected, rel=1e-12)


def test_adaptive_kl_finds_the_coefficient_of_a_plant():
    """A KL that answers to β as .02 / β: the target .1 needs β = .2, from either side."""
    schedule = AdaptiveKL(start=1.0, target=0.1)
    for start in (0.02, 2.0):
        value, rows = start, []
        for step in range(2, 400):
            rows.append({"kl_ref": 0.02 / value})
            value = schedule(step, value, rows[-1:])
        assert value == pytest.approx(0.2, rel=1e-3)


def test_the_last_known_signal_stands_in_for_a_missing_one():
    schedule = AdaptiveKL(start=1.0, target=0.1)
    values = run(schedule, [None, None, 0.2, None, NAN, 0.05, None], "kl_ref")
    expected = [1, 1, 1, 1.02, 1.02**2, 1.02**3, 1.02**3 * 0.98]
    assert values == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("schedule", EXAMPLES[3:], ids=lambda s: type(s).__name__)
def test_before_any_signal_the_start_value(schedule):
    assert schedule(1, None, []) == schedule.start
    assert schedule(7, schedule.start, [{"step": n} for n in range(1, 7)]) == schedule.start
    assert schedule(7, schedule.start, [{"step": 6, schedule.signal: NAN}]) == schedule.start


def test_adaptive_entropy_by_hand():
    """The coefficient goes on while it is switched off, and comes back where it stands then."""
    schedule = AdaptiveEntropy(start=0.02, target=0.5, delta=0.01, minimum=0.0, maximum=0.04)
    entropies = [0.4, 0.4, 0.4, 0.6, 0.6, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.4, 0.4]
    #    value of c  .02  .03  .04  .04  .03  .02  .03  .03  .02  .01   0    0    0   .01
    expected = [0.02, 0.03, 0.04, 0.04, 0, 0, 0.03, 0.03, 0, 0, 0, 0, 0, 0.01]
    assert run(schedule, entropies, "entropy") == pytest.approx(expected, abs=1e-12)


def test_adaptive_entropy_with_the_defaults_of_its_source():
    schedule = AdaptiveEntropy()
    found = (schedule.start, schedule.target, schedule.delta, schedule.minimum, schedule.maximum)
    assert found == (0.0, 0.2, 1e-4, 0.0, 0.005)
    values = run(schedule, [0.1] * 60, "entropy")
    assert values[:3] == pytest.approx([0, 1e-4, 2e-4], rel=1e-12)
    assert values[-1] == 0.005  # after fifty steps below the target


def test_adaptive_entropy_with_gaps():
    schedule = AdaptiveEntropy(target=0.5, delta=1.0, maximum=10.0)
    assert run(schedule, [None, 0.4, None, NAN, 0.6, 0.4, None], "entropy") == [0, 0, 1, 2, 3, 0, 3]


def test_adaptive_clip_by_hand():
    schedule = AdaptiveClip(target=0.5, start=0.2, gain=0.1, minimum=0.18, maximum=0.25)
    values = run(schedule, [0.4, 0.1, 0.1, 0.6, 1.5, 0.5, None, 0.3, 0.3], "entropy")
    expected = [0.2, 0.21, 0.25, 0.25, 0.24, 0.18, 0.18, 0.18, 0.2]
    assert values == pytest.approx(expected, rel=1e-12)


def test_another_signal_can_be_followed():
    assert run(AdaptiveKL(1.0, 0.1, signal="kl_step"), [0.2, 0.2], "kl_step")[1] == 1.02
    assert run(AdaptiveKL(1.0, 0.1, signal="kl_step"), [0.2, 0.2], "kl_ref")[1] == 1.0
    clip = AdaptiveClip(target=0.5, start=0.2, gain=0.1, signal="length")
    assert run(clip, [0.4, 0.4], "length")[1] == pytest.approx(0.21)
    bonus = AdaptiveEntropy(delta=1.0, maximum=5.0, signal="length")
    assert run(bonus, [0.1, 0.1], "length")[1] == 1.0


signals = st.lists(st.one_of(st.none(), st.floats(0, 2), st.just(NAN)), min_size=2, max_size=12)


@given(signals, st.integers(0, 11))
def test_a_resumed_run_repeats_the_run(signals, cut):
    """From the log alone, written to JSON and read back, at any step: the same value."""
    for schedule in EXAMPLES:
        name = getattr(schedule, "signal", "entropy")
        values = run(schedule, signals, name)
        step = min(cut, len(signals) - 1)
        rows = [{"step": n + 1} | ({} if s is None else {name: s}) for n, s in enumerate(signals)]
        rows = json.loads(json.dumps(rows[:step]))
        previous = json.loads(json.dumps(values[step - 1] if step else None))
        again = schedule_from_dict(json.loads(json.dumps(schedule_to_dict(schedule))))
        assert again(step + 1, previous, rows) == values[step]


@given(signals)
def test_bounds_hold(signals):
    entropy = AdaptiveEntropy(start=0.5, target=0.5, delta=0.4, minimum=0.1, maximum=1.0)
    clip = AdaptiveClip(target=0.5, gain=1.0)
    for schedule in (entropy, clip):
        for value in run(schedule, signals, "entropy"):
            off = schedule is entropy and value == 0
            assert off or schedule.minimum <= value <= schedule.maximum
    kl = run(AdaptiveKL(start=1.0, target=0.5), signals, "kl_ref")
    assert all(0.98 - 1e-12 <= b / a <= 1.02 + 1e-12 for a, b in zip(kl, kl[1:], strict=False))


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda s: type(s).__name__)
def test_json_round_trip(schedule):
    text = json.dumps(schedule_to_dict(schedule), allow_nan=False)
    assert json.loads(text)["kind"] == type(schedule).__name__
    assert schedule_from_dict(json.loads(text)) == schedule
    hash(schedule)
    with pytest.raises(FrozenInstanceError):
        setattr(schedule, fields(schedule)[0].name, 1)


def test_the_table_has_them_all():
    ours = {
        name: kind for name, kind in SCHEDULES.items() if kind.__module__ == Constant.__module__
    }
    assert ours == {type(s).__name__: type(s) for s in EXAMPLES}


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda s: type(s).__name__)
def test_step_zero_is_refused(schedule):
    with pytest.raises(ValueError, match="step is 0, expected ≥ 1"):
        schedule(0, None, [])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Constant(NAN), "value is nan, expected a finite number"),
        (lambda: Constant("0.1"), "value is '0.1'"),
        (lambda: Constant(True), "value is True"),
        (lambda: Linear(0.0, INF, 5), "end is inf"),
        (lambda: Linear(0.0, 1.0, 1), "steps has 1, expected a whole number ≥ 2"),
        (lambda: Linear(0.0, 1.0, 5.0), "steps has 5.0, expected a whole number"),
        (lambda: Piecewise(()), r"points starts at steps \[\], expected 1 and then"),
        (lambda: Piecewise(((2, 1.0),)), r"points starts at steps \[2\]"),
        (lambda: Piecewise(((1, 1.0), (9, 2.0), (5, 3.0))), r"points starts at steps \[1, 9, 5\]"),
        (lambda: Piecewise(((1, 1.0), (1, 2.0))), r"points starts at steps \[1, 1\]"),
        (lambda: Piecewise(((1, NAN),)), "points is nan"),
        (lambda: Piecewise(((1.5, 1.0),)), "points has 1.5, expected a whole number"),
        (lambda: Piecewise((1, 2)), r"points is \(1, 2\), expected pairs"),
        (lambda: AdaptiveKL(start=0.0, target=0.1), "start is 0.0, expected > 0"),
        (lambda: AdaptiveKL(start=1.0, target=-0.1), "target is -0.1, expected > 0"),
        (lambda: AdaptiveKL(start=1.0, target=1.0, gain=5.0), "gain · limit is 1.0, expected < 1"),
        (lambda: AdaptiveKL(start=1.0, target=1.0, signal=""), "signal is '', expected the name"),
        (lambda: AdaptiveEntropy(delta=0.0), "delta is 0.0, expected > 0"),
        (lambda: AdaptiveEntropy(start=0.1), "start is 0.1, expected a value between minimum 0.0"),
        (lambda: AdaptiveEntropy(target=NAN), "target is nan"),
        (lambda: AdaptiveClip(target=0.5, start=0.6), "start is 0.6, expected a value between"),
        (lambda: AdaptiveClip(target=0.5, gain=-1.0), "gain is -1.0, expected > 0"),
        (lambda: schedule_from_dict({"kind": "Cosine"}), "kind is 'Cosine', expected one of"),
        (lambda: schedule_from_dict({"value": 1.0}), "kind is None"),
        (lambda: schedule_from_dict({"kind": "Constant"}), "values has not the fields of Constant"),
        (lambda: schedule_from_dict({"kind": "Constant", "value": 1, "a": 2}), "values has not"),
        (lambda: schedule_from_dict({"kind": "Constant", "value": NAN}), "value is nan"),
        (lambda: schedule_to_dict(lambda step, previous, rows: 1.0), "schedule is <function"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
