"""Explorer of chapter 12: its numbers are those of the package, and it says what it should."""

import pytest

from stablerl_core.explorers.vanishing_gradient import BUDGET, GROUP_OF, group_of
from stablerl_core.rewards import advantage_moments, no_signal_chance


@pytest.mark.parametrize("p, size", [(0.1, 8), (0.5, 2), (0.98, 64)])
def test_the_panels_show_what_the_functions_say(p, size):
    _, (curves, groups, moments) = group_of(p, size)
    silent = no_signal_chance(p, size)
    assert curves.points["this problem"] == (p, silent)
    assert groups.values["with a gradient"] == pytest.approx(BUDGET / size * (1 - silent))
    assert moments.values["E[(Â−A)²]"] == advantage_moments(p, size).error


def test_every_stop_stays_inside_the_axes():
    for values in GROUP_OF.stops():
        _, (_, _, moments) = group_of(**values)
        assert all(0 <= v <= 1.2 for v in moments.values.values()), values


def test_the_words_name_the_size_that_suffices():
    text, _ = group_of(0.1, 8)
    assert "43%" in text and "G = 22" in text
