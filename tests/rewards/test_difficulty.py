"""Pass rates and what a few tries tell about them; moments of the group advantage by summing."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.policy import group_advantages
from stablerl_core.rewards import advantage_moments, bucket_chance, buckets, second_stage, wilson


def test_wilson_solves_the_equation_it_comes_from():
    """Its ends are the p at which the observed share lies z standard deviations away."""
    for right, tries in ((0, 8), (3, 8), (8, 8), (40, 100)):
        found = wilson(right, tries)
        for end in (found.low, found.high):
            if 0 < end < 1:
                away = abs(right / tries - end) / math.sqrt(end * (1 - end) / tries)
                assert away == pytest.approx(1.959964)
    assert wilson(0, 8).low == 0 and wilson(8, 8).high == 1
    assert wilson(0, 8).high == pytest.approx(0.3244, abs=1e-4)


def test_wilson_takes_faded_counts():
    assert wilson(0.4, 0.8).rate == 0.5
    assert wilson(0.4, 0.8).high > wilson(4, 8).high


@given(st.integers(0, 20), st.integers(1, 20), st.floats(0, 0.45), st.floats(0.5, 1))
def test_the_chance_of_a_bucket_is_the_integral_of_the_posterior(right, tries, low, high):
    right = min(right, tries)
    p = torch.linspace(low, high, 4001, dtype=torch.float64)
    density = p**right * (1 - p) ** (tries - right)
    norm = math.comb(tries, right) * (tries + 1)
    assert bucket_chance(right, tries, low, high) == pytest.approx(
        float(torch.trapezoid(density, p)) * norm, abs=1e-5
    )


def test_eight_tries_hardly_tell_the_middle_from_the_rest():
    assert bucket_chance(4, 8) > 0.75
    assert 0.3 < bucket_chance(2, 8) < 0.55


def test_buckets_and_the_second_stage():
    assert buckets({"a": 0.29, "b": 0.3, "c": 0.7, "d": 0.71}) == {
        "hard": ["a"],
        "middle": ["b", "c"],
        "easy": ["d"],
    }
    assert second_stage([0, 0, 1, 8], [0, 3, 60, 512]) == [1]
    with pytest.raises(ValueError, match="1 counts of 8 and 2 of 512"):
        second_stage([0], [1, 2])


@pytest.mark.parametrize("scale", ["std", "none"])
@pytest.mark.parametrize("p, size", [(0.3, 1), (0.3, 2), (0.5, 5), (0.9, 6)])
def test_moments_are_those_of_the_function_that_trains(scale, p, size):
    """Every outcome of a group, its chance, and the advantages that the package gives it."""
    unit = math.sqrt(p * (1 - p)) if scale == "std" else 1.0
    sums = torch.zeros(3, dtype=torch.float64)
    for outcome in itertools.product((0.0, 1.0), repeat=size):
        rewards = torch.tensor(outcome, dtype=torch.float64)
        chance = math.prod(p if right else 1 - p for right in outcome)
        found = group_advantages(rewards, size, scale=scale, eps=1e-12)[0]
        due = rewards[0] - p
        sums += chance * torch.stack([found * due, found**2, (found - due / unit) ** 2])
    moments = advantage_moments(p, size, scale)
    deviation = math.sqrt(p * (1 - p))
    assert moments.signal == pytest.approx(float(sums[0]) / deviation, abs=1e-9)
    assert moments.second == pytest.approx(float(sums[1]), abs=1e-9)
    assert moments.error == pytest.approx(float(sums[2]), abs=1e-9)


@pytest.mark.parametrize(
    "call, match",
    [
        (lambda: wilson(1, 0), "tries=0"),
        (lambda: wilson(3, 2), "right=3"),
        (lambda: bucket_chance(0.5, 8), "whole"),
        (lambda: bucket_chance(1, 8, 0.7, 0.3), "low=0.7"),
        (lambda: advantage_moments(0.0, 4), "pass_rate=0.0"),
        (lambda: advantage_moments(0.5, 4, "batch"), "scale='batch'"),
    ],
)
def test_bad_numbers_are_named(call, match):
    with pytest.raises(ValueError, match=match):
        call()
