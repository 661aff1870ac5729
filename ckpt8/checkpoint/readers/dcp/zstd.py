"""A file whose slices zstd compressed one by one, as if they were not compressed.

Reading decodes a slice as a whole into a temporary file without a name; a few of these exist at a time. The bytes
outside the storages of a slice are few and read often: another temporary file keeps them until the file closes.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial

import zstandard

from ckpt8.checkpoint.tree import StorageInfo, cut_by_runs, gaps
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.source_file import ByteRange, SourceFile

MAX_DECODED = 6
"""Decoded slices that stay: those of one unit, and of the next."""

_HEAD_BYTES, _BLOCK_HEAD, _CHECKSUM = 18, 3, 4
_MAX_BLOCK = 128 * 1024
_BLOCKS = 8
"""Blocks that are decoded at once: a mebibyte."""

_MAX_WINDOW = 1 << 27
_MAX_KEPT = 1 << 20


class _Spool:
    """A temporary file without a name. It closes when nothing refers to it any more. Raises OutputError."""

    def __init__(self) -> None:
        self._descriptor = -1
        try:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as exc:
            raise _unwritten(exc) from exc
        self.size = 0

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def append(self, content: bytes) -> None:
        """Write at the end."""
        view = memoryview(content)
        try:
            while view:
                written = os.pwrite(self._descriptor, view, self.size)
                self.size, view = self.size + written, view[written:]
        except OSError as exc:
            raise _unwritten(exc) from exc

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``, all of them written before."""
        done = 0
        while done < len(buffer):
            done += os.preadv(self._descriptor, [buffer[done:]], offset + done)


class DecodedFile(SourceFile):
    """``file`` with its compressed ``pieces`` decoded. Thread-safe.

    ``pieces`` are (offset, length, whether compressed), in order; ``places`` their offsets and lengths in this file.
    ``limits`` are the most bytes that a piece may become, by offset. Raises InputError for damage, and OutputError
    where it cannot write a temporary file.
    """

    def __init__(self, file: SourceFile, pieces: Sequence[tuple[int, int, bool]], limits: Mapping[int, int]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._decode = lru_cache(MAX_DECODED)(partial(_decode, file, limits))
        self._keeper = _Spool()
        self._kept: dict[int, list[tuple[int, int, int]]] = {}
        # Where each run begins here and in the file, and its length there if it is compressed, else -1.
        self._runs: list[tuple[int, int, int]] = []
        self._pieces = pieces
        self.places: list[tuple[int, int]] = []
        position = end = 0
        for offset, length, compressed in pieces:
            self._runs.append((position, end, -1))
            position += offset - end
            self._runs.append((position, offset, length if compressed else -1))
            size = self._decode(offset, length).size if compressed else length
            self.places.append((position, size))
            position, end = position + size, offset + length
        self._runs.append((position, end, -1))
        self.source = ByteRange(file.source.path, 0, position + file.source.length - end)

    def keep(self, piece: int, storages: Sequence[StorageInfo]) -> None:
        """Keep the bytes of a piece outside its ``storages``, whose offsets count from the start of the piece."""
        start, length = self.places[piece]
        kept = self._kept[self._pieces[piece][0]] = []
        for position, size in gaps(storages, length):
            if size <= _MAX_KEPT:
                content = self.read(start + position, size)
                kept.append((position, position + size, self._keeper.size))
                self._keeper.append(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with decoded bytes. Raises InputError."""
        self._check_extent(offset, len(buffer))
        for (_, origin, compressed), at, part in cut_by_runs(self._runs, offset, buffer):
            if compressed < 0:
                self._file.read_into(origin + at, part)
            else:
                self._read_decoded(origin, compressed, at, part)

    def _read_decoded(self, origin: int, length: int, offset: int, buffer: memoryview) -> None:
        for start, stop, place in self._kept.get(origin, ()):
            if start <= offset and offset + len(buffer) <= stop:
                self._keeper.read_into(place + offset - start, buffer)
                return
        with self._lock:
            decoded = self._decode(origin, length)
        decoded.read_into(offset, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Drop the decoded slices."""
        self._decode.cache_clear()


def _decode(file: SourceFile, limits: Mapping[int, int], offset: int, length: int) -> _Spool:
    """The decoded bytes of a compressed slice. Raises InputError."""
    where = f"{file.source}: the compressed slice at byte {offset}"
    machine = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
    target = _Spool()
    try:
        for start, stop in _blocks(file, offset, length, where):
            content = machine.decompress(file.read(start, stop - start))
            if target.size + len(content) > limits[offset]:
                raise InputError(f"{where}: becomes more than the {limits[offset]} bytes that it may have")
            target.append(content)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: cannot be decompressed: {exc}") from exc
    if not machine.eof or machine.unused_data:
        raise _misfit(where)
    return target


def _blocks(file: SourceFile, offset: int, length: int, where: str) -> Iterator[tuple[int, int]]:
    """Runs of a few blocks of the one frame (RFC 8878, 3.1.1) that a slice is, each of a bounded decoded size."""
    head = file.read(offset, min(length, _HEAD_BYTES))
    parameters = zstandard.get_frame_parameters(head)
    start, end = offset, offset + length
    at = start + zstandard.frame_header_size(head)
    count, last = 0, False
    while not last:
        if at + _BLOCK_HEAD > end:
            raise _misfit(where)
        block = int.from_bytes(file.read(at, _BLOCK_HEAD), "little")
        last, repeated, size = bool(block & 1), block >> 1 & 3 == 1, block >> 3
        at += _BLOCK_HEAD + (1 if repeated else size)
        at += _CHECKSUM if last and parameters.has_checksum else 0
        if size > _MAX_BLOCK or at > end:
            raise _misfit(where)
        count += 1
        if last or count % _BLOCKS == 0:
            yield start, at
            start = at
    if at != end:
        raise _misfit(where)


def _misfit(where: str) -> InputError:
    return InputError(f"{where}: is damaged: its frame does not end where the slice does")


def _unwritten(exc: OSError) -> OutputError:
    return OutputError(f"{tempfile.gettempdir()}: a temporary file cannot be written: {exc.strerror}")
