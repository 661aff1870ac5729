"""Facts about a raw checkpoint: structure, roles, sizes, and what each preset and budget would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.replacing import run_in
from ckpt8.checkpoint.sources.opening import check_storages
from ckpt8.compressing.plan import Plan
from ckpt8.compressing.policy import Policy
from ckpt8.container.facts import FILE_ROLE, SKELETON_ROLE, codec_name
from ckpt8.container.manifest import Manifest
from ckpt8.core.closing import without_collection
from ckpt8.core.grouping import grouped
from ckpt8.core.workers import Progress
from ckpt8.inspecting.container import foreign_flags, names_of, origin_of
from ckpt8.inspecting.facts import (
    layers_of,
    low_bit_state,
    parameter_facts,
    sizes_by,
    unrecognised,
    whole_shapes,
)
from ckpt8.inspecting.prediction import plans_of, predict
from ckpt8.inspecting.survey import survey
from ckpt8.inspecting.tensors import describe, open_any


def inspect_checkpoint(
    path: Path, *, tensors: bool = False, full: bool = False, progress: Progress = lambda _: None
) -> dict[str, Any]:
    """The content of a file or directory, and its predicted sizes. Raises InputError for damage or no checkpoint.

    ``flags`` and ``sample`` come from ``survey``, ``layers`` from ``layers_of``. ``full`` reads every element for the
    flags, calls ``progress`` with the bytes that it has read, and checks the checksums that the source states.
    ``tensors`` adds every tensor and every parameter that has moments. ``run`` names the checkpoints in the folder of
    a run, which count as one here.
    """
    with without_collection(), open_any(path, containers=False) as source:
        if full:
            for member in source.members:
                check_storages(member.checkpoint, str(path) if source.directory is None else f"{path}: {member.path}")
        plans = plans_of(source)
        plan = plans[Policy().preset]
        manifest = describe(source, plan)
        facts: dict[str, Any] = {
            "path": str(path),
            "kind": "checkpoint",
            "format": source.format,
            "bytes": source.size,
            "run": run_in(path) if source.directory is not None else [],
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
            **survey(source, plan, manifest, full=full, progress=progress),
            **(predict(source, plans) if source.holds_tensors else _NOTHING),
        }
        facts["flags"][:0] = foreign_flags(
            names_of_member for member in source.opened for names_of_member in names_of(member)
        )
        if tensors:
            facts["tensors"] = _tensors(manifest, plan)
            facts["parameters"] = parameter_facts(manifest)
        return facts


_NOTHING: dict[str, Any] = {"predicted": {}, "unpredicted": {}}
"""Predictions for what ``compress`` refuses, as it holds no tensors."""


def _roles(manifest: Manifest) -> list[dict[str, Any]]:
    """Sizes by role and type; the bytes outside the storages come last."""
    sizes = sizes_by("dtype", manifest)
    rows = [{key: value for key, value in row.items() if key != "stored_bytes"} for row in sizes]
    outside = [{**row, "storages": 0} for row in rows if row["role"] in (SKELETON_ROLE, FILE_ROLE)]
    return [row for row in rows if row["role"] not in (SKELETON_ROLE, FILE_ROLE)] + outside[::-1]


def _optimizers(manifest: Manifest) -> list[dict[str, Any]]:
    """Parameters by update rule, with the step if the rule counts it."""
    rules = (
        (parameter.rule or {"kind": f"unknown: {parameter.reason}", "step": None}, parameter.name)
        for parameter in manifest.parameters
    )
    rows = grouped(((rule["kind"], rule["step"] or None), name) for rule, name in rules)
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
