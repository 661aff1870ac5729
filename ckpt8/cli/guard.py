"""Every error of a command becomes one line and an exit code; progress and results are printed here too.

Expected errors have theirs in ``core.errors``. Anything else is INTERNAL: the process lacks memory, files, threads or a
package, or ckpt8 has a defect; the line says which.

Nothing here imports typer, and JSON does not import rich. No terminal, pipe or locale ends a command in a traceback. A
closed stream stays closed to its user: no file that the command opens gets its number. What stdout does not take
raises ``StdoutError``; what stderr does not take is dropped. A character that the encoding of a stream lacks is
replaced.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import io
import json
import os
import re
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ckpt8.core.closing import setting
from ckpt8.core.errors import Ckpt8Error, KernelCacheWarning, OutputError
from ckpt8.core.files.atomic import noting_replaced
from ckpt8.core.text import printable, shortened

if TYPE_CHECKING:
    from rich.console import Console


SCHEMA = 1
"""The version of the keys of ``--json``, in all commands: 2 when one of them changes its name or meaning, or goes.

A new key leaves the number as it is. A program that reads the output checks ``schema`` and ignores unknown keys.
"""


stated: dict[str, Any] = {}
"""What the running command states, printed at its end: only then it is known whether it fails, and how long it took."""

_QUIET, _NORMAL, _VERBOSE = range(-1, 2)
_volume: ContextVar[int] = ContextVar("_volume", default=_NORMAL)
"""How much the running command prints."""
_undone: list[Callable[[], object]] = []
"""What to call when the command ends."""

_begun: ContextVar[float | None] = ContextVar("_begun", default=None)


def print_json(facts: Mapping[str, Any]) -> None:
    """Have ``facts`` printed as one JSON object on stdout at the end of the command, see ``guard.one_object``."""
    stated.update(facts)


def waiting() -> AbstractContextManager[object]:
    """Start the clock of ``waited``, unless it runs."""
    return setting(_begun, _begun.get() or time.perf_counter())


def waited() -> float:
    """Seconds that a person has waited for the command: from the start of the program on, with all imports.

    Only the start of the interpreter is missing, some hundredths of a second. ``stopwatch`` is for the work alone.
    """
    now = time.perf_counter()
    return now - (_begun.get() or now)


def quieter() -> None:
    """Print nothing on stdout but JSON, and no progress, until the command ends."""
    _volume.set(_QUIET)


def louder() -> None:
    """Print whole reports, and on stderr what the library says, until the command ends."""
    import logging

    class ToStderr(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            sys.stderr.write(f"ckpt8: {printable(record.getMessage())}\n")

    logger, handler = logging.getLogger("ckpt8"), ToStderr()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    _undone.extend((partial(logger.removeHandler, handler), partial(logger.setLevel, level)))
    _volume.set(_VERBOSE)


def is_quiet() -> bool:
    """Whether the command has ``--quiet``."""
    return _volume.get() == _QUIET


def is_verbose() -> bool:
    """Whether the command has ``--verbose``."""
    return _volume.get() == _VERBOSE


def most(count: int) -> int:
    """How many rows a report shows before it says how many more there are: ``count``, with ``--verbose`` all."""
    return sys.maxsize if is_verbose() else count


@contextmanager
def usual_volume() -> Iterator[None]:
    """What a command inside changes with ``quieter`` and ``louder`` ends with the block."""
    with setting(_volume, _NORMAL):
        try:
            yield
        finally:
            while _undone:
                _undone.pop()()


def note(text: str) -> None:
    """Say on stderr what a person waits for: on a terminal, or with ``--verbose``."""
    if is_verbose() or (sys.stderr.isatty() and not is_quiet()):
        sys.stderr.write(f"ckpt8: {printable(text)}\n")


def console() -> Console:
    """The console on stdout. It wraps lines on a terminal only: a log or a pipe gets whole names.

    ``:name:`` stays text and does not become an emoji.
    """
    from rich.console import Console

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 500
    return Console(highlight=False, emoji=False, width=width, quiet=is_quiet())


def present(facts: Mapping[str, Any], show: Callable[[Console], object], *, as_json: bool) -> None:
    """Print ``facts`` as JSON, or have ``show`` print them on the console."""
    if as_json:
        print_json(facts)
    else:
        show(console())


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Print lines without markup; escape unprintable characters of names."""
    for line in lines:
        console.print(printable(line), markup=False, soft_wrap=True)


