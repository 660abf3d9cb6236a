"""verl's own functions on the same numbers: losses, KL estimators, advantages.

Same formula under another name (`SAME` below):
    vanilla     grpo, dr_grpo and dapo with dual_clip 3, which verl always has (clip_ratio_c)
    gspo        our gspo_token, and our gspo where a sequence has one advantage
    reinforce   reinforce; with MiniRL's masked and truncated weight as rollout_is_weights, minirl
    low_var_kl  k3; "kl" and "mse" are k1 and k2
Deliberate differences, each asserted in a test:
    log-ratios are clamped at ±20 (gspo: at 10): beyond, no gradient; ours have no silent clamp
    the output of low_var_kl is clamped at 10: no gradient from log δ = 2.611 on
    cispo's weight has a lower bound, 1 − clip_ratio_low = 0.8; the paper's and ours has none
    cispo's pg_clipfrac counts tokens with Â = 0; ours does not
    a sequence without a counted token is not counted in the mean over sequences; ours is
    seq-mean-token-mean divides by |o| + 1e-8; ours by |o|
    seq-mean-token-sum-norm divides by the padded width T unless told: a denominator of B · T
    sapo aggregates by sequence whatever loss_agg_mode says; ours takes any aggregation
    a group of one keeps its reward as the advantage; ours is 0
    the advantages of GAE are whitened; ours are not (compared before whitening)
"""

import math

import pytest
import torch
from verl_functions import Config, core_algos

from stablerl_core.policy import gae, group_advantages, kl_estimate, policy_objective

verl = core_algos()  # skips this file, or fails, where verl is not installed

B, T = 6, 7
SEQUENCE, TOKEN, SUM = "seq-mean-token-mean", "token-mean", "seq-mean-token-sum"
HIGHER = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
TIGHT = {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08}  # so that sequence ratios meet it


def tensors(advantages="rows"):
    """logp, old_logp, advantages, mask in float64; ratios 0.25 to 4; no row is empty."""
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logp = -3 * uniform(B, T)
    old_logp = logp + 2.8 * uniform(B, T) - 1.4
    size = (B, T) if advantages == "tokens" else (B,)
    mask = torch.arange(T) < torch.tensor([[7], [1], [3], [4], [6], [2]])
    return logp.requires_grad_(), old_logp, 2 * uniform(*size) - 1, mask


def verl_loss(function, batch, mode, weights=None, **config):
    logp, old_logp, advantages, mask = batch
    wide = advantages if advantages.ndim == 2 else advantages[:, None].expand(B, T)
    return getattr(verl, f"compute_policy_loss_{function}")(
        old_logp, logp, wide, mask.double(), mode, Config(**config), weights
    )


def compare(ours, theirs, logp, mode=None):
    rtol = 2e-8 if mode == SEQUENCE else 1e-12  # |o| + 1e-8 in a denominator
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=1e-14)
    grads = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=rtol, atol=1e-14)
    assert grads[0].norm() > 0.01


SAME = [  # verl's loss, its aggregation and options; our name and options
    ("vanilla", SEQUENCE, {}, "grpo", {"dual_clip": 3.0}),
    ("vanilla", SEQUENCE, {"clip_ratio_c": 1.5}, "grpo", {"dual_clip": 1.5}),
    ("vanilla", TOKEN, HIGHER, "dapo", {"dual_clip": 3.0}),
    ("vanilla", SUM, {}, "dr_grpo", {"dual_clip": 3.0}),
    ("vanilla", SUM + "-norm", {}, "dr_grpo", {"dual_clip": 3.0, "denominator": B * T}),
    (
        "vanilla",
        SUM + "-norm",
        {"global_batch_info": {"loss_scale_factor": 20}},
        "dr_grpo",
        {"dual_clip": 3.0, "denominator": B * 20},
    ),
    (
        "vanilla",
        SEQUENCE,
        {"clip_ratio_low": 0.3, "clip_ratio_high": 1.0},
        "bapo",
        {"clip_low": 0.3, "clip_high": 1.0, "dual_clip": 3.0},
    ),
    ("gspo", SEQUENCE, TIGHT, "gspo_token", {"clip_low": 0.05, "clip_high": 0.08}),
    (
        "gspo",
        TOKEN,
        TIGHT,
        "gspo_token",
        {"clip_low": 0.05, "clip_high": 0.08, "aggregation": "token"},
    ),
    ("sapo", SEQUENCE, {}, "sapo", {}),
    ("sapo", TOKEN, {"tau_pos": 0.5}, "sapo", {"tau_positive": 0.5}),
    ("cispo", TOKEN, HIGHER, "cispo", {"clip_low": 0.2, "clip_high": 0.28}),
    ("cispo", TOKEN, {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}, "cispo", {"clip_high": 0.5}),
    ("reinforce", SUM, {}, "reinforce", {}),
]


