"""Bytes by formula, bytes measured, and checkpointing that changes memory and nothing else."""

import tempfile

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import save_on_cpu

from stablerl_core.numerics import (
    MasterWeights,
    TrainingBytes,
    checkpointed,
    held_bytes,
    peak_bytes,
    saved_bytes,
    training_bytes,
)
from stablerl_core.system import record_routing, replay_routing
from stablerl_core.training import small_moe

GIGA = 1e9
N = 64  # workers of the paper's table

# --- the formula ---------------------------------------------------------------------------------


def test_sixteen_bytes_a_parameter_and_how_they_are_shared():
    """ZeRO's Figure 1: 7.5 billion parameters, 64 workers: 120, 31.4, 16.6 and 1.9 GB."""
    found = [training_bytes(7.5e9, zero=z, workers=N).total / GIGA for z in range(4)]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


def test_parts_and_formats():
    assert training_bytes(10) == TrainingBytes(20, 20, 40, 80)
    alone = training_bytes(10, weights=torch.float32, master=False)
    assert alone == TrainingBytes(40, 40, 0, 80) and alone.total == training_bytes(10).total
    pure = training_bytes(10, master=False, state_bits=16)
    assert pure == TrainingBytes(20, 20, 0, 40)  # everything in bfloat16
    assert training_bytes(10, states=1).states == 40  # Muon, SGD with momentum
    assert training_bytes(10, gradients=torch.float32).gradients == 40


def test_four_bit_gradients_leave_the_states_alone_and_four_bit_states_do_not():
    full, states = training_bytes(10), training_bytes(10, state_bits=4)
    assert states.states == full.states / 8 == 10
    assert (states.weights, states.gradients, states.master) == (20, 20, 40)
    # four bits on the wire come out as gradients of the same format: nothing to change here


@pytest.mark.parametrize("zero, workers", [(0, 1), (1, 4), (3, 4)])
def test_offload_moves_states_to_the_host_and_numbers_every_step(zero, workers):
    kept = training_bytes(100, zero=zero, workers=workers)
    moved = training_bytes(100, zero=zero, workers=workers, offload=True)
    assert moved.host == kept.master + kept.states == 1200 / workers
    assert moved.total == kept.weights + kept.gradients
    assert moved.moved == 400 / workers


@pytest.mark.parametrize("bad", [{"zero": 4}, {"zero": -1}, {"workers": 0}])
def test_what_does_not_exist_is_named(bad):
    (name, value), *_ = bad.items()
    with pytest.raises(ValueError, match=f"{name}={value}"):
        training_bytes(10, **bad)


# --- measured ------------------------------------------------------------------------------------


def stepped(model, optimizer, masters=None):
    model(torch.ones(2, 8, dtype=next(model.parameters()).dtype)).sum().backward()
    if masters:
        masters.take_gradients()
    optimizer.step()
    return held_bytes(model, optimizer)


def network(dtype=torch.float32):
    return nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4)).to(dtype)


COUNT = 8 * 16 + 16 + 16 * 4 + 4


