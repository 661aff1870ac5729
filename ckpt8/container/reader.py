"""Reads a ``.ckpt8``: the seal first, then the manifest, then any chunk of any storage on its own.

Storages that share entries are read in turn, so a thread keeps the packs that it used last. The elements of copies are
rounded from masters, which are other storages. The parts of a difference count from those of its base, or from those
that the decoded elements of the base have under its codec. ``SkeletonFile`` and ``ContainerReader.skeleton`` have the
bytes of a member outside its tensors, without torch: ``inspect`` names what a pickle would call.
"""

from __future__ import annotations

import struct
import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.codecs import Codec, codec_from_config
from ckpt8.codecs.base import Run
from ckpt8.codecs.lossless import RAW_PART, Lossless
from ckpt8.codecs.rounded_copy import ROUNDED
from ckpt8.container import bases, header
from ckpt8.container.checks import (
    Locator,
    Places,
    check_companions,
    check_deltas,
    check_frame,
    check_members,
    check_paths,
    check_references,
    member_runs,
)
from ckpt8.container.header import FRAME, Entry, inflate_plain, manifest_text, parse_manifest, read_head
from ckpt8.container.manifest import BaseRecord, Manifest, Pack, Packing, StorageRecord
from ckpt8.container.manifest_json import read_manifest
from ckpt8.core.backend import Backend, for_arrays
from ckpt8.core.closing import Closing, without_collection
from ckpt8.core.errors import InputError, RefusedError, require
from ckpt8.core.files.source_file import ByteRange, FilePool, SourceFile, open_range
from ckpt8.core.tensors import DType, PartSpec, TensorSpec

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array, Arrays

_MOST_CHUNKS = 64
"""The most chunks of a skeleton that ``skeleton`` returns."""

_KEPT = 16
"""Packs that a thread keeps: more than a checkpoint has roles and element types."""


@dataclass(slots=True)
class _Open:
    """A pack in memory: its parts, where each storage begins in them, and its elements if these were asked for."""

    specs: dict[str, tuple[PartSpec, list[int]]]
    parts: dict[str, Array]
    elements: Array | None = None


_SCALARS = 16
"""The most elements of a storage that holds numbers such as the step of an optimizer."""


def _check_base(delta: ContainerReader, base: ContainerReader) -> None:
    """Raise InputError unless the chain of ``delta`` is that of ``base``, and each difference has its partner there."""
    record, below = delta.manifest.base, base.stated
    if record is None or record.seal != below.seal:
        raise InputError(f"{delta.path}: its base {base.path} was replaced while it was opened")
    require(
        record.key == below.key and record.links == below.links + 1 and record.place > below.place,
        f"{delta.path}: its place in its chain does not fit that of its base {base.path}",
    )
    for index, own in enumerate(delta.manifest.storages):
        if own.base is not None and (problem := _partner_problem(delta, index, base, own.base)) is not None:
            raise InputError(f"{delta.path}: {own.name}: {problem} in its base {base.path}")


def _partner_problem(delta: ContainerReader, index: int, base: ContainerReader, at: int) -> str | None:
    """Why a storage is no difference to that ``at`` the index in the base; None if it may be."""
    if at >= len(base.manifest.storages):
        return "has no partner"
    own, partner = delta.manifest.storages[index], base.manifest.storages[at]
    if partner.pack is not None or (partner.dtype, partner.numel) != (own.dtype, own.numel):
        return "has a partner of another type or size"
    return None if delta.codec(index).counts_from(base.codec(at)) else "has a partner with another codec"


