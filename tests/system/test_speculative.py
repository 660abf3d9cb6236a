"""Draft and verify: the output is the verifier's distribution, whatever the draft is."""

from __future__ import annotations

import copy
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers.generation import utils as hugging_face

from stablerl_core.system import (
    draft_acceptance,
    speculative,
    speculative_rollout,
    verify_draft,
)
from stablerl_core.training import (
    Rollout,
    Sampling,
    Trainer,
    completion_logits,
    completion_logp,
    load_base,
)
from stablerl_core.training.precision import round_weights, rounded_activations

sys.path.insert(0, str(Path(__file__).parents[1] / "training"))
from tiny import FAMILIES, sharp_moe, tiny_config  # noqa: E402

END = 1
F64 = torch.float64


def random_logits(seed: int, *shape: int, spread: float = 1.5) -> torch.Tensor:
    return spread * torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# Exact: one step, whole rounds, whole sequences


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_accept_or_replace_is_the_verifiers_distribution(seed, temperature):
    """q·min(1, p/q) + (1 − Σ min(p, q)) · residual = p, for every action, in float64."""
    logits, draft_logits = random_logits(seed, 6), random_logits(seed + 100, 6)
    draft_logits[5] = -torch.inf  # a token that the draft never proposes
    p, q = (logits / temperature).softmax(-1), (draft_logits / temperature).softmax(-1)
    kept = q * speculative._acceptance(p, q)
    alpha = draft_acceptance(logits, draft_logits, temperature)
    torch.testing.assert_close(kept.sum(), alpha, rtol=0, atol=1e-15)
    torch.testing.assert_close(alpha, 1 - (p - q).abs().sum() / 2, rtol=0, atol=1e-15)
    total = kept + (1 - alpha) * speculative._residual(p, q)
    torch.testing.assert_close(total, p, rtol=0, atol=1e-15)
    assert alpha < 0.95


FIRST_Q, FIRST_P = torch.tensor([4, 2, 2, 0]) / 8, torch.tensor([1, 2, 3, 2]) / 8
SECOND_Q = torch.tensor([[2, 4, 0, 2], [8, 0, 0, 0], [2, 2, 2, 2], [1, 1, 1, 1]])
SECOND_P = torch.tensor([[1, 5, 2, 0], [4, 2, 2, 0], [2, 2, 2, 2], [0, 0, 4, 4]]) / 8
THIRD_P = torch.tensor([[1, 0, 3, 4], [2, 2, 2, 2], [0, 0, 0, 8], [5, 1, 1, 1]]) / 8


def test_a_whole_round_by_enumeration(monkeypatch):
    """Every proposal, every acceptance and every replacement of `verify_draft` itself, k = 2.

    All thresholds are multiples of 1/24, so uniforms at the midpoints of a grid of 24 measure
    each event exactly. Given that a position is reached, its token has the verifier's
    distribution there, which depends on the tokens before it.
    """
    second_q = SECOND_Q / SECOND_Q.sum(-1, keepdim=True)
    grid = (torch.arange(24, dtype=F64) + 0.5) / 24
    cells = [
        (a, b, *uniforms)
        for a, b in product(range(4), range(4))
        for uniforms in product(grid[::3] + 1 / 24, grid[::3] + 1 / 24, grid)
        if FIRST_Q[a] * second_q[a, b] > 0
    ]
    proposals = torch.tensor([cell[:2] for cell in cells])
    uniforms = torch.tensor([cell[2:] for cell in cells], dtype=F64)
    a, b = proposals.T
    draws = iter((uniforms[:, :2], uniforms[:, 2:]))
    monkeypatch.setattr(torch, "rand", lambda *_, **__: next(draws))
    first_p, first_q = (x.to(F64).log().expand(len(a), -1) for x in (FIRST_P, FIRST_Q))
    verified = verify_draft(
        torch.stack([first_p, SECOND_P[a].to(F64).log(), THIRD_P[b].to(F64).log()], 1),
        torch.stack([first_q, second_q[a].to(F64).log()], 1),
        proposals,
    )
    weight = FIRST_Q[a].to(F64) * second_q[a, b] / (8 * 8 * 24)
    assert weight.sum() == pytest.approx(1, abs=1e-12)
    (y1, y2, y3), n = verified.tokens.T, verified.accepted

    def mass(chosen):
        return float(weight[chosen].sum())

    for x in range(4):
        assert mass(y1 == x) == pytest.approx(float(FIRST_P[x]), abs=1e-12)
        reached = mass((n >= 1) & (y1 == x))
        assert reached == pytest.approx(float(torch.minimum(FIRST_P, FIRST_Q)[x]), abs=1e-12)
        for y in range(4):
            both = mass((n >= 1) & (y1 == x) & (y2 == y))
            assert both == pytest.approx(reached * float(SECOND_P[x, y]), abs=1e-12)
            last = mass((n == 2) & (y1 == x) & (y2 == y))
            for z in range(4):
                three = mass((n == 2) & (y1 == x) & (y2 == y) & (y3 == z))
                assert three == pytest.approx(last * float(THIRD_P[y, z]), abs=1e-12)


