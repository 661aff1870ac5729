"""Writing at a place of a file, and getting it to the disk early."""

from __future__ import annotations

import os
from collections.abc import Iterable

_PIECE = 1 << 20
"""Bytes of one call: with more the system looks for large pages, which takes up to twice as long."""


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel begin to write a range to the disk, so that the flush at the end finds little left to do."""
    if hasattr(os, "posix_fadvise") and length:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write all of ``view`` at ``offset``, and let it go to the disk. Raises OSError."""
    start_writeback(descriptor, offset, write_all_at(descriptor, [view], offset))


def write_all_at(descriptor: int, buffers: Iterable[bytes | memoryview], offset: int) -> int:
    """Write all buffers, one behind the other, from ``offset`` on; the number of bytes. Raises OSError."""
    start = offset
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            written = os.pwrite(descriptor, view[:_PIECE], offset)
            view, offset = view[written:], offset + written
    return offset - start
