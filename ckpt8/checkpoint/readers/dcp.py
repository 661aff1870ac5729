"""The files of torch.distributed.checkpoint, each as a checkpoint of all the slices in it.

A slice is a complete small file of ``torch.save`` that holds one tensor; the slices lie one behind the other. Their
storages are the storages of the file, and all other bytes its skeleton. So a slice comes back in its place and as long
as it was, and ``.metadata`` need not change. Values that are no tensors stay in the skeleton.

``DecodedFile`` is a file whose slices zstd compressed one by one, as if they were not compressed. Reading decodes a
slice as a whole into a temporary file without a name; a few of these exist at a time. The bytes outside the storages of
a slice are few and read often: another temporary file keeps them until the file closes.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from math import prod
from types import MappingProxyType
from typing import Any

import zstandard

from ckpt8.checkpoint.readers import torch_zip
from ckpt8.checkpoint.readers.dcp_metadata import ZSTD, DcpRoles, Metadata, Place, Slice, StateKey
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.tree import (
    Labelled,
    NamedTensor,
    OpenCheckpoint,
    StorageInfo,
    StorageRef,
    TensorRef,
    cut_by_runs,
    gaps,
    iter_leaves,
)
from ckpt8.container.manifest import DCP
from ckpt8.core.errors import InputError, OutputError, UnsupportedError, require
from ckpt8.core.files.atomic import write_all_at
from ckpt8.core.files.source_file import ByteRange, SourceFile, Window
from ckpt8.core.text import shown

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
        self.size = 0
        try:
            with tempfile.TemporaryFile() as file:
                self._descriptor = os.dup(file.fileno())
        except OSError as exc:
            raise _unwritten(exc) from exc

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def append(self, content: bytes) -> None:
        """Write at the end."""
        try:
            self.size += write_all_at(self._descriptor, [content], self.size)
        except OSError as exc:
            raise _unwritten(exc) from exc

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``, all of them written before."""
        done = 0
        while done < len(buffer):
            got = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if got == 0:
                raise OutputError(f"{tempfile.gettempdir()}: a temporary file is shorter than what was written to it")
            done += got


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
            self.places.append((position, self._decode(offset, length).size if compressed else length))
            position, end = position + self.places[-1][1], offset + length
        self._runs.append((position, end, -1))
        self.source = ByteRange(file.source.path, 0, position + file.source.length - end)

    def keep(self, piece: int, storages: Sequence[StorageInfo]) -> None:
        """Keep the bytes of a piece outside its ``storages``, whose offsets count from the start of the piece."""
        start, length = self.places[piece]
        kept = self._kept[self._pieces[piece][0]] = []
        for position, size in gaps(storages, length):
            if size <= _MAX_KEPT:
                content = self.read(start + position, size)  # before it counts as kept: it is not in the keeper yet
                kept.append((position, position + size, self._keeper.size))
                self._keeper.append(content)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with decoded bytes. Raises InputError."""
        self._check_extent(offset, len(buffer))
        for (_, origin, compressed), at, part in cut_by_runs(self._runs, offset, buffer):
            if compressed < 0:
                self._file.read_into(origin + at, part)
                continue
            runs = self._kept.get(origin, ())
            kept = next((place + at - start for start, stop, place in runs if start <= at <= stop - len(part)), None)
            if kept is not None:
                self._keeper.read_into(kept, part)
                continue
            with self._lock:
                decoded = self._decode(origin, compressed)
            decoded.read_into(at, part)

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
        block = int.from_bytes(file.read(at, min(_BLOCK_HEAD, end - at)), "little")
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


MAX_VALUE_BYTES = 64 * 2**20
"""The longest value that is no tensor, such as an option of an optimizer, that the reader accepts."""

_MAX_DECODED_VALUE = 2**30
"""The longest such value that the reader decodes: only its compressed form says how long it may be."""

_KNOWN_BYTES = 4096
"""Options are the same for every parameter: most of these small files are equal byte for byte, and parsed once."""


@dataclass(frozen=True, slots=True)
class DcpMember(DirectoryMember):
    """A file of the distributed checkpoint ``home``; ``parts`` are its slices that hold nothing but a tensor.

    ``slices`` are all that lie in a plain file; none of one in a container.
    """

    home: DcpCheckpoint = field(kw_only=True)
    parts: Sequence[tuple[Slice, TensorRef]] = field(kw_only=True)
    slices: Sequence[Slice] = field(default=(), kw_only=True)


class DcpCheckpoint:
    """A distributed checkpoint, from its ``.metadata``. ``files`` are the slices of each file, which ``open`` opens.

    ``moved`` are the offset and length of decoded slices in their decoded file. ``objects`` are, by name and place, the
    slices in open files that hold more than a plain tensor: those of torchao's state are objects of its classes.
    ``values`` are values that are no tensors, in files that others opened.
    """

    def __init__(self, metadata: Metadata, values: Mapping[str, Window] = MappingProxyType({})) -> None:
        self.metadata = metadata
        self.roles = DcpRoles(metadata)
        self.files: dict[str, list[Slice]] = defaultdict(list)
        for piece in sorted(metadata.slices, key=lambda piece: (piece.offset, piece.length)):
            self.files[piece.path].append(piece)
        self.moved: dict[Slice, tuple[int, int]] = {}
        self._values = dict(values)
        self.objects: dict[str, dict[Place, Window]] = defaultdict(dict)
        self._known: dict[bytes, OpenCheckpoint] = {}

    def open(
        self, path: str, file: SourceFile, member: str, *, decode: bool, only: Container[Slice] | None = None
    ) -> DcpMember:
        """Open the file ``path`` of the checkpoint, the ``member`` of a directory; ``decode`` decompresses it.

        Slices of tensors that are not in ``only`` are left unread. Raises InputError where the metadata says otherwise,
        UnsupportedError for a slice that no reader reads.
        """
        pieces = self.files[path]
        transforms = {transform for piece in pieces for transform in piece.transforms}
        if unknown := transforms - {ZSTD}:
            raise UnsupportedError(f"its slices are transformed by {shown(min(unknown))}, which is not known")
        require(
            not transforms or decode,
            "its slices are compressed with zstd, and are encoded with any preset but lossless",
            UnsupportedError,
        )
        _check_slices(pieces, file)
        decoded = None
        if transforms:
            compressed = [(piece.offset, piece.length, bool(piece.transforms)) for piece in pieces]
            decoded = file = DecodedFile(file, compressed, {piece.offset: self._limit(piece) for piece in pieces})
        places = {} if decoded is None else dict(zip(pieces, decoded.places, strict=True))
        storages: list[StorageInfo] = []
        tensors: list[NamedTensor] = []
        parts: list[tuple[Slice, TensorRef]] = []
        opaque: set[str] = set()
        for number, piece in enumerate(pieces):
            offset, length = places.get(piece, (piece.offset, piece.length))
            window = Window(file, offset, length, f"slice {shown(piece.name)}")
            is_read = piece.place is not None and (only is None or piece in only)
            opened = self._open_slice(piece, window) if is_read else None
            if decoded is not None:
                decoded.keep(number, () if opened is None else opened.storages)
            if piece.place is None:
                self._values[piece.name] = window
            if opened is None:
                continue
            storages += [
                replace(
                    storage,
                    key=_key(number, storage.key),
                    offset=offset + storage.offset,
                    crc_fields=tuple(offset + place for place in storage.crc_fields),
                    zero_fields=tuple(offset + place for place in storage.zero_fields),
                )
                for storage in opened.storages
            ]
            if isinstance(opened.tree, TensorRef):
                ref = replace(opened.tree, key=_key(number, opened.tree.key))
                tensors.append(self.named(piece, ref))
                parts.append((piece, ref))
            elif piece.place is not None:
                self.objects[piece.name][piece.place] = window
                if self.metadata.is_whole(piece):
                    self._values[piece.name] = window
                opaque |= {_key(number, leaf.key) for _, leaf in iter_leaves(opened.tree)}
        self.moved |= places
        checkpoint = OpenCheckpoint(DCP, file, storages, Labelled(tuple(tensors), frozenset(opaque)))
        reason = "its slices were compressed with zstd; they come back as they were before that" if decoded else None
        return DcpMember(member, checkpoint, reason, home=self, parts=parts, slices=pieces)

    def named(self, piece: Slice, ref: TensorRef) -> NamedTensor:
        """A slice of a tensor with its name and role."""
        suffix = self.metadata.suffix(piece)
        return NamedTensor(piece.name + suffix, self.roles.role(piece.name), ref, piece.name if suffix else None)

    def _limit(self, piece: Slice) -> int:
        """The most bytes that a slice can have: those of its tensor, or of a value, and a pickle around them."""
        if piece.place is None:
            return _MAX_DECODED_VALUE
        return 2 * prod(piece.place[1]) * self.metadata.tensors[piece.name].dtype.itemsize + 2**20

    def _open_slice(self, piece: Slice, window: Window) -> OpenCheckpoint:
        """One slice as a checkpoint. Raises InputError where the metadata says otherwise."""
        checkpoint = torch_zip.read(window)
        tree = checkpoint.tree
        expected = self.metadata.tensors[piece.name].dtype, piece.place[1] if piece.place else ()
        if isinstance(tree, StorageRef) or (isinstance(tree, TensorRef) and (tree.dtype, tree.shape) != expected):
            raise InputError(f"{window.source}: has another shape or element type than .metadata says")
        return checkpoint

    def value(self, name: str) -> Any:
        """A value that is no tensor, as an inert tree; None where it is damaged or missing."""
        try:
            return None if name not in self._values else self.open_value(name).tree
        except InputError:
            return None

    def part(self, name: str, place: Place) -> OpenCheckpoint | None:
        """A part of a tensor that is more than a plain tensor, as a checkpoint of its own; None without such a part."""
        window = self.objects.get(name, {}).get(place)
        return None if window is None else torch_zip.read(window)

    def content(self, name: str) -> bytes:
        """A value that is no tensor, as torch.save wrote it. Raises InputError, and KeyError as ``open_value``."""
        return self._values[name].read(0, self._values[name].source.length)

    def open_value(self, name: str) -> OpenCheckpoint:
        """A value that is no tensor, as a checkpoint of its own.

        Raises InputError where it is damaged or too long, KeyError for a name that no open file has.
        """
        window = self._values[name]
        if window.source.length > MAX_VALUE_BYTES:
            raise InputError(f"{window.source}: has {window.source.length} bytes, more than {MAX_VALUE_BYTES}")
        content = self.content(name)
        known = self._known.get(content) or torch_zip.read(window)
        if len(content) <= _KNOWN_BYTES:
            self._known[content] = known
        return known

    def state_values(self, key: StateKey) -> dict[str, Any]:
        """The values in the state of a parameter that are no tensors, such as a number as the step."""
        names = self.roles.values[key.optimizer, key.parameter]
        return {other: self.value(name) for other, name in names.items() if name in self._values}


def _check_slices(pieces: Sequence[Slice], file: SourceFile) -> None:
    end = 0
    for piece in pieces:
        if piece.offset < end:
            raise InputError(f"{file.source}: slice {shown(piece.name)} overlaps the one before it")
        end = piece.offset + piece.length
        if end > file.source.length:
            raise InputError(
                f"{file.source}: slice {shown(piece.name)} ends at byte {end} of {file.source.length}; "
                "copy or download the file again"
            )


def _key(number: int, key: str) -> str:
    return f"{number}:{key}"
