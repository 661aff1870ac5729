"""Facts about a raw checkpoint: structure, roles, sizes, and its size under each preset, predicted from a sample."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import check_storages
from ckpt8.compressing import lockstep
from ckpt8.compressing.bundle_plan import plan_policies
from ckpt8.compressing.chunk_encoder import ChunkEncoder
from ckpt8.compressing.group_encoder import GroupEncoder
from ckpt8.compressing.plan import Plan, Unit, read_elements
from ckpt8.compressing.policy import LOSSLESS, PRESETS, Policy
from ckpt8.compressing.sharing import Group, share
from ckpt8.container import frames, layout, symbols
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE, codec_name
from ckpt8.container.manifest import Manifest
from ckpt8.core.collection import without_collection
from ckpt8.core.errors import RefusedError
from ckpt8.inspecting.foreign import foreign_flags, names_of
from ckpt8.inspecting.manifest_facts import (
    low_bit_state,
    parameter_facts,
    sizes_by,
    skeleton_roles,
    unrecognised,
    whole_shapes,
)
from ckpt8.inspecting.opening import describe, open_any
from ckpt8.inspecting.sampling import PER_TENSOR
from ckpt8.inspecting.survey.layers import layers_of
from ckpt8.inspecting.survey.origin import origin_of
from ckpt8.inspecting.survey.pieces import subject_of
from ckpt8.inspecting.survey.survey import Progress, survey

_STRUCTURE_LEFT = 0.1
"""Stored bytes for each byte of a pickle or a zip directory."""

_ENTRY_BYTES = 160
"""Bytes of header, manifest and seal for every entry, about."""

_ROW_BYTES = 5
"""Bytes of the manifest for every storage that shares entries, about."""

_UNITS_SAMPLED = 256
"""Units of a group to encode for a prediction."""


def inspect_checkpoint(
    path: Path, *, tensors: bool = False, full: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The content of a file or directory, and its predicted sizes. Raises InputError for damage or no checkpoint.

    ``flags`` and ``sample`` come from ``survey``, ``layers`` from ``layers_of``. ``full`` reads every element for the
    flags, calls ``progress`` with the bytes that it has read, and checks the checksums that the source states.
    ``tensors`` adds every tensor and every parameter that has moments.
    """
    with without_collection(), open_any(path, containers=False) as source:
        if full:
            for member in source.members:
                check_storages(member.checkpoint, str(path) if source.directory is None else f"{path}: {member.path}")
        plans = dict(zip(PRESETS, plan_policies(source, [Policy.of(preset) for preset in PRESETS]), strict=True))
        plan = plans[Policy().preset]
        manifest = describe(source, plan)
        facts: dict[str, Any] = {
            "path": str(path),
            "kind": "checkpoint",
            "format": source.format,
            "bytes": source.size,
            "members": [
                {
                    "path": member.path,
                    "format": member.format,
                    "bytes": member.size,
                    "reason": manifest.storages[member.skeleton].reason,
                }
                for member in manifest.members
            ],
            "tensor_count": count_whole(tensor.name for tensor in manifest.tensors),
            "storages": len(manifest.storages) - len(manifest.members),
            "roles": _roles(manifest),
            "optimizer": _optimizers(manifest),
            "low_bit": low_bit_state(manifest),
            "unrecognised": unrecognised(manifest),
            **origin_of(source),
            "layers": layers_of(manifest),
            **survey(subject_of(source, plan, manifest), full=full, progress=progress),
            "predicted": {preset: _predict(source, skeleton_roles(manifest), each) for preset, each in plans.items()},
        }
        facts["flags"][:0] = foreign_flags(each for member in source.found for each in names_of(member))
        if tensors:
            facts["tensors"] = _tensors(manifest, plan)
            facts["parameters"] = parameter_facts(manifest)
        return facts


