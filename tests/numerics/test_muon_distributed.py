"""Two gloo processes with FSDP2: the step of Muon and of QK-Clip is that of one process."""

import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from stablerl_core.numerics import MuonClip, QKClip

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not dist.is_gloo_available(), reason="needs torch.distributed with gloo"),
]
HEADS, KEYS, D, EXPERTS, STEPS = 4, 2, 6, 3, 4
TAU = 0.4


class Layer(nn.Module):
    """Grouped-query attention and experts, of sizes that two processes cannot share evenly."""

    def __init__(self, hidden=15, width=7):
        super().__init__()
        self.head_dim = D
        self.q_proj = nn.Linear(hidden, HEADS * D)
        self.k_proj, self.v_proj = (nn.Linear(hidden, KEYS * D, bias=False) for _ in "kv")
        self.o_proj = nn.Linear(HEADS * D, hidden, bias=False)
        self.norm = nn.RMSNorm(hidden)
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.randn(1, hidden, width))  # one process has none of it

    def forward(self, x):
        h = self.norm(x)
        q, k, v = (
            p(h).unflatten(-1, (-1, D)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        gate, up = torch.einsum("bth,eih->beti", x, self.gate_up_proj).chunk(2, -1)
        return x + torch.einsum("beti,hi->bth", F.silu(gate) * up, self.down_proj[0])


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 15)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.lm_head = nn.Linear(15, 20, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def new_model() -> Model:
    torch.manual_seed(0)
    return Model().double()


def batch(step: int, part: slice) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, 20, (4, 8), generator=generator)[part]


def optimizer_of(model: Model) -> MuonClip:
    clip = QKClip(model, tau=TAU, exact=True)
    return MuonClip(model.named_parameters(), lr=0.02, qk_clip=clip)


def train(model, optimizer, part, steps=range(STEPS)) -> list[dict[str, torch.Tensor]]:
    """The largest logits that each step clipped by."""
    seen, clipped = [], 0
    for step in steps:
        ids = batch(step, part)
        optimizer.zero_grad()
        F.cross_entropy(model(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        seen.append(optimizer.clipped.max_logits)
        clipped += optimizer.clipped.clipped
    assert clipped or 0 not in steps
    return seen


def full(model: Model) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in model.named_parameters()
    }


def sharded() -> Model:
    from torch.distributed.fsdp import fully_shard

    model = new_model()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def resumed(model: Model, optimizer: MuonClip, part: slice) -> dict[str, torch.Tensor]:
    """Two more steps with the state in a new optimizer."""
    optimizer.qk_clip.remove()
    other = optimizer_of(model)
    other.load_state_dict(optimizer.state_dict())
    train(model, other, part, range(STEPS, STEPS + 2))
    return full(model)


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    half, result = slice(2 * rank, 2 * rank + 2), {}
    model = sharded()
    optimizer = optimizer_of(model)
    shards = {n: p.to_local().numel() for n, p in model.named_parameters()}
    result["fsdp maxima"] = train(model, optimizer, half)
    result["fsdp"] = full(model)
    result["fsdp resumed"] = resumed(model, optimizer, half)
    result["buffers"] = {
        n: tuple(t.shape) for n, p in model.named_parameters() for t in optimizer.state[p].values()
    }
    torch.save(result | {"shards": shards}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results():
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(worker, (folder,), nprocs=2)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def single():
    model = new_model()
    optimizer = optimizer_of(model)
    found = {"maxima": train(model, optimizer, slice(0, 4)), "whole": full(model)}
    return found | {"resumed": resumed(model, optimizer, slice(0, 4))}


def test_the_parameters_really_are_in_two_pieces(results):
    assert results[0]["shards"]["layers.0.gate_up_proj"] == 2 * 14 * 15
    assert results[1]["shards"]["layers.0.gate_up_proj"] == 1 * 14 * 15
    assert results[1]["shards"]["layers.1.down_proj"] == 0


@pytest.mark.parametrize("stage, alone", [("fsdp", "whole"), ("fsdp resumed", "resumed")])
def test_two_processes_arrive_where_one_does(results, single, stage, alone):
    start = full(new_model())
    for name, expected in single[alone].items():
        assert (expected - start[name]).abs().max() > 1e-3
        for result in results:
            torch.testing.assert_close(result[stage][name], expected, rtol=1e-9, atol=1e-11)


def test_the_largest_logits_are_those_of_all_ranks(results, single):
    """Neither half of the batch has the maximum of every head."""
    for result in results:
        for found, expected in zip(result["fsdp maxima"], single["maxima"], strict=True):
            for name in expected:
                torch.testing.assert_close(found[name], expected[name], rtol=1e-9, atol=0)
    model, halves = new_model(), []
    for part in (slice(0, 2), slice(2, 4)):
        clip = QKClip(model, tau=1e9, exact=True)
        model(batch(0, part))
        halves.append(torch.cat(list(clip.step().max_logits.values())))
        clip.remove()
    assert (halves[0] < halves[1]).any() and (halves[0] > halves[1]).any()
