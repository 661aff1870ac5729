"""Packs chunks (reads, encodes, measures) and stores them (compresses), in worker threads.

A packed chunk no longer needs its source: a save in the background returns to its caller between the two.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import Copied, Run
from ckpt8.codecs.rounded_copy import ROUNDED
from ckpt8.compressing.deltas import OpenBase
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Refusal, Stream, Unit
from ckpt8.container import frames, packing
from ckpt8.container.manifest import Packing
from ckpt8.core.arrays import Array, Arrays, numpy_type, rounded
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.files.source_file import crc32
from ckpt8.core.gpu import padded
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers, scratch_array

P = TypeVar("P")

Work = tuple[Unit, int]
"""A unit and the number of a chunk of it."""


@dataclass(slots=True)
class Chunk(Generic[P]):
    """An encoded chunk of a unit: its parts by stream and name.

    ``crcs`` are the crc32 of the source bytes by stream, 0 where the source states none. ``refused`` is the reason why
    a codec refused the chunk, which then has no parts. ``packings`` say how the parts that hold symbols are packed.
    """

    parts: list[dict[str, P]]
    crcs: list[int]
    errors: UnitErrors = field(default_factory=UnitErrors)
    refused: Refusal | None = None
    packings: list[dict[str, Packing]] = field(default_factory=list)


PackedChunk = Chunk[Array]
"""Its parts are arrays: symbols are packed into planes of bytes."""

EncodedChunk = Chunk[frames.Frames]
"""Its parts are compressed."""


def read_chunk(checkpoint: Checkpoint, stream: Stream, chunk: int, slot: int) -> tuple[Array, int]:
    """Read one chunk of a stream into this thread's buffer for ``slot``; return it and its crc32, as ``read_bytes``."""
    spec = stream.chunk_spec(chunk)
    x = scratch_array(slot, numpy_type(spec.dtype), spec.numel)
    return x, read_bytes(checkpoint, stream, chunk, x.view(np.uint8).data)


def read_bytes(checkpoint: Checkpoint, stream: Stream, chunk: int, view: memoryview) -> int:
    """Fill ``view`` with one chunk of a stream; return the crc32 of its bytes, or 0 where the source states none."""
    checkpoint.read_into(stream.storage.offset + chunk * frames.FRAME * stream.spec.dtype.itemsize, view)
    return crc32(view) if stream.storage.crc32 is not None else 0


def check_source(unit: Unit, crcs: Sequence[int], source: str) -> None:
    """Raise InputError where the bytes of a storage do not have the crc32 that the source states."""
    for stream, crc in zip(unit.streams, crcs, strict=True):
        if stream.storage.crc32 is not None and stream.storage.crc32 != crc:
            raise InputError(f"{source}: {stream.spec.name}: checksum and bytes do not match; the file is damaged")


def read_master(checkpoint: Checkpoint, run: Run) -> Array:
    """The fp32 elements of a run, valid until this thread asks for the next. Raises InputError."""
    assert run.storage is not None  # noqa: S101 - padding has no master
    x = scratch_array("master", np.float32, run.length)
    storage = checkpoint.storages[run.storage]
    checkpoint.read_into(storage.offset + run.start * DType.FLOAT32.itemsize, x.view(np.uint8).data)
    return x


def rounded_masters(checkpoint: Checkpoint, copied: Copied, copy: DType, first: int, count: int) -> Array:
    """The bits of ``count`` elements of a copy from ``first`` on as its masters give them, rounded.

    ``copy`` is its element type. Raises InputError.
    """
    out, at, dtype = np.empty(count, np.uint16), 0, copied.rounded_type(copy)
    for run in copied.cut(first, count):
        piece = out[at : at + run.length]
        piece[:] = run.start if run.storage is None else rounded(read_master(checkpoint, run), dtype)
        at += run.length
    return out


def store(packed: PackedChunk, *, copy: bool = False) -> EncodedChunk:
    """Compress a packed chunk. With ``copy``, the result shares no memory with it."""
    stored = [frames.encode_parts(*pair, copy=copy) for pair in zip(packed.parts, packed.packings, strict=True)]
    return Chunk(stored, packed.crcs, packed.errors, packed.refused, packed.packings)


def in_own_pages(packed: PackedChunk) -> PackedChunk:
    """The chunk with its parts in memory pages of its own, which the system gets back when the chunk is freed.

    The allocator would keep much of them: parts of other chunks lie in between.
    """
    total = sum(padded(part.nbytes) for parts in packed.parts for part in parts.values())
    if not total:
        return packed
    pages, at = np.frombuffer(mmap.mmap(-1, total), np.uint8), 0
    copies = list[dict[str, Array]]()
    for parts in packed.parts:
        copies.append({})
        for name, part in parts.items():
            copy = copies[-1][name] = pages[at : at + part.nbytes].view(part.dtype)
            copy[:] = part
            at += padded(part.nbytes)
    return replace(packed, parts=copies)


