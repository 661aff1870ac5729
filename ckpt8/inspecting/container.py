"""Facts about a ``.ckpt8``, from its manifest alone: no tensor is read and torch is not imported."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.meaning.quantised_state import find_low_bit
from ckpt8.checkpoint.meaning.update_rules import read_rule
from ckpt8.codecs.error_stats import UpdateError, WeightError, read_error
from ckpt8.container.facts import (
    codec_name,
    error_facts,
    skeleton_role,
    tensor_facts,
    total_errors,
    update_facts,
    weight_facts,
)
from ckpt8.container.manifest import (
    Manifest,
    MemberRecord,
)
from ckpt8.container.reader import ContainerReader
from ckpt8.core.tensors import DType, Role, TensorSpec
from ckpt8.inspecting.survey.layers import layers_of_manifest
from ckpt8.inspecting.survey.origin import framework_of_files

_WORST = 5


def inspect_container(
    path: Path,
    *,
    tensors: bool = False,
    original: Path | None = None,
    full: bool = False,
    visit: Callable[[ContainerReader], None] | None = None,
) -> dict[str, Any]:
    """Totals, roles, errors and the worst tensors; with ``tensors`` every tensor.

    ``original`` measures the errors again from the checkpoint that the container was made from, in place of the
    stored ones; ``measured_from`` is then its ``path``, with names of lossless storages ``differing`` from it, else
    None. ``visit`` is called with the reader that then states them. ``flags`` and ``sample`` are of the decoded
    values, as of a raw checkpoint: ``full`` decodes all, else none is looked at. Raises InputError for damage.
    """
    with ContainerReader(path) as reader:
        manifest = reader.manifest
        differing: list[str] = []
        if original is not None:
            differing = _measure_again(reader, original)
        if visit is not None:
            visit(reader)
        return {
            "path": str(path),
            "kind": "ckpt8",
            **_facts(manifest, reader.size),
            "measured_from": None if original is None else {"path": str(original), "differing": differing},
            "framework": framework_of_files(member.path for member in manifest.members),
            "layers": layers_of_manifest(manifest),
            **(_surveyed(reader) if full else _unread(manifest)),
            **_lists(manifest, tensors),
        }


def _surveyed(reader: ContainerReader) -> dict[str, Any]:
    from ckpt8.inspecting.survey.survey import survey
    from ckpt8.inspecting.survey.subject import of_container

    return survey(of_container(reader), full=True)


def _unread(manifest: Manifest) -> dict[str, Any]:
    """What ``survey`` gives of a checkpoint that nobody looks at."""
    seen: Counter[int] = Counter()
    for tensor in manifest.tensors:
        if tensor.dtype.is_floating:
            seen[tensor.storage] += tensor.numel
    count = sum(min(numel, manifest.storages[index].numel) for index, numel in seen.items())
    return {"flags": [], "sample": {"elements": 0, "of": count, "full": count == 0}}


def _measure_again(reader: ContainerReader, original: Path) -> list[str]:
    """Put what is measured in place of what is stored; names of lossless storages that differ."""
    from ckpt8.core.workers import Workers
    from ckpt8.inspecting.verify import measure

    with Workers() as workers:
        measured = measure(reader, original, workers)
    for index, record in enumerate(reader.manifest.storages):
        record.error = measured.storages[index].to_json() if index in measured.storages else None
    for index, parameter in enumerate(reader.manifest.parameters):
        parameter.error = measured.parameters[index].to_json() if index in measured.parameters else None
    return measured.differing


def _facts(manifest: Manifest, size: int) -> dict[str, Any]:
    original = sum(member.size for member in manifest.members)
    dtypes = _dtypes(manifest)
    parameters = sum(
        record.nbytes // dtypes[index].itemsize
        for index, record in enumerate(manifest.storages)
        if record.role is Role.WEIGHT and dtypes[index].is_plane_float and not record.is_reference
    )
    parts: Counter[str] = Counter()
    for record in manifest.storages:
        for part, table in record.parts.items():
            parts[part] += sum(table.lengths)
    return {
        "format": manifest.version,
        "writer": manifest.writer,
        "preset": manifest.preset,
        "rules": manifest.rules,
        "directory": manifest.directory,
        "members": [_member_facts(manifest, member) for member in manifest.members],
        "bytes": original,
        "stored_bytes": size,
        "ratio": original / size,
        "weights": parameters,
        "bytes_per_weight": size / parameters if parameters else None,
        "parts": dict(parts),
        "overhead_bytes": size - sum(parts.values()),
        "roles": _roles(manifest),
        "low_bit": _low_bit(manifest),
        "errors": total_errors(manifest),
    }


def _low_bit(manifest: Manifest) -> list[dict[str, Any]]:
    """State that was quantised before, see ``find_low_bit``."""
    return find_low_bit(
        TensorSpec(tensor.name, manifest.storages[tensor.storage].role, tensor.dtype, tuple(tensor.shape))
        for tensor in manifest.tensors
    )


def _shown(manifest: Manifest) -> list[dict[str, Any]]:
    """``name`` and ``named`` of every parameter."""
    given = (
        (parameter.name, [manifest.storages[index].name for index in parameter.moments.values()])
        for parameter in manifest.parameters
    )
    return display_names(given, directory=manifest.directory is not None)


def _member_facts(manifest: Manifest, member: MemberRecord) -> dict[str, Any]:
    storages = [member.skeleton, *(index for _, index in member.segments)]
    stored = sum(manifest.storages[index].stored_bytes for index in storages)
    return {"path": member.path, "format": member.format, "bytes": member.size, "stored_bytes": stored}


def _dtypes(manifest: Manifest) -> dict[int, DType]:
    """Element type of every storage as its first tensor has it; what is stored as bytes has another there."""
    stored = {index: record.dtype for index, record in enumerate(manifest.storages)}
    return stored | {tensor.storage: tensor.dtype for tensor in reversed(manifest.tensors)}


def _roles(manifest: Manifest) -> list[dict[str, Any]]:
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    dtypes = _dtypes(manifest)
    skeletons = {member.skeleton: skeleton_role(member.format) for member in manifest.members}
    for index, record in enumerate(manifest.storages):
        key = skeletons.get(index, record.role.value), codec_name(record.codec)
        row = rows.setdefault(key, {"storages": 0, "elements": 0, "bytes": 0, "stored_bytes": 0})
        row["storages"] += 1
        row["elements"] += record.nbytes // dtypes[index].itemsize
        row["bytes"] += record.nbytes
        row["stored_bytes"] += record.stored_bytes
    return [{"role": role, "codec": codec, **row} for (role, codec), row in sorted(rows.items())]


def _lists(manifest: Manifest, tensors: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {"worst": worst(manifest), "lossless": lossless_reasons(manifest)}
    if tensors:
        facts["tensors"] = [
            {"name": tensor.name, "shape": tensor.shape, **tensor_facts(manifest, tensor)}
            for tensor in manifest.tensors
        ]
        facts["parameters"] = [
            {
                **shown,
                "moments": {slot: manifest.storages[index].name for slot, index in parameter.moments.items()},
                "rule": read_rule(parameter.rule),
                "reason": parameter.reason,
                "error": error_facts(parameter.error),
            }
            for parameter, shown in zip(manifest.parameters, _shown(manifest), strict=True)
        ]
    return facts


def lossless_reasons(manifest: Manifest) -> list[dict[str, Any]]:
    """Tensors that are lossless against their role, counted by reason, with the first few names."""
    names: dict[str, list[str]] = defaultdict(list)
    for record in manifest.storages:
        if record.reason is not None:
            names[record.reason].append(record.name)
    return [{"reason": reason, "count": len(found), "names": found[:_WORST]} for reason, found in sorted(names.items())]


def worst(manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """The parameters with the largest max |Δu|, and the weights with the largest mean relative error."""
    updates = [
        {**shown, **update_facts(error)}
        for parameter, shown in zip(manifest.parameters, _shown(manifest), strict=True)
        if isinstance(error := read_error(parameter.error), UpdateError)
    ]
    weights = [
        {"name": record.name, **weight_facts(error)}
        for record in manifest.storages
        if isinstance(error := read_error(record.error), WeightError)
    ]
    return {
        "update": sorted(updates, key=lambda row: -row["max_error"])[:_WORST],
        "weight": sorted(weights, key=lambda row: -row["mean_relative"])[:_WORST],
    }
