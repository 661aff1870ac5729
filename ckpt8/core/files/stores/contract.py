"""What a store of objects does for its readers and its writers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

MOST_LISTED = 100_000
"""Objects that a folder may hold: each thousand is a request, and a thousand ranks write a few thousand."""


class Stat(NamedTuple):
    """One version of an object: its bytes, the ``tag`` that identifies them, and when it was written (a Unix time).

    ``write`` is the id of the Write that made it, empty where ckpt8 did not.
    """

    size: int
    tag: str
    changed: float
    write: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """The making of an object: a new one, or one in place of the version with the tag ``replaces``.

    Its ``id`` stays with the object. It tells a writer whose answer was lost that the object is its own.
    """

    key: str
    replaces: str | None
    id: str = field(default_factory=lambda: secrets.token_hex(16))


Part = Mapping[str, str | int]
"""What a store says of a part that it has received."""


class Readable(Protocol):
    """Objects that can be read. Thread-safe.

    All methods try again after passing faults, and raise within 120 seconds of the last byte: InputError in one line,
    UsageError where a package is missing. No exception of a client library leaves them.
    """

    def stat(self, key: str) -> Stat | None:
        """The present version of an object, None where there is none."""

    def first(self, key: str, length: int) -> tuple[Stat, bytes] | None:
        """The present version of an object and its first bytes, at most ``length``, None where there is no object."""

    def fill(self, key: str, tag: str, start: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with bytes of the version ``tag`` from ``start``. InputError where it is no longer there."""

    def objects(self, prefix: str, *, deep: bool = False) -> Mapping[str, Stat]:
        """What follows the prefix in the names of objects, and their present versions; without slashes unless ``deep``.

        Raises InputError.
        """


class Store(Readable, Protocol):
    """The objects of one bucket. What is said of Readable holds, but writing raises OutputError.

    An object is sent in one request by ``put``, or in parts: ``begin`` gives the name of an upload, ``send`` a part of
    it, in any order. A part sent again takes the place of the first, so the first must have arrived before. Nothing is
    there before ``complete``.
    """

    def put(self, write: Write, content: bytes) -> None:
        """Write an object. OutputError where another is there than the one that is to be replaced."""

    def begin(self, write: Write) -> str:
        """Begin an upload."""

    def send(self, write: Write, upload: str, number: int, content: bytes, is_given_up: Callable[[], bool]) -> Part:
        """Send a part, whose number counts from 1. OutputError as soon as it ``is_given_up``."""

    def complete(self, write: Write, upload: str, parts: Sequence[Part]) -> bool:
        """Make an object of the parts; whether the answer shows that it is of them.

        OutputError where another is there than the one that is to be replaced.
        """

    def abort(self, write: Write, upload: str) -> None:
        """Remove what was sent of an upload, as far as possible. Raises nothing."""

    def tidy(self, write: Write, upload: str) -> None:
        """Remove other uploads to the same key that were left behind long ago, as far as possible. Raises nothing."""

    def delete(self, key: str, tag: str) -> None:
        """Remove the version ``tag`` of an object. OutputError where another is there; none at all is fine."""

    def check(self, write: Write, size: int) -> None:
        """Raise OutputError unless the object is that of ``write``, with this size."""