class ChunkEncoder:
    """Reads chunks of units of one checkpoint and encodes them on the CPU; some as differences to those of ``base``."""

    def __init__(self, checkpoint: Checkpoint, *, measure: bool, base: OpenBase | None = None) -> None:
        self.checkpoint = checkpoint
        self.base = base
        self.measures = measure
        self.lockstep = Lockstep(checkpoint)

    def packed(self, work: Iterable[Work], workers: Workers) -> Iterator[PackedChunk]:
        """Packed chunks in the order of ``work``, in memory of their own."""
        return workers.map(lambda item: in_own_pages(self.pack(item)), work)

    def stored(self, work: Iterable[Work], workers: Workers) -> Iterator[EncodedChunk]:
        """Compressed chunks in the order of ``work``; each thread packs and compresses."""
        return workers.map(self._store, work)

    def _store(self, work: Work) -> EncodedChunk:
        """Read, pack and compress one chunk; its streams share one buffer for symbols. Thread-safe."""
        chunk = self.encode(work, reuse=True)
        stored, packings = [], []
        for parts in chunk.parts:
            packed, how = packing.packed(parts, self.lockstep.backend, reuse=True)
            stored.append(frames.encode_parts(packed, how, copy=bool(how)))
            packings.append(how)
        return EncodedChunk(stored, chunk.crcs, chunk.errors, chunk.refused, packings)

    def pack(self, work: Work) -> PackedChunk:
        """Read and pack one chunk. Thread-safe."""
        chunk = self.encode(work, reuse=True)
        packed = [self.pack_symbols(parts) for parts in chunk.parts]
        return replace(chunk, parts=[parts for parts, _ in packed], packings=[packings for _, packings in packed])

    def pack_symbols(self, parts: Arrays) -> tuple[dict[str, Array], dict[str, Packing]]:
        """The parts with their symbols packed, and how each of these is."""
        return packing.packed(parts, self.lockstep.backend)

    def encode(self, work: Work, *, reuse: bool = False) -> PackedChunk:
        """Read and encode one chunk; its symbols are not packed. Thread-safe.

        With ``reuse`` symbols are in buffers of this thread, until it encodes again.
        """
        unit, chunk = work
        read = [read_chunk(self.checkpoint, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
        originals, crcs = [x for x, _ in read], [crc for _, crc in read]
        first = chunk * frames.FRAME
        storage = None
        try:
            if unit.streams[0].codec.copied is not None:
                pairs = zip(unit.streams, originals, strict=True)
                return PackedChunk([self._encode_copy(stream, x, first) for stream, x in pairs], crcs)
            bases = [self.base_parts(stream, chunk) for stream in unit.streams]
            parts, errors = self.lockstep.encode(unit, first, originals, bases, measure=self.measures, reuse=reuse)
            for k, below in enumerate(bases):
                if below is not None:
                    storage = unit.streams[k].index
                    parts[k] = packing.difference(parts[k], below, self.lockstep.backend)
        except RefusedError as exc:
            return PackedChunk([], crcs, refused=Refusal(str(exc), storage if exc.storage is None else exc.storage))
        return PackedChunk(parts, crcs, errors)

    def base_parts(self, stream: Stream, chunk: int) -> Arrays | None:
        """The parts of the base that a chunk is kept as a difference to. Raises BrokenBaseError."""
        if stream.base is None or self.base is None:
            return None
        return self.base.parts(stream.base, chunk, stream.codec)

    def finish(self, unit: Unit, errors: UnitErrors) -> None:
        """Complete the errors of a unit whose chunks are all merged, while its source is as it was."""
        if self.measures:
            self.lockstep.meter.finish(unit, errors)

    def _encode_copy(self, stream: Stream, x: Array, first: int) -> dict[str, Array]:
        """The parts of the elements ``x`` of a copy from ``first`` on. Raises RefusedError."""
        codec, spec = stream.codec, stream.spec._replace(shape=(x.size,))
        assert codec.copied is not None  # noqa: S101 - the caller looked
        rounded = rounded_masters(self.checkpoint, codec.copied, spec.dtype, first, x.size)
        return codec.encode_arrays(x, spec, backend=self.lockstep.backend, companions={ROUNDED: rounded})
