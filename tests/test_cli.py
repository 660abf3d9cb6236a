"""The command: what it prints and writes, its exit status, and one line for whatever stops it."""

from functools import partial

import pytest

from stablerl_core import __version__
from stablerl_core.cli import main
from stablerl_core.runlog import RunLog
from stablerl_core.training import DataConfig, Trainer, report

SMALL = dict(prompts=4, group_size=4, max_new_tokens=10, eval_prompts=8)


@pytest.fixture
def small(monkeypatch):
    """The same command on a batch of 16."""
    monkeypatch.setattr(report, "DataConfig", partial(DataConfig, **SMALL))


def refused(capsys, *argv):
    """Exit status 2 and what the one line on stderr says."""
    capsys.readouterr()
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert err.count("\n") == 1 and err.startswith(f"stablerl {argv[0]}: ")
    assert "Traceback" not in out + err
    return err


def test_a_run_prints_the_table_and_writes_log_and_page(tmp_path, capsys):
    """As a reader types it, on the default batch."""
    out = tmp_path / "deep" / "run"
    assert main(["run", "--steps", "3", "--seed", "5", "--out", str(out)]) == 0
    told = capsys.readouterr().out
    for words in ("Layer 1: data and rewards", "Layer 4: training system", "grad_norm", "logp_gap"):
        assert words in told
    assert str(out / "run.jsonl") in told and str(out / "report.html") in told
    log = RunLog.read(out / "run.jsonl")
    assert [row["step"] for row in log] == [0, 1, 2, 3]
    assert {"heldout_accuracy", "reward"} <= set(log.rows[-1])
    page = (out / "report.html").read_text()
    assert page.count("<svg") == 4
    assert f"stablerl run --steps 3 --seed 5 --out {out}" in page
    assert log.header["provenance"]["torch"] in page
    assert sorted(p.name for p in out.iterdir()) == [
        "checkpoint-000003.safetensors",
        "report.html",
        "run.jsonl",
    ]


def test_options_reach_the_run(tmp_path, small):
    out = tmp_path / "run"
    argv = ["run", "--steps", "1", "--seed", "3", "--task", "add", "--verifier", "any"]
    assert main([*argv, "--learning-rate", "1e-5", "--out", str(out)]) == 0
    config = Trainer.resume(out).config
    assert (config.steps, config.seed, config.data.task) == (1, 3, "add")
    assert config.data.verifier == "any" and config.numerics.learning_rate == 1e-5


def test_a_folder_that_holds_a_run_is_refused_and_resumed(tmp_path, capsys, small):
    out = str(tmp_path / "run")
    assert main(["run", "--steps", "2", "--out", out]) == 0
    before = (tmp_path / "run" / "run.jsonl").read_bytes()
    assert "already holds a run" in refused(capsys, "run", "--steps", "2", "--out", out)
    assert (tmp_path / "run" / "run.jsonl").read_bytes() == before
    assert main(["run", "--resume", "--steps", "4", "--out", out]) == 0
    assert [row["step"] for row in RunLog.read(tmp_path / "run" / "run.jsonl")] == [0, 1, 2, 3, 4]
    assert (tmp_path / "run" / "run.jsonl").read_bytes().startswith(before)


def test_resume_goes_to_the_steps_the_run_was_given(tmp_path, small):
    out = tmp_path / "run"
    assert main(["run", "--steps", "3", "--out", str(out)]) == 0
    log = out / "run.jsonl"
    whole = log.read_bytes()
    for path in (out / "checkpoint-000003.safetensors", out / "report.html"):
        path.unlink()
    log.write_bytes(b"".join(whole.splitlines(keepends=True)[:3]))  # killed after step 1
    assert main(["run", "--resume", "--out", str(out)]) == 0
    assert [row["step"] for row in RunLog.read(log)] == [0, 1, 2, 3]
    assert (out / "report.html").exists()


@pytest.mark.parametrize(
    "options, message",
    [
        (["--preset", "mixtral"], "preset='mixtral' is neither"),
        (["--task", "countdown"], "task='countdown' has no warm start"),
        (["--preset", "tests"], "preset='tests' is neither"),
        (["--verifier", "kind"], "verifier='kind' is unknown"),
        (["--steps", "0"], "steps=0"),
        (["--steps", "-5"], "steps=-5"),
        (["--learning-rate", "-1"], "learning_rate=-1"),
        (["--learning-rate", "nan"], "learning_rate=nan"),
        (["--device", "abacus"], "device='abacus'"),
        (["--resume"], "no run log there"),
    ],
)
def test_what_cannot_be_run_is_told_in_one_line(tmp_path, capsys, options, message):
    out = tmp_path / "run"
    assert message in refused(capsys, "run", "--out", str(out), *options)
    assert not out.exists()


def test_an_unknown_task_names_the_near_ones(tmp_path, capsys):
    pytest.importorskip("reasoning_gym")
    told = refused(capsys, "run", "--out", str(tmp_path / "run"), "--task", "chain_sums")
    assert "chain_sum" in told and not (tmp_path / "run").exists()


def test_a_file_in_the_place_of_the_folder_is_told(tmp_path, capsys):
    (tmp_path / "run").write_text("mine")
    assert str(tmp_path / "run") in refused(capsys, "run", "--out", str(tmp_path / "run"))
    assert (tmp_path / "run").read_text() == "mine"


def test_a_damaged_checkpoint_is_told(tmp_path, capsys, small):
    out = tmp_path / "run"
    main(["run", "--steps", "1", "--out", str(out)])
    (out / "checkpoint-000001.safetensors").write_bytes(b"half")
    told = refused(capsys, "run", "--resume", "--out", str(out))
    assert "checkpoint-000001" in told and "truncated or corrupt" in told


def test_an_interrupt_is_no_traceback(tmp_path, capsys, small, monkeypatch):
    def stop(self, *_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "run", stop)
    assert main(["run", "--out", str(tmp_path / "run")]) == 130
    out, err = capsys.readouterr()
    assert "interrupted" in err and "Traceback" not in out + err


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["experiment", "--help"]])
def test_help(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith("usage: stablerl") and ("--learning-rate" in told) == ("run" in argv)


def test_version(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"stablerl {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["fly"], ["run", "--steps", "many"], ["run", "--colour", "red"]]
)
def test_wrong_usage(argv, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(argv)
    assert stopped.value.code == 2 and "usage: stablerl" in capsys.readouterr().err


def test_an_unknown_experiment_is_told(tmp_path, capsys):
    told = refused(capsys, "experiment", "no_such_thing", "--out", str(tmp_path))
    assert "no_such_thing" in told
