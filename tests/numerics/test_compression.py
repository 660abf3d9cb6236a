"""Compressed gradients: exact bytes, error bounds, error feedback, and torch's own PowerSGD."""

import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stablerl_core.numerics import (
    Dense,
    ErrorFeedback,
    FourBit,
    GradientCompression,
    PowerSGD,
    TopK,
)

LEVELS = 7


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def power(rank=2, seed=0):
    return PowerSGD(rank, generator=torch.Generator().manual_seed(seed))


# --- bytes ---------------------------------------------------------------------------------------


def test_what_eight_to_one_means_in_bytes():
    """4096 float32 entries are 16384 bytes; none of the ways is 8 : 1 without paying for it."""
    g = normal(1, 64, 64)
    sent = {
        "dense": Dense().average(g).nbytes,
        "4 bits, blocks of 64": FourBit(64).average(g).nbytes,
        "4 bits, one block": FourBit(4096).average(g).nbytes,
        "largest 1/8": TopK(1 / 8).average(g).nbytes,
        "largest 1/16": TopK(1 / 16).average(g).nbytes,
        "rank 4": power(4).average(g).nbytes,
    }
    assert sent == {
        "dense": 4096 * 4,
        "4 bits, blocks of 64": 4096 // 2 + 4096 // 64 * 2,  # 7.5 : 1
        "4 bits, one block": 4096 // 2 + 2,
        "largest 1/8": 512 * (4 + 4),  # 4 : 1, half of it positions
        "largest 1/16": 256 * (4 + 4),  # 8 : 1
        "rank 4": (64 + 64) * 4 * 4,  # 8 : 1
    }
    half = g.bfloat16()
    assert Dense().average(half).nbytes / FourBit(64).average(half).nbytes < 3.8
    assert TopK(1 / 16).average(half).nbytes == 256 * (2 + 4)
    assert power(4).average(half).nbytes == (64 + 64) * 4 * 2


@given(numbers=st.integers(1, 300), block=st.integers(1, 40))
@settings(deadline=None, max_examples=30)
def test_four_bits_of_any_length_pay_for_whole_blocks(numbers, block):
    found = FourBit(2 * block).average(normal(1, numbers))
    blocks = -(-numbers // (2 * block))
    assert found.nbytes == blocks * (block + 2)
    assert found.mean.shape == (numbers,)


# --- what arrives --------------------------------------------------------------------------------


def test_four_bits_by_hand():
    g = torch.tensor([[7.0, -7.0, 3.4, 3.6, -0.4, 0.0, 0.0, 0.0]])
    found = FourBit(4).average(g)
    # s = 7 and 0.4; in the second block −0.4 is the largest, and bfloat16 has it as 0.400390625
    assert found.mean.tolist() == pytest.approx([7, -7, 3, 4, -0.400390625, 0, 0, 0])
    assert torch.equal(found.sent[0], found.mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1.0, 1e-6, 1e4])
def test_four_bits_are_off_by_a_fourteenth_of_the_largest(dtype, size):
    g = (size * normal(1, 30, 64)).to(dtype)
    found = FourBit(64).average(g)
    assert found.mean.dtype == dtype
    error = (found.mean.float() - g[0].float()).abs()
    bound = g[0].float().abs().amax(-1, keepdim=True) * (0.5 / LEVELS + 2**-8)
    spacing = torch.finfo(torch.float16).smallest_normal * 2**-10  # of tiny float16 results
    assert (error <= bound + spacing).all() and (error > bound / 2).any()


def test_top_k_sends_the_largest_as_they_are():
    g = torch.tensor([[0.5, -3.0, 2.0, 0.1]], dtype=torch.float64)
    assert TopK(0.5).average(g).mean.tolist() == [0, -3.0, 2.0, 0]
    assert TopK(0.01).average(g).mean.tolist() == [0, -3.0, 0, 0]  # at least one
    assert torch.equal(TopK(1).average(g).mean, g[0])


