"""What is no log, not one run, or half of one: one clear line, never a traceback or a guess."""

import gzip
import json
import math
import os
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from read_fixtures import FIXTURES, TRL_ROWS, _jsonl, _verl_line

from stablerl_core.cli import main
from stablerl_core.diagnosis import LogError, read_log, signal_of
from stablerl_core.diagnosis.readers import table


def refused(path, **options):
    """The one line with which a file is refused."""
    with pytest.raises(LogError) as told:
        read_log(path, **options)
    line = str(told.value)
    assert line.isprintable() and len(line) < 700
    return line


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


RUN = [{"step": s, "loss": 0.1 * s, "reward": 0.5} for s in range(1, 21)]

# --- no log ----------------------------------------------------------------------------------

NO_LOGS = {
    "empty": (b"", "is empty"),
    "blank": (b" \n\t\n", "is empty"),
    "binary": (bytes(range(256)) * 40, "binary data"),
    "control characters": (b"\x01\x02\x03\x04step,loss\n" * 50, "binary data"),
    "gzip": (gzip.compress(b"step,loss\n1,2\n"), "compressed"),
    "zip": (b"PK\x03\x04\0\0", "zip archive"),
    "parquet": (b"PAR1\0\0", "Parquet"),
    "wandb file": (b":W&B\0\0", "transaction log"),
    "prose": (b"Dear reader,\nnothing here\n" * 9, "no line of it"),
    "python traceback": (b'Traceback:\n  File "a.py", line 3\nKeyError: step\n', "no line of it"),
    "header only": (b"step,loss,reward\n", "no numbers"),
    "no header": (b"1,0.5,3\n2,0.4,3\n", "no line of it"),
    "twice the same column": (b"step,loss,loss\n1,2,3\n", "two columns named 'loss'"),
    "no known column": (b"step,colour,taste\n1,2,3\n2,3,4\n", "'colour', 'taste'"),
    "only bookkeeping": (b"step,seconds\n1,2\n2,2\n", "no known column"),
    "json without rows": (b'{"name": "x", "value": 3,\n "list": {}}', "no list of rows"),
    "damaged json": (b'{"a": 1,\n "b": [}', "damaged JSON"),
    "empty list": (b"[]", "no line of it"),
    "list of words": (b'[{"a": "b"}, {"a": "c"}]', "no numbers"),
    "deep": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n", "damaged JSON"),
    "half of the lines": (b'{"loss": 1}\nx\ny\nz\n', "3 of 4 lines are no JSON"),
    "half a record": (b'{"log_history": [{"loss": 1, "st', "no numbers"),
}


@pytest.mark.parametrize("name", NO_LOGS)
def test_what_is_no_log_is_told_in_one_line(name, tmp_path):
    content, message = NO_LOGS[name]
    (tmp_path / "file").write_bytes(content)
    assert message in refused(tmp_path / "file")


