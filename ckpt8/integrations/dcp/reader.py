"""The storage reader of ``ckpt8.integrations.dcp``."""

from __future__ import annotations

import io
import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.checkpoint.readers.entries import PACKED_INDEX as FILE_NAME
from ckpt8.container.frames import bytes_of
from ckpt8.container.manifest import StorageRecord, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arguments import checked
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers
from ckpt8.integrations import is_local
from ckpt8.integrations.dcp.metadata import OBJECTS, InDirectory, Stored, read_metadata
from ckpt8.integrations.dcp.slices import SliceReader


class Ckpt8StorageReader(InDirectory, StorageReader):
    """Reads what ``Ckpt8StorageWriter`` wrote, at any world size. Decodes only the chunks that a slice needs.

    Raises InputError for damage and malformed metadata; torch wraps it in its CheckpointException.

    >>> from torch.distributed import checkpoint as dcp
    >>> from ckpt8.integrations.dcp import Ckpt8StorageReader, Ckpt8StorageWriter
    >>> saved = dcp.save({"model": model.state_dict()}, storage_writer=Ckpt8StorageWriter("step-2"), no_dist=True)
    >>> dcp.load({"model": model.state_dict()}, storage_reader=Ckpt8StorageReader("step-2"), no_dist=True)
    """

    @checked
    def __init__(self, path: str | os.PathLike[str], *, threads: int | None = None) -> None:
        super().__init__(path)
        self._threads = threads
        self._stored: Mapping[MetadataIndex, Stored] = {}
        self._values: Mapping[str, Any] = {}

    def read_metadata(self) -> Metadata:
        """The metadata of the whole checkpoint; no rank has one of its own. Raises InputError."""
        metadata = read_metadata(self.path)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self._run_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep the places of all values."""
        self._stored = metadata.storage_data
        self._values = metadata.state_dict_metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of ``plan``. Raises InputError for damage, UnsupportedError for a class that it may not load."""
        files: dict[str, list[tuple[ReadItem, Stored]]] = defaultdict(list)
        for item in plan.items:
            if (stored := self._stored.get(item.storage_index)) is None:
                raise InputError(f"{self.path}: {item.storage_index.fqn}: is not stored")
            files[stored.file].append((item, stored))
        with Workers(self._threads) as workers:
            for name, items in files.items():
                with ContainerReader(self.path / name) as reader:
                    file = _RankFile(reader, items[0][1].seal, workers)
                    for item, stored in items:
                        self._read_item(file, item, stored, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_item(self, file: _RankFile, item: ReadItem, stored: Stored, planner: LoadPlanner) -> None:
        name = item.storage_index.fqn
        if item.type is LoadItemType.BYTE_IO:
            clean = io.BytesIO()
            # The planner unpickles any class. So it gets a new file of the value that was loaded within our limits.
            torch.save(file.load(stored, f"{self.path}: {name}"), clean)
            clean.seek(0)
            planner.load_bytes(item, clean)
            return
        target = planner.resolve_tensor(item).detach()
        if tuple(target.shape) != tuple(item.lengths):
            raise InputError(f"{self.path}: {name}: a slice of {tuple(item.lengths)} goes into {tuple(target.shape)}")
        if stored.tensor is None:
            whole = file.load(stored, f"{self.path}: {name}")
            if not isinstance(whole, torch.Tensor) or whole.shape != self._values[name].size:
                raise InputError(f"{self.path}: {name}: is not the tensor that {FILE_NAME} states")
            for dim, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                # Tensors of other layouts cannot be narrowed, and are one slice.
                whole = whole if length == whole.shape[dim] else whole.narrow(dim, offset, length)
            target.copy_(whole)
        else:
            value = self._values[name]
            chunk = next(each for each in value.chunks if each.offsets == item.storage_index.offset)
            file.copy(stored.tensor, value.properties.dtype, tuple(chunk.sizes), item, target)
        planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory with such a checkpoint."""
        return is_local(checkpoint_id) and (Path(checkpoint_id) / FILE_NAME).exists()


class _RankFile:
    """One file of the checkpoint, open as ``reader``. Raises InputError unless it ends with ``seal``."""

    def __init__(self, reader: ContainerReader, seal: str, workers: Workers) -> None:
        if reader.seal.hex() != seal:
            raise InputError(f"{reader.path}: belongs to another save than the {FILE_NAME} beside it")
        self.path = reader.path
        self._storages = reader.manifest.storages
        self._tensors = {record.name: record for record in reader.manifest.tensors}
        self._slices = SliceReader(reader, workers)

    def _find(
        self, name: str, dtype: DType | None, shape: tuple[int, ...] | None
    ) -> tuple[TensorRecord, StorageRecord]:
        """A tensor that fills its storage in order. Raises InputError where it is missing, or not as stated."""
        if (record := self._tensors.get(name)) is None:
            raise InputError(f"{self.path}: has no tensor {name[:80]!r}, which {FILE_NAME} names")
        storage = self._storages[record.storage]
        fits = shape is None or tuple(record.shape) == shape
        whole = record.nbytes == storage.nbytes and not record.offset and not record.flags
        if not fits or not whole or (dtype is not None and record.dtype is not dtype):
            raise InputError(f"{self.path}: {name}: is not of the type and shape that {FILE_NAME} states")
        return record, storage

    def copy(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], item: ReadItem, target: torch.Tensor) -> None:
        """Fill ``target`` with the box that ``item`` asks for. Raises InputError."""
        record, storage = self._find(name, DType.from_label(str(dtype)), shape)
        box = shape, tuple(item.storage_offsets), tuple(item.lengths)
        if any(offset + length > size for size, offset, length in zip(*box, strict=True)):
            raise InputError(f"{self.path}: {name}: has shape {shape}, and more of it is asked for")
        if storage.dtype is record.dtype:
            self._slices.copy(record.storage, *box, target)
        else:
            self._slices.copy_bytes(record.storage, *box, target, dtype)

    def load(self, stored: Stored, where: str) -> Any:
        """A value that torch.save wrote. Raises InputError."""
        record, storage = self._find(OBJECTS, DType.UINT8, None)
        if stored.start + stored.length > storage.numel:
            raise InputError(f"{self.path}: ends before a value that {FILE_NAME} names")
        content = self._slices.read_bytes(record.storage, stored.start, stored.length)
        return load_allowed(io.BytesIO(bytes_of(content)), where)
