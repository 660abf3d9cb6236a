"""A step of MuonClip beside torch.optim.Muon + AdamW, and what QK-Clip's watching costs.

python benchmarks/muon.py [--rounds N] [--quick] [--threads N] [--json FILE]

torch's Muon takes no 3-D parameter, so it is given each expert, and each half of gate and up, as a
matrix of its own: the same matrices as on our side. Gradients are the same random ones.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from routing_overhead import in_turn
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, MixtralConfig

from stablerl_core.numerics import MuonClip, QKClip, uses_muon
from stablerl_core.training import DataConfig, NumericsConfig, Trainer, TrainerConfig
from stablerl_core.training.provenance import provenance

RATE = {"lr": 2e-4, "weight_decay": 0.1}
# hidden size, layers, experts, width of an expert
MODELS = {"mixtral-cpu": (64, 2, 8, 64), "d128, 4 layers": (128, 4, 8, 128)}
LENGTHS = (32, 128, 512)
TOKENS = 4096
NEVER = 10**9


def model_of(name: str) -> nn.Module:
    """A small Mixtral: `mixtral-cpu` is the package's preset of that name with 128 tokens."""
    hidden, layers, experts, width = MODELS[name]
    config = MixtralConfig(
        vocab_size=128, hidden_size=hidden, num_hidden_layers=layers, head_dim=16,
        num_attention_heads=hidden // 16, num_key_value_heads=hidden // 32,
        num_local_experts=experts, num_experts_per_tok=2, intermediate_size=width,
        max_position_embeddings=max(LENGTHS), sliding_window=None, tie_word_embeddings=False,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def unfused(name: str, value: Tensor) -> list[Tensor]:
    """The matrices that our Muon finds in a parameter."""
    if value.dim() == 2:
        return [value]
    halves = value.chunk(2, -2) if "gate_up" in name else [value]
    return [matrix for half in halves for matrix in half]


class Theirs:
    """torch.optim.Muon on single matrices, torch.optim.AdamW on the rest."""

    def __init__(self, model: nn.Module, bfloat16: bool = True):
        self.bfloat16, matrices, rest = bfloat16, [], []
        self.parts: dict[str, list[nn.Parameter]] = {}
        for name, p in model.named_parameters():
            if uses_muon(name, p.shape):
                copies = [nn.Parameter(m.detach().clone()) for m in unfused(name, p)]
                for copy, gradient in zip(copies, unfused(name, p.grad), strict=True):
                    copy.grad = gradient.clone()
                matrices += copies
            else:
                copies = [nn.Parameter(p.detach().clone())]
                copies[0].grad = p.grad.clone()
                rest += copies
            self.parts[name] = copies
        self.count, self.elements = len(matrices), sum(m.numel() for m in matrices)
        self.muon = torch.optim.Muon(matrices, **RATE, adjust_lr_fn="match_rms_adamw")
        self.adamw = torch.optim.AdamW(rest, **RATE, betas=(0.9, 0.95), fused=True)

    def step(self) -> None:
        with _float32_newton_schulz(not self.bfloat16):
            self.muon.step()
        self.adamw.step()


@contextmanager
def _float32_newton_schulz(on: bool):
    """torch's own iteration without its cast to bfloat16."""
    module = torch.optim._muon
    plain, cast = module._zeropower_via_newtonschulz, Tensor.bfloat16
    if on:
        Tensor.bfloat16 = Tensor.clone
    try:
        yield plain
    finally:
        Tensor.bfloat16 = cast


def optimizers(name: str, rounds: int) -> list[dict]:
    """Ratios of the step at each one's default and at one dtype, on one model."""
    rows = []
    for case, dtype, bfloat16 in (
        ("defaults: float32 / bfloat16", None, True),
        ("both float32", None, False),
        ("both bfloat16", torch.bfloat16, True),
    ):
        model = model_of(name)
        generator = torch.Generator().manual_seed(0)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        theirs = Theirs(model, bfloat16)
        clip = QKClip(model)
        ours = MuonClip(model.named_parameters(), **RATE, qk_clip=clip, dtype=dtype)
        rows.append(_row(f"{name}, {case}", ours.step, theirs.step, rounds))
        _same_work(model, theirs, steps=rounds + 2, rough=case.startswith("defaults"))
        rows[-1] |= {"matrices": theirs.count, "elements": theirs.elements}
    return rows


def _row(case: str, plain: Callable, other: Callable, rounds: int) -> dict:
    return {"case": case} | in_turn(plain, other, rounds, "cpu")


def _same_work(model: nn.Module, theirs: Theirs, steps: int, rough: bool) -> None:
    """Raise unless both sides have arrived at the same weights, up to their rounding."""
    for name, p in model.named_parameters():
        parts = torch.cat([m.flatten() for m in theirs.parts[name]])
        own = torch.cat([m.flatten() for m in unfused(name, p.detach())]) if p.dim() > 1 else p
        moved = steps * RATE["lr"] * 0.2
        apart = (own - parts).square().mean().sqrt().item()
        if apart > moved * (0.05 if rough else 0.02):
            raise RuntimeError(f"{name}: the two optimizers are {apart / moved:.2f} steps apart")


class Step:
    """Forward, backward and MuonClip's step on one batch; without `watched` nothing is seen."""

    def __init__(self, length: int, watched: bool, exact: bool = True):
        self.model = model_of("mixtral-cpu")
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(2, 128, (TOKENS // length, length), generator=generator)
        clip = QKClip(self.model, exact=exact)
        self.optimizer = MuonClip(self.model.named_parameters(), **RATE, qk_clip=clip)
        if not watched:
            clip.remove()

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.ids, labels=self.ids, use_cache=False).loss.backward()
        self.optimizer.step()


def watching(length: int, exact: bool, rounds: int) -> dict:
    """A training step with QK-Clip over one without."""
    looking = "the largest logit" if exact else "a bound, unless it exceeds τ"
    case = f"training step, {TOKENS // length} × {length} tokens, {looking}"
    return _row(case, Step(length, False), Step(length, True, exact), rounds)


def rl_step(prompts: int, rounds: int) -> dict:
    """A whole step of the Trainer with QK-Clip, at a τ that no logit reaches, over one without.

    Both do the same: rollout, rewards, update, and at every fifth step probes, where the largest
    logit is searched for.
    """

    def trainer(tau: float | None) -> Trainer:
        data = DataConfig(prompts=prompts, eval_every=NEVER, eval_prompts=1)
        numerics = NumericsConfig(optimizer="muon", learning_rate=RATE["lr"], qk_clip=tau)
        return Trainer(TrainerConfig(steps=NEVER, data=data, numerics=numerics))

    case = f"GRPO step of the Trainer, {prompts} × 8"
    return _row(case, trainer(None).step, trainer(100.0).step, rounds)


def measure(args: argparse.Namespace) -> dict:
    seen = [watching(n, exact, args.rounds) for n in args.lengths for exact in (True, False)]
    return {
        "machine": provenance() | {"load": f"{os.getloadavg()[0]:.1f}"},
        "optimizers": [row for name in args.models for row in optimizers(name, args.rounds)],
        "watching": [*seen, rl_step(args.prompts, args.rounds)],
    }


def table(result: dict) -> str:
    """The result as Markdown."""
    lines = [
        "| step of the optimizer | matrices | torch, ms | ours, ms | torch / ours | quartiles |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for row in result["optimizers"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['case']} | {row['matrices']} | {row['ms_with']:.1f} | "
            f"{row['ms_without']:.1f} | **{row['ratio']:.1f}** | {low:.1f}-{high:.1f} |"
        )
    lines += ["", "| QK-Clip | without, ms | with, ms | with / without | quartiles |"]
    lines.append("|---|---|---|---|---|")
    for row in result["watching"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['case']} | {row['ms_without']:.1f} | {row['ms_with']:.1f} | "
            f"**{row['ratio']:.3f}** | {low:.3f}-{high:.3f} |"
        )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--quick", action="store_true", help="five rounds of the smallest")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args()


def main() -> None:
    args = options()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds, args.models = min(args.rounds, 5), args.models[:1]
    result = measure(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