def test_rounds_of_any_size_give_the_verifiers_sequences():
    """Rounds of k = 1, 2, 3 until three tokens are out: every one of 27 sequences, exactly."""
    table, draft_table = random_logits(1, 13, 3), random_logits(2, 13, 3)  # a row a prefix
    p, q = table.softmax(-1), draft_table.softmax(-1)

    def row(prefix):
        return (0, 1, 4)[len(prefix)] + sum(t * 3**i for i, t in enumerate(prefix))

    def finish(prefix, k) -> dict:
        """Probability of each whole sequence that begins with `prefix`."""
        if len(prefix) >= 3:
            return {prefix[:3]: torch.ones((), dtype=F64)}
        return round_of(prefix, k, k)

    def round_of(prefix, left, k) -> dict:
        out: dict = {}

        def add(probability, later):
            for sequence, share in later.items():
                out[sequence] = out.get(sequence, 0) + probability * share

        if len(prefix) >= 3:
            return finish(prefix, k)
        here, draft = p[row(prefix)], q[row(prefix)]
        if left == 0:  # all were accepted: one more from the verifier
            for token in range(3):
                add(here[token], finish((*prefix, token), k))
            return out
        passes, rest = speculative._acceptance(here, draft), speculative._residual(here, draft)
        rejected = 1 - (draft * passes).sum()
        for token in range(3):
            add(draft[token] * passes[token], round_of((*prefix, token), left - 1, k))
            add(rejected * rest[token], finish((*prefix, token), k))
        return out

    for k in (1, 2, 3):
        found = finish((), k)
        for sequence in product(range(3), repeat=3):
            wanted = torch.stack([p[row(sequence[:t])][sequence[t]] for t in range(3)]).prod()
            torch.testing.assert_close(found[sequence], wanted, rtol=0, atol=1e-15)


# One round


def test_the_log_probability_is_the_verifiers_and_filler_is_zero():
    logits, draft_logits = random_logits(3, 64, 4, 5), random_logits(4, 64, 3, 5)
    tokens = torch.randint(0, 5, (64, 3), generator=seeded())
    verified = verify_draft(logits, draft_logits, tokens, temperature=0.7, generator=seeded())
    table = (logits / 0.7).log_softmax(-1)
    assert set(verified.accepted.tolist()) == {0, 1, 2, 3}
    for row, n in enumerate(verified.accepted.tolist()):
        assert torch.equal(verified.tokens[row, :n], tokens[row, :n])
        for place in range(n + 1):
            expected = table[row, place, verified.tokens[row, place]]
            assert verified.logp[row, place] == pytest.approx(float(expected), abs=1e-12)
        assert (verified.logp[row, n + 1 :] == 0).all()


