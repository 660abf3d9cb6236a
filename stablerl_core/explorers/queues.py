"""Explorer of chapter 45: what a staleness cap costs, and whose age it really caps."""

from __future__ import annotations

import random
from functools import lru_cache

from ..system import LengthTail, QueueRates, QueueRules, simulate_queues
from .explorer import Explorer, Slider
from .panels import Curves, Table

CAPS = [0, 1, 2, 4, 8]
ORDERS = {"as admitted": "admitted", "as finished": "finished"}
BATCH, UPDATES, FULL = 8, 48, 12  # completions an update; updates; those that fill the queues
TOKENS, LIMIT = 100, 1000
COLOURS = {"as admitted": "#D55E00", "as finished": "#0072B2", "the cap": "#888888"}
COLOURS |= {f"{name}, now": COLOURS[name] for name in ORDERS}


@lru_cache(maxsize=4096)
def outcome(workers: int, tail: float, cap: int, order: str) -> dict[str, float]:
    """Tokens a second, ages, shares of time and length bias of one simulated run."""
    rates = QueueRates(workers, 0.05, 2.0, reward_seconds=0.02, push_seconds=0.2)
    rules = QueueRules(BATCH, cap, order=order)
    done = simulate_queues(rates, rules, LengthTail(TOKENS, tail, LIMIT), UPDATES, random.Random(0))
    ages, (short, long) = done.staleness(FULL), done.staleness_by_length(FULL)
    return {
        "speed": done.throughput(FULL),
        "mean": sum(ages) / len(ages),
        "oldest": max(ages),
        "short": short,
        "long": long,
        "bias": done.length_bias(4),
    } | done.use()


def cap_and_age(workers: int, tail: float, cap: int):
    """Throughput and the highest age against the cap, for two orders of filling a batch."""
    now = {name: outcome(workers, tail, cap, order) for name, order in ORDERS.items()}
    admitted, finished = now.values()
    text = (
        f"Cap {cap}: batches filled as admitted train {admitted['speed']:.0f} tokens a second, "
        f"none older than {admitted['oldest']}; filled as finished, {finished['speed']:.0f}, the "
        f"mean age {finished['mean']:.2f}, the oldest {finished['oldest']}."
    )

    def against_cap(key: str) -> dict[str, list[float]]:
        return {
            name: [outcome(workers, tail, c, order)[key] for c in CAPS]
            for name, order in ORDERS.items()
        }

    def points(key: str) -> dict[str, tuple[float, float]]:
        return {f"{name}, now": (cap, values[key]) for name, values in now.items()}

    def row(key: str, form: str) -> list[str]:
        return [format(values[key], form) for values in now.values()]

    lines, x = {"the cap": CAPS, **against_cap("oldest")}, "cap η, versions"
    return text, [
        Curves(
            "Throughput",
            x,
            "tokens/s",
            CAPS,
            against_cap("speed"),
            points("speed"),
            colours={name: c for name, c in COLOURS.items() if name != "the cap"},
        ),
        Curves("Oldest", x, "versions", CAPS, lines, points("oldest"), colours=COLOURS),
        Table(
            "Batches filled",
            list(ORDERS),
            {
                "sampling workers at work": row("sampling", ".0%"),
                "trainer at work": row("training", ".0%"),
                "mean age, shortest quarter": row("short", ".2f"),
                "mean age, longest quarter": row("long", ".2f"),
                "length in the first 4 updates, over the mean": row("bias", ".2f"),
            },
        ),
    ]


QUEUES = Explorer(
    "queues",
    "What does a staleness cap cost, and whose age does it cap?",
    cap_and_age,
    sliders=[
        Slider("workers", "completions sampled side by side", [4, 8, 16, 32], 16),
        Slider("tail", "tail of the lengths, σ", [0.0, 0.5, 1.0, 1.5], 1.0),
        Slider("cap", "staleness cap η", CAPS, 2, "versions"),
    ],
    alt="Two curves of trained tokens a second against the staleness cap, rising to a plateau, and "
    "higher if batches are filled as completions finish. Two curves of the oldest completion: on "
    "the line of the cap if batches are filled as admitted, above it if as finished. A table of "
    "how busy sampler and trainer are, and of the ages of short and long completions.",
)

ALL = (QUEUES,)
