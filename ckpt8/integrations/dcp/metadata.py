"""``ckpt8-dcp.json``: what a checkpoint of ``integrations.dcp`` holds, and where. JSON, where torch has a pickle.

    format      "ckpt8-dcp";  version: "MAJOR.MINOR"
    dcp         version of torch's planner data;  save_id: text or null
    files       {name: seal}: the files of this checkpoint beside this one, and the SHA-256 that each ends with
    tensors     {name: {"dtype", "shape", "chunks": [{"offsets", "sizes", and where it is}, ...]}}
    objects     {name: where it is}: what is no tensor, as torch.save writes it
    paths       {name: [key, ...]}: the keys that lead to a value in the state dict that was saved; null if unknown

Where something is: ``file``, and either ``tensor``, the name of a tensor in it, or ``start`` and ``length`` in bytes of
the tensor ``objects``, for what torch.save wrote.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
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
from ckpt8.container.member_paths import is_plain_name
from ckpt8.core.errors import InputError, OutputError, UnsupportedError, UsageError
from ckpt8.core.files.atomic import AtomicFile
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.json_text import parse_json
from ckpt8.core.tensors import DType

OBJECTS = "objects"
"""The tensor of bytes in which a file holds what torch.save made of values that are no plain tensors."""

FORMAT = "ckpt8-dcp"
VERSION = "1.0"
_LARGEST = 1 << 62
_SEAL_DIGITS = 64
_LONGEST = 512 << 20
"""Bytes: room for three million slices."""


def local_path(path: str | os.PathLike[str]) -> Path:
    """A path of the file system. Raises UsageError for anything else."""
    if "://" in str(path):
        raise UsageError(f"{path}: is not a path of the file system; give a directory that every rank can reach")
    return Path(path)


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a slice or an object is: as ``tensor`` in ``file``, or as bytes there. ``seal`` identifies the file."""

    file: str
    seal: str
    tensor: str | None = None
    start: int = 0
    length: int = 0

    def to_json(self) -> dict[str, Any]:
        """Without the seal, which is said once for each file."""
        if self.tensor is not None:
            return {"file": self.file, "tensor": self.tensor}
        return {"file": self.file, "start": self.start, "length": self.length}


