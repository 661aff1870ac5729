"""The standard streams and the environment of a command, such that no terminal, pipe or locale ends it in a traceback.

A closed stream stays closed to its user: no file that the command opens gets its number. What stdout does not take
raises ``StdoutError``; what stderr does not take is dropped. A character that the encoding of a stream lacks is
replaced.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import os
import select
import sys
from typing import Any, TextIO

_ASCII = {"Δ": "d", "…": "...", "·": "-", "→": "->", "²": "^2", "×": "x", "√": "sqrt"}
_ERRORS = "ckpt8.replace"
_SIZES = ("COLUMNS", "LINES", "JUPYTER_COLUMNS", "JUPYTER_LINES", "TERMINAL_WIDTH")
_SMALLEST, _LARGEST = 10, 10_000
"""Columns or lines. Help is padded to the width, and what is narrower shows nothing."""


class StdoutError(Exception):
    """Standard output took not all that was written. No OSError, for which libraries have exit codes of their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.closed_pipe = error.errno == errno.EPIPE


class Stdout(io.FileIO):
    """Writes all or raises StdoutError, to a descriptor that does not block as well."""

    def write(self, content: Any) -> int:
        """Write ``content``. Raises StdoutError."""
        try:
            while (count := super().write(content)) is None:
                select.select([], [self], [])
        except OSError as exc:
            raise StdoutError(exc) from exc
        return count


class _Stderr(io.FileIO):
    """Drops what the system does not take."""

    def write(self, content: Any) -> int:
        """Write ``content`` if possible."""
        with contextlib.suppress(OSError):
            return super().write(content) or len(content)
        return len(content)


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    found = error.object[error.start : error.end]
    return "".join(_ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in found), error.end


def open_streams() -> None:
    """Make ``sys.stdin``, ``sys.stdout`` and ``sys.stderr`` usable, whatever the process was started with."""
    # Stdout is opened for reading: a write must fail.
    for descriptor, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, flags)
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for the whole process
    sys.stdout = text_stream(Stdout(1, "w", closefd=False), _encoding(sys.stdout))
    sys.stderr = text_stream(_Stderr(2, "w", closefd=False), _encoding(sys.stderr))


def _encoding(stream: TextIO | None) -> str:
    return "utf-8" if stream is None else stream.encoding


def text_stream(raw: io.FileIO, encoding: str) -> TextIO:
    """A text stream over ``raw`` that replaces what ``encoding`` lacks."""
    codecs.register_error(_ERRORS, _replaced)
    by_line = isinstance(raw, _Stderr) or raw.isatty()
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding, _ERRORS, line_buffering=by_line)


def check_environment() -> None:
    """Bound the size of the terminal that the environment states, and forget one that is no number.

    rich and typer take any digits: a width of 0, or one of a thousand million columns.
    """
    for name in _SIZES:
        text = os.environ.get(name)
        if text is not None and (not (text.isascii() and text.isdigit() and len(text) < 20) or not int(text)):
            del os.environ[name]
        elif text is not None:
            os.environ[name] = str(min(max(int(text), _SMALLEST), _LARGEST))