@contextmanager
def progress_bar(
    label: str, *sources: Path, total: int = 0, done: int = 0, enabled: bool = True
) -> Iterator[Callable[[int], None]]:
    """Show throughput and time left; yield a function to call with the number of bytes just done.

    A full bar is ``total`` bytes, or those of ``sources``; ``done`` of them are done already. Silent unless stderr is a
    terminal.
    """
    if not enabled or is_quiet() or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from ckpt8.checkpoint.readers.entries import size_of

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as bar:
        task = bar.add_task(printable(label), total=total or sum(map(size_of, sources)), completed=done)
        yield lambda done: bar.advance(task, done)


_ASCII = {"Δ": "d", "…": "...", "·": "-", "→": "->", "²": "^2", "×": "x", "√": "sqrt"}
_ERRORS = "ckpt8.replace"
_SIZES = ("COLUMNS", "LINES", "JUPYTER_COLUMNS", "JUPYTER_LINES", "TERMINAL_WIDTH")
_SMALLEST, _LARGEST = 10, 10_000
"""Columns or lines. Help is padded to the width, and what is narrower shows nothing."""


class StdoutError(Exception):
    """Standard output took not all that was written. No OSError, for which libraries have exit codes of their own."""


class Stdout(io.FileIO):
    """Writes all or raises StdoutError, to a descriptor that does not block as well."""

    def write(self, content: Any) -> int:
        """Write ``content``. Raises StdoutError."""
        try:
            while (count := super().write(content)) is None:
                select.select([], [self], [])
        except OSError as exc:
            raise StdoutError(exc.strerror) from exc
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
    start, end = error.start, error.end
    return "".join(
        _ASCII.get(c) or c.encode("ascii", "backslashreplace").decode() for c in error.object[start:end]
    ), end


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
    sys.stdout = text_stream(Stdout(1, "w", closefd=False), getattr(sys.stdout, "encoding", "utf-8"))
    sys.stderr = text_stream(_Stderr(2, "w", closefd=False), getattr(sys.stderr, "encoding", "utf-8"))


def text_stream(raw: io.FileIO, encoding: str) -> TextIO:
    """A text stream over ``raw`` that replaces what ``encoding`` lacks."""
    codecs.register_error(_ERRORS, _replaced)
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, _ERRORS, line_buffering=isinstance(raw, _Stderr) or raw.isatty()
    )


def check_environment() -> None:
    """Bound the size of the terminal that the environment states, and forget one that is no number.

    rich and typer take any digits: a width of 0, or one of a thousand million columns.
    """
    for name in _SIZES:
        text = os.environ.pop(name, "")
        if text.isascii() and text.isdigit() and len(text) < 20 and int(text):
            os.environ[name] = str(min(max(int(text), _SMALLEST), _LARGEST))


INTERNAL = 70
"""The exit code of an error that no command expects; EX_SOFTWARE of sysexits.h."""

TRACEBACK = "CKPT8_TRACEBACK"
"""The environment variable that shows tracebacks."""

_NO_MEMORY = ("allocate memory", "out of memory", "failed to map segment", "bad_alloc")
"""What libraries say in errors of other classes than MemoryError."""
_NO_ROOM = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "open files",
    errno.ENFILE: "open files",
    errno.EAGAIN: "threads or processes",
}

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_OWN = Path(__file__).parents[1]
"""The folder of ckpt8."""

_format_warning = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], filename: str, *where: Any, **line: Any) -> str:
    """Format a warning of ours, which names no code of others, like an error: without the line that gives it."""
    if issubclass(category, KernelCacheWarning) or Path(filename).is_relative_to(_OWN):
        return f"ckpt8: {printable(str(message))}\n"
    return _format_warning(message, category, filename, *where, **line)


class UnexpectedError(Exception):
    """Carries an EOFError or OSError, its only argument, past typer, which would end them with its exit code 1."""


@contextlib.contextmanager
def one_object(*, as_json: bool) -> Iterator[None]:
    """Print at the end of the block what it replaced; ``as_json`` all that it stated, as one object, and how it failed.

    The object of a command that fails has ``exit_code`` and ``error``, the line that stderr gets. Where the command
    measured the ``seconds`` of its work, ``total_seconds`` are those that a person waited.
    """
    stated.clear()
    with waiting(), noting_replaced() as replaced:
        try:
            yield
        except StdoutError:
            raise
        except BaseException as exc:
            _print_end(replaced, *_outcome(exc), as_json=as_json)
            if isinstance(exc, (EOFError, OSError)):
                raise UnexpectedError(exc) from exc
            raise
        _print_end(replaced, None, 0, as_json=as_json)


