"""Runs a compression: units of storages -> codec -> planes -> container, in the order of the source.

A few threads read, encode, measure and compress chunks of 2^20 elements, which come back in order. Memory holds one
slab of stored planes and the chunks in flight. When a codec refuses a unit, or its update error exceeds the bound, the
writer rolls the unit back and tries the next codecs, lossless ones at last: see ``Unit.fallback``.

``run`` does all of it. ``pack`` stops when every chunk is packed in memory and the codec of every unit is final. From
then on the source is not needed: the ``Unwritten`` that ``pack`` returns writes the same file later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ckpt8 import __version__
from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.codecs import Codec, config_of
from ckpt8.codecs.error_stats import ErrorStats, StepError
from ckpt8.compressing.chunk_encoder import ChunkEncoder, EncodedChunk, PackedChunk, Work, check_source, store
from ckpt8.compressing.deltas import check_base
from ckpt8.compressing.groups import (
    PACK_NAME,
    EncodedGroup,
    EncodedUnit,
    GroupEncoder,
    PackedGroup,
    pack_record,
    share,
    store_group,
)
from ckpt8.compressing.measure import UnitErrors, exceeded_share, excess
from ckpt8.compressing.plan import Measured, OptimizerStep, Plan, Refusal, Share, Stream, Unit
from ckpt8.compressing.policy import Policy
from ckpt8.container import frames, header
from ckpt8.container.manifest import (
    BaseRecord,
    FrameTable,
    Manifest,
    MemberRecord,
    Pack,
    ParameterRecord,
    SliceRecord,
    StorageRecord,
    TensorRecord,
)
from ckpt8.container.sharded import SliceKey
from ckpt8.container.steps import NO_PARAMETER
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import combine
from ckpt8.core.text import size
from ckpt8.core.workers import Progress, Workers


@dataclass(slots=True)
class UnitResult(EncodedUnit):
    """A unit that was written, with ``tables`` by stream, then part.

    ``refused`` says why a codec refused the unit; nothing else of the result counts then.
    """

    tables: list[dict[str, FrameTable]]
    refused: Refusal | None = None


@dataclass(slots=True)
class Results:
    """What was written: the records of storages by index, the packs, and units with lossy streams or a parameter."""

    records: dict[int, StorageRecord] = field(default_factory=dict)
    units: list[tuple[Unit, UnitErrors]] = field(default_factory=list)
    packs: list[Pack] = field(default_factory=list)
    _configs: dict[int, tuple[Codec, dict[str, Any]]] = field(default_factory=dict, repr=False)

    def add_unit(self, unit: Unit, errors: UnitErrors) -> None:
        """Add what is known of a unit as a whole."""
        if unit.parameter is not None or any(stream.lossy for stream in unit.streams):
            self.units.append((unit, errors))

    def add(self, result: UnitResult) -> None:
        """Add a unit whose storages have entries of their own."""
        self.add_unit(result.unit, result.errors)
        for k, stream in enumerate(result.unit.streams):
            record = _storage_record(stream, self._config(stream.codec), result.errors)
            record.parts = result.tables[k]
            self.records[stream.index] = record

    def _config(self, codec: Codec) -> dict[str, Any]:
        """The stored form of a codec, one for all storages that share the object."""
        entry = self._configs.get(id(codec))
        if entry is None:
            entry = self._configs[id(codec)] = codec, config_of(codec)  # with the codec, so that its id stays its own
        return entry[1]

    def add_pack(self, pack: Pack, streams: Sequence[Stream], errors: UnitErrors) -> None:
        """Add a pack of ``streams``; ``errors`` hold those of its storages."""
        self.packs.append(pack)
        for place, stream in enumerate(streams):
            record = _storage_record(stream, pack.codec, errors)
            record.pack, record.place = pack, place
            self.records[stream.index] = record


def fill_manifest(manifest: Manifest, source: Bundle, plan: Plan, results: Results) -> None:
    """Add the members, storages, tensors and parameters of ``source`` to the manifest."""
    manifest.directory = source.directory
    manifest.packs += results.packs
    manifest.storages += [results.records[index] for index in range(len(results.records))]
    lossy = {stream.index for unit, _ in results.units for stream in unit.streams if stream.lossy}
    manifest.members += [_member_record(member, lossy) for member in source.members]
    errors_of = {unit.streams[0].index: errors for unit, errors in results.units}
    for tensor, index in plan.tensors:
        ref = tensor.ref
        flags = [name for name in ("conj", "neg") if getattr(ref, name)]
        manifest.tensors.append(
            TensorRecord(tensor.name, index, ref.dtype, ref.offset, list(ref.shape), list(ref.stride), flags)
        )
    of_parameters = [(unit, unit.parameter) for unit in plan.units if unit.parameter is not None]
    # In the order of their states, whether weights are in their units or not.
    for unit, parameter in sorted(of_parameters, key=lambda pair: _place_of_state(plan, pair[0])):
        errors = errors_of.get(unit.streams[0].index, UnitErrors())
        has_steps = errors.steps is not None and errors.steps.finite
        manifest.parameters.append(
            ParameterRecord(
                parameter.name,
                dict(parameter.moments),
                parameter.rule.to_json() if parameter.rule else None,
                parameter.reason,
                _figures(errors.update),
                steps_record(parameter.step, errors.steps if has_steps else None),
            )
        )


def _place_of_state(plan: Plan, unit: Unit) -> int:
    """Where the state of the parameter of a unit begins in the source."""
    index = min((stream.index for stream in unit.streams if stream.index != unit.weight), default=unit.streams[0].index)
    return plan.by_index[index].storage.offset


def steps_record(step: OptimizerStep | None, error: StepError | None) -> dict[str, Any] | None:
    """The stored form of an error in steps; None where it was not measured."""
    if step is None or error is None:
        return None
    stated = {} if step.stated_lr in (None, step.lr) else {"stated_rate": step.stated_lr}
    decay = {"coupled_decay" if step.is_coupled else "decay": step.decay} if step.decay else {}
    place = {"optimizer": step.optimizer, "weight_storage": step.weight}
    return {**place, "rate": step.lr, **stated, **decay, **step.stated, **error.to_json()}


def _figures(error: ErrorStats | None) -> dict[str, Any] | None:
    """The stored form of an error; None where it was not measured, or is not finite."""
    return error.to_json() if error is not None and error.finite else None


def _member_record(member: Member, lossy: Set[int]) -> MemberRecord:
    """The record of one member; ``lossy`` are the storages that come back otherwise.

    It lists the checksum fields that ``restore`` must fill in: those of storages whose bytes change, or whose checksum
    the source does not state.
    """
    checkpoint, first = member.checkpoint, member.first
    segments, fields = [], []
    for index, storage in sorted(enumerate(checkpoint.source_storages, first), key=lambda pair: pair[1].offset):
        segments.append([storage.offset, index])
        if storage.crc32 is None or index in lossy:
            fields += [[place, index] for place in storage.crc_fields]
    return MemberRecord(member.path, checkpoint.format, checkpoint.size, member.skeleton, segments, fields)


def _storage_record(stream: Stream, codec: dict[str, Any], errors: UnitErrors) -> StorageRecord:
    spec, figures = stream.spec, _figures(errors.streams.get(stream.index))
    return StorageRecord(
        spec.name, spec.dtype, spec.numel, spec.role, codec, stream.reason, error=figures, base=stream.base
    )


_LONGEST, _LONGEST_MORE = 1.01, 1 << 14
"""How much longer than its source a container is at most: a part of it, and bytes."""

_Planes = dict[str, list[bytes | memoryview]]
"""The stored planes of each part, chunk after chunk."""


_MOST_FILES = 4
"""Times that a checkpoint is compressed until its error keeps to a budget. One is enough for nearly all."""


def no_progress(_: int) -> None:
    """Show nothing. A function and no lambda: frameworks pickle objects that hold ``Options``."""


@dataclass(frozen=True, slots=True)
class Options:
    """``max_update_error`` bounds max |Δu| of every parameter; without ``stats`` nothing is measured.

    ``earlier`` is what the new manifest states of earlier compressions of the source. ``approve`` is that of
    ``ContainerWriter``.

    Raises UsageError for a bound that is negative or NaN, and for one without statistics.
    """

    threads: int | None = None
    stats: bool = True
    max_update_error: float | None = None
    progress: Progress = no_progress
    earlier: dict[str, float | None] | None = None
    approve: Callable[[Path], object] | None = None

    def __post_init__(self) -> None:
        if self.max_update_error is not None and not self.max_update_error >= 0:
            raise UsageError(f"a bound on the update error is a number from 0 on, not {self.max_update_error}")
        if self.max_update_error is not None and not self.stats:
            raise UsageError("a bound on the update error needs statistics; leave out --no-stats")


class OverBudgetError(Exception):
    """The error of a file exceeds its budget: ``measured`` tells what the sample that it was planned by does not.

    The last of _MOST_FILES is not held against it.
    """

    def __init__(self, measured: Measured) -> None:
        super().__init__("the error exceeds the budget")
        self.measured = measured


@dataclass(slots=True)
class Unwritten:
    """A packed checkpoint whose temporary file is open until ``write`` or ``close``."""

    compressor: Compressor
    policy: Policy
    units: list[Unit]
    chunks: deque[PackedChunk]
    groups: deque[PackedGroup]
    writer: ContainerWriter
    workers: Workers
    resources: ExitStack

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
        self._plan = plan
        self._options = options
        self.base = base
        self._key_reason = key_reason
        self._slices = slices or {}
        self.seal: bytes | None = None
        self._slab = header.SLAB
        self._measures = options.stats and plan.is_lossy
        self._encoder = encoder or ChunkEncoder(source, measure=self._measures)
        # No method: a cycle of references would keep the source's files until the next collection.
        self._refusal_of = partial(_refusal, options.max_update_error, plan.shares)
        self._groups = GroupEncoder(source, self._encoder, self._refusal_of)
        # Ranks save often and wait for the last of them: entries of their own take longer than small slices.
        units = plan.units
        self._own, self._shared = share(units, 0 if slices else source.size, self._slab)
        if self._measures:
            self._encoder.lockstep.prepare(units)

    def run(self, target: Path, policy: Policy, *, force: bool, tidy: bool = True) -> Manifest:
        """Write ``target``; ``tidy`` as in ``Partial``. Raises InputError for damage in the source, OutputError."""
        units = self._own
        self._expect()
        with Workers(self._options.threads) as workers:
            # Threads start on the chunks while the header is laid out, which takes as long as some of them.
            chunks = self._encoder.stored(_chunks_of(units), workers)
            with self._writer(target, force=force, tidy=tidy) as writer:
                results = self.write_units(writer, workers, units, chunks)
                self.write_groups(writer, workers.map(self._groups.stored, self._shared), results)
                self._source.check_unchanged()
                self._check_budget(policy, [(unit, errors.steps) for unit, errors in results.units])
                return self.publish(writer, results, policy)

    def pack(self, target: Path, policy: Policy, *, force: bool) -> Unwritten:
        """Open the temporary file of ``target`` and pack all units in memory. Raises as ``run``."""
        self._expect()
        with ExitStack() as stack:
            writer = stack.enter_context(self._writer(target, force=force))
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
        manifest.earlier = self._options.earlier
        fill_manifest(manifest, self._source, self._plan, results)
        if self.base is not None and any(record.base is not None for record in manifest.storages):
            manifest.base = self.base
        manifest.key_reason = self._key_reason
        for index, tensor in enumerate(manifest.tensors):
            if (key := self._slices.get(tensor.name)) is not None:
                manifest.slices.append(SliceRecord(key[0], index, list(key[1])))
        self.seal = writer.finish(manifest, partial(check_base, manifest.base))
        return manifest

    def _expect(self) -> None:
        """Tell the source in which order its chunks will be read."""
        units = [*self._own, *(unit for group in self._shared for unit in group.units)]
        chunks = ((stream, chunk) for unit, chunk in _chunks_of(units) for stream in unit.streams)
        self._source.expect(
            (
                stream.storage.offset + chunk * frames.FRAME * stream.spec.dtype.itemsize,
                stream.chunk_spec(chunk).numel * stream.spec.dtype.itemsize,
            )
            for stream, chunk in chunks
        )

    def _check_budget(self, policy: Policy, errors: Sequence[tuple[Unit, StepError | None]]) -> None:
        """Raise OverBudgetError where the error exceeds the budget, unless several whole files have told of it."""
        if policy.budget is not None and (files := self._plan.measured + 1) < _MOST_FILES:
            times, energies, per_square = excess(self._plan.shares, errors, policy.budget.steps)
            if 1 < times < math.inf:
                raise OverBudgetError(Measured(energies, per_square, files))

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

    def _writer(self, target: Path, *, force: bool, tidy: bool = True) -> ContainerWriter:
        return ContainerWriter(
            target,
            self._names(),
            force=force,
            tidy=tidy,
            room=lambda: f"at most {size(self._bound())}",
            bound=self._bound(),
            approve=self._options.approve,
        )

    def _bound(self) -> int:
        """The most bytes of a container of the source: lossless storages are stored as they are at worst."""
        # Slices that a framework has compressed take more than their file once they are decoded.
        decoded = sum(stream.spec.numel * stream.spec.dtype.itemsize for stream in self._plan.streams)
        return int(max(self._source.size, decoded) * _LONGEST) + _LONGEST_MORE

    def _no_errors(self, unit: Unit) -> UnitErrors:
        """Sums for what is measured of a unit, all zero."""
        return UnitErrors.for_unit(unit) if self._measures else UnitErrors()

    def _write_unit(self, writer: ContainerWriter, unit: Unit, chunks: Iterator[EncodedChunk]) -> UnitResult:
        """Write a unit slab by slab. Consumes all its chunks, also after one was refused."""
        result = UnitResult(
            unit,
            self._no_errors(unit),
            [0] * len(unit.streams),
            [{part: FrameTable() for part in stream.codec.layout(stream.spec)} for stream in unit.streams],
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
