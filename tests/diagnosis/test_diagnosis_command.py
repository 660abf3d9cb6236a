"""`stablerl diagnose` and `stablerl explain`: exit codes, JSON, the page, watching, bad input."""

import json
import os
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from stablerl_core.cli import main
from stablerl_core.diagnosis import Series, SignalLog, diagnose
from stablerl_core.diagnosis.command import column_map, watch

N = 40
BAD = "<script>alert(1)</script>\x1b[31m"


def write(path, **columns):
    """A log in our own format."""
    rows = [
        {"step": n + 1} | {k: float(v[n]) for k, v in columns.items()}
        for n in range(len(next(iter(columns.values()))))
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in [{"header": {}}, *rows]))
    return str(path)


@pytest.fixture
def files(tmp_path):
    noise = np.random.default_rng(0).normal(0, 0.02, N)
    good = {
        "reward": np.linspace(0.3, 0.7, N) + noise,
        "entropy": np.linspace(0.5, 0.3, N) + noise / 2,
        "kl_ref": np.linspace(0, 0.02, N),
        "grad_norm": 0.4 + noise,
        "logp_gap": 0.01 + np.abs(noise) / 100,
    }
    return {
        "healthy": write(tmp_path / "healthy.jsonl", **good),
        "layer 4": write(tmp_path / "four.jsonl", **good | {"logp_gap": np.linspace(0.01, 0.2, N)}),
        "insufficient evidence": write(tmp_path / "short.jsonl", reward=[0.1, 0.2, 0.3]),
    }


CODES = {"healthy": 0, "layer 4": 1, "insufficient evidence": 3}


@pytest.mark.parametrize("verdict", CODES)
def test_exit_codes_and_json(files, verdict, capsys):
    assert main(["diagnose", files[verdict]]) == CODES[verdict]
    assert verdict in capsys.readouterr().out
    assert main(["diagnose", files[verdict], "--json"]) == CODES[verdict]
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == verdict and set(told) >= {"layer", "findings", "missing_signals"}


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x01\x02" * 99, b"hello\n", b'{"step": 1, "tree": 2}\n' * 9]
)
def test_what_is_no_log_is_one_line_and_exit_2(tmp_path, content, capsys):
    path = tmp_path / "x.jsonl"
    path.write_bytes(content)
    assert main(["diagnose", str(path)]) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1 and "x.jsonl" in err


def test_a_missing_file_and_a_wrong_map_are_exit_2(tmp_path, files, capsys):
    assert main(["diagnose", str(tmp_path / "none.csv")]) == 2
    for given in ("reward", "nonsense=x", "reward="):
        assert main(["diagnose", files["healthy"], "--map", given]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 4
    assert column_map([]) is None and column_map(["reward=a=b"]) == {"reward": "a=b"}


def test_a_column_can_be_named_by_hand(tmp_path, capsys):
    path = tmp_path / "own.csv"
    body = "".join(f"{n},{0.0},{0.5}\n" for n in range(1, 30))
    path.write_text("step,zork,entropy\n" + body)
    assert main(["diagnose", str(path), "--map", "reward=zork"]) == 1
    assert "layer 1" in capsys.readouterr().out


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.addresses = [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href")]


def test_the_page_stands_alone_and_marks_the_event(files, tmp_path):
    out = tmp_path / "page.html"
    main(["diagnose", files["layer 4"], "--html", str(out)])
    page = Page()
    page.feed(out.read_text())
    assert not page.addresses and "script" not in page.tags
    assert page.tags.count("svg") == 4 and 'class="event"' in out.read_text()


def hostile() -> SignalLog:
    steps, flat = np.arange(1.0, 31), np.zeros(30)
    signals = {"reward": Series(steps, flat), f"reward_part:format{BAD}": Series(steps, flat)}
    return SignalLog(signals, "csv", warnings=(BAD,), step_kind=BAD)


def test_hostile_names_reach_neither_the_page_nor_the_terminal():
    found = diagnose(hostile())
    page = Page()
    page.feed(found.to_html())
    assert "script" not in page.tags and "\x1b" not in found.to_html()
    assert "\x1b" not in found.to_text() and "\x1b" not in found.to_json()


def test_the_figure_has_four_panels(files):
    plt = pytest.importorskip("matplotlib.pyplot")
    from stablerl_core.diagnosis import read_log

    figure = diagnose(read_log(files["layer 4"])).plot()
    titles = [a.get_title() for a in figure.axes if a.get_title()]
    assert [t[:7] for t in titles] == ["Layer 1", "Layer 2", "Layer 3", "Layer 4"]
    plt.close(figure)


def test_watching_reads_again_when_the_file_grew(tmp_path):
    path, calls = tmp_path / "log", []
    path.write_text("a")

    def told():
        calls.append(path.stat().st_size)
        if len(calls) == 1:
            raise ValueError("half a line")
        return 1

    assert watch(str(path), told, seconds=0, turns=2) == 3
    path.write_text("ab")
    assert watch(str(path), told, seconds=0, turns=1) == 1
    assert calls == [1, 2]


def test_explain_knows_our_names_and_theirs(capsys):
    assert main(["explain"]) == 0
    assert "kl_ref" in capsys.readouterr().out
    assert main(["explain", "kl_step"]) == 0
    assert "actor/ppo_kl" in capsys.readouterr().out
    assert main(["explain", "actor/ppo_kl"]) == 0
    assert "kl_step" in capsys.readouterr().out
    assert main(["explain", "no such thing"]) == 2


def test_it_starts_without_torch_and_without_matplotlib(files):
    code = (
        "import sys\nfrom stablerl_core.cli import main\n"
        f"main(['diagnose', {files['healthy']!r}])\n"
        "print(sorted({'torch', 'matplotlib', 'transformers', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=dict(os.environ)
    )
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
