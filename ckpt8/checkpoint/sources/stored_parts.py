"""The encoded parts of a container's storages, for training that goes on with packed state."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ckpt8.checkpoint.tree import Checkpoint, TensorRef
from ckpt8.codecs import Codec
from ckpt8.container import layout
from ckpt8.container.frames import FRAME
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType, Parts
from ckpt8.core.workers import Workers

_PACKABLE = (DType.FLOAT32, DType.BFLOAT16)


class StoredParts:
    """Parts by the tensors of one member. Only a tensor that is the whole of its storage, in order, has any."""

    def __init__(self, reader: ContainerReader, member: int, checkpoint: Checkpoint, workers: Workers) -> None:
        self._reader = reader
        self._workers = workers
        storages = reader.manifest.storages
        record = reader.manifest.members[member]
        at = {(offset, storages[index].nbytes): index for offset, index in record.segments if storages[index].nbytes}
        try:
            self._index = {s.key: at[s.offset, s.nbytes] for s in checkpoint.storages if s.nbytes}
        except KeyError as exc:
            raise InputError(
                f"{reader.path}: manifest is malformed: {record.path!r} has other storages inside"
            ) from exc

    def _whole(self, ref: TensorRef) -> int | None:
        index = self._index.get(ref.key)
        if index is None or ref.offset or not ref.is_contiguous:
            return None
        record = self._reader.manifest.storages[index]
        return index if (record.dtype, record.numel) == (ref.dtype, ref.numel) else None

    def codec(self, ref: TensorRef) -> Codec | None:
        """What ``ref`` is stored with, or None where it has no parts of its own."""
        index = self._whole(ref)
        return None if index is None else self._reader.codec(index)

    def is_exact(self, ref: TensorRef) -> bool:
        """Whether ``ref`` was kept bit for bit for a reason of its own, not for its preset or its element type."""
        index = self._index.get(ref.key)
        if index is None or self._reader.manifest.preset == "lossless" or ref.dtype not in _PACKABLE:
            return False
        return self._reader.codec(index).measured_as is None

    def chunks(self, ref: TensorRef, *names: str) -> Iterator[tuple[int, Parts]]:
        """The named parts piece by piece, with the first element of each. Raises InputError for damage."""
        index = self._whole(ref)
        assert index is not None  # noqa: S101
        read = partial(self._reader.read_parts, index, only=names)
        for chunk, parts in enumerate(self._workers.map(read, range(layout.chunk_count(ref.numel)))):
            yield chunk * FRAME, parts
