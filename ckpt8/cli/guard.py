"""Every error of a command becomes one line and an exit code.

Expected errors have theirs in ``core.errors``. Anything else is INTERNAL: the process lacks memory, files or threads,
or ckpt8 has a defect; the line says which.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from ckpt8.cli.output import console, print_lines, stated, waited, waiting, write_json
from ckpt8.cli.streams import StdoutError, check_environment
from ckpt8.core.errors import Ckpt8Error, KernelCacheWarning, OutputError
from ckpt8.core.files.atomic import noting_replaced
from ckpt8.core.text import printable

INTERNAL = 70
"""The exit code of an error that no command expects; EX_SOFTWARE of sysexits.h."""

TRACEBACK = "CKPT8_TRACEBACK"
"""The environment variable that shows tracebacks."""

_LONGEST = 300
_NO_MEMORY = ("allocate memory", "out of memory", "failed to map segment", "bad_alloc")
"""What libraries say in errors of other classes than MemoryError."""
_NO_ROOM = {
    errno.ENOMEM: "memory",
    errno.EMFILE: "open files",
    errno.ENFILE: "open files",
    errno.EAGAIN: "threads or processes",
}

_UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM)
_NO_FOLDER = "No usable temporary directory"
"""What tempfile says."""

_OWN = Path(__file__).parents[1]
"""The folder of ckpt8."""

_format_warning = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], filename: str, *where: Any, **line: Any) -> str:
    """Format a warning of ours, which names no code of others, like an error: without the line that gives it."""
    if issubclass(category, KernelCacheWarning) or Path(filename).is_relative_to(_OWN):
        return f"ckpt8: {printable(str(message))}\n"
    return _format_warning(message, category, filename, *where, **line)


class UnexpectedError(Exception):
    """Carries an ``error`` past typer, which has an exit code of its own for some classes: 1."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


def shielded(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose EOFError and OSError reach ``guarded``."""

    @functools.wraps(command)
    def run(*args: Any, **options: Any) -> None:
        try:
            command(*args, **options)
        except (EOFError, OSError) as exc:
            raise UnexpectedError(exc) from exc

    return run


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
            raise
        _print_end(replaced, None, 0, as_json=as_json)


def _print_end(replaced: list[str], error: str | None, code: int, *, as_json: bool) -> None:
    if not as_json:
        if replaced:
            print_lines(console(), [f"replaced {each}" for each in replaced])
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
        write_json(stated)


def _outcome(error: BaseException) -> tuple[str | None, int]:
    """What to say of an error that ends a command, if anything, and the exit code."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 128 + signal.SIGINT
    if isinstance(error, SystemExit):
        return "terminated" if error.code == 128 + signal.SIGTERM else None, int(error.code or 0)
    if hasattr(error, "exit_code") and not isinstance(error, Ckpt8Error):  # those of typer
        return getattr(error, "format_message", lambda: None)(), error.exit_code
    assert isinstance(error, Exception)  # noqa: S101 - what is none was handled
    return _said(error.error if isinstance(error, UnexpectedError) else error)


def guarded(command: Callable[[], object]) -> None:
    """Run a command and turn every error into one line and an exit code."""
    with waiting():
        _guarded(command)


def _guarded(command: Callable[[], object]) -> None:
    # A torch without numpy warns at its first use; ckpt8 does not need numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    warnings.formatwarning = _one_line
    check_environment()
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except StdoutError as exc:
        _drop_stdout()
        if exc.closed_pipe:
            # The reader has seen enough. A program without a handler would be killed by this signal.
            sys.exit(128 + signal.SIGPIPE)
        _leave(f"standard output cannot be written: {exc}", OutputError.exit_code, exc)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except Exception as exc:
        error = exc.error if isinstance(exc, UnexpectedError) else exc
        _leave(*_said(error), error)


def _leave(text: str, code: int, error: BaseException) -> NoReturn:
    _say(text, error)
    sys.exit(code)


def _say(text: str, error: BaseException) -> None:
    where = "".join(traceback.format_exception(error)) if os.environ.get(TRACEBACK) else ""
    said = f"{where}ckpt8: {' '.join(text.split())}\n"
    sys.stderr.write(said.encode("utf-8", "backslashreplace").decode())


def reported(error: Exception) -> tuple[str, int]:
    """Say on stderr what failed while other things go on; return that line and its exit code."""
    text, code = _said(error)
    _say(text, error)
    return text, code


def _drop_stdout() -> None:
    """Have the interpreter flush what is left to nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _said(error: Exception) -> tuple[str, int]:
    return (str(error), error.exit_code) if isinstance(error, Ckpt8Error) else _unexpected(error)


def _unexpected(error: Exception) -> tuple[str, int]:
    """What went wrong and what to do, in a line, and the exit code."""
    if (missing := _missing(error)) is not None:
        return f"not enough {missing} for this process; raise its limit, or give fewer --threads", INTERNAL
    text = printable(str(error))
    if isinstance(error, OSError) and (error.errno in _UNWRITABLE or _NO_FOLDER in text):
        # Outputs name themselves. What is left are temporary files, and those of libraries.
        return f"a file beside the output cannot be written: {text}; see TMPDIR and HOME", OutputError.exit_code
    found = f"{type(error).__name__}: {text[:_LONGEST]}{'…' if len(text) > _LONGEST else ''}"
    return f"a defect of ckpt8: {found}; please report it, with the traceback that {TRACEBACK}=1 shows", INTERNAL


def _missing(error: Exception) -> str | None:
    """What the process ran out of; None for another error."""
    text = str(error)
    if isinstance(error, MemoryError) or any(each in text.lower() for each in _NO_MEMORY):
        return "memory"
    if isinstance(error, OSError):
        return _NO_ROOM.get(error.errno or 0)
    return "threads or processes" if "can't start new thread" in text else None
