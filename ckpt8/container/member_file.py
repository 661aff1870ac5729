"""A member of a container as the file that it was: seekable, read-only, decoded where it is read.

Bytes outside the storages come from the skeleton; storages are decoded chunk by chunk. A storage may come back with
other values. The checksums that the source kept of it are then zero until ``patch_crc`` sets them: torch does not look
at them, and ``restore`` sets them at its end.
"""

import io
import os
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ckpt8.container import frames
from ckpt8.container.checks import CRC_BYTES, member_runs
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import array_at
from ckpt8.core.errors import Ckpt8Error
from ckpt8.core.grouping import grouped
from ckpt8.core.workers import Workers

_RUN_BYTES = 1 << 18
"""Bytes of small pieces for one thread and one write: a call for each of many small tensors takes longer than they."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes ``start`` to ``stop`` of the member. They are those from ``origin`` on of one chunk."""

    start: int
    stop: int
    storage: int
    chunk: int
    origin: int


class MemberFile(io.RawIOBase):
    """Reads one member. ``workers`` decode large reads in parallel; reads are safe from one thread at a time."""

    def __init__(self, reader: ContainerReader, member: int, workers: Workers | None = None) -> None:
        super().__init__()
        self._reader, self._workers, self._position = reader, workers, 0
        self._runs = member_runs(reader.manifest, member, str(reader.path))
        self._starts = [run.start for run in self._runs]
        record = reader.manifest.members[member]
        self.size, self.name, self._skeleton = record.size, record.path, record.skeleton
        self._crc_fields = grouped((storage, place) for place, storage in record.crc_fields)
        self._patches = {place: bytes(CRC_BYTES) for place, _ in record.crc_fields}
        self._places = sorted(self._patches)
        # By whether it is of the skeleton: small reads take turns between that and tensors.
        self._last: dict[bool, tuple[tuple[int, int], bytearray]] = {}
        self.error: Ckpt8Error | None = None
        """The error of the last failed read."""

    def needs_crc(self, storage: int) -> bool:
        """Whether the member repeats the checksum of a storage."""
        return storage in self._crc_fields

    def patch_crc(self, storage: int, crc32: int) -> list[tuple[int, bytes]]:
        """Set the checksum of a storage: (offset, bytes) of every field that holds it."""
        fields = [(place, crc32.to_bytes(CRC_BYTES, "little")) for place in self._crc_fields.get(storage, [])]
        self._patches.update(fields)
        return fields

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position; as for any file. Raises ValueError."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.size}.get(whence)
        if base is None or base + offset < 0:
            raise ValueError(f"cannot seek to {offset} from {whence}")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill ``buffer`` as far as the member goes; the number of bytes. Raises InputError."""
        view, start = memoryview(buffer).cast("B"), self._position
        length = max(0, min(len(view), self.size - start))
        try:
            self._read(view, start, list(self.pieces(start, start + length)))
        except Ckpt8Error as exc:
            self.error = exc
            raise
        self._position += length
        return length

    def _read(self, view: memoryview, start: int, pieces: list[Piece]) -> None:
        if self._workers is not None and len(pieces) > 2 and len(view) > _RUN_BYTES:
            for _ in self._workers.map(lambda piece: self.fill(piece, view[piece.start - start :]), pieces):
                pass
        else:
            for piece in pieces:
                self.fill(piece, view[piece.start - start :], keep=True)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """The bytes ``start`` to ``stop`` cut at the borders of storages and chunks."""
        at = bisect_right(self._starts, start) - 1
        while start < stop:
            run = self._runs[at]
            chunk_bytes = frames.FRAME * self._reader.manifest.storages[run.storage].dtype.itemsize
            origin = run.origin + start - run.start
            end = min(stop, run.stop, start - origin % chunk_bytes + chunk_bytes)
            yield Piece(start, end, run.storage, origin // chunk_bytes, origin % chunk_bytes)
            start = end
            at += start == run.stop

    def batches(self) -> Iterator[list[list[Piece]]]:
        """All pieces of the member, in batches of runs for one thread. A run is pieces that follow each other.

        A batch is a run of small pieces, or a chunk and before it those that it is decoded with, each a run of its own.
        The pieces of each storage come in order. They come in that of the container where it is best read so.
        """
        if not self._reader.in_order:
            return self._batches()
        start_of = self._reader.start_of
        # The skeleton, of which there is a little in most runs, is the last of the container.
        return iter(
            sorted(
                self._batches(),
                key=lambda batch: min(start_of(piece.storage, piece.chunk) for run in batch for piece in run),
            )
        )

    def _batches(self) -> Iterator[list[list[Piece]]]:
        run: list[Piece] = []
        for batch in self._chunks():
            if run and (len(batch) > 1 or batch[0].start != run[-1].stop or batch[0].stop - run[0].start > _RUN_BYTES):
                yield [run]
                run = []
            if len(batch) > 1:
                yield [[piece] for piece in batch]
            else:
                run += batch
        if run:
            yield [run]

    def _chunks(self) -> Iterator[list[Piece]]:
        """Every piece, with those before it that it is decoded with."""
        storages = self._reader.manifest.storages
        starts = {run.storage: run.start for run in self._runs if run.storage != self._skeleton}
        companions = {index: self._reader.codec(index).companion_storages.values() for index in starts}
        owners = {other: index for index, companion in companions.items() for other in companion if other in starts}
        for piece in self.pieces(0, self.size):
            if piece.storage not in owners:
                first = piece.chunk * frames.FRAME
                before = [
                    next(self.pieces(starts[other] + first * storages[other].dtype.itemsize, self.size))
                    for other in companions.get(piece.storage, ())
                    if owners.get(other) == piece.storage
                ]
                yield [*before, piece]

    def expect(self) -> None:
        """Say that the member will be read from its beginning to its end."""
        self._reader.expect_each(run.storage for run in self._runs)

    def fill(self, piece: Piece, view: memoryview, *, keep: bool = False) -> None:
        """Decode one piece into the start of ``view``. Thread-safe. With ``keep`` the next read may use its chunk."""
        target = view[: piece.stop - piece.start]
        last = self._last.get(piece.storage == self._skeleton)
        if last is not None and last[0] == (piece.storage, piece.chunk):
            target[:] = memoryview(last[1])[piece.origin : piece.origin + len(target)]
        else:
            self._fill_anew(piece, target, keep=keep or piece.storage == self._skeleton)
        if piece.storage == self._skeleton:
            self._patch(piece, target)

    def lend(self, piece: Piece, content: memoryview) -> None:
        """Let the next chunk that this thread decodes take the ``content`` of a piece, if it needs all of that."""
        spec = self._reader.chunk_spec(piece.storage, piece.chunk)
        if len(content) == spec.numel * spec.dtype.itemsize:
            self._reader.lend(piece.storage, piece.chunk, array_at(content, spec.dtype))

    def _fill_anew(self, piece: Piece, target: memoryview, *, keep: bool) -> None:
        """Decode a chunk: straight into ``target`` where it takes all of it. With ``keep`` small reads use it again."""
        record = self._reader.manifest.storages[piece.storage]
        length = min(record.numel - piece.chunk * frames.FRAME, frames.FRAME) * record.dtype.itemsize
        out = array_at(target, record.dtype) if len(target) == length else None
        if out is not None and out.flags.aligned:
            self._reader.fill_chunk(piece.storage, piece.chunk, out)
            return
        chunk = bytearray(length)
        self._reader.fill_chunk(piece.storage, piece.chunk, array_at(memoryview(chunk), record.dtype))
        if keep:
            self._last[piece.storage == self._skeleton] = (piece.storage, piece.chunk), chunk
        target[:] = memoryview(chunk)[piece.origin : piece.origin + len(target)]

    def _patch(self, piece: Piece, target: memoryview) -> None:
        """Write the checksum fields over a piece of the skeleton; a field may begin or end outside the piece."""
        begin = bisect_left(self._places, piece.start - CRC_BYTES + 1)
        for place in self._places[begin : bisect_left(self._places, piece.stop, begin)]:
            first, last = max(place, piece.start), min(place + CRC_BYTES, piece.stop)
            target[first - piece.start : last - piece.start] = self._patches[place][first - place : last - place]