class ContainerReader(Closing):
    """An open ``.ckpt8``. Opening verifies the seal and that every frame is where the header says.

    The base of a delta is opened when a part of it is first needed. It is looked for beside the delta, then in
    ``base_dirs``, by default those of ``bases.looked_for_in``. A ``pool`` bounds how many files are open at a time.
    """

    accepts_damage = False

    def __init__(
        self,
        path: Path,
        *,
        base_dirs: Sequence[Path] | None = None,
        pool: FilePool | None = None,
    ) -> None:
        self.path = path
        self.base_dirs = bases.directories() if base_dirs is None else tuple(base_dirs)
        self._base: ContainerReader | InputError | None = None
        self._lock, self._local = threading.Lock(), threading.local()
        self._file = open_range(ByteRange.of(path), pool)
        self._codecs: dict[int | Pack, Codec] = {}
        try:
            with without_collection():
                entries, stored = self._open_header()
                self.manifest = self._open_manifest(stored)
                self.manifest.stored_nbytes = self.size
                self.places = self._locate({entry.name: entry for entry in entries})
                for check in (check_references, check_companions, check_deltas):
                    check(self.manifest, self.codec, str(path))
                check_members(self.manifest, str(path))
                check_paths(self.manifest, str(path))
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file, and the files below it."""
        self._file.close()
        with self._lock:
            if isinstance(self._base, ContainerReader):
                self._base.close()

    @cached_property
    def backend(self) -> Backend:
        """What decodes its chunks. Whoever decodes none needs neither numba nor torch."""
        return for_arrays(sum(record.nbytes for record in self.manifest.storages))

    def base(self) -> ContainerReader | None:
        """The base of a delta, open; None for other containers. Raises InputError where it is missing or damaged."""
        record = self.manifest.base
        if record is None:
            return None
        with self._lock:
            if self._base is None:
                try:
                    self._base = self._open_base(record)
                except InputError as exc:
                    self._base = exc  # each chunk of a delta asks again
            if isinstance(self._base, InputError):
                raise self._base
            return self._base

    def _open_base(self, record: BaseRecord) -> ContainerReader:
        path = bases.find_base(self.path, record, self.base_dirs, damaged_too=self.accepts_damage)
        base = type(self)(path, base_dirs=self.base_dirs)
        try:
            _check_base(self, base)
        except BaseException:
            base.close()
            raise
        return base

    def links(self) -> list[ContainerReader]:
        """The containers below a delta, open, its base first. Raises InputError where one is missing or damaged."""
        base = self.base()
        return [] if base is None else [base, *base.links()]

    @property
    def in_order(self) -> bool:
        """Whether all of the file is best read in the order of ``start_of``."""
        return self._file.in_order

    def start_of(self, storage: int, chunk: int = 0) -> int:
        """Where a chunk of a storage begins in the file; 0 where it has no bytes there."""
        record = self.manifest.storages[storage]
        chunks = header.chunk_count(record.numel) if record.pack is None else 1
        places = self.places[record.pack or storage].values()
        firsts = (place.offsets[len(place.offsets) // chunks * chunk] for place in places if place.offsets)
        return min(firsts, default=0)

    def keep_all(self) -> None:
        """Say that all of the file will be read twice."""
        self._file.keep_all(needs_room=True)

    def expect_all(self) -> None:
        """Say that all of the file will be read, about in its order, and scalars perhaps again."""
        self._file.expect([(0, self.size)])
        records = enumerate(self.manifest.storages)
        self.expect_each(index for index, record in records if record.numel <= _SCALARS and record.pack is None)

    def expect_each(self, storages: Iterable[int]) -> None:
        """Say that these storages will be read, one after the other."""
        if self.in_order:
            self._file.expect(span for storage in storages for span in self._spans(storage))

    def need(self, storage: int) -> None:
        """Say that a storage is decoded now, chunk by chunk."""
        if self.in_order and (spans := self._spans(storage)):
            self._file.need(spans[0][0], sum(length for _, length in spans))

    def _spans(self, storage: int) -> list[tuple[int, int]]:
        """Offsets and lengths of the frames of a storage, in the order of the file."""
        places = self.places[self.manifest.storages[storage].pack or storage].values()
        return sorted(span for place in places for span in zip(place.offsets, place.table.lengths, strict=True))

    def check_in_place(self) -> None:
        """Raise InputError where its path leads to another file than the open one, or that has changed."""
        self._file.check_in_place()

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return self._file.source.length

    @property
    def seal(self) -> bytes:
        """The stored SHA-256, which identifies this file."""
        return self._file.read(self.size - header.SEAL_BYTES, header.SEAL_BYTES)

    @property
    def stated(self) -> bases.Stated:
        """What it says of its place in a chain."""
        return bases.Stated(self.seal.hex(), self.manifest.base)

    def _open_header(self) -> tuple[list[Entry], bytes]:
        """The entries, and the stored manifest, once header and manifest match the seal."""
        entries, stored, self._data_start = read_head(self._file, str(self.path))
        return entries, stored

    def _open_manifest(self, stored: bytes) -> Manifest:
        where = str(self.path)
        manifest = read_manifest(parse_manifest(manifest_text(stored, where), self.size, where), where)
        require(
            manifest.frame == header.FRAME and manifest.slab % header.FRAME == 0 and manifest.slab,
            f"{where}: manifest is malformed at 'slab'",
        )
        return manifest

    def codec(self, owner: int | Pack) -> Codec:
        """The codec of a storage, or of all storages of a pack. Raises UnsupportedError."""
        codec = self._codecs.get(owner)
        if codec is None:
            record = owner if isinstance(owner, Pack) else self.manifest.storages[owner]
            shared = record.pack if isinstance(record, StorageRecord) else None
            codec = self._codecs[owner] = codec_from_config(record.codec) if shared is None else self.codec(shared)
        return codec

    def chunk_spec(self, storage: int, chunk: int) -> TensorSpec:
        """The specification of one chunk of a storage."""
        return header.chunk_spec(self.manifest.storages[storage], chunk)

    def owners(self) -> Iterator[tuple[int | Pack, StorageRecord | Pack]]:
        """What has entries of its own, and its record: storages in no pack, by their index, and packs."""
        yield from ((index, record) for index, record in enumerate(self.manifest.storages) if record.pack is None)
        yield from ((pack, pack) for pack in self.manifest.packs)

    def _locate(self, entries: dict[str, Entry]) -> dict[int | Pack, Places]:
        """Where all frames lie: by storage, or by pack. Raises InputError."""
        locator = Locator(str(self.path), self._data_start, self.manifest.slab, entries)
        located = {owner: locator.places(record, self.codec(owner)) for owner, record in self.owners()}
        if entries:
            raise InputError(f"{self.path}: holds {next(iter(entries))[:80]!r}, which the manifest does not know")
        return located

    def read_parts(
        self, storage: int, chunk: int, only: Collection[str] | None = None, *, reuse: bool = False
    ) -> Arrays:
        """The parts of one chunk, all or ``only`` some, checked against checksums and declared sizes.

        A reference has one part more, its elements, which are rounded from its masters. With ``reuse`` symbols are in a
        buffer of this thread, until it reads others so. Raises InputError that names the tensor.
        """
        from ckpt8.container.unpacking import unpacked

        parts, packings = self.read_packed(storage, chunk, only, reuse=reuse)
        return unpacked(parts, packings, self.where(storage), self.backend, reuse=reuse)

    def read_packed(
        self, storage: int, chunk: int, only: Collection[str] | None = None, *, reuse: bool = False
    ) -> tuple[Arrays, dict[str, Packing]]:
        """The parts of a chunk, symbols as rows of planes, and how these are packed, by name.

        Symbols that a base completes are in no planes.
        """
        from ckpt8.container.unpacking import total, unpacked

        record, base = self.manifest.storages[storage], self.base_of(storage)
        if record.pack is not None:
            pack, at = self._read_pack(record.pack, record.name, only), record.place
            return {
                part: pack.parts[part][bounds[at] : bounds[at + 1]]
                for part, (_, bounds) in pack.specs.items()
                if only is None or part in only
            }, {}
        if base is None:
            return self._read_own(storage, chunk, only, reuse=reuse)
        # The parts of all bases first: a chunk then takes the memory of two, however long the chain is.
        reader, index = base
        below, where = reader.parts_under(self.codec(storage), index, chunk, only), self.where(storage)
        own = unpacked(*self._read_own(storage, chunk, only, reuse=True), where, self.backend)
        return total(own, below, where, self.backend), {}

    def parts_under(self, codec: Codec, storage: int, chunk: int, only: Collection[str] | None = None) -> Arrays:
        """The parts, all or ``only`` some, that those of a chunk of a delta under ``codec`` are compared with.

        They are those of ``storage``. A lattice with another step or salt counts from the points next to its decoded
        weights. Raises InputError.
        """
        from ckpt8.core.arrays import empty

        own = self.codec(storage)
        if codec == own:
            return self.read_parts(storage, chunk, only)
        spec, first = self.chunk_spec(storage, chunk), chunk * FRAME
        elements = empty(spec.numel, spec.dtype)
        own.decode_arrays(self.read_parts(storage, chunk), spec, elements, backend=self.backend, first=first)
        try:
            parts = codec.encode_arrays(elements, spec, backend=self.backend, first=first)
        except RefusedError as exc:
            raise InputError(f"{self.where(storage)}: {exc}, and no difference counts from that") from exc
        return parts if only is None else {name: parts[name] for name in only if name in parts}

    def base_of(self, storage: int) -> tuple[ContainerReader, int] | None:
        """The base of a storage that is kept as a difference, open, and its index there. Raises InputError."""
        index = self.manifest.storages[storage].base
        base = None if index is None else self.base()
        return None if index is None or base is None else (base, index)

    def whole_bytes(self, storage: int) -> int:
        """What a storage takes where it is no difference: here or in a file below. Raises InputError."""
        reader = self
        while (below := reader.base_of(storage)) is not None:
            reader, storage = below
        return reader.manifest.storages[storage].stored_bytes

    @property
    def whole_size(self) -> int:
        """What the container takes where no storage is a difference. Raises InputError."""
        storages = enumerate(self.manifest.storages)
        return self.size + sum(self.whole_bytes(index) - record.stored_bytes for index, record in storages)

    def _read_own(
        self, storage: int, chunk: int, only: Collection[str] | None, *, reuse: bool
    ) -> tuple[Arrays, dict[str, Packing]]:
        """The parts of a chunk of a storage in no pack, with differences as they are stored, and their packing."""
        from ckpt8.container.frames import read_part

        spec, codec = self.chunk_spec(storage, chunk), self.codec(storage)
        copied: dict[str, Array] = {}
        if codec.copied is not None:
            runs = codec.copied.cut(chunk * header.FRAME, spec.numel)
            copied[ROUNDED] = self._read_copy(runs, spec.numel, codec.copied.rounded_type(spec.dtype))
        expected = codec.layout(spec)
        wanted = expected if only is None else [part for part in expected if part in only]
        places, where = self.places[storage], self.where(storage)
        parts_read = {
            part: read_part(self._file, places.get(part), expected[part], chunk, where, reuse=reuse) for part in wanted
        }
        packings = {part: packing for part, (_, packing) in parts_read.items() if packing is not None}
        return copied | {part: x for part, (x, _) in parts_read.items()}, packings

    def _read_copy(self, runs: Iterable[Run], numel: int, dtype: DType) -> Array:
        """The ``numel`` elements of ``runs``, rounded to ``dtype``. Raises InputError for damage of a master."""
        from ckpt8.core.arrays import empty

        out = empty(numel, dtype)
        at, last, rounded = 0, (-1, -1), out
        for storage, start, count in runs:
            begin, stop = at, at + count
            if storage is None:
                out[begin:stop] = start
                at = stop
                continue
            while at < stop:
                chunk, into = divmod(start + at - begin, FRAME)
                if (storage, chunk) != last:
                    last, rounded = (storage, chunk), self._rounded_chunk(storage, chunk, dtype)
                length = min(stop - at, FRAME - into)
                out[at : at + length] = rounded[into : into + length]
                at += length
        return out

    def _rounded_chunk(self, storage: int, chunk: int, dtype: DType) -> Array:
        """One chunk of a master rounded to ``dtype``; to bf16 from its upper parts alone where it has them."""
        from ckpt8.core.arrays import rounded

        codec = self.codec(storage)
        if codec.upper_parts and dtype is DType.BFLOAT16:
            return codec.upper(self.read_parts(storage, chunk, codec.upper_parts))
        return rounded(self.read_chunk(storage, chunk), dtype)

    def where(self, owner: int | Pack) -> str:
        """How messages name a storage or a pack."""
        record = owner if isinstance(owner, Pack) else self.manifest.storages[owner]
        return f"{self.path}: {record.name}"

    def _read_pack(self, owner: Pack, name: str, only: Collection[str] | None = None) -> _Open:
        """A pack, kept for this thread, with all its parts or ``only`` some.

        Raises InputError that names the tensor ``name``.
        """
        from ckpt8.container import frames
        from ckpt8.container.unpacking import unpacked
        from ckpt8.core.arrays import empty

        kept: OrderedDict[Pack, _Open] = self._local.__dict__.setdefault("packs", OrderedDict())
        pack = kept.pop(owner, None) or _Open(header.pack_layout(self.codec(owner), owner.spec, owner.numels), {})
        kept[owner] = pack
        if len(kept) > _KEPT:
            kept.popitem(last=False)
        places, where = self.places[owner], f"{self.path}: {name}"
        for part, (spec, _) in pack.specs.items():
            if part in pack.parts or not (only is None or part in only):
                continue
            if owner.numel:
                stored, packing = frames.read_part(self._file, places.get(part), spec, 0, where, reuse=True)
                packings = {} if packing is None else {part: packing}
                pack.parts |= unpacked({part: stored}, packings, where, self.backend)
            else:
                pack.parts[part] = empty(0, spec.dtype)
        return pack

    def fill_chunk(self, storage: int, chunk: int, out: Array) -> None:
        """Fill ``out`` with the elements of a chunk. Raises InputError for damage."""
        from ckpt8.core.arrays import empty

        record, codec = self.manifest.storages[storage], self.codec(storage)
        if record.pack is None or not codec.by_element:
            self.decode_chunk(storage, chunk, out)
            return
        pack = self._read_pack(record.pack, record.name)
        if pack.elements is None:
            pack.elements = empty(record.pack.numel, record.pack.dtype)
            codec.decode_arrays(pack.parts, record.pack.spec, pack.elements, backend=self.backend)
        start, stop = record.pack.starts[record.place : record.place + 2]
        out[:] = pack.elements[start:stop]

    def is_plain(self, storage: int) -> bool:
        """Whether a storage is kept as plain bytes, as skeletons are."""
        record = self.manifest.storages[storage]
        return set(self.places[record.pack or storage]) == {RAW_PART} and record.dtype is DType.UINT8

    def stored_frame(self, owner: int | Pack, part: str, index: int) -> bytes:
        """The stored bytes of one frame of a storage or a pack, checked. Raises InputError. This needs no torch."""
        located = self.places[owner][part]
        stored = self._file.read(located.offsets[index], located.table.lengths[index])
        check_frame(stored, located.table.crcs[index], self.where(owner))
        return stored

    def plain_chunk(self, storage: int, part: str, chunk: int) -> bytes:
        """One part of a chunk of a lossless storage, one plane or all bytes. Raises InputError. This needs no torch."""
        record, where = self.manifest.storages[storage], str(self.path)
        size, pack = 1 if record.dtype.is_plane_float else record.dtype.itemsize, record.pack
        if pack is None:
            length = self.chunk_spec(storage, chunk).numel * size
            return inflate_plain(self.stored_frame(storage, part, chunk), length, where)
        start, stop = pack.starts[record.place : record.place + 2]
        return inflate_plain(self.stored_frame(pack, part, 0), pack.numel * size, where)[start * size : stop * size]

    def skeleton(self, member: int) -> bytes | None:
        """The first 64 MiB of a member outside of its tensors; None where they are kept in another way."""
        storage = self.manifest.members[member].skeleton
        if not self.is_plain(storage):
            return None
        chunks = min(header.chunk_count(self.manifest.storages[storage].numel), _MOST_CHUNKS)
        return b"".join(self.plain_chunk(storage, RAW_PART, chunk) for chunk in range(chunks))

    def element(self, name: str) -> tuple[DType, bytes] | None:
        """Type and bytes of the one element of the storage ``name``; None for any other storage, and without one."""
        for index, record in enumerate(self.manifest.storages):
            is_plain = record.codec.get("id") == Lossless.id and record.base is None
            if record.name == name and record.numel == 1 and is_plain:
                parts = self.places[index if record.pack is None else record.pack]
                content = b"".join(self.plain_chunk(index, part, 0) for part in parts)
                return record.dtype, _rotated(content) if record.dtype.is_plane_float else content
        return None

    def check_stored(self) -> None:
        """Read all stored frames. Raises InputError where one does not match its checksum. This needs no torch."""
        for owner, parts in self.places.items():
            for part, place in parts.items():
                for index in range(len(place.offsets)):
                    self.stored_frame(owner, part, index)

    def decode_chunk(self, storage: int, chunk: int, out: Array) -> Arrays:
        """Decode one chunk into ``out``. Returns its parts.

        Symbols are in a buffer of this thread, until it decodes another chunk.
        """
        spec, first = self.chunk_spec(storage, chunk), chunk * header.FRAME
        # Companions first: while they are decoded, there are no other parts in memory.
        companions = self.companions(storage, chunk)
        parts = self.read_parts(storage, chunk, reuse=True)
        codec = self.codec(storage)
        codec.decode_arrays(parts, spec, out, backend=self.backend, first=first, companions=companions)
        return parts

    def companions(self, storage: int, chunk: int) -> Arrays:
        """The decoded chunks of other storages that the codec of a chunk needs. Raises InputError for damage there."""
        from ckpt8.core.arrays import floats

        values = self.expanded(storage, chunk)
        place, lent = vars(self._local).pop("lent", (None, None))
        for name, other in self.codec(storage).companion_storages.items():
            elements = lent if place == (other, chunk) else self.read_chunk(other, chunk)
            values[name] = floats(elements, self.manifest.storages[other].dtype)
        return values

    def expanded(self, storage: int, chunk: int) -> dict[str, Array]:
        """The companions of a chunk that row and column statistics give, in fp32. Raises InputError for damage."""
        factored = self.codec(storage).factored
        if not factored:
            return {}
        from ckpt8.codecs.vscaled.statistics import expand

        first, numel = chunk * FRAME, self.chunk_spec(storage, chunk).numel
        return {
            name: expand(
                statistics, self.read_chunk(statistics.rows, 0), self.read_chunk(statistics.columns, 0), first, numel
            )
            for name, statistics in factored.items()
        }

    def lend(self, storage: int, chunk: int, elements: Array) -> None:
        """Give this thread the decoded ``elements`` of a chunk: the next one that it decodes may need them."""
        self._local.lent = (storage, chunk), elements

    def read_chunk(self, storage: int, chunk: int) -> Array:
        """One decoded chunk in new memory. Raises InputError for damage."""
        from ckpt8.core.arrays import empty

        spec = self.chunk_spec(storage, chunk)
        out = empty(spec.numel, spec.dtype)
        self.fill_chunk(storage, chunk, out)
        return out


def _rotated(planes: bytes) -> bytes:
    """The bytes of one float of lossless planes, see ``codecs.lossless``, in little-endian order."""
    bits, width = int.from_bytes(planes, "big"), 8 * len(planes)
    return struct.pack("<Q", bits >> 1 | (bits & 1) << (width - 1))[: len(planes)]


class SkeletonFile(SourceFile):
    """A member whose tensors are zero. Messages name the container. The caller closes that."""

    def __init__(self, reader: ContainerReader, member: int) -> None:
        record = reader.manifest.members[member]
        self.source = ByteRange(reader.path, 0, record.size, record.path)
        self._reader = reader
        self._skeleton, where = record.skeleton, str(reader.path)
        self._runs = [run for run in member_runs(reader.manifest, member, where) if run.storage == self._skeleton]
        self._starts, self._stops = [run.start for run in self._runs], [run.stop for run in self._runs]
        self._chunk = lru_cache(maxsize=1)(partial(reader.plain_chunk, self._skeleton, RAW_PART))

    @property
    def stored(self) -> int:
        """Bytes of the container."""
        return self._reader.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError for damage and behind the end."""
        self._check_extent(offset, len(buffer))
        buffer[:] = bytes(len(buffer))
        stop = offset + len(buffer)
        for at in range(bisect_right(self._stops, offset), bisect_left(self._starts, stop)):
            run = self._runs[at]
            start, end = max(run.start, offset), min(run.stop, stop)
            while start < end:
                chunk, into = divmod(run.origin + start - run.start, FRAME)
                part = self._chunk(chunk)[into : into + end - start]
                buffer[start - offset : start - offset + len(part)] = part
                start += len(part)

    def check_unchanged(self) -> None:
        """Nothing to check: every frame is checked when it is read."""
