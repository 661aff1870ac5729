"""Blocks: objects that are closed at their end, and code in which no garbage is collected or no signal strikes.

Work that builds millions of records spends half of its time in Python's search for cycles.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from typing_extensions import Self


T = TypeVar("T")


class Closing:
    """A context manager that calls ``close`` at the end of the block, also after an exception."""

    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_held: list[None] = []
"""As long as there is anything, collection is off until ``without_collection`` ends."""


def _after_fork() -> None:
    """Turn collection on in the child, where nothing ends that has turned it off."""
    if _held:
        _held.clear()
        gc.enable()


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def without_collection() -> Iterator[None]:
    """Nothing is searched for cycles inside, in any thread; what reference counts free is freed as ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    _held.extend([None] * was_enabled)
    try:
        yield
    finally:
        if was_enabled:
            del _held[:1]
            gc.enable()


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
    # None: Python did not install the handler and could not restore it.
    before = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) is not None
    }
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
def setting(variable: ContextVar[T], value: T) -> Iterator[T]:
    """``variable`` has this value inside."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
