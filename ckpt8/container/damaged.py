"""Reads what is whole of a damaged container, and fills lost chunks.

It needs the manifest, which stands at the end, before the seal, and says where everything belongs. It does not need the
header: if the seal does not match, it reads the header entry by entry and finds the other entries by the checksums of
their frames.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
import zstandard

from ckpt8.container import bases, frames, header
from ckpt8.container.checks import NOWHERE, Locator, Places, check_frame_count
from ckpt8.container.frames import bytes_of
from ckpt8.container.header import FRAME, Entry
from ckpt8.container.joined import objects_of, read_index, slice_problem
from ckpt8.container.manifest import BaseRecord, Pack, StorageRecord, TensorRecord, planes
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import INDEX, GlobalTensor, Place, Slice, slices_of
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import FilePool, crc32
from ckpt8.core.tensors import DType, Parts
from ckpt8.core.text import shown

_SEARCHED = 1 << 27
"""Bytes at the end of a file in which to search for the manifest."""
_MANIFESTS_TRIED = 16
_ENTRIES_TRIED, _ENTRIES_GUESSED = 64, 8
_SMALLEST_FRAME = 8
"""The shortest zstd frame of a whole chunk. Bounds how much a small file can make a reader write."""

_ENTRY_END, _METADATA_END, _TYPE = b']},"', b'"},"', b'":{"dtype":"U8","shape":['
_OFFSETS = re.compile(rb"\d{1,17}\],\"data_offsets\":\[(\d{1,17}),(\d{1,17})(?:\]\}\} *)?")


class DamagedContainer(ContainerReader):
    """A container that may be damaged, and so may its base. Raises InputError where the manifest is not readable.

    ``damage`` says what is wrong with header, manifest or seal; None where nothing is. ``lost`` holds the chunks of
    every storage that ``mark_lost`` named: floats in them read as NaN, all else as zeros.
    """

    def __init__(self, path: Path, *, base_dirs: Sequence[Path] | None = None, pool: FilePool | None = None) -> None:
        self.damage: str | None = None
        self.lost: dict[int, set[int]] = {}
        super().__init__(path, base_dirs=base_dirs, pool=pool)

    def _find_base(self, record: BaseRecord) -> Path:
        return bases.find_base(self.path, record, self.base_dirs, damaged_too=True)

    def _open_base(self, path: Path) -> ContainerReader:
        return DamagedContainer(path, base_dirs=self.base_dirs)

    def damage_below(self) -> str | None:
        """What is wrong with the base of a delta, or with those below it, as ``damage``, or that one is missing."""
        try:
            links = self.links()
        except InputError as exc:
            return str(exc)
        return next((link.damage for link in links if isinstance(link, DamagedContainer) and link.damage), None)

    def mark_lost(self, storage: int, chunk: int) -> None:
        """From now on do not decode this chunk."""
        self.lost.setdefault(storage, set()).add(chunk)

    def lost_runs(self, storage: int) -> list[tuple[int, int]]:
        """The lost runs [start, stop) of a storage, in elements."""
        numel, lost = self.manifest.storages[storage].numel, self.lost.get(storage, set())
        # A run starts at a lost chunk whose predecessor is not lost, and stops after one whose successor is not.
        starts = sorted(chunk * header.FRAME for chunk in lost if chunk - 1 not in lost)
        stops = sorted(min((chunk + 1) * header.FRAME, numel) for chunk in lost if chunk + 1 not in lost)
        return list(zip(starts, stops, strict=True))

    def decode_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> Parts:
        """Decode a chunk into ``out``. A lost one becomes NaN, or 0 in integers and 8-bit floats; it has no parts."""
        if chunk not in self.lost.get(storage, ()):
            return super().decode_chunk(storage, chunk, out)
        out.fill_(float("nan")) if self.manifest.storages[storage].dtype.is_plane_float else out.zero_()
        return {}

    def fill_chunk(self, storage: int, chunk: int, out: torch.Tensor) -> None:
        """Fill ``out`` with the elements of a chunk. A lost one becomes NaN, or 0 in integers and 8-bit floats."""
        is_lost = chunk in self.lost.get(storage, ())
        self.decode_chunk(storage, chunk, out) if is_lost else super().fill_chunk(storage, chunk, out)

    def is_whole(self, storage: int, chunk: int, out: torch.Tensor) -> bool:
        """Decode a chunk into ``out``; return whether that works."""
        try:
            super().fill_chunk(storage, chunk, out)
        except InputError:
            return False
        return True

    def _open_header(self) -> tuple[list[Entry], bytes]:
        try:
            return super()._open_header()
        except InputError as exc:
            self.damage = str(exc)
        length = int.from_bytes(self._file.read(0, min(header.LENGTH_BYTES, self.size)), "little")
        by_header = min(header.LENGTH_BYTES + length, header.MAX_HEADER, self.size)
        named = [entry for entry in self._read_entries(by_header) if entry.name == header.MANIFEST]
        start, stored = self._find_manifest([entry.start + by_header for entry in named])
        self.manifest = self._open_manifest(stored)
        by_manifest = start - sum(record.stored_bytes for record in self._stored_records())
        if by_manifest < header.LENGTH_BYTES:
            raise InputError(f"{self.path}: manifest is malformed: the file is shorter than what it describes")
        # One flipped bit of the header's length, or of a length in the manifest, moves one of the two.
        known = self._read_entries(min(by_manifest, header.MAX_HEADER))
        self._data_start = max(by_manifest, min(by_header, by_manifest), key=lambda at: self._count_frames(at, known))
        self._data_stop = start - self._data_start
        return known, stored

    def _count_frames(self, data_start: int, entries: Iterable[Entry]) -> int:
        """Count the entries that begin with the frame that the manifest states for them."""
        wanted = dict(self._expected_entries())
        known = [(entry.start, *wanted[entry.name][1:]) for entry in entries if entry.name in wanted]
        return sum(self._has_frame(data_start + start, first, crc) for start, first, crc in known[:_ENTRIES_TRIED])

    def _has_frame(self, place: int, length: int, crc: int) -> bool:
        """Whether the frame of that length and checksum stands at ``place``."""
        return place + length <= self.size and crc32(self._file.read(place, length)) == crc

    def _read_entries(self, stop: int) -> list[Entry]:
        """The readable entries of a header that ends at ``stop``, except those that share a name."""
        head = self._file.read(0, stop)[header.LENGTH_BYTES :]
        entries = []
        for text in head.split(_ENTRY_END):
            name, _, rest = text.rpartition(_METADATA_END)[2].partition(_TYPE)
            offsets = _OFFSETS.fullmatch(rest)
            if offsets is not None:
                with contextlib.suppress(ValueError):
                    entries.append(Entry(json.loads(b'"' + name + b'"'), int(offsets[1]), int(offsets[2])))
        times = Counter(entry.name for entry in entries)
        return [entry for entry in entries if times[entry.name] == 1]

    def _find_manifest(self, places: Iterable[int]) -> tuple[int, bytes]:
        """Find the manifest at one of ``places`` or right before the seal; return its place and stored bytes."""
        for place in places:
            if place < self.size and (stored := self._manifest_at(place, self.size)) is not None:
                return place, stored
        first = max(0, self.size - _SEARCHED)
        tail = self._file.read(first, self.size - first)
        place = len(tail)
        for _ in range(_MANIFESTS_TRIED):
            place = tail.rfind(zstandard.FRAME_HEADER, 0, place)
            if place < 0:
                break
            stored = self._manifest_at(first + place, header.SEAL_BYTES)
            if stored is not None:
                return first + place, stored
        raise InputError(f"{self.path}: has no readable manifest, which is at its end")

    def _manifest_at(self, place: int, after: int) -> bytes | None:
        """The stored bytes of a manifest at ``place``; None if there is none, or more than ``after`` bytes follow."""
        content = self._file.read(place, min(self.size - place, _SEARCHED))
        try:
            stored = content[: _frame_length(content)]
            if len(content) - len(stored) <= after:
                self._open_manifest(stored)
                return stored
        except UnsupportedError:
            raise
        except (zstandard.ZstdError, InputError):
            pass
        return None

    def _stored_records(self) -> Iterator[StorageRecord | Pack]:
        """What has frames: the storages in no pack, and the packs."""
        yield from (record for record in self.manifest.storages if record.pack is None)
        yield from self.manifest.packs

    def _locate(self, entries: dict[str, Entry]) -> dict[int | Pack, Places]:
        if self.damage is None:
            return super()._locate(entries)
        locator = Locator(str(self.path), self._data_start, self.manifest.slab, self._place_entries(entries.values()))
        located: dict[int | Pack, Places] = {}
        for index, record in enumerate(self.manifest.storages):
            if record.pack is None:
                codec = self.codec(index)
                located[index] = self._located_or_lost(record, partial(locator.storage, record, codec))
        for pack in self.manifest.packs:
            located[pack] = self._located_or_lost(pack, partial(locator.pack, pack, self.pack_codec(pack)))
        return located

    def _located_or_lost(self, record: StorageRecord | Pack, locate: Callable[[], Places]) -> Places:
        try:
            return locate()
        except InputError:
            if not record.parts or record.stored_bytes < record.numel // frames.FRAME * _SMALLEST_FRAME:
                raise
            check_frame_count(record, str(self.path))
            return NOWHERE

    def _place_entries(self, entries: Iterable[Entry]) -> dict[str, Entry]:
        """The entries of the manifest: where the header places them, or found in the holes between."""
        wanted = dict(self._expected_entries())
        placed: dict[str, Entry] = {}
        position, holes = 0, []
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
            fits = entry.name in wanted and entry.nbytes == wanted[entry.name][0] and entry.name not in placed
            if fits and position <= entry.start and entry.stop <= self._data_stop:
                holes.append((position, entry.start))
                placed[entry.name] = entry
                position = entry.stop
        holes.append((position, self._data_stop))
        missing = {name: facts for name, facts in wanted.items() if name not in placed}
        for start, stop in holes:
            placed |= {entry.name: entry for entry in self._fill_hole(start, stop, missing)}
        return placed

    def _expected_entries(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """For every entry its name, its length, and the length and the checksum of its first frame."""
        for index, record in enumerate(self.manifest.storages):
            if record.pack is not None:
                continue
            check_frame_count(record, str(self.path))
            slabs = header.slab_chunks(record.numel, self.manifest.slab)
            layouts = self.codec(index).layout(self.spec(index))
            for part, table in record.parts.items():
                count = planes(layouts[part]) if part in layouts else 0
                for k, chunks in enumerate(slabs):
                    lengths = table.lengths[chunks.start * count : chunks.stop * count]
                    if lengths:
                        facts = sum(lengths), lengths[0], table.crcs[chunks.start * count]
                        yield header.entry_name(record.name, part, k, len(slabs)), facts
        for pack in self.manifest.packs:
            for part, table in pack.parts.items():
                if table.lengths:
                    facts = sum(table.lengths), table.lengths[0], table.crcs[0]
                    yield header.pack_entry(pack.name, part), facts

    def _fill_hole(self, start: int, stop: int, missing: dict[str, tuple[int, int, int]]) -> Iterator[Entry]:
        """Find entries of ``missing`` one after the other from ``start`` on, and remove them from it."""
        while start < stop and (name := self._find_entry(start, stop, missing)) is not None:
            length = missing.pop(name)[0]
            yield Entry(name, start, start + length)
            start += length

    def _find_entry(self, start: int, stop: int, missing: dict[str, tuple[int, int, int]]) -> str | None:
        """The entry at ``start``: its first frame stands there or, if that is damaged, another entry follows it."""
        near = list(missing.items())[:_ENTRIES_TRIED]
        for name, (length, first, crc) in near:
            if length <= stop - start and self._has_frame(self._data_start + start, first, crc):
                return name
        for name, (length, _, _) in near[:_ENTRIES_GUESSED]:
            others = [facts for other, facts in near[: _ENTRIES_GUESSED + 1] if other != name]
            after = start + length
            if after == stop or any(self._has_frame(self._data_start + after, first, crc) for _, first, crc in others):
                return name
        return None


def _frame_length(content: bytes) -> int:
    """Bytes of the zstd frame that ``content`` begins with, without decompressing it. Raises ZstdError."""
    parameters = zstandard.get_frame_parameters(content)
    place, last = zstandard.frame_header_size(content), False
    while not last and place + 3 <= len(content):
        block = int.from_bytes(content[place : place + 3], "little")
        last, is_run, size = bool(block & 1), (block >> 1) & 3 == 1, block >> 3
        place += 3 + (1 if is_run else size)
    return place + 4 * int(parameters.has_checksum)


_MANY = 1 << 16
"""Slices that may be named before it is known that files hold as many."""


class DamagedDirectory(Closing):
    """The containers that can be read, by name, in ``readers``, and in ``unread`` why the others cannot.

    Which of their chunks are lost the caller finds out, and marks. Raises InputError where the index is damaged, or
    names slices that do not make up their tensor.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.index = read_index(path)
        self.readers: dict[str, DamagedContainer] = {}
        self.unread: dict[str, str] = {}
        with ExitStack() as stack:
            pool = FilePool()
            stack.callback(pool.close)
            for name, seal in self.index.files.items():
                try:
                    reader = self._open(path / name, seal, pool)
                except InputError as exc:
                    self.unread[name] = str(exc).removeprefix(f"{path / name}: ")
                else:
                    stack.callback(reader.close)
                    self.readers[name] = reader
            self._slices = {name: slices_of(reader.manifest) for name, reader in self.readers.items()}
            self._check()
            self._resources = stack.pop_all()

    def close(self) -> None:
        """Close all files."""
        self._resources.close()

    @staticmethod
    def _open(path: Path, seal: str, pool: FilePool) -> DamagedContainer:
        if not path.exists():
            raise InputError(f"{path}: is missing")
        reader = DamagedContainer(path, pool=pool)
        if reader.seal.hex() == seal:
            return reader
        reader.close()
        # Values of two saves would make a checkpoint that never was.
        raise InputError(f"{path}: belongs to another save than the {INDEX} beside it, or its end is damaged")

    def _check(self) -> None:
        """Raise InputError where the index names more slices than files can hold, or tensors that are not covered."""
        named = sum(len(tensor.layout) for tensor in self.index.tensors.values() if tensor.is_whole)
        held = sum(map(len, self._slices.values()))
        if named > _MANY + 2 * held * (1 + len(self.unread)):
            raise InputError(f"{self.path / INDEX}: names {named} slices, and the files that are left hold {held}")
        for name, tensor in self.index.tensors.items():
            tensor.check_cover(f"{self.path / INDEX}: {shown(name)}")

    def record(self, name: str, box: Slice) -> TensorRecord:
        """The tensor of a slice that is not lost, in its container."""
        return self._slices[box.file][name, box.offsets]

    def why_lost(self, name: str, tensor: GlobalTensor, box: Slice) -> str | None:
        """Why a slice is lost, or None. Damage inside it is told by runs of its elements."""
        if box.file in self.unread:
            return self.unread[box.file]
        if (place := tensor.pickled(box)) is not None:
            return self.why_lost_value(place)
        reader = self.readers[box.file]
        record = self._slices[box.file].get((name, box.offsets))
        problem = slice_problem(reader.manifest, record, tensor, box)
        if problem is not None or record is None:
            return problem
        if not record.is_contiguous:  # no writer makes such slices
            return f"is not of the type and shape that {INDEX} states"
        # A storage may count elements of another size. Round outwards: one lost byte loses an element.
        size, item = reader.manifest.storages[record.storage].dtype.itemsize, record.dtype.itemsize
        runs = [(at * size // item, -(-stop * size // item) - 1) for at, stop in reader.lost_runs(record.storage)]
        lost = ", ".join(f"{first} to {last}" for first, last in runs)
        return f"elements {lost} of its {record.numel} are damaged" if runs else None

    def why_lost_value(self, place: Place) -> str | None:
        """Why a value that torch.save wrote is lost, or None."""
        if place.file in self.unread:
            return self.unread[place.file]
        reader = self.readers[place.file]
        record = objects_of(reader.manifest)
        if record is None or reader.manifest.storages[record.storage].dtype is not DType.UINT8:
            return f"is not in this file, and {INDEX} names it"
        if place.start + place.length > record.numel:
            return "its file ends before it"
        lost = reader.lost.get(record.storage, set())
        return "is damaged" if lost.intersection(_chunks(place)) else None

    def value(self, place: Place) -> bytes:
        """The bytes of a value that is not lost."""
        reader = self.readers[place.file]
        record = objects_of(reader.manifest)
        assert record is not None  # noqa: S101 - it would be lost
        content = b"".join(bytes_of(reader.read_chunk(record.storage, chunk)) for chunk in _chunks(place))
        start = place.start % FRAME
        return content[start : start + place.length]


def _chunks(place: Place) -> range:
    return range(place.start // FRAME, -(-(place.start + place.length) // FRAME))
