"""verl's Clip-Cov, KL-Cov, leave-one-out advantage and KL controller on the same numbers.

Same formula, same draw: with one seed verl's Clip-Cov and ours silence the same tokens. Different:
    verl silences the token's loss; ours its advantage, so that any objective can be used
    verl's KL-Cov drops the ratio clip; ours only says which tokens, the objective is the caller's
    a group of one keeps its reward as the leave-one-out advantage in verl; ours is 0
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from verl_functions import Config, core_algos

from stablerl_core.policy import AdaptiveKL, clip_cov, group_advantages, kl_cov, policy_objective

B, T = 6, 20


@pytest.fixture(scope="module")
def verl():
    return core_algos()


def tensors():
    generator = torch.Generator().manual_seed(0)
    logp = -3 * torch.rand(B, T, generator=generator, dtype=torch.float64)
    old_logp = logp + 0.3 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    advantages = 2 * torch.randn(B, generator=generator, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([[20], [1], [7], [15], [20], [9]])
    return logp.requires_grad_(), old_logp, advantages, mask


def verl_loss(function, batch, **options):
    logp, old_logp, advantages, mask = batch
    wide = advantages[:, None].expand(B, T).contiguous()
    config = Config(policy_loss=SimpleNamespace(**options))
    return function(old_logp, logp, wide, mask.double(), "token-mean", config)[0]


def compare(ours, theirs, logp):
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    assert grads[0].norm() > 0.01


@pytest.mark.parametrize("seed", range(3))
def test_clip_cov_draws_the_same_tokens(verl, seed):
    batch = logp, old_logp, advantages, mask = tensors()
    ratio = (logp - old_logp).exp().detach()
    up = advantages[:, None] > 0
    clipped = mask & torch.where(up, ratio > 1.2, ratio < 0.8)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        theirs = verl_loss(
            verl.compute_policy_loss_clip_cov,
            batch,
            clip_cov_ratio=0.05,
            clip_cov_lb=0.5,
            clip_cov_ub=2.0,
        )
    drawn = torch.Generator().manual_seed(seed)
    options = dict(ratio=0.05, low=0.5, high=2.0)
    kept = clip_cov(advantages, logp, mask, clipped=clipped, generator=drawn, **options)
    assert (mask & (kept == 0)).sum() == 3 and (clipped & (kept != 0)).any()
    compare(
        policy_objective("grpo", logp, old_logp, kept, mask, aggregation="token")[0], theirs, logp
    )


def test_kl_cov_chooses_the_same_tokens(verl):
    batch = logp, old_logp, advantages, mask = tensors()
    theirs = verl_loss(verl.compute_policy_loss_kl_cov, batch, kl_cov_ratio=0.2, ppo_kl_coef=0.7)
    chosen = kl_cov(advantages, logp, mask, ratio=0.2)
    unclipped = dict(clip_low=1.0, clip_high=1e9, aggregation="token")
    loss, _ = policy_objective("grpo", logp, old_logp, advantages, mask, **unclipped)
    pull = torch.where(chosen, (logp - old_logp).abs(), 0.0).sum() / mask.sum()
    compare(loss + 0.7 * pull, theirs, logp)


def test_leave_one_out_and_its_group_of_one(verl):
    rewards = torch.randn(6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    one = torch.ones(6, 1, dtype=torch.float64)

    def theirs(groups):
        return verl.compute_rloo_outcome_advantage(rewards[:, None].clone(), one, groups)[0][:, 0]

    options = dict(scale="none", baseline="leave_one_out")
    ours = group_advantages(rewards, 3, **options)
    torch.testing.assert_close(theirs(np.array([0, 0, 0, 1, 1, 1])), ours, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(theirs(np.arange(6)), rewards)
    assert not group_advantages(rewards, 1, **options).any()


def test_the_kl_controller(verl):
    theirs = verl.AdaptiveKLController(init_kl_coef=0.05, target_kl=0.1, horizon=10_000)
    ours = AdaptiveKL(start=0.05, target=0.1, gain=256 / 10_000)
    value, rows = ours(1, None, []), []
    for step, kl in enumerate([0.02, 0.3, 0.12, 0.1, 0.08, 1.0, 0.5, 0.09], start=2):
        assert value == pytest.approx(theirs.value, rel=1e-12)
        theirs.update(kl, 256)
        rows.append({"kl_ref": kl})
        value = ours(step, value, rows)
    assert value != 0.05
