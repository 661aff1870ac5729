"""The index of a directory in the terms of torch.distributed.checkpoint, and the directory of a writer or reader."""

from __future__ import annotations

import os
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt8.container.sharded.collecting import RankFile, collect
from ckpt8.container.sharded.index import GlobalTensor, Place, ShardedIndex
from ckpt8.container.sharded.layouts import Layout, Listed
from ckpt8.core.errors import InputError, OutputError, UsageError
from ckpt8.core.tensors import DType
from ckpt8.integrations import local_path

ADVICE = "give a directory that every rank can reach"


class InDirectory:
    """A storage in the directory ``path``. Raises UsageError for a path that is not local."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = local_path(path, ADVICE)
        self._run_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, in another directory if one is given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, ADVICE)
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
    names = [each.file for each in files]
    tensors = {}
    for name, value in values.items():
        layout = layouts.get(name, Listed([]))
        if not _is_complete(layout, value):
            raise _not_stored(directory, name)
        tensors[name] = GlobalTensor(DType.from_label(str(value.properties.dtype)), tuple(value.size), layout, names)
    places = {name: Place(each.file, *place) for each in files for name, place in each.objects.items()}
    objects = {}
    for name in metadata.state_dict_metadata.keys() - values.keys():
        if name not in places:
            raise _not_stored(directory, name)
        objects[name] = places[name]
    seals = {each.file: each.seal for each in files}
    return ShardedIndex(seals, tensors, objects, _paths(metadata.planner_data), metadata.version, save_id)


def _not_stored(directory: Path, name: str) -> OutputError:
    return OutputError(f"{directory}: {name}: no rank has stored it; nothing was replaced")


def _is_complete(layout: Layout, value: TensorStorageMetadata) -> bool:
    """Whether a layout has all chunks that the planner has planned. A grid has the whole tensor."""
    if layout.is_whole:
        return True
    stored = {offsets for _, offsets, _ in layout.boxes()}
    return all(tuple(chunk.offsets) in stored for chunk in value.chunks if all(chunk.sizes))


def _paths(planner_data: object) -> dict[str, tuple[str | int, ...]] | None:
    match planner_data:
        case None:
            return None
        case Mapping() if all(
            isinstance(name, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
            for name, path in planner_data.items()
        ):
            return dict(planner_data)
    raise UsageError(
        "the planner keeps data that JSON cannot hold; use torch's DefaultSavePlanner, or one derived from it"
    )


def metadata_of(index: ShardedIndex, where: str) -> Metadata:
    """The metadata of a checkpoint; ``storage_data`` is the index. Raises InputError for a type unknown to torch.

    A tensor that is cut into a grid is one chunk here, so that planning a load takes no longer with many ranks: the
    reader finds the cells that a box needs.
    """
    values = {name: _tensor(name, tensor, where) for name, tensor in index.tensors.items()}
    objects = {name: BytesStorageMetadata() for name in index.objects}
    paths = None if index.paths is None else dict(index.paths)
    return Metadata(values | objects, planner_data=paths, storage_data=index, version=index.dcp)


def _tensor(name: str, tensor: GlobalTensor, where: str) -> TensorStorageMetadata:
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
