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


def test_the_two_controls_change_one_thing_of_the_wrong_run():
    arms = EXPERIMENTS["corrections_1"].arms
    (wrong,), (slower,) = arms["noise_mu_as_old"], arms["noise_slower"]
    rate = wrong.numerics.learning_rate
    assert slower == replace(wrong, numerics=replace(wrong.numerics, learning_rate=rate / 3))
    (free,) = arms["noise_unclipped"]
    assert free == replace(wrong, policy=free.policy)
    assert (free.policy.clip_low, free.policy.clip_high) == (1.0, 1e6)


def test_every_trained_setting_has_its_gradient_measured():
    assert set(SETTINGS) < set(METHODS) and set(MISMATCH) < set(SAMPLERS)
    for name, options in MISMATCH.items():
        assert SAMPLERS[name] == SystemConfig(**options)
