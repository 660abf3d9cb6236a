"""The run log: what goes in comes out, also after a kill; nothing is logged twice or misnamed."""

import json
import math
import os
import resource
import subprocess
import sys

import pytest

from stablerl_core.runlog import SIGNALS, RunLog

ROWS = [
    {"step": 0, "heldout_accuracy": 0.25},
    {"step": 1, "reward": 0.5, "loss": math.nan, "grad_norm": math.inf},
    {"step": 2, "reward": 0.1 + 0.2, "loss": -math.inf, "grad_norm": 0.0},
]


def written(path, rows=ROWS, header=None):
    log = RunLog(path, header)
    for row in rows:
        log.append(row)
    return log


def same(a, b):
    """Equality in which NaN equals NaN."""
    return repr(list(a)) == repr(list(b))


def test_nan_infinity_and_missing_stay_apart(tmp_path):
    log = written(tmp_path / "run.jsonl", header={"config": {"seed": 1}, "name": "ä"})
    again = RunLog.read(tmp_path / "run.jsonl")
    assert again.header == log.header == {"config": {"seed": 1}, "name": "ä"}
    assert same(again, ROWS) and same(log, ROWS) and len(again) == 3
    assert math.isnan(again.rows[1]["loss"]) and again.rows[1]["grad_norm"] == math.inf
    assert again.rows[2]["loss"] == -math.inf and again.rows[2]["reward"] == 0.1 + 0.2
    assert "loss" not in again.rows[0]


def test_the_file_is_a_header_and_a_line_a_row(tmp_path):
    written(tmp_path / "deep" / "run.jsonl", header={"a": 1})
    lines = (tmp_path / "deep" / "run.jsonl").read_text().splitlines()
    assert [list(json.loads(line)) for line in lines] == [["header"], *map(list, ROWS)]


def test_every_row_is_on_disk_when_append_returns(tmp_path):
    path = tmp_path / "run.jsonl"
    log = RunLog(path)
    for n, row in enumerate(ROWS, 1):
        log.append(row)
        assert len(RunLog.read(path)) == n


def test_without_a_path_it_stays_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert same(written(None), ROWS) and not any(tmp_path.iterdir())


def test_a_logged_step_is_not_logged_again(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path)
    log = RunLog.read(path)
    before = path.read_bytes()
    for step in (0, 1, 2):
        log.append({"step": step, "reward": 99.0})
    assert path.read_bytes() == before and same(log, ROWS)
    log.append({"step": 3, "reward": 1.0})
    assert same(RunLog.read(path), [*ROWS, {"step": 3, "reward": 1.0}])


def test_rows_are_copies():
    row = {"step": 1, "reward": 0.5}
    log = written(None, [row])
    row["reward"] = 7
    assert log.rows == [{"step": 1, "reward": 0.5}]


def test_an_unknown_signal_is_named_and_not_written(tmp_path):
    log = written(tmp_path / "run.jsonl", ROWS[:1])
    with pytest.raises(ValueError, match=r"\['kl', 'rewards'\]"):
        log.append({"step": 1, "rewards": 1.0, "kl": 0.0})
    assert same(RunLog.read(log.path), ROWS[:1]) and same(log, ROWS[:1])


def test_a_second_log_does_not_go_into_the_file_of_the_first(tmp_path):
    path = tmp_path / "run.jsonl"
    written(path)
    before = path.read_bytes()
    with pytest.raises(ValueError, match="run.jsonl' holds a log"):
        RunLog(path)
    assert path.read_bytes() == before
    (tmp_path / "empty").touch()
    assert len(RunLog.read(written(tmp_path / "empty").path)) == 3


# --- damage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_dropped_and_the_log_goes_on(tmp_path, cut):
    path = tmp_path / "run.jsonl"
    written(path)
    os.truncate(path, path.stat().st_size - cut)
    log = RunLog.read(path)
    assert same(log, ROWS[:2])
    log.append(ROWS[2])
    assert same(RunLog.read(path), ROWS)


