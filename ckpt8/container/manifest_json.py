"""Turns the records of a manifest into values of JSON. Where storages share entries, members and tensors are tables.

Reads the records again, and validates every type and range: the seal proves that nothing is damaged, not that nobody is
malicious.

Columns of tables in JSON: one for each field, instead of an object for each record.

A column of a table with ``count`` rows is a list of as many values, ``{"all": value}``, or ``{"from": k}`` for the
integers from k on. One column of every table is always a list: nothing takes memory that the text of the manifest does
not have.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

from ckpt8.container.header import PACK, check_version
from ckpt8.container.manifest import (
    DELTA,
    MOST_DIMS,
    SHARED,
    SKELETON,
    BaseRecord,
    FrameTable,
    Manifest,
    MemberRecord,
    Mode,
    Pack,
    ParameterRecord,
    SliceRecord,
    StorageRecord,
    TensorRecord,
    read_base,
)
from ckpt8.core.json_text import (
    LARGEST,
    Fields,
    Reader,
    T,
    as_count,
    as_counts,
    as_list,
    as_object,
    as_text,
    below,
    or_null,
)
from ckpt8.core.tensors import DType, Role, contiguous_stride

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
    return [value - last for last, value in pairwise((0, *values))]


def manifest_json(manifest: Manifest) -> dict[str, Any]:
    """A tree of plain JSON values."""
    shares = bool(manifest.packs)
    optional = {
        "budget": manifest.budget,
        "earlier": manifest.earlier,
        "base": None if manifest.base is None else plain_json(manifest.base),
        "directory": manifest.directory,
        "slices": _slices_json(manifest.slices) if manifest.slices else None,
    }
    tree: dict[str, Any] = {
        **{name: getattr(manifest, name) for name in ("version", "writer", "preset", "rules", "slab", "frame")},
        "members": [] if shares else list(map(plain_json, manifest.members)),
        "storages": [_storage_json(record) for record in manifest.storages if record.pack is None],
        "tensors": []
        if shares
        else [plain_json(tensor) | {"dtype": tensor.dtype.label} for tensor in manifest.tensors],
        "parameters": [
            {name: value for name, value in plain_json(record).items() if name != "steps" or value is not None}
            for record in manifest.parameters
        ],
        **{name: value for name, value in optional.items() if value is not None},
    }
    if shares:
        skeletons = {member.skeleton: skeleton_name(manifest, member) for member in manifest.members}
        tree["storages"] += [_pack_json(manifest, pack, skeletons) for pack in manifest.packs]
        tree["member_table"] = _members_json(manifest)
        tree["tensor_table"] = _tensors_json(manifest)
    return tree


def plain_json(record: BaseRecord | MemberRecord | ParameterRecord | TensorRecord) -> dict[str, Any]:
    """The fields of a record."""
    return {name: getattr(record, name) for name in type(record).__slots__}


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


def _parts_json(parts: dict[str, FrameTable]) -> dict[str, Any]:
    """The frame tables of a storage or a pack."""
    return {
        name: {
            "lengths": table.lengths,
            "crcs": table.crcs,
            **({"modes": [mode.stated for mode in table.modes]} if table.modes else {}),
        }
        for name, table in parts.items()
    }


def skeleton_name(manifest: Manifest, member: MemberRecord) -> str:
    """The name of the skeleton of a member, unless another record has it."""
    return SKELETON if manifest.directory is None else f"{member.path}:{SKELETON}"


def _pack_json(manifest: Manifest, pack: Pack, skeletons: Mapping[int, str]) -> dict[str, Any]:
    """The record of a pack. Null is the name of a storage that has its name from ``skeletons``, by index."""
    records = {index: manifest.storages[index] for index in pack.storages}
    names = [None if skeletons.get(index) == record.name else record.name for index, record in records.items()]
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
            "reason": column([record.reason for record in records.values()]),
            "error": column([record.error for record in records.values()]),
        },
    }


def _members_json(manifest: Manifest) -> dict[str, Any]:
    """The table of members."""
    members, storages = manifest.members, manifest.storages
    segments: list[dict[str, Any] | None] = []
    for member in members:
        ends = accumulate((storages[index].nbytes for _, index in member.segments), initial=0)
        # Bytes of the skeleton in front of each storage.
        before = gaps(offset - end for (offset, _), end in zip(member.segments, ends, strict=False))
        segments.append(
            {"before": before, "storage": column([index for _, index in member.segments])} if before else None
        )
    return {
        "path": [member.path for member in members],
        **{name: column([getattr(member, name) for member in members]) for name in ("format", "size", "skeleton")},
        "segments": column(segments),
        "crc_fields": column(
            [
                {"gap": gaps(at for at, _ in entry), "storage": column([s for _, s in entry])} if entry else None
                for entry in (sorted(member.crc_fields) for member in members)
            ]
        ),
    }


def _tensors_json(manifest: Manifest) -> dict[str, Any]:
    """The table of tensors. Null is the name and the number of elements of its storage, and strides without gaps."""
    tensors = manifest.tensors
    pairs = [(tensor, manifest.storages[tensor.storage]) for tensor in tensors]
    return {
        "name": [None if tensor.name == record.name else tensor.name for tensor, record in pairs],
        "storage": column([tensor.storage for tensor in tensors]),
        "dtype": column([tensor.dtype.label for tensor in tensors]),
        "offset": column([tensor.offset for tensor in tensors]),
        "shape": column([None if tensor.shape == [record.numel] else tensor.shape for tensor, record in pairs]),
        "stride": column(
            [None if tensor.stride == _dense_stride(tensor.shape) else tensor.stride for tensor in tensors]
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


def _dense_stride(shape: Sequence[int]) -> list[int]:
    """The strides that torch gives a contiguous tensor, also one without elements."""
    return list(contiguous_stride([size or 1 for size in shape]))


class Table:
    """Typed access to the columns of a table, of which ``key`` is a list. Every mismatch is an InputError."""

    def __init__(self, fields: Fields, key: str) -> None:
        self._fields, self._count = fields, len(fields.read(key, as_list))

    def column(self, key: str, read: Reader[T]) -> Sequence[T]:
        """``read`` of every value of a column. Raises InputError."""
        value = self._fields.any(key)
        try:
            match value:
                case list() if len(value) == self._count:
                    return list(map(read, value))
                case {"all": same, **rest} if not rest:
                    return [read(same)] * self._count
                case {"from": int(first), **rest} if not rest and type(first) is int:
                    return [read(first + k) for k in range(self._count)]
        except (KeyError, TypeError, ValueError) as exc:
            raise self._fields.fail(key, exc) from exc
        raise self._fields.fail(key)

    def rows(self, make: Callable[..., T], readers: Mapping[str, Reader[Any]]) -> list[T]:
        """``make`` of the values of each row, in the order of the ``readers`` of their columns. Raises InputError."""
        return list(map(make, *(self.column(key, read) for key, read in readers.items())))


def _as_step(value: Any) -> int:
    """Reads the difference of two counts."""
    return as_count(value) if type(value) is not int or value >= 0 else -as_count(-value)


def _as_dtype(value: Any) -> DType:
    return DType.from_label(as_text(value))


def _as_flags(value: Any) -> list[str]:
    if not all(flag in FLAGS for flag in as_list(value)):
        raise ValueError
    return value  # type: ignore[no-any-return]


def _as_modes(value: Any) -> list[Mode]:
    return [] if value is None else [Mode.of(mode) for mode in as_list(value)]


def _as_budget(value: Any) -> dict[str, float]:
    numbers: list[Any] = [as_object(value).get(key) for key in ("steps", "u_max", "cap")]
    if not all(type(number) in (int, float) and 0 < number < LARGEST for number in numbers):
        raise ValueError
    return value  # type: ignore[no-any-return]


def _as_earlier(value: Any) -> dict[str, float | None]:
    steps: Any = as_object(value).get("steps")
    if steps is not None and not (type(steps) in (int, float) and 0 <= steps < LARGEST):
        raise ValueError
    return {"steps": steps}


_MANIFEST: dict[str, Reader[Any]] = {
    "writer": as_text,
    "preset": as_text,
    "rules": as_list,
    "slab": as_count,
    "frame": as_count,
    "directory": or_null(as_text),
    "budget": or_null(_as_budget),
    "earlier": or_null(_as_earlier),
}
_FRAMES: dict[str, Reader[Any]] = {"lengths": as_counts, "crcs": partial(as_counts, limit=1 << 32), "modes": _as_modes}
_STORAGE: dict[str, Reader[Any]] = {
    "name": as_text,
    "dtype": _as_dtype,
    "numel": as_count,
    "role": Role,
    "codec": as_object,
    "reason": or_null(as_text),
    "error": or_null(as_object),
}
_TENSOR: dict[str, Reader[Any]] = {
    "name": as_text,
    "storage": as_count,
    "dtype": _as_dtype,
    "offset": as_count,
    "shape": as_counts,
    "stride": as_counts,
    "flags": _as_flags,
}
_MEMBER: dict[str, Reader[Any]] = {"path": as_text, "format": as_text, "size": as_count}
_PARAMETER: dict[str, Reader[Any]] = {
    "name": as_text,
    "moments": as_object,
    "rule": or_null(as_object),
    "reason": or_null(as_text),
    "error": or_null(as_object),
}


def read_manifest(tree: object, where: str) -> Manifest:
    """The manifest of a parsed JSON tree. Raises InputError, or UnsupportedError for another version."""
    fields = Fields(tree, f"{where}: manifest")
    check_version(fields.read("version", as_text), where)
    manifest = fields.record(Manifest, _MANIFEST)
    manifest.base = read_base(fields)
    manifest.storages, manifest.packs = _storages(fields)
    storages = manifest.storages
    shares = bool(manifest.packs)
    manifest.members = _members(fields, storages, shares=shares)
    for member in manifest.members:
        storages[member.skeleton].name = storages[member.skeleton].name or skeleton_name(manifest, member)
    fields.require(all(record.name for record in storages if record.pack is not None), "storages")
    manifest.parameters = _parameters(fields, below(len(storages)))
    manifest.tensors = _tensors(fields, storages, shares=shares)
    if (slices := fields.read("slices", or_null(as_object))) is not None:
        manifest.slices = _slices(fields.nested(slices), manifest.tensors)
    return manifest


def _frame_table(fields: Fields) -> FrameTable:
    table = fields.record(FrameTable, _FRAMES)
    fields.require(len(table.lengths) == len(table.crcs), "crcs")
    return table


def _storages(fields: Fields) -> tuple[list[StorageRecord], list[Pack]]:
    """All storages by index, and the packs.

    A pack says the indices of its storages. The others take those that are left, in their order.
    """
    own: list[StorageRecord] = []
    shared: dict[int, StorageRecord] = {}
    packs: list[Pack] = []
    for stored in fields.each("storages"):
        record = stored.record(StorageRecord, _STORAGE)
        record.parts = {
            name: _frame_table(stored.nested(table)) for name, table in stored.read("parts", as_object).items()
        }
        if record.codec.get("id") == SHARED:
            packs.append(_pack(record, stored.nested(stored.read("shared", as_object)), shared))
            continue
        if record.codec.get("id") == DELTA:
            delta = stored.nested(record.codec)
            record.codec, record.base = delta.read("codec", as_object), delta.read("base", as_count)
            delta.require(record.codec.get("id") not in (DELTA, SHARED), "codec")
        own.append(record)
    total, rest = len(own) + len(shared), iter(own)
    fields.require(all(0 <= index < total for index in shared), "storages")
    return [shared.get(index) or next(rest) for index in range(total)], packs


def _pack(record: StorageRecord, fields: Fields, storages: dict[int, StorageRecord]) -> Pack:
    """The pack of a record, whose storages are added to ``storages``, by index."""
    table = Table(fields, "storages")
    numels = table.column("numel", below(PACK + 1))
    starts = list(accumulate(numels, initial=0))
    fields.require(starts[-1] <= PACK and starts[-1] == record.numel, "numel")
    indices = list(accumulate(table.column("storages", _as_step)))
    codec = fields.read("codec", as_object)
    pack = Pack(record.name, record.dtype, record.role, codec, indices, starts, record.parts)
    names, reasons = (table.column(key, or_null(as_text)) for key in ("name", "reason"))
    errors = table.column("error", or_null(as_object))
    for place, index in enumerate(indices):
        fields.require(index not in storages, "storages")
        storages[index] = StorageRecord(
            names[place] or "",
            pack.dtype,
            numels[place],
            pack.role,
            codec,
            reasons[place],
            {},
            errors[place],
            pack,
            place,
        )
    return pack


def _members(fields: Fields, storages: Sequence[StorageRecord], *, shares: bool) -> list[MemberRecord]:
    """The members of the list, and of the table where storages share entries."""
    index = below(len(storages))

    def pairs(value: Any) -> list[list[int]]:
        """Offsets, each with its storage."""
        return [[as_count(at), index(storage)] for at, storage in as_list(value)]

    def runs(value: Any, key: str, size: Callable[[int], int]) -> list[list[int]]:
        """Offsets from the gaps in front of them, each with its storage."""
        if value is None:
            return []
        table, at, placed = Table(fields.nested(value), key), 0, []
        for gap, storage in zip(table.column(key, as_count), table.column("storage", index), strict=True):
            placed.append([at + gap, storage])
            at += gap + size(storage)
        return placed

    readers = _MEMBER | {"skeleton": index, "segments": pairs, "crc_fields": pairs}
    members = [stored.record(MemberRecord, readers) for stored in fields.each("members")]
    if shares:
        readers["segments"] = partial(runs, key="before", size=lambda storage: storages[storage].nbytes)
        readers["crc_fields"] = partial(runs, key="gap", size=lambda _: 0)
        members += Table(fields.nested(fields.read("member_table", as_object)), "path").rows(MemberRecord, readers)
    return members


def _parameters(fields: Fields, index: Reader[int]) -> list[ParameterRecord]:
    """The parameters; ``index`` reads that of a storage."""

    def steps(value: Any) -> Any:
        fields.nested(as_object(value)).record(dict, {"optimizer": as_count, "weight_storage": or_null(index)})
        return value

    readers = _PARAMETER | {
        "moments": lambda value: {slot: index(at) for slot, at in as_object(value).items()},
        "steps": or_null(steps),
    }
    return [stored.record(ParameterRecord, readers) for stored in fields.each("parameters")]


def _tensors(fields: Fields, storages: Sequence[StorageRecord], *, shares: bool) -> list[TensorRecord]:
    """The tensors of the list, and of the table where storages share entries."""
    readers = _TENSOR | {"storage": below(len(storages))}
    tensors = [stored.record(TensorRecord, readers) for stored in fields.each("tensors")]
    if shares:
        # A table leaves out what the storage says.
        readers |= {key: or_null(readers[key]) for key in ("name", "shape", "stride")}
        tensors += Table(fields.nested(fields.read("tensor_table", as_object)), "name").rows(TensorRecord, readers)
    for tensor in tensors:
        record = storages[tensor.storage]
        tensor.name = record.name if tensor.name is None else tensor.name
        tensor.shape = [record.numel] if tensor.shape is None else tensor.shape
        tensor.stride = _dense_stride(tensor.shape) if tensor.stride is None else tensor.stride
        fields.require(len(tensor.shape) == len(tensor.stride), "stride")
    return tensors


def _slices(fields: Fields, tensors: Sequence[TensorRecord]) -> list[SliceRecord]:
    """The slices of the table."""
    readers: dict[str, Reader[Any]] = {"name": as_text, "tensor": below(len(tensors)), "offsets": or_null(as_counts)}
    slices = Table(fields, "name").rows(SliceRecord, readers)
    for piece in slices:
        dims = len(tensors[piece.tensor].shape)
        piece.offsets = [0] * dims if piece.offsets is None else piece.offsets
        fields.require(dims <= MOST_DIMS and len(piece.offsets) == dims, "offsets")
    fields.require(len({(piece.name, *piece.offsets) for piece in slices}) == len(slices), "name")
    return slices
