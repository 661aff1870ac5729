"""Writing at a place of a file, and getting it to the disk early."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

PIECE = 1 << 20
"""Bytes of one call: with more the system looks for large pages, which takes up to twice as long."""

_MOST_BUFFERS = 1024
"""Buffers that one call can take."""


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
    for call in _calls(buffers):
        while call:
            written = os.pwritev(descriptor, call, offset)
            offset += written
            while call and written >= len(call[0]):
                written -= len(call.pop(0))
            if call:
                call[0] = call[0][written:]
    return offset - start


def _calls(buffers: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """What to write at once."""
    call: list[memoryview] = []
    room = PIECE
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            call.append(view[:room])
            view, room = view[room:], room - len(call[-1])
            if not room or len(call) == _MOST_BUFFERS:
                yield call
                call, room = [], PIECE
    yield call
