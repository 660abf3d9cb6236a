"""Chapter 45's queues: rates and lengths are those of the timed run, and rows say what ran."""

import random

import pytest

from stablerl_core.experiments import asynchrony
from stablerl_core.experiments.asynchrony import (
    CAPS,
    Timed,
    against_cap,
    against_limit,
    against_tag,
    backlog,
    balanced_setting,
    long_setting,
    measured_setting,
    settings,
    timed_steps,
)
from stablerl_core.experiments.off_policy import stale
from stablerl_core.experiments.results import Results
from stablerl_core.system import LengthTail


def row(step, **changes):
    plain = {"rollout": 0.2, "reward": 0.04, "train": 0.3, "longest": 20}
    return {"step": step} | plain | {"tokens_8": 3.0, "tokens_20": 1.0} | changes


TIMED = Results(
    name="queue_rates",
    prediction="",
    made={},
    runs={"once": {
        "0": [row(1, rollout=9.0), row(2, train=9.0), row(3), row(4, train=0.5)],
        "1": [row(3), row(4, train=0.5)],
    }},
)  # fmt: skip


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(asynchrony, "load", lambda name: {"queue_rates": TIMED}[name])
    return measured_setting(TIMED)


def test_rates_and_lengths_are_those_of_the_warm_steps(small):
    rates = small.rates
    assert small.batch_size == rates.workers == 4
    assert rates.seconds_per_token == pytest.approx(0.2 / 20)
    assert rates.train_seconds == pytest.approx(0.4) and rates.jitter == pytest.approx(0.25)
    assert rates.reward_seconds == pytest.approx(0.01)
    assert small.mean_length == pytest.approx(11)
    drawn = [small.lengths(random.Random(seed)) for seed in range(400)]
    assert set(drawn) == {8, 20} and 0.68 < drawn.count(8) / 400 < 0.82


def test_long_answers_cost_what_they_cost_a_token(small):
    long = long_setting(small, factor=50)
    assert long.lengths == LengthTail(550, 1.0, 16 * 550) and long.mean_length == 550
    assert long.rates.train_seconds == pytest.approx(50 * 0.4)
    assert long.rates.seconds_per_token == small.rates.seconds_per_token


def test_in_balance_sampling_a_batch_takes_as_long_as_training_it(small):
    balanced = balanced_setting(small)
    rates = balanced.rates
    sampling = balanced.batch_size * 11 * rates.seconds_per_token / rates.workers
    assert sampling == pytest.approx(rates.train_seconds)
    assert rates.train_seconds == pytest.approx(small.rates.train_seconds, rel=0.5)
    assert balanced.lengths(random.Random(0)) == 11
    found = settings()
    assert found["long"] == long_setting(small) and found["balanced"] == balanced
    assert found["small"].rates == small.rates


def test_a_row_for_each_cap_and_the_cap_is_kept(small):
    rows = against_cap(0, "long", order="admitted")
    assert [r["step"] for r in rows] == list(CAPS)
    assert all(r["oldest"] <= r["step"] for r in rows)
    assert rows[0]["speed"] < rows[-1]["speed"] and rows[0]["trainer_busy"] < 1
    others = against_cap(0, "long", order="finished")
    assert max(r["oldest"] - r["step"] for r in others[1:]) > 0
    assert against_cap(1, "long", order="admitted") != rows


def test_the_tag_drops_more_the_younger_it_wants_its_data(small):
    rows = against_tag(0, (1, 8))
    assert rows[0]["dropped"] > rows[1]["dropped"] and rows[0]["oldest"] <= 1
    assert rows[0]["dropped_length"] > rows[0]["length"]


def test_a_limit_stops_who_waits_for_the_oldest(small, monkeypatch):
    monkeypatch.setattr(asynchrony, "LIMITS", (2, 20))
    tight, wide = against_limit(0, "admitted")
    assert tight["stuck"] and tight["updates"] < 30
    assert not wide["stuck"] and wide["updates"] == 30
    assert not any(r["stuck"] for r in against_limit(0, "finished"))


def test_a_cap_bounds_the_backlog_that_jitter_builds(small):
    free = backlog(3, jitter=1.0, order="finished")
    capped = backlog(3, jitter=1.0, order="finished", max_staleness=2)
    assert [r["step"] for r in free] == list(range(25, 201, 25))
    assert max(r["waiting"] for r in free) > max(r["waiting"] for r in capped)
    assert max(r["oldest"] for r in free) > 3
    oldest = [r["oldest"] for r in free]
    assert oldest != sorted(oldest), "each row is about its own updates"


def test_a_timed_run_is_the_run_and_says_what_it_took():
    rows = timed_steps(1, steps=2)
    assert [r["step"] for r in rows] == [1, 2]
    for found in rows:
        counts = {int(k[7:]): v for k, v in found.items() if k.startswith("tokens_")}
        assert sum(counts.values()) == 128 and max(counts) == found["longest"]
        assert 0 < found["reward"] < found["train"] and found["rollout"] > 0
    trainer = Timed(stale(1, updates=1)[0])
    mean = trainer.step()["length"]
    assert sum(trainer.lengths) / len(trainer.lengths) == pytest.approx(mean)