@pytest.mark.parametrize("size", [0, 5])
def test_a_log_torn_in_its_header_is_empty(tmp_path, size):
    path = tmp_path / "run.jsonl"
    written(path)
    os.truncate(path, size)
    log = RunLog.read(path)
    assert len(log) == 0 and log.header == {}


@pytest.mark.parametrize(
    "line, why",
    [
        (b'{"step": 1, "rew\n', "not a JSON record"),
        (b"\n", "not a JSON record"),
        (b'{"step": 1}{"step": 2}\n', "not a JSON record"),
        (b"\xff\xfe\n", "not a JSON record"),
        (b"3\n", "neither a header nor a row"),
        (b"null\n", "neither a header nor a row"),
        (b'["step"]\n', "neither a header nor a row"),
        (b'{"reward": 1.0}\n', "neither a header nor a row"),
    ],
)
def test_a_bad_line_in_the_middle_is_named(tmp_path, line, why):
    path = tmp_path / "run.jsonl"
    written(path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], line, *lines[2:]]))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=rf"run\.jsonl, line 3: {why}"):
        RunLog.read(path)
    assert path.read_bytes() == before


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no run log there"):
        RunLog.read(tmp_path / "run.jsonl")


def test_a_full_disk_is_told_and_the_log_before_is_whole(tmp_path):
    """A limit on the size of a file stands for the disk; the row would cross it half written."""
    path = tmp_path / "run.jsonl"
    log = written(path)
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
    try:
        with pytest.raises(OSError, match="the 3 steps before are intact") as caught:
            log.append({"step": 3, "reward": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert caught.value.filename == str(path) and caught.value.errno
    assert path.read_bytes() == before and len(log) == 3
    log.append({"step": 3, "reward": 1.0})  # there is room again, in the same process
    assert same(RunLog.read(path), [*ROWS, {"step": 3, "reward": 1.0}])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs the device /dev/full")
def test_a_device_without_room(tmp_path):
    (tmp_path / "run.jsonl").symlink_to("/dev/full")
    with pytest.raises(OSError, match="cannot write the run log"):
        RunLog(tmp_path / "run.jsonl")


def test_a_kill_at_any_moment_loses_no_appended_row(tmp_path):
    """SIGKILL right after append returned: no buffer of the process may still hold the row."""
    code = (
        "import os, signal, sys\nfrom stablerl_core.runlog import RunLog\n"
        "log = RunLog(sys.argv[1])\n"
        "for step in range(5): log.append({'step': step, 'reward': 1.0})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.jsonl")])
    assert done.returncode == -9
    assert [row["step"] for row in RunLog.read(tmp_path / "run.jsonl")] == [0, 1, 2, 3, 4]


# --- reading values --------------------------------------------------------------------------


def test_series_and_last():
    log = written(None)
    assert log.series("reward") == ([1, 2], [0.5, 0.1 + 0.2])
    assert log.series("entropy") == ([], [])
    assert log.last("reward") == 0.1 + 0.2
    assert log.last("reward", 2) == pytest.approx(0.4) == log.last("reward", 99)
    assert log.last("heldout_accuracy", 3) == 0.25
    assert math.isnan(log.last("entropy")) and math.isnan(log.last("loss", 2))
    with pytest.raises(ValueError, match="signal='kl' is unknown; known: step"):
        log.series("kl")


def test_signals_cover_the_four_layers_and_say_what_they_are():
    assert {signal.layer for signal in SIGNALS.values()} == {0, 1, 2, 3, 4}
    assert all(signal.unit and signal.meaning for signal in SIGNALS.values())


def test_reading_a_log_that_is_being_written_leaves_the_file_alone(tmp_path):
    path = tmp_path / "run.jsonl"
    log = RunLog(path, {"x": 1})
    log.append({"step": 1, "reward": 0.5})
    torn = path.read_bytes() + b'{"step": 2, "rew'
    path.write_bytes(torn)
    reader = RunLog.read(path)
    assert len(reader) == 1 and path.read_bytes() == torn
    reader.append({"step": 2, "reward": 0.25})
    assert [row["step"] for row in RunLog.read(path)] == [1, 2]
