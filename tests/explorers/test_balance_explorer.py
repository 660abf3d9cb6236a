"""Explorer of chapter 23: what is equal by construction, and which way each bound moves."""

import math

import pytest
import torch

from stablerl_core.explorers.balance import balance, even_batch, share
from stablerl_core.policy import policy_objective


@pytest.mark.parametrize("longer", [1, 2, 4])
def test_on_policy_the_share_is_that_of_the_tokens(longer):
    logp, old_logp, advantages, mask = even_batch(0.0, longer)
    assert advantages.sum().item() == pytest.approx(0, abs=1e-12) and (logp == old_logp).all()
    for statistic in ("code", "gradient"):
        on_policy = share((logp, old_logp, advantages, mask), statistic, 0.6, 1.2)
        assert on_policy == pytest.approx(1 / (1 + longer))


def test_raising_c_low_moves_value_and_gradient_apart():
    batch = even_batch(0.4)
    gradient = [share(batch, "gradient", low, 1.2) for low in (0.6, 0.7, 0.8, 0.9)]
    value = [share(batch, "code", low, 1.2) for low in (0.6, 0.7, 0.8, 0.9)]
    assert gradient == sorted(set(gradient)) and value == sorted(set(value), reverse=True)


def test_the_gradient_share_is_that_of_the_loss_that_trains():
    logp, old_logp, advantages, mask = even_batch(0.4, 2)
    logp = logp.requires_grad_()
    bounds = {"clip_low": 0.3, "clip_high": 0.6, "aggregation": "token"}
    loss, _ = policy_objective("bapo", logp, old_logp, advantages, mask, **bounds)
    (pull,) = torch.autograd.grad(loss, logp)
    by_hand = (pull.abs()[advantages > 0].sum() / pull.abs().sum()).item()
    batch = (logp.detach(), old_logp, advantages, mask)
    assert share(batch, "gradient", 0.7, 1.6) == pytest.approx(by_hand)


def test_eq_8_leaves_the_axis_where_its_denominator_vanishes():
    text, (curves, _) = balance(0.05, 1, 0.6, 1.2)
    assert "more than 1" in text and all(math.isnan(v) for v in curves.lines["Eq. 8"])
