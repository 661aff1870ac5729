"""Turns the records of a manifest into values of JSON. Where storages share entries, members and tensors are tables.

Reads the records again, and validates every type and range: the seal proves that nothing is damaged, not that nobody is
malicious.

Columns of tables in JSON: one for each field, instead of an object for each record.

A column of a table with ``count`` rows is a list of as many values, ``{"all": value}``, or ``{"from": k}`` for the
integers from k on. One column of every table is always a list: nothing takes memory that the text of the manifest does
not have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, TypeVar

from ckpt8.container.header import PACK, check_version
from ckpt8.container.manifest import (
    DELTA,
    MOST_DIMS,
    SHARED,
    SKELETON,
    FrameTable,
    Manifest,
    MemberRecord,
    Mode,
    Pack,
    ParameterRecord,
    SliceRecord,
    StorageRecord,
    TensorRecord,
    base_json,
    read_base,
)
from ckpt8.core.errors import InputError
from ckpt8.core.json_text import LARGEST, Fields, is_unicode
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import shown

T = TypeVar("T")

FLAGS = ("conj", "neg")
"""What a tensor may say of its values: they are the conjugate, or the negative, of what is stored."""


def column(values: Sequence[Any]) -> Any:
    """The shortest form of a column."""
    if values and all(value == values[0] for value in values):
        return {"all": values[0]}
    if values and type(values[0]) is int and list(values) == list(range(values[0], values[0] + len(values))):
        return {"from": values[0]}
    return list(values)


def gaps(values: Iterable[int]) -> list[int]:
    """The first of ascending numbers, and the difference of each to the one before."""
    differences, last = [], 0
    for value in values:
        differences.append(value - last)
        last = value
    return differences


class Table:
    """Typed access to the columns of a table, of which ``key`` is a list. Every mismatch is an InputError."""

    def __init__(self, fields: Fields, key: str) -> None:
        self._fields = fields
        self.count = len(fields.get(key, list))

    def each(self, key: str, read: Callable[[Any], T]) -> Sequence[T]:
        """``read`` of every value of a column; it raises KeyError, TypeError or ValueError for one that is wrong."""
        value = self._fields.any(key)
        try:
            match value:
                case list() if len(value) == self.count:
                    return list(map(read, value))
                case {"all": same, **rest} if not rest:
                    return [read(same)] * self.count
                case {"from": int(first), **rest} if not rest and type(first) is int:
                    return [read(first + k) for k in range(self.count)]
        except (KeyError, TypeError, ValueError) as exc:
            raise self._fields.fail(key, str(exc) if isinstance(exc, UnicodeError) else "") from exc
        raise self._fields.fail(key)

    def fail(self, key: str) -> InputError:
        """The error about a column."""
        return self._fields.fail(key)


def below(limit: int) -> Callable[[Any], int]:
    """Reads integers from 0 to below ``limit``."""

    def read(value: Any) -> int:
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError
        return value

    return read


as_count = below(LARGEST)


def as_step(value: Any) -> int:
    """Reads the difference of two counts."""
    return as_count(value) if type(value) is not int or value >= 0 else -as_count(-value)


def as_text(value: Any) -> str:
    """Reads valid Unicode."""
    if not isinstance(value, str):
        raise TypeError
    if not is_unicode(value):
        raise UnicodeError(f"{shown(value)} is not valid UTF-8")
    return value


def or_null(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """A function that reads null as None, and any other value by ``read``."""
    return lambda value: None if value is None else read(value)


def as_counts(value: Any) -> list[int]:
    """Reads a list of counts."""
    return [*map(as_count, _list(value))]


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError
    return value


def as_object(value: Any) -> dict[str, Any]:
    """Reads an object."""
    if not isinstance(value, dict):
        raise TypeError
    return value


def as_dtype(value: Any) -> DType:
    """Reads an element type."""
    return DType.from_label(as_text(value))


def as_flags(value: Any) -> list[str]:
    """Reads the flags of a tensor."""
    if not all(flag in FLAGS for flag in _list(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A tree of plain JSON values."""
    shares = bool(manifest.packs)
    tree: dict[str, Any] = {"version": manifest.version}
    for name in ("writer", "preset", "rules", "slab", "frame"):
        tree[name] = getattr(manifest, name)
    tree["members"] = [] if shares else [_plain(member) for member in manifest.members]
    tree["storages"] = [_storage_json(record) for record in manifest.storages if record.pack is None]
    tree["tensors"] = [] if shares else [_tensor_json(tensor) for tensor in manifest.tensors]
    tree["parameters"] = [_parameter_json(parameter) for parameter in manifest.parameters]
    if manifest.budget is not None:
        tree["budget"] = manifest.budget
    if manifest.base is not None:
        tree["base"] = base_json(manifest.base)
    if manifest.directory is not None:
        tree["directory"] = manifest.directory
    if manifest.slices:
        tree["slices"] = _slices_json(manifest.slices)
    if shares:
        skeletons = {member.skeleton: skeleton_name(manifest, member) for member in manifest.members}
        tree["storages"] += [_pack_json(manifest, pack, skeletons) for pack in manifest.packs]
        tree["member_table"] = _members_json(manifest)
        tree["tensor_table"] = _tensors_json(manifest)
    return tree


