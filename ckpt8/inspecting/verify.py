"""``verify``: checks every byte of a container, and every figure that it states against the original.

Opening a container checks its seal; ``check_frames`` reads and decodes all other bytes; ``check_table`` compares the
tensors that the manifest lists with those that the decoded members have. ``measure`` takes the original
and the stored planes, and repeats the measurements of ``compress``; it trusts no stored figure.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.codecs.error_stats import ErrorStats, UpdateError, read_error
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.chunk_encoder import check_source, read_chunk
from ckpt8.compressing.measure import ErrorMeter, UnitErrors
from ckpt8.compressing.parameters import Parameter
from ckpt8.compressing.plan import Stream, Unit
from ckpt8.compressing.policy import Policy
from ckpt8.container import frames, layout
from ckpt8.container.decoding import check_frames, scratch_tensor
from ckpt8.container.manifest import Manifest
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arguments import checked
from ckpt8.core.errors import CheckFailedError, UsageError
from ckpt8.core.files.crc import combine
from ckpt8.core.tensors import Parts
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.opening import describe
from ckpt8.inspecting.replay.replay import replay_files
from ckpt8.inspecting.tensor_table import check_table, table_differences

_GIVE = "give the checkpoint that it was made from"
_OTHER_KIND = "the stored figures are of another kind"


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

    ``differing`` names the lossless storages whose bytes differ from the original. ``table`` has the tensors of the
    original.
    """

    table: Manifest
    storages: dict[int, ErrorStats] = field(default_factory=dict)
    parameters: dict[int, MeasuredUpdate] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)


def measure(reader: ContainerReader, original: Path, workers: Workers, progress: Progress = lambda _: None) -> Measured:
    """Compare a container with the checkpoint it was made from.

    Lossless storages must be equal, and lossy ones are measured. Raises CheckFailedError if the original has
    another structure, InputError if either file is damaged.
    """
    with open_source(original, containers=False, decode=not Policy(reader.manifest.preset).keeps_compressed) as source:
        _check_structure(reader, source, original)
        plan = plan_bundle(source, Policy.of("lossless"))
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
        source.check_unchanged()
    measured.differing = list(dict.fromkeys(measured.differing))
    return measured


def _check_structure(reader: ContainerReader, source: Bundle, original: Path) -> None:
    """Raise CheckFailedError unless both have the same members, with the same storages in the same places."""
    manifest = reader.manifest
    here = [(member.path, member.checkpoint.format) for member in source.members]
    there = [(record.path, record.format) for record in manifest.members]
    is_directory = source.directory is not None
    if is_directory != (manifest.directory is not None) or len(here) != len(there) or (is_directory and here != there):
        differ = sorted({path for path, _ in set(here) ^ set(there)})
        which = f"only one of them has {differ[0]!r}, in that format" if differ else "only one of them is a directory"
        raise CheckFailedError(f"{reader.path}: was not made from {original}: {which}; {_GIVE}")
    for member, record in zip(source.members, manifest.members, strict=True):
        stored = sorted((offset, manifest.storages[index].nbytes, index) for offset, index in record.segments)
        storages = enumerate(member.checkpoint.source_storages, member.first)
        found = sorted((storage.offset, storage.nbytes, index) for index, storage in storages)
        if member.checkpoint.size != record.size or found != stored or member.skeleton != record.skeleton:
            where = f" in {record.path!r}" if manifest.directory is not None else ""
            raise CheckFailedError(f"{reader.path}: was not made from {original}: its storages differ{where}; {_GIVE}")


def _as_stored(reader: ContainerReader, unit: Unit, parameter_of: Mapping[frozenset[int], int]) -> Unit:
    """A unit of the original, with the names, roles, codecs and the kind of figure that it has in the container."""
    streams = []
    here = {stream.index for stream in unit.streams}
    for stream in unit.streams:
        record = reader.manifest.storages[stream.index]
        if not here.issuperset(reader.codec(stream.index).companion_storages.values()):
            raise CheckFailedError(f"{reader.path}: {record.name}: is coded with the moments of another parameter")
        spec = replace(stream.spec, name=record.name, role=record.role)
        streams.append(replace(stream, spec=spec, codec=reader.codec(stream.index)))
    parameter = unit.parameter
    index = None if parameter is None else parameter_of.get(frozenset(parameter.moments.values()))
    if parameter is not None and parameter.replay is not None and index is not None:
        rule = reader.manifest.parameters[index].rule
        if rule is not None and rule.get("kind") == "momentum":
            # Older files state the error of the momentum, for Lion too.
            parameter = replace(parameter, rule=UpdateRule("momentum"), replay=None)
    return replace(unit, streams=tuple(streams), parameter=parameter)


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
        if not stream.lossy and not _equal(reader, stream, chunk, x, part)
    ]
    if not unit.measured:
        return differing, UnitErrors.for_unit(unit), crcs
    return differing, meter.measure(unit, chunk * frames.FRAME, originals, parts), crcs


