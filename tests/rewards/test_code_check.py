"""Code that a model wrote: right and wrong, and the doors that are closed to it."""

from __future__ import annotations

import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stablerl_core.rewards import CodeVerdict, code_answer, code_block
from stablerl_core.rewards.code_check import same

TESTS = [(([3, 1, 2],), [1, 2, 3]), (([],), [])]
RIGHT = "def solve(x):\n    return sorted(x)\n"

runs = pytest.mark.skipif(sys.platform != "linux", reason="the system call filter is Linux's")


@runs
@pytest.mark.parametrize(
    "completion, passed, reason",
    [
        (RIGHT, (True, True), "correct"),
        (f"Here:\n```python\n{RIGHT}```\ndone", (True, True), "correct"),
        (f"```\nx\n```\nbetter:\n```py\n{RIGHT}\n```", (True, True), "correct"),
        (f"<think>```\nx\n```</think>{RIGHT}", (True, True), "correct"),
        ("def solve(x): return x", (False, True), "wrong"),
        ("def solve(x): return tuple(sorted(x))", (True, True), "correct"),
        ("def solve(x): return {1, 2}", (False, False), "error"),
        ("def solve(x): return x[0] and sorted(x)", (True, False), "error"),
        ("def solve(x): raise SystemExit", (False, False), "error"),
        ("def solve(x: return", (False, False), "syntax_error"),
        ("raise KeyError('solve')", (False, False), "error"),
        ("x = 1", (False, False), "no_function"),
        ("solve = 3", (False, False), "no_function"),
        ("def solve(x):\n    return [0] * 10**10", (False, False), "memory"),
        ("def solve(x): return solve(x)", (False, False), "error"),
        (f"```python\n{RIGHT}", (False, False), "truncated"),
        ("<think>def", (False, False), "truncated"),
        ("``` \n ```", (False, False), "no_code"),
        ("", (False, False), "empty"),
    ],
)
def test_verdicts(completion, passed, reason):
    expected = CodeVerdict(float(all(passed)), reason, passed)
    assert code_answer(completion, TESTS) == expected


@runs
@pytest.mark.parametrize(
    "deed",
    [
        "import socket; socket.socket()",
        "import socket; socket.create_connection(('127.0.0.1', 1), 1)",
        "import os; os.fork()",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.kill(os.getppid(), 0)",
        "import threading; threading.Thread(target=print).start()",
        "open('f', 'w')",
        "import os; os.mkdir('d')",
        "import os; os.unlink(WITNESS)",
        "import os; os.rename(WITNESS, WITNESS + '2')",
        "import os; os.truncate(WITNESS, 0)",
        "import os; os.chmod(WITNESS, 0)",
        "open(WITNESS, 'a')",
        "open('/proc/self/mem', 'r+b')",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "import ctypes; assert ctypes.CDLL(None, use_errno=True).unshare(0x40000000) == 0",
        "import os; open(f'/proc/{os.getppid()}/mem', 'rb')",
        "import os; open(f'/proc/{os.getppid()}/environ', 'rb')",
        "import os; open(f'/proc/{os.getppid()}/fd/0', 'rb')",
        "import fcntl, os; fcntl.fcntl(0, fcntl.F_SETOWN, os.getppid())",
        "import fcntl; fcntl.fcntl(0, 10, 9)",  # F_SETSIG
        "import fcntl, os; fcntl.fcntl(os.open('/', os.O_RDONLY), fcntl.F_NOTIFY, 1)",
        "import fcntl; fcntl.flock(open(WITNESS), fcntl.LOCK_EX)",
        "import fcntl; fcntl.lockf(open(WITNESS), fcntl.LOCK_SH)",
    ],
)
def test_closed_doors(deed, tmp_path):
    witness = tmp_path / "witness"
    witness.write_text("here")
    body = f"WITNESS = {str(witness)!r}\ndef solve():\n    {deed}\n    return 'done'\n"
    verdict = code_answer(body, [((), "done")])
    assert verdict.reason == "error", "the deed was done"
    assert witness.read_text() == "here"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["witness"]


@runs
def test_reading_is_open_as_documented_and_the_environment_is_not(monkeypatch):
    monkeypatch.setenv("SECRET", "gold")
    code = "import os\ndef solve(): return [len(open('/proc/self/stat').read()) > 0, *os.environ]"
    told = (["LC_CTYPE"], [])  # Python itself may set the first
    assert any(code_answer(code, [((), [True, *names])]).reward for names in told)


