"""Writing at a place of a file, and getting it to the disk early."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

_MOST_BUFFERS = 512
"""Buffers of one call: no system takes fewer than 1024."""


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel begin to write a range to the disk, so that the flush at the end finds little left to do."""
    if hasattr(os, "posix_fadvise") and length:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``, and let it go to the disk. Raises OSError."""
    start_writeback(descriptor, offset, write_all_at(descriptor, [view], offset))


def write_all_at(descriptor: int, buffers: Sequence[bytes | memoryview], offset: int) -> int:
    """Write all buffers, one behind the other, from ``offset`` on; the number of bytes. Raises OSError."""
    start = offset
    for first in range(0, len(buffers), _MOST_BUFFERS):
        some: list[bytes | memoryview] = list(buffers[first : first + _MOST_BUFFERS])
        while some:
            written = os.pwritev(descriptor, some, offset)
            offset += written
            some = list(_rest(some, written))
    return offset - start


def _rest(buffers: Sequence[bytes | memoryview], written: int) -> Iterator[bytes | memoryview]:
    """What is left of buffers of which the first ``written`` bytes are done."""
    for buffer in buffers:
        if written < len(buffer):
            yield memoryview(buffer)[written:] if written else buffer
        written = max(0, written - len(buffer))
