"""Checkpoints that are whole or absent: safetensors, written aside and then renamed."""

from __future__ import annotations

import json
import os
from math import inf
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

KEEP = 2


def save_checkpoint(folder: Path, step: int, tensors: dict[str, Tensor], facts: dict) -> Path:
    """Write `checkpoint-<step>.safetensors` atomically and drop all but the newest two.

    `facts` (JSON-serialisable) travel in the file's header. A full disk raises `OSError` and
    leaves the older checkpoints as they are.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{step:06d}.safetensors"
    aside = path.with_suffix(".tmp")
    # Copies: safetensors refuses tensors that share memory, as tied embeddings do.
    whole = {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}
    try:
        save_file(whole, aside, metadata={"facts": json.dumps(facts)})
        os.replace(aside, path)
    except (OSError, SafetensorError) as error:
        aside.unlink(missing_ok=True)
        raise OSError(
            f"cannot write {path} ({error}); the run log and the older checkpoints are intact: "
            "free some space and resume the run"
        ) from error
    for old in sorted(folder.glob("checkpoint-*.safetensors"))[:-KEEP]:
        old.unlink()
    return path


def load_checkpoint(folder: Path, at_most: float = inf) -> tuple[dict[str, Tensor], dict]:
    """The newest checkpoint of a folder, of step `at_most` or before: (tensors, facts).

    Raises `FileNotFoundError` when there is none and `ValueError`, naming the file and the
    remedy, when it is truncated or corrupt.
    """
    paths = sorted(Path(folder).glob("checkpoint-*.safetensors"))
    paths = [path for path in paths if int(path.stem.rpartition("-")[2]) <= at_most]
    if not paths:
        raise FileNotFoundError(f"out={str(folder)!r} holds no checkpoint; start the run anew")
    try:
        with safe_open(paths[-1], "pt") as file:
            facts = json.loads(file.metadata()["facts"])
            return {name: file.get_tensor(name) for name in file.keys()}, facts
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        remedy = f"delete it to resume from {paths[-2].name}" if paths[1:] else "start the run anew"
        raise ValueError(f"{paths[-1]} is truncated or corrupt ({error}); {remedy}") from error


def optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """Optimizer state as flat named tensors: `optimizer.<parameter>.<field>`."""
    state = optimizer.state_dict()["state"]
    return {
        f"optimizer.{names[i]}.{field}": torch.as_tensor(value)
        for i, fields in state.items()
        for field, value in fields.items()
    }


def restore_optimizer(
    optimizer: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Inverse of `optimizer_tensors`."""
    state: dict[int, dict[str, Tensor]] = {}
    for i, name in enumerate(names):
        prefix = f"optimizer.{name}."
        fields = {k[len(prefix) :]: t for k, t in tensors.items() if k.startswith(prefix)}
        if fields:
            state[i] = fields
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})
