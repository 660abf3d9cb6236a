"""What the explorer of chapter 45 shows is what the queues do."""

import random
import re

import pytest

from stablerl_core.explorers.queues import (
    BATCH,
    CAPS,
    FULL,
    LIMIT,
    QUEUES,
    TOKENS,
    UPDATES,
    cap_and_age,
    outcome,
)
from stablerl_core.system import LengthTail, QueueRates, QueueRules, simulate_queues


def test_the_numbers_are_those_of_a_run():
    rates = QueueRates(16, 0.05, 2.0, reward_seconds=0.02, push_seconds=0.2)
    rules = QueueRules(BATCH, 1, order="finished")
    lengths = LengthTail(TOKENS, 0.5, LIMIT)
    done = simulate_queues(rates, rules, lengths, UPDATES, random.Random(0))
    ages = done.staleness(FULL)
    text, (speed, oldest, table) = cap_and_age(16, 0.5, 1)
    assert speed.points["as finished, now"] == (1, done.throughput(FULL))
    assert speed.lines["as finished"][CAPS.index(1)] == done.throughput(FULL)
    assert oldest.points["as finished, now"] == (1, max(ages))
    assert table.lines["trainer at work"][1] == f"{done.use()['training']:.0%}"
    told = [float(x) for x in re.findall(r"\d+(?:\.\d+)?", text)]
    assert told[0] == 1 and told[3:] == pytest.approx(
        [done.throughput(FULL), sum(ages) / len(ages), max(ages)], rel=0.01, abs=0.006
    )


def test_as_admitted_the_cap_holds_at_every_stop():
    stops = QUEUES.stops()
    runs = [outcome(s["workers"], s["tail"], s["cap"], "admitted") for s in stops]
    assert all(r["oldest"] <= s["cap"] for r, s in zip(runs, stops, strict=True))


def test_as_finished_it_does_not_once_lengths_have_a_tail():
    at = QUEUES.start
    admitted, finished = (
        outcome(at["workers"], at["tail"], at["cap"], order) for order in ("admitted", "finished")
    )
    assert finished["oldest"] > at["cap"] + 1 and finished["speed"] > admitted["speed"]
    alike = outcome(at["workers"], 0.0, at["cap"], "finished")
    assert alike["oldest"] <= at["cap"]
