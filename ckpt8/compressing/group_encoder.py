"""Packs groups of small units: the parts of their storages one behind the other, in worker threads.

A unit is encoded on its own unless its bytes are stored as they are. One that is refused falls back alone: its
storages go, with the next codecs, to packs beside those of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs import config_of
from ckpt8.compressing.chunk_encoder import ChunkEncoder
from ckpt8.compressing.plan import Refusal, Stream, Unit
from ckpt8.compressing.policy import LOSSLESS
from ckpt8.compressing.sharing import Group
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container import frames
from ckpt8.container.manifest import FrameTable, Pack
from ckpt8.container.symbol_modes import Packing
from ckpt8.core.files.crc import crc32
from ckpt8.core.tensors import Parts

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
    packs: list[tuple[list[Stream], Parts, dict[str, Packing]]] = field(default_factory=list)


@dataclass(slots=True)
class EncodedGroup:
    """As ``PackedGroup``, compressed: (stored bytes, crc32) of every frame by part."""

    units: list[EncodedUnit]
    packs: list[tuple[list[Stream], dict[str, list[tuple[bytes | memoryview, int]]], dict[str, Packing]]]


def store_group(group: PackedGroup) -> EncodedGroup:
    """Compress a packed group."""
    packs = [
        (streams, {name: frames.encode_part(name, part, how.get(name)) for name, part in parts.items()}, how)
        for streams, parts, how in group.packs
    ]
    return EncodedGroup(group.units, packs)


def pack_record(name: str, streams: Sequence[Stream], tables: dict[str, FrameTable]) -> Pack:
    """The record of a pack."""
    spec = streams[0].spec
    starts = list(accumulate((stream.spec.numel for stream in streams), initial=0))
    indices = [stream.index for stream in streams]
    return Pack(name, spec.dtype, spec.role, config_of(streams[0].codec), indices, starts, tables)


class GroupEncoder:
    """Packs groups of units of one checkpoint on the CPU. Thread-safe."""

    def __init__(self, checkpoint: Checkpoint, encoder: ChunkEncoder, refusal_of: FindRefusal) -> None:
        self._checkpoint = checkpoint
        self._encoder = encoder
        self._refusal_of = refusal_of

    def pack(self, group: Group) -> PackedGroup:
        """Read and pack a group. Raises InputError."""
        packed, units = PackedGroup(), group.units
        while units:
            units = self._pack(units, packed)
        return packed

    def stored(self, group: Group) -> EncodedGroup:
        """Read, pack and compress a group. Raises InputError."""
        return store_group(self.pack(group))

    def _pack(self, units: Sequence[Unit], packed: PackedGroup) -> list[Unit]:
        """Pack those units that their codecs take; return the others with the next codecs."""
        if all(unit.is_plain for unit in units):
            self._pack_at_once(units, packed)
            return []
        return self._pack_each(units, packed)

    def _pack_each(self, units: Sequence[Unit], packed: PackedGroup) -> list[Unit]:
        """As ``_pack``: every unit is encoded and measured on its own."""
        refused: list[Unit] = []
        kept: list[Unit] = []
        found: list[list[Parts]] = []
        for unit in units:
            chunk = self._encoder.encode((unit, 0))
            self._encoder.finish(unit, chunk.errors)
            refusal = chunk.refused or self._refusal_of(unit, chunk.errors)
            if refusal is not None:
                refused.append(unit.fallback(refusal))
                continue
            kept.append(unit)
            found.append(chunk.parts)
            packed.units.append(EncodedUnit(unit, chunk.errors, chunk.crcs))
        for place in range(len(units[0].streams) if kept else 0):
            parts = [each[place] for each in found]
            joined = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
            packed.packs.append(([unit.streams[place] for unit in kept], *self._encoder.pack_symbols(joined)))
        return refused

    def _pack_at_once(self, units: Sequence[Unit], packed: PackedGroup) -> None:
        """Pack units that are stored as they are."""
        rows = []
        for streams in zip(*(unit.streams for unit in units), strict=True):
            parts, crcs = self._encode(streams)
            packed.packs.append((list(streams), parts, {}))
            rows.append(crcs)
        packed.units += [
            EncodedUnit(unit, UnitErrors(), list(crcs))
            for unit, crcs in zip(units, zip(*rows, strict=True), strict=True)
        ]

    def _encode(self, streams: Sequence[Stream]) -> tuple[Parts, list[int]]:
        """The parts of lossless streams of one element type, one behind the other, and their checksums."""
        content = frames.host_bytes(sum(stream.storage.nbytes for stream in streams))
        view = frames.bytes_of(content)
        at, crcs = 0, []
        for stream in streams:
            stop = at + stream.spec.numel * stream.spec.dtype.itemsize
            own = view[at:stop]
            if len(own):
                self._checkpoint.read_into(stream.storage.offset, own)
            crcs.append(crc32(own) if stream.storage.crc32 is not None else 0)
            at = stop
        return LOSSLESS.encode(content[:at].view(streams[0].spec.dtype.torch)), crcs
