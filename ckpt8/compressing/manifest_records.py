"""Turns the results of a compression into the records of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from ckpt8.checkpoint.sources.bundle import Bundle, Member
from ckpt8.codecs import config_of
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Plan, Unit
from ckpt8.container.manifest import (
    FrameTable,
    Manifest,
    MemberRecord,
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
    refused: str | None = None


def fill_manifest(
    manifest: Manifest, source: Bundle, plan: Plan, results: Mapping[int, tuple[UnitResult, int]]
) -> None:
    """Add the members, storages, tensors and parameters of ``source`` to the manifest.

    ``results`` gives, for the index of every stream, the result of its unit and the place of the stream in it.
    """
    manifest.directory = source.directory
    manifest.storages += [_storage_record(*results[index]) for index in range(len(results))]
    manifest.members += [_member_record(member, results) for member in source.members]
    for tensor, index in plan.tensors:
        ref = tensor.ref
        flags = [name for name in ("conj", "neg") if getattr(ref, name)]
        manifest.tensors.append(
            TensorRecord(tensor.name, index, ref.dtype, ref.offset, list(ref.shape), list(ref.stride), flags)
        )
    for unit in plan.units:
        if (parameter := unit.parameter) is not None:
            error = results[unit.streams[0].index][0].errors.update
            manifest.parameters.append(
                ParameterRecord(
                    parameter.name,
                    dict(parameter.moments),
                    asdict(parameter.rule) if parameter.rule else None,
                    parameter.reason,
                    error.to_json() if error and error.finite else None,
                )
            )


def _member_record(member: Member, results: Mapping[int, tuple[UnitResult, int]]) -> MemberRecord:
    """The record of one member.

    It lists the checksum fields that ``restore`` must fill in: those of storages whose bytes change, or whose checksum
    the source does not state.
    """
    checkpoint, first = member.checkpoint, member.first
    segments, fields = [], []
    for index, storage in sorted(enumerate(checkpoint.source_storages, first), key=lambda each: each[1].offset):
        segments.append([storage.offset, index])
        result, k = results[index]
        if storage.crc32 is None or result.unit.streams[k].lossy:
            fields += [[place, index] for place in storage.crc_fields]
    return MemberRecord(member.path, checkpoint.format, checkpoint.size, member.skeleton, segments, fields)


def _storage_record(result: UnitResult, k: int) -> StorageRecord:
    stream = result.unit.streams[k]
    error = result.errors.streams.get(stream.index)
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
