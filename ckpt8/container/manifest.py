"""The manifest of a ``.ckpt8``: everything but the planes, as dataclasses that read and write JSON.

Reading validates every type and range: the seal proves that nothing is damaged, not that nobody is malicious. The
manifest is stored as JSON in one frame of zstd, within the bounds that a reader sets before it reads it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import zstandard

from ckpt8.codecs import RELATIONS
from ckpt8.container.header import DIRECTORY_VERSION, FILE_VERSION, REFERENCE_VERSION, check_version
from ckpt8.container.json_fields import Fields
from ckpt8.core.errors import InputError
from ckpt8.core.json_text import FREE, MANIFEST_COST, cost, parse_json
from ckpt8.core.tensors import DType, Role, Strided

_FLOOR = 1 << 20
_RATIO = 64
"""A manifest may inflate to 1 MiB plus 64 times its stored size: most stay below 12."""

_LEVELS = (9, -1, -10, -100, -1000, -10_000, -100_000)
"""Levels of zstd, the best one first. Nearly equal records compress better than a reader accepts."""

FILE, SYMLINK, DIRECTORY = "file", "symlink", "directory"
"""Formats of members that are no checkpoints: plain bytes, the target of a link, an empty directory."""

DCP = "dcp"
"""Format of the files of a distributed checkpoint, which only their ``.metadata`` explains."""


@dataclass(slots=True)
class FrameTable:
    """Stored length and crc32 of every frame of a part, ordered by chunk, then plane."""

    lengths: list[int] = field(default_factory=list)
    crcs: list[int] = field(default_factory=list)


@dataclass(slots=True)
class StorageRecord:
    """One stored run of elements: a storage of the source, or the skeleton of a member.

    ``codec`` is the stored configuration. ``reason`` says why it is lossless where its role would not ask for it.
    ``error`` holds the fields of ``error_stats.WeightError`` or ``error_stats.MomentError``.
    """

    name: str
    dtype: DType
    numel: int
    role: Role
    codec: dict[str, Any]
    reason: str | None = None
    parts: dict[str, FrameTable] = field(default_factory=dict)
    error: dict[str, Any] | None = None

    @property
    def nbytes(self) -> int:
        """Size in the source, in bytes."""
        return self.numel * self.dtype.itemsize

    @property
    def is_reference(self) -> bool:
        """Whether this is the rounded copy of masters that are storages of their own."""
        return self.codec.get("id") in dict(RELATIONS)

    @property
    def stored_bytes(self) -> int:
        """Size in the container, in bytes."""
        return sum(sum(table.lengths) for table in self.parts.values())


@dataclass(slots=True)
class TensorRecord(Strided):
    """A strided view of a storage; ``offset`` and ``stride`` in elements of ``dtype``.

    ``flags`` are ``conj`` and ``neg``: the values are the conjugate, or the negative, of what is stored.
    """

    name: str
    storage: int
    dtype: DType
    offset: int
    shape: list[int]
    stride: list[int]
    flags: list[str] = field(default_factory=list)


@dataclass(slots=True)
class ParameterRecord:
    """The moments of one parameter, and their error in update space.

    ``rule`` is how the optimizer makes a step of its state; None where that is unknown, and ``reason`` says why.
    """

    name: str
    moments: dict[str, int]
    rule: dict[str, Any] | None = None
    reason: str | None = None
    error: dict[str, Any] | None = None


@dataclass(slots=True)
class MemberRecord:
    """One source file. ``segments`` are [offset, storage] in order; all other bytes are its skeleton.

    ``path`` is relative to the source directory, with slashes, or the name of the source where that was one file.
    ``crc_fields`` are [offset, storage]: where the source repeats the crc32 of a storage.
    """

    path: str
    format: str
    size: int
    skeleton: int
    segments: list[list[int]]
    crc_fields: list[list[int]]


@dataclass(slots=True)
class Manifest:
    """The records of a container. ``slab`` and ``frame`` count elements; ``directory`` names a source directory."""

    writer: str
    preset: str
    rules: list[str]
    slab: int
    frame: int
    members: list[MemberRecord] = field(default_factory=list)
    storages: list[StorageRecord] = field(default_factory=list)
    tensors: list[TensorRecord] = field(default_factory=list)
    parameters: list[ParameterRecord] = field(default_factory=list)
    directory: str | None = None

    @property
    def version(self) -> str:
        """The lowest format version that covers the content."""
        if any(record.is_reference for record in self.storages):
            return REFERENCE_VERSION
        return FILE_VERSION if self.directory is None else DIRECTORY_VERSION

    def to_json(self) -> dict[str, Any]:
        """A tree of plain JSON values."""
        tree = {each.name: _plain(getattr(self, each.name)) for each in fields(self)}
        if self.directory is None:
            del tree["directory"]
        return {"version": self.version, **tree}


def _plain(value: object) -> object:
    """Records as plain objects, at any depth; plain values are not copied."""
    if isinstance(value, DType):
        return value.label
    if isinstance(value, Role):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value] if value and is_dataclass(value[0]) else value
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)} if is_dataclass(value) else value


def _frame_table(fields: Fields) -> FrameTable:
    table = FrameTable(fields.counts("lengths"), fields.counts("crcs", 1 << 32))
    if len(table.lengths) != len(table.crcs):
        raise fields.fail("crcs")
    return table


def _storage(fields: Fields) -> StorageRecord:
    return StorageRecord(
        name=fields.get("name", str),
        dtype=fields.choice("dtype", DType.from_label),
        numel=fields.count("numel"),
        role=fields.choice("role", Role),
        codec=fields.get("codec", dict),
        reason=fields.optional("reason", str),
        parts=fields.mapping("parts", _frame_table),
        error=fields.optional("error", dict),
    )


def _tensor(fields: Fields, storages: int) -> TensorRecord:
    record = TensorRecord(
        name=fields.get("name", str),
        storage=fields.count("storage", storages),
        dtype=fields.choice("dtype", DType.from_label),
        offset=fields.count("offset"),
        shape=fields.counts("shape"),
        stride=fields.counts("stride"),
        flags=fields.get("flags", list),
    )
    if not all(flag in ("conj", "neg") for flag in record.flags):
        raise fields.fail("flags")
    if len(record.shape) != len(record.stride):
        raise fields.fail("stride")
    return record


def _parameter(fields: Fields, storages: int) -> ParameterRecord:
    moments = fields.get("moments", dict)
    if not all(type(index) is int and 0 <= index < storages for index in moments.values()):
        raise fields.fail("moments")
    return ParameterRecord(
        name=fields.get("name", str),
        moments=moments,
        rule=fields.optional("rule", dict),
        reason=fields.optional("reason", str),
        error=fields.optional("error", dict),
    )


def _member(fields: Fields, storages: int) -> MemberRecord:
    return MemberRecord(
        path=fields.get("path", str),
        format=fields.get("format", str),
        size=fields.count("size"),
        skeleton=fields.count("skeleton", storages),
        segments=fields.pairs("segments", storages),
        crc_fields=fields.pairs("crc_fields", storages),
    )


def read_manifest(tree: object, where: str) -> Manifest:
    """The manifest of a parsed JSON tree. Raises InputError, or UnsupportedError for another version."""
    fields = Fields(tree, f"{where}: manifest")
    check_version(fields.get("version", str), where)
    storages = fields.each("storages", _storage)
    count = len(storages)
    return Manifest(
        writer=fields.get("writer", str),
        preset=fields.get("preset", str),
        rules=fields.get("rules", list),
        slab=fields.count("slab"),
        frame=fields.count("frame"),
        members=fields.each("members", lambda each: _member(each, count)),
        storages=storages,
        tensors=fields.each("tensors", lambda each: _tensor(each, count)),
        parameters=fields.each("parameters", lambda each: _parameter(each, count)),
        directory=fields.optional("directory", str),
    )


def pack_manifest(tree: dict[str, Any], rest: int) -> bytes:
    """The stored manifest of a container of ``rest`` more bytes, as small as a reader accepts it."""
    text = json.dumps(tree, ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode("ascii")
    costs = cost(text)
    for level in _LEVELS:
        stored = zstandard.ZstdCompressor(level=level).compress(text)
        if len(text) <= _FLOOR + _RATIO * len(stored) and costs <= _allowed(rest + len(stored)):
            break
    return stored


def unpack_manifest(stored: bytes, size: int, where: str) -> Any:
    """The tree of a stored manifest in a container of ``size`` bytes. Raises InputError."""
    try:
        declared = zstandard.frame_content_size(stored)
        if not 0 <= declared <= _FLOOR + _RATIO * len(stored):
            raise InputError(f"{where}: manifest declares an implausible size")
        text = zstandard.ZstdDecompressor().decompress(stored, max_output_size=declared)
    except zstandard.ZstdError as exc:
        raise InputError(f"{where}: manifest cannot be decompressed: {exc}") from exc
    return parse_json(text, f"{where}: manifest", _allowed(size))


def _allowed(size: int) -> int:
    return FREE + MANIFEST_COST * size
