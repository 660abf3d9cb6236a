"""Keep Sampling Mask inside transformers' `generate`: what was kept scores what was sampled."""

import pytest
import torch
from moes import VOCABULARY, moe, tokens
from transformers import GenerationConfig

from stablerl_core.system import KeptSets, SamplingRecorder, kept_mass, masked_log_probs

ENDS = [1, 2, 3, 4]  # four tokens of fifty, so that rows end at different times
EVEN = list(range(0, VOCABULARY, 2))
START = 5
FILTERS = {
    "none": {},
    "cold": dict(temperature=0.6),
    "top_p": dict(top_p=0.9),
    "top_k": dict(top_k=7, temperature=1.3),
    "min_p": dict(min_p=0.1),
    "all": dict(temperature=0.8, top_k=20, top_p=0.95, min_p=0.02),
}


@pytest.fixture(scope="module")
def model():
    model = moe("mixtral")
    model.generation_config.pad_token_id = 0
    return model


def prompts(rows=6):
    """Ids and mask (rows, START), every other row padded on the left."""
    ids, mask = tokens(rows, START), torch.ones(rows, START, dtype=torch.long)
    mask[::2, :2] = 0
    return ids.masked_fill(mask == 0, 0), mask


def generate(model, recorder, new=14, seed=0, **options):
    ids, mask = prompts()
    options = {"eos_token_id": ENDS, "max_new_tokens": new, **recorder.options, **options}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return model.generate(ids, attention_mask=mask, logits_processor=[recorder], **options)


