"""Three queues: closed forms for one worker, laws for any rates, seed 004's backlog, throttled."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stablerl_core.system import LengthTail, QueueRates, QueueRules, simulate_queues

ALIKE = LengthTail(10)
TAIL = LengthTail(20, sigma=1.0, limit=200)


def run(rates, rules, lengths=ALIKE, updates=6, seed=0):
    return simulate_queues(rates, rules, lengths, updates, random.Random(seed))


# --- closed forms ----------------------------------------------------------------------------


def test_one_worker_in_step():
    """η = 0, B = 2: sample 10 + 10 s, score the last 3 s, train 4 s, push 1 s, and again."""
    rates = QueueRates(1, 1.0, 4.0, reward_seconds=3.0, push_seconds=1.0)
    done = run(rates, QueueRules(2, 0), updates=5)
    cycle = 20 + 3 + 4 + 1
    assert [b.began for b in done.batches] == [23 + cycle * k for k in range(5)]
    assert [b.ended for b in done.batches] == [27 + cycle * k for k in range(5)]
    assert done.seconds == 27 + 4 * cycle and done.throughput(1) == pytest.approx(20 / cycle)
    assert done.throughput() == 100 / done.seconds
    used = {"sampling": 100 / 139, "reward": 30 / 139, "training": 20 / 139}
    assert done.use() == pytest.approx(used)
    assert set(done.staleness()) == {0} and done.token_staleness() == 0
    assert len(done.completions) == 10 and done.live_versions == 1 and not done.stuck
    assert math.isnan(replace(done, completions=()).length_bias())


@pytest.mark.parametrize(
    "rates, seconds_a_batch",
    [
        (QueueRates(3, 1.0, 5.0, reward_seconds=1.0), 6 * 10 / 3),  # sampling limits
        (QueueRates(60, 1.0, 5.0, reward_seconds=4.0, reward_workers=2), 6 * 4 / 2),  # reward
        (QueueRates(60, 1.0, 25.0, push_seconds=2.0), 27.0),  # training
    ],
)
def test_without_a_cap_the_slowest_stage_sets_the_pace(rates, seconds_a_batch):
    done = run(rates, QueueRules(6, push="finish"), updates=30)
    assert done.throughput(10) == pytest.approx(60 / seconds_a_batch, rel=1e-9)
    assert 0.9 < max(done.use().values()) <= 1 + 1e-9


def test_a_sampler_that_is_faster_ages_without_bound():
    """Batch k was begun after k·B·L·s/W seconds and is trained after k·train: both are lines."""
    rates = QueueRates(4, 1.0, 10.0)  # a batch of 2 each 5 s, an update each 10 s
    done = run(rates, QueueRules(2, push="finish"), updates=40)
    for c in done.trained(1):
        begun = 5.0 * 2 * (c.batch // 2)  # workers start together, two batches at a time
        assert c.begun == begun
        updates_by_then = math.floor((begun - 10) / 10) if begun >= 20 else 0
        assert c.versions == [[updates_by_then, 10]]
        assert c.staleness == c.batch - updates_by_then
    waiting = [b.ready for b in done.batches[1::10]]
    assert [b - a for a, b in zip(waiting, waiting[1:], strict=False)] == [20, 20, 20]


TEN = QueueRates(1, 1.0, 4.0)


@pytest.mark.parametrize(
    "rates, push, versions, sampled",
    [
        (TEN, "finish", [[0, 10]], 20.0),
        (TEN, "interrupt", [[0, 4], [1, 6]], 20.0),
        (replace(TEN, push_seconds=2.0), "interrupt", [[0, 4], [1, 6]], 22.0),
        (replace(TEN, push_seconds=2.0), "finish", [[0, 10]], 20.0),
        # four tokens are read again, 0.5 s each
        (replace(TEN, push_seconds=2.0, reread_seconds_per_token=0.5), "interrupt",
         [[0, 4], [1, 6]], 24.0),
        (replace(TEN, train_seconds=4.5), "interrupt", [[0, 4], [1, 6]], 20.0),
        (replace(TEN, train_seconds=10.0), "interrupt", [[0, 10]], 20.0),
    ],
)  # fmt: skip
def test_a_push_at_the_fourth_token(rates, push, versions, sampled):
    """Completion 1 is trained from 10 s to 14 s, while completion 2 is sampled from 10 s on."""
    second = run(rates, QueueRules(1, push=push), updates=4).completions[1]
    assert second.versions == versions and second.sampled == pytest.approx(sampled)
    assert second.staleness == 1


def test_a_second_push_starts_the_reading_again():
    """Pushes at 14 s and 18 s; the four tokens take 8 s to read: the second begins anew."""
    rates = QueueRates(2, 1.0, 4.0, reread_seconds_per_token=2.0)
    lengths = iter([10, 10, 30, 10, 10, 10, 10])
    done = run(rates, QueueRules(1, order="finished"), lambda _: next(lengths, 10), updates=5)
    third = done.completions[2]
    assert third.begun == 10 and third.versions[:2] == [[0, 4], [2, third.versions[1][1]]]


def test_new_weights_serve_nobody_before_they_are_there():
    rates = QueueRates(1, 1.0, 4.0, push_seconds=3.0)
    second = run(rates, QueueRules(1, 0), updates=2).completions[1]
    assert second.begun == 14 and second.sampled == 14 + 3 + 10 and second.versions == [[1, 10]]


# --- laws ------------------------------------------------------------------------------------

RATES = st.builds(
    QueueRates,
    workers=st.integers(1, 6),
    seconds_per_token=st.sampled_from([0.1, 0.5, 1.0]),
    train_seconds=st.sampled_from([0.5, 7.3, 40.0]),
    reward_workers=st.integers(1, 2),
    reward_seconds=st.sampled_from([0.0, 2.5]),
    push_seconds=st.sampled_from([0.0, 1.5]),
    reread_seconds_per_token=st.sampled_from([0.0, 0.05]),
    jitter=st.sampled_from([0.0, 1.0]),
)
RULES = st.builds(
    QueueRules,
    batch_size=st.integers(1, 4),
    max_staleness=st.sampled_from([None, 0, 1, 3]),
    push=st.sampled_from(["interrupt", "finish"]),
    order=st.sampled_from(["admitted", "finished", "oldest"]),
    max_age=st.sampled_from([None, 0, 2]),
    queue_limit=st.sampled_from([None, 2, 8]),
    count=st.sampled_from(["admitted", "finished"]),
)


@settings(max_examples=60)
@given(RATES, RULES, st.integers(0, 99))
def test_every_admitted_completion_is_trained_dropped_or_on_its_way(rates, rules, seed):
    done = run(rates, rules, TAIL, updates=8, seed=seed)
    states = [c.state for c in done.completions]
    full = [c for c in done.completions if c.sampled is not None]
    assert states.count("trained") == rules.batch_size * (len(done.batches) + any(
        c.trained is not None and c.batch == len(done.batches) for c in done.completions
    ))  # fmt: skip
    assert states.count("sampling") <= rates.workers
    assert states.count("dropped") == done.dropped()[0]
    assert [c.number for c in done.completions] == list(range(1, len(states) + 1))
    assert all(sum(n for _, n in c.versions) == c.length for c in full)
    assert all(c.progress <= c.length for c in done.completions)
    for c in full:
        found = [w for w, _ in c.versions]
        assert found == sorted(set(found)) and all(n > 0 for _, n in c.versions)
        assert rules.push == "interrupt" or len(found) == 1
        times = [c.begun, c.sampled, c.scored, c.trained or c.dropped]
        known = [t for t in times if t is not None]
        assert known == sorted(known)
        least = c.length * rates.seconds_per_token
        assert c.sampled - c.begun >= least - 1e-6
    assert all(0 <= share <= 1 + 1e-9 for share in done.use().values())
    if not done.stuck:
        assert len(done.batches) == 8
        assert sum(b.tokens for b in done.batches) == sum(c.length for c in done.trained())
    else:
        assert rules.queue_limit is not None


@settings(max_examples=60)
@given(RATES, RULES, st.integers(0, 99))
def test_the_age_stays_below_the_caps(rates, rules, seed):
    done = run(rates, rules, TAIL, updates=10, seed=seed)
    ages = done.staleness()
    assert all(age >= 0 for age in ages)
    if rules.max_age is not None:
        assert max(ages, default=0) <= rules.max_age
    if rules.max_staleness is None or rules.count == "finished":
        return
    if rules.order == "admitted" or rules.max_staleness == 0:
        assert max(ages, default=0) <= rules.max_staleness
        assert done.live_versions <= rules.max_staleness + 1
        if rules.max_age is not None and rules.max_age >= rules.max_staleness:
            assert done.dropped() == (0, 0)
    on_the_way = len(done.completions) - len(done.trained()) - done.dropped()[0]
    assert on_the_way <= (rules.max_staleness + 1) * rules.batch_size


@settings(max_examples=40)
@given(RATES, RULES, st.integers(0, 99), st.sampled_from(["workers", "cap", "pace", "training"]))
def test_more_of_anything_makes_no_update_later(rates, rules, seed, what):
    """Exact, update by update: in the order of admission nothing overtakes."""
    rates = replace(rates, reward_seconds=0.0, reread_seconds_per_token=0.0)
    rules = replace(rules, push="finish", order="admitted", max_age=None, queue_limit=None,
                    count="admitted", max_staleness=rules.max_staleness or 0)  # fmt: skip
    better = {
        "workers": (replace(rates, workers=rates.workers + 1), rules),
        "cap": (rates, replace(rules, max_staleness=rules.max_staleness + 1)),
        "pace": (replace(rates, seconds_per_token=rates.seconds_per_token / 2), rules),
        "training": (replace(rates, train_seconds=rates.train_seconds / 2), rules),
    }
    before = [b.ended for b in run(rates, rules, TAIL, seed=seed).batches]
    after = [b.ended for b in run(*better[what], TAIL, seed=seed).batches]
    assert all(b <= a + 1e-9 for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("order", ["admitted", "finished", "oldest"])
def test_without_costs_an_interruption_changes_versions_and_no_times(order):
    rates = QueueRates(8, 0.5, 9.0, reward_seconds=0.3)
    rules = QueueRules(4, 3, order=order)
    go_on, finish = (run(rates, replace(rules, push=p), TAIL, 30) for p in ("interrupt", "finish"))
    if order != "oldest":  # which asks for versions, and so takes others
        for a, b in zip(go_on.batches, finish.batches, strict=True):
            assert a.ended == pytest.approx(b.ended) and a.tokens == b.tokens
    assert any(len(c.versions) > 1 for c in go_on.trained())
    assert go_on.token_staleness() < finish.token_staleness() - 0.1
    assert go_on.live_versions == 1 < finish.live_versions


def test_the_same_seed_repeats_and_another_does_not():
    rates, rules = QueueRates(4, 0.5, 5.0, jitter=0.5), QueueRules(4, 2)
    first, again, other = (run(rates, rules, TAIL, seed=s) for s in (1, 1, 2))
    assert first == again and first.batches != other.batches


def test_lengths_are_those_of_the_number_whatever_the_rates():
    slow = run(QueueRates(1, 1.0, 5.0, jitter=1.0), QueueRules(2, 0), TAIL)
    fast = run(QueueRates(5, 0.1, 5.0), QueueRules(2, 3), TAIL)
    pairs = zip(slow.completions, fast.completions, strict=False)
    assert all(a.length == b.length for a, b in pairs)


# --- what the rules do -----------------------------------------------------------------------

FAST_SAMPLER = QueueRates(32, 0.1, 4.0, reward_seconds=0.01)
STEADY = 30  # updates after which the queues are full


def ages(rules, rates=FAST_SAMPLER, updates=90):
    done = run(rates, rules, TAIL, updates)
    return done, done.staleness(STEADY)


@pytest.mark.parametrize("cap", [2, 4])
def test_the_rule_caps_each_age_only_in_the_order_of_admission(cap):
    """As they finish, the mean age is η (all (η + 1)·B places are taken); the oldest is not."""
    _, in_order = ages(QueueRules(8, cap))
    assert max(in_order) == cap
    done, as_finished = ages(QueueRules(8, cap, order="finished"))
    assert sum(as_finished) / len(as_finished) == pytest.approx(cap, abs=0.05)
    assert max(as_finished) > cap + 1
    short, long = done.staleness_by_length(STEADY)
    assert long > short + 0.8, "who answers at length is the older"


def test_oldest_first_helps_and_caps_nothing():
    """It cannot take a completion that is still running, however old."""
    rules = QueueRules(8, 4, order="finished")
    (_, as_finished), (_, oldest) = ages(rules), ages(replace(rules, order="oldest"))
    assert 4 < max(oldest) < max(as_finished)


def test_waiting_for_the_oldest_costs_throughput():
    in_order, _ = ages(QueueRules(8, 2))
    as_finished, _ = ages(QueueRules(8, 2, order="finished"))
    assert as_finished.throughput(STEADY) > 1.1 * in_order.throughput(STEADY)


def test_who_answers_short_is_trained_first():
    """32 start together; the first batch as they finish is the 8 shortest of them, or shorter."""
    done = run(FAST_SAMPLER, QueueRules(8, order="finished"), TAIL)
    first = sorted(c.length for c in done.trained() if c.batch == 0)
    shortest = sorted(c.length for c in done.completions[:32])[:8]
    assert sum(first) <= sum(shortest) and done.length_bias() < 0.6
    in_order = run(FAST_SAMPLER, QueueRules(8), TAIL)
    assert [c.number for c in in_order.trained() if c.batch == 0] == list(range(1, 9))
    lengths = [c.length for c in in_order.completions]
    by_hand = sum(lengths[:8]) / 8 / (sum(lengths) / len(lengths))
    assert in_order.length_bias(1) == pytest.approx(by_hand)


def test_the_version_tag_drops_the_long():
    rules = QueueRules(8, 3, order="finished")
    kept, _ = ages(rules)
    done, trained_ages = ages(replace(rules, max_age=3))
    number, tokens = done.dropped()
    assert max(trained_ages) <= 3 and number > 10
    means = [sum(x) / len(x) for x in (
        [c.length for c in done.trained(STEADY)], [c.length for c in kept.trained(STEADY)])
    ]  # fmt: skip
    assert tokens / number > means[1] and means[0] < means[1]


@pytest.mark.parametrize("count", ["admitted", "finished"])
def test_the_places_of_the_dropped_are_given_back(count):
    """More are dropped than there are places: kept in the count, they would block everyone."""
    rules = QueueRules(8, 2, order="finished", max_age=1, count=count)
    done, _ = ages(rules)
    assert done.dropped()[0] > 3 * 8 + 32 and not done.stuck
    assert len(done.batches) == 90


def test_counting_the_finished_lets_too_many_in():
    right, _ = ages(QueueRules(8, 0))
    wrong, wrong_ages = ages(QueueRules(8, 0, count="finished"))
    assert len(right.completions) <= 8 * 90
    assert max(wrong_ages) > 0 and sum(wrong_ages) / len(wrong_ages) > 1


def test_a_limit_that_blocks_the_one_that_is_waited_for_is_a_deadlock():
    lengths = iter([100])
    rules = QueueRules(2, queue_limit=1)
    done = run(QueueRates(4, 0.1, 1.0), rules, lambda _: next(lengths, 5))
    assert done.stuck and not done.batches and done.throughput() == 0
    lengths = iter([100])
    as_finished = replace(rules, order="finished")
    assert not run(QueueRates(4, 0.1, 1.0), as_finished, lambda _: next(lengths, 5)).stuck


# --- seed 004: "network jitter caused training queue backlog and stale parameters" ------------

BALANCED = QueueRates(10, 0.1, 2.0, reward_seconds=0.01)  # 10 completions of 20 tokens in 2 s
TWENTY = LengthTail(20)


def seed_004(rules, jitter, seed=0):
    rates = replace(BALANCED, jitter=jitter)
    done = run(rates, rules, TWENTY, updates=200, seed=seed)
    return max(done.staleness()), max(b.ready for b in done.batches), done.throughput()


@pytest.mark.parametrize("seed", range(3))
def test_jitter_fills_the_training_queue_and_ages_it_and_a_throttle_bounds_both(seed):
    """The mean speed is the same with jitter: what grows is a random walk without a wall."""
    uncapped = QueueRules(10, order="finished")
    assert seed_004(uncapped, 0.0)[:2] == (2, 0)
    age, backlog, speed = seed_004(uncapped, 1.0, seed)
    assert age > 8 and backlog > 60
    capped_age, capped_backlog, capped_speed = seed_004(QueueRules(10, 4), 1.0, seed)
    assert capped_age == 4 and capped_backlog <= 5 * 10 - 10  # (η + 1)·B, a batch is in training
    limited = replace(uncapped, queue_limit=20)
    limited_age, limited_backlog, limited_speed = seed_004(limited, 1.0, seed)
    places = 10 + 1 + 2 * 20 + 10  # workers, scorer, two queues, the batch in training
    assert limited_age <= places // 10 and limited_backlog <= 20 + 1
    for throttled in (capped_speed, limited_speed):
        assert 0.9 < throttled / speed < 1, "what it costs: the sampler waits at times"


# --- rates, lengths, bad input ---------------------------------------------------------------


def test_rates_from_a_measured_run():
    rates = QueueRates.measured(64, [100, 50], [2.0, 1.0], [0.64, 0.64], [3.0, 5.0])
    assert rates == QueueRates(64, 0.02, 4.0, reward_seconds=0.01, jitter=0.25)
    with pytest.raises(ValueError, match="have 2, 1, 2, 2 entries"):
        QueueRates.measured(64, [100, 50], [2.0], [0.6, 0.6], [3.0, 5.0])


@pytest.mark.parametrize("jitter", [0.5, 1.0])
def test_jitter_spreads_the_updates_and_keeps_their_mean(jitter):
    done = run(QueueRates(1, 0.1, 3.0, jitter=jitter), QueueRules(1), LengthTail(1), updates=3000)
    again = QueueRates.measured(1, [1.0] * 3000, [0.1] * 3000, [0.0] * 3000,
                                [b.ended - b.began for b in done.batches])  # fmt: skip
    assert again.train_seconds == pytest.approx(3.0, rel=0.05)
    assert again.jitter == pytest.approx(jitter, rel=0.06)


def test_a_tail_keeps_the_mean():
    generator = random.Random(0)
    for sigma in (0.5, 1.0):
        drawn = [LengthTail(100, sigma)(generator) for _ in range(20000)]
        assert sum(drawn) / len(drawn) == pytest.approx(100, rel=0.03)
        high = 100 * math.exp(2.326 * sigma - sigma**2 / 2)
        assert sorted(drawn)[19800] == pytest.approx(high, rel=0.1)
    assert {LengthTail(7)(generator) for _ in range(9)} == {7}
    assert max(LengthTail(100, 2.0, limit=150)(generator) for _ in range(999)) == 150


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: QueueRates(0, 1.0, 1.0), "workers=0"),
        (lambda: QueueRates(1, 0.0, 1.0), "above 0"),
        (lambda: QueueRates(1, 1.0, math.nan), "train_seconds=nan"),
        (lambda: QueueRates(1, 1.0, 1.0, reward_workers=0), "reward_workers=0"),
        (lambda: QueueRates(1, 1.0, 1.0, jitter=-1.0), "jitter=-1.0"),
        (lambda: QueueRules(0), "batch_size=0"),
        (lambda: QueueRules(1, -1), "max_staleness=-1"),
        (lambda: QueueRules(1, max_age=-1), "max_age=-1"),
        (lambda: QueueRules(1, queue_limit=0), "queue_limit=0"),
        (lambda: QueueRules(1, push="drain"), "push='drain'"),
        (lambda: QueueRules(1, order="newest"), "order='newest'"),
        (lambda: QueueRules(1, count="trained"), "count='trained'"),
        (lambda: LengthTail(0.5), "mean=0.5"),
        (lambda: LengthTail(5, -1.0), "sigma=-1.0"),
        (lambda: run(TEN, QueueRules(1), updates=0), "updates=0"),
    ],
)
def test_bad_settings(make, message):
    with pytest.raises(ValueError, match=message):
        make()
