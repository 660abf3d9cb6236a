"""TRL's own loss on the same numbers.

`GRPOTrainer._compute_loss` is called with a stand-in trainer that has the attributes it reads.
Same formula: loss_type "grpo" is our grpo with aggregation "sequence", "dapo" (one step, one
process) is aggregation "token", "dr_grpo" is "constant" with denominator B · max length; its KL
is k3 and, with the bias correction, "unbiased" with π_old for the sampler. Different: TRL takes
advantages with ddof 1 and eps 1e-4 (see test_advantages for both conventions).
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from stablerl_core.policy import aggregate, kl_estimate, policy_objective

pytest.importorskip("trl")
grpo_trainer = pytest.importorskip("trl.trainer.grpo_trainer")

B, T, MAX_LENGTH, BETA = 4, 6, 10, 0.3


def tensors():
    generator = torch.Generator().manual_seed(0)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    logp = -3 * uniform(B, T)
    old_logp = logp + uniform(B, T) - 0.5
    ref_logp = logp + uniform(B, T) - 0.5
    advantages = torch.tensor([1.2, -0.7, 0.4, -1.5], dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor([[6], [1], [3], [4]])
    return logp, old_logp, ref_logp, advantages, mask


def trl_loss(logp, loss_type, beta=0.0, bias_correction=False):
    """The loss that TRL computes, for `logp` in place of a model's output."""
    _, old_logp, ref_logp, advantages, mask = tensors()
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=beta,
        args=SimpleNamespace(
            use_bias_correction_kl=bias_correction, delta=None, steps_per_generation=1
        ),
        loss_type=loss_type,
        epsilon_low=0.2,
        epsilon_high=0.28,
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


@pytest.mark.parametrize(
    "loss_type, aggregation, denominator",
    [("grpo", "sequence", None), ("dapo", "token", None), ("dr_grpo", "constant", B * MAX_LENGTH)],
)
def test_grpo_loss_gradient_and_clip_fractions(loss_type, aggregation, denominator):
    logp, old_logp, _, advantages, mask = tensors()
    logp.requires_grad_()
    ours, seen = policy_objective(
        "grpo",
        logp,
        old_logp,
        advantages,
        mask,
        clip_low=0.2,
        clip_high=0.28,
        aggregation=aggregation,
        denominator=denominator,
    )
    theirs, metrics = trl_loss(logp, loss_type)
    compare(ours, theirs, logp)
    assert seen.clip_fraction_low == pytest.approx(metrics["clip_ratio/low_mean"][0])
    assert seen.clip_fraction_high == pytest.approx(metrics["clip_ratio/high_mean"][0])
    assert seen.clip_fraction_low > 0 and seen.clip_fraction_high > 0


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
