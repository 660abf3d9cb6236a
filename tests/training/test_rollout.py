"""Rollout: what was sampled is what is scored, for every family, padded or not, ended or not."""

import math
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from tiny import FAMILIES, sharp_moe
from transformers import MixtralConfig, MixtralForCausalLM

from stablerl_core.policy import entropy
from stablerl_core.training import (
    Sampling,
    completion_logits,
    completion_logp,
    load_base,
    rollout,
    routers,
)
from stablerl_core.training.rollout import (
    cache_argument,
    decode_completions,
    encode_prompts,
    micro_batches,
    select_rows,
)

EVEN = ["S314159=", "A27+580=", "S271828="]
UNEVEN = ["S31=", "A27+58=", "S2718281828="]
SAMPLINGS = {
    "plain": Sampling(),
    "warm": Sampling(temperature=1.6),
    "cold": Sampling(temperature=0.6),
    "top_p": Sampling(top_p=0.8),
    "top_k": Sampling(top_k=5),
    "all": Sampling(temperature=0.8, top_p=0.9, top_k=12, min_p=0.02),
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def sample(model, tokenizer, prompts, seed=0, group_size=6, max_new_tokens=12, eos=None, **options):
    ids, mask = encode_prompts(tokenizer, prompts, "cpu")
    return rollout(
        model,
        ids,
        mask,
        group_size=group_size,
        max_new_tokens=max_new_tokens,
        eos_token_id=tokenizer.eos_token_id if eos is None else eos,
        generator=seeded(seed),
        **options,
    )


def one_pass(model, batch):
    """Logits (B, T, V) from a single pass over prompt and completion, without any cache."""
    ids = torch.cat([batch.prompt, batch.tokens[:, :-1]], 1)
    mask = torch.cat([batch.prompt_mask, torch.ones_like(batch.mask[:, :-1])], 1).long()
    position = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(ids, attention_mask=mask, position_ids=position, use_cache=False).logits
    return logits[:, batch.prompt.shape[1] - 1 :]


def exact_logp(model, batch):
    """log π (B, T) under the batch's temperature and kept sets, from `one_pass`."""
    scores = one_pass(model, batch) / batch.sampling.temperature
    if batch.kept is not None:
        inside = torch.zeros_like(scores[..., :1]).expand_as(scores).bool()
        for ids in batch.kept.long().unbind(-1):
            inside = inside | (torch.arange(scores.shape[-1]) == ids[..., None])
        scores = scores.masked_fill(~inside, -math.inf)
    return scores.log_softmax(-1).gather(-1, batch.tokens[..., None])[..., 0]


@torch.no_grad()
def gap(model, batch):
    """Largest distance between any two of: sampled, scored, and exact log-probabilities."""
    scored = completion_logp(model, batch)
    assert torch.isfinite(scored).all()
    three = torch.stack([batch.sampler_logp, scored, exact_logp(model, batch)])[:, batch.mask]
    return (three.amax(0) - three.amin(0)).max().item()


# --- sampled distribution = scored distribution --------------------------------------------------


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_sampled_is_what_is_scored(family, prompts):
    model, tokenizer = sharp_moe(family)
    batch = sample(model, tokenizer, prompts, group_size=16)
    lengths = batch.mask.sum(1)
    assert lengths.min() <= 6 and lengths.max() == 12 and len(lengths.unique()) >= 4
    assert batch.sampler_logp[batch.mask].std() > 0.5  # a distribution with something to get wrong
    assert gap(model, batch) < 1e-5


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "padded"])
@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_also_with_temperature_and_truncation(sampling, prompts):
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, prompts, sampling=sampling)
    assert batch.sampling == sampling and len(batch.mask.sum(1).unique()) > 1
    assert gap(model, batch) < 1e-5
    truncates = sampling.top_p < 1 or sampling.top_k or sampling.min_p
    assert (batch.kept is not None) == bool(truncates)
    if truncates:
        assert (batch.kept == batch.tokens[..., None]).any(-1)[batch.mask].all()
        assert (batch.kept >= 0).sum(-1)[batch.mask].float().mean() < 60


