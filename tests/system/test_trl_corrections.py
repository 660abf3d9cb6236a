"""TRL's own off-policy mask, and its loss with importance weights, on the same numbers.

`GRPOTrainer._compute_loss` is called with a stand-in trainer that has the attributes it reads.
Same: the mask; and that mask and weights multiply the surrogate outside its minimum, leave the KL
penalty and the denominator alone. Different: TRL has no diagnostics before the cap (its ratio
statistics are after it), and a NaN among the sampler's log-probabilities is a ratio of 1 and a
distance of 0 there, an error here. The code that makes TRL's weights is not a function of its
own, so it cannot be called; the default "sequence_mis" is its mode and cap.
"""

from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from stablerl_core.policy import policy_objective
from stablerl_core.system import CORRECTIONS, importance_weights, off_policy_sequence_mask

pytest.importorskip("trl")
trainer_class = pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer

B, T = 6, 5
MASK = torch.arange(T) < torch.tensor([[5], [1], [3], [4], [2], [5]])
ADVANTAGES = torch.tensor([1.2, -0.7, 0.4, -1.5, 0.0, -0.3], dtype=torch.float64)


def test_sequence_mis_is_the_default():
    defaults = {f.name: f.default for f in fields(pytest.importorskip("trl").GRPOConfig)}
    assert defaults["vllm_importance_sampling_mode"] == "sequence_mask"
    assert defaults["vllm_importance_sampling_clip_max"] == CORRECTIONS["sequence_mis"]["cap"]
    assert defaults["vllm_importance_sampling_clip_min"] is None


def tensors(seed):
    g = torch.Generator().manual_seed(seed)
    mu, old, new = (0.4 * torch.randn(B, T, generator=g, dtype=torch.float64) for _ in range(3))
    mu = mu - 2
    return mu, mu + old, mu + old + new / 2


@pytest.mark.parametrize("threshold", [0.0, 0.05, 0.2])
def test_the_mask(threshold):
    kept = []
    for seed in range(20):
        mu, _, logp = tensors(seed)
        theirs = trainer_class.get_off_policy_mask(
            ADVANTAGES[:, None], logp, mu, MASK.double(), threshold
        )
        kept.append(off_policy_sequence_mask(logp, mu, ADVANTAGES, MASK, threshold))
        assert torch.equal(theirs.bool(), kept[-1])
    assert 0.4 < torch.cat(kept).double().mean() < 0.95


def trl_loss(logp, old_logp, mu, weights, threshold):
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logp, torch.zeros_like(logp), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=threshold,
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        importance_sampling_level="token",
        beta=0.0,
        args=SimpleNamespace(delta=None, steps_per_generation=1),
        loss_type="dapo",
        epsilon_low=0.2,
        epsilon_high=0.28,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
        ),
        _metrics=defaultdict(lambda: defaultdict(list)),
    )
    ids = torch.zeros(B, T, dtype=torch.long)
    inputs = dict(
        prompt_ids=ids[:, :1],
        prompt_mask=MASK[:, :1].long(),
        completion_ids=ids,
        completion_mask=MASK.long(),
        advantages=ADVANTAGES,
        old_per_token_logps=old_logp,
        sampling_per_token_logps=mu,
        importance_sampling_ratio=weights,
        num_items_in_batch=MASK.sum(),
    )
    return trainer_class._compute_loss(trainer, None, inputs)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_weights_and_mask_enter_the_loss_in_the_same_place(name):
    mu, old_logp, logp = tensors(0)
    weights = importance_weights(old_logp, mu, MASK, **CORRECTIONS[name]).values
    logp.requires_grad_()
    keep = off_policy_sequence_mask(logp, mu, ADVANTAGES, MASK, 0.05)
    assert 0 < keep.sum() < B
    ours, _ = policy_objective(
        "dapo", logp, old_logp, ADVANTAGES[:, None] * weights * keep, MASK, aggregation="token"
    )
    theirs = trl_loss(logp, old_logp, mu, weights, 0.05)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    grads = [torch.autograd.grad(loss, logp)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)
    assert grads[0].norm() > 0.01
