"""The chain: its fast GAE is the package's, its closed forms are what GAE does."""

import math

import pytest
import torch
from torch.testing import assert_close

from stablerl_core.experiments.chain import (
    Chain,
    Credit,
    Policy,
    TableCritic,
    chain_gae,
    credit_moments,
    stop_preference,
    train_chain,
)
from stablerl_core.policy import gae


def _policy(length=12, seed=0):
    return Policy(Chain(length), torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("length", [1, 2, 7, 64, 65])
@pytest.mark.parametrize("lam", [0.0, 0.5, 0.95, 1.0])
def test_the_fast_gae_is_the_package_s(length, lam):
    generator = torch.Generator().manual_seed(length)
    values = torch.randn(3, length, generator=generator, dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, -2.0], dtype=torch.float64)
    everywhere = torch.ones(3, length, dtype=torch.bool)
    expected = gae(rewards, values, everywhere, lam=lam)
    assert_close(chain_gae(rewards, values, lam), expected, rtol=1e-12, atol=1e-12)


def test_answers_are_drawn_from_the_policy_and_judged_at_three_places():
    policy = _policy(length=9)
    with torch.no_grad():
        policy.theta.normal_(generator=policy.generator)
    batch = policy.sample(4096)
    chance = policy.logits().detach().sigmoid()[batch.context]
    assert_close(batch.taken.float().mean(0), chance.mean(0), atol=0.03, rtol=0)
    both = policy.logp(batch).exp()
    assert_close(both, torch.where(batch.taken, chance, 1 - chance))
    question = torch.arange(8).repeat_interleave(512)
    assert_close(batch.right, batch.taken[:, [0, 4, 8]] == policy.answer[question])
    fillers = batch.context[:, [1, 2, 3, 5, 6, 7]]
    assert (fillers >= 24).all() and (batch.context[:, [0, 4, 8]] < 24).all()


def test_the_gradient_of_a_decision_is_the_score():
    policy = _policy(length=3)
    batch = policy.sample(8)
    policy.logp(batch)[0, 0].backward()
    sign = 1.0 if batch.taken[0, 0] else -1.0
    assert_close(policy.theta.grad, sign * 0.5 * policy.features[batch.context[0, 0]])


def test_what_each_critic_can_tell_apart():
    right = torch.tensor([[True, True, True], [False, True, True], [True, False, True]])
    batch = _policy(length=5).sample(8)._replace(right=right)

    def situations(critic, **options):
        return TableCritic(Chain(5), Credit(critic, **options)).situations(batch).tolist()

    # places 0, 2, 4; an even index means that something known was wrong
    assert situations("seeing") == [[1, 3, 3, 5, 5], [1, 2, 2, 4, 4], [1, 3, 3, 4, 4]]
    assert situations("blind") == [[1, 3, 3, 5, 5]] * 3
    assert situations("late", delay=0.2) == [[1, 1, 3, 3, 5], [1, 1, 2, 2, 4], [1, 1, 3, 3, 4]]


def test_a_critic_moves_to_the_mean_of_its_targets():
    critic = TableCritic(Chain(5), Credit("blind", critic_rate=0.5))
    critic.learn(torch.tensor([[1, 3], [1, 5]]), torch.tensor([[1.0, 4.0], [3.0, 8.0]]))
    assert critic.table.tolist() == [0, 1, 0, 2, 0, 4, 0, 0]
    critic.learn(torch.tensor([[3, 3]]), torch.tensor([[3.0, 5.0]]))
    assert critic.table.tolist() == [0, 1, 0, 3, 0, 4, 0, 0], "nothing seen, nothing changed"


def test_the_gap_is_the_expectation_of_gae():
    lam, distance, known, delay, chances = 0.8, 6, 0.7, 2, (0.6, 0.1)
    prior = sum(chances) / 2
    expected = []
    for chance in chances:
        late = torch.full((distance,), prior + known * (chance - prior), dtype=torch.float64)
        late[:delay] = prior
        values = torch.cat([torch.tensor([prior], dtype=torch.float64), late]).expand(2, -1)
        rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
        both = gae(rewards, values, torch.ones_like(values, dtype=torch.bool), lam=lam)[:, 0]
        expected.append(float(chance * both[0] + (1 - chance) * both[1]))
    gap, _ = credit_moments(distance, lam, known=known, delay=delay, chances=chances)
    assert gap == pytest.approx(expected[0] - expected[1], rel=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.7, 1.0])
