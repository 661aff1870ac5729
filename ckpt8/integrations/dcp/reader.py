"""The storage reader of ``ckpt8.integrations.dcp``.

It takes parts of tensors from a container, with only the chunks that they need.
"""

import io
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ckpt8.checkpoint.gate import load_allowed
from ckpt8.container.decoding import fill_box
from ckpt8.container.frames import bytes_of
from ckpt8.container.joined import objects_of, read_index, slice_problem
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import INDEX, GlobalTensor, Place, ShardedIndex, Slice, is_sharded, slices_of
from ckpt8.core.errors import InputError
from ckpt8.core.public import checked
from ckpt8.core.tensors import Box, DType, overlap, view_of_box
from ckpt8.core.text import shown
from ckpt8.core.workers import Workers, threads_of_rank
from ckpt8.integrations import is_local
from ckpt8.integrations.dcp.planner import local_tensors
from ckpt8.integrations.dcp.writer import InDirectory


def metadata_of(name: str, tensor: GlobalTensor, where: str) -> TensorStorageMetadata:
    """The metadata of a tensor. Raises InputError for a type unknown to torch.

    A tensor that is cut into a grid is one chunk here, so that planning a load takes no longer with many ranks: the
    reader finds the cells that a box needs.
    """
    try:
        dtype = tensor.dtype.torch
    except AttributeError as exc:
        raise InputError(f"{where}: {name}: has the type {tensor.dtype.label}, which this torch does not know") from exc
    whole = ((0,) * len(tensor.shape), tensor.shape)
    boxes = [] if tensor.is_whole else [(box.offsets, box.sizes) for box in tensor.boxes()]
    if not boxes and all(tensor.shape):  # torch plans nothing for a tensor without chunks, and says nothing
        boxes = [whole]
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(tensor.shape), chunks)


@dataclass(slots=True)
class _Target:
    """What an item of a plan asks for: a ``box`` of ``tensor``, of which ``missing`` slices are still to come.

    ``into`` is the memory that the planner gives for it, None until the first slice is read.
    """

    item: ReadItem
    tensor: GlobalTensor
    box: Box
    missing: int
    into: torch.Tensor | None = None


