"""Chapter 25, long sequences: whose gradient is diluted, and whose credit never arrives?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ..policy import group_advantages
from ..rewards import strict_reward
from ..training import DataConfig, NumericsConfig, PolicyConfig, Trainer, TrainerConfig
from ..training.tokenizer import SPECIAL
from .chain import Credit, train_chain
from .measured import Measured

LENGTHS = (20, 100, 400, 2000)


def credit_at_all_lengths(seed: int, credit: Credit, lengths: Sequence[int] = LENGTHS):
    """One run a length; rows of `reward_400`, `first_400`, `last_400` …, every ten steps."""
    runs = {length: train_chain(length, credit, seed, every=10) for length in lengths}
    return [
        {"step": rows[0]["step"]}
        | {
            f"{name}_{length}": row[name]
            for length, row in zip(lengths, rows, strict=True)
            for name in ("reward", "first", "last")
        }
        for rows in zip(*runs.values(), strict=True)
    ]


SWEEP = {"0.9": 0.9, "0.95": 0.95, "0.99": 0.99, "1": 1.0, "adaptive": None}
CRITICS = {
    f"{critic}_{name}": Credit(critic, lam)
    for critic in ("blind", "late", "seeing")
    for name, lam in SWEEP.items()
    if critic != "seeing" or name in ("0.95", "1", "adaptive")
}
OTHERS = {
    "grpo": Credit(),
    "grpo_8": Credit(group_size=8),
    "grpo_4": Credit(group_size=4),
    "blind_adaptive_1.5": Credit("blind", None, alpha=1.5),
    "blind_0.95_fast": Credit("blind", 0.95, learning_rate=1.0),
    "seeing_0.95_coupled": Credit("seeing", 0.95, critic_lam=None),
}

CREDIT = Measured(
    name="credit_arrival",
    prediction="""PPO against GRPO on chains of 20 to 2000 tokens with three decisions (first,
middle, last token). A step is one update on 128 answers. Written after exploring seed 0 of most
arms and before the repeated runs. "Ends" is the mean of steps 101 to 120.

1. A blind critic with λ = .95: reward ends as GRPO's at 20 tokens and below .6 of it at 100, 400
   and 2000. At 400 and 2000 the last decision is right in more than nine answers of ten, the first
   in fewer than 0.7.
2. Ten times the learning rate (`blind_0.95_fast`) does not bring the first decision above 0.7 at
   400 and 2000.