def write_metadata(
    directory: Path, metadata: Metadata, stored: Mapping[MetadataIndex, Stored], save_id: str | None
) -> set[str]:
    """Write the file, which makes the checkpoint one; names of the files that belong to it.

    Raises OutputError where something was not stored, UsageError for a planner whose data is no path to each value.
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
                {
                    "offsets": list(chunk.offsets),
                    "sizes": list(chunk.sizes),
                    **place(MetadataIndex(name, chunk.offsets)),
                }
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
    if planner_data is None:
        return None
    if isinstance(planner_data, Mapping) and all(
        isinstance(name, str) and isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        for name, path in planner_data.items()
    ):
        return {name: list(path) for name, path in planner_data.items()}
    raise UsageError(
        "the planner keeps data that JSON cannot hold; use torch's DefaultSavePlanner, or one derived from it"
    )


def read_metadata(directory: Path) -> Metadata:
    """The metadata of a checkpoint; ``storage_data`` has a ``Stored`` for every index. Raises InputError."""
    path = directory / FILE_NAME
    if not path.exists():
        raise InputError(_about_missing(directory))
    file = SourceFile(ByteRange.of(path))
    try:
        if file.source.length > _LONGEST:
            raise InputError(f"{path}: has {file.source.length} bytes, more than {_LONGEST}")
        tree = parse_json(file.read(0, file.source.length), str(path))
    finally:
        file.close()
    fields = _Fields(tree, str(path))
    if fields.text("format") != FORMAT:
        raise InputError(f"{path}: is not the metadata of a checkpoint of ckpt8")
    if fields.text("version").partition(".")[0] != VERSION.partition(".")[0]:
        raise UnsupportedError(f"{path}: has version {fields.text('version')}; this ckpt8 reads version {VERSION}")
    return _Reading(fields).metadata()


def _about_missing(directory: Path) -> str:
    if (directory / ".metadata").exists():
        return f"{directory}: was written by torch's own FileSystemWriter; read it with FileSystemReader"
    if directory.is_dir() and any(directory.glob("__*.ckpt8")):
        return f"{directory}: has no {FILE_NAME}; the save was interrupted before it was complete"
    return f"{directory}: holds no checkpoint of Ckpt8StorageWriter (no {FILE_NAME})"


class _Fields:
    """Typed access to a JSON object. Every mismatch is an InputError that names the field."""

    def __init__(self, value: object, where: str) -> None:
        self.where = where
        if not isinstance(value, dict):
            raise InputError(f"{where}: is malformed: expected an object")
        self.value: dict[str, Any] = value

    def fail(self, key: str) -> InputError:
        return InputError(f"{self.where}: is malformed at {key!r}")

    def text(self, key: str) -> str:
        value = self.value.get(key)
        if not isinstance(value, str):
            raise self.fail(key)
        return value

    def optional_text(self, key: str) -> str | None:
        return None if self.value.get(key) is None else self.text(key)

    def counts(self, key: str) -> list[int]:
        values = self.value.get(key)
        if not isinstance(values, list) or not all(type(each) is int and 0 <= each < _LARGEST for each in values):
            raise self.fail(key)
        return values

    def count(self, key: str) -> int:
        value = self.value.get(key)
        if type(value) is not int or not 0 <= value < _LARGEST:
            raise self.fail(key)
        return value

    def each(self, key: str) -> Iterable[tuple[str, _Fields]]:
        """The objects in an object."""
        for name, value in _Fields(self.value.get(key), f"{self.where}: {key}").value.items():
            yield name, _Fields(value, f"{self.where}: {name[:80]}")


class _Reading:
    """Validates the whole tree before anything of it is used."""

    def __init__(self, fields: _Fields) -> None:
        self._fields = fields
        self._seals = {
            name: self._seal(name, seal)
            for name, seal in _Fields(fields.value.get("files"), fields.where).value.items()
        }

    def _seal(self, name: str, seal: object) -> str:
        digits = isinstance(seal, str) and len(seal) == _SEAL_DIGITS and set(seal) <= set("0123456789abcdef")
        if not digits or not is_plain_name(name):
            raise self._fields.fail("files")
        return str(seal)

    def metadata(self) -> Metadata:
        """The metadata as torch's planners know it."""
        values: dict[str, Any] = {}
        stored: dict[MetadataIndex, Stored] = {}
        for name, fields in self._fields.each("tensors"):
            values[name] = self._tensor(name, fields, stored)
        for name, fields in self._fields.each("objects"):
            if name in values:
                raise self._fields.fail(name)
            values[name] = BytesStorageMetadata()
            stored[MetadataIndex(name)] = self._stored(fields, tensors=False)
        version = self._fields.optional_text("dcp")
        return Metadata(values, planner_data=self._paths(), storage_data=stored, version=version)

    def _tensor(self, name: str, fields: _Fields, stored: dict[MetadataIndex, Stored]) -> TensorStorageMetadata:
        shape = fields.counts("shape")
        try:
            dtype = DType.from_label(fields.text("dtype")).torch
        except (KeyError, AttributeError) as exc:
            raise fields.fail("dtype") from exc
        chunks = []
        values = fields.value.get("chunks")
        if not isinstance(values, list) or prod(shape) >= _LARGEST:
            raise fields.fail("chunks")
        for number, value in enumerate(values):
            chunk = _Fields(value, fields.where)
            offsets, sizes = chunk.counts("offsets"), chunk.counts("sizes")
            ends = [a + b for a, b in zip(offsets, sizes, strict=False)]
            if not len(offsets) == len(sizes) == len(shape) or any(e > s for e, s in zip(ends, shape, strict=True)):
                raise fields.fail("offsets")
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            stored[MetadataIndex(name, offsets, number)] = self._stored(chunk, tensors=True)
        return TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)

    def _stored(self, fields: _Fields, *, tensors: bool) -> Stored:
        file = fields.text("file")
        if file not in self._seals:
            raise fields.fail("file")
        tensor = fields.optional_text("tensor") if tensors else None
        if tensor is not None:
            return Stored(file, self._seals[file], tensor)
        return Stored(file, self._seals[file], None, fields.count("start"), fields.count("length"))

    def _paths(self) -> dict[str, tuple[str | int, ...]] | None:
        value = self._fields.value.get("paths")
        if value is None:
            return None
        paths = _Fields(value, self._fields.where).value
        for name, path in paths.items():
            if not isinstance(path, list) or not path or not all(type(key) in (str, int) for key in path):
                raise self._fields.fail(name)
        return {name: tuple(path) for name, path in paths.items()}
