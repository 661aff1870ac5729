"""A directory with a checkpoint of ``integrations.dcp``, and its ``ckpt8-dcp.json``: what it holds, and where.

The file is JSON; torch writes a pickle.

    format      "ckpt8-dcp";  version: "MAJOR.MINOR"
    dcp         version of torch's planner data;  save_id: text or null
    files       {name: seal}: the files of this checkpoint beside this one, and the SHA-256 that each ends with
    tensors     {name: {"dtype", "shape", "chunks": [{"offsets", "sizes", and where it is}, ...]}}
    objects     {name: where it is}: values that are no tensors, as torch.save writes them
    paths       {name: [key, ...]}: the keys that lead to a value in the state dict that was saved; null if unknown

Where something is: ``file``, and either ``tensor``, the name of a tensor in it, or ``start`` and ``length`` in bytes of
the tensor ``objects``, for values that torch.save wrote.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from ckpt8.checkpoint.readers.entries import PACKED_INDEX as FILE_NAME
from ckpt8.container.json_fields import LARGEST, Fields
from ckpt8.container.member_paths import is_plain_name
from ckpt8.core.errors import InputError, OutputError, UnsupportedError, UsageError
from ckpt8.core.files.atomic import AtomicFile
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.json_text import parse_json
from ckpt8.core.tensors import DType
from ckpt8.integrations import local_path

OBJECTS = "objects"
"""The tensor of bytes with the values that are no plain tensors, as torch.save writes them."""

FORMAT = "ckpt8-dcp"
VERSION = "1.0"
_LONGEST = 512 << 20
"""Bytes: room for three million slices."""
_SEAL = re.compile(r"[0-9a-f]{64}")
_ADVICE = "give a directory that every rank can reach"


class InDirectory:
    """A storage in the directory ``path``. Raises UsageError for a path that is not local."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self.path = local_path(path, _ADVICE)
        self._run_id = uuid.uuid4().hex

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory."""
        return self.path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load, in another directory if one is given."""
        self.path = self.path if checkpoint_id is None else local_path(checkpoint_id, _ADVICE)
        self._run_id = uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a slice or an object is: ``tensor`` in ``file``, or bytes of the tensor OBJECTS there.

    ``seal`` identifies the file. ``unspent`` says why a slice is not kept within the budget of the save.
    """

    file: str
    seal: str
    tensor: str | None = None
    start: int = 0
    length: int = 0
    unspent: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Where it is, without the seal, which ``files`` has once for each file."""
        if self.tensor is not None:
            return {"file": self.file, "tensor": self.tensor}
        return {"file": self.file, "start": self.start, "length": self.length}


def write_metadata(
    directory: Path, metadata: Metadata, stored: Mapping[MetadataIndex, Stored], save_id: str | None
) -> set[str]:
    """Write the file that makes the directory a checkpoint. Returns the names of the files that belong to it.

    Raises OutputError where a rank did not store something, UsageError where the planner's data are not the path of
    each value.
    """
    tensors, objects = {}, {}
    used: dict[str, str] = {}

    def place(index: MetadataIndex) -> dict[str, Any]:
        if index not in stored:
            raise OutputError(f"{directory}: {index.fqn}: no rank has stored it; nothing was replaced")
        found = stored[index]
        used[found.file] = found.seal
        return found.to_json()

    for name, value in metadata.state_dict_metadata.items():
        if isinstance(value, TensorStorageMetadata):
            chunks = [
                {"offsets": [*chunk.offsets], "sizes": [*chunk.sizes], **place(MetadataIndex(name, chunk.offsets))}
                for chunk in value.chunks
            ]
            dtype = str(value.properties.dtype).removeprefix("torch.")
            tensors[name] = {"dtype": dtype, "shape": list(value.size), "chunks": chunks}
        else:
            objects[name] = place(MetadataIndex(name))
    tree = {
        "format": FORMAT,
        "version": VERSION,
        "dcp": metadata.version,
        "save_id": save_id,
        "files": used,
        "tensors": tensors,
        "objects": objects,
        "paths": _paths(metadata.planner_data),
    }
    text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    with AtomicFile(directory / FILE_NAME, force=True) as output:
        with output.guard():
            output.file.write(text.encode("ascii"))
        output.publish()
    return set(used)