@pytest.mark.parametrize("advantages", ["rows", "tokens"])
@pytest.mark.parametrize("function, mode, config, name, options", SAME)
def test_loss_gradient_and_clip_fraction(function, mode, config, name, options, advantages):
    batch = tensors(advantages)
    theirs, metrics = verl_loss(function, batch, mode, **config)
    ours, seen = policy_objective(name, *batch, **options)
    by_sequence = mode == SEQUENCE or function == "sapo"
    compare(ours, theirs, batch[0], SEQUENCE if by_sequence else mode)
    assert seen.step_kl_k1 == pytest.approx(metrics["actor/ppo_kl"], rel=1e-6)
    if function not in ("sapo", "reinforce"):
        clipped = metrics["actor/pg_clipfrac"] + metrics["actor/pg_clipfrac_lower"]
        assert seen.clip_fraction == pytest.approx(clipped, rel=1e-6) and clipped > 0


def test_gspo_where_a_sequence_has_one_advantage():
    batch = tensors()
    theirs, _ = verl_loss("gspo", batch, SEQUENCE, **TIGHT)
    ours, _ = policy_objective("gspo", *batch, clip_low=0.05, clip_high=0.08)
    compare(ours, theirs, batch[0], SEQUENCE)


def test_minirl_is_reinforce_with_its_weight():
    """rollout_is_weights = M · min(π_θ/μ, 5), computed here by hand."""
    logp, old_logp, advantages, mask = batch = tensors()
    sampler_logp = old_logp - 0.9 * torch.rand(B, T, generator=torch.Generator().manual_seed(2))
    ratio, sign = (logp - old_logp).exp().detach(), advantages[:, None]
    weights = (logp - sampler_logp).exp().detach().clamp(max=5)
    assert (weights == 5).any()
    weights[((sign > 0) & (ratio > 1.27)) | ((sign < 0) & (ratio < 0.8))] = 0
    theirs, _ = verl_loss("reinforce", batch, SUM, weights)
    ours, _ = policy_objective("minirl", *batch, sampler_logp=sampler_logp)
    compare(ours, theirs, logp)


@pytest.mark.parametrize(
    "function, name, log_ratio, advantage, options",
    [
        ("vanilla", "grpo", 21.0, -1.0, {"dual_clip": math.inf}),
        ("gspo", "gspo_token", 11.0, -1.0, {}),
        ("sapo", "sapo", -21.0, 1.0, {}),
    ],
)
def test_a_clamped_log_ratio_has_no_gradient(function, name, log_ratio, advantage, options):
    """verl: 0 beyond its clamp. Ours: that of the formula, however large or small."""
    logp = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    batch = logp, logp.detach() - log_ratio, torch.tensor([advantage]).double(), logp.isfinite()
    wide = advantage * torch.ones_like(logp).detach()
    theirs, _ = getattr(verl, f"compute_policy_loss_{function}")(
        batch[1], logp, wide, batch[3].double(), SEQUENCE, Config(clip_ratio_c=1e30)
    )
    ours, _ = policy_objective(name, *batch, **options)
    assert torch.autograd.grad(theirs, logp)[0].item() == 0
    r = math.exp(log_ratio)
    expected = -advantage * r * (1 / math.cosh((r - 1) / 2) ** 2 if name == "sapo" else 1)
    assert torch.autograd.grad(ours, logp)[0].item() == pytest.approx(expected, rel=1e-9)


def test_cispo_has_a_lower_bound_there():
    """With verl's defaults weights lie in [0.8, 1.2]; the paper leaves the lower side open."""
    logp, old_logp, advantages, mask = batch = tensors()
    theirs, _ = verl_loss("cispo", batch, TOKEN)
    grad = torch.autograd.grad(theirs, logp)[0]
    ours, _ = policy_objective("cispo", *batch, clip_high=0.2)
    own = torch.autograd.grad(ours, logp)[0]
    ratio = (logp - old_logp).exp().detach()
    below = mask & (ratio < 0.8)
    assert below.any()
    torch.testing.assert_close(own[~below], grad[~below])
    torch.testing.assert_close(own[below], (grad * ratio / 0.8)[below])