def _plain(record: MemberRecord | ParameterRecord) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__slots__}


def _parameter_json(record: ParameterRecord) -> dict[str, Any]:
    tree = _plain(record)
    if record.steps is None:
        del tree["steps"]
    return tree


def _storage_json(record: StorageRecord) -> dict[str, Any]:
    return {
        "name": record.name,
        "dtype": record.dtype.label,
        "numel": record.numel,
        "role": record.role.value,
        "codec": record.codec if record.base is None else {"id": DELTA, "base": record.base, "codec": record.codec},
        "reason": record.reason,
        "parts": _parts_json(record.parts),
        "error": record.error,
    }


def _tensor_json(tensor: TensorRecord) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "storage": tensor.storage,
        "dtype": tensor.dtype.label,
        "offset": tensor.offset,
        "shape": tensor.shape,
        "stride": tensor.stride,
        "flags": tensor.flags,
    }


def _parts_json(parts: dict[str, FrameTable]) -> dict[str, Any]:
    """The frame tables of a storage or a pack."""
    return {name: _table_json(table) for name, table in parts.items()}


def _table_json(table: FrameTable) -> dict[str, Any]:
    modes = {"modes": [mode.stated for mode in table.modes]} if table.modes else {}
    return {"lengths": table.lengths, "crcs": table.crcs, **modes}


def skeleton_name(manifest: Manifest, member: MemberRecord) -> str:
    """The name of the skeleton of a member, unless another record has it."""
    return SKELETON if manifest.directory is None else f"{member.path}:{SKELETON}"


def _pack_json(manifest: Manifest, pack: Pack, skeletons: Mapping[int, str]) -> dict[str, Any]:
    """The record of a pack. Null is the name of a storage that has its name from ``skeletons``, by index."""
    records = [manifest.storages[index] for index in pack.storages]
    names = [
        None if skeletons.get(index) == record.name else record.name
        for index, record in zip(pack.storages, records, strict=True)
    ]
    return {
        "name": pack.name,
        "dtype": pack.dtype.label,
        "numel": pack.numel,
        "role": pack.role.value,
        "codec": {"id": SHARED},
        "reason": None,
        "parts": _parts_json(pack.parts),
        "error": None,
        "shared": {
            "codec": pack.codec,
            "storages": gaps(pack.storages),
            "name": column(names),
            "numel": column(list(pack.numels)),
            "reason": column([record.reason for record in records]),
            "error": column([record.error for record in records]),
        },
    }


def _members_json(manifest: Manifest) -> dict[str, Any]:
    """The table of members."""
    members, storages = manifest.members, manifest.storages
    segments = []
    for member in members:
        ends = accumulate((storages[index].nbytes for _, index in member.segments), initial=0)
        own = [index for _, index in member.segments]
        # Bytes of the skeleton in front of each storage.
        before = gaps(offset - end for (offset, _), end in zip(member.segments, ends, strict=False))
        segments.append({"before": before, "storage": column(own)} if own else None)
    fields = [sorted(member.crc_fields) for member in members]
    return {
        "path": [member.path for member in members],
        "format": column([member.format for member in members]),
        "size": column([member.size for member in members]),
        "skeleton": column([member.skeleton for member in members]),
        "segments": column(segments),
        "crc_fields": column(
            [
                {"gap": gaps(at for at, _ in entry), "storage": column([s for _, s in entry])} if entry else None
                for entry in fields
            ]
        ),
    }