def test_what_is_no_file_is_told(tmp_path):
    assert "no such file" in refused(tmp_path / "none.jsonl")
    assert "no log that is known" in refused(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "neither a file nor" in refused(tmp_path / "pipe")
    hostile = tmp_path / "a\nb\x1b[31m.csv"
    hostile.write_text("")
    assert "is empty" in refused(hostile)


def test_wrong_arguments_are_told(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", RUN)
    assert "format='keras' is unknown" in refused(path, format="keras")
    assert "'rewardd' is no signal" in refused(path, map={"rewardd": "loss"})
    assert "no numbers named 'los'; it has 'loss'" in refused(path, map={"reward": "los"})
    assert "no steps in a column named 'stp'" in refused(path, map={"step": "stp"})
    assert "run='7' is not in the file" in refused(path, run="7")
    assert "binary" in refused(path, format="tensorboard")


def test_a_file_in_another_framework_s_names_is_refused(tmp_path):
    path = FIXTURES["verl console"].write(tmp_path)
    assert read_log(path, format="verl").format == "verl"
    other = read_log(path, format="slime")
    assert all(m.fuzzy for m in other.mapping) and "actor/ppo_kl" in other.unmapped


# --- not one run -----------------------------------------------------------------------------


def test_two_runs_one_after_the_other(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", RUN + [r | {"loss": 9.0} for r in RUN[:5]])
    assert "holds 2 runs" in refused(path) and "row 21" in refused(path)
    assert len(read_log(path, run="1")) == 20
    second = read_log(path, run="2")
    assert second.series("loss").values.tolist() == [9.0] * 5 and second.facts["run"] == "2"


@pytest.mark.parametrize("name", ["run_id", "seed"])
def test_runs_told_apart_by_a_column(name, tmp_path):
    rows = [r | {name: k} for r in RUN for k in (3, 4)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    assert f"'{name}=3', '{name}=4'" in refused(path)
    assert len(read_log(path, run="4")) == len(read_log(path, run=f"{name}=3")) == 20
    text = "step,reward,run\n" + "".join(f"{s},0.5,{k}\n" for s in (1, 2) for k in "ab")
    (tmp_path / "a.csv").write_text(text)
    assert "'run=a', 'run=b'" in refused(tmp_path / "a.csv")


def test_a_column_that_names_one_run_is_no_matter(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [r | {"run": "a", "run_id": "x7"} for r in RUN])
    assert len(read_log(path)) == 20


def test_a_chart_of_two_runs(tmp_path):
    (tmp_path / "c.csv").write_text(
        '"Step","a - reward","a - reward__MIN","b - reward","b - reward__MAX"\n1,0.1,0,0.9,1\n'
    )
    assert "holds 2 runs, 'a', 'b'" in refused(tmp_path / "c.csv")
    assert read_log(tmp_path / "c.csv", run="b").last("reward") == 0.9


def test_several_ranks_with_different_rewards_are_refused_and_losses_averaged(tmp_path):
    ranks = [r | {"reward": 0.1 * k, "loss": 1.0 * k} for r in RUN for k in (1, 2)]
    assert "several runs, ranks or samples" in refused(jsonl(tmp_path / "a.jsonl", ranks))
    parts = [r | {"loss": 1.0 * k} for r in RUN for k in (1, 2)]
    log = read_log(jsonl(tmp_path / "b.jsonl", parts))
    assert log.series("loss").values.tolist() == [1.5] * 20 and len(log) == 20
    assert any("their mean" in w for w in log.warnings)


def test_a_step_that_wanders_is_not_one_run(tmp_path):
    steps = np.random.default_rng(0).permutation(200) + 1
    path = jsonl(tmp_path / "a.jsonl", [{"step": int(s), "loss": 1.0} for s in [0, *steps]])
    assert "goes back" in refused(path)


def test_the_command_takes_a_run_and_a_column_for_the_step(tmp_path, capsys):
    path = jsonl(tmp_path / "a.jsonl", RUN + RUN)
    assert main(["diagnose", str(path)]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "holds 2 runs" in told and "Traceback" not in told
    assert main(["diagnose", str(path), "--run", "2"]) in (0, 1, 3)
    assert main(["diagnose", str(path), "--run", "2", "--map", "step=loss"]) in (0, 1, 3)
    assert main(["diagnose", str(path), "--run", "9"]) == 2
    assert main(["diagnose", str(tmp_path / "a\nb")]) == 2
    assert capsys.readouterr().err.count("\n") == 2


# --- a run that was resumed --------------------------------------------------------------------


def test_a_resumed_run_goes_on_from_its_checkpoint(tmp_path):
    """Steps 8 to 12 were abandoned: 8 to 10 were done again, 11 and 12 are not of this run."""
    rows = [{"step": s, "loss": 1.0, "reward": 0.1} for s in range(1, 13)]
    rows += [{"step": s, "loss": 2.0, "reward": 0.1} for s in range(8, 11)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.restarts == (8.0,)
    assert log.series("loss").steps.tolist() == list(range(1, 11))
    assert log.series("loss").values.tolist() == [1.0] * 7 + [2.0] * 3
    assert any("resumed at step 8" in w for w in log.warnings)


def test_a_log_that_begins_at_a_checkpoint_may_go_back_to_its_first_step(tmp_path):
    rows = [{"step": s, "loss": 1.0} for s in range(51, 61)]
    rows += [{"step": s, "loss": 2.0} for s in range(51, 56)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.restarts == (51.0,) and log.series("loss").values.tolist() == [2.0] * 5
    sparse = [{"step": s, "loss": 1.0} for s in (10, 20, 30, 10, 20)]
    assert "holds 2 runs" in refused(jsonl(tmp_path / "b.jsonl", sparse))


def test_a_run_resumed_often_keeps_the_last_account(tmp_path):
    steps = [*range(1, 11), *range(6, 9), *range(7, 12), *range(3, 30)]
    rows = [{"step": s, "loss": float(n)} for n, s in enumerate(steps)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.restarts == (6.0, 7.0, 3.0)
    assert log.series("loss").steps.tolist() == list(range(1, 30))
    assert log.series("loss").values.tolist() == [0.0, 1.0, *map(float, range(18, 45))]


def test_the_last_of_two_values_of_a_step_counts(tmp_path):
    rows = [*RUN[:10], {"step": 10, "loss": 7.0, "reward": 0.5}, *RUN[10:]]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.series("loss").values[9] == 7.0 and log.restarts == ()


def test_a_late_evaluation_is_no_restart(tmp_path):
    rows = [
        *RUN[:12],
        {"step": 10, "eval_accuracy": 0.5},
        *RUN[12:],
        {"step": 20, "eval_accuracy": 0.6},
    ]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.restarts == () and len(log.series("loss")) == 20
    assert log.series("heldout_accuracy").steps.tolist() == [10, 20]


def test_a_verl_console_that_crashed_and_resumed(tmp_path):
    log = read_log(FIXTURES["verl console"].write(tmp_path))
    assert log.restarts == (2.0,)
    assert log.series("heldout_accuracy").steps.tolist() == [0, 1, 2, 3]


# --- half a log, odd values ---------------------------------------------------------------------


def test_a_torn_last_line_is_left_out(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", RUN)
    path.write_bytes(path.read_bytes()[:-9])
    log = read_log(path)
    assert len(log) == 19 and any("middle of a record" in w for w in log.warnings)


def test_a_torn_trainer_state_gives_what_it_has(tmp_path):
    path = FIXTURES["trl trainer_state"].write(tmp_path)
    text = path.read_text()
    path.write_text(text[: text.index('"loss": -0.002')])
    log = read_log(path)
    assert log.series("loss").steps.tolist() == [1, 2]
    assert any("middle of a record" in w for w in log.warnings)


def test_a_torn_event_file_gives_what_it_has(tmp_path):
    folder = FIXTURES["tensorboard"].write(tmp_path)
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    log = read_log(folder)
    assert len(log.series("reward")) == 3 and any(
        "damaged or unfinished" in w for w in log.warnings
    )
    path.write_bytes(whole[:60] + b"\xff" * 40 + whole[60:])
    assert "no numbers" in refused(path)


def test_event_files_without_protobuf_say_what_to_install(tmp_path, monkeypatch):
    import sys

    from stablerl_core.diagnosis.readers import tensorboard

    folder = FIXTURES["tensorboard"].write(tmp_path)
    tensorboard._event_type.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    assert "pip install 'stablerl_core[tensorboard]'" in refused(folder)
    tensorboard._event_type.cache_clear()


def test_missing_null_nan_and_inf_are_told_apart(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"step": 1, "loss": NaN, "grad_norm": Infinity, "reward": 1}\n'
        '{"step": 2, "loss": null, "grad_norm": -Infinity}\n'
        '{"step": 3, "loss": "nan", "grad_norm": "inf", "reward": ""}\n'
        '{"step": 4, "loss": 1e400, "grad_norm": 1' + "0" * 400 + ', "reward": true}\n'
    )
    with open(tmp_path / "a.jsonl", "a") as file:
        file.write('{"step": 5, "loss": "1_000", "grad_norm": "0x1", "reward": "12 %"}\n')
    log = read_log(tmp_path / "a.jsonl")
    loss, grad = log.series("loss"), log.series("grad_norm")
    assert loss.steps.tolist() == [1, 3, 4]
    assert math.isnan(loss.values[0]) and math.isnan(loss.values[1]) and loss.values[2] == math.inf
    assert grad.values.tolist() == [math.inf, -math.inf, math.inf, math.inf]
    assert log.series("reward").steps.tolist() == [1]


def test_mixed_encodings_are_read_and_told(tmp_path):
    good = "".join(json.dumps(row) + "\n" for row in RUN).encode()
    (tmp_path / "a.jsonl").write_bytes(good + '{"step": 21, "loss": 1, "é": 2}\n'.encode("latin-1"))
    log = read_log(tmp_path / "a.jsonl")
    assert len(log) == 21 and any("not utf-8" in w for w in log.warnings)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_are_read(encoding, tmp_path):
    for name in ("plain csv", "slime console", "list of rows"):
        want = FIXTURES[name]
        path = want.write(tmp_path)
        path.write_bytes(path.read_text(encoding="utf-8").encode(encoding))
        assert read_log(path).format == want.format


def test_one_step_is_read_and_told(tmp_path):
    log = read_log(jsonl(tmp_path / "a.jsonl", RUN[:1]))
    assert len(log) == 1 and "only one step is logged" in log.warnings


def test_a_log_without_steps_counts_rows(tmp_path):
    rows = [{"loss": 1.0, "reward": 0.1 * k} for k in range(5)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.step_kind == "row" and log.steps.tolist() == [1, 2, 3, 4, 5]


def test_rows_without_a_step_take_that_of_the_row_before(tmp_path):
    rows = [{"step": 5, "loss": 1.0}, {"reward": 0.5}, {"step": 6, "loss": 1.0}, {"reward": 0.7}]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.series("reward").steps.tolist() == [5, 6]
    assert any("2 rows name no step" in w for w in log.warnings)


def test_a_tracker_s_own_count_is_not_mixed_with_the_trainer_s(tmp_path):
    """Rows without the trainer's step have one of the tracker's, which counts something else."""
    rows = [
        {"_step": 100, "system/gpu": 0.5, "reward": 0.0},
        {"_step": 101, "train/global_step": 1, "loss": 1.0},
        {"_step": 102, "reward": 0.1},
        {"_step": 103, "train/global_step": 2, "loss": 1.0},
        {"_step": 104, "reward": 0.2},
    ]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.series("loss").steps.tolist() == log.series("reward").steps.tolist() == [1, 2]
    only = [{k: v for k, v in r.items() if k != "train/global_step"} for r in rows]
    log = read_log(jsonl(tmp_path / "b.jsonl", only))
    assert log.step_kind == "call of the tracker" and log.series("loss").steps.tolist() == [
        101,
        103,
    ]


def test_slime_s_two_counts_in_a_tracker(tmp_path):
    rows = []
    for n in range(4):
        rows.append({"rollout/step": n, "rollout/raw_reward": 0.1 * n})
        for m in range(3):
            rows.append({"train/step": 3 * n + m, "train/loss": 0.5, "train/pg_clipfrac": 0.0})
        rows.append({"eval/step": n, "eval/aime": 0.5})
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.format == "slime" and log.restarts == ()
    assert log.series("loss").steps.tolist() == list(range(12))
    assert log.series("reward").steps.tolist() == [0, 3, 6, 9]
    assert log.series("heldout_accuracy").steps.tolist() == [0, 3, 6, 9]
    assert any("3 updates each" in w for w in log.warnings)


def test_a_long_table_of_names_and_values(tmp_path):
    lines = [f"{s},{n},{v}" for s in (1, 2) for n, v in (("train/reward", s / 10), ("loss", 5))]
    (tmp_path / "a.csv").write_text("step,tag,value\n" + "\n".join(lines) + "\n")
    log = read_log(tmp_path / "a.csv")
    assert log.series("reward").values.tolist() == [0.1, 0.2] and log.last("loss") == 5
    (tmp_path / "b.csv").write_text("Step,value,tag\n1,0.5,reward\n2,0.25,reward\n")
    assert read_log(tmp_path / "b.csv").series("reward").values.tolist() == [0.5, 0.25]


def test_shares_in_per_cent_and_no_shares(tmp_path):
    text = "step,eval_acc,truncated,clip_frac_percent,eval_reward\n1,12.5,3,50,7\n2,25,4,5,9\n"
    (tmp_path / "a.csv").write_text(text)
    log = read_log(tmp_path / "a.csv")
    assert log.series("heldout_accuracy").values.tolist() == [0.125, 0.25]
    assert log.column("heldout_accuracy").factor == 0.01
    assert "truncated" in log.unmapped and any("no share" in w for w in log.warnings)
    score = read_log(tmp_path / "a.csv", map={"heldout_accuracy": "eval_reward"})
    assert (
        score.last("heldout_accuracy") == 9.0
        and "a score" in score.column("heldout_accuracy").meaning
    )


def test_a_little_above_one_is_no_per_cent(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,eval_acc\n1,1,0.9\n2,1,1.2\n")
    assert read_log(tmp_path / "a.csv").series("heldout_accuracy").values.tolist() == [0.9, 1.2]


def test_entropy_of_either_sign(tmp_path):
    (tmp_path / "a.csv").write_text("step,loss,entropy_loss\n1,1,-0.5\n2,1,-0.25\n")
    log = read_log(tmp_path / "a.csv")
    assert (
        log.series("entropy").values.tolist() == [0.5, 0.25] and log.column("entropy").factor == -1
    )
    (tmp_path / "b.csv").write_text("step,loss,entropy_loss\n1,1,-0.5\n2,1,0.25\n")
    log = read_log(tmp_path / "b.csv")
    assert "entropy" not in log and "entropy_loss" in log.unmapped and log.warnings


# --- what a column is taken for ------------------------------------------------------------------


def test_the_caller_s_mapping_goes_before_ours(tmp_path):
    rows = [{"t": 10 * s, "reward": 1.0, "my score": 0.1 * s, "kl": 0.5} for s in (1, 2, 3)]
    path = jsonl(tmp_path / "a.jsonl", rows)
    log = read_log(path, map={"reward": "my score", "kl_step": "kl", "step": "t"})
    assert log.series("reward").steps.tolist() == [10, 20, 30] and log.last("reward") == 0.1 * 3
    assert "kl_ref" not in log and log.last("kl_step") == 0.5
    assert (
        not any(m.fuzzy for m in log.mapping)
        and "told by the caller" in log.column("reward").meaning
    )
    assert "reward" in log.unmapped


def test_the_step_may_stand_in_any_column(tmp_path):
    (tmp_path / "a.csv").write_text("Step,T,reward\n1,10,0.5\n2,20,0.5\n")
    assert read_log(tmp_path / "a.csv").steps.tolist() == [1, 2]
    assert read_log(tmp_path / "a.csv", map={"step": "T"}).steps.tolist() == [10, 20]
    assert read_log(tmp_path / "a.csv", map={"step": "Step"}).steps.tolist() == [1, 2]


def test_a_message_beside_numbers_is_only_text(tmp_path):
    rows = [{"step": s, "loss": 1.0, "reward": 0.5, "message": "all is well"} for s in (1, 2)]
    assert len(read_log(jsonl(tmp_path / "a.jsonl", rows))) == 2


def test_guesses_are_said_to_be_guesses_and_doubts_are_told(tmp_path):
    rows = [{"step": s, "mean_reward": 0.5, "avg_reward": 0.4, "policy_kl": 0.1} for s in (1, 2)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert log.column("reward").fuzzy and any("could be it" in w for w in log.warnings)


GUESSED = {
    "kl_loss": "kl_ref",
    "approx_kl": "kl_step",
    "policy_ratio": "ratio_mean",
    "avg_response_len": "length",
    "format_reward_avg": "reward_part:format",
    "gradNorm": "grad_norm",
    "lr": "learning_rate",
    "val_acc": "heldout_accuracy",
    "rollout_train_logprob_diff": "logp_gap",
    "train/rollout_logprob_abs_diff_max": "logp_gap_max",
    "importance_ratio": None,
    "logp_diff": None,
    "tokens": None,
    "total_tokens": None,
    "tokens_per_sec": None,
    "logical_connectives": None,
    "reward_model_loss": None,
    "reward_from": None,
    "non_score_reward": None,
    "rewards/acc": "reward_part:acc",
    "max_reward": "reward_max",
    "clip_frac": "clip_fraction",
    "zero_std_groups": "zero_variance_groups",
}


@pytest.mark.parametrize("column, signal", GUESSED.items())
def test_what_is_guessed_and_what_is_not(column, signal, tmp_path):
    rows = [{"step": s, "seconds": 1.0, "update_norm": 1.0, column: 0.5} for s in (1, 2)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert {m.column: m.signal for m in log.mapping}.get(column) == signal


# --- hostile and huge -----------------------------------------------------------------------------


def test_hostile_names_stay_names(tmp_path):
    evil = [
        "<script>alert(1)</script>",
        "\x1b[31mred",
        "a\nb",
        "rewards/<b>x</b>/mean",
        "'; DROP",
        "\x00",
    ]
    rows = [{"step": s, "loss": 0.1, "reward_std": 0.1, **{n: 1.0 for n in evil}} for s in (1, 2)]
    log = read_log(jsonl(tmp_path / "a.jsonl", rows))
    assert set(evil[:3]) <= set(log.unmapped) and "reward_part:<b>x<" not in log
    path = jsonl(tmp_path / "b.jsonl", [{"step": 1, n: 1.0} for n in evil])
    line = refused(path)
    assert "\x1b" not in line and "\n" not in line


def test_text_that_looks_like_a_record_is_not_one(tmp_path):
    """A model's answer printed to the console may hold anything."""
    lines = [
        "answer: the dict {'reward': 99} and step:7 - but nothing else",
        "prompt: \"step:8 - see 'Step 9 | x'\"",
        _verl_line(1, 0.1),
        "{'role': 'user', 'content': \"{'reward': 5, 'loss': 6}\"}",
        _verl_line(2, 0.2),
    ]
    (tmp_path / "a.log").write_text("\n".join(lines))
    log = read_log(tmp_path / "a.log")
    assert log.series("reward").steps.tolist() == [1, 2]
    assert log.series("reward").values.tolist() == [0.1, 0.2]


def test_a_line_without_an_end_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("stablerl_core.diagnosis.readers.text.LONGEST", 1000)
    path = jsonl(tmp_path / "a.jsonl", RUN)
    with open(path, "a") as file:
        file.write('{"step": 21, "x": "' + "y" * 5000 + '"}\n{"step": 22, "loss": 1}\n')
    log = read_log(path)
    assert log.steps[-1] == 22 and any("were cut" in w for w in log.warnings)


def test_too_much_is_refused(tmp_path, monkeypatch):
    path = jsonl(tmp_path / "a.jsonl", [{"step": s, f"x{s}": 1.0} for s in range(300)])
    monkeypatch.setattr(table, "MOST_NAMES", 100)
    assert "different column names" in refused(path)
    monkeypatch.setattr(table, "MOST_VALUES", 8000)
    rows = [{"step": s, "loss": 1.0, "reward": 1.0} for s in range(5000)]
    assert "keep every" in refused(jsonl(tmp_path / "b.jsonl", rows))


def test_a_long_log_takes_little_memory(tmp_path):
    import tracemalloc

    names = ["loss", "grad_norm", "reward", "kl", "entropy", *(f"other_{k}" for k in range(20))]
    row = ", ".join(f'"{n}": 0.12345' for n in names)
    with open(tmp_path / "a.jsonl", "w") as file:
        for step in range(5_000):
            file.write(f'{{"step": {step}, {row}}}\n')
    tracemalloc.start()
    log = read_log(tmp_path / "a.jsonl")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(log) == 5_000 and len(log.signals) == 5
    assert peak < 5_000 * 8 * 5 * 4 + 1_500_000, "only the columns that are signals are kept"


def test_long_lists_are_read_in_pieces(tmp_path):
    rows = [{"step": s, "loss": 0.5, "reward_std": 0.1, "pad": "z" * 200} for s in range(9000)]
    for name, text in (
        ("one line.json", json.dumps({"best": None, "log_history": rows})),
        ("list.json", json.dumps(rows)),
        ("indented.json", json.dumps({"log_history": rows}, indent=2)),
    ):
        (tmp_path / name).write_text(text)
        assert len(read_log(tmp_path / name)) == 9000


def test_a_folder_is_read_by_the_name_of_its_log(tmp_path):
    FIXTURES["trl trainer_state"].write(tmp_path)
    assert read_log(tmp_path).format == "trl"
    _jsonl("metrics.jsonl", TRL_ROWS)(tmp_path)
    assert "'trainer_state.json', 'metrics.jsonl'" in refused(tmp_path)


def test_a_folder_of_event_folders(tmp_path):
    FIXTURES["tensorboard"].write(tmp_path / "a")
    assert read_log(tmp_path / "a").last("reward") == 0.125
    (tmp_path / "a" / "other").mkdir()
    for path in (tmp_path / "a" / "events").iterdir():
        (tmp_path / "a" / "other" / path.name).write_bytes(path.read_bytes())
    assert "holds 2 runs, 'events', 'other'" in refused(tmp_path / "a")
    assert read_log(tmp_path / "a", run="other").last("reward") == 0.125


# --- anything ----------------------------------------------------------------------------------


def check(path):
    """A log keeps its promises, whatever it was read from; or it is refused in one line."""
    try:
        log = read_log(path)
    except LogError as error:
        assert str(error).isprintable()
        return
    for name, series in log.signals.items():
        assert signal_of(name) is not None and len(series.steps) == len(series.values) > 0
        assert np.isfinite(series.steps).all() and (np.diff(series.steps) > 0).all()
    assert set(log.signals) == {m.signal for m in log.mapping}
    assert all(w.isprintable() for w in log.warnings)


PIECES = st.sampled_from(
    [
        b"\n", b"\r", b",", b";", b"\t", b"{", b"}", b"[", b"]", b'"', b"'", b":", b" - ", b"step:",
        b"step", b"loss", b"reward", b"kl", b"Step 3 | ", b"Loss 1", b"{'loss': 1, 'reward': 2}",
        b'{"step": 1, "loss": 2}', b"=====  Step 1/2 =====", b"Global step 5: {", b"nan", b"1e999",
        b"-0", b"9" * 400, b"\xff\xfe", b"\xef\xbb\xbf", b"\x1b[0m", b"(x pid=1) ", b"Wall time",
        b"__MIN", b"run", b"null", b'"log_history": [', b"actor/lr:1 - critic/score/mean:2",
    ]
)  # fmt: skip


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.one_of(st.binary(max_size=300), st.lists(PIECES, max_size=40).map(b"".join)))
def test_any_bytes_are_a_log_or_refused(content, tmp_path):
    (tmp_path / "x").write_bytes(content)
    check(tmp_path / "x")


@pytest.mark.parametrize("name", FIXTURES)
def test_a_damaged_log_is_a_log_or_refused(name, tmp_path):
    path = FIXTURES[name].write(tmp_path)
    if path.is_dir():
        (path,) = path.iterdir()
    whole, random = path.read_bytes(), np.random.default_rng(len(name))
    for _ in range(25):
        damaged = bytearray(whole[: random.integers(1, len(whole) + 1)])
        for at in random.integers(0, len(damaged), random.integers(0, 6)):
            damaged[at : at + random.integers(0, 20)] = bytes(random.integers(0, 256, 3, np.uint8))
        path.write_bytes(damaged)
        check(path)


def test_no_message_quotes_a_whole_file(tmp_path):
    (tmp_path / "a.csv").write_text("step," + "x" * 250 + "\n1,2\n")
    assert len(refused(tmp_path / "a.csv")) < 400
    assert re.search(r"xxx…", refused(tmp_path / "a.csv"))
