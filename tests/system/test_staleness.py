"""Versions: AReaL's admission by hand, the age of tokens, GLM-5's drop and reset."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.system import (
    Admission,
    StalenessReport,
    fresh_sequences,
    may_admit,
    reset_optimizer_state,
    staleness_report,
    token_staleness,
    too_old,
    version_lists,
)

# B = 4: completions 1-4 are batch 0, 5-8 batch 1, 9-12 batch 2. (N_r, i, η) and by hand ⌊(N−1)/4⌋.
BY_HAND = [
    (1, 0, 0, True),  # 0 ≤ 0
    (4, 0, 0, True),  # 0 ≤ 0
    (5, 0, 0, False),  # 1 > 0
    (5, 1, 0, True),  # 1 ≤ 1
    (8, 0, 1, True),  # 1 ≤ 1
    (9, 0, 1, False),  # 2 > 1
    (9, 1, 1, True),  # 2 ≤ 2
    (12, 0, 2, True),  # 2 ≤ 2
    (13, 0, 2, False),  # 3 > 2
    (10**6, 0, None, True),
]


@pytest.mark.parametrize("number, version, cap, expected", BY_HAND)
def test_admission_by_hand(number, version, cap, expected):
    assert may_admit(number, 4, version, cap) is expected
    control = Admission(4, cap, counted=number - 1)
    assert (control.room(version) > 0) is expected
    assert control.admit(version) is expected
    assert control.counted == number - (not expected)


@given(st.integers(1, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 200))
def test_room_is_what_can_be_admitted(batch, version, cap, counted):
    control = Admission(batch, cap, counted)
    room = control.room(version)
    taken = 0
    while control.admit(version):
        taken += 1
    assert taken == room and control.room(version) == 0
    assert control.room(version + 1) == max(0, (version + cap + 2) * batch - control.counted)


@given(st.integers(1, 6), st.integers(0, 5), st.lists(st.booleans(), max_size=120))
def test_in_order_of_admission_none_is_older_than_the_cap(batch, cap, moves):
    """Any interleaving of starts and updates; the n-th started is the n-th trained."""
    control, version, born = Admission(batch, cap), 0, []
    for start in moves:
        if start and control.admit(version):
            born.append(version)
        elif not start and len(born) >= (version + 1) * batch:
            used = born[version * batch : (version + 1) * batch]
            assert version - min(used) <= cap
            version += 1
        assert len(born) - version * batch <= (cap + 1) * batch


def test_a_dropped_completion_gives_its_place_back():
    control = Admission(2, 0)
    assert [control.admit(0) for _ in range(3)] == [True, True, False]
    control.release()
    assert control.room(0) == 1 and control.admit(0) and not control.admit(0)
    with pytest.raises(ValueError, match="dropped=3: only 2 are counted"):
        control.release(3)


def test_without_a_cap_there_is_room():
    assert Admission(2, None, 99).room(0) == math.inf


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 4, 0, 1), "number=0"),
        ((1, 0, 0, 1), "batch_size=0"),
        ((1, 4, -1, 1), "version=-1"),
        ((1, 4, 0, -1), "max_staleness=-1"),
    ],
)
def test_bad_admission(arguments, message):
    with pytest.raises(ValueError, match=message):
        may_admit(*arguments)


def test_version_tagged_drop():
    assert [too_old(3, now, 2) for now in (3, 4, 5, 6)] == [False, False, False, True]
    assert not too_old(0, 10**6, None) and too_old(4, 5, 0)
    with pytest.raises(ValueError, match="newer than version=2"):
        too_old(3, 2, 1)
    with pytest.raises(ValueError, match="max_age=-1"):
        too_old(3, 3, -1)


VERSIONS = torch.tensor([[3, 3, 5, 5], [5, 5, 0, 0], [4, 5, 6, 0], [0, 0, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]]).bool()


def test_age_of_tokens():
    expected = [[3, 3, 1, 1], [1, 1, 0, 0], [2, 1, 0, 0], [0, 0, 0, 0]]
    for dtype in (torch.int64, torch.int32, torch.int16, torch.uint8):
        assert token_staleness(VERSIONS.to(dtype), MASK, 6).tolist() == expected
    assert fresh_sequences(VERSIONS, MASK, 6, 2).tolist() == [False, True, True, True]
    assert fresh_sequences(VERSIONS, MASK, 6, 3).all()
    assert fresh_sequences(VERSIONS, MASK, 6, 0).tolist() == [False, False, False, True]
    assert version_lists(VERSIONS, MASK) == [
        [(3, 2), (5, 2)],
        [(5, 2)],
        [(4, 1), (5, 1), (6, 1)],
        [],
    ]
    report = staleness_report(VERSIONS, MASK, 6)
    assert report == StalenessReport(mean=13 / 9, oldest=2.0, highest=3, mixed=2 / 3)
    assert staleness_report(VERSIONS, MASK & False, 6) == StalenessReport(0.0, 0.0, 0, 0.0)


def test_padding_is_not_read_and_rows_may_be_permuted():
    wide = torch.cat([VERSIONS, torch.full((4, 2), 99)], 1)
    mask = torch.cat([MASK, torch.zeros(4, 2, dtype=torch.bool)], 1)
    assert staleness_report(wide, mask, 6) == staleness_report(VERSIONS, MASK, 6)
    assert version_lists(wide, mask) == version_lists(VERSIONS, MASK)
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(token_staleness(VERSIONS[order], MASK[order], 6),
                       token_staleness(VERSIONS, MASK, 6)[order])  # fmt: skip


def test_bad_versions():
    with pytest.raises(ValueError, match="version 6, but version=5 is trained"):
        token_staleness(VERSIONS, MASK, 5)
    with pytest.raises(ValueError, match=r"versions has dtype torch.float32"):
        token_staleness(VERSIONS.float(), MASK, 6)
    with pytest.raises(ValueError, match=r"shape \(4,\), expected integers of shape \(4, 4\)"):
        token_staleness(VERSIONS[:, 0], MASK, 6)
    with pytest.raises(ValueError, match="mask has dtype torch.int64"):
        token_staleness(VERSIONS, MASK.long(), 6)
    with pytest.raises(ValueError, match=r"row 0 go backwards: \[5, 3\]"):
        version_lists(VERSIONS.flip(1)[:1], MASK[:1])
    with pytest.raises(ValueError, match="max_age=-1"):
        fresh_sequences(VERSIONS, MASK, 6, -1)


OPTIMIZERS = {
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=0.3, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.5),
    "muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


def step(weight, optimizer, gradient):
    weight.grad = gradient.clone()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_after_a_reset_the_next_steps_are_those_of_a_new_optimizer(name):
    gradients = torch.randn(6, 3, 2, generator=torch.Generator().manual_seed(0))
    weight = torch.nn.Parameter(torch.ones(3, 2))
    old = OPTIMIZERS[name]([weight])
    for gradient in gradients[:4]:
        step(weight, old, gradient)
    twin, kept = (torch.nn.Parameter(weight.detach().clone()) for _ in range(2))
    remembers = OPTIMIZERS[name]([kept])
    remembers.load_state_dict(old.state_dict())
    old.param_groups[0]["lr"] = remembers.param_groups[0]["lr"] = 0.05  # a setting that must stay
    reset_optimizer_state(old)
    assert old.state_dict()["state"] == {}
    new = OPTIMIZERS[name]([twin])
    new.param_groups[0]["lr"] = 0.05
    for gradient in gradients[4:]:
        step(weight, old, gradient)
        step(twin, new, gradient)
        step(kept, remembers, gradient)
    assert torch.equal(weight, twin) and not torch.allclose(weight, kept, atol=1e-4)


def test_after_a_reset_adam_moves_by_the_learning_rate_whatever_the_gradient():
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = torch.optim.Adam([weight], lr=0.1)
    for _ in range(5):
        step(weight, optimizer, torch.ones(3, dtype=torch.float64))
    reset_optimizer_state(optimizer)
    before = weight.detach().clone()
    step(weight, optimizer, torch.tensor([1e-3, -10.0, 0.0], dtype=torch.float64))
    assert (weight - before).tolist() == pytest.approx([-0.1, 0.1, 0.0], rel=1e-4)


def test_an_optimizer_that_cannot_forget_is_refused():
    optimizer = torch.optim.Adagrad([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="Adagrad"):
        reset_optimizer_state(optimizer)
    assert optimizer.state
