"""A file whose slices are compressed one by one, read as if they were not compressed.

A slice is decoded as a whole into a temporary file without a name; a few of these exist at a time. The bytes outside
the storages of a slice are few and read often: another temporary file keeps them for as long as the file is open.
"""

from __future__ import annotations

import os
import tempfile
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence

import zstandard

from ckpt8.checkpoint.tree import StorageInfo, gaps
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.source_file import ByteRange, SourceFile

MAX_DECODED = 6
"""Decoded slices that are kept: those of one unit, and of the next."""

_HEAD_BYTES, _BLOCK_HEAD, _CHECKSUM = 18, 3, 4
_MAX_BLOCK = 128 * 1024
_BLOCKS = 8
"""Blocks decoded at once: a mebibyte."""

_MAX_WINDOW = 1 << 27
_MAX_KEPT = 1 << 20


class _Spool:
    """A temporary file without a name; it is closed when nothing refers to it any more. Raises OutputError."""

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
        """Fill ``buffer`` with the bytes at ``offset``, all of which were written."""
        done = 0
        while done < len(buffer):
            done += os.preadv(self._descriptor, [buffer[done:]], offset + done)


class DecodedFile(SourceFile):
    """``pieces`` of ``file`` are (offset, length, whether compressed), in order; ``limits`` bound what they become.

    ``places`` are their offsets and lengths here. Bytes between them are as they were. Thread-safe. Raises InputError
    for damage, and OutputError where a temporary file cannot be written.
    """

    def __init__(self, file: SourceFile, pieces: Sequence[tuple[int, int, bool]], limits: Mapping[int, int]) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._decoded: OrderedDict[int, _Spool] = OrderedDict()
        self._keeper = _Spool()
        self._kept: dict[int, list[tuple[int, int, int]]] = {}
        # Where each run begins here and in the file, and how long it is there if it is compressed, else -1.
        self._runs: list[tuple[int, int, int]] = []
        self._limits = limits
        self.places: list[tuple[int, int]] = []
        position = end = 0
        for offset, length, compressed in pieces:
            self._runs.append((position, end, -1))
            position += offset - end
            self._runs.append((position, offset, length if compressed else -1))
            size = self._decode(len(self._runs) - 1).size if compressed else length
            self.places.append((position, size))
            position, end = position + size, offset + length
        length = position + file.source.length - end
        self._runs += [(position, end, -1), (length, 0, -1)]
        self.source = ByteRange(file.source.path, 0, length)

    def _run_at(self, offset: int) -> int:
        return bisect_right(self._runs, offset, key=lambda run: run[0]) - 1

    def keep(self, piece: int, storages: Sequence[StorageInfo]) -> None:
        """Keep what lies outside the storages of a piece, whose offsets count from its start."""
        start, length = self.places[piece]
        run = self._run_at(start)
        kept = []
        for position, size in gaps(storages, length):
            if size <= _MAX_KEPT:
                content = self.read(start + position, size)
                kept.append((position, position + size, self._keeper.size))
                self._keeper.append(content)
        self._kept[run] = kept

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with decoded bytes. Raises InputError."""
        if offset < 0 or offset + len(buffer) > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + len(buffer)}")
        while buffer:
            run = self._run_at(offset)
            length = min(len(buffer), self._runs[run + 1][0] - offset)
            self._read_run(run, offset - self._runs[run][0], buffer[:length])
            offset, buffer = offset + length, buffer[length:]

    def _read_run(self, run: int, offset: int, buffer: memoryview) -> None:
        _, origin, compressed = self._runs[run]
        if compressed < 0:
            self._file.read_into(origin + offset, buffer)
            return
        for start, stop, place in self._kept.get(run, ()):
            if start <= offset and offset + len(buffer) <= stop:
                self._keeper.read_into(place + offset - start, buffer)
                return
        with self._lock:
            decoded = self._decode(run)
        decoded.read_into(offset, buffer)

    def _decode(self, run: int) -> _Spool:
        """A run decoded."""
        decoded = self._decoded.pop(run, None)
        if decoded is None:
            _, offset, length = self._runs[run]
            decoded = self._spool(offset, length)
        self._decoded[run] = decoded
        if len(self._decoded) > MAX_DECODED:
            self._decoded.popitem(last=False)
        return decoded

    def _spool(self, offset: int, length: int) -> _Spool:
        where = f"{self._file.source}: the compressed slice at byte {offset}"
        machine = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW).decompressobj()
        target = _Spool()
        try:
            for start, stop in self._blocks(offset, length, where):
                content = machine.decompress(self._file.read(start, stop - start))
                if target.size + len(content) > self._limits[offset]:
                    raise InputError(f"{where}: becomes more than the {self._limits[offset]} bytes that it may have")
                target.append(content)
        except zstandard.ZstdError as exc:
            raise InputError(f"{where}: cannot be decompressed: {exc}") from exc
        if not machine.eof or machine.unused_data:
            raise _misfit(where)
        return target

    def _blocks(self, offset: int, length: int, where: str) -> Iterator[tuple[int, int]]:
        """Runs of a few blocks of the one frame (RFC 8878, 3.1.1) that a slice is: what one can become is bounded."""
        head = self._file.read(offset, min(length, _HEAD_BYTES))
        parameters = zstandard.get_frame_parameters(head)
        start, end = offset, offset + length
        at = start + zstandard.frame_header_size(head)
        count, last = 0, False
        while not last:
            if at + _BLOCK_HEAD > end:
                raise _misfit(where)
            block = int.from_bytes(self._file.read(at, _BLOCK_HEAD), "little")
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

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Drop the decoded slices."""
        self._decoded.clear()


def _misfit(where: str) -> InputError:
    return InputError(f"{where}: is damaged: its frame does not end where the slice does")


def _unwritten(exc: OSError) -> OutputError:
    return OutputError(f"{tempfile.gettempdir()}: a temporary file cannot be written: {exc.strerror}")
