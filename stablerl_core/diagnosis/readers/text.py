"""Text of any encoding as lines of bounded length, and what a hostile line may not do."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator
from pathlib import Path

from ..log import LogError

LONGEST = 1 << 22  # characters of a line; a longer one is cut off and counted
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_ANSI = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def encoding_of(head: bytes) -> str | None:
    """The encoding that the first bytes of a file show; None if they are not text."""
    for bom, name in _BOMS:
        if head.startswith(bom):
            return name
    if b"\0" in head:
        return None
    return "utf-8"


class Lines:
    """The lines of a text file, one at a time.

    Bytes that are not in the file's encoding become U+FFFD; `replaced` counts the lines with one,
    `cut` those longer than 4 million characters. A carriage return ends a line, as it does for a
    progress bar. `torn` says that the last line has no end: it may be half written.
    """

    def __init__(self, path: Path, encoding: str):
        self.path, self.encoding = path, encoding
        self.replaced = self.cut = 0
        self.torn = False

    def __iter__(self) -> Iterator[str]:
        self.replaced = self.cut = 0
        with open(self.path, encoding=self.encoding, errors="replace") as file:
            while line := file.readline(LONGEST):
                self.torn = line[-1] != "\n"
                if self.torn and len(line) == LONGEST:
                    self.cut += 1
                    while (rest := file.readline(LONGEST)) and rest[-1] != "\n":
                        pass
                if "�" in line:
                    self.replaced += 1
                yield line

    def chunks(self, size: int = 1 << 20) -> Iterator[str]:
        """The same text in pieces that do not care for lines."""
        with open(self.path, encoding=self.encoding, errors="replace") as file:
            while piece := file.read(size):
                self.replaced += "�" in piece
                yield piece


def plain(line: str) -> str:
    """A console line without its colours."""
    return _ANSI.sub("", line) if "\x1b" in line else line


def shown(text: object, most: int = 60) -> str:
    """A name from a file, fit for one line of a message: quoted, escaped, cut."""
    quoted = ascii(str(text)[: 4 * most]) if not str(text).isprintable() else repr(str(text))
    return quoted if len(quoted) <= most else quoted[: most - 1] + "…"


def head_of(path: Path, size: int = 1 << 18) -> bytes:
    """The first bytes of a file. Raises `LogError` for what is no readable file."""
    try:
        if path.exists() and not path.is_file():
            raise LogError("is neither a file nor a folder")  # a pipe would never end
        with open(path, "rb") as file:
            return file.read(size)
    except FileNotFoundError:
        raise LogError("no such file") from None
    except OSError as error:
        raise LogError(f"cannot be read ({error.strerror})") from None
