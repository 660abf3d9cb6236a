"""TRL's own loss on the same numbers.

`GRPOTrainer._compute_loss` is called with a stand-in trainer that has the attributes it reads, for
each loss_type it has but `vespo`, which we do not. Its KL is k3 and, with the bias correction,
"unbiased" with π_old for the sampler.

Same formula under another name (`SAME` below):
    bnpo        dapo within one micro-batch: a token mean of its own
    luspo       gspo with a sum over tokens in place of the mean: aggregation "constant"
    delta       dual_clip, if it lies above 1 + epsilon_high
Deliberate differences, each asserted in a test:
    epsilon_high of cispo is the cap itself, not what is added to 1; its default would cap at 0.2
    cispo_clip_ratio counts Â > 0 alone; our clip_fraction counts both signs
    sapo's temperatures are float32 whatever the dtype of the loss: 1.05 is 1.0499999523
    delta below 1 + epsilon_high also shrinks the range for Â > 0; a dual clip never does
    clip fractions do not count delta; ours count the dual clip
    with sequence ratios the clip fractions are means over sequences; ours over tokens
Elsewhere: TRL takes advantages with ddof 1 and eps 1e-4 (test_advantages has both conventions),
and sums sequence ratios of μ as a product, where gspo's is a geometric mean in both.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from stablerl_core.policy import aggregate, kl_estimate, loss_denominator, policy_objective

pytest.importorskip("trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

B, T, MAX_LENGTH, BETA = 6, 6, 10, 0.3


def tensors():
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logp = -3 * uniform(B, T)
    old_logp = logp + 1.4 * uniform(B, T) - 0.7
    ref_logp = logp + uniform(B, T) - 0.5
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5, -0.3, 0.9], dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([[6], [1], [3], [4], [6], [5]])
    return logp, old_logp, ref_logp, advantages, mask


def trl_loss(logp, loss_type, beta=0.0, bias_correction=False, **changes):
    """The loss that TRL computes, for `logp` in place of a model's output."""
    options = dict(epsilon_low=0.2, epsilon_high=0.28, delta=None, level="token") | changes
    _, old_logp, ref_logp, advantages, mask = tensors()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=options["level"],
        beta=beta,
        args=SimpleNamespace(
            use_bias_correction_kl=bias_correction,
            delta=options["delta"],
            steps_per_generation=1,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
        ),
        loss_type=loss_type,
        epsilon_low=options["epsilon_low"],
        epsilon_high=options["epsilon_high"],
        use_vllm=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = dict(
        prompt_ids=ids[:, :1],
        prompt_mask=mask[:, :1].long(),
        completion_ids=ids,
        completion_mask=mask.long(),
        advantages=advantages,
        old_per_token_logps=old_logp,
        ref_per_token_logps=ref_logp,
        num_items_in_batch=mask.sum(),
    )
    loss = grpo_trainer.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss, trainer._metrics["train"]


def compare(ours, theirs, logp):
    grads = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    assert grads[0].norm() > 0.01


LONGEST = B * MAX_LENGTH
RANGE = {"clip_low": 0.2, "clip_high": 0.28}
NARROW = {"clip_low": 0.01, "clip_high": 0.02}  # so that sequence ratios near 1 meet it
SEQUENCE = {"level": "sequence", "epsilon_low": 0.01, "epsilon_high": 0.02}
SAME = [  # TRL's loss_type and options, our name and options
    ("grpo", {}, "grpo", RANGE),
    ("bnpo", {}, "dapo", {}),
    ("dapo", {}, "dapo", {}),
    ("dr_grpo", {}, "dr_grpo", RANGE | {"denominator": LONGEST}),
    ("grpo", {"delta": 1.4}, "grpo", RANGE | {"dual_clip": 1.4}),
    ("dapo", {"delta": 1.4}, "dapo", {"dual_clip": 1.4}),
    ("grpo", SEQUENCE, "gspo", NARROW),
    ("grpo", SEQUENCE, "gspo_token", NARROW),
    ("dapo", SEQUENCE, "gspo", NARROW | {"aggregation": "token"}),
    ("dr_grpo", SEQUENCE, "gspo", NARROW | {"aggregation": "constant", "denominator": LONGEST}),
    ("luspo", SEQUENCE, "gspo", NARROW | {"aggregation": "constant"}),
    ("cispo", {"epsilon_high": 1.3}, "cispo", {"clip_high": 0.3}),
    ("sapo", {}, "sapo", {"tau_negative": torch.tensor(1.05).item()}),
]


