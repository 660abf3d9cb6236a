"""Chapter 31, gradients before the spike: what a norm says, what fakes it, and what to do about it.

The small model sorts, 8 problems × 8 answers a step, Adam. Predictions, written after exploring
seed 0 of some arms and before the repeated runs:

`gradient_counts`: 36 batches and the norm of each one's gradient under four denominators; no
update. Three batches of each of four kinds are not ordinary: `long`, answers drawn at temperature
1.2; `filtered`, all tokens are masked out but those of one problem; `tail`, one problem instead of
eight, as the last batch of an epoch; `outlier`, the advantages of one problem are multiplied by
−30. A norm spikes where it is more than three times the median of the ordinary batches.

1. `outlier` spikes under every denominator, in at least 12 of its 15 batches.
2. The others spike under one denominator and not under another, on the same tokens: `filtered`
   under `token` in more than half of its batches and under `micro` and `constant` in none; `tail`
   under `token`, `micro` and `constant` in more than half, and under `sum` in none. `long` spikes
   under none.
3. No ordinary batch spikes under `token`.
4. The norm times √(counted tokens), under `token`, spikes in `outlier` as often as the norm does,
   and in `filtered` and `tail` less often.

`gradient_spikes`: 40 steps with learning rate 5e-4; in five of them the advantages of one problem
are multiplied by −30 (`none` and `halve_samples` have no such steps). What is done:
`free` nothing; `clip` to norm 1; `skip` leaves a step out whose norm is above three times the mean
of the steps so far; `halve` halves the learning rate there, the rule of the first seed text on the
norms of steps; `halve_samples` the same rule on the norms of the 8 problems of a batch; `agc`
adaptive clipping.

5. `free`: in the five steps after an outlier the weights move between 0.6 and 1.4 times as far as
   in `none` at the same steps: Adam divides the size away and keeps the direction. It ends below
   `none` in held-out accuracy, by a paired interval that does not contain 0.
6. `clip` and `skip` end like `none` in held-out accuracy: both paired intervals contain 0.
7. `halve` fires at four or more of the five outliers in the mean, and its learning rate ends at a
   tenth or less. Its accuracy ends not above that of `clip`.
8. `halve_samples` fires without any outlier, three times or more in the mean, since problems that
   are always or never solved have no gradient and pull the mean down.
9. `agc` (0.01) cuts units at every step, not only at outliers, and ends above `free`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from ..numerics import (
    adaptive_clip_gradients,
    clip_gradients,
    gradient_norm,
    halve_lr_on_gradient_outlier,
)
from ..rewards import task_by_name
from ..training import Sampling, load_base
from .first_nan import BASE, GROUP, RATE, Batch, Run, collect, policy_loss, scored
from .measured import Measured

PROBLEMS, BLOWN_UP = 8, -30.0

# The same tokens under four denominators ---------------------------------------------------------

KINDS = ("long", "filtered", "tail", "outlier")


def kind_of(number: int) -> str:
    """What is special about batch 1 … 36: every third is not ordinary, in turn."""
    return KINDS[(number // 3 - 1) % 4] if number % 3 == 0 else "ordinary"


def problem_sums(model: nn.Module, batch: Batch) -> tuple[list[list[Tensor]], list[int]]:
    """The gradient of the sum of the loss over the tokens of each problem, and their number."""
    sums, tokens, parameters = [], [], list(model.parameters())
    for rows in torch.arange(len(batch["mask"])).split(GROUP):
        piece = {name: tensor[rows] for name, tensor in batch.items()}
        tokens.append(int(piece["mask"].sum()))
        loss = policy_loss(model, piece) * tokens[-1]
        grads = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(grads, parameters, strict=True)
        sums.append([torch.zeros_like(p) if g is None else g for g, p in pairs])
    return sums, tokens


def weighted(sums: Sequence[Sequence[Tensor]], weights: Sequence[float]) -> list[Tensor]:
    """Σ_m weight_m · gradient_m, one tensor a parameter."""
    return [
        sum(w * g for w, g in zip(weights, parts, strict=True)) for parts in zip(*sums, strict=True)
    ]


def counted_norms(model: nn.Module, batch: Batch) -> dict[str, float]:
    """The norm of one batch's gradient by what its sum over tokens is divided by.

    token: all counted tokens. micro: each problem's own tokens, then a mean over the problems.
    constant: answers × 24, the longest there can be. sum: nothing. Beside them `tokens`.
    """
    sums, tokens = problem_sums(model, batch)
    m, whole = len(sums), max(1, sum(tokens))
    weights = {
        "token": [1 / whole] * m,
        "micro": [1 / max(1, n) / m for n in tokens],
        "constant": [1 / (24 * GROUP * m)] * m,
        "sum": [1.0] * m,
    }
    norms = {k: float(torch.nn.utils.get_total_norm(weighted(sums, w))) for k, w in weights.items()}
    return norms | {"tokens": sum(tokens)}


def with_signal(batch: Batch) -> list[int]:
    """The problems of a batch of which some answers were right and some wrong."""
    groups = batch["advantages"].view(-1, GROUP)
    return [i for i, group in enumerate(groups) if bool((group != 0).any())]


def blow_up(batch: Batch, which: int) -> None:
    """Multiply the advantages of one problem that has a signal by −30, in place."""
    problems = with_signal(batch)
    if problems:
        rows = slice(GROUP * problems[which % len(problems)], None)
        batch["advantages"][rows][:GROUP] *= BLOWN_UP


def _filter(batch: Batch) -> None:
    """Let only the tokens of one problem that has a signal count, in place."""
    kept = GROUP * next(iter(with_signal(batch)), 0)
    batch["mask"][:kept] = False
    batch["mask"][kept + GROUP :] = False


def counts(seed: int, batches: int = 36) -> list[dict]:
    """Norms of 36 batches of a model that does not move; `step` is the number of the batch."""
    model, tokenizer = load_base(BASE)
    task, rows = task_by_name("sort"), []
    for n in range(1, batches + 1):
        kind = kind_of(n)
        problems = task.sample("train", 1 if kind == "tail" else PROBLEMS, seed=seed * 1000 + n)
        heat = Sampling(temperature=1.2 if kind == "long" else 1.0)
        batch, _ = collect(model, tokenizer, problems, seed * 1000 + n, heat)
        with torch.no_grad():  # as if the trainer had drawn them: every ratio is 1
            batch["sampler_logp"][:, 1:] = scored(model, batch)[1]
        if kind == "filtered":
            _filter(batch)
        if kind == "outlier":
            blow_up(batch, n)
        rows.append({"step": n} | counted_norms(model, batch))
    return rows


# Outliers, and what is done about them ------------------------------------------------------------

STEPS, OUTLIERS = 40, (13, 19, 25, 31, 37)


class Guard:
    """What one arm does with the gradient that lies in the parameters; `rate` never rises again."""

    def __init__(self, name: str):
        self.name, self.rate, self.norms = name, RATE, []

    def act(self, parameters: list[nn.Parameter], of_problems: Sequence[float]) -> dict:
        """Bound the gradient, or halve the rate; what was seen and done.

        `fired`: the norm is above three times the mean of all so far, or, for halve_samples, how
        many problems are above that of their batch; for agc, how many units were cut. `taken`:
        whether to step.
        """
        norm = float(gradient_norm(parameters))
        self.norms.append(norm)
        lower, outliers = halve_lr_on_gradient_outlier(torch.tensor(self.norms), self.rate)
        told = {"grad_norm": norm, "fired": int(outliers[-1]), "taken": 1}
        if self.name == "clip":
            clip_gradients(parameters, 1.0)
        elif self.name == "agc":  # the paper leaves the last layer out
            told["fired"] = adaptive_clip_gradients(parameters[:-1]).clipped
        elif self.name == "skip":
            told["taken"] = 1 - told["fired"]
        elif self.name == "halve" and told["fired"]:
            self.rate *= 0.5
        elif self.name == "halve_samples":
            self.rate, outliers = halve_lr_on_gradient_outlier(torch.tensor(of_problems), self.rate)
            told["fired"] = int(outliers.sum())
        return told | {"learning_rate": self.rate}


def train(seed: int, guard: str, outliers: bool = True, steps: int = STEPS) -> list[dict]:
    """40 steps; rows of `Guard.act` with `reward`, `update_norm`, and at the end the `accuracy`."""
    run, bound, rows = Run(seed), Guard(guard), []
    parameters = list(run.model.parameters())
    for n in range(1, steps + 1):
        batch, seen = run.draw(n)
        if outliers and n in OUTLIERS:
            blow_up(batch, which=seed + n)
        sums, tokens = problem_sums(run.model, batch)
        total = weighted(sums, [1 / sum(tokens)] * len(sums))
        for p, g in zip(parameters, total, strict=True):
            p.grad = g
        told = bound.act(parameters, [float(torch.nn.utils.get_total_norm(g)) for g in sums])
        run.rate = bound.rate
        moved = run.step(n) if told["taken"] else 0.0
        rows.append({"step": n, "reward": seen.reward, "update_norm": moved} | told)
    rows[-1]["accuracy"] = run.accuracy()
    return rows


COUNTS = Measured(name="gradient_counts", prediction=__doc__, arms={"base": counts})

SPIKES = Measured(
    name="gradient_spikes",
    prediction=__doc__,
    arms={
        "none": partial(train, guard="free", outliers=False),
        "halve_samples": partial(train, guard="halve_samples", outliers=False),
        **{name: partial(train, guard=name) for name in ("free", "clip", "skip", "halve", "agc")},
    },
)

ALL = (COUNTS, SPIKES)
