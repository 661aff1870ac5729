"""Encodes chunks on a GPU: those of tensors that are there, or those of a file, which are uploaded.

A device packs a chunk, symbols too, into planes of bytes; threads compress what it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.base import Run
from ckpt8.codecs.rounded_copy import ROUNDED, round_to
from ckpt8.compressing.chunk_encoder import (
    Chunk,
    ChunkEncoder,
    EncodedChunk,
    PackedChunk,
    Work,
    in_own_pages,
    read_bytes,
    read_master,
    store,
)
from ckpt8.compressing.deltas import OpenBase
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Refusal, Stream
from ckpt8.container import frames, symbols
from ckpt8.core.arrays import as_arrays, as_tensor, as_tensors
from ckpt8.core.errors import RefusedError
from ckpt8.core.gpu import CudaTransfer, Mark, cut_row, padded, row_bytes
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Parts
from ckpt8.core.workers import Buffers, Workers

DeviceChunk = Chunk["torch.Tensor"]
"""Its parts are on a device, or in memory that the device copies them to."""

R = TypeVar("R")

_UPLOADS_AHEAD = 1
"""Uploads per thread that may wait for the device while the thread reads the next."""


@dataclass(slots=True)
class _Landing:
    """A packed chunk whose parts are on their way into ``buffer``; the copy is complete at ``mark``."""

    chunk: DeviceChunk
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
            chunk = item.chunk
            parts = [as_arrays(own) for own in chunk.parts]
            return finish(PackedChunk(parts, chunk.crcs, chunk.errors, chunk.refused, chunk.packings))
        finally:
            self._buffers.give(item.buffer)

    def pack_tensors(self, work: Work, originals: Sequence[torch.Tensor], crcs: list[int]) -> DeviceChunk:
        """Pack one chunk on the device of its tensors, one for each stream. Thread-safe."""
        unit, chunk = work
        first, device = chunk * frames.FRAME, originals[0].device
        errors, storage = UnitErrors(), None
        try:
            if unit.streams[0].codec.copied is not None:
                pairs = zip(unit.streams, originals, strict=True)
                parts = [self._encode_copied(stream, x, first) for stream, x in pairs]
            else:
                bases = [self._base_on(stream, chunk, device) for stream in unit.streams]
                parts, errors = self.lockstep.encode(unit, first, originals, bases, measure=self.measures)
                for k, below in enumerate(bases):
                    if below is not None:
                        storage = unit.streams[k].index
                        parts[k] = symbols.difference(parts[k], below)
        except RefusedError as exc:
            return DeviceChunk([], crcs, refused=Refusal(str(exc), storage if exc.storage is None else exc.storage))
        packed = [symbols.pack_parts(own) for own in parts]
        return DeviceChunk([own for own, _ in packed], crcs, errors, packings=[packings for _, packings in packed])

    def _base_on(self, stream: Stream, chunk: int, device: torch.device) -> Parts | None:
        """``base_parts`` on a device."""
        below = self.base_parts(stream, chunk)
        return None if below is None else {name: part.to(device) for name, part in as_tensors(below).items()}

    def _encode_copied(self, stream: Stream, x: torch.Tensor, first: int) -> Parts:
        """The parts of the elements ``x`` of a copy from ``first`` on. Raises RefusedError."""
        codec, pieces = stream.codec, list[torch.Tensor]()
        assert codec.copied is not None  # noqa: S101 - the caller looked
        dtype = codec.copied.rounded_type(stream.spec.dtype)
        for run in codec.copied.cut(first, x.numel()):
            if run.storage is None:
                pieces.append(torch.empty(run.length, dtype=dtype.torch, device=x.device))
                pieces[-1].view(torch.int16).fill_(run.start - (run.start >> 15 << 16))
            else:
                pieces.append(round_to(dtype, self.master(run, x.device)))
        return codec.encode(x, companions={ROUNDED: torch.cat(pieces)})

    def master(self, run: Run, device: torch.device) -> torch.Tensor:
        """The fp32 elements of a run on ``device``, valid until this thread asks for the next."""
        return as_tensor(read_master(self.checkpoint, run), DType.FLOAT32).to(device)


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
        live = self._live.get(self.checkpoint.storages[run.storage].key)
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
            read_bytes(self.checkpoint, stream, chunk, view) for stream, view in zip(unit.streams, views, strict=True)
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
