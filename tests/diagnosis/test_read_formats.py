"""Every format: the names it writes become the signals they are, NaN and inf kept."""

import math

import numpy as np
import pytest
from read_fixtures import FIXTURES

from stablerl_core.diagnosis import SIGNALS, columns_of, read_log, signal_log, signal_of
from stablerl_core.diagnosis.readers.vocabulary import DIALECTS
from stablerl_core.runlog import RunLog


@pytest.mark.parametrize("name", FIXTURES)
def test_a_log_becomes_its_signals(name, tmp_path):
    want = FIXTURES[name]
    log = read_log(want.write(tmp_path))
    assert (log.format, log.step_kind) == (want.format, want.step_kind)
    for signal, values in want.values.items():
        series = log.series(signal)
        assert series.steps.tolist() == want.steps, signal
        np.testing.assert_allclose(series.values, values, rtol=1e-12, atol=0, err_msg=signal)
    for mapped in log.mapping:
        assert signal_of(mapped.signal) is not None and mapped.meaning
    assert set(log.signals) == {m.signal for m in log.mapping}
    assert not set(log.unmapped) & {m.column for m in log.mapping}


@pytest.mark.parametrize("name", FIXTURES)
def test_only_unknown_names_are_guessed(name, tmp_path):
    """A framework's names are in its list; a plain table's are guessed, and it is said."""
    log = read_log(FIXTURES[name].write(tmp_path))
    guessed = [m.column for m in log.mapping if m.fuzzy]
    if log.format in DIALECTS or log.format == "stablerl":
        assert guessed in ([], ["Training Loss"])  # a notebook's name for it
    else:
        assert all(signal_of(m.column) is not None for m in log.mapping if not m.fuzzy)


@pytest.mark.parametrize("name", FIXTURES)
def test_naming_the_format_changes_nothing(name, tmp_path):
    want = FIXTURES[name]
    path = want.write(tmp_path)
    if want.format not in DIALECTS:
        return
    auto, told = read_log(path), read_log(path, format=want.format)
    assert auto.mapping == told.mapping and auto.notes == told.notes


# --- the twelve traps ---------------------------------------------------------------------------


def read(name, folder):
    return read_log(FIXTURES[name].write(folder))


def test_kl_of_the_step_is_not_kl_to_the_reference(tmp_path):
    log = read("verl console", tmp_path)
    assert log.column("kl_step").column == "actor/ppo_kl"
    assert log.column("kl_ref").column == "actor/kl_loss"


def test_entropy_loss_is_entropy_but_in_stable_baselines_minus_entropy(tmp_path):
    for name, factor in (("slime console", 1.0), ("openrlhf", 1.0), ("stable-baselines3", -1.0)):
        log = read(name, tmp_path)
        assert log.column("entropy").factor == factor
        assert log.last("entropy") > 0
    assert "minus entropy" in log.column("entropy").meaning


def test_probability_log_probability_and_factor_are_three_signals(tmp_path):
    assert "prob_gap" in read("verl console", tmp_path)
    assert "logp_gap" not in read("verl console", tmp_path)
    assert "logp_gap" in read("slime console", tmp_path)
    assert "prob_factor" in read("nemo-rl dump", tmp_path)
    signed = read("roll console", tmp_path)
    assert signed.last("prob_gap_signed") == -0.0004 and "prob_gap" not in signed


def test_chi2_of_sequences_is_a_product_in_verl_and_geometric_in_swift(tmp_path):
    assert read("verl console", tmp_path).column("mismatch_chi2_seq")
    swift = read("ms-swift logging.jsonl", tmp_path)
    assert "mismatch_chi2_seq" not in swift and swift.column("mismatch_chi2_geo")


def test_trl_weights_are_those_after_the_cap(tmp_path):
    log = read("trl trainer_state", tmp_path)
    assert "weight_mean" not in log and "masked" in log.column("weight_mean_capped").meaning


def test_centred_rewards_are_not_the_reward(tmp_path):
    log = read("slime console", tmp_path)
    assert log.column("reward").column == "rollout/raw_reward"
    assert log.column("reward_centred").column == "rollout/rewards"
    assert any("centred" in note for note in log.notes)


def test_clip_fractions_say_what_they_count(tmp_path):
    assert (
        "whatever the advantage" in read("roll console", tmp_path).column("clip_fraction").meaning
    )
    assert "micro-batches" in read("verl console", tmp_path).column("clip_fraction").meaning


def test_what_trl_hides_is_said(tmp_path):
    notes = " ".join(read("trl trainer_state", tmp_path).notes)
    assert "logging_nan_inf_filter" in notes and "beta" in notes


def test_skyrl_minimum_of_the_ratio_is_not_used(tmp_path):
    log = read("skyrl console", tmp_path)
    assert "policy/loss_metrics/is_ratio_min" in log.unmapped and "weight_min" not in log
    assert any("is_ratio_min" in note for note in log.notes)


