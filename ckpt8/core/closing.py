"""A base for objects that are closed at the end of a ``with`` block, and work without garbage collection.

Work that builds millions of records spends half of its time in Python's search for cycles.
"""

from __future__ import annotations

import gc
import os
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
def setting(variable: ContextVar[T], value: T) -> Iterator[T]:
    """``variable`` has this value inside."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)
