"""Reads what is whole of a damaged container, and fills lost chunks.

It needs the manifest, which stands at the end, before the seal, and says where everything belongs. It does not need the
header: if the seal does not match, it reads the header entry by entry and finds the other entries by the checksums of
their frames.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.codecs import Codec
from ckpt8.container import header
from ckpt8.container.checks import NOWHERE, Locator, Places, check_frame_count, layout_of, slab_entries
from ckpt8.container.header import Entry
from ckpt8.container.manifest import Pack, StorageRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import crc32
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array, Arrays

_ENTRIES_TRIED, _ENTRIES_GUESSED = 64, 8
_SMALLEST_FRAME = 8
"""The shortest zstd frame of a whole chunk. Bounds how much a small file can make a reader write."""

_ENTRY_END, _METADATA_END, _TYPE = b']},"', b'"},"', b'":{"dtype":"U8","shape":['
_OFFSETS = re.compile(rb"\d{1,17}\],\"data_offsets\":\[(\d{1,17}),(\d{1,17})(?:\]\}\} *)?")


_NANS = {DType.FLOAT64: nan, DType.FLOAT32: nan, DType.BFLOAT16: 0x7FC0, DType.FLOAT16: 0x7E00}
"""NaN as an array holds it, by the type of the elements."""


class DamagedContainer(ContainerReader):
    """A container that may be damaged, and so may its base. Raises InputError where the manifest is not readable.

    ``damage`` says what is wrong with header, manifest or seal; None where nothing is. ``lost`` holds the chunks of
    every storage that the caller found to be lost: floats in them read as NaN, all else as zeros.
    """

    accepts_damage = True

    def __init__(self, path: Path, **options: Any) -> None:
        self.damage: str | None = None
        self.lost = defaultdict[int, set[int]](set)
        super().__init__(path, **options)

    def damage_below(self) -> str | None:
        """What is wrong with the base of a delta, or with those below it, as ``damage``, or that one is missing."""
        try:
            links = self.links()
        except InputError as exc:
            return exc.problem
        return next((link.damage for link in links if isinstance(link, DamagedContainer) and link.damage), None)

    def lost_runs(self, storage: int) -> list[tuple[int, int]]:
        """The lost runs [start, stop) of a storage, in elements."""
        numel, lost = self.manifest.storages[storage].numel, self.lost.get(storage, ())
        # A run starts at a lost chunk whose predecessor is not lost, and stops after one whose successor is not.
        firsts = sorted(chunk for chunk in lost if chunk - 1 not in lost)
        lasts = sorted(chunk for chunk in lost if chunk + 1 not in lost)
        return [
            (first * header.FRAME, min((last + 1) * header.FRAME, numel))
            for first, last in zip(firsts, lasts, strict=True)
        ]

    def decode_chunk(self, storage: int, chunk: int, out: Array) -> Arrays:
        """Decode a chunk into ``out``. A lost one becomes NaN, or 0 in integers and 8-bit floats; it has no parts."""
        if chunk not in self.lost.get(storage, ()):
            return super().decode_chunk(storage, chunk, out)
        out[:] = _NANS.get(self.manifest.storages[storage].dtype, 0)
        return {}

    def fill_chunk(self, storage: int, chunk: int, out: Array) -> None:
        """Fill ``out`` with the elements of a chunk. A lost one becomes NaN, or 0 in integers and 8-bit floats."""
        (self.decode_chunk if chunk in self.lost.get(storage, ()) else super().fill_chunk)(storage, chunk, out)

    def _open_header(self) -> tuple[list[Entry], bytes]:
        try:
            return super()._open_header()
        except InputError as exc:
            self.damage = exc.problem
        length = int.from_bytes(self._file.read(0, min(header.LENGTH_BYTES, self.size)), "little")
        by_header = min(header.LENGTH_BYTES + length, header.MAX_HEADER, self.size)
        start, stored = self._find_manifest(
            by_header + entry.start for entry in self._read_entries(by_header) if entry.name == header.MANIFEST
        )
        self.manifest = self._open_manifest(stored)
        by_manifest = start - sum(record.stored_bytes for _, record in self.owners())
        require(
            by_manifest >= header.LENGTH_BYTES,
            f"{self.path}: manifest is malformed: the file is shorter than what it describes",
        )
        # One flipped bit of the header's length, or of a length in the manifest, moves one of the two.
        known, wanted = self._read_entries(min(by_manifest, header.MAX_HEADER)), dict(self._expected_entries())
        firsts = [(entry.start, *wanted[entry.name][1:]) for entry in known if entry.name in wanted][:_ENTRIES_TRIED]

        def count_frames(data_start: int) -> int:
            return sum(self._has_frame(data_start + start, length, crc) for start, length, crc in firsts)

        self._data_start = max(by_manifest, min(by_header, by_manifest), key=count_frames)
        self._data_stop = start - self._data_start
        return known, stored

    def _has_frame(self, place: int, length: int, crc: int) -> bool:
        """Whether the frame of that length and checksum stands at ``place``."""
        return place + length <= self.size and crc32(self._file.read(place, length)) == crc

    def _read_entries(self, stop: int) -> list[Entry]:
        """The readable entries of a header that ends at ``stop``, except those that share a name."""
        head = self._file.read(0, stop)[header.LENGTH_BYTES :]
        entries = []
        for text in head.split(_ENTRY_END):
            name, _, rest = text.rpartition(_METADATA_END)[2].partition(_TYPE)
            if (offsets := _OFFSETS.fullmatch(rest)) is not None:
                with contextlib.suppress(ValueError):
                    entries.append(Entry(json.loads(b'"' + name + b'"'), int(offsets[1]), int(offsets[2])))
        times = Counter(entry.name for entry in entries)
        return [entry for entry in entries if times[entry.name] == 1]

    def _find_manifest(self, places: Iterable[int]) -> tuple[int, bytes]:
        """Find the manifest at one of ``places`` or right before the seal; return its place and stored bytes."""
        for place in places:
            stored = header.frame_at(self._file, place, self.size) if place < self.size else None
            if stored is not None and self._is_manifest(stored):
                return place, stored
        for place, stored in header.frames_at_end(self._file):
            if self._is_manifest(stored):
                return place, stored
        raise InputError(f"{self.path}: has no readable manifest, which is at its end")

    def _is_manifest(self, stored: bytes) -> bool:
        """Whether a frame is a readable manifest. Raises UnsupportedError for one of a later version."""
        try:
            self._open_manifest(stored)
        except UnsupportedError:
            raise
        except InputError:
            return False
        return True

    def _locate(self, entries: dict[str, Entry]) -> dict[int | Pack, Places]:
        if self.damage is None:
            return super()._locate(entries)
        locator = Locator(str(self.path), self._data_start, self.manifest.slab, self._place_entries(entries.values()))
        return {owner: self._located_or_lost(locator, record, self.codec(owner)) for owner, record in self.owners()}

    def _located_or_lost(self, locator: Locator, record: StorageRecord | Pack, codec: Codec) -> Places:
        try:
            return locator.places(record, codec)
        except InputError:
            if not record.parts or record.stored_bytes < record.numel // header.FRAME * _SMALLEST_FRAME:
                raise
            check_frame_count(record, str(self.path))
            return NOWHERE

    def _place_entries(self, entries: Iterable[Entry]) -> dict[str, Entry]:
        """The entries of the manifest: where the header places them, or found in the holes between."""
        wanted = dict(self._expected_entries())
        placed: dict[str, Entry] = {}
        position, holes = 0, []
        for entry in sorted(entries, key=lambda entry: (entry.start, entry.stop)):
            if (
                entry.name in wanted
                and entry.nbytes == wanted[entry.name][0]
                and entry.name not in placed
                and position <= entry.start
                and entry.stop <= self._data_stop
            ):
                holes.append((position, entry.start))
                placed[entry.name] = entry
                position = entry.stop
        holes.append((position, self._data_stop))
        missing = {name: facts for name, facts in wanted.items() if name not in placed}
        for position, stop in holes:
            at = position
            while at < stop and (name := self._find_entry(at, stop, missing)) is not None:
                length = missing.pop(name)[0]
                placed[name] = Entry(name, at, at + length)
                at += length
        return placed

    def _expected_entries(self) -> Iterator[tuple[str, tuple[int, int, int]]]:
        """For every entry its name, its length, and the length and the checksum of its first frame, in their order.

        Weight and moments of a parameter follow each other. Packs come last.
        """
        first: dict[int, int] = {}
        for parameter in self.manifest.parameters:
            weight = (parameter.steps or {}).get("weight_storage")
            together = [*parameter.moments.values(), *([] if weight is None else [weight])]
            first |= dict.fromkeys(together, min(together, default=0))
        packs = len(self.manifest.storages)
        order = sorted(self.owners(), key=lambda own: packs if isinstance(own[0], Pack) else first.get(own[0], own[0]))
        for owner, record in order:
            check_frame_count(record, str(self.path))
            layout = layout_of(record, self.codec(owner))
            layout = {part: layout[part] for part in record.parts if part in layout}
            for _, entries in slab_entries(record, layout, self.manifest.slab):
                for part, name, frames in entries:
                    table = record.parts[part]
                    if lengths := table.lengths[frames.start : frames.stop]:
                        yield name, (sum(lengths), lengths[0], table.crcs[frames.start])

    def _find_entry(self, start: int, stop: int, missing: dict[str, tuple[int, int, int]]) -> str | None:
        """The entry at ``start``: its first frame stands there or, if that is damaged, another entry follows it."""
        near = list(missing.items())[:_ENTRIES_TRIED]

        def fits(facts: tuple[int, int, int]) -> bool:
            length, first, crc = facts
            return length <= stop - start and self._has_frame(self._data_start + start, first, crc)

        # It is the next one where the manifest knows which weight is beside which moments, and no frame is damaged.
        # A few bytes may stand anywhere: short frames count where no longer one fits.
        if near and near[0][1][1] >= _SMALLEST_FRAME and fits(near[0][1]):
            return near[0][0]
        if (name := self._entry_by_checksum(start, stop, missing)) is not None:
            return name
        short = (name for name, facts in near if facts[1] < _SMALLEST_FRAME and fits(facts))
        if (name := next(short, None)) is not None:
            return name
        for name, (length, _, _) in near[:_ENTRIES_GUESSED]:
            others = [facts for other, facts in near[: _ENTRIES_GUESSED + 1] if other != name]
            after = start + length
            if after == stop or any(self._has_frame(self._data_start + after, first, crc) for _, first, crc in others):
                return name
        return None

    def _entry_by_checksum(self, start: int, stop: int, missing: dict[str, tuple[int, int, int]]) -> str | None:
        """The entry whose first frame stands at ``start``, whatever the order of entries; None if there is none."""
        room = stop - start
        by_length = grouped((first, (crc, name)) for name, (length, first, crc) in missing.items() if length <= room)
        content = memoryview(self._file.read(self._data_start + start, max(by_length, default=0)))
        checksum = done = 0
        for first in sorted(by_length):
            checksum, done = crc32(content[done:first], checksum), first
            for crc, name in by_length[first]:
                if crc == checksum and first >= _SMALLEST_FRAME:
                    return name
        return None
