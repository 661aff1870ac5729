"""Runs a compression: units of storages -> codec -> planes -> container, in the order of the source.

A few threads read, encode, measure and compress chunks of 2^20 elements, which come back in order. Memory holds one
slab of stored planes and the chunks in flight. When a codec refuses a unit, or its update error exceeds the bound, the
writer rolls the unit back and tries the next codecs, lossless ones at last: see ``Unit.fallback``.

``run`` does all of it. ``pack`` stops when every chunk is packed in memory and the codec of every unit is final. From
then on the source is not needed: the ``Unwritten`` that ``pack`` returns writes the same file later.

Small storages of one role and codec share entries where the header would be long otherwise: their parts lie one behind
the other. Lossless ones form groups one by one. The lossy moments of a parameter stay together: the codec of all of
them changes where one is refused. A unit of a group is encoded on its own unless its bytes are stored as they are. One
that is refused falls back alone: its storages go, with the next codecs, to packs beside those of the others.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from ckpt8 import __version__
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs import config_of
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.chunk_encoder import ChunkEncoder, EncodedChunk, PackedChunk, Work, check_source, store
from ckpt8.compressing.deltas import check_base
from ckpt8.compressing.manifest_records import Results, UnitResult, fill_manifest
from ckpt8.compressing.plan import LOSSLESS, Measured, Plan, Policy, Refusal, Share, Stream, Unit
from ckpt8.compressing.unit_errors import UnitErrors, exceeded_share, excess
from ckpt8.container import frames, header
from ckpt8.container.facts import NO_PARAMETER
from ckpt8.container.header import PACK, entry_names, pack_entry
from ckpt8.container.manifest import BaseRecord, FrameTable, Manifest, Pack, SliceRecord
from ckpt8.container.sharded.reading import SliceKey
from ckpt8.container.symbol_modes import Packing
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import combine, crc32
from ckpt8.core.tensors import Parts
from ckpt8.core.text import size
from ckpt8.core.workers import Progress, Workers

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
        for piece in _parts_of(unit):
            if _is_small(piece):
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


def _parts_of(unit: Unit) -> list[Unit]:
    """The streams of a lossless unit one by one, if nothing is measured of them together."""
    if len(unit.streams) == 1 or not unit.is_plain:
        return [unit]
    return [Unit((stream,)) for stream in unit.streams]


def _is_small(unit: Unit) -> bool:
    depends = any(stream.codec.companions or stream.codec.copied is not None for stream in unit.streams)
    return unit.numel <= PACK and not depends


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
    packs: list[tuple[list[Stream], Parts, dict[str, Packing]]] = field(default_factory=list)


@dataclass(slots=True)
class EncodedGroup:
    """A ``PackedGroup`` whose parts are compressed: by name, the (stored bytes, crc32) of every frame."""

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
        """Encode and measure every unit on its own; pack those that their codecs take, return the others."""
        refused: list[Unit] = []
        kept: list[Unit] = []
        encoded: list[list[Parts]] = []
        for unit in units:
            chunk = self._encoder.encode((unit, 0))
            self._encoder.finish(unit, chunk.errors)
            refusal = chunk.refused or self._refusal_of(unit, chunk.errors)
            if refusal is not None:
                refused.append(unit.fallback(refusal))
                continue
            kept.append(unit)
            encoded.append(chunk.parts)
            packed.units.append(EncodedUnit(unit, chunk.errors, chunk.crcs))
        for place in range(len(units[0].streams) if kept else 0):
            parts = [streams[place] for streams in encoded]
            joined = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
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


_LONGEST, _LONGEST_MORE = 1.01, 1 << 14
"""How much longer than its source a container is at most: a part of it, and bytes."""

_Planes = dict[str, list[bytes | memoryview]]
"""The stored planes of each part, chunk after chunk."""


def no_progress(_: int) -> None:
    """Show nothing. A function and no lambda: frameworks pickle objects that hold ``Options``."""


@dataclass(frozen=True, slots=True)
class Options:
    """``max_update_error`` bounds max |Δu| of every parameter; without ``stats`` nothing is measured.

    Raises UsageError for a bound that is negative or NaN, and for one without statistics.
    """

    threads: int | None = None
    stats: bool = True
    max_update_error: float | None = None
    progress: Progress = no_progress

    def __post_init__(self) -> None:
        if self.max_update_error is not None and not self.max_update_error >= 0:
            raise UsageError(f"a bound on the update error is a number from 0 on, not {self.max_update_error}")
        if self.max_update_error is not None and not self.stats:
            raise UsageError("a bound on the update error needs statistics; leave out --no-stats")


class OverBudgetError(Exception):
    """The error of a file exceeds its budget: ``measured`` tells what the sample that it was planned by does not.

    Raised once: a plan of what was measured is not held against the budget again.
    """

    def __init__(self, measured: Measured) -> None:
        super().__init__("the error exceeds the budget")
        self.measured = measured


@dataclass(slots=True)
class Unwritten:
    """A packed checkpoint whose temporary file is open until ``write`` or ``close``.

    ``keeps_base``: its base has a link until then, and may be replaced.
    """

    compressor: Compressor
    policy: Policy
    units: list[Unit]
    chunks: deque[PackedChunk]
    groups: deque[PackedGroup]
    writer: ContainerWriter
    workers: Workers
    resources: ExitStack
    keeps_base: bool = False

    def write(self) -> Manifest:
        """Compress and write the file, freeing each chunk on the way. Raises OutputError."""
        with self.resources:
            chunks = self.workers.map(store, (self.chunks.popleft() for _ in range(len(self.chunks))))
            results = self.compressor.write_units(self.writer, self.workers, self.units, chunks)
            groups = self.workers.map(store_group, (self.groups.popleft() for _ in range(len(self.groups))))
            self.compressor.write_groups(self.writer, groups, results)
            return self.compressor.publish(self.writer, results, self.policy)

    def close(self) -> None:
        """Give up: no file remains. Harmless after ``write``."""
        self.chunks.clear()
        self.groups.clear()
        self.resources.close()


class Compressor:
    """Compresses all members of one source into one container.

    ``slices`` says which tensors of it, by name, are slices of what. ``seal`` is that of the file once it is written.
    """

    def __init__(
        self,
        source: Bundle,
        plan: Plan,
        options: Options,
        encoder: ChunkEncoder | None = None,
        base: BaseRecord | None = None,
        key_reason: str | None = None,
        slices: Mapping[str, SliceKey] | None = None,
    ) -> None:
        self._source = source
        self._slices = slices or {}
        self.seal: bytes | None = None
        self.base = base
        self._key_reason = key_reason
        self._plan = plan
        self._options = options
        self._slab = header.SLAB
        self._measures = options.stats and plan.is_lossy
        self._encoder = encoder or ChunkEncoder(source, measure=self._measures)
        # No method: a cycle of references would keep the source's files until the next collection.
        self._refusal_of = partial(_refusal, options.max_update_error, plan.shares)
        self._groups = GroupEncoder(source, self._encoder, self._refusal_of)
        # Ranks save often and wait for the last of them: entries of their own take longer than small slices.
        self._own, self._shared = share(plan.units, 0 if slices else source.size, self._slab)

    def run(self, target: Path, policy: Policy, *, force: bool, tidy: bool = True) -> Manifest:
        """Write ``target``; ``tidy`` as in ``Partial``. Raises InputError for damage in the source, OutputError."""
        units = self._own
        with Workers(self._options.threads) as workers:
            # Threads start on the chunks while the header is laid out, which takes as long as some of them.
            chunks = self._encoder.stored(_chunks_of(units), workers)
            with ContainerWriter(target, self._names(), force=force, tidy=tidy, room=self._room) as writer:
                results = self.write_units(writer, workers, units, chunks)
                self.write_groups(writer, workers.map(self._groups.stored, self._shared), results)
                self._source.check_unchanged()
                self._check_budget(policy, results.measured)
                return self.publish(writer, results, policy)

    def pack(self, target: Path, policy: Policy, *, force: bool) -> Unwritten:
        """Open the temporary file of ``target`` and pack all units in memory. Raises as ``run``."""
        with ExitStack() as stack:
            writer = stack.enter_context(ContainerWriter(target, self._names(), force=force, room=self._room))
            workers = stack.enter_context(Workers(self._options.threads))
            units: list[Unit] = []
            chunks: deque[PackedChunk] = deque()
            measured: list[tuple[Unit, StepError | None]] = []
            for unit, packed in self._pack_units(workers):
                units.append(unit)
                chunks += packed
                measured += [(unit, packed[0].errors.steps)] if packed else []
            groups = deque(workers.map(self._groups.pack, self._shared))
            self._source.check_unchanged()
            measured += [(unit.unit, unit.errors.steps) for group in groups for unit in group.units]
            self._check_budget(policy, measured)
            return Unwritten(self, policy, units, chunks, groups, writer, workers, stack.pop_all())

    def write_units(
        self, writer: ContainerWriter, workers: Workers, units: Iterable[Unit], chunks: Iterator[EncodedChunk]
    ) -> Results:
        """Write ``units``, whose ``chunks`` come in the same order. Raises as ``run``."""
        results = Results()
        for unit in units:
            mark = writer.mark()
            result = self._write_unit(writer, unit, chunks)
            while refusal := result.refused or self._refusal_of(result.unit, result.errors):
                writer.rollback(mark)
                again = result.unit.fallback(refusal)
                result = self._write_unit(writer, again, self._encoder.stored(_chunks_of([again]), workers))
            check_source(result.unit, result.crcs, self._source.label)
            results.add(result)
        return results

    @without_collection()
    def write_groups(self, writer: ContainerWriter, groups: Iterable[EncodedGroup], results: Results) -> None:
        """Write groups of units that share entries. Raises as ``run``."""
        for group in groups:
            errors = UnitErrors()
            for unit in group.units:
                check_source(unit.unit, unit.crcs, self._source.label)
                results.add_unit(unit.unit, unit.errors)
                errors.streams.update(unit.errors.streams)
            for streams, parts, packings in group.packs:
                name = f"{PACK_NAME}{len(results.packs)}"
                tables = {part: FrameTable() for part in parts}
                if any(stream.spec.numel for stream in streams):
                    for part, planes in parts.items():
                        tables[part].add(planes, packings.get(part))
                        writer.append(header.pack_entry(name, part), [frame for frame, _ in planes])
                results.add_pack(pack_record(name, streams, tables), streams, errors)
                self._options.progress(sum(stream.spec.numel * stream.spec.dtype.itemsize for stream in streams))

    @without_collection()
    def publish(self, writer: ContainerWriter, results: Results, policy: Policy) -> Manifest:
        """Write the manifest and give the file its name. Raises OutputError."""
        rules = [rule.text for rule in policy.rules]
        manifest = Manifest(f"ckpt8 {__version__}", policy.preset, rules, self._slab, frames.FRAME)
        manifest.budget = asdict(policy.budget) if policy.budget else None
        fill_manifest(manifest, self._source, self._plan, results)
        if self.base is not None and any(record.base is not None for record in manifest.storages):
            manifest.base = self.base
        manifest.key_reason = self._key_reason
        for index, tensor in enumerate(manifest.tensors):
            if (key := self._slices.get(tensor.name)) is not None:
                manifest.slices.append(SliceRecord(key[0], index, list(key[1])))
        self.seal = writer.finish(manifest, partial(check_base, manifest.base))
        return manifest

    def _check_budget(self, policy: Policy, errors: Sequence[tuple[Unit, StepError | None]]) -> None:
        """Raise OverBudgetError where the error exceeds the budget, unless the plan knows what was measured."""
        if policy.budget is not None and not self._plan.is_measured:
            times, measured = excess(self._plan.shares, errors, policy.budget.steps)
            if 1 < times < math.inf:
                raise OverBudgetError(measured)

    def _pack_units(self, workers: Workers) -> Iterator[tuple[Unit, list[PackedChunk]]]:
        """Every unit with its final codecs, and its packed chunks."""
        chunks = self._encoder.packed(_chunks_of(self._own), workers)
        for unit in self._own:
            packed, refusal = self._pack_unit(unit, chunks)
            final = unit
            while refusal is not None:
                packed.clear()
                final = final.fallback(refusal)
                packed, refusal = self._pack_unit(final, self._encoder.packed(_chunks_of([final]), workers))
            yield final, packed

    def _pack_unit(self, unit: Unit, chunks: Iterator[PackedChunk]) -> tuple[list[PackedChunk], Refusal | None]:
        """The packed chunks of a unit, all its errors with the first of them, and why its codecs cannot keep it."""
        errors = self._no_errors(unit)
        packed: list[PackedChunk] = []
        refused: Refusal | None = None
        for _ in range(header.chunk_count(unit.numel)):
            chunk = next(chunks)
            refused = refused or chunk.refused
            if refused is None:
                packed.append(chunk)
                errors.merge(chunk.errors)
        self._encoder.finish(unit, errors)
        for k, chunk in enumerate(packed):
            chunk.errors = UnitErrors() if k else errors
        return packed, refused or self._refusal_of(unit, errors)

    def _names(self) -> list[str]:
        """The entry names that the header has room for: those of the codecs that are tried first.

        Makes slabs larger until the header stays within the limit of safetensors with any of the codecs.
        """
        shared = [name for group in self._shared for name in group.names()]
        streams = [stream for unit in self._own for stream in unit.streams]
        while True:
            names, longest = list(shared), list(shared)
            for stream in streams:
                choices = [header.entry_names(codec, stream.spec, self._slab) for codec in stream.codecs]
                names += choices[0]
                most: list[str] = max(choices, key=lambda entries: (len(entries), len("".join(entries))))
                longest += most
            if header.reserved_size(longest) <= header.MAX_HEADER or self._slab > 1 << 40:
                return names
            self._slab *= 2

    def _room(self) -> str:
        """The most that a container of the source takes: lossless storages are stored as they are at worst."""
        # Slices that a framework has compressed take more than their file once they are decoded.
        decoded = sum(stream.spec.numel * stream.spec.dtype.itemsize for stream in self._plan.streams)
        return f"at most {size(max(self._source.size, decoded) * _LONGEST + _LONGEST_MORE)}"

    def _no_errors(self, unit: Unit) -> UnitErrors:
        """Sums for what is measured of a unit, all zero."""
        return UnitErrors.for_unit(unit) if self._measures else UnitErrors()

    def _write_unit(self, writer: ContainerWriter, unit: Unit, chunks: Iterator[EncodedChunk]) -> UnitResult:
        """Write a unit slab by slab. Consumes all its chunks, also after one was refused."""
        result = UnitResult(
            unit,
            [{part: FrameTable() for part in stream.codec.layout(stream.spec)} for stream in unit.streams],
            self._no_errors(unit),
            [0] * len(unit.streams),
        )
        slabs = header.slab_chunks(unit.numel, self._slab)
        for k, slab in enumerate(slabs):
            stored: list[_Planes] = [{part: [] for part in table} for table in result.tables]
            for chunk in slab:
                encoded = next(chunks)
                result.refused = result.refused or encoded.refused
                if result.refused is None:
                    self._collect(result, stored, encoded, chunk)
            for stream, parts in zip(unit.streams, stored, strict=True):
                for part, planes in parts.items():
                    if result.refused is None:
                        writer.append(header.entry_name(stream.spec.name, part, k, len(slabs)), planes)
        self._encoder.finish(unit, result.errors)
        return result

    def _collect(self, result: UnitResult, stored: list[_Planes], encoded: EncodedChunk, chunk: int) -> None:
        for k, stream in enumerate(result.unit.streams):
            for part, planes in encoded.parts[k].items():
                stored[k][part] += [frame for frame, _ in planes]
                result.tables[k][part].add(planes, encoded.packings[k].get(part))
            length = stream.chunk_spec(chunk).numel * stream.spec.dtype.itemsize
            result.crcs[k] = combine(result.crcs[k], encoded.crcs[k], length)
            self._options.progress(length)
        result.errors.merge(encoded.errors)


def _chunks_of(units: Iterable[Unit]) -> Iterator[Work]:
    return ((unit, chunk) for unit in units for chunk in range(header.chunk_count(unit.numel)))


def _refusal(bound: float | None, shares: Mapping[int, Share], unit: Unit, errors: UnitErrors) -> Refusal | None:
    """Why the codecs of a unit cannot keep it although they took it, or None."""
    return _broken_bound(bound, unit, errors) or exceeded_share(shares, unit, errors.steps)


def _broken_bound(bound: float | None, unit: Unit, errors: UnitErrors) -> Refusal | None:
    """Why the codecs of a unit cannot keep the bound on its update error, or None."""
    parameter = unit.parameter
    moments = [stream for stream in unit.streams if stream.index != unit.weight]
    if bound is None or not any(moment.lossy if parameter else moment.lossy_moment for moment in moments):
        return None
    error = errors.update
    if error is None:
        why = (parameter.reason if parameter else None) or NO_PARAMETER
        return Refusal(f"update error unknown: {why}")
    if not error.max_error <= bound:
        return Refusal(f"update error exceeds {bound:g}")
    return None
