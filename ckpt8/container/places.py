"""Finds the frames of every part in the entries of a container, and checks that they fit what the manifest states."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ckpt8.codecs import Codec
from ckpt8.container import layout
from ckpt8.container.header import Entry
from ckpt8.container.manifest import FrameTable, Pack, StorageRecord
from ckpt8.container.symbol_modes import Mode
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import PartSpec, TensorSpec

_FRAME_RATIO = 1 << 15
"""The most bytes that a zstd frame holds for each stored one: a block of at most 128 KiB takes at least four bytes."""


class PartPlace(NamedTuple):
    """Where the frames of one part lie: offset in the file, stored length and crc32 of each."""

    offsets: list[int]
    table: FrameTable


Places = Mapping[str, PartPlace]
"""The place of every part by name."""

NOWHERE: Places = {}
"""The places of a storage that has no frames of its own."""


@dataclass(frozen=True, slots=True)
class Locator:
    """Takes the ``entries`` of storages and packs from those of the container. Raises InputError.

    ``where`` opens messages. ``start`` is the offset of the first entry, ``slab`` the elements of a slab.
    """

    where: str
    start: int
    slab: int
    entries: dict[str, Entry]

    def storage(self, record: StorageRecord, codec: Codec) -> Places:
        """The places of a storage that is in no pack."""
        expected = codec.layout(self._checked(record, codec))
        self._check_names(record, expected)
        if not expected:
            return NOWHERE
        check_frame_count(record, self.where)
        slabs = layout.slab_chunks(record.numel, self.slab)
        return {
            part: self._part(
                record,
                part,
                spec,
                {
                    layout.entry_name(record.name, part, k, len(slabs)): len(chunks) * layout.planes(spec)
                    for k, chunks in enumerate(slabs)
                },
            )
            for part, spec in expected.items()
        }

    def pack(self, pack: Pack, codec: Codec) -> Places:
        """The places of a pack."""
        if codec.companions or codec.copied is not None:
            raise InputError(f"{self.where}: {pack.name}: storages that share entries cannot depend on others")
        found = layout.pack_layout(codec, self._checked(pack, codec), pack.numels)
        self._check_names(pack, found)
        names = ((part, spec, layout.pack_entry(pack.name, part)) for part, (spec, _) in found.items())
        return {
            part: self._part(pack, part, spec, {name: layout.planes(spec)} if pack.numel else {})
            for part, spec, name in names
        }

    def _checked(self, record: StorageRecord | Pack, codec: Codec) -> TensorSpec:
        spec = TensorSpec(record.name, record.role, record.dtype, (record.numel,))
        if not codec.accepts(spec):
            raise InputError(f"{self.where}: {record.name}: {codec.id} does not hold {record.dtype.label}")
        return spec

    def _check_names(self, record: StorageRecord | Pack, expected: Mapping[str, object]) -> None:
        if set(record.parts) != set(expected):
            raise InputError(f"{self.where}: {record.name}: parts do not fit its codec")

    def _part(self, record: StorageRecord | Pack, part: str, spec: PartSpec, names: Mapping[str, int]) -> PartPlace:
        """Where the frames of a part lie; ``names`` are those of its entries, each with its number of frames."""
        table = record.parts[part]
        nbytes = self._plane_bytes(record, part, spec)
        # Bound the memory that a declared size can cause by the bytes that are really there.
        if sum(table.lengths) * _FRAME_RATIO < nbytes:
            raise InputError(f"{self.where}: {record.name}: {part!r} cannot hold the {nbytes} bytes it must hold")
        offsets: list[int] = []
        position = 0
        for name, count in names.items():
            entry = self.entries.pop(name, None)
            lengths = table.lengths[position : position + count]
            if entry is None or sum(lengths) != entry.nbytes:
                raise InputError(f"{self.where}: {record.name}: frames of {part!r} do not fill their entry")
            start = self.start + entry.start
            offsets += [start + before for before in accumulate(lengths[:-1], initial=0)]
            position += len(lengths)
        if position != len(table.lengths):
            raise InputError(f"{self.where}: {record.name}: {part!r} has more frames than elements")
        return PartPlace(offsets, table)

    def _plane_bytes(self, record: StorageRecord | Pack, part: str, spec: PartSpec) -> int:
        """The bytes of all planes of a part. Raises InputError where the modes of symbols do not fit its frames."""
        table = record.parts[part]
        if not spec.is_symbols and not table.modes:
            return spec.nbytes
        if not spec.is_symbols or not _fits_modes(table, spec.numel):
            raise InputError(f"{self.where}: {record.name}: modes of {part!r} do not fit its frames")
        return sum(sum(mode.plane_lengths(count)) for mode, count in _chunks(table, spec.numel))


def _fits_modes(table: FrameTable, numel: int) -> bool:
    """Whether every chunk of symbols has a mode, and stored bytes for those planes that this mode uses."""
    chunks = layout.chunk_count(numel)
    lengths = [length for mode, count in _chunks(table, numel) for length in mode.plane_lengths(count)]
    given = [bool(length) for length in table.lengths]
    return len(table.modes) == chunks and given == [bool(length) for length in lengths]


def _chunks(table: FrameTable, numel: int) -> Iterator[tuple[Mode, int]]:
    """The mode and the number of symbols of every chunk."""
    for chunk, mode in enumerate(table.modes):
        yield mode, min(layout.FRAME, numel - chunk * layout.FRAME)


def check_frame_count(record: StorageRecord | Pack, where: str) -> None:
    """Bound the work that a declared element count can cause by the frames that are really there."""
    chunks = layout.chunk_count(record.numel)
    if any(len(table.lengths) < chunks for table in record.parts.values()):
        raise InputError(f"{where}: {record.name}: has fewer frames than its {record.numel} elements need")
