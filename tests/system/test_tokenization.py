"""Round-trip drift: by hand, with a merging tokenizer of the tokenizers library, refusals."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from stablerl_core.system import round_trip_drift


class Merging:
    """Ids 0-25 are the letters; 26 is "ab", which encoding always prefers to "a", "b"."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens is False
        return "".join("ab" if i == 26 else chr(97 + i) for i in ids)

    def encode(self, text, add_special_tokens):
        assert add_special_tokens is False
        ids = []
        while text:
            token = 26 if text.startswith("ab") else ord(text[0]) - 97
            ids.append(token)
            text = text[2 if token == 26 else 1 :]
        return ids


def test_by_hand():
    """ "a", "b" comes back as the one token "ab": the row shrinks, from the third position on."""
    report = round_trip_drift(Merging(), [[2, 3], [2, 2, 0, 1], [26], [0, 2], []])
    assert (report.rows, report.changed) == (5, 1 / 5)
    assert report.first == (None, 2, None, None, None)
    assert report.longer == pytest.approx(-1 / 5)


class Shrinking(Merging):
    """An encoder that loses the last letter: the first difference is the end of what is left."""

    def encode(self, text, add_special_tokens):
        return super().encode(text, add_special_tokens)[:-1]


def test_a_row_that_only_ends_early():
    assert round_trip_drift(Shrinking(), [[2, 3, 4]]).first == (2,)
    assert round_trip_drift(Shrinking(), [[2, 3, 4]]).longer == -1


def bpe() -> Tokenizer:
    vocab = {"<eos>": 0, "1": 1, "2": 2, "3": 3, "12": 4, "+": 5}
    tokenizer = Tokenizer(models.BPE(vocab, merges=[("1", "2")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("+", behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    return tokenizer


@pytest.mark.parametrize(
    "wrap", [lambda t: t, lambda t: PreTrainedTokenizerFast(tokenizer_object=t)]
)
def test_a_real_tokenizer_with_merges_and_a_special_token(wrap):
    """Sampled as "1", "2" it comes back as "12"; the end token survives in the text."""
    tokenizer = wrap(bpe())
    report = round_trip_drift(tokenizer, [[4, 5, 3, 0], [1, 2, 5, 3, 0], [3, 1, 2]])
    assert report.first == (None, 0, 1)
    assert report.changed == pytest.approx(2 / 3)


def test_the_books_character_tokenizer_does_not_drift():
    """It has one token a character: "token in, token out" and text are the same there."""
    from stablerl_core.training.tokenizer import character_tokenizer

    tokenizer = character_tokenizer()
    assert round_trip_drift(tokenizer, [[*range(len(tokenizer)), 1], [5]]).changed == 0


def test_bad_input():
    with pytest.raises(ValueError, match="ids has no row"):
        round_trip_drift(Merging(), [])
