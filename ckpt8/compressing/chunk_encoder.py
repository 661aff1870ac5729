"""Packs chunks (reads, encodes, measures) and stores them (compresses), in worker threads.

A packed chunk no longer needs its source: a save in the background returns to its caller between the two.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Generic, TypeVar

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import Copied, Run
from ckpt8.codecs.rounded_copy import ROUNDED, round_to
from ckpt8.compressing.deltas import OpenBase
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Refusal, Stream, Unit
from ckpt8.container import frames, symbols
from ckpt8.container.manifest import Packing
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.files.source_file import crc32
from ckpt8.core.gpu import CudaTransfer, Mark, copy_to_row, cut_row, padded, row_bytes
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Parts
from ckpt8.core.workers import Buffers, Workers, scratch_elements

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


PackedChunk = Chunk["torch.Tensor"]
"""Its parts are tensors, on the CPU unless a device still has them: symbols are packed into planes of bytes."""

EncodedChunk = Chunk[frames.Frames]
"""Its parts are compressed."""


def read_chunk(checkpoint: Checkpoint, stream: Stream, chunk: int, slot: int) -> tuple[torch.Tensor, int]:
    """Read one chunk of a stream into this thread's buffer for ``slot``; return it and its crc32, as ``read_bytes``."""
    spec = stream.chunk_spec(chunk)
    x = scratch_elements(slot, spec.dtype.torch, spec.numel)
    return x, read_bytes(checkpoint, stream, chunk, frames.bytes_of(x))


def read_bytes(checkpoint: Checkpoint, stream: Stream, chunk: int, view: memoryview) -> int:
    """Fill ``view`` with one chunk of a stream; return the crc32 of its bytes, or 0 where the source states none."""
    checkpoint.read_into(stream.storage.offset + chunk * frames.FRAME * stream.spec.dtype.itemsize, view)
    return crc32(view) if stream.storage.crc32 is not None else 0


def check_source(unit: Unit, crcs: Sequence[int], source: str) -> None:
    """Raise InputError where the bytes of a storage do not have the crc32 that the source states."""
    for stream, crc in zip(unit.streams, crcs, strict=True):
        if stream.storage.crc32 is not None and stream.storage.crc32 != crc:
            raise InputError(f"{source}: {stream.spec.name}: checksum and bytes do not match; the file is damaged")


def read_master(checkpoint: Checkpoint, run: Run) -> torch.Tensor:
    """The fp32 elements of a run, valid until this thread asks for the next. Raises InputError."""
    assert run.storage is not None  # noqa: S101 - padding has no master
    x = scratch_elements("master", torch.float32, run.length)
    storage = checkpoint.storages[run.storage]
    checkpoint.read_into(storage.offset + run.start * DType.FLOAT32.itemsize, frames.bytes_of(x))
    return x


def rounded_masters(
    copied: Copied, copy: DType, first: int, count: int, master: Callable[[Run], torch.Tensor]
) -> torch.Tensor:
    """``count`` elements of a copy from ``first`` on as its masters give them, rounded.

    ``copy`` is its element type; ``master`` gives the fp32 elements of a run.
    """
    pieces, dtype = [], copied.rounded_type(copy)
    for run in copied.cut(first, count):
        if run.storage is None:
            pieces.append(torch.empty(run.length, dtype=dtype.torch))
            pieces[-1].view(torch.int16).fill_(run.start - (run.start >> 15 << 16))
        else:
            pieces.append(round_to(dtype, master(run)))
    return torch.cat([piece.to(pieces[0].device) for piece in pieces]) if len(pieces) != 1 else pieces[0]


def store(packed: PackedChunk, *, copy: bool = False) -> EncodedChunk:
    """Compress a packed chunk whose parts are on the CPU. With ``copy``, the result shares no memory with them."""
    stored = [frames.encode_parts(*pair, copy=copy) for pair in zip(packed.parts, packed.packings, strict=True)]
    return Chunk(stored, packed.crcs, packed.errors, packed.refused, packed.packings)