def test_equal_distributions_accept_everything_and_disjoint_ones_nothing():
    logits = random_logits(5, 20, 4, 6)
    tokens = torch.randint(0, 6, (20, 3), generator=seeded())
    same = verify_draft(logits, logits[:, :-1], tokens, generator=seeded())
    assert (same.accepted == 3).all() and torch.equal(same.tokens[:, :3], tokens)
    p = logits.softmax(-1)
    assert torch.equal(speculative._residual(p, p), p)  # a rejection by rounding alone still draws
    apart, draft = logits.clone(), logits[:, :-1].clone()
    apart[..., :3], draft[..., 3:] = -torch.inf, -torch.inf
    other = verify_draft(apart, draft, tokens % 3, generator=seeded())
    assert (other.accepted == 0).all() and (other.tokens[:, 0] >= 3).all()
    assert torch.isfinite(other.logp).all()
    assert (draft_acceptance(apart[:, :-1], draft) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_logits_are_verified_in_float32(dtype):
    logits, draft_logits = (random_logits(s, 8, n, 5).to(dtype) for s, n in ((6, 3), (7, 2)))
    tokens = torch.randint(0, 5, (8, 2), generator=seeded())
    verified = verify_draft(logits, draft_logits, tokens, generator=seeded())
    wide = verify_draft(logits.float(), draft_logits.float(), tokens, generator=seeded())
    assert verified.logp.dtype == torch.float32 and torch.equal(verified.logp, wide.logp)
    assert draft_acceptance(logits[:, 0], draft_logits[:, 0]).dtype == torch.float32


@pytest.mark.parametrize(
    "change, words",
    [
        ({"tokens": torch.zeros(2, 2, dtype=torch.long)}, r"tokens \(2, 2\), logits \(2, 4, 5\)"),
        ({"logits": torch.zeros(2, 3, 5)}, r"logits \(2, 3, 5\)"),
        ({"draft_logits": torch.zeros(2, 3, 6)}, r"draft_logits \(2, 3, 6\)"),
        ({"tokens": torch.zeros(3, dtype=torch.long)}, r"tokens \(3,\)"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"logits": torch.full((2, 4, 5), torch.nan)}, "NaN"),
    ],
)
def test_bad_rounds_are_named(change, words):
    given = {
        "logits": torch.zeros(2, 4, 5),
        "draft_logits": torch.zeros(2, 3, 5),
        "tokens": torch.zeros(2, 3, dtype=torch.long),
    } | change
    with pytest.raises(ValueError, match=words):
        verify_draft(given.pop("logits"), given.pop("draft_logits"), given.pop("tokens"), **given)


def test_acceptance_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"draft_logits has shape \(2, 4\)"):
        draft_acceptance(torch.zeros(2, 5), torch.zeros(2, 4))


# Whole completions of small models


@torch.no_grad()
def disturbed(model, size: float, seed: int = 0):
    """A draft: the model with every weight changed by a relative N(0, size²)."""
    draft, generator = copy.deepcopy(model), seeded(seed)
    for parameter in draft.parameters():
        parameter.mul_(1 + size * torch.randn(parameter.shape, generator=generator))
    return draft


PROMPTS = [[40, 41, 42, 50, 33], [60, 61], [7]]


