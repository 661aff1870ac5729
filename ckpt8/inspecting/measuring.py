"""Measures a container again, against the checkpoint that it was made from; trusts no figure that it states.

``measure`` takes the original and the stored planes, and repeats the measurements of ``compress``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs.error_stats import ErrorStats, UpdateError
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.chunk_encoder import check_source, read_chunk, read_master, rounded_masters
from ckpt8.compressing.manifest_records import steps_record
from ckpt8.compressing.measure import ErrorMeter
from ckpt8.compressing.optimizer_steps import give_steps
from ckpt8.compressing.parameters import Parameter
from ckpt8.compressing.plan import Stream, Unit
from ckpt8.compressing.policy import Policy
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container import frames, layout
from ckpt8.container.decoding import scratch_tensor
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError
from ckpt8.core.files.crc import combine
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.opening import describe

_GIVE = "give the checkpoint that it was made from"


@dataclass(frozen=True, slots=True)
class MeasuredUpdate:
    """The error of a parameter's update, and the parameter with the rule that it is measured by."""

    error: UpdateError
    parameter: Parameter

    def disagreement(self, stored: UpdateError) -> str | None:
        """The first figure that differs from a stored one; None if all agree.

        Products of whole matrices depend on the machine, so that their figures agree to 1 %.
        """
        is_whole = self.parameter.replay is not None and self.parameter.replay.is_whole
        return self.error.disagreement(stored, 0.01, all_close=True) if is_whole else self.error.disagreement(stored)


@dataclass(slots=True)
class Measured:
    """Errors measured against an original: by storage index, and by parameter index.

    ``steps`` are in the measure of a budget, by parameter index, as a container states them. ``differing`` names the
    lossless storages whose bytes differ from the original. ``table`` has the tensors of the original.
    """

    table: Manifest
    storages: dict[int, ErrorStats] = field(default_factory=dict)
    parameters: dict[int, MeasuredUpdate] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def replace_stated(self, manifest: Manifest) -> None:
        """Put these errors in place of those that ``manifest`` states."""
        for index, record in enumerate(manifest.storages):
            record.error = self.storages[index].to_json() if index in self.storages else None
        for index, parameter in enumerate(manifest.parameters):
            update = self.parameters.get(index)
            parameter.error = update.error.to_json() if update else None
            parameter.steps = self.steps.get(index)
            if update is not None and update.parameter.rule is not None:
                parameter.rule, parameter.reason = asdict(update.parameter.rule), None


def measure(reader: ContainerReader, original: Path, workers: Workers, progress: Progress = lambda _: None) -> Measured:
    """Compare a container with the checkpoint it was made from.

    Lossless storages must be equal, and lossy ones are measured. Raises CheckFailedError if the original has
    another structure, InputError if either file is damaged.
    """
    with open_source(original, containers=False, decode=not Policy(reader.manifest.preset).keeps_compressed) as source:
        return measure_source(reader, source, workers, progress)


def measure_source(reader: ContainerReader, source: Bundle, workers: Workers, progress: Progress) -> Measured:
    """As ``measure``, with an open original."""
    _check_structure(reader, source)
    plan = plan_bundle(source, Policy.of("lossless"))
    if reader.manifest.budget is not None:
        give_steps(plan, source)
    parameter_of = {
        frozenset(parameter.moments.values()): index for index, parameter in enumerate(reader.manifest.parameters)
    }
    units = [_as_stored(reader, unit, parameter_of) for unit in plan.units]
    measured = Measured(describe(source, plan))
    meter = ErrorMeter(source)
    compare = partial(_compare, reader, source, meter)
    results = workers.map(compare, ((u, c) for u in units for c in range(layout.chunk_count(u.numel))))
    for unit in units:
        errors = UnitErrors.for_unit(unit)
        sums = [0] * len(unit.streams)
        for chunk in range(layout.chunk_count(unit.numel)):
            differing, found, crcs = next(results)
            measured.differing += differing
            errors.merge(found)
            for k, stream in enumerate(unit.streams):
                length = stream.chunk_spec(chunk).numel * stream.spec.dtype.itemsize
                sums[k] = combine(sums[k], crcs[k], length)
                progress(length)
        check_source(unit, sums, source.label)
        meter.finish(unit, errors)
        measured.storages.update(errors.streams)
        parameter = unit.parameter
        index = parameter_of.get(frozenset(parameter.moments.values())) if parameter else None
        if errors.update is not None and parameter is not None and index is not None:
            measured.parameters[index] = MeasuredUpdate(errors.update, parameter)
        if parameter is not None and index is not None:
            steps = steps_record(parameter.step, errors.steps)
            measured.steps |= {} if steps is None else {index: steps}
    source.check_unchanged()
    measured.differing = list(dict.fromkeys(measured.differing))
    return measured


