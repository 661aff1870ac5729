"""From the results of a run to the records of the manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ckpt8.codecs import config_of
from ckpt8.container.manifest import (
    FrameTable,
    Manifest,
    MemberRecord,
    ParameterRecord,
    StorageRecord,
    TensorRecord,
)
from ckpt8.measure import UnitErrors
from ckpt8.plan import Parameter, Plan, Unit
from ckpt8.readers.base import Checkpoint, TensorRef


@dataclass(slots=True)
class UnitResult:
    """What was written for a unit. ``tables`` by stream, then part; ``crcs`` of the source bytes by stream."""

    unit: Unit
    tables: list[dict[str, FrameTable]]
    errors: UnitErrors | None = None
    crcs: list[int] = field(default_factory=list)


def fill(
    manifest: Manifest,
    checkpoint: Checkpoint,
    plan: Plan,
    member: str,
    results: Mapping[int, tuple[UnitResult, int]],
) -> None:
    """Add one member: its storages, of which the last is its skeleton, its tensors and parameters.

    ``results`` gives, for the index of every stream, the result of its unit and its place in that unit.
    """
    manifest.storages += [_storage_record(*results[index]) for index in range(len(results))]
    storages = checkpoint.storages[:-1]
    order = sorted(range(len(storages)), key=lambda index: storages[index].offset)
    manifest.members.append(
        MemberRecord(
            member,
            checkpoint.format,
            checkpoint.size,
            len(storages),
            [[storages[index].offset, index] for index in order],
            _crc_fields(checkpoint, order, results),
        )
    )
    for tensor, index in plan.tensors:
        ref = tensor.ref
        manifest.tensors.append(
            TensorRecord(tensor.name, index, ref.dtype, ref.offset, list(ref.shape), list(ref.stride), _flags(ref))
        )
    for unit in plan.units:
        if unit.parameter is not None:
            result, _ = results[unit.streams[0].index]
            manifest.parameters.append(_parameter_record(unit.parameter, result))


def _flags(ref: TensorRef) -> list[str]:
    return [name for name, is_set in (("conj", ref.conj), ("neg", ref.neg)) if is_set]


def _crc_fields(
    checkpoint: Checkpoint, order: Iterable[int], results: Mapping[int, tuple[UnitResult, int]]
) -> list[list[int]]:
    """The checksum fields that ``restore`` must fill in: where bytes change, or where the source knew none yet."""
    fields = []
    for index in order:
        storage = checkpoint.storages[index]
        result, k = results[index]
        if storage.crc32 is None or result.unit.streams[k].lossy:
            fields += [[place, index] for place in storage.crc_fields]
    return fields


def _storage_record(result: UnitResult, k: int) -> StorageRecord:
    stream = result.unit.streams[k]
    error = result.errors.streams.get(stream.index) if result.errors else None
    return StorageRecord(
        stream.spec.name,
        stream.spec.dtype,
        stream.spec.numel,
        stream.spec.role,
        config_of(stream.codec),
        stream.reason,
        result.tables[k],
        error.to_json() if error and error.finite else None,
    )


def _parameter_record(parameter: Parameter, result: UnitResult) -> ParameterRecord:
    error = result.errors.update if result.errors else None
    return ParameterRecord(
        parameter.name,
        dict(parameter.moments),
        parameter.rule.to_json() if parameter.rule else None,
        parameter.reason,
        error.to_json() if error and error.finite else None,
    )