def prompts(rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of three lengths, `rows` rows each, padded on the left."""
    ids = torch.tensor([[0] * (5 - len(p)) + p for p in PROMPTS]).repeat_interleave(rows, 0)
    return ids, ids != 0


def roll(model, draft, prompt, prompt_mask, seed=0, **options):
    options = {"max_new_tokens": 10, "eos_token_id": END} | options
    return speculative_rollout(model, draft, prompt, prompt_mask, generator=seeded(seed), **options)


def as_rollout(found, prompt, prompt_mask, temperature=1.0) -> Rollout:
    given = (found.tokens, found.mask, found.sampler_logp, found.draft_logp, found.finished)
    return Rollout(prompt, prompt_mask, *given, 0, Sampling(temperature))


@pytest.mark.parametrize("proposals, temperature", [(1, 1.0), (3, 1.0), (4, 1.5)])
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_each_log_probability_is_that_of_scoring(family, proposals, temperature):
    """Padding, rejected columns in the caches, rows that left: nothing moves a position."""
    model, _ = sharp_moe(family)
    draft, (prompt, mask) = disturbed(model, 0.1), prompts(6)
    options = {"proposals": proposals, "temperature": temperature}
    found = roll(model, draft, prompt, mask, **options)
    batch = as_rollout(found, prompt, mask, temperature)
    for scorer, logp in ((model, found.sampler_logp), (draft, found.draft_logp)):
        assert (completion_logp(scorer, batch) - logp)[found.mask].abs().max() < 2e-4
    assert 0.05 < found.acceptance < 0.95
    gap = (found.sampler_logp - found.draft_logp)[found.mask].abs().mean()
    assert gap > 0.1 and not found.finished.all() and found.finished.any()


@torch.no_grad()
def test_completions_end_at_the_end_token_or_the_limit():
    model, _ = sharp_moe()
    found = roll(model, disturbed(model, 0.05), *prompts(20), max_new_tokens=7, proposals=3)
    lengths = found.mask.sum(1)
    assert torch.equal(found.mask, torch.arange(found.mask.shape[1]) < lengths[:, None])
    ends = (found.tokens == END) & found.mask
    last = found.tokens.gather(1, lengths[:, None] - 1)[:, 0]
    assert torch.equal(ends.sum(1), found.finished.long())
    assert torch.equal(last == END, found.finished)
    assert (lengths[~found.finished] == 7).all() and lengths.max() == 7 and lengths.min() == 1
    assert (found.tokens[~found.mask] == 0).all() and (found.sampler_logp[~found.mask] == 0).all()
    assert (found.accepted <= found.examined).all() and (found.examined >= 1).all()
    assert (lengths <= found.rounds * 4).all() and (found.accepted >= lengths - found.rounds).all()


@torch.no_grad()
def test_a_model_that_drafts_for_itself_is_always_accepted():
    model, _ = sharp_moe()
    found = roll(model, model, *prompts(), max_new_tokens=12, proposals=3)
    assert found.acceptance > 0.99 and torch.equal(found.accepted, found.examined)
    whole = ~found.finished
    assert whole.any() and (found.rounds[whole] == 3).all()  # 12 tokens, 4 a round
    assert 2.5 < found.tokens_per_pass <= 4


@torch.no_grad()
def test_the_generator_decides_everything():
    model, _ = sharp_moe()
    draft = disturbed(model, 0.1)
    first, again, other = (roll(model, draft, *prompts(), seed=s) for s in (0, 0, 1))
    torch.manual_seed(5)  # the global stream is not read
    assert torch.equal(first.tokens, again.tokens) and torch.equal(first.rounds, again.rounds)
    assert not torch.equal(first.tokens[:, :5], other.tokens[:, :5])


def test_one_token_of_one_token_prompts():
    model, _ = sharp_moe()
    ids = torch.tensor([[40], [50]])
    found = roll(model, disturbed(model, 0.1), ids, torch.ones_like(ids), max_new_tokens=1)
    assert found.tokens.shape == (2, 1) and found.mask.all()
    assert torch.equal(found.rounds, torch.ones(2, dtype=torch.long))
    assert found.acceptance in (0.0, 0.5, 1.0)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Pearson's chi-square test; cells of fewer than five expected counts become one."""
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    counts, expected = counts.double(), expected.double()
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(
        torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=F64), statistic / 2)
    )