def _paths(planner_data: object) -> dict[str, list[str | int]] | None:
    match planner_data:
        case None:
            return None
        case Mapping() if all(
            isinstance(name, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
            for name, path in planner_data.items()
        ):
            return {name: list(path) for name, path in planner_data.items()}
    raise UsageError(
        "the planner keeps data that JSON cannot hold; use torch's DefaultSavePlanner, or one derived from it"
    )


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint; ``storage_data`` has a ``Stored`` for every index.

    Checks all of it first. Raises InputError where it is missing or malformed, UnsupportedError for a later version.
    """
    path = directory / FILE_NAME
    if not path.exists():
        raise InputError(_explain_missing(directory))
    with closing(SourceFile(ByteRange.of(path))) as file:
        if file.source.length > _LONGEST:
            raise InputError(f"{path}: has {file.source.length} bytes, more than {_LONGEST}")
        tree = parse_json(file.read(0, file.source.length), str(path))
    fields = Fields(tree, f"{path}:")
    if fields.get("format", str) != FORMAT:
        raise InputError(f"{path}: is not the metadata of a checkpoint of ckpt8")
    version = fields.get("version", str)
    if version.partition(".")[0] != VERSION.partition(".")[0]:
        raise UnsupportedError(f"{path}: has version {version}; this ckpt8 reads version {VERSION}")
    return _read_tree(fields)


def _explain_missing(directory: Path) -> str:
    if (directory / ".metadata").exists():
        return f"{directory}: was written by torch's own FileSystemWriter; read it with FileSystemReader"
    if directory.is_dir() and any(directory.glob("__*.ckpt8")):
        return f"{directory}: has no {FILE_NAME}; the save was interrupted before it was complete"
    return f"{directory}: holds no checkpoint of Ckpt8StorageWriter (no {FILE_NAME})"


def _read_tree(fields: Fields) -> Metadata:
    seals = fields.get("files", dict)
    if not all(is_plain_name(name) and isinstance(seal, str) and _SEAL.fullmatch(seal) for name, seal in seals.items()):
        raise fields.fail("files")
    values: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    for name, tensor in fields.mapping("tensors", lambda each: each).items():
        values[name] = _read_tensor(name, tensor, seals, stored)
    for name, place in fields.mapping("objects", lambda each: _read_stored(each, seals)).items():
        if name in values:
            raise fields.fail(name)
        values[name] = BytesStorageMetadata()
        stored[MetadataIndex(name)] = place
    paths = fields.optional("paths", dict)
    for name, path in (paths or {}).items():
        if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
            raise fields.fail(name)
    planner_data = None if paths is None else {name: tuple(path) for name, path in paths.items()}
    return Metadata(values, planner_data=planner_data, storage_data=stored, version=fields.optional("dcp", str))


def _read_tensor(
    name: str, fields: Fields, seals: Mapping[str, str], stored: dict[MetadataIndex, Stored]
) -> TensorStorageMetadata:
    """A tensor in torch's terms. Adds its chunks to ``stored``."""
    shape = fields.counts("shape")
    try:
        dtype = fields.choice("dtype", DType.from_label).torch
    except AttributeError as exc:  # a type that this torch does not have
        raise fields.fail("dtype") from exc
    if prod(shape) >= LARGEST:
        raise fields.fail("shape")
    chunks = []
    for number, chunk in enumerate(fields.each("chunks", lambda each: each)):
        offsets, sizes = chunk.counts("offsets"), chunk.counts("sizes")
        if not len(offsets) == len(sizes) == len(shape) or any(
            offset + size > whole for offset, size, whole in zip(offsets, sizes, shape, strict=True)
        ):
            raise fields.fail("offsets")
        chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
        stored[MetadataIndex(name, offsets, number)] = _read_stored(chunk, seals, chunk.optional("tensor", str))
    return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)


def _read_stored(fields: Fields, seals: Mapping[str, str], tensor: str | None = None) -> Stored:
    seal = fields.choice("file", seals.__getitem__)
    place = (0, 0) if tensor is not None else (fields.count("start"), fields.count("length"))
    return Stored(fields.get("file", str), seal, tensor, *place)