def test_adamw_holds_what_the_formula_says():
    model = network()
    found = stepped(model, torch.optim.AdamW(model.parameters()))
    assert found == training_bytes(COUNT, weights=torch.float32, master=False)
    model = network(torch.bfloat16)
    found = stepped(model, torch.optim.AdamW(model.parameters()))
    assert found == training_bytes(COUNT, master=False, state_bits=16)
    model = network()
    found = stepped(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    assert found == training_bytes(COUNT, weights=torch.float32, master=False, states=1)


def test_masters_cost_four_bytes_and_their_gradients_four_more():
    """The formula has one gradient; a plain implementation holds a second, in float32."""
    model = network(torch.bfloat16)
    masters = MasterWeights(model.parameters())
    found = stepped(model, torch.optim.AdamW(masters.copies), masters)
    formula = training_bytes(COUNT)
    assert (found.weights, found.master, found.states) == (
        formula.weights,
        formula.master,
        formula.states,
    )
    assert found.gradients == formula.gradients + 4 * COUNT


def test_nothing_is_held_before_the_first_step():
    model = network()
    found = held_bytes(model, torch.optim.AdamW(model.parameters()))
    assert found == TrainingBytes(4 * COUNT, 0, 0, 0) and held_bytes(model) == found


def test_saved_bytes_by_hand():
    """tanh keeps its result; the linear layers keep their inputs; weights are not counted."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(5, 8)
    with saved_bytes(model) as found:
        y = model(x)
    assert found.nbytes == 4 * (5 * 8 + 5 * 16)  # tanh's result is the input of the second layer
    y.sum().backward()
    with saved_bytes(model) as none, torch.no_grad():
        model(x)
    assert none.nbytes == none.copied == 0


def test_views_of_one_memory_count_once_and_save_on_cpu_copies_each():
    model = nn.Linear(3, 3, bias=False)
    x = torch.randn(4, 3, requires_grad=True)
    moved = []
    hooks = save_on_cpu()
    pack = hooks.pack_hook

    def counting(tensor):
        moved.append(pack(tensor)[1].nbytes)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(counting, hooks.unpack_hook):
        model(x * x)
    with saved_bytes(model) as found:
        model(x * x)
    assert found.copied == sum(moved) == 4 * (12 + 12 + 12 + 9)  # x twice, x², the weights
    assert found.nbytes == 4 * (12 + 12)


# --- checkpointing our mixture of experts --------------------------------------------------------


@pytest.fixture(scope="module")
def moe():
    model, _ = small_moe("mixtral-cpu")
    return model


IDS = torch.randint(0, 90, (6, 20), generator=torch.Generator().manual_seed(0))


def loss_of(model, ids=IDS):
    logits = model(ids, use_cache=False).logits.float()
    return logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).mean()


def gradient(model):
    model.zero_grad()
    loss_of(model).backward()
    return [p.grad.clone() for p in model.parameters()]


def test_checkpointing_gives_the_same_gradient_and_keeps_less(moe):
    plain = gradient(moe)
    with saved_bytes(moe) as all_of_it:
        loss_of(moe)
    with checkpointed(moe):
        assert moe.training
        again = gradient(moe)
        with saved_bytes(moe) as some:
            loss_of(moe)
    assert not moe.training
    for a, b in zip(plain, again, strict=True):
        assert torch.equal(a, b)
    assert some.nbytes < 0.4 * all_of_it.nbytes
    with saved_bytes(moe) as after:
        loss_of(moe)
    assert after.nbytes == all_of_it.nbytes  # switched off again


def test_the_re_run_is_routed_as_the_run_that_it_repeats(moe):
    """Replayed experts of another model, so that a re-run by the router's own choice would show."""
    other, _ = small_moe("mixtral-cpu", seed=5)
    with record_routing(other) as recording, torch.no_grad():
        other(IDS, use_cache=False)
    record = recording.record()
    with replay_routing(moe, record):
        plain = gradient(moe)
    free = gradient(moe)
    with checkpointed(moe), replay_routing(moe, record):
        replayed = gradient(moe)
    for a, b in zip(plain, replayed, strict=True):
        assert torch.equal(a, b)
    assert any((a - b).abs().max() > 1e-5 for a, b in zip(free, replayed, strict=True))


def test_offloaded_activations_give_the_same_gradient(moe):
    plain = gradient(moe)
    with save_on_cpu():
        moved = gradient(moe)
    for a, b in zip(plain, moved, strict=True):
        assert torch.equal(a, b)


def test_the_peak_is_at_least_what_is_saved_and_checkpointing_lowers_it(moe):
    many = IDS.repeat(8, 1)
    with saved_bytes(moe) as saved:
        loss_of(moe, many)

    def step():
        moe.zero_grad()
        loss_of(moe, many).backward()

    plain = peak_bytes(moe, step)
    with checkpointed(moe):
        less = peak_bytes(moe, step)
    weights = sum(p.nbytes for p in moe.parameters())
    assert weights <= plain["parameters"] < weights + 1000
    assert plain["total"] >= weights + saved.nbytes
    assert sum(v for k, v in plain.items() if k != "total") == plain["total"]
    assert less["total"] < 0.7 * plain["total"]
    assert less["activations"] < 0.7 * plain["activations"]


# --- two processes -------------------------------------------------------------------------------


def sharded_worker(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer

    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = network()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    third = stepped(model, torch.optim.AdamW(model.parameters()))
    plain = network()
    copies = nn.parallel.DistributedDataParallel(plain)
    optimizer = ZeroRedundancyOptimizer(copies.parameters(), torch.optim.AdamW)
    copies(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    first = held_bytes(plain, optimizer.optim if hasattr(optimizer, "optim") else optimizer)
    torch.save({3: third, 1: first}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def sharded():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(sharded_worker, (folder,), nprocs=2)
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_fsdp2_holds_what_zero_3_says(sharded):
    formula = training_bytes(COUNT, weights=torch.float32, master=False, zero=3, workers=2)
    assert [ranks[3] for ranks in sharded] == [formula, formula]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo")
def test_a_sharded_optimizer_holds_what_zero_1_says(sharded):
    """torch shares whole parameters out, so the two parts are equal only on average."""
    formula = training_bytes(COUNT, weights=torch.float32, master=False, zero=1, workers=2)
    for ranks in sharded:
        assert (ranks[1].weights, ranks[1].gradients) == (formula.weights, formula.gradients)
    assert sum(ranks[1].states for ranks in sharded) == 2 * formula.states
    assert all(ranks[1].states > 0 for ranks in sharded)
