"""A character tokenizer that needs no download."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<eos>", "<unk>")
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace))) + " "


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each printable ASCII character, plus `<pad>` 0, `<eos>` 1 and `<unk>` 2.

    Characters outside the vocabulary become `<unk>`. Padding is on the left, as generation
    needs it. The vocabulary has 99 entries.
    """
    vocab = {token: i for i, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
