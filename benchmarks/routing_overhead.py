"""What recording the routing costs: rollouts with it over rollouts without it, in turn.

python benchmarks/routing_overhead.py [--family F] [--scale cpu|gpu] [--prompts N] [--new-tokens N]
                                      [--rounds N] [--quick] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from stablerl_core.system import RoutingRecord, record_routing, replay_routing
from stablerl_core.training import small_moe
from stablerl_core.training.models import FAMILIES
from stablerl_core.training.provenance import provenance
from stablerl_core.training.rollout import Rollout, completion_logp, rollout

GROUP, PROMPT, WARM_UP = 8, 16, 2
NEVER = -1  # no completion ends early: both sides sample the same number of tokens


class Bench:
    """One model and one batch of random prompts; each measured part draws the same tokens."""

    def __init__(self, args: argparse.Namespace):
        device = "cuda" if args.scale == "gpu" else "cpu"
        self.model, tokenizer = small_moe(f"{args.family}-{args.scale}", device=device)
        ids = torch.randint(3, len(tokenizer), (args.prompts, PROMPT), generator=_generator("cpu"))
        self.prompt, self.new_tokens, self.device = ids.to(device), args.new_tokens, device

    def rollout(self, recorded: bool = False) -> Rollout:
        return rollout(
            self.model,
            self.prompt,
            torch.ones_like(self.prompt, dtype=torch.bool),
            group_size=GROUP,
            max_new_tokens=self.new_tokens,
            eos_token_id=NEVER,
            generator=_generator(self.device),
            record_routing=recorded,
        )

    def listened(self) -> list[RoutingRecord]:
        """The same with `record_routing` around it."""
        with record_routing(self.model) as recording:
            self.rollout()
        return recording.parts

    def score(self, batch: Rollout, parts: list[RoutingRecord] | None) -> None:
        """Log-probabilities and their gradient, with the recorded experts or without."""
        free = replace(batch, routing=None)  # else scoring replays the record by itself
        with nullcontext() if parts is None else replay_routing(self.model, parts):
            completion_logp(self.model, free).sum().backward()
        self.model.zero_grad()


def _generator(device: str) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def scoring_parts(batch: Rollout) -> list[RoutingRecord]:
    """The record of a rollout as its two scoring passes use it."""
    width = batch.prompt.shape[1]
    record = RoutingRecord(batch.routing, torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1))
    return [record[::GROUP, :width], record[:, width:]]


def in_turn(plain: Callable, other: Callable, rounds: int, device: str) -> dict:
    """`other` over `plain`, in pairs whose order alternates; the first ones are not counted."""
    pairs = []
    for turn in range(rounds + WARM_UP):
        sides = (plain, other) if turn % 2 else (other, plain)
        seconds = {side: _seconds(side, device) for side in sides}
        pairs.append((seconds[plain], seconds[other]))
    pairs = pairs[WARM_UP:]
    ratios = [b / a for a, b in pairs]
    low, _, high = (
        statistics.quantiles(ratios, n=4, method="inclusive") if rounds > 1 else ratios * 3
    )
    return {
        "ratio": statistics.median(ratios),
        "ratio_quartiles": [low, high],
        "ratio_of_fastest": min(b for _, b in pairs) / min(a for a, _ in pairs),
        "ms_without": 1000 * statistics.median(a for a, _ in pairs),
        "ms_with": 1000 * statistics.median(b for _, b in pairs),
    }


def _seconds(run: Callable, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(args: argparse.Namespace) -> dict:
    """All ratios, and the bytes that a token's routing takes."""
    bench = Bench(args)
    batch = bench.rollout(recorded=True)
    parts = scoring_parts(batch)
    cases = {
        "rollout, its own tap": (bench.rollout, lambda: bench.rollout(True)),
        "rollout, record_routing": (bench.rollout, bench.listened),
        "scoring and gradient, replay_routing": (
            lambda: bench.score(batch, None),
            lambda: bench.score(batch, parts),
        ),
    }
    return {
        "machine": provenance() | {"load": f"{os.getloadavg()[0]:.1f}"},
        "rows": [
            {"case": name} | in_turn(*sides, args.rounds, bench.device)
            for name, sides in cases.items()
        ],
        "sampled_tokens": int(batch.mask.sum()),
        "bytes_per_token": parts[1].bytes_per_token,
        "record_bytes": batch.routing.nbytes,
    }


def table(result: dict) -> str:
    """The result as Markdown."""
    lines = ["| part | without, ms | with, ms | with / without | quartiles | fastest |"]
    lines.append("|---|---|---|---|---|---|")
    for row in result["rows"]:
        low, high = row["ratio_quartiles"]
        lines.append(
            f"| {row['case']} | {row['ms_without']:.1f} | {row['ms_with']:.1f} | "
            f"**{row['ratio']:.3f}** | {low:.3f}-{high:.3f} | {row['ratio_of_fastest']:.3f} |"
        )
    lines.append(
        f"\n{result['bytes_per_token']} bytes a token, {result['record_bytes']} bytes for "
        f"{result['sampled_tokens']} sampled tokens and their prompts"
    )
    return "\n".join(lines)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=sorted(FAMILIES), default="mixtral")
    parser.add_argument("--scale", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--quick", action="store_true", help="five rounds")
    parser.add_argument("--threads", type=int, default=0, help="0 = torch's own choice")
    parser.add_argument("--json", type=Path, help="write the result here as well")
    return parser.parse_args()


def main() -> None:
    args = options()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds = min(args.rounds, 5)
    result = measure(args)
    print(table(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
