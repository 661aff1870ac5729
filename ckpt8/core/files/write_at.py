"""Writes at a position of a file and starts the flush to the disk early."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator

PIECE = 1 << 20
"""Bytes for each call. Larger writes take up to twice as long: the system then looks for large pages."""

_MOST_BUFFERS = 1024
"""The most buffers that one call accepts."""


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the system to start writing a range to the disk, so that the final flush is short."""
    if hasattr(os, "posix_fadvise") and length:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write ``view`` at ``offset`` and start its flush. Raises OSError."""
    start_writeback(descriptor, offset, write_all_at(descriptor, [view], offset))


def write_all_at(descriptor: int, buffers: Iterable[bytes | memoryview], offset: int) -> int:
    """Write all buffers one after the other from ``offset`` on; return the number of bytes. Raises OSError."""
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
    """The buffers cut into pieces, grouped by call."""
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
