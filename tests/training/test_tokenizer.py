"""The character tokenizer: one token a character, nothing lost, padding on the left."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.training.tokenizer import character_tokenizer

TOKENIZER = character_tokenizer()
PRINTABLE = "\n " + "".join(c for c in string.printable if not c.isspace())


def test_vocabulary():
    assert len(TOKENIZER) == TOKENIZER.vocab_size == 99 == len(PRINTABLE) + 3
    ids = (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.unk_token_id)
    assert ids == (0, 1, 2)


@given(st.text(alphabet=PRINTABLE, max_size=30).filter(lambda t: "<" not in t))
def test_text_survives_the_round_trip(text):
    ids = TOKENIZER(text).input_ids
    assert len(ids) == len(text) and all(2 < i < 99 for i in ids)
    assert TOKENIZER.decode(ids) == text


def test_every_character_has_its_own_token():
    ids = TOKENIZER(PRINTABLE).input_ids
    assert sorted(ids) == list(range(3, 99))


@pytest.mark.parametrize("text", ["é", "\t", "\r", "π", "🙂"])
def test_other_characters_are_unknown_one_by_one(text):
    assert TOKENIZER(f"a{text}b").input_ids == [
        TOKENIZER.convert_tokens_to_ids("a"),
        2,
        TOKENIZER.convert_tokens_to_ids("b"),
    ]


def test_padding_is_on_the_left():
    batch = TOKENIZER(["S1=", "S123="], padding=True, return_tensors="pt")
    assert batch.attention_mask.tolist() == [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]
    assert batch.input_ids[0, :2].tolist() == [0, 0]


def test_a_saved_tokenizer_is_the_same(tmp_path):
    from transformers import AutoTokenizer

    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again(PRINTABLE).input_ids == TOKENIZER(PRINTABLE).input_ids
    assert again.padding_side == "left" and again.eos_token_id == 1
    assert again.decode(again("a  b ,c !").input_ids) == "a  b ,c !"