@torch.no_grad()
def pair_distribution(model, prompt: list[int], temperature: float) -> torch.Tensor:
    """Probability of every first two tokens (V, V), the second row of an end token unused."""
    ids = torch.tensor([prompt + [token] for token in range(99)])
    logits = model(ids).logits[:, -2:].double() / temperature
    return logits[0, 0].softmax(-1)[:, None] * logits[:, 1].softmax(-1)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_chi_square_of_sampled_pairs(temperature):
    """2000 completions: frequencies of the first two tokens are the model's, not the draft's."""
    model, _ = sharp_moe()
    draft = disturbed(model, 0.1)
    ids = torch.tensor([PROMPTS[0]]).repeat(2000, 1)
    options = {"max_new_tokens": 2, "eos_token_id": -1, "proposals": 2, "temperature": temperature}
    found = roll(model, draft, ids, torch.ones_like(ids), **options)
    counts = (found.tokens[:, 0] * 99 + found.tokens[:, 1]).bincount(minlength=99 * 99)
    ours, drafts = (
        p_value(counts, 2000 * pair_distribution(m, PROMPTS[0], temperature).flatten())
        for m in (model, draft)
    )
    assert ours > 0.001 and drafts < 1e-12
    alpha = torch.stack([m(ids[:1]).logits[0, -1] / temperature for m in (model, draft)])
    assert 0.2 < draft_acceptance(*alpha) < 0.8


@pytest.mark.parametrize(
    "change, words",
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"proposals": 0}, "proposals=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
    ],
)
def test_bad_options_are_named(change, words):
    model, _ = sharp_moe()
    with pytest.raises(ValueError, match=words):
        roll(model, model, *prompts(1), **change)


def test_bad_prompts_and_drafts_are_named():
    model, _ = sharp_moe()
    ids, mask = prompts(1)
    for bad_ids, bad_mask in ((ids, mask.flip(1)), (ids, mask[:1]), (ids[:, :0], mask[:, :0])):
        with pytest.raises(ValueError, match="padding on the left"):
            roll(model, model, bad_ids, bad_mask)
    small = copy.deepcopy(model)
    small.config.vocab_size = 50
    with pytest.raises(ValueError, match="draft has 50 tokens, the model 99"):
        roll(model, small, ids, mask)
    sliding = copy.deepcopy(model)
    sliding.config.sliding_window = 4
    with pytest.raises(ValueError, match="sliding window"):
        roll(sliding, model, ids, mask)


# The same as Hugging Face's assisted generation


def hugging_faces_round(monkeypatch, logits, draft_logits, tokens, uniform):
    """n_matches and the distribution of the token after them, from its `_speculative_sampling`."""
    seen = []

    def capture(probabilities, num_samples):
        seen.append(probabilities[0])
        return torch.zeros(1, 1, dtype=torch.long)

    monkeypatch.setattr(torch, "rand_like", lambda _: uniform)
    monkeypatch.setattr(torch, "multinomial", capture)
    _, n = hugging_face._speculative_sampling(tokens, draft_logits, tokens.shape[1], logits)
    return int(n), seen[0]


@pytest.mark.parametrize("seed", range(12))
def test_a_round_equals_hugging_faces_on_the_same_uniforms(seed, monkeypatch):
    logits, draft_logits = random_logits(seed, 1, 4, 5), random_logits(seed + 50, 1, 3, 5)
    tokens = torch.randint(0, 5, (1, 3), generator=seeded(seed))
    uniform = torch.rand(1, 3, dtype=F64, generator=seeded(seed))
    n, after = hugging_faces_round(monkeypatch, logits, draft_logits, tokens, uniform)
    drawn_from, plain = [], speculative.sample_tokens

    def capture(logits, **_):
        drawn_from.append(logits[0].exp())
        return plain(logits)

    monkeypatch.setattr(speculative, "sample_tokens", capture)
    ours = verify_draft(logits, draft_logits, tokens, generator=seeded(seed))
    assert int(ours.accepted) == n
    torch.testing.assert_close(drawn_from[0], after, rtol=0, atol=1e-14)


