"""What a store of objects does for its readers."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Stat(NamedTuple):
    """One version of an object: its bytes, the ``tag`` that identifies them, and when it was written (a Unix time)."""

    size: int
    tag: str
    changed: float


class Store(Protocol):
    """The objects of one bucket. Thread-safe.

    All methods try again after passing faults, and raise within 120 seconds of the last byte: InputError in one line,
    UsageError where a package is missing. No exception of a client library leaves them.
    """

    def stat(self, key: str) -> Stat | None:
        """The present version of an object, None where there is none."""

    def first(self, key: str, length: int) -> tuple[Stat, bytes] | None:
        """The present version of an object and its first bytes, at most ``length``, None where there is no object."""

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the version ``tag`` from ``start``. InputError where it is no longer there."""
