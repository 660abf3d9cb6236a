"""The learning rate after a surge of the answer length: when it falls, and how far."""

import json
import math
from dataclasses import asdict

import pytest

from stablerl_core.runlog import SIGNALS
from stablerl_core.system import LengthSurgeDecay, length_surge

NAN = math.nan


def rows(lengths, first=1):
    return [{"step": n, "length": x} for n, x in enumerate(lengths, first)]


FLAT, SURGE = [100.0] * 50, [100.0] * 60 + [301.0] + [100.0] * 20


def test_the_signal_is_one_of_the_run_log():
    assert SIGNALS["length"].unit == "tokens"


def test_a_surge_is_three_times_the_first_fifty():
    assert length_surge(rows(FLAT)) is None
    assert length_surge(rows([*FLAT, 300.0])) is None
    assert length_surge(rows([*FLAT, 300.1])) == 51
    assert length_surge(rows(SURGE)) == 61
    assert length_surge(rows([900.0, *[100.0] * 49, 310.0])) is None  # the average is 116
    assert length_surge(rows([10.0, 20.0, 31.0]), window=2, factor=2.0) == 3
    assert length_surge([]) is None


def test_the_first_surge_counts_and_the_window_is_not_searched():
    assert length_surge(rows([*FLAT, 400.0, 500.0])) == 51
    assert length_surge(rows([*[1.0] * 49, 1000.0, *[2.0] * 50])) is None


def test_rows_without_the_signal_are_passed_over():
    sparse = [{"step": n, "length": NAN} if n % 2 else {"step": n} for n in range(1, 100)]
    assert length_surge(sparse) is None
    mixed = sparse + rows([*FLAT, 500.0], first=100)
    assert length_surge(mixed) == 150


def learning_rates(schedule, log, steps):
    """What a run of `steps` steps gets, when its log is `log` (one row a step, in order)."""
    return [schedule(n, None, log[: n - 1]) for n in range(1, steps + 1)]


def test_warm_up_then_constant_without_a_surge():
    lr = learning_rates(LengthSurgeDecay(1e-6), rows([100.0] * 400), 400)
    assert lr[:10] == pytest.approx([n * 1e-7 for n in range(1, 11)])
    assert set(lr[9:]) == {1e-6}
    assert learning_rates(LengthSurgeDecay(1e-6, warmup=0), [], 1) == [1e-6]


def test_halved_every_1_8_surge_steps_down_to_a_tenth():
    """The public reproduction's numbers: a surge at step 110 gives periods of 198 steps."""
    log = rows([100.0] * 109 + [400.0] * 2000)
    lr = learning_rates(LengthSurgeDecay(1.0, warmup=0), log, 1000)
    changes = [n for n in range(2, 1001) if lr[n - 1] != lr[n - 2]]
    assert changes == [198, 396, 594, 792]
    assert [lr[n - 1] for n in (1, *changes, 1000)] == [1, 0.5, 0.25, 0.125, 0.1, 0.1]
    from_surge = LengthSurgeDecay(1.0, warmup=0, count_from="surge")
    later = learning_rates(from_surge, log, 1000)
    assert [n for n in range(2, 1001) if later[n - 1] != later[n - 2]] == [308, 506, 704, 902]


def test_a_step_sees_only_the_rows_before_it():
    """A surge in row 61 is known at step 62; with a short period the rate falls then at once."""
    schedule = LengthSurgeDecay(1.0, warmup=0, period_factor=0.5)
    log = rows(SURGE)
    lr = learning_rates(schedule, log, 81)
    assert lr[60] == 1.0 and lr[61] == 0.25  # ⌊62 / 30.5⌋ = 2 halvings


def test_it_keeps_no_state():
    """A resumed run repeats: any step alone gives what the run gave, whatever came before."""
    schedule, log = LengthSurgeDecay(3e-6), rows(SURGE * 3)
    lr = learning_rates(schedule, log, 240)
    assert [schedule(n, 123.0, log[: n - 1]) for n in (240, 5, 120, 62)] == [
        lr[239],
        lr[4],
        lr[119],
        lr[61],
    ]
    assert LengthSurgeDecay(**json.loads(json.dumps(asdict(schedule)))) == schedule


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(base=0.0), "base=0.0"),
        (dict(base=NAN), "base=nan"),
        (dict(base=1.0, warmup=-1), "warmup=-1"),
        (dict(base=1.0, window=0), "window=0"),
        (dict(base=1.0, factor=1.0), "factor=1.0"),
        (dict(base=1.0, period_factor=0), "period_factor=0"),
        (dict(base=1.0, lowest=1.5), "lowest=1.5"),
        (dict(base=1.0, lowest=0.0), "lowest=0.0"),
        (dict(base=1.0, count_from="end"), "count_from is 'end'"),
    ],
)
def test_bad_settings(options, message):
    with pytest.raises(ValueError, match=message):
        LengthSurgeDecay(**options)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="step=0"):
        LengthSurgeDecay(1.0)(0, None, [])