def _equal(reader: ContainerReader, stream: Stream, chunk: int, x: torch.Tensor, parts: Parts) -> bool:
    out = scratch_tensor(reader, stream.index, chunk)
    first, companions = chunk * frames.FRAME, reader.companions(stream.index, chunk)
    stream.codec.decode(parts, stream.chunk_spec(chunk), out=out, first=first, companions=companions)
    return torch.equal(out.view(torch.uint8), x.view(torch.uint8))


def check_statistics(reader: ContainerReader, measured: Measured) -> list[str]:
    """A line for every stored figure that does not hold. Maxima must agree exactly, sums to 1e-9."""
    failures = [f"{name}: differs from the original" for name in measured.differing]
    storages, parameters = reader.manifest.storages, reader.manifest.parameters
    for index, error in measured.storages.items():
        known = read_error(storages[index].error)
        difference = error.disagreement(known) if isinstance(known, type(error)) else _OTHER_KIND
        if storages[index].error is not None and difference:
            failures.append(f"{storages[index].name}: {difference}")
    for index, update in measured.parameters.items():
        known = read_error(parameters[index].error)
        difference = update.disagreement(known) if isinstance(known, UpdateError) else _OTHER_KIND
        if parameters[index].error is not None and difference:
            failures.append(f"{parameters[index].name} (update): {difference}")
    return failures


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of ``verify``. ``failures`` is empty if all holds; ``against`` says whether there was an original.

    ``resume`` holds the figures of the replayed steps, see ``ReplayFigures.to_json``.
    """

    frames: int
    nbytes: int
    against: bool
    statistics: int
    unmeasured: int
    failures: tuple[str, ...]
    resume: dict[str, Any] | None = None


@checked
def verify(
    source: str | os.PathLike[str],
    original: str | os.PathLike[str] | None = None,
    *,
    resume_steps: int = 0,
    max_replay_error: float | None = None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Verification:
    """Check a container with all tensors that its manifest lists, and with ``original`` every statistic it states.

    It then replays ``resume_steps`` steps of the optimizer on both; a replay error, the largest NMSE of an update,
    above ``max_replay_error`` is a failure. Raises InputError for damage, CheckFailedError for another original,
    UsageError for arguments that ask for nothing. A statistic that does not hold is in ``failures``.

    >>> ckpt8.verify("run.ckpt8", "run.pt").failures
    ()
    """
    if resume_steps and original is None:
        raise UsageError("replayed steps need the original to compare with; give --against ORIGINAL")
    if max_replay_error is not None and not max_replay_error >= 0:
        raise UsageError(f"a limit of the replay error is a number from 0 on, not {max_replay_error}")
    if max_replay_error is not None and not resume_steps:
        raise UsageError("a limit on the replay error needs steps to replay; give --resume-steps N")
    with ContainerReader(Path(source), kernels=True) as reader, Workers(threads) as workers:
        check_frames(reader, workers, progress)
        table = check_table(reader, workers)
        storages = reader.manifest.storages
        tables = [record.parts for record in storages] + [pack.parts for pack in reader.manifest.packs]
        count = sum(len(table.lengths) for parts in tables for table in parts.values())
        statistics, unmeasured, failures, resume = 0, 0, [], None
        if original is not None:
            measured = measure(reader, Path(original), workers, progress)
            statistics = sum(record.error is not None for record in storages)
            statistics += sum(parameter.error is not None for parameter in reader.manifest.parameters)
            unmeasured = sum(storages[index].error is None for index in measured.storages)
            failures = [*table_differences(table, measured.table), *check_statistics(reader, measured)]
            if resume_steps:
                figures = replay_files(reader, Path(original), resume_steps, workers)
                failures += figures.failures(max_replay_error)
                resume = figures.to_json()
        return Verification(count, reader.size, original is not None, statistics, unmeasured, tuple(failures), resume)