def _print_end(replaced: list[str], error: str | None, code: int, *, as_json: bool) -> None:
    if not as_json:
        if replaced:
            print_lines(console(), [f"replaced {path}" for path in replaced])
        return
    if error is not None:
        stated["error"] = " ".join(error.split())
    if code and ("error" in stated or not stated):
        stated.setdefault("error", None)
        stated["exit_code"] = code
    if replaced or "target" in stated:
        stated.setdefault("replaced", replaced[0] if replaced else None)
    if "seconds" in stated:
        stated["total_seconds"] = waited()
    if stated:
        sys.stdout.write(json.dumps({"schema": SCHEMA, **stated}, allow_nan=False, ensure_ascii=True) + "\n")


def _outcome(error: BaseException) -> tuple[str | None, int]:
    """What to say of an error that ends a command, if anything, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return "terminated" if error.code == 128 + signal.SIGTERM else None, int(error.code or 0)
    if hasattr(error, "exit_code") and not isinstance(error, Ckpt8Error):  # those of typer
        return getattr(error, "format_message", lambda: None)(), error.exit_code
    assert isinstance(error, Exception)  # noqa: S101 - what is none was handled
    return _said(error)


def guarded(command: Callable[[], object]) -> None:
    """Run a command and turn every error into one line and an exit code."""
    # A torch without numpy warns at its first use; ckpt8 does not need numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    warnings.formatwarning = _one_line
    check_environment()
    try:
        try:
            with waiting():
                command()
        finally:
            sys.stdout.flush()
    except StdoutError as exc:
        # Have the interpreter flush what is left to nowhere.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(exc.__cause__, BrokenPipeError):
            # The reader has seen enough. A program without a handler would be killed by this signal.
            sys.exit(128 + signal.SIGPIPE)
        _say(f"standard output cannot be written: {exc}", exc)
        sys.exit(OutputError.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as exc:
        sys.exit(reported(exc)[1])


def _say(text: str, error: BaseException) -> None:
    where = "".join(traceback.format_exception(error)) if os.environ.get(TRACEBACK) else ""
    sys.stderr.write(f"{where}ckpt8: {' '.join(text.split())}\n".encode("utf-8", "backslashreplace").decode())


def reported(error: Exception) -> tuple[str, int]:
    """Say on stderr what failed; return that line and its exit code."""
    text, code = _said(error)
    _say(text, error.args[0] if isinstance(error, UnexpectedError) else error)
    return text, code


def _said(error: Exception) -> tuple[str, int]:
    """What went wrong and what to do, in a line, and the exit code."""
    if isinstance(error, UnexpectedError):
        return _said(error.args[0])
    if isinstance(error, Ckpt8Error):
        return re.sub(r"\b(force|salvage)=True\b", r"--\1", str(error)), error.exit_code
    if (missing := _missing(error)) is not None:
        return f"not enough {missing} for this process; raise its limit, or give fewer --threads", INTERNAL
    if isinstance(error, ModuleNotFoundError):
        return f"needs a package that is not installed: {printable(str(error))}", INTERNAL
    text = printable(str(error))
    if isinstance(error, OSError) and (error.errno in _UNWRITABLE or "No usable temporary directory" in text):
        # Outputs name themselves. What is left are temporary files, tempfile's message, and files of libraries.
        return f"a file beside the output cannot be written: {text}; see TMPDIR and HOME", OutputError.exit_code
    return (
        f"a defect of ckpt8: {type(error).__name__}: {shortened(text, 300)}; "
        f"please report it, with the traceback that {TRACEBACK}=1 shows"
    ), INTERNAL


def _missing(error: Exception) -> str | None:
    """What the process ran out of; None for another error."""
    text = str(error)
    if isinstance(error, MemoryError) or any(word in text.lower() for word in _NO_MEMORY):
        return "memory"
    if isinstance(error, OSError):
        return _NO_ROOM.get(error.errno or 0)
    return "threads or processes" if "can't start new thread" in text else None
