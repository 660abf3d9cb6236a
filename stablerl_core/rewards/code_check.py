"""Unit tests for code that a model wrote, run in a process that can compute and nothing else."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .final_text import after_thinking
from .verdict import Verdict

_WORKER = Path(__file__).with_name("_code_worker.py")
_FENCE = re.compile(r"^[ \t]*```[^\n`]*\n?", re.MULTILINE)
_KILLED = {-signal.SIGXCPU, -signal.SIGKILL} if hasattr(signal, "SIGXCPU") else set()

Test = tuple[Sequence, object]
"""Arguments of a call, and what it should return: both as JSON can write them."""


@dataclass(frozen=True)
class CodeVerdict(Verdict):
    """A `Verdict` (1 iff every test passed), and which tests did."""

    passed: tuple[bool, ...] = ()


def code_answer(
    completion: str,
    tests: Sequence[Test],
    *,
    function: str = "solve",
    seconds: int = 2,
    memory: int = 256 * 2**20,
    truncated: bool = False,
    prefill: str = "",
) -> CodeVerdict:
    """Reward 1 iff `function`, as the completion defines it, returns what every test expects.

    tests: pairs (arguments, expected). The code is that of the last fenced block after the
    thinking (`prefill` as in `after_thinking`), or the whole text where nothing is fenced. Values
    are compared here, as JSON: 1 is not true, a tuple is a list, floats may differ by 1e-9.

    The code runs in a process of its own: `python -I`, no environment, an empty folder, `memory`
    bytes, `seconds` of processor time (of its own, so a busy machine fails nobody; a sleeper ends
    at ten seconds plus five times as many), and a filter of system calls that leaves computing
    and reading files: no network, no other process nor a signal to one, no file written or removed.
    It never gets the expected values, and cannot look into the memory of the process that has them.
    Files that you may read, it may read: keep gold answers off the machine's disk, or use a
    container. Standard library only; results that take more than 1 MiB as JSON are an error.

    Reasons: correct, or that of the first test that failed: wrong, error (it raised), memory,
    timeout; or that of all: no_code, syntax_error, no_function, empty, truncated.
    Raises `ValueError`: no tests, or one that is no JSON; `RuntimeError` where the system has no
    such filter (it needs Linux on x86-64 or ARM64) or no way to part the process from yours (a
    user namespace, Landlock, or capabilities to drop): nothing is run then.
    """
    calls, expected = _checked(completion, tests, seconds)
    code = _code_of(completion, truncated, prefill)
    if isinstance(code, Verdict):
        return CodeVerdict(code.reward, code.reason, (False,) * len(tests))
    task = {"code": code, "function": function, "calls": calls}
    records, ended = _run(task | {"seconds": seconds, "memory": memory})
    if records and "error" in records[-1]:
        ended = records[-1]["error"]  # what did not load has one record for all calls
    told = [records[i] if i < len(records) else {"error": ended} for i in range(len(tests))]
    passed = tuple(
        "value" in record and same(record["value"], wanted)
        for record, wanted in zip(told, expected, strict=True)
    )
    first = next((record for record, right in zip(told, passed, strict=True) if not right), {})
    reason = "correct" if all(passed) else _known(first)
    return CodeVerdict(float(all(passed)), reason, passed)


def code_block(completion: str) -> str | None:
    """The last fenced block, the whole text where nothing is fenced; None if a fence stays open."""
    fences = list(_FENCE.finditer(completion))
    if not fences:
        return completion
    if len(fences) % 2:
        return None
    return completion[fences[-2].end() : fences[-1].start()]


def same(value: object, expected: object) -> bool:
    """Equality of JSON values: no truth value is a number, floats may differ by 1e-9."""
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, (int, float)) and isinstance(expected, (int, float)):
        return value == expected or _close(value, expected)
    if type(value) is not type(expected):
        return False
    if isinstance(value, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[k], expected[k]) for k in value)
    return value == expected


def _close(value: float, expected: float) -> bool:
    """Floats only: two unequal whole numbers are never close."""
    if isinstance(value, int) and isinstance(expected, int):
        return False
    try:
        return math.isclose(value, expected, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:
        return False


def _known(record: dict) -> str:
    word = record.get("error", "wrong")
    known = ("syntax_error", "no_function", "error", "memory", "timeout")
    return word if word in known + ("wrong",) else "error"


def _checked(completion: str, tests: Sequence[Test], seconds: int) -> tuple[list, list]:
    """Arguments and expected values as JSON reads them back."""
    if not isinstance(completion, str):
        raise ValueError(f"completion is a {type(completion).__name__}, expected a str")
    if not tests:
        raise ValueError("tests is empty: code without a test would always be right")
    if not (isinstance(seconds, int) and seconds >= 1):
        raise ValueError(f"seconds={seconds!r}: expected whole seconds of processor time, ≥ 1")
    try:
        pairs = json.loads(json.dumps([[list(a), e] for a, e in tests], allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(f"tests must be pairs (arguments, expected) of JSON: {error}") from None
    return [a for a, _ in pairs], [e for _, e in pairs]


def _code_of(completion: str, truncated: bool, prefill: str) -> str | Verdict:
    if truncated or not completion:
        return Verdict(0.0, "truncated" if truncated else "empty")
    text = after_thinking(completion, prefill)
    code = None if text is None else code_block(text)
    if code is None:
        return Verdict(0.0, "truncated")
    return code if code.strip() else Verdict(0.0, "no_code")


def _run(task: dict) -> tuple[list[dict], str]:
    """Records of the calls that returned, and why there are no more of them."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", str(_WORKER)],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(task).encode(), timeout=10 + 5 * task["seconds"])
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        out.seek(0)
        lines = out.read(2**20).decode("utf-8", "replace").splitlines()
    if '{"ready": true}' not in lines[:1]:
        raise RuntimeError(
            f"code cannot be checked safely here ({lines[0] if lines else 'no start'}): "
            "it needs Linux on x86-64 or ARM64, where system calls can be filtered, and a user "
            "namespace, Landlock, or capabilities to drop"
        )
    return _records(lines[1:]), "timeout" if process.returncode in _KILLED else "error"


def _records(lines: list[str]) -> list[dict]:
    """The lines that are records, up to the first that is not: what is run may write anything."""
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(record, dict) or not record.keys() & {"value", "error"}:
            break
        records.append(record)
    return records