def in_own_pages(packed: PackedChunk) -> PackedChunk:
    """The chunk with its parts in memory pages of its own, which the system gets back when the chunk is freed.

    The allocator would keep much of them: parts of other chunks lie in between.
    """
    total = row_bytes(packed.parts)
    if not total:
        return packed
    pages = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
    return replace(packed, parts=copy_to_row(packed.parts, pages))


class ChunkEncoder:
    """Reads chunks of units of one checkpoint and encodes them on the CPU; some as differences to those of ``base``."""

    def __init__(self, checkpoint: Checkpoint, *, measure: bool, base: OpenBase | None = None) -> None:
        self._checkpoint = checkpoint
        self._base = base
        self.measures = measure
        self._lockstep = Lockstep(checkpoint)

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
            packed, how = symbols.pack_parts(parts, self._lockstep.backend, reuse=True)
            stored.append(frames.encode_parts(packed, how, copy=bool(how)))
            packings.append(how)
        return EncodedChunk(stored, chunk.crcs, chunk.errors, chunk.refused, packings)

    def pack(self, work: Work) -> PackedChunk:
        """Read and pack one chunk. Thread-safe."""
        return self._packed(self.encode(work, reuse=True))

    def pack_tensors(self, work: Work, originals: Sequence[torch.Tensor], crcs: list[int]) -> PackedChunk:
        """Pack one chunk on the device of its tensors, one for each stream. Thread-safe."""
        return self._packed(self._encode(work, originals, crcs, reuse=True))

    def _packed(self, chunk: PackedChunk) -> PackedChunk:
        packed = [self.pack_symbols(parts) for parts in chunk.parts]
        return replace(chunk, parts=[parts for parts, _ in packed], packings=[packings for _, packings in packed])

    def pack_symbols(self, parts: Parts) -> tuple[Parts, dict[str, Packing]]:
        """The parts with their symbols packed, and how each of these is."""
        return symbols.pack_parts(parts, self._lockstep.backend)

    def encode(self, work: Work, *, reuse: bool = False) -> PackedChunk:
        """Read and encode one chunk; its symbols are not packed. Thread-safe.

        With ``reuse`` symbols are in buffers of this thread, until it encodes again.
        """
        unit, chunk = work
        read = [read_chunk(self._checkpoint, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
        return self._encode(work, [x for x, _ in read], [crc for _, crc in read], reuse=reuse)

    def _encode(self, work: Work, originals: Sequence[torch.Tensor], crcs: list[int], *, reuse: bool) -> PackedChunk:
        """Encode one chunk; with ``reuse`` symbols are in buffers of this thread, until it encodes again."""
        unit, chunk = work
        first = chunk * frames.FRAME
        storage = None
        try:
            if unit.streams[0].codec.copied is not None:
                parts = [self._encode_copy(stream, x, first) for stream, x in zip(unit.streams, originals, strict=True)]
                return PackedChunk(parts, crcs)
            bases = [
                self._base_parts(stream, chunk, x.device) for stream, x in zip(unit.streams, originals, strict=True)
            ]
            parts, errors = self._lockstep.encode(unit, first, originals, bases, measure=self.measures, reuse=reuse)
            for k, below in enumerate(bases):
                if below is not None:
                    storage = unit.streams[k].index
                    parts[k] = symbols.difference(parts[k], below, self._lockstep.backend)
        except RefusedError as exc:
            return PackedChunk([], crcs, refused=Refusal(str(exc), storage if exc.storage is None else exc.storage))
        return PackedChunk(parts, crcs, errors)

    def _base_parts(self, stream: Stream, chunk: int, device: torch.device) -> Parts | None:
        """The parts of the base that a chunk is kept as a difference to. Raises BrokenBaseError."""
        if stream.base is None or self._base is None:
            return None
        parts = self._base.parts(stream.base, chunk, stream.codec)
        return {name: part.to(device) for name, part in parts.items()}

    def finish(self, unit: Unit, errors: UnitErrors) -> None:
        """Complete the errors of a unit whose chunks are all merged, while its source is as it was."""
        if self.measures:
            self._lockstep.meter.finish(unit, errors)

    def _encode_copy(self, stream: Stream, x: torch.Tensor, first: int) -> Parts:
        """The parts of the elements ``x`` of a copy from ``first`` on. Raises RefusedError."""
        assert stream.codec.copied is not None  # noqa: S101 - the caller looked
        master = partial(self.master, device=x.device)
        rounded = rounded_masters(stream.codec.copied, stream.spec.dtype, first, x.numel(), master).to(x.device)
        return stream.codec.encode(x, companions={ROUNDED: rounded})

    def master(self, run: Run, device: torch.device) -> torch.Tensor:
        """The fp32 elements of a run on ``device``, valid until this thread asks for the next."""
        return read_master(self._checkpoint, run).to(device)


R = TypeVar("R")

_UPLOADS_AHEAD = 1
"""Uploads per thread that may wait for the device while the thread reads the next."""


@dataclass(slots=True)
class _Landing:
    """A packed chunk whose parts are on their way into ``buffer``; the copy is complete at ``mark``."""

    chunk: PackedChunk
    buffer: torch.Tensor
    mark: Mark


class DeviceEncoder(ChunkEncoder):
    """Encodes the chunks that ``_launched`` sends to devices there, all others on the CPU."""

    def __init__(
        self, checkpoint: Checkpoint, *, measure: bool, pinned: Callable[[int], torch.Tensor], base: OpenBase | None
    ) -> None:
        super().__init__(checkpoint, measure=measure, base=base)
        self._buffers = Buffers(pinned)

    def packed(self, work: Iterable[Work], workers: Workers) -> Iterator[PackedChunk]:
        """Chunks that the device packed, in the order of ``work``, in host memory of their own."""
        return workers.map(lambda item: self._land(item, in_own_pages), self._launched(work, workers))

    def stored(self, work: Iterable[Work], workers: Workers) -> Iterator[EncodedChunk]:
        """Chunks that the device packed and the threads compressed, in the order of ``work``."""
        # The next chunk overwrites the buffer that the parts have landed in.
        stored = partial(store, copy=True)
        return workers.map(lambda item: self._land(item, stored), self._launched(work, workers))

    def _launched(self, work: Iterable[Work], workers: Workers) -> Iterator[Work | _Landing]:
        """Chunks that a device has packed, and work that remains for the CPU, in the order of ``work``."""
        raise NotImplementedError

    def _launch(
        self, work: Work, transfer: CudaTransfer, originals: list[torch.Tensor], crcs: list[int]
    ) -> Work | _Landing:
        try:
            with transfer.active():
                packed = self.pack_tensors(work, originals, crcs)
                buffer = self._buffers.take(row_bytes(packed.parts))
                packed.parts, mark = transfer.download(packed.parts, buffer)
        except torch.OutOfMemoryError:
            return work
        return _Landing(packed, buffer, mark)

    def _land(self, item: Work | _Landing, finish: Callable[[PackedChunk], R]) -> R:
        """In a worker: wait for the packed chunk, or pack it here, and pass it to ``finish``."""
        if not isinstance(item, _Landing):
            return finish(self.pack(item))
        item.mark.synchronize()
        try:
            return finish(item.chunk)
        finally:
            self._buffers.give(item.buffer)


class LiveEncoder(DeviceEncoder):
    """Packs ``live`` storages, by key, on their own devices where these are of the kind of ``make``."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        live: Mapping[str, torch.UntypedStorage],
        *,
        measure: bool,
        make: type[CudaTransfer],
        base: OpenBase | None = None,
    ) -> None:
        self._live = live
        devices = {storage.device for storage in live.values() if storage.device.type == make.kind}
        self._transfers = {device: make(device) for device in devices}
        super().__init__(checkpoint, measure=measure, pinned=next(iter(self._transfers.values())).pinned, base=base)

    def _launched(self, work: Iterable[Work], workers: Workers) -> Iterator[Work | _Landing]:  # noqa: ARG002
        for item in work:
            unit, chunk = item
            storages = [self._live.get(stream.storage.key) for stream in unit.streams]
            here = [storage for storage in storages if storage is not None]
            transfer = self._transfers.get(here[0].device) if here else None
            if transfer is None or len(here) < len(storages) or len({storage.device for storage in here}) > 1:
                yield item
                continue
            views = [
                _elements(storage, stream.spec.dtype, chunk * frames.FRAME, stream.chunk_spec(chunk).numel)
                for storage, stream in zip(here, unit.streams, strict=True)
            ]
            # Nothing to check: no checksum is stated for memory.
            yield self._launch(item, transfer, views, [0] * len(views))

    def master(self, run: Run, device: torch.device) -> torch.Tensor:
        """The elements of a master in fp32; a view of them where the master is on ``device``."""
        assert run.storage is not None  # noqa: S101 - padding has no master
        live = self._live.get(self._checkpoint.storages[run.storage].key)
        if live is None or live.device != device:
            return super().master(run, device)
        return _elements(live, DType.FLOAT32, run.start, run.length)


def _elements(storage: torch.UntypedStorage, dtype: DType, start: int, count: int) -> torch.Tensor:
    """A flat view of ``count`` elements of a live storage, from ``start`` on."""
    return torch.empty(0, dtype=dtype.torch, device=storage.device).set_(storage)[start : start + count]


@dataclass(slots=True)
class _Arrival:
    """A chunk on its way from ``buffer`` to ``row`` on a device; the copy is complete at ``mark``."""

    work: Work
    row: torch.Tensor
    mark: Mark
    buffer: torch.Tensor
    crcs: list[int]


class UploadEncoder(DeviceEncoder):
    """Reads chunks of units with lossy streams into pinned memory and packs them on one device."""

    def __init__(
        self, checkpoint: Checkpoint, transfer: CudaTransfer, *, measure: bool, base: OpenBase | None = None
    ) -> None:
        super().__init__(checkpoint, measure=measure, pinned=transfer.pinned, base=base)
        self._transfer = transfer

    def _launched(self, work: Iterable[Work], workers: Workers) -> Iterator[Work | _Landing]:
        for arrival in workers.map(self._send, work, _UPLOADS_AHEAD):
            if not isinstance(arrival, _Arrival):
                yield arrival
                continue
            self._transfer.receive(arrival.row, arrival.mark)
            originals = self._cut(arrival.work, arrival.row)
            landing = self._launch(arrival.work, self._transfer, originals, arrival.crcs)
            arrival.mark.synchronize()
            self._buffers.give(arrival.buffer)
            yield landing

    def _send(self, work: Work) -> Work | _Arrival:
        """In a worker: read, take the checksum, queue the upload. Units without lossy streams stay on the CPU."""
        unit, chunk = work
        if not any(stream.codec.measured_as is not None for stream in unit.streams):
            return work
        sizes = [stream.chunk_spec(chunk).numel * stream.spec.dtype.itemsize for stream in unit.streams]
        total = sum(map(padded, sizes))
        buffer = self._buffers.take(total)
        views = [frames.bytes_of(x.view(torch.uint8)) for x in self._cut(work, buffer)]
        crcs = [
            read_bytes(self._checkpoint, stream, chunk, view) for stream, view in zip(unit.streams, views, strict=True)
        ]
        try:
            row, mark = self._transfer.upload(buffer[:total])
        except torch.OutOfMemoryError:
            self._buffers.give(buffer)
            return work
        return _Arrival(work, row, mark, buffer, crcs)

    @staticmethod
    def _cut(work: Work, row: torch.Tensor) -> list[torch.Tensor]:
        """The streams of a chunk in its ``row``."""
        unit, chunk = work
        specs = [stream.chunk_spec(chunk) for stream in unit.streams]
        return list(cut_row(row, [(spec.dtype.torch, spec.numel) for spec in specs]))


def choose_encoder(
    checkpoint: Checkpoint,
    live: Mapping[str, torch.UntypedStorage],
    device: torch.device | None,
    *,
    measure: bool,
    base: OpenBase | None = None,
) -> ChunkEncoder:
    """An encoder for ``device`` if one is given, else one that packs ``live`` tensors on GPUs there."""
    if device is not None:
        return UploadEncoder(checkpoint, CudaTransfer(device), measure=measure, base=base)
    if any(storage.device.type == CudaTransfer.kind for storage in live.values()):
        return LiveEncoder(checkpoint, live, measure=measure, make=CudaTransfer, base=base)
    return ChunkEncoder(checkpoint, measure=measure, base=base)
