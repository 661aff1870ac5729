"""Turns the records of a manifest into values of JSON. Where storages share entries, members and tensors are tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from ckpt8.container.base_record import base_json
from ckpt8.container.columns import column, gaps
from ckpt8.container.manifest import (
    DELTA,
    SHARED,
    SKELETON,
    FrameTable,
    Manifest,
    MemberRecord,
    Pack,
    ParameterRecord,
    StorageRecord,
    TensorRecord,
)


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
                {"gap": gaps(at for at, _ in each), "storage": column([s for _, s in each])} if each else None
                for each in fields
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
        "stride": column([None if each.stride == dense_stride(each.shape) else each.stride for each in tensors]),
        "flags": column([tensor.flags for tensor in tensors]),
    }


def dense_stride(shape: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor."""
    if len(shape) <= 1:
        return [1] * len(shape)
    return list(accumulate(reversed(shape[1:]), lambda step, size: step * max(size, 1), initial=1))[::-1]
