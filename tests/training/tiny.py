"""What the tests of the loop share: models whose every part matters, and runs of a few steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from stablerl_core.training import (
    DataConfig,
    NumericsConfig,
    PolicyConfig,
    SystemConfig,
    TrainerConfig,
    small_moe,
)

FAMILIES = ("mixtral", "qwen3-moe", "olmoe", "deepseek-v3")


@torch.no_grad()
def sharp_moe(family: str = "mixtral", seed: int = 0, **options):
    """A small model with weights so large that attention, positions and routing all show.

    Freshly drawn models give nearly uniform distributions: a wrong position id or a lost cache
    entry would change a log-probability by less than any tolerance. The end token gets a logit
    of about 5.5, so that completions end at different times.
    """
    model, tokenizer = small_moe(f"{family}-cpu", seed=seed, **options)
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        if tensor.dim() > 1:
            tensor.mul_(12 if "lm_head" in name else 6)
        elif "correction_bias" in name:
            tensor.copy_(0.1 * torch.randn(tensor.shape, generator=generator))
    ids = torch.randint(3, 99, (32, 12), generator=generator)
    hidden = model.model(ids).last_hidden_state.flatten(0, 1)
    wanted = torch.full((len(hidden), 1), 5.5, dtype=hidden.dtype)
    model.lm_head.weight[tokenizer.eos_token_id] = torch.linalg.lstsq(hidden, wanted).solution[:, 0]
    return model, tokenizer


def tiny_config(**changes) -> TrainerConfig:
    """A run of seconds: 4 prompts × 6 completions, everything measured at every second step.

    A key like `policy__epochs` changes one setting of a group.
    """
    groups = {
        "data": DataConfig(
            prompts=4, group_size=6, max_new_tokens=10, eval_every=2, eval_prompts=8
        ),
        "policy": PolicyConfig(),
        "numerics": NumericsConfig(warmup=2),
        "system": SystemConfig(),
    }
    top = {"steps": 4, "checkpoint_every": 2, "probe_every": 2, "probe_rows": 8}
    for key, value in changes.items():
        group, _, name = key.partition("__")
        if name:
            groups[group] = replace(groups[group], **{name: value})
        else:
            top[group] = value
    return TrainerConfig(**top, **groups)


def step_gradients(trainer, monkeypatch) -> list[torch.Tensor]:
    """The gradient of every update of one step, before clipping."""
    found = []
    plain = trainer._apply

    def spy(loss):
        found.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
        return plain(loss)

    monkeypatch.setattr(trainer, "_apply", spy)
    trainer.step()
    return found
