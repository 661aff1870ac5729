"""Facts about a ``.ckpt8`` or a directory of them: without options from manifests alone, and without torch.

Among them are the names in pickles that ``torch.load`` refuses with ``weights_only``: without it, it imports them and
may call them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.readers import READERS, get_reader
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.readers.torch_rules import foreign_names
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.codecs import codec_from_config
from ckpt8.codecs.error_stats import LatticeError, UpdateError, WeightError, read_error
from ckpt8.container.facts import error_facts, figure_of, figures, tensor_facts, total_errors
from ckpt8.container.joined import Stored, containers_of, open_stored
from ckpt8.container.manifest import Manifest, MemberRecord, base_json
from ckpt8.container.reader import ContainerReader, SkeletonFile
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import Ckpt8Error
from ckpt8.core.tensors import Role
from ckpt8.core.text import listed
from ckpt8.inspecting.facts import (
    asked_words,
    dtypes,
    frameworks_by_folder,
    low_bit_state,
    parameter_facts,
    shown_names,
    sizes_by,
    step_facts,
    unrecognised,
    whole_shapes,
)
from ckpt8.inspecting.origin import layers_of

FOREIGN = "foreign_globals"
"""The kind of the flag."""

_SHOWN, _LISTED, _MOST = 5, 20, 1000
"""Names in a warning, in a report, and in JSON."""


def names_of(member: DirectoryMember) -> Iterator[tuple[str, list[str]]]:
    """The path of an open member and the names in it, if there are any."""
    if isinstance(member.checkpoint, OpenCheckpoint) and (names := foreign_names(member.checkpoint.names)):
        yield member.path, names


def names_in_container(reader: ContainerReader) -> Iterator[tuple[str, list[str]]]:
    """Path and names of every member of a container that has some. ``verify`` names the damaged ones."""
    for index, record in enumerate(reader.manifest.members):
        if record.format in READERS and reader.is_plain(record.skeleton):
            try:
                checkpoint = get_reader(record.format).read(SkeletonFile(reader, index))
            except Ckpt8Error:
                continue
            yield from names_of(DirectoryMember(record.path, checkpoint))


def foreign_flags(members: Iterable[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """A red flag for each member with such names, in the form of ``survey``; ``globals`` lists the names."""
    return [
        {
            "kind": FOREIGN,
            "tensor": path,
            "count": len(names),
            "of": len(names),
            "fraction": 1.0,
            "sampled": False,
            "message": listed(names, _LISTED),
            "globals": list(names[:_MOST]),
        }
        for path, names in members
    ]


def warning(target: str, members: Iterable[tuple[str, Sequence[str]]]) -> str | None:
    """The line in which ``restore`` warns of foreign names; None where there are none."""
    names = dict.fromkeys(name for _, classes in members for name in classes)
    if not names:
        return None
    return (
        f"{target}: refers to {listed(names, _SHOWN)}, which torch.load refuses with weights_only=True, and without it "
        "imports and may call; load it so only if you trust where it came from"
    )


_WORST = 5


def inspect_container(
    path: Path,
    *,
    tensors: bool = False,
    original: Path | None = None,
    full: bool = False,
    visit: Callable[[Stored], None] | None = None,
) -> dict[str, Any]:
    """Totals, roles, errors and the worst tensors; with ``tensors`` every tensor.

    With ``original``, the checkpoint that the container was made from, measured errors replace the stored ones;
    ``measured_from`` then has its ``path`` and the names of lossless storages ``differing`` from it. ``visit`` gets the
    reader, whose manifest then has these errors. ``full`` decodes every element and looks for ``flags``. Raises
    InputError for damage.
    """
    with without_collection(), open_stored(path) as reader:
        differing = [] if original is None else _measure_again(reader, original)
        manifest = reader.manifest
        if visit is not None:
            visit(reader)
        looked = _not_surveyed(manifest)
        if full:
            from ckpt8.inspecting.survey import survey_decoded

            looked = survey_decoded(path)
        looked["flags"][:0] = foreign_flags(
            names for file in containers_of(reader) for names in names_in_container(file)
        )
        return {
            "path": str(reader.path),
            "kind": "ckpt8",
            "ranks": _rank_facts(reader),
            **_facts(manifest, reader.size),
            "measured_from": None if original is None else {"path": str(original), "differing": differing},
            **_origin(manifest),
            "layers": layers_of(manifest),
            **looked,
            **_lists(manifest, tensors),
        }


def _origin(manifest: Manifest) -> dict[str, Any]:
    """``framework``, and ``origins`` if names of files show several; what is in the files is not read."""
    folders = frameworks_by_folder([member.path for member in manifest.members])
    rows = [{"path": path or ".", "framework": name} for path, name in folders.items()]
    several = len(set(folders.values())) > 1
    return {"framework": None if several or not rows else rows[0]["framework"], "origins": rows if several else []}


def _not_surveyed(manifest: Manifest) -> dict[str, Any]:
    """The keys of ``survey``, when nobody reads an element."""
    seen: Counter[int] = Counter()
    for tensor in manifest.tensors:
        if tensor.dtype.is_floating:
            seen[tensor.storage] += tensor.numel
    count = sum(min(numel, manifest.storages[index].numel) for index, numel in seen.items())
    return {"flags": [], "sample": {"elements": 0, "of": count, "full": count == 0}}


def _rank_facts(stored: Stored) -> dict[str, Any] | None:
    """Of a directory of containers how many there are, and files that are no part of it; None of a container."""
    if isinstance(stored, ContainerReader):
        return None
    return {"files": len(stored.readers), "strays": [*stored.strays()]}


def _measure_again(stored: Stored, original: Path) -> list[str]:
    """Replace the stored errors by measured ones; return the names of lossless storages that differ."""
    from ckpt8.core.workers import Workers
    from ckpt8.inspecting.verify import measure

    with Workers() as workers:
        if isinstance(stored, ContainerReader):
            measured = measure(stored, original, workers)
            measured.replace_stated(stored.manifest)
            return measured.differing
        from ckpt8.inspecting.verify import differing_values, measure_ranks, open_originals

        with open_originals(stored, original, workers) as originals:
            differing = []
            for reader, measured in measure_ranks(stored, originals, workers):
                measured.replace_stated(reader.manifest)
                differing += measured.differing
            lines = differing_values(stored, originals, workers)
            return differing + [line.partition(": differs")[0] for line in lines]


def _facts(manifest: Manifest, size: int) -> dict[str, Any]:
    original = sum(member.size for member in manifest.members)
    types = dtypes(manifest)
    weights = sum(
        record.nbytes // types[index].itemsize
        for index, record in enumerate(manifest.storages)
        if record.role is Role.WEIGHT and types[index].is_plane_float and not record.is_reference
    )
    parts: Counter[str] = Counter()
    for sizes in (
        *(s.part_bytes for s in manifest.storages if s.pack is None),
        *(p.part_bytes for p in manifest.packs),
    ):
        parts.update(sizes)
    return {
        "format": manifest.version,
        "writer": manifest.writer,
        "preset": manifest.preset,
        "asked": asked_words(manifest.preset, manifest.budget),
        "rules": manifest.rules,
        "directory": manifest.directory,
        "base": base_json(manifest.base) if manifest.base else None,
        "differences": sum(record.base is not None for record in manifest.storages),
        "members": [_member_facts(manifest, member) for member in manifest.members],
        "bytes": original,
        "stored_bytes": size,
        "ratio": original / size,
        "weights": weights,
        "bytes_per_weight": size / weights if weights else None,
        "parts": dict(parts),
        "overhead_bytes": size - sum(parts.values()),
        "roles": sizes_by("codec", manifest),
        "low_bit": low_bit_state(manifest),
        "errors": total_errors(manifest, count_whole),
        "steps": step_facts(manifest, count_whole),
    }


def _member_facts(manifest: Manifest, member: MemberRecord) -> dict[str, Any]:
    storages = [member.skeleton, *(index for _, index in member.segments)]
    stored = sum(manifest.storages[index].stored_bytes for index in storages)
    return {"path": member.path, "format": member.format, "bytes": member.size, "stored_bytes": stored}


def _lists(manifest: Manifest, tensors: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "worst": worst(manifest),
        "lossless": lossless_reasons(manifest),
        "unrecognised": unrecognised(manifest) if manifest.preset != "lossless" else [],
    }
    if tensors:
        whole = whole_shapes(manifest)
        facts["tensors"] = [
            {
                "name": tensor.name,
                "shape": tensor.shape,
                "whole_shape": whole.get(tensor.name, tensor.shape),
                **tensor_facts(manifest, tensor),
            }
            for tensor in manifest.tensors
        ]
        facts["parameters"] = [
            {**row, "error": error_facts(parameter.error), "figure": figure_of(parameter)}
            for row, parameter in zip(parameter_facts(manifest), manifest.parameters, strict=True)
        ]
    return facts


def lossless_reasons(manifest: Manifest) -> list[dict[str, Any]]:
    """Storages that are lossless although their role asks for another codec: the number by reason, and a few names."""
    names: dict[str, list[str]] = defaultdict(list)
    for record in manifest.storages:
        if record.reason is not None and codec_from_config(record.codec).measured_as is None:
            names[record.reason].append(record.name)
    return [
        {"reason": reason, "count": len(storages), "names": storages[:_WORST]}
        for reason, storages in sorted(names.items())
    ]


def worst(manifest: Manifest) -> dict[str, list[dict[str, Any]]]:
    """The worst tensors by the figure of their kind.

    ``update``: parameters, the largest max |Δu| first; ``weight``: weights, the largest mean relative error first;
    ``lattice``: weights on a lattice, the lowest SNR first.
    """
    updates = [
        {**shown, **figures(error), "figure": figure_of(parameter)}
        for parameter, shown in zip(manifest.parameters, shown_names(manifest), strict=True)
        if isinstance(error := read_error(parameter.error), UpdateError)
    ]
    errors = [(record.name, read_error(record.error)) for record in manifest.storages]
    weights = [{"name": name, **figures(error)} for name, error in errors if isinstance(error, WeightError)]
    lattice = [(error.nmse, {"name": name, **figures(error)}) for name, error in errors if type(error) is LatticeError]
    return {
        "update": sorted(updates, key=lambda row: -row["max_error"])[:_WORST],
        "weight": sorted(weights, key=lambda row: -row["mean_relative"])[:_WORST],
        "lattice": [row for _, row in sorted(lattice, key=lambda pair: -pair[0])[:_WORST]],
    }
