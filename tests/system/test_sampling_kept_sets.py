"""Kept sets without filler: the round trip, their bytes, files."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from stablerl_core.system import KeptSets, masked_log_probs, sample_tokens


def sampled(b=3, t=5, vocabulary=40, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(b * t, vocabulary, generator=generator)
    sample = sample_tokens(logits, generator=generator, **(options or {"top_p": 0.8}))
    return logits.view(b, t, -1), sample.tokens.view(b, t), sample.kept.view(b, t, -1)


def lengths_mask(lengths, t):
    return torch.arange(t) < torch.tensor(lengths)[:, None]


@given(st.integers(0, 1000), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_the_sets_come_back_and_padding_is_its_own_token(seed, lengths):
    _, tokens, kept = sampled(b=len(lengths), seed=seed)
    mask = lengths_mask(lengths, 5)
    sets = KeptSets.of(kept, mask)
    again = sets.padded(tokens)
    assert torch.equal(sets.counts, ((kept >= 0).sum(-1) * mask).int())
    for row, column in torch.cartesian_prod(torch.arange(len(lengths)), torch.arange(5)).tolist():
        ids = [v for v in again[row, column].tolist() if v >= 0]
        expected = [v for v in kept[row, column].tolist() if v >= 0]
        assert ids == (expected if mask[row, column] else [int(tokens[row, column])])


def test_what_comes_back_scores_the_same_and_padding_at_zero():
    logits, tokens, kept = sampled()
    mask = lengths_mask([5, 2, 0], 5)
    scored = masked_log_probs(logits, tokens, KeptSets.of(kept, mask).padded(tokens))
    expected = masked_log_probs(logits, tokens, kept)
    torch.testing.assert_close(scored[mask], expected[mask], rtol=0, atol=1e-6)
    assert (scored[~mask] == 0).all()


@pytest.mark.parametrize(
    "largest, dtype, size",
    [(255, torch.uint8, 1), (256, torch.int16, 2), (32_767, torch.int16, 2),
     (32_768, torch.int32, 4), (151_000, torch.int32, 4)],
)
def test_ids_are_as_small_as_the_largest_of_them(largest, dtype, size):
    kept = torch.tensor([[[0, 5, largest], [7, -1, -1]]])
    sets = KeptSets.of(kept, torch.ones(1, 2, dtype=torch.bool))
    assert sets.ids.dtype == dtype and sets.ids.tolist() == [0, 5, largest, 7]
    assert sets.bytes_per_token == (4 * size + 2 * 4) / 2
    assert torch.equal(sets.padded(torch.zeros(1, 2).long()), kept.int())


def test_one_wide_set_costs_the_others_nothing():
    """A table padded to the largest set would hold 1000 ids at each of the ten tokens."""
    kept = torch.full((1, 10, 1000), -1)
    kept[..., 0] = 3
    kept[0, 4] = torch.arange(1000)
    sets = KeptSets.of(kept, torch.ones(1, 10, dtype=torch.bool))
    assert sets.bytes_per_token == (1009 * 2 + 10 * 4) / 10


def test_bytes_are_counted_over_the_tokens_that_have_a_set():
    kept = torch.zeros(2, 3, 1, dtype=torch.int32)
    assert KeptSets.of(kept, lengths_mask([3, 1], 3)).bytes_per_token == (4 + 6 * 4) / 4
    assert math.isnan(KeptSets.of(kept, torch.zeros(2, 3, dtype=torch.bool)).bytes_per_token)


def test_a_file_gives_back_what_it_was_given(tmp_path):
    _, _, kept = sampled()
    sets = KeptSets.of(kept, lengths_mask([5, 2, 0], 5))
    sets.save(tmp_path / "kept.safetensors")
    again = KeptSets.load(tmp_path / "kept.safetensors")
    assert torch.equal(again.ids, sets.ids) and torch.equal(again.counts, sets.counts)
    assert again.ids.dtype == sets.ids.dtype
    save_file({"indices": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=r"holds \['indices'\]; expected ids and counts"):
        KeptSets.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize(
    "ids, counts, message",
    [
        (torch.zeros(2).long(), torch.ones(1, 2).int(), "dtype torch.int64"),
        (torch.zeros(1, 2).int(), torch.ones(1, 2).int(), r"ids has shape \(1, 2\)"),
        (torch.zeros(2).int(), torch.ones(2).int(), r"counts has shape \(2,\)"),
        (torch.zeros(2).int(), torch.ones(1, 2), "dtype torch.float32"),
        (torch.zeros(2).int(), torch.ones(1, 3).int(), "add up to 3, ids holds 2"),
        (torch.zeros(2).int(), torch.tensor([[3, -1]]).int(), "add up to 2"),
    ],
)
def test_parts_that_do_not_fit(ids, counts, message):
    with pytest.raises(ValueError, match=message):
        KeptSets(ids, counts)


@pytest.mark.parametrize(
    "kept, mask",
    [
        (torch.zeros(2, 3).int(), torch.ones(2, 3).bool()),
        (torch.zeros(2, 3, 1).int(), torch.ones(2, 2).bool()),
        (torch.zeros(2, 3, 1).int(), torch.ones(2, 3)),
    ],
)
def test_a_table_that_does_not_fit(kept, mask):
    with pytest.raises(ValueError, match=r"expected \(B, T, K\) and bool \(B, T\)"):
        KeptSets.of(kept, mask)


def test_tokens_that_do_not_fit():
    sets = KeptSets.of(torch.zeros(2, 3, 1).int(), torch.ones(2, 3).bool())
    with pytest.raises(ValueError, match=r"tokens has shape \(2, 2\); expected \(2, 3\)"):
        sets.padded(torch.zeros(2, 2).long())
