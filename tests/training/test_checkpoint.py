"""Checkpoints: whole or absent, exact, named when damaged, and none lost to a full disk."""

import os
import resource

import pytest
import torch
from torch import nn

from stablerl_core.training.checkpoint import (
    load_checkpoint,
    optimizer_tensors,
    restore_optimizer,
    save_checkpoint,
)

FACTS = {"version": 3, "note": "ä", "rate": 0.1}


def some_tensors(seed=0):
    g = torch.Generator().manual_seed(seed)
    return {
        "model.a": torch.randn(3, 4, generator=g),
        "model.b": torch.randn(5, generator=g).to(torch.bfloat16),
        "model.c": torch.randn(4, 6, generator=g).T,  # not contiguous
        "optimizer.a.step": torch.tensor(7.0),
        "ids": torch.arange(6).view(2, 3),
    }


def test_tensors_and_facts_come_back_bit_for_bit(tmp_path):
    path = save_checkpoint(tmp_path / "deep", 3, some_tensors(), FACTS)
    assert path == tmp_path / "deep" / "checkpoint-000003.safetensors"
    tensors, facts = load_checkpoint(tmp_path / "deep")
    assert facts == FACTS and tensors.keys() == some_tensors().keys()
    for name, tensor in some_tensors().items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)


def test_the_two_newest_stay_and_the_newest_is_read(tmp_path):
    for step in (1, 2, 10, 1_000_000):
        save_checkpoint(tmp_path, step, some_tensors(step), {"version": step})
    kept = sorted(p.name for p in tmp_path.iterdir())
    assert kept == ["checkpoint-000010.safetensors", "checkpoint-1000000.safetensors"]
    tensors, facts = load_checkpoint(tmp_path)
    assert facts == {"version": 1_000_000}
    assert torch.equal(tensors["model.a"], some_tensors(1_000_000)["model.a"])


def test_a_checkpoint_newer_than_the_log_is_passed_over(tmp_path):
    """After a power failure the log may lack its last rows; from there they are computed again."""
    for step in (2, 4):
        save_checkpoint(tmp_path, step, some_tensors(), {"version": step})
    assert [load_checkpoint(tmp_path, at_most=n)[1]["version"] for n in (2, 3, 4, 9)] == [
        2,
        2,
        4,
        4,
    ]
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path, at_most=1)


def test_tensors_that_share_memory_are_saved_too(tmp_path):
    """Tied embeddings are one tensor under two names."""
    whole = torch.arange(6.0)
    save_checkpoint(tmp_path, 1, {"a": whole, "b": whole, "c": whole[:3]}, {})
    tensors, _ = load_checkpoint(tmp_path)
    assert torch.equal(tensors["a"], whole) and torch.equal(tensors["b"], whole)
    assert torch.equal(tensors["c"], whole[:3])


def test_what_a_tensor_carried_is_not_saved_with_it(tmp_path):
    parameter = nn.Parameter(torch.ones(2))
    save_checkpoint(tmp_path, 1, {"p": parameter * 2}, {})
    tensors, _ = load_checkpoint(tmp_path)
    assert not tensors["p"].requires_grad and tensors["p"].tolist() == [2, 2]


@pytest.mark.parametrize("size", [0, 4, 100, -1])
@pytest.mark.parametrize("older", [True, False])
def test_a_truncated_file_is_named_with_the_remedy(tmp_path, size, older):
    if older:
        save_checkpoint(tmp_path, 2, some_tensors(), {"version": 2})
    path = save_checkpoint(tmp_path, 4, some_tensors(), {"version": 4})
    os.truncate(path, size if size >= 0 else path.stat().st_size - 1)
    remedy = "delete it to resume from checkpoint-000002" if older else "start the run anew"
    with pytest.raises(ValueError, match=f"checkpoint-000004.*truncated or corrupt.*{remedy}"):
        load_checkpoint(tmp_path)
    if older:
        path.unlink()
        assert load_checkpoint(tmp_path)[1] == {"version": 2}


@pytest.mark.parametrize(
    "content", [b"", b"not a checkpoint at all", b"\x08" + b"\0" * 7 + b"{}      "]
)
def test_a_file_that_is_something_else_is_named(tmp_path, content):
    (tmp_path / "checkpoint-000001.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="checkpoint-000001.*truncated or corrupt"):
        load_checkpoint(tmp_path)


def test_without_a_checkpoint_the_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"{tmp_path}' holds no checkpoint"):
        load_checkpoint(tmp_path)


def test_a_full_disk_keeps_the_older_checkpoints(tmp_path):
    """A limit on the size of a file stands for the disk."""
    save_checkpoint(tmp_path, 1, some_tensors(), {"version": 1})
    large = {"w": torch.zeros(100_000)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        with pytest.raises(OSError, match="checkpoint-000002.*free some space and resume"):
            save_checkpoint(tmp_path, 2, large, {"version": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint-000001.safetensors"]
    assert load_checkpoint(tmp_path)[1] == {"version": 1}
    save_checkpoint(tmp_path, 2, large, {"version": 2})
    assert load_checkpoint(tmp_path)[1] == {"version": 2}


def test_a_checkpoint_half_written_by_a_killed_process_is_not_seen(tmp_path):
    save_checkpoint(tmp_path, 1, some_tensors(), {"version": 1})
    (tmp_path / "checkpoint-000002.tmp").write_bytes(b"half")
    assert load_checkpoint(tmp_path)[1] == {"version": 1}
    save_checkpoint(tmp_path, 2, some_tensors(), {"version": 2})
    assert not list(tmp_path.glob("*.tmp"))


def small_net(seed):
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def train(model, optimizer, steps):
    for n in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([[1.0, -2.0, 0.5 * n]])).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("before", [0, 3])
def test_the_optimizer_goes_on_as_if_nothing_had_happened(tmp_path, kind, before):
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {"fused": True}
    model = small_net(0)
    optimizer = kind(model.parameters(), lr=0.01, **options)
    names = [name for name, _ in model.named_parameters()]
    train(model, optimizer, before)
    tensors = {f"model.{k}": t for k, t in model.state_dict().items()}
    save_checkpoint(tmp_path, 1, tensors | optimizer_tensors(optimizer, names), {})
    train(model, optimizer, 4)

    again = small_net(1)
    other = kind(again.parameters(), lr=0.01, **options)
    loaded, _ = load_checkpoint(tmp_path)
    again.load_state_dict({k[6:]: t for k, t in loaded.items() if k.startswith("model.")})
    restore_optimizer(other, names, loaded)
    train(again, other, 4)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
