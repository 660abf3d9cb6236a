"""Robust statistics: what is a departure, a fall, a spike, a sawtooth, and what is noise."""

import numpy as np
import pytest

from stablerl_core.diagnosis import Series
from stablerl_core.diagnosis.trends import (
    departure,
    fall_from_peak,
    halved,
    level,
    monotone,
    period,
    scatter,
    smooth,
    spikes,
)


def series(values, steps=None) -> Series:
    values = np.asarray(values, float)
    return Series(np.arange(1.0, len(values) + 1) if steps is None else np.asarray(steps), values)


def noise(n, seed=0, sigma=0.1):
    return np.random.default_rng(seed).normal(0, sigma, n)


def test_scatter_is_the_noise_and_not_the_trend():
    line = np.linspace(0, 50, 2000)
    assert scatter(line + noise(2000)) == pytest.approx(0.1, rel=0.1)
    assert scatter(np.array([3.0])) == 0


def test_a_running_median_forgets_a_spike_and_keeps_a_step():
    values = np.array([0.0] * 10 + [9.0] + [0.0] * 9 + [1.0] * 20)
    out = smooth(values, 5)
    assert out.max() == 1 and out[20] == 1 and out[19] == 0 and len(out) == len(values)


@pytest.mark.parametrize("seed", range(8))
def test_noise_alone_departs_nowhere(seed):
    flat = series(1 + noise(200, seed))
    assert departure(flat, up=True, least=0.2) is None
    assert departure(flat, up=False, least=0.2) is None
    assert fall_from_peak(flat) is None


def test_a_departure_says_where_and_how_far():
    values = np.r_[np.full(60, 1.0), np.full(60, 3.0)] + noise(120)
    found = departure(series(values), up=True, least=0.2, factor=2.0)
    assert abs(found.step - 61) <= 2
    assert found.before == pytest.approx(1, abs=0.1) and found.after == pytest.approx(3, abs=0.1)
    assert found.factor == pytest.approx(3, abs=0.3)
    assert departure(series(-values), up=False, least=0.2) is not None
    assert departure(series(values), up=True, least=0.2, factor=4.0) is None
    assert departure(series(values), up=True, least=5.0) is None


def test_an_excursion_that_comes_back_is_none():
    values = np.r_[np.full(60, 1.0), np.full(20, 3.0), np.full(60, 1.0)] + noise(140)
    assert departure(series(values), up=True, least=0.2) is None


def test_one_last_value_is_no_departure_unless_it_is_far_out():
    quiet = [0.02, 0.021, 0.019, 0.02, 0.022, 0.02, 0.019]
    assert departure(series([*quiet, 0.15]), up=True, least=0.02) is None
    assert departure(series([*quiet, 0.15, 0.16]), up=True, least=0.02).step == 8
    assert departure(series([*quiet, 5.0]), up=True, least=0.02).step == 8


def test_half_of_what_few_values_began_with():
    assert halved(series([0.38, 0.24, 0.09, 0.15, 0.03, 0.04, 0.06]))
    assert fall_from_peak(series([0.38, 0.24, 0.09, 0.15, 0.03, 0.04, 0.06])).before == 0.38
    for kept in ([0.41, 0.28, 0.24, 0.25, 0.30, 0.20, 0.32], [-1.2, -1.3, -1.8, -1.8, -1.9, -2.0]):
        assert not halved(series(kept))
    assert not halved(series([1.0, 0.1, 0.1, 0.1])) and not halved(series(np.linspace(1, 0, 40)))


def test_nan_values_are_passed_over_and_short_series_decided_by_size():
    values = np.r_[np.full(30, 1.0), np.full(30, 3.0)]
    values[::7] = np.nan
    assert departure(series(values), up=True, least=0.2, factor=2.0) is not None
    assert departure(series([0.95, 0.5]), up=False, least=0.03).after == 0.5
    assert departure(series([1.0]), up=True, least=0.0) is None
    assert departure(series([]), up=True, least=0.0) is None


def test_a_fall_is_found_at_its_half_and_a_wobble_is_not():
    up, down = np.linspace(0.2, 0.8, 50), np.linspace(0.8, 0.1, 20)
    values = np.r_[up, down, np.full(30, 0.1)] + noise(100, sigma=0.02)
    found = fall_from_peak(series(values))
    assert 56 <= found.step <= 66 and found.before > 0.7 and found.after < 0.15
    assert fall_from_peak(series(up + noise(50, sigma=0.02))) is None
    assert fall_from_peak(series([0.8, 0.7, 0.75])) is None
    assert fall_from_peak(series([0.5, 0.6, 0.55, 0.02, 0.01])) is not None


def test_level_and_order():
    rising = series(np.linspace(0, 1, 50))
    assert level(rising, "first") < 0.15 and level(rising, "last") > 0.85
    assert monotone(rising) == 1 and monotone(series(-rising.values)) == -1
    assert abs(monotone(series(noise(200)))) < 0.3
    assert np.isnan(level(series([]), "last"))


def test_spikes_stand_alone():
    values = np.full(40, 0.001)
    values[[10, 25]] = 11.0, 26.0
    found = spikes(series(values), 300, 3.0)
    assert found.steps.tolist() == [11, 26]
    assert len(spikes(series(np.r_[np.full(20, 0.001), np.full(20, 11.0)]), 300, 3.0)) == 0


def test_a_sawtooth_has_its_period_and_noise_has_none():
    saw = np.tile(np.linspace(0, 1, 8), 10)
    assert period(series(saw + noise(80, sigma=0.03))) == 8
    assert period(series(noise(80))) is None
    assert period(series(np.linspace(0, 1, 80))) is None
    assert period(series(np.ones(80))) is None
