"""Each fault of a chat prompt, planted in a small tokenizer of two well-known forms, is named."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from stablerl_core.rewards import answer_faults, prompt_faults, template_faults
from stablerl_core.training.tokenizer import character_tokenizer

WORDS = ("sort", "please", "12", "21", "ab", "system", "user", "assistant", "\n")
LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASK = [{"role": "user", "content": "sort 21"}]


def small_tokenizer(template, markers, adds_bos=True):
    """Words and markers; like Llama's it puts a beginning token before any text it encodes."""
    special = ("<unk>", "<s>", "</s>", *markers)
    vocab = {token: i for i, token in enumerate((*special, *WORDS, " "))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(p, behavior="isolated") for p in (" ", "\n", "|", "<", ">")]
    )
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(markers),
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(params=["llama", "chatml"])
def tokenizer(request):
    if request.param == "llama":
        return small_tokenizer(LLAMA, ("<|user|>", "<|assistant|>", "<|end|>"))
    return small_tokenizer(CHATML, ("<|im_start|>", "<|im_end|>"), adds_bos=False)


def rendered(tokenizer, messages=ASK, asked=True, special=False):
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asked)
    return tokenizer(text, add_special_tokens=special).input_ids


def names(faults):
    return [fault.name for fault in faults]


def test_what_the_template_makes_has_no_fault(tokenizer):
    for messages in (ASK, [{"role": "system", "content": "please"}, *ASK]):
        assert prompt_faults(tokenizer, messages, rendered(tokenizer, messages)) == ()


def test_two_beginning_tokens():
    tokenizer = small_tokenizer(LLAMA, ("<|user|>", "<|assistant|>", "<|end|>"))
    ids = rendered(tokenizer, special=True)
    assert ids[:2] == [tokenizer.bos_token_id] * 2
    (fault,) = prompt_faults(tokenizer, ASK, ids)
    assert fault.name == "double_bos" and "2 beginning tokens" in fault.detail
    assert names(prompt_faults(tokenizer, ASK, ids[2:])) == ["missing_bos"]


def test_a_beginning_token_that_the_template_does_not_have(tokenizer):
    ids = rendered(tokenizer)
    due = ids[:1] == [tokenizer.bos_token_id]
    more = [tokenizer.bos_token_id, *ids]
    assert names(prompt_faults(tokenizer, ASK, more)) == ["double_bos" if due else "unexpected_bos"]


def test_no_generation_prompt(tokenizer):
    (fault,) = prompt_faults(tokenizer, ASK, rendered(tokenizer, asked=False))
    assert fault.name == "no_generation_prompt" and "assistant" in fault.detail


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("second", [True, False])
def test_the_template_applied_twice(tokenizer, first, second):
    text = tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=first)
    again = [{"role": "user", "content": text}]
    ids = rendered(tokenizer, again, asked=second)
    assert names(prompt_faults(tokenizer, ASK, ids)) == ["template_twice"]