def test_estimates_of_entropy_say_so(tmp_path):
    for name in ("tinker", "nemo-rl dump"):
        assert "estimate" in read(name, tmp_path).column("entropy").meaning


def test_score_before_the_kl_penalty_is_the_reward(tmp_path):
    for name in ("verl console", "roll console"):
        log = read(name, tmp_path)
        assert log.column("reward").column == "critic/score/mean"
        assert log.column("reward_shaped").column == "critic/rewards/mean"


def test_openrlhf_logprobs_diff_is_against_the_reference(tmp_path):
    log = read("openrlhf", tmp_path)
    assert log.column("kl_ref").column == "kl" and "logprobs_diff" in log.unmapped
    assert "logp_gap" not in log


def test_nemo_policy_kl_error_is_mismatch_not_the_step(tmp_path):
    log = read("nemo-rl dump", tmp_path)
    assert "kl_step" not in log and "mismatch_kl_reverse" in log


def test_roll_mask_ratio_is_not_truncation(tmp_path):
    log = read("roll console", tmp_path)
    assert "truncated" not in log and "actor/max_len_mask_ratio" in log.unmapped


def test_entropy_sums_over_a_sequence_are_not_entropy_a_token(tmp_path):
    log = read("trl ppo", tmp_path)
    assert "entropy" not in log and "kl_ref" not in log
    assert SIGNALS["kl_ref_seq"].unit == "nats/sequence"


def test_async_trl_compares_with_the_sampler(tmp_path):
    log = read("trl async", tmp_path)
    assert "kl_ref" not in log and "staleness" in log.column("mismatch_kl").meaning


def test_reward_std_where_every_group_is_tied_is_the_spread_of_the_batch(tmp_path):
    rows = "step,reward,reward_std,frac_reward_zero_std\n1,0.5,0.4,0.5\n2,0.5,0.5,1.0\n"
    (tmp_path / "a.csv").write_text(rows)
    log = read_log(tmp_path / "a.csv")
    assert log.format == "trl" and log.last("reward_spread") == 0.5 and "reward_std" not in log
    (tmp_path / "b.csv").write_text(rows.replace("0.5,1.0", "0.0,1.0"))
    assert read_log(tmp_path / "b.csv").last("reward_std") == 0.0


# --- evaluations, our own log, vocabulary -----------------------------------------------------


def test_of_several_evaluations_the_accuracy_is_taken_and_all_are_kept(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"training/global_step": 1, "val-core/a/reward/mean@8": 0.9, "val-core/b/acc/mean@8": 0.3,'
        ' "critic/score/mean": 1, "val-core/b/acc/best@8": 0.7}\n'
    )
    log = read_log(tmp_path / "a.jsonl")
    assert log.last("heldout_accuracy") == 0.3
    assert set(log.family("heldout")) == {"a/reward/mean@8", "b/acc/mean@8"}
    assert any("of 2 evaluations" in w for w in log.warnings)


def test_our_own_log_is_what_the_run_log_reads(tmp_path):
    path = FIXTURES["our own"].write(tmp_path)
    log, own = read_log(path), signal_log(RunLog.read(path))
    assert log.mapping == own.mapping and log.facts == own.facts and log.warnings == ()
    for name in own.signals:
        assert np.array_equal(log.series(name).values, own.series(name).values, equal_nan=True)


def test_evaluation_rows_without_a_step_belong_to_the_training_row_before(tmp_path):
    rows = [
        {"loss": 1.0, "reward_std": 0.1},
        {"loss": 2.0, "reward_std": 0.1},
        {"eval_reward": 0.5},
    ]
    (tmp_path / "a.log").write_text("".join(f"{r | {'epoch': 1.0}}\n" for r in rows))
    log = read_log(tmp_path / "a.log")
    assert log.step_kind == "row" and log.series("loss").steps.tolist() == [1, 2]
    assert log.series("heldout_accuracy").steps.tolist() == [2]


def test_what_a_framework_calls_a_signal():
    assert columns_of("verl", "prob_gap") == ["training/rollout_probs_diff_mean"]
    assert columns_of("ms-swift", "reward")[0] == "reward" and columns_of("none", "reward") == []


@pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda d: d.name)
def test_a_vocabulary_finds_each_of_its_own_names(dialect):
    for entry in dialect.entries:
        column = entry.column.replace("{}", "x")
        found = dialect.lookup(column)
        assert found is not None and found.signal == entry.signal.replace("{}", "x"), column
        assert math.isfinite(found.factor) and found.meaning
    names = [e.column for e in dialect.entries]
    assert len(set(names)) == len(names)


def test_no_meaning_is_listed_twice_without_a_difference():
    """Frameworks share few names; where they do, the marks tell them apart."""
    for dialect in DIALECTS.values():
        own = [e.column.replace("{}", "x") for e in dialect.entries]
        assert any(dialect.marks.fullmatch(name) for name in own), dialect.name
