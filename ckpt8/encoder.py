"""What happens to one chunk on a worker thread: read, encode, measure, compress."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt8.container import frames
from ckpt8.crc import crc32
from ckpt8.errors import InputError, RefusedError
from ckpt8.measure import ChunkMeter, UnitErrors
from ckpt8.plan import Parameter, Stream, Unit
from ckpt8.readers.base import Checkpoint, StorageInfo, TensorRef
from ckpt8.update_space import Confidence

if TYPE_CHECKING:
    import torch

_local = threading.local()


@dataclass(slots=True)
class EncodedChunk:
    """What one chunk of a unit became.

    ``frames`` by stream, then part: (stored bytes, crc32). ``crcs`` of the source bytes by stream. ``refused`` is the
    reason why a codec took none of it.
    """

    frames: list[dict[str, list[tuple[bytes, int]]]]
    crcs: list[int]
    errors: UnitErrors | None
    refused: str | None = None


def scratch(slot: int | str, length: int) -> memoryview:
    """``length`` bytes that this thread uses again for the same ``slot``."""
    buffers: dict[int | str, bytearray] = _local.__dict__.setdefault("buffers", {})
    if len(buffers.get(slot, b"")) < length:
        buffers[slot] = bytearray(length)
    return memoryview(buffers[slot])[:length]


def read_chunk(checkpoint: Checkpoint, stream: Stream, chunk: int, slot: int) -> tuple[torch.Tensor, int]:
    """One chunk of a stream, in this thread's buffer for ``slot``, and the crc32 of its bytes."""
    import torch

    spec = stream.chunk_spec(chunk)
    view = scratch(slot, spec.numel * spec.dtype.itemsize)
    start = stream.storage.offset + chunk * frames.FRAME * spec.dtype.itemsize
    checkpoint.read_into(start, view)
    return torch.frombuffer(view, dtype=torch.uint8).view(spec.dtype.torch), crc32(view)


def check_source(unit: Unit, crcs: Sequence[int], source: str) -> None:
    """Raise InputError where the checksum that the source states for a storage is not that of its bytes."""
    for stream, crc in zip(unit.streams, crcs, strict=True):
        if stream.storage.crc32 is not None and stream.storage.crc32 != crc:
            raise InputError(f"{source}: {stream.spec.name}: checksum and bytes do not match; the file is damaged")


def read_tensor(checkpoint: Checkpoint, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
    """A small dense tensor in ``storage``, in memory."""
    import torch

    buffer = bytearray(storage.nbytes)
    checkpoint.read_into(storage.offset, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=ref.dtype.torch).as_strided(ref.shape, ref.stride, ref.offset)


class ChunkMeters:
    """Makes the meter of any chunk; keeps CAME's factored statistics of the parameter at hand."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._storages = {storage.key: storage for storage in checkpoint.storages}
        self._last: tuple[Parameter, Confidence] | None = None

    def of(self, unit: Unit) -> ChunkMeter:
        """A meter with zero on its clocks."""
        return ChunkMeter(unit, self._confidence(unit.parameter))

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


class ChunkEncoder:
    """Encodes chunks of units of one checkpoint; safe to share between threads."""

    def __init__(self, checkpoint: Checkpoint, *, measure: bool) -> None:
        self._checkpoint = checkpoint
        self._meters = ChunkMeters(checkpoint) if measure else None

    def encode(self, work: tuple[Unit, int]) -> EncodedChunk:
        """Encode (unit, chunk number)."""
        unit, chunk = work
        read = [read_chunk(self._checkpoint, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
        originals, crcs = [x for x, _ in read], [crc for _, crc in read]
        parts = []
        for stream, x in zip(unit.streams, originals, strict=True):
            try:
                parts.append(stream.codec.encode(x))
            except RefusedError as exc:
                whose = "the state of its parameter " if len(unit.streams) > 1 else ""
                return EncodedChunk([], crcs, None, f"{whose}{exc}")
        errors = None
        if self._meters is not None and any(stream.lossy for stream in unit.streams):
            errors = self._meters.of(unit).measure(chunk * frames.FRAME, originals, parts)
        stored = [{name: frames.encode_part(name, part) for name, part in each.items()} for each in parts]
        return EncodedChunk(stored, crcs, errors)