@pytest.mark.parametrize("prompts", [EVEN, ["S31=", "S271828="]], ids=["even", "padded"])
def test_also_for_the_shipped_starting_point(prompts):
    model, tokenizer = load_base("mixtral-cpu-sort")
    batch = sample(model, tokenizer, prompts, group_size=16, max_new_tokens=24)
    assert len(batch.mask.sum(1).unique()) > 2 and batch.finished.float().mean() > 0.5
    assert gap(model, batch) < 1e-5


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
@pytest.mark.parametrize("name", ["cache", "past_key_values"])
def test_also_under_either_name_of_the_cache_argument(family, name):
    model, tokenizer = sharp_moe(family)
    plain, own = type(model), cache_argument(model)

    def forward(self, input_ids, cache, **others):
        return plain.forward(self, input_ids, **{own: cache}, **others)

    if name == "past_key_values":

        def renamed(self, input_ids, past_key_values=None, **others):
            return forward(self, input_ids, past_key_values, **others)
    else:

        def renamed(self, input_ids, cache=None, **others):
            return forward(self, input_ids, cache, **others)

    expected = sample(model, tokenizer, UNEVEN)
    model.__class__ = type("Renamed", (plain,), {"forward": renamed})
    assert cache_argument(model) == name
    batch = sample(model, tokenizer, UNEVEN)
    assert torch.equal(batch.tokens, expected.tokens) and gap(model, batch) < 1e-5


