"""What happens to one chunk on a worker thread: it is packed (read, encoded, measured), then stored (compressed).

A packed chunk no longer needs its source: between the two a save in the background lets the caller go on.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ckpt8.checkpoint.meaning.update_rules import Confidence
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs.base import Copied, Run
from ckpt8.codecs.split24.reference import round_masters
from ckpt8.compressing import lockstep
from ckpt8.compressing.measure import ChunkMeter, UnitErrors
from ckpt8.compressing.plan import Parameter, Stream, Unit
from ckpt8.container import frames
from ckpt8.container.decoding import fill_padding
from ckpt8.core.backend import for_checkpoint
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.files.crc import crc32
from ckpt8.core.gpu import copy_to_row, row_bytes
from ckpt8.core.tensors import DType, Parts
from ckpt8.core.workers import Workers, scratch

Work = tuple[Unit, int]
"""A unit and the number of a chunk of it."""


@dataclass(slots=True)
class PackedChunk:
    """A chunk of a unit as its codecs give it: parts by stream, on the CPU unless a device still has them.

    ``crcs`` by stream are those of the source bytes where the source states one, else 0. ``refused`` is the reason why
    a codec took none of it.
    """

    parts: list[Parts]
    crcs: list[int]
    errors: UnitErrors | None = None
    refused: str | None = None


@dataclass(slots=True)
class EncodedChunk:
    """A packed chunk compressed: ``frames`` by stream, then part: (stored bytes, crc32). The rest is as it was."""

    frames: list[dict[str, list[tuple[bytes | memoryview, int]]]]
    crcs: list[int]
    errors: UnitErrors | None
    refused: str | None = None


def read_chunk(checkpoint: Checkpoint, stream: Stream, chunk: int, slot: int) -> tuple[torch.Tensor, int]:
    """One chunk of a stream, in this thread's buffer for ``slot``; the crc32 of its bytes, see ``read_bytes``."""
    spec = stream.chunk_spec(chunk)
    view = scratch(slot, spec.numel * spec.dtype.itemsize)
    crc = read_bytes(checkpoint, stream, chunk, view)
    return torch.frombuffer(view, dtype=torch.uint8).view(spec.dtype.torch), crc


def read_bytes(checkpoint: Checkpoint, stream: Stream, chunk: int, view: memoryview) -> int:
    """Fill ``view`` with one chunk of a stream; the crc32 of its bytes, or 0 where the source states none."""
    checkpoint.read_into(stream.storage.offset + chunk * frames.FRAME * stream.spec.dtype.itemsize, view)
    return crc32(view) if stream.storage.crc32 is not None else 0


def check_source(unit: Unit, crcs: Sequence[int], source: str) -> None:
    """Raise InputError where the checksum that the source states for a storage is not that of its bytes."""
    for stream, crc in zip(unit.streams, crcs, strict=True):
        if stream.storage.crc32 is not None and stream.storage.crc32 != crc:
            raise InputError(f"{source}: {stream.spec.name}: checksum and bytes do not match; the file is damaged")


