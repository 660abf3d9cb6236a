"""What recording costs: rollouts that keep the routing, or top-p's kept sets, over plain ones.

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
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from stablerl_core.rewards import task_by_name
from stablerl_core.system import (
    KeptSets,
    RoutingRecord,
    record_routing,
    replay_routing,
    sampling,
)
from stablerl_core.training import RECIPES, Sampling, load_base, small_moe
from stablerl_core.training.models import FAMILIES
from stablerl_core.training.provenance import provenance
from stablerl_core.training.rollout import Rollout, completion_logp, encode_prompts, rollout

GROUP, WARM_UP = 8, 2
TOP_P = 0.9
NEVER = -1  # no completion ends early: both sides sample the same number of tokens


class Bench:
    """One model and one batch of prompts; each measured part draws the same tokens.

    The shipped base model with problems of its task where there is one, because fresh weights keep
    nearly every token; else fresh weights and random prompts.
    """

    def __init__(self, args: argparse.Namespace):
        self.device = "cuda" if args.scale == "gpu" else "cpu"
        preset = f"{args.family}-{args.scale}"
        if f"{preset}-sort" in RECIPES:
            self.model, tokenizer = load_base(f"{preset}-sort", self.device)
            asked = [p.prompt for p in task_by_name("sort").sample("train", args.prompts, seed=0)]
            self.prompt, self.mask = encode_prompts(tokenizer, asked, self.device)
        else:
            self.model, tokenizer = small_moe(preset, device=self.device)
            ids = torch.randint(3, len(tokenizer), (args.prompts, 16), generator=_generator("cpu"))
            self.prompt = ids.to(self.device)
            self.mask = torch.ones_like(self.prompt, dtype=torch.bool)
        self.new_tokens, self.end = args.new_tokens, tokenizer.eos_token_id

    def rollout(self, recorded: bool = False, top_p: float = 1.0, end: int = NEVER) -> Rollout:
        return rollout(
            self.model,
            self.prompt,
            self.mask,
            group_size=GROUP,
            max_new_tokens=self.new_tokens,
            eos_token_id=end,
            generator=_generator(self.device),
            sampling=Sampling(top_p=top_p),
            record_routing=recorded,
        )

    def truncated(self, kept: bool) -> Rollout:
        """Top-p sampling, with the ids that were kept or without."""
        with nullcontext() if kept else _ids_thrown_away():
            return self.rollout(top_p=TOP_P)

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


@contextmanager
def _ids_thrown_away():
    """Truncated sampling that makes no list of ids: what the sampler did before it kept any."""
    compact, sampling._compact = sampling._compact, lambda keep: None
    try:
        yield
    finally:
        sampling._compact = compact


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
    parts, kept = scoring_parts(batch), bench.rollout(top_p=TOP_P, end=bench.end)
    sets = KeptSets.of(kept.kept, kept.mask)
    cases = {
        "rollout, its own tap": (bench.rollout, lambda: bench.rollout(True)),
        "rollout, record_routing": (bench.rollout, bench.listened),
        f"rollout with top-p {TOP_P}, kept set": (
            lambda: bench.truncated(False),
            lambda: bench.truncated(True),
        ),
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
        "kept_bytes_per_token": sets.bytes_per_token,
        "kept_table_bytes_per_token": kept.kept.nbytes / int(kept.mask.sum()),
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
        f"{result['sampled_tokens']} sampled tokens and their prompts; kept sets: "
        f"{result['kept_bytes_per_token']:.1f} bytes a token without filler, "
        f"{result['kept_table_bytes_per_token']:.0f} as the rollout's table"
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