def assert_fits(counts, probabilities):
    """Pearson's chi-square below its 1 − 1e-5 quantile (Wilson–Hilferty); rare outcomes pooled."""
    expected = counts.sum() * probabilities
    rare = expected < 5
    if rare.any():
        counts, expected = (torch.cat([x[~rare], x[rare].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected) ** 2 / expected).sum().item()
    df = len(counts) - 1
    assert statistic < df * (1 - 2 / (9 * df) + 4.265 * math.sqrt(2 / (9 * df))) ** 3


@pytest.mark.parametrize("family", ["mixtral", "deepseek-v3"])
def test_first_tokens_come_with_their_exact_probabilities(family):
    """The whole vocabulary; the probabilities come from the unpadded prompt alone."""
    model, tokenizer = sharp_moe(family)
    n = 5000
    batch = sample(model, tokenizer, UNEVEN, group_size=n, max_new_tokens=1)
    for i, prompt in enumerate(UNEVEN):
        ids = torch.tensor([tokenizer(prompt).input_ids])
        with torch.no_grad():
            exact = model(ids).logits[0, -1].double().softmax(-1)
        tokens = batch.tokens[i * n : (i + 1) * n, 0]
        assert_fits(tokens.bincount(minlength=99).double(), exact)


def test_pairs_of_tokens_come_with_their_exact_probabilities():
    """All outcomes of two steps with top-k 3: a pair, or the end token after one."""
    model, tokenizer = sharp_moe()
    temperature, prompt, n = 1.5, "S31=", 6000
    ids = tokenizer(prompt).input_ids

    def top3(ids):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double() / temperature
        best = logits.topk(3)
        return dict(zip(best.indices.tolist(), best.values.softmax(-1).tolist(), strict=True))

    first = top3(ids)
    eos = list(first)[1]
    exact = {(eos,): first[eos]}
    for a in first:
        if a != eos:
            exact |= {(a, b): first[a] * p for b, p in top3([*ids, a]).items()}
    batch = sample(
        model,
        tokenizer,
        [prompt, "S271828="],  # the second prompt makes the first a padded one
        group_size=n,
        max_new_tokens=2,
        eos=eos,
        sampling=Sampling(temperature=temperature, top_k=3),
    )
    seen = [tuple(t[:m]) for t, m in zip(batch.tokens.tolist(), batch.mask.sum(1), strict=True)]
    counts = torch.tensor([seen[:n].count(pair) for pair in exact], dtype=torch.float64)
    assert counts.sum() == n and len(exact) == 7
    assert_fits(counts, torch.tensor(list(exact.values()), dtype=torch.float64))


# --- padding, batches, gradient --------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_row_is_scored_as_if_it_were_alone(family):
    """Decoded in a padded, shrinking batch; scored unpadded, one row at a time."""
    model, tokenizer = sharp_moe(family)
    batch = sample(model, tokenizer, UNEVEN, group_size=3)
    with torch.no_grad():
        together = completion_logits(model, batch)
    for i in range(len(batch.tokens)):
        length = int(batch.mask[i].sum())
        prompt = batch.prompt[i][batch.prompt_mask[i]]
        ids = torch.cat([prompt, batch.tokens[i, :length]])[None]
        with torch.no_grad():
            alone = model(ids).logits[0, len(prompt) - 1 : -1]
        torch.testing.assert_close(together[i, :length], alone, rtol=0, atol=3e-5)
        logp = alone.log_softmax(-1).gather(1, batch.tokens[i, :length, None])[:, 0]
        torch.testing.assert_close(batch.sampler_logp[i, :length], logp, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gradient_is_that_of_each_row_alone(family):
    """Through padding, the shared prompt and its cache: as if every row were read by itself."""
    model, tokenizer = sharp_moe(family)
    batch = sample(model, tokenizer, UNEVEN, group_size=3)
    weight = torch.randn(len(batch.tokens), generator=seeded(1))

    def gradient(losses):
        model.zero_grad()
        for loss in losses:
            loss.backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    logp = completion_logp(model, batch)
    together = gradient([(logp * batch.mask * weight[:, None]).sum()])

    def alone(i):
        prompt = batch.prompt[i][batch.prompt_mask[i]]
        tokens = batch.tokens[i][batch.mask[i]]
        logits = model(torch.cat([prompt, tokens])[None]).logits[0, len(prompt) - 1 : -1]
        return weight[i] * logits.log_softmax(-1).gather(1, tokens[:, None]).sum()

    expected = gradient(alone(i) for i in range(len(batch.tokens)))
    assert torch.isfinite(together).all() and expected.norm() > 1
    assert (together - expected).norm() < 1e-5 * expected.norm()


def test_what_stands_behind_the_end_does_not_matter():
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, UNEVEN)
    dirty = batch.tokens.masked_fill(~batch.mask, 77)
    with torch.no_grad():
        clean, other = (
            completion_logp(model, replace(batch, tokens=t)) for t in (batch.tokens, dirty)
        )
    assert (~batch.mask).any() and torch.equal(clean[batch.mask], other[batch.mask])


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLINGS["all"]], ids=["plain", "kept"])
def test_selected_rows_keep_their_scores(sampling):
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, UNEVEN, sampling=sampling, record_routing=True)
    lengths = batch.mask.sum(1)
    rows = lengths.argsort()[[3, 0, 2]]
    piece = select_rows(batch, rows)
    width = int(lengths[rows].max())
    assert width < batch.tokens.shape[1] == int(lengths.max())
    for field in fields(batch):
        whole, part = getattr(batch, field.name), getattr(piece, field.name)
        if not torch.is_tensor(whole):
            assert whole == part or field.name == "kept"
        elif field.name == "routing":
            assert torch.equal(part, whole[rows, : batch.prompt.shape[1] + width - 1])
        elif field.name in ("prompt", "prompt_mask", "finished"):
            assert torch.equal(part, whole[rows])
        else:
            assert torch.equal(part, whole[rows, :width])
    with torch.no_grad():
        whole, part = completion_logp(model, batch), completion_logp(model, piece)
    torch.testing.assert_close(part[piece.mask], whole[rows, :width][piece.mask], rtol=0, atol=1e-5)
    assert gap(model, piece) < 1e-5


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_rows_of_like_length_are_scored_together(limit):
    lengths = torch.tensor([8, 1, 2, 3, 11, 5, 9, 16, 17, 4, 6, 20])
    batch = SimpleNamespace(mask=torch.arange(20) < lengths[:, None])
    rows = torch.arange(len(lengths))[1:]
    parts = micro_batches(batch, rows, limit)
    assert sorted(torch.cat(parts).tolist()) == rows.tolist()
    assert len(parts) == {0: 6, 1: 11, 3: 6}[limit]
    for part in parts:
        assert len(part) <= (limit or len(rows))
        assert lengths[part].max() < 2 * lengths[part].min()
    assert micro_batches(batch, rows[:0], limit) == []