def _check_structure(reader: ContainerReader, source: Bundle) -> None:
    """Raise CheckFailedError unless both have the same members, with the same storages in the same places."""
    manifest = reader.manifest
    here = [(member.path, member.checkpoint.format) for member in source.members]
    there = [(record.path, record.format) for record in manifest.members]
    is_directory = source.directory is not None
    if is_directory != (manifest.directory is not None) or len(here) != len(there) or (is_directory and here != there):
        differ = sorted({path for path, _ in set(here) ^ set(there)})
        which = f"only one of them has {differ[0]!r}, in that format" if differ else "only one of them is a directory"
        raise CheckFailedError(f"{reader.path}: was not made from {source.path}: {which}; {_GIVE}")
    for member, record in zip(source.members, manifest.members, strict=True):
        stored = sorted((offset, manifest.storages[index].nbytes, index) for offset, index in record.segments)
        storages = enumerate(member.checkpoint.source_storages, member.first)
        found = sorted((storage.offset, storage.nbytes, index) for index, storage in storages)
        if member.checkpoint.size != record.size or found != stored or member.skeleton != record.skeleton:
            where = f" in {record.path!r}" if manifest.directory is not None else ""
            raise CheckFailedError(
                f"{reader.path}: was not made from {source.path}: its storages differ{where}; {_GIVE}"
            )


def _as_stored(reader: ContainerReader, unit: Unit, parameter_of: Mapping[frozenset[int], int]) -> Unit:
    """A unit of the original, with the names, roles, codecs and the kind of figure that it has in the container."""
    streams = []
    here = {stream.index for stream in unit.streams}
    for stream in unit.streams:
        record = reader.manifest.storages[stream.index]
        spec, codec = stream.spec, reader.codec(stream.index)
        if not here.issuperset(codec.companion_storages.values()):
            raise CheckFailedError(f"{reader.path}: {record.name}: is coded with the moments of another parameter")
        if (spec.name, spec.role) != (record.name, record.role):
            spec = replace(spec, name=record.name, role=record.role)
        streams.append(
            stream if (spec, codec) == (stream.spec, stream.codec) else replace(stream, spec=spec, codec=codec)
        )
    parameter = unit.parameter
    index = None if parameter is None else parameter_of.get(frozenset(parameter.moments.values()))
    if parameter is not None and parameter.replay is not None and index is not None:
        rule = reader.manifest.parameters[index].rule
        if rule is not None and rule.get("kind") == "momentum":
            # Older files state the error of the momentum, for Lion too.
            parameter = replace(parameter, rule=UpdateRule("momentum"), replay=None)
    stored = tuple(streams)
    return unit if (stored, parameter) == (unit.streams, unit.parameter) else Unit(stored, parameter)


def _compare(
    reader: ContainerReader, source: Bundle, meter: ErrorMeter, work: tuple[Unit, int]
) -> tuple[list[str], UnitErrors, list[int]]:
    """For one chunk: names of lossless streams that differ, errors of lossy ones, and crc32s of the original."""
    unit, chunk = work
    read = [read_chunk(source, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
    originals, crcs = [x for x, _ in read], [crc for _, crc in read]
    parts = [reader.read_parts(stream.index, chunk) for stream in unit.streams]
    differing = [
        stream.spec.name
        for stream, x, part in zip(unit.streams, originals, parts, strict=True)
        if not (_is_copy(source, stream, chunk, x) if stream.lossy else _equal(reader, stream, chunk, x, part))
    ]
    if not unit.measured:
        return differing, UnitErrors.for_unit(unit), crcs
    return differing, meter.measure(unit, chunk * frames.FRAME, originals, parts), crcs


def _is_copy(source: Bundle, stream: Stream, chunk: int, x: torch.Tensor) -> bool:
    """Whether the original is the rounded copy of masters that a container says it is; True for what is no copy."""
    copied = stream.codec.copied
    if copied is None:
        return True
    first, master = chunk * frames.FRAME, partial(read_master, source)
    rounded = rounded_masters(copied, stream.spec.dtype, first, len(x), master)
    return torch.equal(rounded.view(torch.uint8), x.view(torch.uint8))


def _equal(reader: ContainerReader, stream: Stream, chunk: int, x: torch.Tensor, parts: Parts) -> bool:
    out = scratch_tensor(reader, stream.index, chunk)
    first, companions = chunk * frames.FRAME, reader.companions(stream.index, chunk)
    stream.codec.decode(parts, stream.chunk_spec(chunk), out=out, first=first, companions=companions)
    return torch.equal(out.view(torch.uint8), x.view(torch.uint8))
