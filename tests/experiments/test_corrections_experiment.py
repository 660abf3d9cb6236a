"""The arms of the chapter differ in what they are named after, and in nothing else."""

from dataclasses import replace

import pytest

from stablerl_core.experiments import EXPERIMENTS
from stablerl_core.experiments.correction_bias import METHODS, SAMPLERS
from stablerl_core.experiments.corrections import MISMATCH, SETTINGS
from stablerl_core.training import SystemConfig

UPDATES = (1, 4, 8)


@pytest.mark.parametrize("updates", UPDATES)
def test_arms_differ_from_the_exact_one_in_their_system(updates):
    arms = EXPERIMENTS[f"corrections_{updates}"].arms
    (exact,) = arms["exact"]
    assert exact.system == SystemConfig()
    assert exact.policy.minibatches * exact.policy.epochs == updates
    for name, (config,) in arms.items():
        mismatch, _, setting = name.partition("_")
        if setting not in SETTINGS:
            continue
        system = dict(MISMATCH[mismatch]) | SETTINGS[setting]
        least = system.pop("min_p", 0.0)
        expected = replace(
            exact, system=SystemConfig(**system), policy=replace(exact.policy, min_p=least)
        )
        assert config == expected, name


@pytest.mark.parametrize("mismatch", MISMATCH)
def test_the_controls_change_one_thing(mismatch):
    arms = EXPERIMENTS["corrections_1"].arms
    for name, slower in (("mu_as_old", "slower"), ("recompute", "recompute_slower")):
        (plain,), (slow,) = arms[f"{mismatch}_{name}"], arms[f"{mismatch}_{slower}"]
        third = plain.numerics.learning_rate / 3
        assert slow == replace(plain, numerics=replace(plain.numerics, learning_rate=third))
    (wrong,), (free,) = arms[f"{mismatch}_mu_as_old"], arms[f"{mismatch}_unclipped"]
    assert free == replace(wrong, policy=free.policy)
    assert (free.policy.clip_low, free.policy.clip_high) == (1.0, 1e6)


def test_every_trained_setting_has_its_gradient_measured():
    assert set(SETTINGS) < set(METHODS) and set(MISMATCH) < set(SAMPLERS)
    for name, options in MISMATCH.items():
        assert SAMPLERS[name] == SystemConfig(**options)