def read_tensor(checkpoint: Checkpoint, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
    """A small dense tensor in ``storage``, in memory."""
    buffer = bytearray(storage.nbytes)
    checkpoint.read_into(storage.offset, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=ref.dtype.torch).as_strided(ref.shape, ref.stride, ref.offset)


def check_copy(x: torch.Tensor, first: int, copied: Copied, master: Callable[[Run], torch.Tensor]) -> None:
    """Raise RefusedError unless ``x``, elements from ``first`` on of a copy, is what ``copied`` gives, bit for bit.

    ``master`` gives the fp32 elements of a run where ``x`` is.
    """
    at = 0
    for run in copied.cut(first, x.numel()):
        copy = x[at : at + run.length]
        if run.storage is None:
            expected = torch.empty_like(copy)
            fill_padding(expected, run.start)
        else:
            expected = round_masters(master(run))
        if not torch.equal(copy.view(torch.int16), expected.view(torch.int16)):
            raise RefusedError("differs from its fp32 master rounded to bf16")
        at += run.length


class ChunkMeters:
    """Makes the meter of any chunk; keeps CAME's factored statistics of the parameter at hand.

    ``backend`` is what codecs are asked for where tensors are on the CPU.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.backend = for_checkpoint(checkpoint.storages)
        self._storages = {storage.key: storage for storage in checkpoint.storages}
        self._last: tuple[Parameter, Confidence] | None = None

    def of(self, unit: Unit) -> ChunkMeter:
        """A meter with zero on its clocks."""
        return ChunkMeter(unit, self._confidence(unit.parameter), self.backend)

    def _confidence(self, parameter: Parameter | None) -> Confidence | None:
        if parameter is None or parameter.confidence is None:
            return None
        last = self._last
        if last is None or last[0] is not parameter:
            rows, columns = (
                read_tensor(self._checkpoint, self._storages[ref.key], ref) for ref in parameter.confidence
            )
            last = self._last = (parameter, Confidence(rows, columns))
        return last[1]


def store(packed: PackedChunk, *, copy: bool = False) -> EncodedChunk:
    """Compress a packed chunk whose parts are on the CPU, and stay as they are unless a ``copy`` is asked for."""
    stored = [{name: frames.encode_part(name, part, copy=copy) for name, part in each.items()} for each in packed.parts]
    return EncodedChunk(stored, packed.crcs, packed.errors, packed.refused)


def keep(packed: PackedChunk) -> PackedChunk:
    """The same chunk with parts in pages of its own, which go back to the system with it.

    The allocator would hold on to much of them, a part here and a part there.
    """
    total = row_bytes(packed.parts)
    if not total:
        return packed
    pages = torch.frombuffer(mmap.mmap(-1, total), dtype=torch.uint8)
    return PackedChunk(copy_to_row(packed.parts, pages), packed.crcs, packed.errors)


class ChunkEncoder:
    """Encodes chunks of units of one checkpoint, which it reads into memory."""

    def __init__(self, checkpoint: Checkpoint, *, measure: bool) -> None:
        self._checkpoint = checkpoint
        self._backend = for_checkpoint(checkpoint.storages)
        self._meters = ChunkMeters(checkpoint) if measure else None

    def packed(self, work: Iterable[Work], workers: Workers) -> Iterator[PackedChunk]:
        """Chunks in the order of ``work``, in memory of their own."""
        return workers.map(lambda item: keep(self.pack(item)), work)

    def stored(self, work: Iterable[Work], workers: Workers) -> Iterator[EncodedChunk]:
        """As ``packed``, and compressed: both at once on each thread."""
        return workers.map(lambda item: store(self.pack(item)), work)

    def pack(self, work: Work) -> PackedChunk:
        """Read and pack one chunk. Thread-safe."""
        unit, chunk = work
        read = [read_chunk(self._checkpoint, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
        return self.pack_tensors(work, [x for x, _ in read], [crc for _, crc in read])

    def pack_tensors(self, work: Work, originals: Sequence[torch.Tensor], crcs: list[int]) -> PackedChunk:
        """Pack one chunk where its tensors are, one for each stream. Thread-safe."""
        unit, chunk = work
        first = chunk * frames.FRAME
        try:
            for stream, x in zip(unit.streams, originals, strict=True):
                if stream.codec.copied is not None:
                    check_copy(x, first, stream.codec.copied, partial(self.master, device=x.device))
            parts = lockstep.encode(unit.streams, originals, first, self._backend)
        except RefusedError as exc:
            whose = "the state of its parameter " if len(unit.streams) > 1 else ""
            return PackedChunk([], crcs, refused=f"{whose}{exc}")
        errors = None
        if self._meters is not None and any(stream.lossy for stream in unit.streams):
            errors = self._meters.of(unit).measure(first, originals, parts)
        return PackedChunk(parts, crcs, errors)

    def master(self, run: Run, device: torch.device) -> torch.Tensor:
        """The fp32 elements of a run, on ``device``, until this thread asks for others."""
        assert run.storage is not None  # noqa: S101 - padding has no master
        view = scratch("master", run.length * DType.FLOAT32.itemsize)
        storage = self._checkpoint.storages[run.storage]
        self._checkpoint.read_into(storage.offset + run.start * DType.FLOAT32.itemsize, view)
        return torch.frombuffer(view, dtype=torch.float32).to(device)