3. A blind critic with λ = 1 ends within 0.1 of GRPO at every length (R1, App. A.3: "λ = 1 nearly
   equal"; there λ = .95 is clearly worse, which prediction 1 repeats).
4. VAPO's λ = 1 − 1/(.05 l) with a blind critic is worse than λ = 1 at every length, and no better
   than λ = .95 at 20 and 100: it gives the first token e^−20 of the reward at any length. With
   α = 1.5 it ends within 0.1 of λ = 1.
5. A critic that sees makes λ = .95 end at least as high as GRPO at every length, so R1's statement
   is about a critic that does not see.
6. A critic that is late by a twentieth of the answer: the adaptive λ ends higher than .95 at 2000,
   higher than 1 at 2000, and lower than both at 20.
7. Coupled targets (the critic learned with λ = .95 itself) end lower than targets with λ = 1 at
   2000, although the critic sees.
8. "More than 40 % drop within λ = .95 to .99" (a circulated summary): with the blind critic the
   reward at .95 is more than 40 % below that at .99 at 100 tokens; at 20, and for a critic that
   sees, no such drop exists. "62 % less sensitive": GRPO's relative spread over its group size
   (4, 8, 16) is less than 0.38 of PPO's over λ (.9 to 1) for the blind critic at 100 and more,
   and not at 20.
""",
    arms={
        arm: partial(credit_at_all_lengths, credit=credit)
        for arm, credit in (CRITICS | OTHERS).items()
    },
)


def bias_config(policy: PolicyConfig, steps: int = 100, seed: int = 0) -> TrainerConfig:
    """Sorting with the strict verifier and room for answers of 48 tokens; gradients unclipped."""
    return TrainerConfig(
        steps=steps,
        seed=seed,
        probe_every=50,
        data=DataConfig(prompts=16, max_new_tokens=48, eval_every=20),
        policy=policy,
        numerics=NumericsConfig(max_grad_norm=math.inf),
    )


def train_by_length(seed: int, policy: PolicyConfig, steps: int = 100) -> list[dict]:
    """Train the small model; every ten steps a row with the lengths of right and wrong answers.

    `right_length` and `wrong_length` are means over the completions of those ten steps, in tokens
    with the end token, beside `reward`, `length`, `truncated` (their means) and, where it is
    measured, `heldout_accuracy`.
    """
    seen: list[tuple[int, float]] = []

    def reward(texts, problems, cut):
        paid = strict_reward(texts, problems, cut)
        seen.extend((_tokens(t, c), r) for t, c, r in zip(texts, cut, paid, strict=True))
        return paid

    trainer, rows = Trainer(bias_config(policy, steps, seed), reward=reward), []
    for step in range(10, steps + 1, 10):
        seen.clear()
        log = trainer.run(step, progress=False)
        row = {"step": step} | {s: log.last(s, 10) for s in ("reward", "length", "truncated")}
        for name, paid in (("right", 1.0), ("wrong", 0.0)):
            lengths = [length for length, r in seen if r == paid]
            row[f"{name}_length"] = sum(lengths) / len(lengths) if lengths else math.nan
        if step % 20 == 0:
            row["heldout_accuracy"] = log.last("heldout_accuracy")
        rows.append(row)
    return rows


def _tokens(text: str, cut: bool) -> int:
    """Tokens of a completion: its characters, a special token being one, and the end if there."""
    for special in SPECIAL:
        text = text.replace(special, "_")
    return len(text) + (not cut)


BIAS = Measured(
    name="length_bias",
    prediction="""The small mixture of experts sorts, with the strict verifier and room for 48
tokens; four ways to average. Written after exploring two seeds over 60 steps.

1. Right answers shorten to the shortest form (7 tokens and the end) in every arm: nothing but the
   answer itself pays.
2. Wrong answers shorten at first in every arm. Over steps 51 to 100 they are longer under `grpo`
   and `grpo_no_std` (1/|o|) than under `dapo` and `dr_grpo`, by more than half a token.
3. They do not grow beyond their starting length in any arm: the drift that reports of large models
   show is not reproduced, only its direction.
4. Held-out accuracy at the end does not differ between the arms (intervals of the paired
   differences include zero).
""",
    arms={
        "grpo": partial(train_by_length, policy=PolicyConfig()),
        "grpo_no_std": partial(train_by_length, policy=PolicyConfig(scale="none")),
        "dapo": partial(train_by_length, policy=PolicyConfig(objective="dapo")),
        "dr_grpo": partial(train_by_length, policy=PolicyConfig(objective="dr_grpo")),
    },
)

ALL = (CREDIT, BIAS)


def expected_gradient(
    logits: Tensor,
    lengths: Tensor,
    rewards: Tensor,
    *,
    group_size: int = 4,
    aggregation: str = "sequence",
    scale: str = "std",
) -> Tensor:
    """Expected gradient of one group's objective, over every group there is.

    The policy chooses between kinds of answers: kind i, with chance softmax(logits)_i, has
    lengths_i tokens and pays rewards_i. Its first token is the choice, the rest follow from it.

        E_groups Σ_i w_i Â_i ∇ log π(kind_i),   w_i = 1/(G |o_i|)   sequence
                                                     1/Σ_j |o_j|    token (of this group)
                                                     1/(G · longest) constant

    logits, lengths, rewards: (kinds,). Returns (kinds,), the gradient to ascend. On-policy.
    Source: sequence arXiv 2402.03300 Eq. 3, token 2503.14476 §3.3, constant 2503.20783 §3.
    """
    logits = logits.detach().requires_grad_()
    kinds = torch.arange(len(logits), device=logits.device)
    groups = torch.cartesian_prod(*[kinds] * group_size)
    logp = logits.log_softmax(0)[groups]
    chance = logp.detach().sum(1).exp()
    advantages = group_advantages(rewards[groups].flatten(), group_size, scale=scale)
    tokens = lengths[groups].to(logits.dtype)
    weight = {
        "sequence": 1 / (group_size * tokens),
        "token": (1 / tokens.sum(1, keepdim=True)).expand_as(tokens),
        "constant": torch.full_like(tokens, 1 / (group_size * float(lengths.max()))),
    }[aggregation]
    per_group = (weight * advantages.view_as(weight) * logp).sum(1)
    return torch.autograd.grad((chance * per_group).sum(), logits)[0]
