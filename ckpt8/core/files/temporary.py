"""Temporary directories that an interrupt does not leave behind, at whatever moment it comes."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def deferred() -> Iterator[None]:
    """Have SIGINT and SIGTERM strike at the end of the block, not inside it.

    For what is made in one step and noted in the next, which an exception between the two would lose. Signals strike
    the main thread only: in another thread there is nothing to do.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            # None: it was not set by Python, which could not set it again.
            if handler is not None:
                before[number] = handler
                signal.signal(number, lambda number, _: came.append(number))
        yield
    finally:
        for struck, handler in before.items():
            signal.signal(struck, handler)
        for struck in came:
            signal.raise_signal(struck)


@contextmanager
def temporary_directory(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """A directory in ``where``, by default among temporary files, which goes with everything in it. Raises OSError."""
    path: Path | None = None
    try:
        with deferred():
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        yield path
    finally:
        if path is not None:
            shutil.rmtree(path, ignore_errors=True)
