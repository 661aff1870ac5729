"""What a container says of itself, for reports over many: its seal is checked, but not where each frame lies.

``ContainerReader`` checks everything, and takes three times as long to open. Nothing here needs torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

from ckpt8.codecs.lossless import RAW_PART, Lossless
from ckpt8.container import header
from ckpt8.container.checks import check_path
from ckpt8.container.header import SEAL_BYTES, check_version, inflate_plain, read_head, unpack_manifest
from ckpt8.container.manifest import SHARED, BaseRecord, read_base
from ckpt8.container.manifest_json import Table, as_count, as_step, as_text, below, or_null
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import SourceFile, crc32
from ckpt8.core.json_text import Fields
from ckpt8.core.tensors import DType

_LONGEST = 1 << 26
"""The most bytes of a skeleton that ``skeleton`` returns."""


class Contained(NamedTuple):
    """A file in a container; ``skeleton`` is the index of the storage with its bytes outside of tensors."""

    path: str
    format: str
    size: int
    skeleton: int


class _Storage(NamedTuple):
    """A storage: ``numel`` elements from ``start`` on, of the ``of`` that its record describes."""

    name: str | None
    record: Fields
    codec: dict[str, Any]
    start: int
    numel: int
    of: int
    is_shared: bool


class Overview:
    """Header, manifest and seal of an open container. Raises InputError where they do not hold."""

    def __init__(self, file: SourceFile) -> None:
        self._file = file
        self._where = str(file.source)
        self.size = file.source.length
        head = read_head(file, self._where)
        self._start = head.data_start
        self._entries = {entry.name: entry for entry in head.entries}
        self.seal = file.read(self.size - SEAL_BYTES, SEAL_BYTES).hex()
        tree = unpack_manifest(head.manifest, self.size, self._where)
        self._fields = fields = Fields(tree, f"{self._where}: manifest")
        self.version = fields.get("version", str)
        check_version(self.version, self._where)
        self.preset = fields.get("preset", str)
        self.directory = fields.optional("directory", str)
        self.budget = fields.optional("budget", dict)
        self.base: BaseRecord | None = read_base(fields)
        self._slab = fields.count("slab")
        if self._slab % header.FRAME or not self._slab:
            raise fields.fail("slab")
        self.members = [*fields.each("members", _member), *self._table()]
        if self.directory is not None:
            for member in self.members:
                check_path(member.path, self._where)

    def _table(self) -> Iterator[Contained]:
        """The members of a container whose storages share entries."""
        if self._fields.any("member_table") is not None:
            table = Table(self._fields.nested(self._fields.any("member_table")), "path")
            columns = ("path", as_text), ("format", as_text), ("size", as_count), ("skeleton", as_count)
            yield from map(Contained, *(table.each(key, read) for key, read in columns))

    @property
    def parameters(self) -> list[Fields]:
        """The records of the parameters."""
        return self._fields.each("parameters", lambda parameter: parameter)

    def skeleton(self, member: Contained) -> bytes | None:
        """The first bytes of a member outside of its tensors; None where they are kept in another way."""
        if member.skeleton >= len(self._storages):
            raise self._fields.fail("skeleton")
        storage = self._storages[member.skeleton]
        return self._plain(storage, min(storage.numel, _LONGEST))

    def element(self, name: str) -> tuple[DType, bytes] | None:
        """Type and bytes of the one element of the storage ``name``; None for any other storage, and without one."""
        for storage in self._storages:
            if storage.name == name and storage.numel == 1 and storage.codec.get("id") == Lossless.id:
                dtype = storage.record.choice("dtype", DType.from_label)
                planes = self._plain(storage, 1)
                return None if planes is None else (dtype, _rotated(planes) if dtype.is_plane_float else planes)
        return None

    @cached_property
    def _storages(self) -> list[_Storage]:
        """All storages by index. Those of a pack say theirs; the others take what is left, in their order."""
        own, shared = [], dict[int, _Storage]()
        for raw in self._fields.get("storages", list):
            record = self._fields.nested(raw)
            codec = record.get("codec", dict)
            if codec.get("id") == SHARED:
                shared.update(_shared(record, record.nested(raw, "shared")))
            else:
                numel = record.count("numel")
                own.append(_Storage(record.get("name", str), record, codec, 0, numel, numel, is_shared=False))
        rest, total = iter(own), len(own) + len(shared)
        if any(not 0 <= index < total for index in shared):
            raise self._fields.fail("storages")
        return [shared.get(index) or next(rest) for index in range(total)]

    def _plain(self, storage: _Storage, count: int) -> bytes | None:
        """The first elements of a storage, plane after plane; None unless it is lossless, and no difference."""
        record = storage.record
        if storage.codec.get("id") != Lossless.id:
            return None
        dtype = record.choice("dtype", DType.from_label)
        names = [f"plane{k}" for k in range(dtype.itemsize)] if dtype.is_plane_float else [RAW_PART]
        size = 1 if dtype.is_plane_float else dtype.itemsize
        parts = record.nested(record.get("parts", dict))
        start, stop = storage.start, storage.start + count
        planes = (self._plane(storage, name, parts.nested(parts.get(name, dict)), size, stop) for name in names)
        return b"".join(plane[start * size : stop * size] for plane in planes)

    def _plane(self, storage: _Storage, part: str, table: Fields, size: int, stop: int) -> bytes:
        """One plane, at least up to the element ``stop``; ``size`` bytes for each element.

        A plane ends with the first of its entries, which is longer than any skeleton that is read.
        """
        name = storage.record.get("name", str)
        lengths, crcs = table.counts("lengths"), table.counts("crcs", 1 << 32)
        chunks = 1 if storage.is_shared else header.chunk_count(storage.of)
        if not chunks == len(lengths) == len(crcs):
            raise InputError(f"{self._where}: {name}: has frames that do not fit its {storage.of} elements")
        if storage.is_shared:
            entry = self._entries.get(header.pack_entry(name, part))
        else:
            slabs = len(header.slab_chunks(storage.of, self._slab))
            entry = self._entries.get(header.entry_name(name, part, 0, slabs))
        content = []
        offset = 0
        for chunk in range(min(chunks, header.chunk_count(stop))):
            if entry is None or offset + lengths[chunk] > entry.nbytes:
                raise InputError(f"{self._where}: {name}: frames of {part!r} do not fill their entry")
            stored = self._file.read(self._start + entry.start + offset, lengths[chunk])
            if crc32(stored) != crcs[chunk]:
                raise InputError(f"{self._where}: {name}: checksum does not match; the file is damaged")
            count = storage.of if storage.is_shared else min(header.FRAME, storage.of - chunk * header.FRAME)
            content.append(inflate_plain(stored, count * size, self._where))
            offset += lengths[chunk]
        return b"".join(content)


def _member(fields: Fields) -> Contained:
    return Contained(fields.get("path", str), fields.get("format", str), fields.count("size"), fields.count("skeleton"))


def _shared(record: Fields, columns: Fields) -> Iterator[tuple[int, _Storage]]:
    """The storages of a pack by index."""
    table = Table(columns, "storages")
    numels = table.each("numel", below(header.PACK + 1))
    *starts, of = accumulate(numels, initial=0)
    if of > header.PACK:
        raise columns.fail("numel")
    codec = columns.get("codec", dict)
    indices = accumulate(table.each("storages", as_step))
    for index, name, start, numel in zip(indices, table.each("name", or_null(as_text)), starts, numels, strict=True):
        yield index, _Storage(name, record, codec, start, numel, of, is_shared=True)


def _rotated(planes: bytes) -> bytes:
    """The bytes of one float of lossless planes, see ``codecs.lossless``, in little-endian order."""
    bits, width = int.from_bytes(planes, "big"), 8 * len(planes)
    return struct.pack("<Q", bits >> 1 | (bits & 1) << (width - 1))[: len(planes)]
