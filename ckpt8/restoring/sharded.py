"""A directory of containers of ranks given back: as a plain directory of torch.distributed.checkpoint, or loaded.

Memory holds one slice at a time, and what is loaded.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt8.checkpoint.readers.dcp_metadata import METADATA, nest
from ckpt8.checkpoint.replacing import checkpoint_directory, turn_in_store
from ckpt8.checkpoint.sources.composite import Streamer
from ckpt8.checkpoint.sources.distributed import ShardedFiles
from ckpt8.checkpoint.sources.gate import load_allowed
from ckpt8.container.joined import JoinedReader
from ckpt8.container.sharded import INDEX, Place, ShardedIndex, Slice
from ckpt8.core.errors import UnsupportedError, UsageError, require
from ckpt8.core.files.atomic import Guard, refuse_source, write_at
from ckpt8.core.files.atomic_directory import AtomicDirectory
from ckpt8.core.files.paths import as_path
from ckpt8.core.text import shown
from ckpt8.core.workers import Progress, Workers
from ckpt8.restoring.members import Restored


def restore_directory(
    source: Path, target: str | os.PathLike[str] | None, *, force: bool, threads: int | None, progress: Progress
) -> Restored:
    """Write a plain directory, with a file for each container, that torch's FileSystemReader reads.

    Raises InputError for damage, OutputError for the target, UsageError without one.
    """
    path = plain_target(source, target, "the plain checkpoint")
    with JoinedReader(source) as joined, Workers(threads) as workers:
        files = ShardedFiles(joined, workers)
        members = files.members()
        parts = {(piece.name, piece.place): (member, ref) for member in members for piece, ref in member.parts}
        checkpoints = {member.path: member.checkpoint for member in members}

        @lru_cache(1)  # one file after the other is written, and each streamer has a buffer
        def streamer(file: str) -> Streamer:
            return Streamer(checkpoints[file])

        def tensor_of(name: str, box: Slice) -> torch.Tensor:
            member, ref = parts[name, (box.offsets, box.sizes)]
            value = torch.empty(ref.shape, dtype=ref.dtype.torch, device="cpu")
            streamer(member.path).copy(ref, value)
            return value

        replaced = write_plain(path, source, joined.index, checkpoints, tensor_of, files.value, progress, force=force)
        return Restored(path=path, original=source.resolve().name, other_name=None, replaced=replaced)


def plain_target(source: Path, target: str | os.PathLike[str] | None, what: str) -> Path:
    """Where a plain directory goes. Raises UsageError without a target for ``what``, OutputError for the source."""
    if target is None:
        raise UsageError(f"{source}: is a directory of containers; give another for {what}, with -o DIR")
    path = as_path(target)
    refuse_source(path, source)
    return path


class _SliceFile:
    """A new file of slices. ``places`` are those of all files."""

    def __init__(self, name: str, descriptor: int, guard: Guard, places: dict[MetadataIndex, _StorageInfo]) -> None:
        self._name, self._descriptor, self._guard, self._places = name, descriptor, guard, places
        self._position = 0

    def add(self, index: MetadataIndex, content: memoryview | bytes) -> None:
        """Append the content of a slice or value. Raises OutputError."""
        with self._guard():
            write_at(self._descriptor, memoryview(content), self._position)
        self._places[index] = _StorageInfo(self._name, self._position, len(content))
        self._position += len(content)

    def add_tensor(self, index: MetadataIndex, value: torch.Tensor) -> None:
        """Append a slice as torch.save writes it. Raises OutputError."""
        content = io.BytesIO()
        torch.save(value, content)
        self.add(index, content.getbuffer())


def write_plain(
    path: Path,
    source: Path,
    index: ShardedIndex,
    files: Iterable[str],
    tensor_of: Callable[[str, Slice], torch.Tensor],
    value_of: Callable[[str, Place], bytes],
    progress: Progress,
    *,
    force: bool,
) -> str | None:
    """Write a plain directory of ``index``, with a new file for each of ``files``, a slice at a time.

    ``tensor_of`` gives the content of a slice, ``value_of`` what torch.save has written. Returns what was there before.
    Raises OutputError.
    """
    tensors: dict[str, list[tuple[MetadataIndex, Slice]]] = defaultdict(list)
    values: dict[str, list[tuple[MetadataIndex, Place]]] = defaultdict(list)
    for name, place in index.objects.items():
        values[place.file].append((MetadataIndex(name), place))
    for name, tensor in index.tensors.items():
        for box in tensor.boxes():
            at, part = MetadataIndex(name, torch.Size(box.offsets)), tensor.pickled(box)
            if part is None:
                tensors[box.file].append((at, box))
            else:
                values[box.file].append((at, part))
    names = {file: f"{Path(file).stem}.distcp" for file in files}
    places: dict[MetadataIndex, _StorageInfo] = {}
    check = checkpoint_directory([*names.values(), METADATA])
    with AtomicDirectory(path, force=force, keep=source / INDEX, check=check, turn=turn_in_store) as output:
        for number, (file, written) in enumerate(names.items()):
            with output.new_file(written) as descriptor:
                out = _SliceFile(written, descriptor, output.guard, places)
                for at, box in tensors[file]:
                    value = tensor_of(at.fqn, box)
                    out.add_tensor(at, value)
                    progress(value.nbytes)
                for at, place in values[file]:
                    out.add(at, value_of(at.fqn, place))
                if number == 0:
                    _write_empty(index, out)
        metadata = pickle.dumps(_metadata_of(index, places))
        with output.new_file(METADATA) as descriptor, output.guard():
            write_at(descriptor, memoryview(metadata), 0)
        output.publish()
    return output.replaced


def _write_empty(index: ShardedIndex, out: _SliceFile) -> None:
    """Append the tensors without elements, which are in no container."""
    for name, tensor in index.tensors.items():
        if not tensor.boxes():
            at = MetadataIndex(name, torch.Size((0,) * len(tensor.shape)))
            out.add_tensor(at, torch.empty(tensor.shape, dtype=tensor.dtype.torch))


def _metadata_of(index: ShardedIndex, places: dict[MetadataIndex, _StorageInfo]) -> Metadata:
    """What torch's FileSystemReader reads of a plain directory: all values of ``index``, and where they lie."""
    values: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    for name, tensor in index.tensors.items():
        boxes = [(box.offsets, box.sizes) for box in tensor.boxes()] or [((0,) * len(tensor.shape), tensor.shape)]
        chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
        properties = TensorProperties(dtype=tensor.dtype.torch)
        values[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
    values |= {name: BytesStorageMetadata() for name in index.objects}
    paths = None if index.paths is None else dict(index.paths)
    metadata = Metadata(values, planner_data=paths, storage_data=places)
    if index.dcp is not None and hasattr(metadata, "version"):
        metadata.version = index.dcp
    return metadata


def load_directory(source: Path, map_location: Any, threads: int | None) -> Any:
    """The state dict that was saved, nested as it was. Raises InputError, UsageError, and UnsupportedError."""
    require(
        isinstance(map_location, (type(None), str, torch.device)),
        f"{source}: is loaded tensor by tensor and takes a device for map_location",
        UsageError,
    )
    values: dict[str, Any] = {}
    with JoinedReader(source) as joined, Workers(threads) as workers:
        files, index = ShardedFiles(joined, workers), joined.index
        members = files.members()  # before anything is loaded: it refuses a tensor of which only some parts are plain

        def load(name: str, place: Place) -> Any:
            return load_allowed(io.BytesIO(files.value(name, place)), f"{source}: {shown(name)}", map_location)

        for name, tensor in index.tensors.items():
            pickled = [place for box in tensor.boxes() if (place := tensor.pickled(box)) is not None]
            if not pickled:
                values[name] = torch.empty(tensor.shape, dtype=tensor.dtype.torch, device=map_location or "cpu")
            elif len(tensor.layout) == 1:
                values[name] = load(name, pickled[0])
            else:
                raise UnsupportedError(
                    f"{source}: {shown(name)}: is in {len(tensor.layout)} parts, which only its class can join; load "
                    "it with Ckpt8StorageReader, into a state dict that has the tensor"
                )
        for member in members:
            streamer = Streamer(member.checkpoint)
            for piece, ref in member.parts:
                target = values[piece.name]
                for dim, (offset, size) in enumerate(zip(*piece.place or ((), ()), strict=True)):
                    target = target.narrow(dim, offset, size)
                streamer.copy(ref, target)
        for name, place in index.objects.items():
            values[name] = load(name, place)
    paths = index.paths or {}
    order = [*(name for name in paths if name in values), *(name for name in values if name not in paths)]
    return nest(((name, paths.get(name, (name,)), values[name]) for name in order), str(source))
