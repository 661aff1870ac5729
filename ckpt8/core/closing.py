"""A base for objects that are closed at the end of a ``with`` block, and work without garbage collection.

Work that builds millions of records spends half of its time in Python's search for cycles.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Self


class Closing:
    """A context manager that calls ``close`` at the end of the block, also after an exception."""

    def close(self) -> None:
        """Release what the object holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextmanager
def without_collection() -> Iterator[None]:
    """Nothing is searched for cycles inside, in any thread; what reference counts free is freed as ever."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
