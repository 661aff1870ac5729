"""Temporary directories that no interrupt leaves behind."""

from __future__ import annotations

import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ckpt8.core.files.partial import remove


@contextmanager
def deferred() -> Iterator[None]:
    """Deliver SIGINT and SIGTERM at the end of the block instead of inside it.

    Protects code that creates a file and then records it: an exception between the two would leave the file.
    Signals reach the main thread only; in another thread this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # None: Python did not install the handler and could not restore it.
    before = {number: handler for number, handler in handlers.items() if handler is not None}
    try:
        for number in before:
            signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for struck in came:
            signal.raise_signal(struck)


@contextmanager
def temporary_directory(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """A new directory in ``where`` (default: the system's), removed with its content at the end. Raises OSError."""
    path: Path | None = None
    try:
        with deferred():
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        yield path
    finally:
        if path is not None:
            remove(path)
