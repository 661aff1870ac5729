"""Groups of small storages that share entries of the file.

Small storages of one role and codec share entries where the header would be long otherwise: their parts lie one behind
the other. Lossless ones form groups one by one. The lossy moments of a parameter stay together: the codec of all of
them changes where one is refused, and that of its weight does not. A unit of a group is encoded on its own unless its
bytes are stored as they are. One that is refused falls back alone: its storages with other codecs go to packs beside
those of the others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import numpy as np

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs import Codec, config_of
from ckpt8.compressing.chunk_encoder import ChunkEncoder, read_bytes
from ckpt8.compressing.frozen import FROZEN, KEPT
from ckpt8.compressing.measure import UnitErrors, exact_errors
from ckpt8.compressing.plan import Refusal, Stream, Unit
from ckpt8.compressing.policy import LOSSLESS
from ckpt8.container import frames, header
from ckpt8.container.header import PACK, entry_names, pack_entry
from ckpt8.container.manifest import FrameTable, Pack, Packing
from ckpt8.core.arrays import Array, Arrays, doubles, empty
from ckpt8.core.closing import without_collection

_ROOM, _ROOM_SHARE, _BUDGET_ROOM_SHARE = 12 << 10, 256, 4096
"""The header may take as many bytes, or this part of the source, before storages share entries. A container under a
budget is so much smaller that its header counts for more."""

_EMPTY_RECORD = 40
"""What a storage without elements counts, which has no entries but a record in the manifest."""

PACK_NAME = "ckpt8.shared"

_WIDEST = f"{PACK_NAME}{10**8}"


@dataclass(frozen=True, slots=True)
class Group:
    """Small units whose streams, place by place, have one role, element type and codec. All are kept whole."""

    units: Sequence[Unit]

    def names(self) -> Iterator[str]:
        """Names as long as those of its entries: a lossy group may need as many for the units that are refused."""
        for stream in self.units[0].streams:
            for codec in stream.codecs:
                yield from (pack_entry(_WIDEST, part) for part in codec.layout(stream.spec))


@without_collection()
def share(units: Sequence[Unit], size: int, slab: int) -> tuple[list[Unit], list[Group]]:
    """The units with entries of their own, and groups of the others.

    ``size`` are the bytes of the source; with 0 small units are grouped where the header would have 12 KiB.
    """
    is_under_budget = any(stream.fallback_codec is not None for unit in units for stream in unit.streams)
    part = _BUDGET_ROOM_SHARE if is_under_budget else _ROOM_SHARE
    if not _is_header_long(units, max(_ROOM, size // part), slab):
        return list(units), []
    own: list[Unit] = []
    alike: dict[Hashable, list[Unit]] = defaultdict(list)
    for unit in units:
        # The streams of a lossless unit come one by one, if nothing is measured of them together.
        is_apart = unit.is_plain and not unit.measured
        for piece in [Unit((stream,)) for stream in unit.streams] if is_apart else [unit]:
            # A difference has no partner in a pack, and what is frozen is to be one, now or later.
            depends = any(
                stream.codec.companions or stream.codec.copied is not None or stream.reason in (FROZEN, KEPT)
                for stream in piece.streams
            )
            if piece.numel <= PACK and not depends:
                kind = tuple((s.spec.role, s.spec.dtype, s.codec, s.fallback_codec) for s in piece.streams)
                alike[kind].append(piece)
            else:
                own.append(piece)
    groups = []
    for similar in alike.values():
        for run in _cut(similar):
            if len(run) > 1:
                groups.append(Group([_whole(unit) for unit in run]))
            else:
                own += run
    return own, groups


def _is_header_long(units: Iterable[Unit], room: int, slab: int) -> bool:
    taken = 0
    for stream in (stream for unit in units for stream in unit.streams):
        entries = entry_names(stream.codec, stream.spec, slab)
        taken += sum(map(header.reserved_entry, entries)) if entries else _EMPTY_RECORD
        if taken > room:
            return True
    return False


def _whole(unit: Unit) -> Unit:
    """The unit with all its streams kept whole."""
    if all(stream.base is None for stream in unit.streams):
        return unit
    return replace(unit, streams=tuple(replace(stream, base=None) for stream in unit.streams))


def _cut(units: Iterable[Unit]) -> Iterator[list[Unit]]:
    """Runs of units that have at most PACK elements."""
    run: list[Unit] = []
    numel = 0
    for unit in units:
        if run and numel + unit.numel > PACK:
            yield run
            run, numel = [], 0
        run.append(unit)
        numel += unit.numel
    yield run


FindRefusal = Callable[[Unit, UnitErrors], "Refusal | None"]
"""Why the codecs of a unit cannot keep it although they took it."""


@dataclass(slots=True)
class EncodedUnit:
    """A unit with its final codecs, its errors, and the crc32 of the bytes of each stream as in ``Chunk``."""

    unit: Unit
    errors: UnitErrors
    crcs: list[int]


@dataclass(slots=True)
class PackedGroup:
    """The units of a group, and every pack that they need: its streams, its parts and how its symbols are packed."""

    units: list[EncodedUnit] = field(default_factory=list)
    packs: list[tuple[list[Stream], dict[str, Array], dict[str, Packing]]] = field(default_factory=list)


@dataclass(slots=True)
class EncodedGroup:
    """A ``PackedGroup`` whose parts are compressed."""

    units: list[EncodedUnit]
    packs: list[tuple[list[Stream], dict[str, frames.Frames], dict[str, Packing]]]


def store_group(group: PackedGroup) -> EncodedGroup:
    """Compress a packed group."""
    packs = [(streams, frames.encode_parts(parts, how), how) for streams, parts, how in group.packs]
    return EncodedGroup(group.units, packs)


def pack_record(name: str, streams: Sequence[Stream], tables: dict[str, FrameTable]) -> Pack:
    """The record of a pack."""
    spec = streams[0].spec
    starts = list(accumulate((stream.spec.numel for stream in streams), initial=0))
    indices = [stream.index for stream in streams]
    return Pack(name, spec.dtype, spec.role, config_of(streams[0].codec), indices, starts, tables)


class _Packs:
    """The packs of a group: streams and parts by their place in units and their codec.

    Where one stream of a unit is refused, its others keep their codecs, and stay in the packs of these.
    """

    def __init__(self) -> None:
        self._packs: dict[tuple[int, Codec], tuple[list[Stream], list[Arrays]]] = {}

    def add(self, place: int, streams: Sequence[Stream], parts: Arrays) -> None:
        """Add ``streams`` of one codec, whose ``parts`` lie one behind the other."""
        pack = self._packs.setdefault((place, streams[0].codec), ([], []))
        pack[0].extend(streams)
        pack[1].append(parts)

    def joined(self) -> Iterator[tuple[list[Stream], Arrays]]:
        """The streams of every pack, and its parts."""
        for streams, several in self._packs.values():
            first = several[0]
            yield (
                streams,
                first
                if len(several) == 1
                else {name: np.concatenate([parts[name] for parts in several]) for name in first},
            )


class GroupEncoder:
    """Packs groups of units of one checkpoint on the CPU. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, encoder: ChunkEncoder, refusal_of: FindRefusal) -> None:
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._refusal_of = refusal_of

    def pack(self, group: Group) -> PackedGroup:
        """Read and pack a group. Raises InputError."""
        units, packs, encoded = group.units, _Packs(), list[EncodedUnit]()
        while units:
            if all(unit.is_plain for unit in units):
                encoded += self._pack_at_once(units, packs)
                break
            kept, units = self._pack_each(units, packs)
            encoded += kept
        joined = [(streams, *self._encoder.pack_symbols(parts)) for streams, parts in packs.joined()]
        return PackedGroup(encoded, joined)

    def stored(self, group: Group) -> EncodedGroup:
        """Read, pack and compress a group. Raises InputError."""
        return store_group(self.pack(group))

    def _pack_each(self, units: Sequence[Unit], packs: _Packs) -> tuple[list[EncodedUnit], list[Unit]]:
        """Encode and measure every unit on its own; pack those that their codecs take, return them and the others."""
        kept, refused = list[EncodedUnit](), list[Unit]()
        for unit in units:
            chunk = self._encoder.encode((unit, 0))
            self._encoder.finish(unit, chunk.errors)
            refusal = chunk.refused or self._refusal_of(unit, chunk.errors)
            if refusal is not None:
                refused.append(unit.fallback(refusal))
                continue
            kept.append(EncodedUnit(unit, chunk.errors, chunk.crcs))
            for place, (stream, parts) in enumerate(zip(unit.streams, chunk.parts, strict=True)):
                packs.add(place, [stream], parts)
        return kept, refused

    def _pack_at_once(self, units: Sequence[Unit], packs: _Packs) -> Iterable[EncodedUnit]:
        """Pack units that are stored as they are."""
        rows, errors, sizes = [], [UnitErrors() for _ in units], [unit.numel for unit in units]
        moment1 = units[0].parameter.moments.get("moment1") if units[0].parameter and self._encoder.measures else None
        for place, streams in enumerate(zip(*(unit.streams for unit in units), strict=True)):
            parts, crcs, content = self._encode(streams)
            packs.add(place, streams, parts)
            rows.append(crcs)
            if streams[0].index == moment1:
                moments = np.split(doubles(content, streams[0].spec.dtype), list(accumulate(sizes[:-1])))
                errors = list(map(exact_errors, units, moments))
        return map(EncodedUnit, units, errors, map(list, zip(*rows, strict=True)))

    def _encode(self, streams: Sequence[Stream]) -> tuple[Arrays, list[int], Array]:
        """The parts of lossless streams of one type, one behind the other, their checksums, and their elements."""
        spec = streams[0].spec
        elements = empty(sum(stream.spec.numel for stream in streams), spec.dtype)
        view, at, crcs = elements.view(np.uint8).data, 0, []
        for stream in streams:
            own = view[at : at + stream.spec.numel * spec.dtype.itemsize]
            crcs.append(read_bytes(self._checkpoint, stream, 0, own) if len(own) else 0)
            at += len(own)
        whole = spec._replace(shape=(elements.size,))
        return LOSSLESS.encode_arrays(elements, whole, backend=self._encoder.lockstep.backend), crcs, elements
