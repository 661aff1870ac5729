"""Every expected error of a command becomes one line and an exit code."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import warnings
from collections.abc import Callable
from typing import Any

from ckpt8.core.errors import Ckpt8Error, KernelCacheWarning, OutputError

_format_warning = warnings.formatwarning


def _one_line(message: Warning | str, category: type[Warning], *where: Any, **line: Any) -> str:
    """Format our own warning like an error, without the line of code that gives it."""
    if issubclass(category, KernelCacheWarning):
        return f"ckpt8: {message}\n"
    return _format_warning(message, category, *where, **line)


def guarded(command: Callable[[], object]) -> None:
    """Run a command and turn every expected error into one line and an exit code."""
    # A torch without numpy warns at its first use; ckpt8 does not need numpy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
    warnings.formatwarning = _one_line
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except Ckpt8Error as exc:
        line = " ".join(str(exc).split()).encode("utf-8", "backslashreplace").decode()
        sys.stderr.write(f"ckpt8: {line}\n")
        sys.exit(exc.exit_code)
    except OSError as exc:
        # Commands turn errors of their own files into Ckpt8Error. This one comes from the terminal or a pipe.
        sys.stderr.write(f"ckpt8: standard output cannot be written: {exc.strerror}\n")
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(OutputError.exit_code)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