@runs
def test_time_is_the_codes_own_and_a_sleeper_ends():
    started = time.perf_counter()
    verdict = code_answer("def solve(x):\n    while True: pass", TESTS, seconds=1)
    assert (verdict.reason, verdict.passed) == ("timeout", (False, False))
    caught = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\n"
    verdict = code_answer(caught + "def solve(x):\n    while True: pass", TESTS, seconds=1)
    assert verdict.reason == "timeout"
    assert time.perf_counter() - started < 60
    slow = "import time\ndef solve(x):\n    time.sleep(0.7)\n    return sorted(x)"
    assert code_answer(slow, TESTS, seconds=1).reward == 1  # waiting is not computing


@runs
def test_results_cannot_be_forged():
    """The code gets neither the expected values nor the last word about equality."""
    equal = "class E(list):\n    def __eq__(self, other): return True\n"
    assert code_answer(equal + "def solve(x): return E([9])", TESTS).passed == (False, False)
    for forged in ("import os\nos._exit(0)", "print('{\"value\": [1, 2, 3]}')", "exit()"):
        assert code_answer(forged, TESTS).reward == 0
    flood = "def solve(x): return 'x' * (8 << 20)"
    assert code_answer(flood, TESTS).reward == 0


@runs
def test_the_process_never_gets_the_expected_values(monkeypatch):
    from stablerl_core.rewards import code_check

    sent = []

    def spy(task):
        sent.append(task)
        return [], "error"

    monkeypatch.setattr(code_check, "_run", spy)
    code_answer(RIGHT, [((1,), "expected-7f3a")])
    assert sent[0]["calls"] == [[1]] and "7f3a" not in repr(sent)


@runs
def test_in_a_thread_and_one_after_another():
    found = []
    thread = threading.Thread(target=lambda: found.append(code_answer(RIGHT, TESTS)))
    thread.start()
    thread.join(30)
    assert found[0].reward == 1
    assert code_answer(RIGHT, TESTS, function="other").reason == "no_function"


def test_where_no_filter_is_to_be_had_nothing_runs(monkeypatch, tmp_path):
    from stablerl_core.rewards import code_check

    source = code_check._WORKER.read_text()
    without = tmp_path / "worker.py"
    without.write_text(source.replace('sys.platform != "linux"', 'sys.platform == sys.platform'))
    monkeypatch.setattr(code_check, "_WORKER", without)
    with pytest.raises(RuntimeError, match="cannot be checked safely here .*no system call filter"):
        code_answer(RIGHT, TESTS)


@runs
def test_where_the_parent_stays_readable_nothing_runs(monkeypatch, tmp_path):
    from stablerl_core.rewards import code_check

    source = code_check._WORKER.read_text()
    opened = tmp_path / "worker.py"
    opened.write_text(source.replace("os.open(f\"/proc/{os.getppid()}/{name}\"", "os.open(\"/\""))
    monkeypatch.setattr(code_check, "_WORKER", opened)
    with pytest.raises(RuntimeError, match="cannot be checked safely here .*could read environ"):
        code_answer(RIGHT, TESTS)


def test_a_truncated_text_is_not_run(monkeypatch):
    monkeypatch.setattr("stablerl_core.rewards.code_check._run", None)
    assert code_answer(RIGHT, TESTS, truncated=True).reason == "truncated"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((RIGHT, []), "tests is empty"),
        ((None, TESTS), "completion is a NoneType"),
        ((RIGHT, [((1,), {1})]), "tests must be pairs"),
        ((RIGHT, [((1,), float("nan"))]), "tests must be pairs"),
        ((RIGHT, [3]), "tests must be pairs"),
    ],
)
def test_bad_input_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        code_answer(*arguments)
    with pytest.raises(ValueError, match="seconds=0.5: expected whole seconds"):
        code_answer(RIGHT, TESTS, seconds=0.5)


@pytest.mark.parametrize(
    "text, code",
    [
        ("x", "x"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\n```python\nb\n```", "b\n"),
        ("  ```py\na\n  ```", "a\n"),
        ("use `a` here", "use `a` here"),
        ("```\na", None),
        ("```\na\n```\n```\nb", None),
    ],
)
def test_the_last_code_block(text, code):
    assert code_block(text) == code


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=5,
)


@given(values, values)
def test_equality_of_values(a, b):
    assert same(a, a)
    assert same(a, b) == same(b, a)


@pytest.mark.parametrize(
    "a, b, equal",
    [
        (1, True, False),
        (0, False, False),
        ([1], [True], False),
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (10**20, 10**20 + 1, False),
        (10**400, 1.0, False),
        ("1", 1, False),
        ([1, 2], [1], False),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (None, 0, False),
    ],
)
def test_what_is_equal(a, b, equal):
    assert same(a, b) is equal