def test_scores_carry_gradient_and_samples_do_not():
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, UNEVEN)
    assert not batch.sampler_logp.requires_grad and not batch.entropy.requires_grad
    assert completion_logp(model, batch).requires_grad


# --- the record ------------------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "padded"])
def test_shapes_groups_and_ends(prompts):
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, prompts, group_size=5, max_new_tokens=7, version=3)
    ids, mask = encode_prompts(tokenizer, prompts, "cpu")
    assert batch.version == 3
    for i in range(15):  # the sequences of one prompt are adjacent
        assert torch.equal(batch.prompt[i], ids[i // 5])
        assert torch.equal(batch.prompt_mask[i], mask[i // 5])
    assert batch.tokens.shape == batch.mask.shape == batch.sampler_logp.shape == (15, 7)
    for tokens, counted, done in zip(batch.tokens, batch.mask, batch.finished, strict=True):
        length = int(counted.sum())
        assert counted[:length].all() and not counted[length:].any()  # a prefix
        assert (tokens[length - 1] == 1) == done and 1 not in tokens[: length - 1]
        assert done or length == 7  # unfinished only where the limit cut
    assert 0 < batch.finished.float().mean() < 1
    for name in ("tokens", "sampler_logp", "entropy"):
        assert (getattr(batch, name)[~batch.mask] == 0).all()
    assert (batch.sampler_logp[batch.mask] < 0).all()


def test_the_completions_of_a_group_differ():
    batch = sample(*sharp_moe(), EVEN, group_size=8)
    for group in batch.tokens.split(8):
        assert len(group.unique(dim=0)) == 8


def test_the_columns_end_with_the_longest_completion():
    model, tokenizer = sharp_moe()
    first = sample(model, tokenizer, ["S31="], group_size=1, max_new_tokens=3)
    eos = int(first.tokens[0, 1])
    batch = sample(model, tokenizer, ["S31="], group_size=1, max_new_tokens=9, eos=eos)
    assert batch.tokens.tolist() == [first.tokens[0, :2].tolist()] and batch.finished.all()


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_entropy_is_that_of_the_distribution_before_truncation(sampling):
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, UNEVEN, sampling=sampling)
    with torch.no_grad():
        exact = entropy(completion_logits(model, batch).double() / sampling.temperature)
    torch.testing.assert_close(
        batch.entropy[batch.mask], exact[batch.mask].float(), rtol=0, atol=3e-5
    )
    assert batch.entropy[batch.mask].std() > 0.1


def test_the_generator_decides_and_the_global_stream_is_not_touched():
    model, tokenizer = sharp_moe()
    before = torch.get_rng_state()
    first, again, other = (sample(model, tokenizer, UNEVEN, seed=s) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    for name in ("tokens", "sampler_logp", "entropy", "mask"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert not torch.equal(first.tokens, other.tokens)


@pytest.mark.parametrize("prompts", [EVEN, UNEVEN], ids=["even", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_experts_are_those_of_one_full_pass(family, prompts):
    model, tokenizer = sharp_moe(family)
    batch = sample(model, tokenizer, prompts, record_routing=True)
    plain = sample(model, tokenizer, prompts)
    assert plain.routing is None and torch.equal(plain.tokens, batch.tokens)
    b, s, t = len(batch.tokens), batch.prompt.shape[1], batch.tokens.shape[1]
    assert batch.routing.shape == (b, s + t - 1, 2, 2) and batch.routing.dtype == torch.uint8
    chosen = []
    hooks = [
        r.register_forward_hook(lambda *a: chosen.append(a[-1][-1]))
        for r in routers(model).values()
    ]
    with torch.no_grad():
        one_pass(model, batch)
    for hook in hooks:
        hook.remove()
    full = torch.stack([c.view(b, s + t - 1, 2) for c in chosen], 2)
    # Fed to the model: the prompt, and every completion token that another one follows.
    fed = torch.cat([batch.prompt_mask, batch.mask[:, 1:]], 1)
    assert fed.shape == full.shape[:2] and not fed.all()
    assert torch.equal(batch.routing[fed].long().sort(-1).values, full[fed].sort(-1).values)
    assert len(full[fed].unique()) == 8
    if family != "deepseek-v3":  # whose router asks for the best k in no order
        assert torch.equal(batch.routing[fed].long(), full[fed])


def test_more_than_256_experts_need_two_bytes():
    config = MixtralConfig(
        vocab_size=99,
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=300,
        num_experts_per_tok=4,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MixtralForCausalLM(config).eval()
    batch = sample(model, sharp_moe()[1], UNEVEN, record_routing=True)
    assert batch.routing.dtype == torch.int16
    assert batch.routing.min() >= 0 and 256 <= batch.routing.max() < 300


def test_no_hook_stays_behind():
    model, tokenizer = sharp_moe()
    sample(model, tokenizer, EVEN, record_routing=True)
    model.lm_head.weight.data[0] = math.nan
    with pytest.raises(ValueError, match="NaN"):
        sample(model, tokenizer, EVEN, record_routing=True)
    assert not any(router._forward_hooks for router in routers(model).values())


@pytest.mark.parametrize("record_routing", [False, True])
def test_one_new_token(record_routing):
    model, tokenizer = sharp_moe()
    options = dict(max_new_tokens=1, sampling=SAMPLINGS["all"], record_routing=record_routing)
    batch = sample(model, tokenizer, UNEVEN, **options)
    assert batch.tokens.shape == (18, 1) and batch.mask.all() and gap(model, batch) < 1e-5
    if record_routing:
        assert batch.routing.shape == (18, batch.prompt.shape[1], 2, 2)


def test_one_prompt_of_one_token():
    model, tokenizer = sharp_moe()
    batch = sample(model, tokenizer, ["S"], group_size=3)
    assert batch.prompt.shape == (3, 1) and gap(model, batch) < 1e-5


# --- texts -----------------------------------------------------------------------------------


def as_rollout(tokenizer, rows, finished):
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[True] * len(row) + [False] * (width - len(row)) for row in rows])
    return SimpleNamespace(tokens=tokens, mask=mask, finished=torch.tensor(finished))


def test_texts_are_without_the_end_token():
    _, tokenizer = sharp_moe()
    rows = [tokenizer(text).input_ids for text in ("#12", "#3", "")]
    rows = [rows[0] + [1], rows[1], [1]]
    batch = as_rollout(tokenizer, rows, [True, False, True])
    assert decode_completions(tokenizer, batch) == ["#12", "#3", ""]


@pytest.mark.parametrize("hidden", ["<pad>", "<unk>", "<eos>"])
def test_no_token_of_a_completion_is_invisible_to_the_verifier(hidden):
    """A policy can sample any token: `#1<pad>2` is not the answer 12."""
    _, tokenizer = sharp_moe()
    ids = tokenizer("#12").input_ids
    odd = [*ids[:2], tokenizer.convert_tokens_to_ids(hidden), ids[2]]
    texts = decode_completions(tokenizer, as_rollout(tokenizer, [[*odd, 1], odd], [True, False]))
    assert texts == [f"#1{hidden}2"] * 2


# --- bad input -------------------------------------------------------------------------------


def test_an_empty_prompt_is_refused():
    _, tokenizer = sharp_moe()
    with pytest.raises(ValueError, match="prompts has an empty string"):
        encode_prompts(tokenizer, ["S1=", ""], "cpu")


@pytest.mark.parametrize("name", ["group_size", "max_new_tokens"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        sample(*sharp_moe(), EVEN, **{name: 0})


def test_options_of_sampling_are_checked():
    with pytest.raises(ValueError, match="temperature=0"):
        sample(*sharp_moe(), EVEN, sampling=Sampling(temperature=0))
