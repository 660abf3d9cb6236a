"""A chain of tokens with three decisions: how far must credit travel, and does it arrive?

Chapter 25's toy. What an answer is worth is decided at its first, middle and last token; the
tokens between say nothing about it. The length is the only thing that changes from one chain to
another, so what changes with it is due to distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..policy import group_advantages, length_adaptive_lambda, policy_objective

DECISIONS = ("first", "middle", "last")


@dataclass(frozen=True)
class Chain:
    """An answer of `length` tokens, each one of two words, to one of `questions` questions.

    At the three decisions one word is right, which one depends on the question; the reward is 1
    if all three are. The other tokens are one of `fillers` kinds, and nearly settled: their logit
    begins at `settled` (4: 98 to 2). The policy is linear: the logit of a token is θ · φ, φ a
    random direction in `width` dimensions for each decision of each question and each kind of
    filler. So tokens share parameters, and noise at one of them disturbs the others.
    """

    length: int
    questions: int = 8
    fillers: int = 16
    width: int = 64
    settled: float = 4.0

    @property
    def places(self) -> Tensor:
        """Positions of the three decisions, (3,)."""
        return torch.tensor([0, self.length // 2, self.length - 1])


@dataclass(frozen=True)
class Credit:
    """How an arm turns rewards into advantages.

    critic: "none" compares the `group_size` answers to a question (GRPO). The others are tables
    learned from the same answers: "blind" knows how many decisions have been made, "seeing" also
    whether all of them were right so far, which is all there is to know; "late" learns of a
    decision only after `delay` of the answer's length (a slip that shows a few lines further on).
    lam: λ of the advantages; None takes VAPO's 1 − 1/(alpha · length). critic_lam: λ of the
    critic's targets (1 = what the answer got; None = that of the advantages, as in ordinary PPO).
    pretrain: steps in which the critic learns and the policy stands.
    """

    critic: Literal["none", "blind", "late", "seeing"] = "none"
    lam: float | None = 1.0
    alpha: float = 0.05
    critic_lam: float | None = 1.0
    critic_rate: float = 0.3
    delay: float = 0.05
    pretrain: int = 0
    group_size: int = 16
    learning_rate: float = 0.1
    reward_scale: float = 1.0

    def lam_at(self, length: int) -> float:
        """λ of the advantages on answers of this length."""
        if self.lam is not None:
            return self.lam
        return float(length_adaptive_lambda(torch.tensor([length]), self.alpha))


class Answers(NamedTuple):
    """A batch of answers: B rows of T tokens."""

    context: Tensor  # (B, T) which row of the features a token is drawn with
    taken: Tensor  # (B, T) bool, which of the two words
    right: Tensor  # (B, 3) bool, decision by decision


class Policy:
    """Linear policy of a chain; everything random in it comes from `generator`."""

    def __init__(self, chain: Chain, generator: torch.Generator):
        self.chain, self.generator = chain, generator
        decisions = chain.questions * len(DECISIONS)
        features = torch.randn(decisions + chain.fillers, chain.width, generator=generator)
        self.features = torch.nn.functional.normalize(features, dim=1)
        self.answer = torch.rand(chain.questions, len(DECISIONS), generator=generator) < 0.5
        filler = torch.randint(chain.fillers, (chain.length,), generator=generator)
        self.filler = decisions + filler
        self.offset = torch.full((decisions + chain.fillers,), chain.settled)
        self.offset[:decisions] = 0
        self.theta = torch.zeros(chain.width, requires_grad=True)

    def logits(self) -> Tensor:
        """Log-odds of the second word in every context."""
        return self.features @ self.theta + self.offset

    def sample(self, answers: int) -> Answers:
        """Answer the questions in turn, equally often, `answers` times in all."""
        chain, places = self.chain, self.chain.places
        question = torch.arange(chain.questions).repeat_interleave(answers // chain.questions)
        context = self.filler.repeat(answers, 1)
        context[:, places] = question[:, None] * len(DECISIONS) + torch.arange(len(DECISIONS))
        chance = self.logits().detach().sigmoid()[context]
        taken = torch.rand(context.shape, generator=self.generator) < chance
        return Answers(context, taken, taken[:, places] == self.answer[question])

    def logp(self, answers: Answers) -> Tensor:
        """Log-probability of each token of the answers, (B, T), with gradient."""
        both = torch.stack([-self.logits(), self.logits()], dim=1)
        return torch.nn.functional.logsigmoid(both)[answers.context, answers.taken.long()]


class TableCritic:
    """A value for each situation the critic can tell apart, moved towards the mean of its targets.

    The situation before token t: of how many decisions it knows, and, unless it is blind, whether
    all of them were right. It begins at 0, as a fresh value head does.
    """

    def __init__(self, chain: Chain, credit: Credit):
        self.credit = credit
        late = round(credit.delay * chain.length) if credit.critic == "late" else 0
        self.known = (torch.arange(chain.length)[:, None] > chain.places + late).sum(1)  # (T,)
        self.table = torch.zeros(2 * (len(DECISIONS) + 1))

    def situations(self, answers: Answers) -> Tensor:
        """Index into the table for each token, (B, T)."""
        so_far = answers.right.cumprod(dim=1)
        if self.credit.critic == "blind":
            so_far = torch.ones_like(so_far)
        still = torch.cat([torch.ones_like(so_far[:, :1]), so_far], dim=1)
        return 2 * self.known + still[:, self.known]

    def learn(self, situations: Tensor, targets: Tensor) -> None:
        """Move each value a part of the way to the mean of its targets."""
        flat, size = situations.reshape(-1), len(self.table)
        count = torch.bincount(flat, minlength=size)
        mean = torch.bincount(flat, targets.reshape(-1), minlength=size) / count.clamp(min=1)
        self.table += self.credit.critic_rate * torch.where(count > 0, mean - self.table, 0)


def chain_gae(rewards: Tensor, values: Tensor, lam: float) -> Tensor:
    """`policy.gae` where every token counts, in log2(T) sweeps instead of T.

        Â_t = Σ_j λ^j δ_{t+j}:   Â ← δ, then Â_t ← Â_t + λ^n Â_{t+n} for n = 1, 2, 4, …

    rewards (B,), paid at the last token; values (B, T). Returns (B, T).
    """
    following = torch.cat([values[:, 1:], rewards[:, None]], dim=1)
    advantages, reach = following - values, 1
    while reach < values.shape[1]:
        further = torch.zeros_like(advantages)
        further[:, :-reach] = lam**reach * advantages[:, reach:]
        advantages, reach = advantages + further, 2 * reach
    return advantages


def train_chain(
    length: int, credit: Credit, seed: int, *, steps: int = 120, answers: int = 128, every: int = 5
) -> list[dict]:
    """Train on chains of one length; a row each `every` steps: means of the steps since the last.

    A step draws `answers` answers and makes one update with Adam, so the ratio is 1 and PPO and
    GRPO differ in their advantages alone. A critic's advantages are whitened over the batch. Rows
    hold `reward` and the share of right words at the `first`, `middle` and `last` decision.
    """
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(Chain(length), generator)
    critic = TableCritic(policy.chain, credit)
    optimizer = torch.optim.Adam([policy.theta], credit.learning_rate, betas=(0.9, 0.95))
    rows, seen = [], []
    for step in range(1 - credit.pretrain, steps + 1):
        batch = policy.sample(answers)
        advantages = _advantages(batch, credit, critic)
        if step < 1:
            continue
        seen.append([float(batch.right.all(1).float().mean()), *batch.right.float().mean(0)])
        optimizer.zero_grad()
        mask = torch.ones_like(batch.taken)
        policy_objective("grpo", policy.logp(batch), None, advantages, mask)[0].backward()
        optimizer.step()
        if step % every == 0:
            means = torch.tensor(seen).mean(0).tolist()
            rows.append({"step": step} | dict(zip(("reward", *DECISIONS), means, strict=True)))
            seen = []
    return rows


def _advantages(batch: Answers, credit: Credit, critic: TableCritic) -> Tensor:
    """Advantages of an arm, (B,) or (B, T); the critic learns from the same batch, afterwards."""
    rewards = credit.reward_scale * batch.right.all(dim=1).float()
    if credit.critic == "none":
        return group_advantages(rewards, credit.group_size)
    lam = credit.lam_at(batch.context.shape[1])
    situations = critic.situations(batch)
    values = critic.table[situations]
    advantages = chain_gae(rewards, values, lam)
    critic_lam = lam if credit.critic_lam is None else credit.critic_lam
    critic.learn(situations, values + chain_gae(rewards, values, critic_lam))
    return (advantages - advantages.mean()) / (advantages.std() + 1e-8)


def credit_moments(
    distance: int,
    lam: float,
    *,
    known: float = 0.0,
    delay: int = 0,
    noise: float = 0.0,
    chances: tuple[float, float] = (0.25, 0.0),
) -> tuple[float, float]:
    """What a decision learns through GAE from a critic that is wrong by a known amount.

        gap     E Â(right) − E Â(wrong) = (q₁ − q₀) · (known · (λ^delay − λ^distance) + λ^distance)
        spread  Var Â(right) = noise² · (1 + (1 − λ)² Σ_{k=1}^{distance} λ^{2(k−1)})
                               + λ^{2·distance} · q₁ (1 − q₁)

    The reward, 0 or 1, is paid `distance` tokens after the decision and is 1 with chance q₁ or
    q₀ = `chances` after a right or a wrong one. Before it, and for `delay` readings after it, the
    critic reads the mean m of the two; then m + known · (q − m). Every reading is off by
    independent noise of standard deviation `noise`. Returns (gap, standard deviation); the gap of
    λ = 1 is q₁ − q₀ whatever the critic says. Source: arXiv 1506.02438 Eq. 16, summed.
    """
    right, wrong = chances
    reached = lam**distance
    seen = max(lam**delay - reached, 0.0)
    readings = distance if lam == 1 else (1 - reached**2) / (1 - lam**2)
    variance = noise**2 * (1 + (1 - lam) ** 2 * readings) + reached**2 * right * (1 - right)
    return (right - wrong) * (known * seen + reached), variance**0.5


def stop_preference(error: float, lam: float, stop: float) -> float:
    """How much better stopping looks than going on, where in truth the two are worth the same.

        E Â(stop) − E Â(go on) = −error · (1 − λ) / (1 − λ (1 − stop))

    An answer ends at each token with chance `stop`; its reward does not depend on its length, and
    the critic reads too much by `error` everywhere (a fresh value head reads 0: too little by the
    mean reward). Going on is compared with the next reading, which has the same error; stopping
    with the reward, which has none. Zero for λ = 1 and for a critic without error.
    Source: arXiv 1506.02438 Eq. 16, summed; the length that a fresh critic costs is the
    observation of arXiv 2503.01491.
    """
    return -error * (1 - lam) / (1 - lam * (1 - stop))