def test_power_sgd_sends_a_matrix_of_its_rank_exactly():
    low = normal(20, 3, dtype=torch.float64) @ normal(3, 15, seed=1, dtype=torch.float64)
    found = power(3).average(low[None])
    torch.testing.assert_close(found.mean, low)
    assert torch.linalg.matrix_rank(power(2).average(low[None]).mean) == 2
    wide = power(9).average(normal(1, 4, 6))  # more than the matrix has
    torch.testing.assert_close(wide.mean, normal(1, 4, 6)[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_power_sgd_in_16_bits_is_that_of_float32_up_to_rounding(dtype):
    g = normal(2, 20, 15).to(dtype)
    codec, wide = power(3), power(3)
    for _ in range(3):
        found, exact = codec.average(g), wide.average(g.float())
        assert found.mean.dtype == found.sent.dtype == dtype
        error = (found.mean.float() - exact.mean).norm() / exact.mean.norm()
        assert 0 < error < 4 * torch.finfo(dtype).eps


def test_power_sgd_repeated_finds_the_best_of_its_rank():
    """A power iteration a step on one and the same matrix: the truncated SVD (Eckart-Young)."""
    matrix = normal(12, 9, dtype=torch.float64)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s[2:] *= 0.3
    matrix, best = (u * s) @ v, (u[:, :2] * s[:2]) @ v[:2]
    codec = power(2)
    first = codec.average(matrix[None]).mean
    for _ in range(30):
        last = codec.average(matrix[None]).mean
    torch.testing.assert_close(last, best)
    assert (first - matrix).norm() > (last - matrix).norm()


def test_expert_matrices_are_compressed_one_by_one():
    experts = normal(1, 3, 10, 8, dtype=torch.float64)
    codec, alone = power(2), power(2)
    both = codec.average(experts)
    assert both.nbytes == 3 * (10 + 8) * 2 * 8
    alone.q = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    alone.q = alone.q[1]
    torch.testing.assert_close(both.mean[1], alone.average(experts[:, 1]).mean)


@pytest.mark.parametrize("codec", [Dense(), FourBit(8), TopK(0.25)])
def test_the_mean_is_that_of_what_each_worker_sent(codec):
    g = normal(3, 4, 10)
    found = codec.average(g)
    torch.testing.assert_close(found.mean, found.sent.mean(0))
    for worker in range(3):
        assert torch.equal(found.sent[worker], codec.average(g[worker : worker + 1]).mean)
    assert found.nbytes == codec.average(g[:1]).nbytes  # of one worker


def test_power_sgd_depends_on_the_mean_alone():
    g = normal(3, 6, 5, dtype=torch.float64)
    torch.testing.assert_close(power().average(g).mean, power().average(g.mean(0)[None]).mean)


# --- memory of what was lost ---------------------------------------------------------------------

CODECS = {"4 bits": lambda: FourBit(16), "top k": lambda: TopK(0.05), "rank 1": lambda: power(1)}


@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
def test_with_feedback_nothing_is_lost_for_good(make):
    """Σ of what arrived = Σ of the gradients − what is still held back, worker by worker."""
    feedback, total, arrived = ErrorFeedback(make()), 0.0, 0.0
    for step in range(12):
        g = normal(2, 8, 16, seed=step, dtype=torch.float64)
        total, arrived = total + g.mean(0), arrived + feedback.average(g).mean
    torch.testing.assert_close(arrived + feedback.residual.mean(0), total, rtol=0, atol=1e-4)
    assert feedback.residual.abs().max() > 1e-2


@pytest.mark.parametrize("name", ["top k", "rank 1"])
def test_a_constant_gradient_arrives_in_time_only_with_feedback(name):
    """Without, the same part is lost at every step, so the error does not shrink with time."""
    g = normal(1, 8, 16, dtype=torch.float64)
    errors = {}
    for kind in ("plain", "feedback"):
        codec = ErrorFeedback(CODECS[name]()) if kind == "feedback" else CODECS[name]()
        mean = sum(codec.average(g).mean for _ in range(200)) / 200
        errors[kind] = float((mean - g[0]).norm() / g[0].norm())
    assert errors["plain"] > 0.3 and errors["feedback"] < 0.1


# --- faults --------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("make", CODECS.values(), ids=CODECS)
def test_a_fault_is_seen_and_does_not_stay(make, bad):
    feedback = ErrorFeedback(make())
    feedback.average(normal(1, 8, 16))
    held = feedback.residual.clone()
    broken = normal(1, 8, 16, seed=1)
    broken[0, 3, 5] = bad
    try:
        assert not feedback.average(broken).mean.isfinite().all()
    except torch.linalg.LinAlgError:  # torch refuses to decompose it
        pass
    assert torch.equal(feedback.residual, held)
    assert feedback.average(normal(1, 8, 16, seed=2)).mean.isfinite().all()


def test_zeros_stay_zeros():
    zeros = torch.zeros(2, 4, 16)
    for make in CODECS.values():
        assert torch.equal(make().average(zeros).mean, zeros[0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: FourBit(7), "block=7"),
        (lambda: FourBit(0), "block=0"),
        (lambda: TopK(0), "share=0"),
        (lambda: TopK(1.5), "share=1.5"),
        (lambda: power(0), "rank=0"),
        (lambda: power(1).average(torch.ones(2, 5)), r"\(2, 5\).*Dense"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- a whole model -------------------------------------------------------------------------------


def test_a_model_counts_what_it_sent():
    def codec(shape):
        return ErrorFeedback(power(1)) if len(shape) > 1 else None

    compression = GradientCompression(codec)
    shapes = {"w": (20, 10), "b": (20,)}
    for step in range(3):
        grads = {n: normal(2, *s, seed=step) for n, s in shapes.items()}
        means = compression.average(grads)
        torch.testing.assert_close(means["b"], grads["b"].mean(0))
        assert torch.linalg.matrix_rank(means["w"]) == 1
    assert compression.sent_bytes == 3 * 4 * (30 + 20)
    assert compression.dense_bytes == 3 * 4 * (200 + 20)


# --- torch's hook in two processes ---------------------------------------------------------------

STEPS, RANK = 6, 2


class Weight(nn.Module):
    """A module whose gradient is whatever it is called with."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(12, 9, dtype=torch.float64))

    def forward(self, g):
        return (self.w * g).sum()


def gradients(step):
    return normal(2, 12, 9, seed=step, dtype=torch.float64)


def worker(rank: int, folder: str, feedback: bool) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

    torch.set_num_threads(1)
    store = f"file://{folder}/store{feedback}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(Weight())
    state = hook.PowerSGDState(
        None, RANK, start_powerSGD_iter=2, use_error_feedback=feedback, random_seed=3
    )
    model.register_comm_hook(state, hook.powerSGD_hook)
    seen = []
    for step in range(STEPS):
        model.zero_grad()
        model(gradients(step)[rank]).backward()
        seen.append(model.module.w.grad.clone())
    if rank == 0:
        torch.save(seen, f"{folder}/{feedback}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
@pytest.mark.parametrize("feedback", [False, True])
def test_torchs_hook_in_two_processes_does_the_same(feedback):
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder, feedback), nprocs=2)
        theirs = torch.load(f"{folder}/{feedback}.pt")
    # the seed that the hook draws its first Q with
    seed = np.random.RandomState(3).randint(1_000_000_000)
    ours = PowerSGD(RANK, generator=torch.Generator().manual_seed(seed))
    ours = ErrorFeedback(ours) if feedback else ours
    for step, expected in enumerate(theirs):
        g = gradients(step)
        found = g.mean(0) if step < 2 else ours.average(g).mean  # DDP starts late
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
        assert step < 2 or (expected - g.mean(0)).norm() > 1