def _tensors_json(manifest: Manifest) -> dict[str, Any]:
    """The table of tensors. Null is the name and the number of elements of its storage, and strides without gaps."""
    storages, tensors = manifest.storages, manifest.tensors
    named = ((tensor, storages[tensor.storage]) for tensor in tensors)
    names, shapes = [], []
    for tensor, record in named:
        names.append(None if tensor.name == record.name else tensor.name)
        shapes.append(None if tensor.shape == [record.numel] else tensor.shape)
    return {
        "name": names,
        "storage": column([tensor.storage for tensor in tensors]),
        "dtype": column([tensor.dtype.label for tensor in tensors]),
        "offset": column([tensor.offset for tensor in tensors]),
        "shape": column(shapes),
        "stride": column(
            [None if tensor.stride == dense_stride(tensor.shape) else tensor.stride for tensor in tensors]
        ),
        "flags": column([tensor.flags for tensor in tensors]),
    }


def _slices_json(slices: Sequence[SliceRecord]) -> dict[str, Any]:
    """The table of slices. Null are offsets of 0 in every dimension."""
    return {
        "name": [piece.name for piece in slices],
        "tensor": column([piece.tensor for piece in slices]),
        "offsets": column([piece.offsets if any(piece.offsets) else None for piece in slices]),
    }


def dense_stride(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    if len(shape) <= 1:
        return [1] * len(shape)
    return list(accumulate(reversed(shape[1:]), lambda step, size: step * max(size, 1), initial=1))[::-1]


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
    stored = fields.optional("budget", dict)
    if stored is not None:
        values: list[Any] = [stored.get(key) for key in ("steps", "u_max", "cap")]
        if not all(type(value) in (int, float) and 0 < value < LARGEST for value in values):
            raise fields.fail("budget")
    return stored


def _steps(fields: Fields, storages: int) -> dict[str, Any] | None:
    stored = fields.optional("steps", dict)
    if stored is not None:
        steps = fields.nested(stored)
        steps.count("optimizer")
        if steps.any("weight_storage") is not None:
            steps.count("weight_storage", storages)
    return stored


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
    members = fields.each("members", lambda member: _member(member, count))
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
        parameters=fields.each("parameters", lambda parameter: _parameter(parameter, count)),
        directory=fields.optional("directory", str),
        packs=packs,
        budget=_budget(fields),
        base=read_base(fields),
    )
    for member in members:
        storages[member.skeleton].name = storages[member.skeleton].name or skeleton_name(manifest, member)
    if not all(record.name for record in storages if record.pack is not None):
        raise fields.fail("storages")
    manifest.tensors += fields.each("tensors", lambda tensor: _tensor(tensor, count))
    if packs:
        manifest.tensors += _read_tensors(fields.nested(tree, "tensor_table"), storages)
    if fields.any("slices") is not None:
        manifest.slices += _read_slices(fields.nested(tree, "slices"), manifest.tensors)
    return manifest


def _read_packs(fields: Fields, records: list[StorageRecord]) -> tuple[list[StorageRecord], list[Pack]]:
    """All storages by index, and the packs; ``found`` are the records of ``storages``, some of them of packs.

    A pack says the indices of its storages. The others take those that are left, in their order.
    """
    shared = [
        (record, fields.nested(raw, "shared"))
        for record, raw in zip(records, fields.get("storages", list), strict=True)
        if record.codec.get("id") == SHARED
    ]
    if not shared:
        return records, []
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
    own = [record for record in records if record.codec.get("id") != SHARED]
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
        runs, at = [], 0
        for gap, storage in zip(columns.each(key, as_count), columns.each("storage", index), strict=True):
            runs.append([at + gap, storage])
            at += gap + sizes(storage)
        return runs

    return [
        MemberRecord(*row)
        for row in zip(
            table.each("path", as_text),
            table.each("format", as_text),
            table.each("size", as_count),
            table.each("skeleton", index),
            table.each("segments", lambda row: pairs(row, "before", lambda storage: storages[storage].nbytes)),
            table.each("crc_fields", lambda row: pairs(row, "gap", lambda _: 0)),
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
    if len({(piece.name, *piece.offsets) for piece in slices}) != len(slices):
        raise table.fail("name")
    return slices