def test_the_spread_is_the_variance_of_gae(lam):
    # Â_1 is linear in the readings: its variance is the sum of its squared slopes
    distance, noise, chance = 5, 0.3, 0.25
    size = distance + 1
    readings = torch.cat([torch.eye(size), torch.zeros(1, size)]).double()
    rewards = torch.tensor([0.0] * size + [1.0]).double()
    slopes = gae(rewards, readings, torch.ones_like(readings, dtype=torch.bool), lam=lam)[:, 0]
    variance = noise**2 * (slopes[:-1] ** 2).sum() + slopes[-1] ** 2 * chance * (1 - chance)
    _, spread = credit_moments(distance, lam, noise=noise, chances=(chance, 0.0))
    assert spread == pytest.approx(math.sqrt(variance), rel=1e-12)


def test_no_lambda_but_one_brings_a_far_reward_to_a_blind_critic():
    assert credit_moments(99, 1.0)[0] == pytest.approx(0.25)
    assert credit_moments(99, 0.95)[0] == pytest.approx(0.25 * 0.95**99)
    assert credit_moments(99, 0.95, known=1.0)[0] == pytest.approx(0.25)


@pytest.mark.parametrize(("error", "lam", "stop"), [(-0.3, 0.9, 0.2), (0.2, 0.5, 0.5)])
def test_preference_to_stop_is_the_expectation_of_gae(error, lam, stop):
    mean, far = 0.4, 400  # (1 − stop)^400 is nothing
    ends = torch.arange(1, far + 1)
    values = torch.full((far, far), mean + error, dtype=torch.float64)
    mask = torch.arange(far)[None, :] < ends[:, None]
    first = gae(torch.full((far,), mean).double(), values, mask, lam=lam)[:, 0]
    chance = stop * (1 - stop) ** (ends - 1).double()
    going_on = (chance[1:] * first[1:]).sum() / chance[1:].sum()
    assert stop_preference(error, lam, stop) == pytest.approx(float(first[0] - going_on), rel=1e-6)
    assert stop_preference(error, 1.0, stop) == 0


def test_training_repeats_and_differs_by_seed():
    credit = Credit("seeing", 0.95, pretrain=2)
    rows = train_chain(20, credit, 0, steps=10)
    assert [row["step"] for row in rows] == [5, 10]
    assert rows == train_chain(20, credit, 0, steps=10)
    assert rows != train_chain(20, credit, 1, steps=10)


def test_targets_with_the_lambda_of_the_advantages_teach_a_critic_later():
    # at λ = 0.5 nothing of the reward comes back over fifty tokens in twenty steps
    apart, coupled = (
        train_chain(100, Credit("seeing", 0.5, critic_lam=lam), 0, steps=20, every=20)[0]["first"]
        for lam in (1.0, None)
    )
    assert apart > coupled + 0.1


def test_pretraining_moves_the_critic_and_not_the_policy():
    cold = train_chain(20, Credit("seeing", 0.95), 0, steps=5)
    warm = train_chain(20, Credit("seeing", 0.95, pretrain=30), 0, steps=5)
    assert cold[0]["reward"] < 0.2 and warm[0]["reward"] < 0.25  # (1/2)³ at the start


def test_credit_reaches_the_first_decision_or_does_not():
    def first(length, credit):
        return train_chain(length, credit, 0, steps=60, every=60)[0]["first"]

    assert first(20, Credit()) > 0.8
    assert first(100, Credit("blind", 0.95)) < first(100, Credit("blind", 1.0)) - 0.15
    assert first(100, Credit("seeing", 0.95)) > 0.8


def test_scaling_the_reward_changes_nothing_once_advantages_are_whitened():
    rows = [
        train_chain(20, Credit("blind", 0.95, reward_scale=scale), 0, steps=20)[-1]["reward"]
        for scale in (1.0, 16.0)
    ]
    assert rows[0] == pytest.approx(rows[1], abs=0.02)


def test_the_length_sets_an_adaptive_lambda():
    assert Credit("blind", None).lam_at(100) == pytest.approx(0.8)
    assert Credit("blind", None).lam_at(20) == 0
    assert Credit("blind", 0.9).lam_at(100) == 0.9