class _RankFile:
    """One file of the checkpoint, open as ``reader``. Raises InputError unless it ends with ``seal``."""

    def __init__(self, reader: ContainerReader, seal: str, workers: Workers) -> None:
        if reader.seal.hex() != seal:
            raise InputError(f"{reader.path}: belongs to another save than the {INDEX} beside it")
        self._reader = reader
        self._workers = workers
        self._slices = slices_of(reader.manifest)

    def fill(self, name: str, tensor: GlobalTensor, part: Slice, box: Box, target: torch.Tensor) -> None:
        """Fill ``target`` with a ``box`` of a tensor, which lies in a slice of it. Raises InputError."""
        record = self._slices.get((name, part.offsets))
        problem = slice_problem(self._reader.manifest, record, tensor, part)
        if record is None or problem is not None:
            raise InputError(f"{self._reader.path}: {name[:80]}: {problem}")
        inside = [at - first for at, first in zip(box[0], part.offsets, strict=True)]
        fill_box(self._reader, record.storage, tensor.dtype, part.sizes, target, inside, self._workers)

    def load(self, place: Place, where: str) -> Any:
        """A value that torch.save wrote. Raises InputError."""
        record = objects_of(self._reader.manifest)
        nbytes = 0 if record is None else self._reader.manifest.storages[record.storage].nbytes
        if record is None or place.start + place.length > nbytes:
            raise InputError(f"{self._reader.path}: ends before a value that {INDEX} names")
        content = torch.empty(place.length, dtype=torch.uint8, device="cpu")
        fill_box(self._reader, record.storage, DType.UINT8, (nbytes,), content, (place.start,), self._workers)
        return load_allowed(io.BytesIO(bytes_of(content)), where)


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
        index = read_index(self.path)
        values = {name: metadata_of(name, tensor, str(self.path)) for name, tensor in index.tensors.items()}
        return Metadata(
            values | {name: BytesStorageMetadata() for name in index.objects},
            planner_data=None if index.paths is None else dict(index.paths),
            storage_data=index,
            storage_meta=StorageMeta(checkpoint_id=self.path, load_id=self._run_id),
            version=index.dcp,
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Keep the index; of what ranks have saved on their own each gets its own."""
        index = metadata.storage_data
        self._index = read_index(self.path, kwargs.get("rank")) if index.joined else index

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
        files: dict[str, list[Callable[[_RankFile], None]]] = defaultdict(list)
        for item in plan.items:
            for name, read in self._requests(item, planner):
                files[name].append(read)
        with Workers(self._threads or threads_of_rank()) as workers, torch.no_grad():
            for name, reads in files.items():
                with ContainerReader(self.path / name) as reader:
                    file = _RankFile(reader, self._index.files[name], workers)
                    for read in reads:
                        read(file)
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
                raise InputError(
                    f"{self.path}: {shown(name)}: slices are missing: {planned[name]} of {asked} elements that this "
                    "rank loads are there; the checkpoint is not complete"
                )

    def _requests(self, item: ReadItem, planner: LoadPlanner) -> Iterator[tuple[str, Callable[[_RankFile], None]]]:
        """What reads an item, each from the file of that name. Raises InputError for what is not stored."""
        name, index = item.storage_index.fqn, self._index
        if item.type is LoadItemType.BYTE_IO and name in index.objects:
            yield index.objects[name].file, partial(self._read_value, planner, item)
            return
        if item.type is LoadItemType.BYTE_IO or name not in index.tensors:
            raise self._not_stored(name)
        tensor = index.tensors[name]
        first = item.storage_index.offset or (0,) * len(item.lengths)
        offsets = tuple(a + b for a, b in zip(first, item.storage_offsets, strict=True))
        if any(at + size > whole for at, size, whole in zip(offsets, item.lengths, tensor.shape, strict=True)):
            raise InputError(f"{self.path}: {name}: has shape {tensor.shape}, and more of it is asked for")
        boxes = tensor.overlapping(offsets, item.lengths)
        if not boxes and all(item.lengths):
            raise self._not_stored(name)
        target = _Target(item, tensor, (offsets, tuple(item.lengths)), len(boxes))
        for box in boxes:
            yield box.file, partial(self._read_slice, planner, target, box)

    def _not_stored(self, name: str) -> InputError:
        return InputError(f"{self.path}: {name}: is not stored")

    def _read_value(self, planner: LoadPlanner, item: ReadItem, file: _RankFile) -> None:
        name, clean = item.storage_index.fqn, io.BytesIO()
        # The planner unpickles any class. So it gets a new file of the value that was loaded within our limits.
        torch.save(file.load(self._index.objects[name], f"{self.path}: {name}"), clean)
        clean.seek(0)
        planner.load_bytes(item, clean)

    def _read_slice(self, planner: LoadPlanner, target: _Target, part: Slice, file: _RankFile) -> None:
        (offsets, sizes), name = target.box, target.item.storage_index.fqn
        if target.into is None:
            tensor = planner.resolve_tensor(target.item)
            # What is copied into a detached sparse tensor does not reach the original.
            target.into = tensor.detach() if tensor.layout is torch.strided else tensor
            if tuple(target.into.shape) != sizes:
                shape = tuple(target.into.shape)
                raise InputError(f"{self.path}: {name}: a slice of {sizes} goes into {shape}")
        both = overlap(target.box, part[1:])
        assert both is not None  # noqa: S101 - it was looked up by that
        into = view_of_box(target.into, both, offsets)
        if (place := target.tensor.pickled(part)) is None:
            file.fill(name, target.tensor, part, both, into)
        else:
            whole = file.load(place, f"{self.path}: {name}")
            if not isinstance(whole, torch.Tensor) or tuple(whole.shape) != part.sizes:
                raise InputError(f"{self.path}: {name}: is not the tensor that {INDEX} states")
            into.copy_(view_of_box(whole, both, part.offsets))
        target.missing -= 1
        if not target.missing:
            planner.commit_tensor(target.item, target.into)
            target.into = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a directory with such a checkpoint."""
        return is_local(checkpoint_id) and is_sharded(Path(checkpoint_id))
