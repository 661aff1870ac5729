"""Turns the results of a compression into the records of the manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.codecs import Codec, config_of
from ckpt8.codecs.error_stats import StepError, UpdateError
from ckpt8.compressing.parameters import OptimizerStep
from ckpt8.compressing.plan import Plan, Refusal, Stream, Unit
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container.manifest import (
    FrameTable,
    Manifest,
    MemberRecord,
    Pack,
    ParameterRecord,
    StorageRecord,
    TensorRecord,
)


@dataclass(slots=True)
class UnitResult:
    """The outcome of writing a unit: ``tables`` by stream, then part; ``crcs`` of the source bytes by stream.

    ``refused`` says why a codec refused the unit; nothing else of the result counts then.
    """

    unit: Unit
    tables: list[dict[str, FrameTable]]
    errors: UnitErrors
    crcs: list[int]
    refused: Refusal | None = None


@dataclass(slots=True)
class Results:
    """What was written: the records of storages, update errors and errors in steps by index of a stream, and the packs.

    Errors of updates and in steps are those of the unit whose first stream it is; ``measured`` are the same errors in
    steps by unit. ``lossy`` are the storages that come back otherwise.
    """

    records: dict[int, StorageRecord] = field(default_factory=dict)
    updates: dict[int, UpdateError] = field(default_factory=dict)
    steps: dict[int, StepError] = field(default_factory=dict)
    measured: list[tuple[Unit, StepError | None]] = field(default_factory=list)
    lossy: set[int] = field(default_factory=set)
    packs: list[Pack] = field(default_factory=list)
    _configs: dict[int, tuple[Codec, dict[str, Any]]] = field(default_factory=dict, repr=False)

    def add_unit(self, unit: Unit, errors: UnitErrors) -> None:
        """Add what is known of a unit as a whole."""
        self.lossy.update(stream.index for stream in unit.streams if stream.lossy)
        if errors.steps is not None:
            self.measured.append((unit, errors.steps))
        if errors.update is not None and errors.update.finite:
            self.updates[unit.streams[0].index] = errors.update
        if errors.steps is not None and errors.steps.finite:
            self.steps[unit.streams[0].index] = errors.steps

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
    manifest.members += [_member_record(member, results) for member in source.members]
    for tensor, index in plan.tensors:
        ref = tensor.ref
        flags = [name for name in ("conj", "neg") if getattr(ref, name)]
        manifest.tensors.append(
            TensorRecord(tensor.name, index, ref.dtype, ref.offset, list(ref.shape), list(ref.stride), flags)
        )
    for unit in plan.units:
        if (parameter := unit.parameter) is not None:
            error, steps = results.updates.get(unit.streams[0].index), results.steps.get(unit.streams[0].index)
            manifest.parameters.append(
                ParameterRecord(
                    parameter.name,
                    dict(parameter.moments),
                    parameter.rule.to_json() if parameter.rule else None,
                    parameter.reason,
                    error.to_json() if error else None,
                    steps_record(parameter.step, steps),
                )
            )


def steps_record(step: OptimizerStep | None, error: StepError | None) -> dict[str, Any] | None:
    """The stored form of an error in steps; None where it was not measured."""
    if step is None or error is None:
        return None
    stated = {} if step.stated_lr in (None, step.lr) else {"stated_rate": step.stated_lr}
    decay = {"coupled_decay" if step.is_coupled else "decay": step.decay} if step.decay else {}
    place = {"optimizer": step.optimizer, "weight_storage": step.weight}
    return {**place, "rate": step.lr, **stated, **decay, **error.to_json()}


def _member_record(member: Member, results: Results) -> MemberRecord:
    """The record of one member.

    It lists the checksum fields that ``restore`` must fill in: those of storages whose bytes change, or whose checksum
    the source does not state.
    """
    checkpoint, first = member.checkpoint, member.first
    segments, fields = [], []
    for index, storage in sorted(enumerate(checkpoint.source_storages, first), key=lambda pair: pair[1].offset):
        segments.append([storage.offset, index])
        if storage.crc32 is None or index in results.lossy:
            fields += [[place, index] for place in storage.crc_fields]
    return MemberRecord(member.path, checkpoint.format, checkpoint.size, member.skeleton, segments, fields)


def _storage_record(stream: Stream, codec: dict[str, Any], errors: UnitErrors) -> StorageRecord:
    error = errors.streams.get(stream.index)
    spec = stream.spec
    figures = error.to_json() if error and error.finite else None
    return StorageRecord(
        spec.name, spec.dtype, spec.numel, spec.role, codec, stream.reason, error=figures, base=stream.base
    )
