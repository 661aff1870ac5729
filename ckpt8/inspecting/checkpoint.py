"""Facts about a raw checkpoint: structure, roles, sizes, and what every preset would make of it, from a sample."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.checksums import check_storages
from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.meaning.quantised_state import find_low_bit
from ckpt8.checkpoint.sources.bundle import Bundle, Member, open_bundle
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs import config_of
from ckpt8.compressing import lockstep
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.plan import Plan, Stream, Unit
from ckpt8.compressing.policy import LOSSLESS, PRESETS, Policy
from ckpt8.container import frames, layout
from ckpt8.container.facts import SKELETON_ROLE, codec_name, skeleton_role
from ckpt8.core.errors import InputError, RefusedError
from ckpt8.core.tensors import TensorSpec
from ckpt8.inspecting.survey.layers import layers_of_plan
from ckpt8.inspecting.survey.origin import describe
from ckpt8.inspecting.survey.survey import Progress, survey
from ckpt8.inspecting.survey.subject import of_bundle

_SAMPLE = 1 << 15
"""Elements of every storage that are encoded to predict its size, taken from its middle."""

_STRUCTURE_LEFT = 0.1
"""The part of a pickle and a zip directory that is left of them."""

_ENTRY_BYTES = 160
"""Header, manifest and seal take about this much for every entry."""


def inspect_checkpoint(
    path: Path, *, tensors: bool = False, full: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """What a file or directory holds and what it would become. Raises InputError for damage or no checkpoint.

    ``flags``, ``sample`` (see ``survey`` and ``flags``) and ``layers`` (see ``layers``) are of its values; ``full``
    reads every element for them, and calls ``progress`` with the bytes that it has read; then damage that a checksum
    tells is an error, too.
    """
    with open_bundle(path) as source:
        if source.directory is not None and not source.holds_tensors:
            raise InputError(f"{path}: a directory without tensors; give a checkpoint")
        if full:
            for member in source.members:
                check_storages(member.checkpoint, str(path) if source.directory is None else f"{path}: {member.path}")
        plan = plan_bundle(source, Policy())
        streams = plan.streams
        facts: dict[str, Any] = {
            "path": str(path),
            "kind": "checkpoint",
            "format": source.format,
            "bytes": source.size,
            "members": [_member_facts(member, streams) for member in source.members],
            "tensor_count": len(plan.tensors),
            "storages": len(streams) - len(source.members),
            "roles": _roles(source, plan),
            "optimizer": _optimizers(plan),
            "low_bit": find_low_bit(TensorSpec(t.name, t.role, t.ref.dtype, t.ref.shape) for t, _ in plan.tensors),
            **describe(source),
            "layers": layers_of_plan(source, plan),
            **survey(of_bundle(source, plan), full=full, progress=progress),
            "predicted": {preset: _predict(source, preset) for preset in PRESETS},
        }
        if tensors:
            facts["tensors"] = [_tensor_facts(streams, tensor, index) for tensor, index in plan.tensors]
            facts["parameters"] = _parameters(plan, streams, directory=source.directory is not None)
        return facts


def _member_facts(member: Member, streams: list[Stream]) -> dict[str, Any]:
    whole = member.checkpoint
    reason = streams[member.skeleton].reason
    return {"path": member.path, "format": whole.format, "bytes": whole.size, "reason": reason}


def _roles(source: Bundle, plan: Plan) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], Counter[str]] = {}
    dtypes = {index: tensor.ref.dtype for tensor, index in reversed(plan.tensors)}
    skeletons = {member.skeleton: skeleton_role(member.checkpoint.format) for member in source.members}
    outside = Counter({skeleton_role(member.checkpoint.format): 0 for member in source.members})
    for stream in plan.streams:
        if stream.index in skeletons:
            outside[skeletons[stream.index]] += stream.storage.nbytes
            continue
        dtype = dtypes.get(stream.index, stream.spec.dtype)
        row = rows.setdefault((stream.spec.role.value, dtype.label), Counter())
        row.update(storages=1, elements=stream.storage.nbytes // dtype.itemsize, bytes=stream.storage.nbytes)
    found = [{"role": role, "dtype": dtype, **row} for (role, dtype), row in sorted(rows.items())]
    rest = [
        {"role": role, "dtype": "uint8", "storages": 0, "elements": count, "bytes": count}
        for role, count in sorted(outside.items(), reverse=True)
    ]
    return found + rest


def _optimizers(plan: Plan) -> list[dict[str, Any]]:
    """Parameters by update rule, with the step where the rule counts it."""
    rows: Counter[tuple[str, int | None]] = Counter()
    for unit in plan.units:
        if unit.parameter is not None:
            rule = unit.parameter.rule
            rows[(rule.kind if rule else f"unknown: {unit.parameter.reason}", rule.step if rule else None)] += 1
    return [{"rule": kind, "step": step or None, "parameters": count} for (kind, step), count in rows.items()]


def _parameters(plan: Plan, streams: list[Stream], *, directory: bool) -> list[dict[str, Any]]:
    """The parameters that have moments, in the form that a container has them in."""
    found = [unit.parameter for unit in plan.units if unit.parameter is not None]
    moments = [{slot: streams[index].spec.name for slot, index in each.moments.items()} for each in found]
    given = [(each.name, list(names.values())) for each, names in zip(found, moments, strict=True)]
    return [
        {**shown, "moments": names, "rule": each.rule.to_json() if each.rule else None, "reason": each.reason}
        for each, names, shown in zip(found, moments, display_names(given, directory=directory), strict=True)
    ]


def _tensor_facts(streams: list[Stream], tensor: Any, index: int) -> dict[str, Any]:
    stream = streams[index]
    return {
        "name": tensor.name,
        "role": tensor.role.value,
        "dtype": tensor.ref.dtype.label,
        "shape": list(tensor.ref.shape),
        "storage": stream.spec.name,
        "bytes": stream.storage.nbytes,
        "codec": codec_name(config_of(stream.codec)),
        "reason": stream.reason,
    }


def _predict(source: Bundle, preset: str) -> dict[str, Any]:
    """Stored size from a sample of every storage; an estimate, good to about a percent for trained weights."""
    plan = plan_bundle(source, Policy.of(preset))
    structure = {
        member.skeleton for member in source.members if skeleton_role(member.checkpoint.format) == SKELETON_ROLE
    }
    stored = sum(_predict_unit(source, unit) for unit in plan.units if unit.streams[0].index not in structure)
    outside = sum(stream.storage.nbytes for stream in plan.streams if stream.index in structure)
    size = int(stored + outside * _STRUCTURE_LEFT)
    return {"bytes": size, "ratio": source.size / max(size, 1)}


def _predict_unit(checkpoint: Checkpoint, unit: Unit) -> float:
    numel = unit.numel
    if numel == 0:
        return 0.0
    length = min(numel, _SAMPLE)
    first = (numel - length) // 2
    originals = [_sample(checkpoint, stream, first, length) for stream in unit.streams]
    try:
        found = lockstep.encode(unit.streams, originals, first, None)
    except RefusedError:
        found = [LOSSLESS.encode(x) for x in originals]
    stored = sum(len(f) for parts in found for name, part in parts.items() for f, _ in frames.encode_part(name, part))
    slabs = len(list(layout.slab_chunks(numel, layout.SLAB)))
    return stored * numel / length + _ENTRY_BYTES * slabs * sum(map(len, found))


def _sample(checkpoint: Checkpoint, stream: Stream, first: int, length: int) -> torch.Tensor:
    spec = stream.spec
    buffer = bytearray(length * spec.dtype.itemsize)
    checkpoint.read_into(stream.storage.offset + first * spec.dtype.itemsize, memoryview(buffer))
    return torch.frombuffer(buffer, dtype=torch.uint8).view(spec.dtype.torch)
