"""What formats hold, updates that rounding swallows, master weights, and a float32 head."""

import pytest
import torch
from torch import nn

from stablerl_core.numerics import MasterWeights, float32_head, number_format, swallowed
from stablerl_core.training import small_moe


@pytest.mark.parametrize(
    "dtype, bits, significant, largest, smallest, least",
    [
        (torch.float32, 32, 24, (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-149),
        (torch.bfloat16, 16, 8, (2 - 2**-7) * 2.0**127, 2.0**-126, 2.0**-133),
        (torch.float16, 16, 11, 65504, 2.0**-14, 2.0**-24),
        (torch.float8_e4m3fn, 8, 4, 448, 2.0**-6, 2.0**-9),
        (torch.float8_e5m2, 8, 3, 57344, 2.0**-14, 2.0**-16),
    ],
)
def test_formats(dtype, bits, significant, largest, smallest, least):
    found = number_format(dtype)
    assert (found.bits, found.significant) == (bits, significant)
    assert (found.largest, found.smallest, found.least) == (largest, smallest, least)
    one = torch.tensor(1.0)
    assert (one + found.step).to(dtype).float() == 1 + found.step
    assert (one + 0.49 * found.step).to(dtype).float() == 1
    # the smallest number there is, and what lies below half of it
    assert torch.tensor(found.least, dtype=torch.float64).to(dtype).double() == found.least
    assert torch.tensor(0.49 * found.least, dtype=torch.float64).to(dtype).double() == 0


def test_a_format_of_integers_is_refused():
    with pytest.raises(ValueError, match=r"torch.int8.*bfloat16"):
        number_format(torch.int8)


def test_updates_below_half_the_spacing_are_swallowed():
    w = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.01])
    update = torch.tensor([2.0**-8, 2.0**-9, -(2.0**-9) * 1.01, 0.0, 2.0**-9])
    # spacing in bfloat16: 2^-7 above 1, 2^-8 below; a tie (2^-8) rounds to even, to 1
    assert float(swallowed(w, update, torch.bfloat16)) == pytest.approx(2 / 4)
    assert float(swallowed(w, update, torch.float32)) == 0
    assert float(swallowed(w, torch.zeros(5), torch.bfloat16)) == 0


def test_shapes_have_to_agree():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        swallowed(torch.ones(2), torch.ones(3), torch.bfloat16)


def test_small_steps_add_up_in_the_masters_only():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = MasterWeights([p])
    optimizer = torch.optim.SGD(masters.copies, lr=1.0)
    q = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    plain = torch.optim.SGD([q], lr=1.0)
    for _ in range(16):
        for parameter in (p, q):
            parameter.grad = torch.full_like(parameter, -(2.0**-10))
        masters.take_gradients()
        optimizer.step()
        masters.write()
        plain.step()
    assert q.tolist() == [1.0] * 3
    assert p.tolist() == [1 + 2.0**-6] * 3 and masters.copies[0].tolist() == p.tolist()


def test_masters_of_a_float32_model_change_nothing():
    torch.manual_seed(0)
    models = [nn.Linear(4, 3), nn.Linear(4, 3)]
    models[1].load_state_dict(models[0].state_dict())
    masters = MasterWeights(models[1].parameters())
    optimizers = [torch.optim.AdamW(models[0].parameters()), torch.optim.AdamW(masters.copies)]
    for step in range(4):
        for model in models:
            model.zero_grad()
            model(torch.full((2, 4), 1.0 + step)).square().sum().backward()
        masters.take_gradients()
        for optimizer in optimizers:
            optimizer.step()
        masters.write()
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_parameter_without_a_gradient_stays_without_one():
    p = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    masters = MasterWeights([p])
    masters.copies[0].grad = torch.ones(3)  # of an earlier step
    masters.take_gradients()
    assert masters.copies[0].grad is None


@torch.no_grad()
def test_the_head_in_float32_gives_finer_logits():
    exact, _ = small_moe("mixtral-cpu")
    ids = torch.arange(10, 40)[None]
    wide = exact(ids).logits
    errors = {}
    for head in (False, True):
        half, _ = small_moe("mixtral-cpu", dtype=torch.bfloat16)
        if head:
            float32_head(half)
        logits = half(ids).logits
        assert logits.dtype == (torch.float32 if head else torch.bfloat16)
        again = half.lm_head.weight.float() @ half.model(ids).last_hidden_state[0].float().T
        errors[head] = float((logits[0].float() - again.T).abs().max() / wide.abs().max())
    assert errors[True] < 1e-6 and errors[False] > 1e-3


def test_a_head_that_is_missing_or_tied_is_refused():
    with pytest.raises(ValueError, match="Linear, which has no output layer"):
        float32_head(nn.Linear(2, 2))
    model, _ = small_moe("mixtral-cpu", dtype=torch.bfloat16)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ValueError, match="ties its output layer"):
        float32_head(model)