def _roles(manifest: Manifest) -> list[dict[str, Any]]:
    """Sizes by role and type; the bytes outside the storages come last."""
    columns = ("role", "dtype", "storages", "elements", "bytes")
    rows = [{column: row[column] for column in columns} for row in sizes_by("dtype", manifest)]
    outside = [{**row, "storages": 0} for row in rows if row["role"] in (SKELETON_ROLE, FILE_ROLE)]
    return [row for row in rows if row["role"] not in (SKELETON_ROLE, FILE_ROLE)] + outside[::-1]


def _optimizers(manifest: Manifest) -> list[dict[str, Any]]:
    """Parameters by update rule, with the step if the rule counts it."""
    rows: dict[tuple[str, int | None], list[str]] = defaultdict(list)
    for each in manifest.parameters:
        rule = each.rule or {"kind": f"unknown: {each.reason}", "step": None}
        rows[rule["kind"], rule["step"] or None].append(each.name)
    return [{"rule": kind, "step": step, "parameters": count_whole(names)} for (kind, step), names in rows.items()]


def _tensors(manifest: Manifest, plan: Plan) -> list[dict[str, Any]]:
    whole = whole_shapes(manifest)
    return [
        {
            "name": tensor.name,
            "role": tensor.role.value,
            "dtype": tensor.ref.dtype.label,
            "shape": list(tensor.ref.shape),
            "whole_shape": whole.get(tensor.name, list(tensor.ref.shape)),
            "storage": record.name,
            "bytes": record.nbytes,
            "codec": codec_name(record.codec),
            "reason": record.reason,
        }
        for tensor, record in ((tensor, manifest.storages[index]) for tensor, index in plan.tensors)
    ]


def _predict(source: Bundle, skeletons: Mapping[int, str], plan: Plan) -> dict[str, Any]:
    """Stored size from a sample of every storage; an estimate, good to about a percent for trained weights."""
    structure = {index for index, role in skeletons.items() if role == SKELETON_ROLE}
    units = [unit for unit in plan.units if unit.streams[0].index not in structure]
    own, groups = share(units, source.size, layout.SLAB)
    stored = sum(_predict_unit(source, unit) for unit in own) + sum(_predict_group(source, group) for group in groups)
    outside = sum(stream.storage.nbytes for stream in plan.streams if stream.index in structure)
    size = int(stored + outside * _STRUCTURE_LEFT)
    return {"bytes": size, "ratio": source.size / max(size, 1)}


def _predict_group(source: Bundle, group: Group) -> float:
    """Bytes that small units with common entries take, from some of them."""
    units = group.units[:: -(-len(group.units) // _UNITS_SAMPLED)]
    packed = GroupEncoder(source, ChunkEncoder(source, measure=False), lambda *_: None).stored(Group(units))
    stored = sum(len(f) for _, parts, _ in packed.packs for planes in parts.values() for f, _ in planes)
    numel = sum(unit.numel for unit in units)
    share_of_all = sum(unit.numel for unit in group.units) / numel if numel else 0
    entries = sum(len(planes) for _, parts, _ in packed.packs for planes in parts.values())
    return stored * share_of_all + _ENTRY_BYTES * entries + _ROW_BYTES * len(group.units)


def _predict_unit(source: Bundle, unit: Unit) -> float:
    """Bytes that the storages of a unit take, from up to PER_TENSOR elements in their middle."""
    numel = unit.numel
    if numel == 0:
        return 0.0
    count = min(numel, PER_TENSOR)
    first = (numel - count) // 2
    originals = [read_elements(source, each.storage, each.spec.dtype, first, count) for each in unit.streams]
    try:
        found = lockstep.encode(unit.streams, originals, first, None)
    except RefusedError:
        found = [LOSSLESS.encode(x) for x in originals]
    packed = [symbols.pack_parts(parts) for parts in found]
    stored = sum(
        len(frame)
        for parts, packings in packed
        for name, part in parts.items()
        for frame, _ in frames.encode_part(name, part, packings.get(name))
    )
    slabs = len(layout.slab_chunks(numel, layout.SLAB))
    return stored * numel / count + _ENTRY_BYTES * slabs * sum(map(len, found))
