"""Process of its own for `math_answer`: symbolic algebra can take for ever, or all memory.

Reads a JSON list of (gold, answer) pairs from stdin, writes "ready" and then one word a pair.
Imports nothing of stablerl_core, so that it starts without torch.
"""

import faulthandler
import json
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


def main(timeout: float) -> None:
    """Answer pair by pair; the watchdog ends the process, also inside a C call."""
    pairs = json.load(sys.stdin)
    limit_memory()
    print("ready", flush=True)
    for gold, answer in pairs:
        faulthandler.dump_traceback_later(timeout, exit=True)
        print(compare(gold, answer), flush=True)
        faulthandler.cancel_dump_traceback_later()


if __name__ == "__main__":
    main(float(sys.argv[1]))