def test_no_template_and_a_template_that_is_not_the_one_meant(tokenizer):
    plain = tokenizer("sort 21", add_special_tokens=False).input_ids
    assert "no_template" in names(prompt_faults(tokenizer, ASK, plain))
    other = [{"role": "user", "content": "sort 12"}]
    (fault,) = prompt_faults(tokenizer, ASK, rendered(tokenizer, other))
    assert fault.name == "another_prompt" and "at token" in fault.detail
    template = "{% for m in messages %}{{ m.content }} please{% endfor %}"
    text = tokenizer.apply_chat_template(ASK, chat_template=template, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert prompt_faults(tokenizer, ASK, ids, template) == ()
    assert "another_prompt" in names(prompt_faults(tokenizer, ASK, ids))


def test_faults_of_the_ends_do_not_hide_those_of_the_middle(tokenizer):
    ids = [tokenizer.bos_token_id] * 2 + rendered(tokenizer, asked=False)
    found = names(prompt_faults(tokenizer, ASK, [*ids, tokenizer.eos_token_id]))
    assert found == ["double_bos", "eos_in_prompt", "no_generation_prompt"]


def test_prompt_faults_of_the_character_tokenizer():
    """It has no beginning token and no template of its own."""
    tokenizer = character_tokenizer()
    template = (
        "{% for m in messages %}S{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}={% endif %}"
    )
    ask = [{"role": "user", "content": "314159"}]
    for text, expected in (
        ("S314159=", []),
        ("S314159", ["no_generation_prompt"]),
        ("SS314159==", ["template_twice"]),
        ("314159", ["no_template"]),
        ("A314159=", ["another_prompt"]),
        ("S314159=<eos>", ["eos_in_prompt"]),
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert names(prompt_faults(tokenizer, ask, ids, template)) == expected, text
    with pytest.raises(ValueError, match="chat_template"):
        prompt_faults(tokenizer, ask, [5])


def test_an_end_that_the_loss_does_not_see():
    rows = [[7, 8, 2, 0], [7, 9, 9, 2], [7, 2, 0, 0], [7, 9, 9, 9]]
    learned = [[False, True, True, False], [False, True, True, True], [False, True, False, False]]
    assert answer_faults(rows[:3], learned, [2]) == ()
    # Padding is the end token, and padding was masked.
    masked = [[False, True, False, False], [False, True, True, False]]
    (fault,) = answer_faults(rows[:2], masked, [2])
    assert (fault.name, fault.detail) == ("eos_not_counted", "2 of 2 rows, first [0, 1]")
    cut = [[False, True, True, True]]
    assert names(answer_faults(rows[3:], cut, [2])) == ["eos_absent"]
    assert answer_faults(rows[3:], cut, [2], truncated=[True]) == ()
    # A cut answer beside a longer one, padded with the end token: no end of its own.
    padded = [[7, 9, 2, 2]], [[False, True, False, False]], [2]
    assert answer_faults(*padded, truncated=[True]) == ()
    assert names(answer_faults(*padded)) == ["eos_not_counted"]
    assert names(answer_faults(rows[:1], [[False] * 4], [2], truncated=[True])) == [
        "nothing_counted"
    ]


def test_any_of_several_end_tokens_ends_an_answer_and_each_kind_of_fault_is_one():
    rows, counted = [[7, 5], [7, 2], [7, 8], [7, 8]], [[True, True]] * 4
    (fault,) = answer_faults(rows, counted, [2, 5])
    assert fault.detail == "2 of 4 rows, first [2, 3]"
    # Generation stops at 2 only: what ends with 5 is not an end.
    assert answer_faults(rows, counted, [2])[0].detail == "3 of 4 rows, first [0, 2, 3]"


def test_an_end_in_the_middle_does_not_count_as_the_end():
    assert names(answer_faults([[7, 2, 8]], [[True, True, True]], [2])) == ["eos_absent"]


def test_a_template_of_another_tokenizer():
    llama = small_tokenizer(LLAMA, ("<|user|>", "<|assistant|>", "<|end|>"))
    (fault, _) = template_faults(llama, CHATML)
    assert fault.name == "unknown_markers"
    assert "<|im_start|>" in fault.detail and "<|im_end|>" in fault.detail
    unknown = small_tokenizer(CHATML, ())  # markers in the template, nowhere in the vocabulary
    assert "unknown_markers" in names(template_faults(unknown))


def test_generation_must_stop_where_a_turn_ends(tokenizer):
    """The template closes a turn with its own marker, the tokenizer's end token is another."""
    (fault,) = template_faults(tokenizer)
    assert fault.name == "stops_elsewhere"
    end = "<|end|>" if "<|end|>" in tokenizer.get_vocab() else "<|im_end|>"
    right = tokenizer.convert_tokens_to_ids(end)
    assert template_faults(tokenizer, eos=[tokenizer.eos_token_id, right]) == ()


def test_a_template_without_a_generation_prompt():
    tokenizer = small_tokenizer(LLAMA.replace("<|assistant|>", ""), ("<|user|>", "<|end|>"))
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert names(template_faults(tokenizer, eos=[end])) == ["no_generation_prompt"]
    assert names(template_faults(tokenizer, "{{ messages[-1].content }}", eos=[end])) == [
        "stops_elsewhere",
        "no_generation_prompt",
    ]


def test_plain_words_in_angle_brackets_are_no_markers(tokenizer):
    template = LLAMA.replace("<|user|>", "<tools>").replace("<|end|>", "</s>")
    found = template_faults(tokenizer, template.replace("<|assistant|>", "please"))
    assert "unknown_markers" not in names(found)


def test_bad_input_says_what_was_expected(tokenizer):
    with pytest.raises(ValueError, match="0 ids and 1 messages"):
        prompt_faults(tokenizer, ASK, [])
    with pytest.raises(ValueError, match="3 ids and 0 messages"):
        prompt_faults(tokenizer, [], [1, 2, 3])
    for ids, counted, eos, cut in (
        ([], [], [2], None),
        ([[1]], [[True]], [], None),
        ([[1]], [], [2], None),
        ([[1]], [[True]], [2], [False, True]),
    ):
        with pytest.raises(ValueError, match="expected as many"):
            answer_faults(ids, counted, eos, cut)
    with pytest.raises(ValueError, match="row 0 has 2 ids and 1 counted"):
        answer_faults([[1, 2]], [[True]], [2])
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat_template"):
        template_faults(tokenizer)
