"""The storage reader of ``ckpt8.integrations.dcp``.

It takes parts of tensors from a container, with only the chunks that they need.
"""

from __future__ import annotations

import io
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.container import frames
from ckpt8.container.frames import bytes_of
from ckpt8.container.joined import read_index
from ckpt8.container.manifest import StorageRecord, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import INDEX, OBJECTS, GlobalTensor, Place, ShardedIndex, Slice, is_sharded, slices_of
from ckpt8.core.errors import InputError
from ckpt8.core.public import checked
from ckpt8.core.tensors import DType
from ckpt8.core.text import shown
from ckpt8.core.workers import Workers, threads_of_rank
from ckpt8.integrations import is_local
from ckpt8.integrations.dcp.planner import local_tensors
from ckpt8.integrations.dcp.writer import InDirectory, metadata_of

_BLOCK = 1 << 20
"""Elements to decode at once where the elements of a part do not follow each other in the tensor."""

_Piece = tuple[int, slice, slice]
"""A chunk, the elements to take from it, and their place in the target."""


class SliceReader:
    """Fills tensors from parts of the storages of one container."""

    def __init__(self, reader: ContainerReader, workers: Workers) -> None:
        self._reader = reader
        self._workers = workers
        self._last: tuple[int, int, torch.Tensor] | None = None

    def copy(
        self,
        storage: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Fill ``target`` with a box of the contiguous tensor of ``shape`` in ``storage``. Raises InputError."""
        if not prod(lengths):
            return
        if _is_flagged(target):
            whole = torch.empty(tuple(lengths), dtype=target.dtype, device="cpu")
            self.copy(storage, shape, offsets, lengths, whole)
            target.copy_(whole)
        elif target.is_contiguous() and _is_run(shape, lengths):
            self._copy_run(storage, _position(shape, offsets), target.view(-1))
        else:
            self._copy_box(storage, 0, shape, offsets, lengths, target)

    def copy_bytes(
        self,
        storage: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """Fill ``target`` with a box of a tensor of ``dtype`` that lies in a storage of bytes."""
        size = dtype.itemsize
        plain = target.is_contiguous() and not _is_flagged(target)
        direct = plain and target.device.type == "cpu" and target.dtype == dtype
        whole = target if direct else torch.empty(tuple(lengths), dtype=dtype, device="cpu")
        view = whole.view(-1).view(torch.uint8).view(*lengths, size)
        self.copy(storage, (*shape, size), (*offsets, 0), (*lengths, size), view)
        if not direct:
            target.copy_(whole)

    def read_bytes(self, storage: int, start: int, length: int) -> torch.Tensor:
        """Bytes ``start`` to ``start + length`` of a storage of bytes."""
        content = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._copy_run(storage, start, content)
        return content

    def _copy_run(self, storage: int, start: int, target: torch.Tensor) -> None:
        dtype = self._reader.manifest.storages[storage].dtype.torch

        def decode(piece: _Piece) -> None:
            chunk, inside, place = piece
            out = target[place]
            direct = out.dtype == dtype and out.device.type == "cpu"
            if direct and len(out) == self._reader.chunk_spec(storage, chunk).numel:
                self._reader.decode_chunk(storage, chunk, out)
            else:
                out.copy_(self._reader.read_chunk(storage, chunk)[inside])

        for _ in self._workers.map(decode, _pieces(start, target.numel())):
            pass

    def _copy_box(
        self,
        storage: int,
        base: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Fill ``target`` with a box, some rows at a time. ``base`` is the position of the tensor in its storage."""
        row = prod(shape[1:])
        start = base + offsets[0] * row
        if len(shape) > 1 and row > _BLOCK:
            for k in range(lengths[0]):
                self._copy_box(storage, start + k * row, shape[1:], offsets[1:], lengths[1:], target[k])
            return
        step = max(1, _BLOCK // row)
        for first in range(0, lengths[0], step):
            rows = min(step, lengths[0] - first)
            block = self._flat(storage, start + first * row, rows * row).view(rows, *shape[1:])
            for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), 1):
                block = block.narrow(dim, offset, length)
            target[first : first + rows].copy_(block)

    def _flat(self, storage: int, start: int, length: int) -> torch.Tensor:
        """A run of a storage. Keeps the last chunk, since the next run begins in it."""
        out = torch.empty(length, dtype=self._reader.manifest.storages[storage].dtype.torch, device="cpu")
        for chunk, inside, place in _pieces(start, length):
            if self._last is None or self._last[:2] != (storage, chunk):
                self._last = storage, chunk, self._reader.read_chunk(storage, chunk)
            out[place] = self._last[2][inside]
        return out


def _is_flagged(target: torch.Tensor) -> bool:
    """Whether the values of a tensor are not those in its memory, but their conjugates or negatives."""
    return target.is_conj() or target.is_neg()