@torch.no_grad()
def ranks(model, prompt: torch.Tensor, completions: list[torch.Tensor]) -> torch.Tensor:
    """Where each token lies in its distribution, jittered: uniform if it was drawn from it."""
    generator, found = seeded(3), []
    for completion in completions:
        ids = torch.cat([prompt[0], completion])[None]
        p = model(ids).logits[0, len(prompt[0]) - 1 : -1].double().softmax(-1)
        upper = p.cumsum(-1).gather(-1, completion[:, None])[:, 0]
        width = p.gather(-1, completion[:, None])[:, 0]
        jitter = torch.rand(width.shape, dtype=F64, generator=generator)
        found.append(upper - jitter * width)
    return torch.cat(found)


@pytest.mark.slow
@torch.no_grad()
def test_assisted_generation_of_hugging_face_and_ours_agree(monkeypatch):
    """Both draw from the verifier, and both accept as often as Σ min(p, q) says."""
    model, _ = sharp_moe()
    draft = disturbed(model, 0.05)
    ids, rounds = torch.tensor([PROMPTS[0]]), []
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    plain = hugging_face._speculative_sampling

    def spy(tokens, draft_logits, length, logits, **options):
        valid, n = plain(tokens, draft_logits, length, logits, **options)
        examined = min(int(n) + 1, length)
        alpha = draft_acceptance(logits[0, :examined], draft_logits[0, :examined])
        rounds.append((int(n), examined, float(alpha.sum()), float((alpha * (1 - alpha)).sum())))
        return valid, n

    monkeypatch.setattr(hugging_face, "_speculative_sampling", spy)
    torch.manual_seed(0)
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": 24, "eos_token_id": 98}
    theirs = [
        model.generate(ids, attention_mask=torch.ones_like(ids), assistant_model=draft, **options)[
            0, ids.shape[1] :
        ]
        for _ in range(8)
    ]
    batch = ids.repeat(8, 1)
    found = roll(model, draft, batch, torch.ones_like(batch), max_new_tokens=24, eos_token_id=98)
    ours = [row[counted] for row, counted in zip(found.tokens, found.mask, strict=True)]
    for completions in (theirs, ours):
        u = ranks(model, ids, completions)
        counts = (u * 10).long().bincount(minlength=10)
        assert len(u) > 150 and p_value(counts, torch.full((10,), len(u) / 10)) > 0.001
    accepted, examined, expected, variance = torch.tensor(rounds, dtype=F64).sum(0)
    assert abs(accepted - expected) < 3 * variance.sqrt()
    difference = found.acceptance - float(accepted / examined)
    assert abs(difference) < 3 * float((2 * variance).sqrt() / examined)


# What drift does to the draft


def test_acceptance_falls_with_the_distance_of_the_policy_exactly():
    """p_t = softmax(z + t·d) drifts away from q = p_0: α falls from 1, 1 − α like t at first."""
    z, d = random_logits(8, 7), random_logits(9, 7)
    alphas = [float(draft_acceptance(z + t * d, z)) for t in (0, 1e-3, 2e-3, 0.5, 1, 2)]
    assert alphas[0] == pytest.approx(1, abs=1e-15)
    assert all(a > b for a, b in zip(alphas, alphas[1:], strict=False))
    assert (1 - alphas[2]) / (1 - alphas[1]) == pytest.approx(2, rel=1e-2)
    p = z.softmax(-1)
    slope = (p * (d - (p * d).sum())).abs().sum() / 2  # of the total variation, by hand
    assert (1 - alphas[1]) / 1e-3 == pytest.approx(float(slope), rel=1e-2)


@torch.no_grad()
def test_training_the_policy_lowers_the_acceptance_of_a_frozen_draft():
    config = {"numerics__learning_rate": 5e-4, "probe_every": 9, "data__eval_every": 9}
    trainer = Trainer(tiny_config(**config))
    ids = torch.tensor([trainer.tokenizer("sort 52871 ").input_ids]).repeat(60, 1)
    exact, sampled = [], []
    for _ in range(2):
        found = roll(trainer.model, trainer.reference, ids, torch.ones_like(ids), max_new_tokens=8)
        batch = as_rollout(found, ids, torch.ones_like(ids).bool())
        logits = [completion_logits(m, batch) for m in (trainer.model, trainer.reference)]
        exact.append(float(draft_acceptance(*logits)[found.mask].mean()))
        sampled.append(found.acceptance)
        with torch.enable_grad():
            trainer.step()
            trainer.step()
    assert exact[0] == pytest.approx(1, abs=1e-6) == sampled[0]
    assert exact[1] < 0.93
    assert sampled == pytest.approx(exact, abs=0.05)


