"""Process of its own for `math_answer`: symbolic algebra can take for ever, or all memory.

Reads a JSON list of (gold, answer) pairs from stdin, writes "ready" and then one word a pair.
Imports nothing of stablerl_core, so that it starts without torch.
"""

import faulthandler
import json
import signal
import sys

from math_verify import LatexExtractionConfig, parse, verify

MEMORY_LIMIT = 2 * 2**30  # bytes of address space


def limit_memory() -> None:
    """Turn a memory bomb (9^{9^{9^9}}) into a MemoryError, where the system can."""
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    except (ImportError, ValueError, OSError):
        pass


def parsed(text: str) -> list:
    """Parse as LaTeX only: math-verify's parser for plain expressions goes through `eval`."""
    if "$" in text or not text:
        return []  # a dollar inside would open a second expression, and any of them may match
    config = [LatexExtractionConfig()]
    return parse(f"${text}$", config, fallback_mode="no_fallback", parsing_timeout=None)


def compare(gold: str, answer: str) -> str:
    """One word: correct, wrong, unparseable (the answer) or bad_gold."""
    expected = parsed(gold)
    if not expected:
        return "bad_gold"
    given = parsed(answer)
    if not given:
        return "unparseable"
    return "correct" if verify(expected, given, timeout_seconds=None) else "wrong"


def watch(seconds: float) -> None:
    """End the process, also inside a C call, when it has computed for `seconds`; 0 stops the watch.

    Processor time where the system can: on a busy machine a right answer must not become late.
    """
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_PROF, seconds)  # nobody handles SIGPROF: it terminates
    elif seconds:
        faulthandler.dump_traceback_later(seconds, exit=True)
    else:
        faulthandler.cancel_dump_traceback_later()


def main(timeout: float) -> None:
    """Answer pair by pair; the watchdog ends the process at the first that takes too long."""
    pairs = json.load(sys.stdin)
    limit_memory()
    print("ready", flush=True)
    for gold, answer in pairs:
        watch(timeout)
        print(compare(gold, answer), flush=True)
        watch(0)


if __name__ == "__main__":
    main(float(sys.argv[1]))
