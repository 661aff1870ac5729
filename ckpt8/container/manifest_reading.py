"""Reads the records of a manifest from its JSON.

Reading validates every type and range: the seal proves that nothing is damaged, not that nobody is malicious.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from ckpt8.container.base_record import read_base
from ckpt8.container.columns import (
    FLAGS,
    Table,
    as_count,
    as_counts,
    as_dtype,
    as_flags,
    as_object,
    as_step,
    as_text,
    below,
    or_null,
)
from ckpt8.container.header import check_version
from ckpt8.container.json_fields import LARGEST, Fields
from ckpt8.container.layout import PACK
from ckpt8.container.manifest import (
    DELTA,
    MOST_DIMS,
    SHARED,
    FrameTable,
    Manifest,
    MemberRecord,
    Pack,
    ParameterRecord,
    SliceRecord,
    StorageRecord,
    TensorRecord,
)
from ckpt8.container.manifest_json import dense_stride, skeleton_name
from ckpt8.container.symbol_modes import Mode
from ckpt8.core.tensors import DType, Role


def _frame_table(fields: Fields) -> FrameTable:
    table = FrameTable(fields.counts("lengths"), fields.counts("crcs", 1 << 32), fields.values("modes", Mode.of))
    if len(table.lengths) != len(table.crcs):
        raise fields.fail("crcs")
    return table


def _storage(fields: Fields) -> StorageRecord:
    codec, base = fields.get("codec", dict), None
    if codec.get("id") == DELTA:
        delta = fields.nested(codec)
        codec, base = delta.get("codec", dict), delta.count("base")
        if codec.get("id") in (DELTA, SHARED):
            raise delta.fail("codec")
    return StorageRecord(
        name=fields.get("name", str),
        dtype=fields.choice("dtype", DType.from_label),
        numel=fields.count("numel"),
        role=fields.choice("role", Role),
        codec=codec,
        reason=fields.optional("reason", str),
        parts=fields.mapping("parts", _frame_table),
        error=fields.optional("error", dict),
        base=base,
    )


def _tensor(fields: Fields, storages: int) -> TensorRecord:
    record = TensorRecord(
        name=fields.get("name", str),
        storage=fields.count("storage", storages),
        dtype=fields.choice("dtype", DType.from_label),
        offset=fields.count("offset"),
        shape=fields.counts("shape"),
        stride=fields.counts("stride"),
        flags=fields.get("flags", list),
    )
    if not all(flag in FLAGS for flag in record.flags):
        raise fields.fail("flags")
    if len(record.shape) != len(record.stride):
        raise fields.fail("stride")
    return record


def _budget(fields: Fields) -> dict[str, float] | None:
    found = fields.optional("budget", dict)
    if found is not None:
        values: list[Any] = [found.get(key) for key in ("steps", "u_max", "cap")]
        if not all(type(value) in (int, float) and 0 < value < LARGEST for value in values):
            raise fields.fail("budget")
    return found


def _steps(fields: Fields, storages: int) -> dict[str, Any] | None:
    found = fields.optional("steps", dict)
    if found is not None:
        steps = fields.nested(found)
        steps.count("optimizer")
        if steps.any("weight_storage") is not None:
            steps.count("weight_storage", storages)
    return found


def _parameter(fields: Fields, storages: int) -> ParameterRecord:
    moments = fields.get("moments", dict)
    if not all(type(index) is int and 0 <= index < storages for index in moments.values()):
        raise fields.fail("moments")
    return ParameterRecord(
        name=fields.get("name", str),
        moments=moments,
        rule=fields.optional("rule", dict),
        reason=fields.optional("reason", str),
        error=fields.optional("error", dict),
        steps=_steps(fields, storages),
    )


def _member(fields: Fields, storages: int) -> MemberRecord:
    return MemberRecord(
        path=fields.get("path", str),
        format=fields.get("format", str),
        size=fields.count("size"),
        skeleton=fields.count("skeleton", storages),
        segments=fields.pairs("segments", storages),
        crc_fields=fields.pairs("crc_fields", storages),
    )


def read_manifest(tree: object, where: str) -> Manifest:
    """The manifest of a parsed JSON tree. Raises InputError, or UnsupportedError for another version."""
    fields = Fields(tree, f"{where}: manifest")
    check_version(fields.get("version", str), where)
    own = fields.each("storages", _storage)
    storages, packs = _read_packs(fields, own)
    count = len(storages)
    members = fields.each("members", lambda each: _member(each, count))
    if packs:
        members += _read_members(fields.nested(tree, "member_table"), storages)
    manifest = Manifest(
        writer=fields.get("writer", str),
        preset=fields.get("preset", str),
        rules=fields.get("rules", list),
        slab=fields.count("slab"),
        frame=fields.count("frame"),
        members=members,
        storages=storages,
        parameters=fields.each("parameters", lambda each: _parameter(each, count)),
        directory=fields.optional("directory", str),
        packs=packs,
        budget=_budget(fields),
        base=read_base(fields),
    )
    for member in members:
        storages[member.skeleton].name = storages[member.skeleton].name or skeleton_name(manifest, member)
    if not all(record.name for record in storages if record.pack is not None):
        raise fields.fail("storages")
    manifest.tensors += fields.each("tensors", lambda each: _tensor(each, count))
    if packs:
        manifest.tensors += _read_tensors(fields.nested(tree, "tensor_table"), storages)
    if fields.any("slices") is not None:
        manifest.slices += _read_slices(fields.nested(tree, "slices"), manifest.tensors)
    return manifest


def _read_packs(fields: Fields, found: list[StorageRecord]) -> tuple[list[StorageRecord], list[Pack]]:
    """All storages by index, and the packs; ``found`` are the records of ``storages``, some of them of packs.

    A pack says the indices of its storages. The others take those that are left, in their order.
    """
    shared = [
        (record, fields.nested(raw, "shared"))
        for record, raw in zip(found, fields.get("storages", list), strict=True)
        if record.codec.get("id") == SHARED
    ]
    if not shared:
        return found, []
    storages: dict[int, StorageRecord] = {}
    packs = []
    for record, columns in shared:
        table = Table(columns, "storages")
        numels = table.each("numel", below(PACK + 1))
        starts = list(accumulate(numels, initial=0))
        if starts[-1] > PACK or starts[-1] != record.numel:
            raise columns.fail("numel")
        indices = list(accumulate(table.each("storages", as_step)))
        codec = columns.get("codec", dict)
        pack = Pack(record.name, record.dtype, record.role, codec, indices, starts, record.parts)
        rows = zip(
            indices,
            table.each("name", or_null(as_text)),
            numels,
            table.each("reason", or_null(as_text)),
            table.each("error", or_null(as_object)),
            strict=True,
        )
        for place, (index, name, numel, reason, error) in enumerate(rows):
            if index in storages:
                raise columns.fail("storages")
            one = StorageRecord(name or "", pack.dtype, numel, pack.role, codec, reason, {}, error, pack, place)
            storages[index] = one
        packs.append(pack)
    own = [record for record in found if record.codec.get("id") != SHARED]
    total = len(own) + len(storages)
    if any(not 0 <= index < total for index in storages):
        raise fields.fail("storages")
    rest = iter(own)
    return [storages.get(index) or next(rest) for index in range(total)], packs


def _read_members(fields: Fields, storages: Sequence[StorageRecord]) -> list[MemberRecord]:
    """The records of the table of members."""
    table, index = Table(fields, "path"), below(len(storages))

    def pairs(value: Any, key: str, sizes: Callable[[int], int]) -> list[list[int]]:
        """Offsets from the gaps in front of them, each with its storage."""
        if value is None:
            return []
        columns = Table(fields.nested(value, None), key)
        found, at = [], 0
        for gap, storage in zip(columns.each(key, as_count), columns.each("storage", index), strict=True):
            found.append([at + gap, storage])
            at += gap + sizes(storage)
        return found

    return [
        MemberRecord(*row)
        for row in zip(
            table.each("path", as_text),
            table.each("format", as_text),
            table.each("size", as_count),
            table.each("skeleton", index),
            table.each("segments", lambda each: pairs(each, "before", lambda storage: storages[storage].nbytes)),
            table.each("crc_fields", lambda each: pairs(each, "gap", lambda _: 0)),
            strict=True,
        )
    ]


def _read_tensors(fields: Fields, storages: Sequence[StorageRecord]) -> list[TensorRecord]:
    """The records of the table of tensors."""
    table = Table(fields, "name")
    tensors = []
    for name, storage, dtype, offset, shape, stride, flags in zip(
        table.each("name", or_null(as_text)),
        table.each("storage", below(len(storages))),
        table.each("dtype", as_dtype),
        table.each("offset", as_count),
        table.each("shape", or_null(as_counts)),
        table.each("stride", or_null(as_counts)),
        table.each("flags", as_flags),
        strict=True,
    ):
        record = storages[storage]
        sizes = [record.numel] if shape is None else shape
        steps = dense_stride(sizes) if stride is None else stride
        if len(steps) != len(sizes):
            raise table.fail("stride")
        tensors.append(TensorRecord(record.name if name is None else name, storage, dtype, offset, sizes, steps, flags))
    return tensors


def _read_slices(fields: Fields, tensors: Sequence[TensorRecord]) -> list[SliceRecord]:
    """The records of the table of slices."""
    table = Table(fields, "name")
    slices = []
    for name, tensor, offsets in zip(
        table.each("name", as_text),
        table.each("tensor", below(len(tensors))),
        table.each("offsets", or_null(as_counts)),
        strict=True,
    ):
        dims = len(tensors[tensor].shape)
        if dims > MOST_DIMS or (offsets is not None and len(offsets) != dims):
            raise table.fail("offsets")
        slices.append(SliceRecord(name, tensor, [0] * dims if offsets is None else offsets))
    if len({(each.name, *each.offsets) for each in slices}) != len(slices):
        raise table.fail("name")
    return slices