# Whose log-probabilities a rollout must keep


@pytest.mark.parametrize("seed", range(3))
def test_the_drafts_log_probabilities_bias_the_importance_weights_exactly(seed):
    """The tokens are drawn from p. With μ = p the weight of p is 1; with the draft's q in its
    place E[p/q] = 1 + χ²(p‖q), and the weighted return is another number, off by a covariance."""
    logits, draft_logits = random_logits(seed, 6), random_logits(seed + 30, 6)
    p, q, rewards = logits.softmax(-1), draft_logits.softmax(-1), random_logits(seed + 60, 6)
    alpha = draft_acceptance(logits, draft_logits)
    drawn = q * speculative._acceptance(p, q) + (1 - alpha) * speculative._residual(p, q)
    right, wrong = p / p, p / q
    assert float((drawn * right).sum()) == pytest.approx(1, abs=1e-14)
    chi_square = ((p - q) ** 2 / q).sum()
    assert float((drawn * wrong).sum()) == pytest.approx(float(1 + chi_square), abs=1e-12)
    true = float((p * rewards).sum())
    assert float((drawn * right * rewards).sum()) == pytest.approx(true, abs=1e-14)
    assert abs(float((drawn * wrong * rewards).sum()) - true) > 0.1
    score = torch.eye(6, dtype=F64) - p  # ∇ log p of each action, by hand
    gradient = (p[:, None] * rewards[:, None] * score).sum(0)
    biased = ((drawn * wrong * rewards)[:, None] * score).sum(0)
    assert (biased - gradient).norm() > 0.1 * gradient.norm()


@torch.no_grad()
def test_the_drafts_log_probabilities_bias_a_real_rollout():
    """On policy: the ratio to the verifier is 1 at every token, to the draft 1 + χ² on average."""
    model, tokenizer = load_base("mixtral-cpu-sort")
    draft = copy.deepcopy(model)
    round_weights(model, draft, "int4")
    ids = torch.tensor([tokenizer("sort 52871 ").input_ids]).repeat(400, 1)
    found = roll(model, draft, ids, torch.ones_like(ids), max_new_tokens=8)
    batch = as_rollout(found, ids, torch.ones_like(ids).bool())
    logp, counted = completion_logp(model, batch), found.mask
    assert (logp - found.sampler_logp)[counted].abs().max() < 1e-4
    wrong = (logp - found.draft_logp)[counted].double().exp()
    p, q = (completion_logits(m, batch)[counted].double().softmax(-1) for m in (model, draft))
    expected = ((p - q) ** 2 / q).sum(-1)  # χ² at each visited prefix
    excess = wrong - 1 - expected
    error = excess.std() / len(excess) ** 0.5
    assert excess.mean().abs() < 3 * error < expected.mean()
    assert ((wrong < 0.8) | (wrong > 1.2)).double().mean() > 0.03  # beyond a clip of 0.2


@torch.no_grad()
def test_a_verifier_of_lower_precision_keeps_its_own_log_probabilities():
    """`rounded_activations` around the rollout: the verifier that sampled is the rounded one."""
    model, _ = sharp_moe()
    draft, (prompt, mask) = disturbed(model, 0.05), prompts()
    with rounded_activations(model, "bfloat16"):
        found = roll(model, draft, prompt, mask)
        inside = completion_logp(model, as_rollout(found, prompt, mask))
    outside = completion_logp(model, as_rollout(found, prompt, mask))
    gaps = [(x - found.sampler_logp)[found.mask].abs().mean() for x in (inside, outside)]
    assert gaps[0] < gaps[1] / 2 and gaps[1] > 1e-3