def _pieces(start: int, length: int) -> Iterator[_Piece]:
    """The chunks that hold ``length`` elements of a storage from ``start`` on."""
    at = 0
    while at < length:
        chunk, first = divmod(start + at, frames.FRAME)
        count = min(frames.FRAME - first, length - at)
        yield chunk, slice(first, first + count), slice(at, at + count)
        at += count


def _is_run(shape: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether the elements of a box follow each other in the tensor."""
    cut = next((k for k, length in enumerate(lengths) if length != 1), len(lengths))
    return list(lengths[cut + 1 :]) == list(shape[cut + 1 :])


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at ``offsets`` is in the flat tensor."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position


@dataclass(slots=True)
class _Target:
    """What an item of a plan asks for: a box of ``tensor`` from ``offsets`` on, which comes from ``parts`` slices.

    ``into`` is the memory that the planner gives for it, None until the first slice is read.
    """

    item: ReadItem
    tensor: GlobalTensor
    offsets: tuple[int, ...]
    parts: int
    into: torch.Tensor | None = None


_Work = tuple[_Target, Slice] | tuple[ReadItem, Place]


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
        self._index = ShardedIndex({}, {}, {})

    def read_metadata(self) -> Metadata:
        """The metadata of the whole checkpoint; no rank has one of its own. Raises InputError."""
        metadata = metadata_of(read_index(self.path), str(self.path))
        metadata.storage_meta = StorageMeta(checkpoint_id=self.path, load_id=self._run_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep the index; of what ranks have saved on their own each gets its own."""
        self._index = metadata.storage_data
        if self._index.joined:
            self._index = read_index(self.path, kwargs.get("rank"))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan, with the id of the save that this rank has found.

        Raises InputError where the parts that ranks wrote on their own do not make up a tensor of it: torch would leave
        the elements that are missing as they are.
        """
        for name in dict.fromkeys(item.storage_index.fqn for item in plan.items):
            tensor = self._index.tensors.get(name)
            if self._index.joined and tensor is not None:
                tensor.check_cover(f"{self.path}: {shown(name)}")
        return replace(plan, storage_data=self._index.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are. Raises InputError where ranks have found different saves."""
        # Ranks read the index one by one, and not every file system shows all machines the same one.
        if len({plan.storage_data for plan in plans}) > 1:
            raise InputError(
                f"{self.path}: ranks have found different saves; another job replaces the checkpoint, load it again"
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of ``plan``. Raises InputError for damage, UnsupportedError for a class that it may not load."""
        self._check_filled(plan, planner)
        files: dict[str, list[_Work]] = defaultdict(list)
        for item in plan.items:
            for request in self._work(item):
                files[request[1].file].append(request)
        with Workers(self._threads or threads_of_rank()) as workers, torch.no_grad():
            for name, work in files.items():
                with ContainerReader(self.path / name) as reader:
                    file = _RankFile(reader, self._index.files[name], workers)
                    for target, part in work:
                        self._read(file, target, part, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _check_filled(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Raise InputError for a tensor that slices do not fill: torch would leave the rest of it as it is.

        Slices need not make up the whole tensor: a rank may have saved its own alone. A planner that plans in its own
        way may leave tensors out.
        """
        state = getattr(planner, "state_dict", None)
        plans_all = getattr(type(planner), "create_local_plan", None) is DefaultLoadPlanner.create_local_plan
        planned = Counter[str]()
        for item in plan.items:
            planned[item.dest_index.fqn] += prod(item.lengths)
        for name, value in state.items() if isinstance(state, Mapping) else ():
            asked = sum(local.numel() for local in local_tensors(value))
            if name in self._index.tensors and planned[name] < asked and (plans_all or planned[name]):
                there = f"{planned[name]} of {asked} elements that this rank loads are there"
                raise InputError(
                    f"{self.path}: {shown(name)}: slices are missing: {there}; the checkpoint is not complete"
                )

    def _work(self, item: ReadItem) -> Iterator[_Work]:
        """What to read for an item, each from one file. Raises InputError for what is not stored."""
        name, index = item.storage_index.fqn, self._index
        if item.type is LoadItemType.BYTE_IO:
            if name not in index.objects:
                raise self._not_stored(name)
            yield item, index.objects[name]
            return
        if name not in index.tensors:
            raise self._not_stored(name)
        tensor = index.tensors[name]
        first = item.storage_index.offset or (0,) * len(item.lengths)
        offsets = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        if any(at + size > whole for at, size, whole in zip(offsets, item.lengths, tensor.shape, strict=True)):
            raise InputError(f"{self.path}: {name}: has shape {tensor.shape}, and more of it is asked for")
        boxes = tensor.overlapping(offsets, item.lengths)
        if not boxes and all(item.lengths):
            raise self._not_stored(name)
        target = _Target(item, tensor, offsets, len(boxes))
        for box in boxes:
            yield target, box

    def _not_stored(self, name: str) -> InputError:
        return InputError(f"{self.path}: {name}: is not stored")

    def _read(self, file: _RankFile, target: _Target | ReadItem, part: Slice | Place, planner: LoadPlanner) -> None:
        if isinstance(target, _Target) and isinstance(part, Slice):
            self._read_slice(file, target, part, planner)
        elif isinstance(target, ReadItem) and isinstance(part, Place):
            clean = io.BytesIO()
            # The planner unpickles any class. So it gets a new file of the value that was loaded within our limits.
            torch.save(file.load(part, f"{self.path}: {target.storage_index.fqn}"), clean)
            clean.seek(0)
            planner.load_bytes(target, clean)

    def _read_slice(self, file: _RankFile, target: _Target, part: Slice, planner: LoadPlanner) -> None:
        item, name = target.item, target.item.storage_index.fqn
        if target.into is None:
            tensor = planner.resolve_tensor(item)
            # What is copied into a detached sparse tensor does not reach the original.
            target.into = tensor.detach() if tensor.layout is torch.strided else tensor
            if tuple(target.into.shape) != tuple(item.lengths):
                shape = tuple(target.into.shape)
                raise InputError(f"{self.path}: {name}: a slice of {tuple(item.lengths)} goes into {shape}")
        into, inside, lengths = target.into, [], []
        for dim, (at, size, first, length) in enumerate(
            zip(part.offsets, part.sizes, target.offsets, item.lengths, strict=True)
        ):
            start, stop = max(at, first), min(at + size, first + length)
            inside.append(start - at)
            lengths.append(stop - start)
            # Tensors of other layouts cannot be narrowed, and are one slice.
            into = into if stop - start == length else into.narrow(dim, start - first, stop - start)
        if (place := target.tensor.pickled(part)) is not None:
            whole = file.load(place, f"{self.path}: {name}")
            if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != part.sizes:
                raise InputError(f"{self.path}: {name}: is not the tensor that {INDEX} states")
            for dim, (start, length) in enumerate(zip(inside, lengths, strict=True)):
                whole = whole if length == whole.shape[dim] else whole.narrow(dim, start, length)
            into.copy_(whole)
        else:
            file.copy(name, target.tensor.dtype, part, inside, lengths, into)
        target.parts -= 1
        if not target.parts:
            planner.commit_tensor(item, target.into)
            target.into = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory with such a checkpoint."""
        return is_local(checkpoint_id) and is_sharded(Path(checkpoint_id))


class _RankFile:
    """One file of the checkpoint, open as ``reader``. Raises InputError unless it ends with ``seal``."""

    def __init__(self, reader: ContainerReader, seal: str, workers: Workers) -> None:
        if reader.seal.hex() != seal:
            raise InputError(f"{reader.path}: belongs to another save than the {INDEX} beside it")
        self.path = reader.path
        self._storages = reader.manifest.storages
        self._slices = slices_of(reader.manifest)
        self._objects = next((record for record in reader.manifest.tensors if record.name == OBJECTS), None)
        self._reader = SliceReader(reader, workers)

    def _storage(self, name: str, record: TensorRecord | None, dtype: DType, shape: tuple[int, ...]) -> StorageRecord:
        """The storage of a tensor that fills it in order. Raises InputError where it is missing, or not as stated."""
        if record is None:
            raise InputError(f"{self.path}: has no tensor {name[:80]!r}, which {INDEX} names")
        storage = self._storages[record.storage]
        whole = record.nbytes == storage.nbytes and not record.offset and not record.flags
        if tuple(record.shape) != shape or not whole or record.dtype is not dtype:
            raise InputError(f"{self.path}: {name}: is not of the type and shape that {INDEX} states")
        return storage

    def copy(
        self, name: str, dtype: DType, part: Slice, inside: list[int], lengths: list[int], target: torch.Tensor
    ) -> None:
        """Fill ``target`` with the elements of a slice from ``inside`` on. Raises InputError."""
        record = self._slices.get((name, part.offsets))
        storage = self._storage(name, record, dtype, part.sizes)
        assert record is not None  # noqa: S101 - it has a storage
        if storage.dtype is dtype:
            self._reader.copy(record.storage, part.sizes, inside, lengths, target)
        else:
            self._reader.copy_bytes(record.storage, part.sizes, inside, lengths, target, dtype.torch)

    def load(self, place: Place, where: str) -> Any:
        """A value that torch.save wrote. Raises InputError."""
        record = self._objects
        storage = self._storage(OBJECTS, record, DType.UINT8, tuple(record.shape) if record else ())
        if record is None or place.start + place.length > storage.numel:
            raise InputError(f"{self.path}: ends before a value that {INDEX} names")
        content = self._reader.read_bytes(record.storage, place.start, place.length)
        return load_allowed(io.BytesIO(bytes_of(content)), where)