@pytest.mark.parametrize("loss_type, theirs, name, ours", SAME)
def test_loss_and_gradient(loss_type, theirs, name, ours):
    logp, old_logp, _, advantages, mask = tensors()
    logp.requires_grad_()
    loss, seen = policy_objective(name, logp, old_logp, advantages, mask, **ours)
    expected, metrics = trl_loss(logp, loss_type, **theirs)
    compare(loss, expected, logp)
    if loss_type not in ("cispo", "sapo") and not theirs:
        assert seen.clip_fraction_low == pytest.approx(metrics["clip_ratio/low_mean"][0])
        assert seen.clip_fraction_high == pytest.approx(metrics["clip_ratio/high_mean"][0])
    if name not in ("cispo", "sapo"):
        assert seen.clip_fraction_low > 0 and seen.clip_fraction_high > 0


def test_clip_fractions_that_count_otherwise():
    """What TRL leaves out: capped tokens with Â < 0, the dual clip, the length of a sequence."""
    logp, old_logp, _, advantages, mask = tensors()
    ratio = (logp - old_logp).exp()
    positive, tokens = (advantages > 0)[:, None], mask.sum()

    def ours(name, **options):
        return policy_objective(name, logp, old_logp, advantages, mask, **options)[1]

    theirs = trl_loss(logp, "cispo", epsilon_high=1.3)[1]["cispo_clip_ratio"][0]
    capped = mask & (ratio > 1.3)
    assert theirs == pytest.approx((capped & positive).sum() / tokens)
    assert ours("cispo", clip_high=0.3).clip_fraction == pytest.approx(capped.sum() / tokens)
    assert (capped & ~positive).any()

    theirs = trl_loss(logp, "dapo", delta=1.4)[1]["clip_ratio/high_mean"][0]
    dual = (mask & ~positive & (ratio > 1.4)).sum() / tokens
    assert dual > 0
    assert ours("dapo", dual_clip=1.4).clip_fraction_high == pytest.approx(theirs + dual)

    theirs = trl_loss(logp, "grpo", **SEQUENCE)[1]["clip_ratio/region_mean"][0]
    s = (torch.where(mask, ratio.log(), 0.0).sum(-1) / mask.sum(-1)).exp()
    clipped = ((s > 1.02) & (advantages > 0)) | ((s < 0.99) & (advantages < 0))
    assert theirs == pytest.approx(clipped.double().mean())
    lengths = mask.sum(-1)
    expected = ((clipped * lengths).sum() / lengths.sum()).item()
    assert ours("gspo", **NARROW).clip_fraction == pytest.approx(expected)
    assert expected != pytest.approx(theirs)


def test_cispo_with_the_default_epsilon_high_of_trl_caps_every_weight_at_a_fifth():
    """Left at None it becomes epsilon, 0.2, which cispo takes for the cap: here clip_high −0.8."""
    logp, old_logp, _, advantages, mask = tensors()
    logp.requires_grad_()
    theirs, _ = trl_loss(logp, "cispo", epsilon_high=0.2)
    assert (old_logp - logp).exp().max() < 5  # every ratio is above 0.2
    ours, _ = policy_objective("reinforce", logp, None, 0.2 * advantages, mask, aggregation="token")
    compare(ours, theirs, logp)


def test_a_delta_inside_the_range_shrinks_it_for_positive_advantages_too():
    """delta 1.1 < 1.28: TRL's clip_high is then 0.1 for Â > 0 and delta has no effect for Â < 0."""
    logp, old_logp, _, advantages, mask = tensors()
    denominator = loss_denominator(mask, "token")
    for keep, options in (
        (advantages > 0, {"clip_high": 0.1}),
        (advantages < 0, {"dual_clip": 1.28}),
    ):
        x = logp.clone().requires_grad_()
        rows = mask & keep[:, None]
        ours, _ = policy_objective(
            "dapo", x, old_logp, advantages, rows, denominator=denominator, **options
        )
        grad = torch.autograd.grad(trl_loss(x, "dapo", delta=1.1)[0], x)[0]
        torch.testing.assert_close(torch.autograd.grad(ours, x)[0], torch.where(rows, grad, 0.0))


@pytest.mark.parametrize("bias_correction", [False, True])
def test_kl_penalty(bias_correction):
    """The penalty alone: the loss with it minus the loss without."""
    logp, old_logp, ref_logp, _, mask = tensors()
    logp.requires_grad_()
    ours = aggregate(
        kl_estimate(logp, ref_logp, "unbiased", old_logp)
        if bias_correction
        else kl_estimate(logp, ref_logp, "k3"),
        mask,
        "sequence",
    )
    with_penalty, metrics = trl_loss(logp, "grpo", BETA, bias_correction)
    theirs = (with_penalty - trl_loss(logp, "grpo")[0]) / BETA
    compare(ours, theirs, logp)
    assert metrics["kl"][0] > 0