@torch.no_grad()
def trainer_logits(model, sequences):
    """Logits (B, T, V) of the completions from one pass over everything."""
    mask = torch.cat([prompts()[1], torch.ones_like(sequences[:, START:])], 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    return model(sequences, attention_mask=mask, position_ids=position).logits[:, START - 1 : -1]


def ids_of(kept_row):
    return [v for v in kept_row.tolist() if v >= 0]


@pytest.mark.parametrize("options", FILTERS.values(), ids=FILTERS)
def test_the_trainer_reproduces_the_samplers_log_probs(model, options):
    """To rounding: only the cache and the padding differ. Without the set it is far off."""
    recorder, temperature = SamplingRecorder(**options), options.get("temperature", 1.0)
    out = generate(model, recorder)
    found = recorder.recorded(out, ENDS)
    logits = trainer_logits(model, out)
    scored = masked_log_probs(logits, found.tokens, found.kept, temperature)
    assert (scored - found.sampler_logp)[found.mask].abs().max() < 2e-5
    assert (found.kept is None) == (set(options) <= {"temperature"})
    if found.kept is not None:
        plain = masked_log_probs(logits, found.tokens, None, temperature)
        mass = kept_mass(logits, found.kept, temperature)
        assert mass[found.mask].min() < 0.95
        torch.testing.assert_close(
            (plain - found.sampler_logp)[found.mask], mass.log()[found.mask], rtol=0, atol=4e-5
        )
        assert (scored[~found.mask] == 0).all()


def test_what_is_recorded_is_what_generate_sampled_from(model):
    """Its own report of the final scores has the same sets and the same log-probabilities."""
    recorder = SamplingRecorder(top_p=0.9, temperature=1.2)
    out = generate(model, recorder, return_dict_in_generate=True, output_scores=True)
    found = recorder.recorded(out.sequences, ENDS)
    scores = torch.stack(out.scores, 1)
    assert scores.shape[:2] == found.tokens.shape == found.mask.shape == found.sampler_logp.shape
    assert torch.equal(found.tokens, out.sequences[:, START:])
    logp = scores.log_softmax(-1).gather(-1, found.tokens[..., None])[..., 0]
    torch.testing.assert_close(logp[found.mask], found.sampler_logp[found.mask])
    for row, column in found.mask.nonzero().tolist():
        expected = torch.isfinite(scores[row, column]).nonzero()[:, 0].tolist()
        assert ids_of(found.kept[row, column]) == expected
    lengths = set(found.mask.sum(1).tolist())
    assert len(lengths) > 2 and min(lengths) < found.mask.shape[1]


def test_a_row_counts_up_to_its_end_token(model):
    recorder = SamplingRecorder(top_p=0.95)
    out = generate(model, recorder)
    found = recorder.recorded(out, ENDS)
    for row, counted in zip(found.tokens.tolist(), found.mask.tolist(), strict=True):
        end = next((t for t, token in enumerate(row) if token in ENDS), len(row) - 1)
        assert counted == [t <= end for t in range(len(row))]
    assert (found.sampler_logp[~found.mask] == 0).all() and (~found.mask).any()
    assert (found.sampler_logp[found.mask] < 0).any()
    sets = KeptSets.of(found.kept, found.mask)
    assert torch.equal(sets.padded(found.tokens), found.kept)


def test_without_an_end_token_everything_counts(model):
    recorder = SamplingRecorder(top_k=3)
    found = recorder.recorded(generate(model, recorder, new=4, eos_token_id=None), ())
    assert found.mask.all() and found.tokens.shape == (6, 4)


def test_one_new_token(model):
    recorder = SamplingRecorder(top_k=3)
    out = generate(model, recorder, new=1)
    found = recorder.recorded(out, ENDS)
    logits = trainer_logits(model, out)
    scored = masked_log_probs(logits, found.tokens, found.kept)
    torch.testing.assert_close(scored, found.sampler_logp, rtol=0, atol=2e-5)


def test_a_mask_of_allowed_tokens_is_the_set(model):
    allowed = torch.zeros(VOCABULARY, dtype=torch.bool)
    allowed[EVEN] = True
    recorder = SamplingRecorder(allowed=allowed)
    found = recorder.recorded(generate(model, recorder), ENDS)
    assert all(ids_of(row) == EVEN for row in found.kept[found.mask])
    assert (found.tokens % 2 == 0).all()


def test_a_grammar_sees_the_row_and_everything_before(model):
    """Even tokens at even lengths of the text and odd ones at odd lengths, but row 1 only 6."""
    seen = []

    def grammar(row, ids):
        seen.append((row, tuple(ids.tolist())))
        return [6] if row == 1 else [v for v in range(VOCABULARY) if (v - len(ids)) % 2 == 0]

    recorder = SamplingRecorder(allowed=grammar, top_k=9)
    out = generate(model, recorder, new=4, eos_token_id=None)
    found = recorder.recorded(out, ())
    parity = (found.tokens - torch.arange(START, START + 4)) % 2
    others = [0, 2, 3, 4, 5]
    assert (parity[others] == 0).all() and (found.tokens[1] == 6).all()
    assert (found.sampler_logp[1] == 0).all() and (found.sampler_logp[others] < 0).all()
    assert all(len(ids_of(row)) == 9 for row in found.kept[others].flatten(0, 1))
    assert seen[:6] == [(i, tuple(ids.tolist())) for i, ids in enumerate(prompts()[0])]
    assert seen[6:12] == [(i, tuple(ids.tolist())) for i, ids in enumerate(out[:, : START + 1])]
    scored = masked_log_probs(trainer_logits(model, out), found.tokens, found.kept)
    torch.testing.assert_close(scored, found.sampler_logp, rtol=0, atol=2e-5)


def test_the_grammar_is_that_of_prefix_allowed_tokens(model):
    def grammar(row, ids):
        return range(10 + int(ids[-1]) % 5, 40)

    class Nothing(SamplingRecorder):
        def __call__(self, input_ids, scores):
            return scores

    ours = generate(model, SamplingRecorder(allowed=grammar))
    theirs = generate(model, Nothing(), prefix_allowed_tokens_fn=grammar)
    assert torch.equal(ours, theirs)


OWN = dict(top_k=3, top_p=0.5, temperature=0.3, min_p=0.4)


@pytest.mark.parametrize("name", [None, *OWN])
def test_the_options_turn_generates_own_truncation_off(model, name):
    """A model that comes with settings of its own; one that is left on is a second filter."""
    recorder = SamplingRecorder(top_p=0.9)
    report = {"return_dict_in_generate": True, "output_scores": True}
    settings = GenerationConfig(**OWN, pad_token_id=0)
    left_on = {} if name is None else {name: OWN[name]}
    out = generate(model, recorder, generation_config=settings, **report, **left_on)
    found = recorder.recorded(out.sequences, ENDS)
    logp = torch.stack(out.scores, 1).log_softmax(-1)
    logp = logp.gather(-1, found.tokens[..., None])[..., 0]
    gap = (logp - found.sampler_logp)[found.mask].abs().max()
    assert gap < 1e-5 if name is None else gap > 0.1


def test_beams_another_call_and_changed_tokens_are_refused(model):
    recorder = SamplingRecorder(top_p=0.9)
    with pytest.raises(ValueError, match="without beam search"):
        generate(model, recorder, num_beams=2)
    recorder = SamplingRecorder(top_p=0.9)
    with pytest.raises(ValueError, match="not recorded"):
        recorder.recorded(torch.zeros(6, 8).long(), ENDS)
    out = generate(model, recorder)
    with pytest.raises(ValueError, match="grow by one token"):
        recorder.recorded(out[:, :-1], ENDS)
    with pytest.raises(ValueError, match="new recorder"):
        generate(model, recorder)
    row = int(recorder.recorded(out, ENDS).mask[:, -1].nonzero()[0])  # still going on
    changed = out.clone()
    last = ids_of(recorder._kept[-1][row])
    changed[row, -1] = next(v for v in range(VOCABULARY) if v not in last)
    with pytest.raises(ValueError, match="outside its kept set"):
        recorder.recorded(changed, ENDS)


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(top_p=0.0), "top_p=0.0"),
        (dict(temperature=-1.0), "temperature=-1.0"),
        (dict(allowed=torch.ones(3).bool()), r"allowed has shape \(3,\)"),
        (dict(allowed=lambda row, ids: []), "no allowed token"),
    ],
)
def test_bad_settings_are_refused_at_the_first_token(model, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, SamplingRecorder(**options))
