"""The storage writer and the storage reader of ``ckpt8.integrations.dcp``.

Ranks may save without waiting for each other: they find an id alike, and learn whether all of them do so. The index of
the directory is put in the terms of torch.distributed.checkpoint. The reader takes parts of tensors from a container,
with only the chunks that they need.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import re
import traceback
import uuid
import warnings
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.checkpoint.utils import _DistWrapper
from torch.futures import Future

from ckpt8.checkpoint.sources.gate import load_allowed
from ckpt8.checkpoint.sources.snapshot import give_back
from ckpt8.checkpoint.tree import format_path
from ckpt8.compressing.compressor import Options
from ckpt8.compressing.policy import Policy
from ckpt8.container.collecting import RankFile, collect
from ckpt8.container.decoding import fill_box
from ckpt8.container.frames import bytes_of
from ckpt8.container.joined import objects_of, read_index, slice_problem
from ckpt8.container.manifest import MOST_DIMS
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import (
    INDEX,
    PART,
    RANK_FILE,
    GlobalTensor,
    Layout,
    Listed,
    Part,
    Place,
    ShardedIndex,
    Slice,
    has_other_parts,
    is_part,
    is_sharded,
    slices_of,
)
from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError, require
from ckpt8.core.files.atomic import mode_of_output, remove_abandoned_of, writing
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath
from ckpt8.core.files.source_file import listed as listed_folder
from ckpt8.core.grouping import grouped
from ckpt8.core.json_text import is_unicode
from ckpt8.core.public import checked
from ckpt8.core.tensors import Box, DType, Role, dtype_of, overlap, view_of_box
from ckpt8.core.text import listed, shown
from ckpt8.core.workers import Workers, threads_of_rank
from ckpt8.integrations import directory_path, is_local
from ckpt8.integrations.dcp.planner import Ckpt8SavePlanner, count_parted, local_tensors
from ckpt8.integrations.dcp.rank_file import Naming, RankPlan, without_copies
from ckpt8.integrations.dcp.staging import Staged

_begun: Counter[Path] = Counter()
"""How many saves this process has begun in each directory."""


def save_of_all_ranks(directory: Path) -> str:
    """The id of the next save into a directory: that of the job, and the number of this save there.

    The first rank that asks puts the id of the job into the store that all ranks have met in.
    """
    place = directory.absolute()
    _begun[place] += 1
    job = distributed_c10d._get_default_store().compare_set("ckpt8/job", "", uuid.uuid4().hex)
    return f"{job.decode()}-{_begun[place]}"


def saves_with_all_ranks(rank: object) -> bool:
    """Whether the ``dcp.save`` that has called this is one of all ranks; ``rank`` is what torch tells the writer.

    torch tells a writer no more than its number in the group of the save, which is 0 for the first rank of any group,
    and for a rank alone. So the group is looked up where ``dcp.save`` keeps it; only what calls a writer in another way
    is judged by the number.
    """
    for frame, _ in traceback.walk_stack(inspect.currentframe()):
        group = frame.f_locals.get("distW")
        if isinstance(group, _DistWrapper):
            return group.use_dist and group.get_world_size() == dist.get_world_size()
    return rank == dist.get_rank()


ADVICE = "give a directory that every rank can reach"


class InDirectory:
    """A storage in the directory ``path``, also ``s3://BUCKET/KEY``. Raises UsageError for other URLs."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = directory_path(path, ADVICE)
        self._run_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, in another directory if one is given."""
        self.path = directory_path(self.path if checkpoint_id is None else checkpoint_id, ADVICE)
        self._run_id = uuid.uuid4().hex


def index_of(directory: Path, metadata: Metadata, files: Sequence[RankFile], save_id: str | None) -> ShardedIndex:
    """The index of what ranks have stored of ``metadata``.

    Raises OutputError where a rank did not store something, UsageError where the planner's data are not the path of
    each value.
    """
    values = {
        name: value for name, value in metadata.state_dict_metadata.items() if isinstance(value, TensorStorageMetadata)
    }
    layouts = collect(files, {name: tuple(value.size) for name, value in values.items()})
    layouts = {name: layouts.get(name, Listed([])) for name in values}
    places = {name: Place(file.file, *place) for file in files for name, place in file.objects.items()}
    objects = [name for name in metadata.state_dict_metadata if name not in values]
    missing = [name for name, value in values.items() if not _is_complete(layouts[name], value)]
    missing += [name for name in objects if name not in places]
    if missing:
        raise OutputError(f"{directory}: {missing[0]}: no rank has stored it; nothing was replaced")
    paths = metadata.planner_data
    require(
        paths is None
        or (
            isinstance(paths, Mapping)
            and all(
                isinstance(name, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
                for name, path in paths.items()
            )
        ),
        "the planner keeps data that JSON cannot hold; use torch's DefaultSavePlanner, or one derived from it",
        UsageError,
    )
    names = [file.file for file in files]
    tensors = {
        name: GlobalTensor(dtype_of(value.properties.dtype), tuple(value.size), layouts[name], names)
        for name, value in values.items()
    }
    return ShardedIndex(
        {file.file: file.seal for file in files},
        tensors,
        {name: places[name] for name in objects},
        paths,
        metadata.version,
        save_id,
    )


def _is_complete(layout: Layout, value: TensorStorageMetadata) -> bool:
    """Whether a layout has all chunks that the planner has planned. A grid has the whole tensor."""
    stored = set() if layout.is_whole else {offsets for _, offsets, _ in layout.boxes()}
    return layout.is_whole or all(tuple(chunk.offsets) in stored for chunk in value.chunks if all(chunk.sizes))


def _remove_others(folder: Path, used: Container[str]) -> None:
    """Remove the files of older saves, and what killed ones have left. In a store each takes two requests."""
    paths = list(folder.iterdir())
    others = [path for path in paths if is_part(path.name) or re.fullmatch(RANK_FILE, path.name)]
    with ThreadPoolExecutor(_REMOVALS) as pool:
        list(pool.map(_removed, (path for path in others if is_part(path.name) or path.name not in used)))
    remove_abandoned_of(rf"{RANK_FILE}|{re.escape(INDEX)}|{PART}", paths)


def _removed(path: Path) -> None:
    with contextlib.suppress(OSError, OutputError):
        path.unlink()


_REMOVALS = 8
"""Files that are removed at a time."""

_SHOWN = 5


class Ckpt8StorageWriter(InDirectory, StorageWriter):
    """Writes a checkpoint into the directory ``path``, or below ``s3://BUCKET/KEY``, which every rank must reach.

    ``preset``, ``budget``, ``rules``, ``threads`` and ``stats`` are those of ``ckpt8.save``. Rules match the names of
    the state dict, with ``weights.`` before those of trained parameters at its top level and ``other.`` before those
    that belong to no model and no optimizer. The writer packs slices where they are, CPU or GPU. It replaces a
    checkpoint in the directory, unless ``overwrite`` is False. With ``use_collectives=False`` every rank writes its
    part of the index as well, and a directory that holds a checkpoint is refused. ``threads`` of None is what the ranks
    of this machine have for each. Save with ``Ckpt8SavePlanner`` where ranks hold replicas.

    ``dcp.async_save`` has the writer copy the state to memory of the CPU, unless it gets an ``async_stager``. Memory
    for one copy stays until the next such save, or ``close``.

    >>> from torch.distributed import checkpoint as dcp
    >>> from ckpt8.integrations.dcp import Ckpt8StorageWriter
    >>> saved = dcp.save({"model": model.state_dict()}, storage_writer=Ckpt8StorageWriter("step-1"), no_dist=True)
    """

    @checked
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        preset: str | None = None,
        budget: float | None = None,
        rules: Sequence[str] = (),
        threads: int | None = None,
        stats: bool = True,
        overwrite: bool = True,
    ) -> None:
        super().__init__(path)
        self._policy = Policy.of(preset, rules, budget)
        self._options = Options(threads or threads_of_rank(), stats)
        self._overwrite = overwrite
        self._spread = True
        self._part: Part | None = None
        self.written: list[Path] = []
        """The files of this rank in the save that goes on."""

    should_synchronize_after_execute = _synchronize_after_execute = False
    """With the next three methods, what makes a writer the stager of its saves."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A copy of a state dict on the CPU, see ``ckpt8.save``. Raises MemoryError."""
        return Staged(state_dict).state()

    def synchronize_staging(self) -> None:
        """Nothing: a copy is complete when ``stage`` returns."""

    def close(self) -> None:
        """Free the memory that is kept for the next copy."""
        give_back()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin a save. Raises UsageError where ranks cannot tell which part of a checkpoint is theirs."""
        self._part, self.written = None, []
        if not kwargs.get("use_collectives", True) and dist.is_initialized() and dist.get_world_size() > 1:
            require(
                saves_with_all_ranks(kwargs.get("rank")),
                "use_collectives=False makes one checkpoint of all ranks of the job; leave it out, or "
                "process_group and no_dist",
                UsageError,
            )
            self._part = Part(dist.get_rank(), dist.get_world_size(), save_of_all_ranks(self.path))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory. Raises OutputError, UsageError for a tensor that no container holds."""
        for item in plan.items:
            name, dims = item.index.fqn, 0 if item.tensor_data is None else len(item.tensor_data.size)
            if item.tensor_data is not None and not is_unicode(name):
                raise UsageError(f"{shown(name)}: is no valid Unicode; give the value another name")
            if dims > MOST_DIMS:
                raise UsageError(f"{shown(name)}: has {dims} dimensions, more than {MOST_DIMS}; reshape it")
        with writing(self.path):
            self.path.mkdir(mode_of_output(directory=True), parents=True, exist_ok=True)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Number the ranks, and make room: of a save that failed, the files of other ranks are still there.

        Raises OutputError where the directory holds a checkpoint that must stay, UsageError for a rule that matches
        nothing in any of the plans.
        """
        require(
            not (self.path / ".metadata").exists(),
            f"{self.path}: holds a checkpoint of another format; give another directory",
            OutputError,
        )
        require(
            self._part is None or not has_other_parts(self.path, self._part),
            f"{self.path}: holds a checkpoint, which ranks cannot replace without collectives; give another directory",
            OutputError,
        )
        # Parts of this save may be there already: those of ranks that are faster.
        require(
            self._part is not None or self._overwrite or not is_sharded(listed_folder(self.path)),
            f"{self.path}: holds a checkpoint, and overwrite is False; give another directory",
            OutputError,
        )
        if self._policy.rules and all(getattr(plan, "usable", True) for plan in plans):
            items = [item for plan in plans for item in plan.items]
            tensors = {item.index.fqn for item in items if item.type is not WriteItemType.BYTE_IO}
            naming = Naming(tensors, {item.index.fqn for item in items} - tensors)
            self._policy.check_rules([format_path(naming.place(name)) for name in tensors])
        # A bucket has room, and is listed once for each save, in the end.
        if self._part is None and not isinstance(self.path, RemotePath):
            is_checkpoint = is_sharded(self.path)
            # Without an index ranks have written a checkpoint without collectives, or are about to.
            if not is_checkpoint or (self.path / INDEX).exists():
                with contextlib.suppress(Ckpt8Error, OSError):
                    _remove_others(self.path, read_index(self.path).files if is_checkpoint else ())
        first = 0 if self._part is None else self._part.rank
        return [replace(plan, storage_data=rank) for rank, plan in enumerate(plans, first)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file. Raises OutputError."""
        self._spread = not isinstance(planner, Ckpt8SavePlanner)
        results = []
        has_use_of_averages = self._policy.budget is not None or self._measures
        if rank := RankPlan(plan if has_use_of_averages else without_copies(plan), planner):
            rank.warn_of_refusals(self.path)
            # A name that no file has yet: the old checkpoint stays whole until the new one replaces it. Ranks look for
            # their own names alone: a list of the directory would be as long as there are ranks.
            names = (self.path / f"__{plan.storage_data}_{number}.ckpt8" for number in count())
            target = next(path for path in names if not path.exists())
            written, size = rank.write(target, self._policy, self._options)
            self.written.append(target)
            results.append(WriteResult(MetadataIndex(target.name), size, written))
        # A planner that reads files knows whether they have changed meanwhile.
        getattr(planner, "check_unchanged", lambda: None)()
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, which replaces an older checkpoint, and remove the files of that one. Raises OutputError."""
        written: list[RankFile] = [result.storage_data for of_rank in results for result in of_rank]
        metadata.version, metadata.storage_meta = "1.0.0", self.storage_meta()
        index = index_of(self.path, metadata, written, self._run_id)
        metadata.storage_data = index = replace(index, part=self._part)
        folder = self.path if self._part else listed_folder(self.path)
        missing = [name for name in index.files if not (folder / name).exists()]
        require(
            not missing,
            f"{self.path}: ranks have written {listed(missing, _SHOWN)} elsewhere; {ADVICE}, nothing was replaced",
            OutputError,
        )
        # Before anything is replaced: a warning may be an error.
        self._warn_of_losses(index, written)
        index.write(folder)
        if self._part is None:
            _remove_others(folder, index.files)

    @property
    def _measures(self) -> bool:
        """Whether the error of updates is measured, as far as one rank has what that takes."""
        return self._options.stats and self._policy.preset != "lossless"

    def _warn_of_losses(self, index: ShardedIndex, written: Sequence[RankFile]) -> None:
        """Warn of what is larger, or less well known, because no rank has all of it. Once."""
        unspent: Counter[str] = sum((Counter(file.unspent) for file in written), Counter())
        kept = (
            f"{unspent.total()} of {sum(len(tensor.layout) for tensor in index.tensors.values())} slices are kept as "
            "flash keeps them, not within the budget"
        )
        parted, total = count_parted(index.tensors, frozenset(Role) if self._measures or unspent else {Role.WEIGHT})
        if parted and not unspent:
            kept = (
                "the error of their updates is not measured"
                if self._measures
                else "weights do not share bits with masters"
            )
        if parted:
            warnings.warn(
                f"{self.path}: {parted} of {total} parameters have weight and moments in different ranks' files, so "
                f"{kept}; {'save with Ckpt8SavePlanner()' if self._spread else 'no rank has all of them'}",
                stacklevel=2,
            )
        elif unspent:
            warnings.warn(f"{self.path}: {kept}: {listed(unspent, _SHOWN)}", stacklevel=2)

    def storage_meta(self) -> StorageMeta:
        """The directory and the id of this save."""
        return StorageMeta(checkpoint_id=self.path, save_id=self._run_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this is a path of the file system, or ``s3://BUCKET/KEY``."""
        return is_local(checkpoint_id) or str(checkpoint_id).startswith("s3://")


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
        require(reader.seal.hex() == seal, f"{reader.path}: belongs to another save than the {INDEX} beside it")
        self._reader = reader
        self._workers = workers
        self._slices = slices_of(reader.manifest)

    def __len__(self) -> int:
        """The number of slices."""
        return len(self._slices)

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
        require(
            len({plan.storage_data for plan in plans}) <= 1,
            f"{self.path}: ranks have found different saves; another job replaces the checkpoint, load it again",
        )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all of ``plan``. Raises InputError for damage, UnsupportedError for a class that it may not load."""
        self._check_filled(plan, planner)
        files = grouped(request for item in plan.items for request in self._requests(item, planner))
        with Workers(self._threads or threads_of_rank()) as workers, torch.no_grad():
            for name, reads in files.items():
                with ContainerReader(self.path / name) as reader:
                    file = _RankFile(reader, self._index.files[name], workers)
                    if len(reads) >= len(file):
                        reader.expect_all()
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
        is_path = is_local(checkpoint_id) or str(checkpoint_id).startswith("s3://")
        return is_path and is_sharded(as_path(checkpoint_id))