def test_cispo_counts_clipped_tokens_without_an_advantage():
    logp, old_logp, advantages, mask = tensors()
    batch = logp, old_logp, 0 * advantages, mask
    assert verl_loss("cispo", batch, TOKEN)[1]["actor/pg_clipfrac"] > 0
    assert policy_objective("cispo", *batch, clip_low=0.2, clip_high=0.2)[1].clip_fraction == 0


def test_empty_sequences_and_the_denominator():
    """verl divides by the sequences that have a token, unless given the whole batch's size."""
    logp, old_logp, advantages, mask = tensors()
    mask[[1, 4]] = False
    batch = logp, old_logp, advantages, mask
    theirs, _ = verl_loss("vanilla", batch, SUM)
    ours, _ = policy_objective("dr_grpo", *batch, dual_clip=3.0)
    compare(ours * B / (B - 2), theirs, logp)
    theirs, _ = verl_loss("vanilla", batch, SUM, global_batch_info={"global_batch_size": B})
    compare(policy_objective("dr_grpo", *batch, dual_clip=3.0)[0], theirs, logp)


@pytest.mark.parametrize("theirs, ours", [("kl", "k1"), ("mse", "k2"), ("low_var_kl", "k3")])
def test_kl_estimators(theirs, ours):
    logp, ref_logp, _, _ = tensors()
    compare(
        kl_estimate(logp, ref_logp, ours).sum(), verl.kl_penalty(logp, ref_logp, theirs).sum(), logp
    )


def test_its_k3_is_clamped():
    """log δ = 2.7: k3 is 11.2, verl says 10 and has no gradient left."""
    logp = torch.tensor([-5.0], dtype=torch.float64, requires_grad=True)
    theirs = verl.kl_penalty(logp, logp.detach() + 2.7, "low_var_kl")
    assert theirs.item() == 10 and torch.autograd.grad(theirs.sum(), logp)[0].item() == 0
    ours = kl_estimate(logp, logp.detach() + 2.7, "k3")
    assert ours.item() == pytest.approx(math.exp(2.7) - 3.7)
    assert torch.autograd.grad(ours.sum(), logp)[0].item() == pytest.approx(1 - math.exp(2.7))


def outcome(function, rewards, group_size, **options):
    """verl's advantages for one reward a completion, (B,)."""
    index = (torch.arange(len(rewards)) // group_size).numpy()
    estimate = getattr(verl, f"compute_{function}_outcome_advantage")
    return estimate(rewards[:, None].clone(), torch.ones(len(rewards), 1), index, **options)[0][
        :, 0
    ]


def test_group_advantages():
    rewards = torch.tensor([1.0, 0.0, 0.3, 1.0, 0.2, 0.9, 0.9, -2.0], dtype=torch.float64)
    for scaled, scale in ((True, "std"), (False, "none")):
        ours = group_advantages(rewards, 4, scale=scale, ddof=1, eps=1e-6)
        theirs = outcome("grpo", rewards, 4, norm_adv_by_std_in_grpo=scaled)
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    ours = group_advantages(rewards, 4, scale="none", baseline="leave_one_out")
    torch.testing.assert_close(ours, outcome("rloo", rewards, 4), rtol=1e-12, atol=1e-14)


def test_a_group_of_one():
    """verl takes mean 0 and std 1 for it; ours has nothing to compare with and gives 0."""
    rewards = torch.tensor([0.7, -1.0], dtype=torch.float64)
    torch.testing.assert_close(outcome("grpo", rewards, 1), rewards, rtol=2e-6, atol=0)
    assert group_advantages(rewards, 1).tolist() == [0, 0]


@pytest.mark.parametrize("lam, gamma", [(1.0, 1.0), (0.95, 1.0), (0.8, 0.9)])
def test_gae_before_whitening(lam, gamma):
    """verl returns advantages + values as returns; its advantages themselves are whitened."""
    rewards, values, _, mask = tensors()
    rewards, values = rewards.detach(), values.detach()
    whitened, returns = verl.compute_gae_advantage_return(
        rewards * mask, values, mask.double(), gamma, lam
    )
    ours = gae(rewards, values, mask, lam=lam, gamma=gamma)
    torch.testing.assert_close(ours[mask], (returns - values)[mask], rtol=1e-12, atol=1e-14)
    counted = ours[mask]
    by_hand = (counted - counted.mean()) / counted.std()
    torch.testing.assert_close(whitened[mask], by_hand, rtol=1e-6, atol=1e-9)
