"""``verify``: checks every byte of a container, and every figure that it states against the original.

Opening a container checks its seal; ``check_frames`` reads and decodes all other bytes; ``check_table`` compares the
tensors that the manifest lists with those that the decoded members have. ``check_statistics`` compares what it states
with what is measured against the original.

``measure`` takes the original and the stored planes, and repeats the measurements of ``compress``: no figure of the
container is trusted.

The containers of ranks are compared with a plain directory that the same checkpoint was saved to. A rank saves an
object of its own, with slices of tensors. Its file is in the container; the bytes of the slices come from the
directory, however that cuts the tensors. Two files of torch.save are compared without importing a class.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.meaning.parameter_names import count_whole
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint
from ckpt8.checkpoint.readers.entries import DirectoryMember
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite, cut
from ckpt8.checkpoint.sources.distributed import Part, ShardedFiles, adopt_parts, gather_box
from ckpt8.checkpoint.sources.objects import RestBuilder
from ckpt8.checkpoint.sources.opening import check_storages, open_source, sharded_bundle
from ckpt8.checkpoint.sources.stored_member import MemberSource, read_member
from ckpt8.checkpoint.tree import Checkpoint, Inert, ReadsPieces, StatefulDict, StorageInfo, StorageRef, TensorRef
from ckpt8.codecs.error_stats import ErrorStats, UpdateError, read_error, read_step_error
from ckpt8.compressing.chunk_encoder import check_source, read_chunk, rounded_masters
from ckpt8.compressing.compressor import steps_record
from ckpt8.compressing.lockstep import Lockstep
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.parameters import attach_steps
from ckpt8.compressing.plan import Parameter, Stream, Unit
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container import frames, header
from ckpt8.container.chunks import check_frames, scratch_chunk
from ckpt8.container.frames import bytes_of
from ckpt8.container.joined import JoinedReader, Stored, containers_of, open_stored
from ckpt8.container.manifest import Manifest
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import SliceKey
from ckpt8.container.steps import error_in_words, step_facts
from ckpt8.converting.sources import assemble_distributed
from ckpt8.core.arrays import Array, Arrays, same_bits
from ckpt8.core.closing import without_collection
from ckpt8.core.errors import CheckFailedError, UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import ByteRange, combine
from ckpt8.core.lazy import torch
from ckpt8.core.public import checked
from ckpt8.core.summary import Summarised
from ckpt8.core.text import box_text, counted, listed, shown, size
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.diff_sides import Equality, Leaves
from ckpt8.inspecting.plain import PlainChecks, check_plain, is_plain
from ckpt8.inspecting.replay import ReplayedStepError, ReplayFigures, ReplaySource, replay, replay_files
from ckpt8.inspecting.tensor_table import check_table, table_differences
from ckpt8.inspecting.tensors import describe

_GIVE = "give the checkpoint that it was made from"


@dataclass(slots=True)
class Measured:
    """Errors measured against an original: by storage index, and by parameter index, that of the update with the rule.

    ``steps`` are in the measure of a budget, by parameter index, as a container states them. ``differing`` names the
    lossless storages whose bytes differ from the original. ``table`` has the tensors of the original.
    """

    table: Manifest
    storages: dict[int, ErrorStats] = field(default_factory=dict)
    parameters: dict[int, tuple[UpdateError, Parameter]] = field(default_factory=dict)
    steps: dict[int, dict[str, Any]] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)

    def replace_stated(self, manifest: Manifest) -> None:
        """Put these errors in place of those that ``manifest`` states."""
        for index, record in enumerate(manifest.storages):
            record.error = self.storages[index].to_json() if index in self.storages else None
        for index, parameter in enumerate(manifest.parameters):
            update, known = self.parameters.get(index, (None, None))
            parameter.error = update.to_json() if update else None
            parameter.steps = self.steps.get(index)
            if known is not None and known.rule is not None:
                parameter.rule, parameter.reason = asdict(known.rule), None


def measure(reader: ContainerReader, original: Path, workers: Workers, progress: Progress = lambda _: None) -> Measured:
    """Compare a container with the checkpoint it was made from.

    Lossless storages must be equal, and lossy ones are measured. One that states an earlier compression was made from
    a container. Raises CheckFailedError if the original has another structure, InputError if either file is damaged.
    """
    decode = not Policy(reader.manifest.preset).keeps_compressed
    with open_source(original, containers=reader.manifest.earlier is not None, decode=decode) as source:
        return measure_source(reader, source, workers, progress)


def measure_source(reader: ContainerReader, source: Bundle, workers: Workers, progress: Progress) -> Measured:
    """Compare a container with an open original. Raises CheckFailedError, InputError."""
    _check_structure(reader, source)
    plan = plan_bundle(source, Policy.of("lossless"))
    # Where all that was to be lossy was refused, or is frozen, the file may be lossless and state steps.
    states_steps = reader.manifest.is_lossy or any(record.steps for record in reader.manifest.parameters)
    if reader.manifest.budget is not None or states_steps:
        attach_steps(plan, source)
    parameter_of = {
        _storages(parameter.moments, (parameter.steps or {}).get("weight_storage")): index
        for index, parameter in enumerate(reader.manifest.parameters)
    }
    units = [_as_stored(reader, unit, parameter_of) for unit in plan.units]
    measured = Measured(describe(source, plan))
    lockstep = Lockstep(source)
    lockstep.prepare(units)
    compare = partial(_compare, reader, source, lockstep)
    results = workers.map(compare, ((u, c) for u in units for c in range(header.chunk_count(u.numel))))
    for unit in units:
        errors = UnitErrors.for_unit(unit)
        sums = [0] * len(unit.streams)
        for chunk in range(header.chunk_count(unit.numel)):
            differing, chunk_errors, crcs = next(results)
            measured.differing += differing
            errors.merge(chunk_errors)
            for k, stream in enumerate(unit.streams):
                length = stream.chunk_spec(chunk).numel * stream.spec.dtype.itemsize
                sums[k] = combine(sums[k], crcs[k], length)
                progress(length)
        check_source(unit, sums, source.label)
        lockstep.meter.finish(unit, errors)
        measured.storages.update(errors.streams)
        parameter = unit.parameter
        index = parameter_of.get(_storages(parameter.moments, unit.weight)) if parameter else None
        if parameter is not None and index is not None:
            measured.parameters |= {} if errors.update is None else {index: (errors.update, parameter)}
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
        places = sorted((storage.offset, storage.nbytes, index) for index, storage in storages)
        if member.checkpoint.size != record.size or places != stored or member.skeleton != record.skeleton:
            where = f" in {record.path!r}" if manifest.directory is not None else ""
            raise CheckFailedError(
                f"{reader.path}: was not made from {source.path}: its storages differ{where}; {_GIVE}"
            )


def _storages(moments: Mapping[str, int], weight: int | None) -> frozenset[int | None]:
    """What tells a parameter from others: its moments, or its weight where it has none."""
    return frozenset(moments.values() or [weight])


def _as_stored(reader: ContainerReader, unit: Unit, parameter_of: Mapping[frozenset[int | None], int]) -> Unit:
    """A unit of the original, with the names, roles, codecs and the kind of figure that it has in the container."""
    streams = []
    here = {stream.index for stream in unit.streams}
    for stream in unit.streams:
        record = reader.manifest.storages[stream.index]
        spec, codec = stream.spec, reader.codec(stream.index)
        if not here.issuperset(codec.companion_storages.values()):
            raise CheckFailedError(f"{reader.path}: {record.name}: is coded with the moments of another parameter")
        if (spec.name, spec.role) != (record.name, record.role):
            spec = spec._replace(name=record.name, role=record.role)
        streams.append(
            stream if (spec, codec) == (stream.spec, stream.codec) else replace(stream, spec=spec, codec=codec)
        )
    parameter = unit.parameter
    index = None if parameter is None else parameter_of.get(_storages(parameter.moments, unit.weight))
    if parameter is not None and parameter.replay is not None and index is not None:
        rule = reader.manifest.parameters[index].rule
        if rule is not None and rule.get("kind") == "momentum":
            # Older files state the error of the momentum, for Lion too.
            parameter = replace(parameter, rule=UpdateRule("momentum"), replay=None)
    stored = tuple(streams)
    return unit if (stored, parameter) == (unit.streams, unit.parameter) else Unit(stored, parameter)


def _compare(
    reader: ContainerReader, source: Bundle, lockstep: Lockstep, work: tuple[Unit, int]
) -> tuple[list[str], UnitErrors, list[int]]:
    """For one chunk: names of lossless streams that differ, errors of lossy ones, and crc32s of the original."""
    unit, chunk = work
    read = [read_chunk(source, stream, chunk, slot) for slot, stream in enumerate(unit.streams)]
    originals, crcs = [x for x, _ in read], [crc for _, crc in read]
    stored = [reader.read_parts(stream.index, chunk) for stream in unit.streams]
    differing = [
        stream.spec.name
        for stream, x, part in zip(unit.streams, originals, stored, strict=True)
        if not _is_same(reader, source, stream, chunk, x, part)
    ]
    if not unit.measured:
        return differing, UnitErrors.for_unit(unit), crcs
    return differing, lockstep.measure(unit, chunk * frames.FRAME, originals, stored), crcs


def _is_same(reader: ContainerReader, source: Bundle, stream: Stream, chunk: int, x: Array, parts: Arrays) -> bool:
    """Whether the original is what a container gives back, or the rounded copy of masters that it says it is.

    True for what is neither lossless nor a copy.
    """
    first, spec = chunk * frames.FRAME, stream.chunk_spec(chunk)
    copied = stream.codec.copied if stream.lossy else None
    if copied is not None:
        return same_bits(rounded_masters(source, copied, spec.dtype, first, x.size), x)
    if stream.lossy:
        return True
    content, companions = scratch_chunk(reader, stream.index, chunk), reader.companions(stream.index, chunk)
    stream.codec.decode_arrays(parts, spec, content, backend=reader.backend, first=first, companions=companions)
    return same_bits(content, x)


_OPEN_FILES = 4
"""Containers that are open for decoding at a time; each keeps a decoded chunk."""


class Originals:
    """The plain directory ``source`` that the same checkpoint was saved to. Raises CheckFailedError, InputError.

    ``data`` has its slices; ``bundles`` are the originals of ranks.
    """

    def __init__(self, joined: JoinedReader, source: Bundle, workers: Workers) -> None:
        members = source.distributed
        homes = {id(member.home): member.home for member in members}
        if len(homes) != 1:
            raise CheckFailedError(
                f"{joined.path}: was not made from {source.path}, which holds {len(homes)} checkpoints of "
                "torch.distributed.checkpoint; give the directory that the same state was saved to"
            )
        self.path, self.source = source.path, source
        self.home: DcpCheckpoint = next(iter(homes.values()))
        self._member_file = lru_cache(_OPEN_FILES)(partial(MemberFile, member=0, workers=workers))
        self._check_same(joined)
        for member in members:
            check_storages(member.checkpoint, f"{source.path}: {member.path}")
        self.data = Composite(str(source.path))
        parts = adopt_parts(self.data, members)
        self.bundles = [self._bundle(reader, joined.slices[reader.path.name], parts) for reader in joined.readers]
        self.together = Bundle(source.path, [bundle.opened[0] for bundle in self.bundles], source.directory)

    def _check_same(self, joined: JoinedReader) -> None:
        """Raise CheckFailedError unless both hold the same values, of the same types and shapes."""
        stated, index = self.home.metadata.tensors, joined.index
        known = {*index.tensors, *index.objects}
        names = set(self.home.metadata.names) | stated.keys()
        where = f"{joined.path}: was not made from {self.path}"
        for name in sorted(names ^ known):
            raise CheckFailedError(f"{where}: only one of them has {shown(name)}; give the same checkpoint")
        kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in stated.items()}
        for name in known:
            tensor = index.tensors.get(name)
            if kinds.get(name) != (None if tensor is None else (tensor.dtype, tensor.shape)):
                raise CheckFailedError(f"{where}: {shown(name)} is of another type or shape; give the same checkpoint")
            is_plain = tensor is not None and not any(map(tensor.pickled, tensor.boxes()))
            if is_plain and name in self.home.objects:
                raise CheckFailedError(f"{where}: {shown(name)} is no plain tensor there; give the same checkpoint")

    def _bundle(
        self, reader: ContainerReader, slices: Mapping[SliceKey, Any], parts: Mapping[str, list[Part]]
    ) -> Bundle:
        """The original of one rank."""
        tensors, storages, member = self.home.metadata.tensors, reader.manifest.storages, reader.manifest.members[0]
        refs: dict[int, TensorRef] = {}
        for (name, offsets), record in slices.items():
            box, dtype = (offsets, tuple(record.shape)), tensors[name].dtype
            refs[record.storage] = gather_box(self.data, shown(name), dtype, box, parts.get(name, []))
        source = MemberSource(reader, ByteRange(reader.path, 0, member.size), partial(self._member_file, reader))
        runs = [
            (start, start + storages[index].nbytes, refs[index]) for start, index in member.segments if index in refs
        ]
        original = _Original(self.data, read_member(reader, 0, source), runs)
        return Bundle(self.path, [DirectoryMember(member.path, original)])


class _Original(ReadsPieces):
    """The object that a rank saved, as a Checkpoint. ``runs`` are start, end and place in ``data`` of its slices."""

    def __init__(self, data: Composite, stored: Any, runs: Iterable[tuple[int, int, TensorRef]]) -> None:
        self._data, self._stored = data, stored
        self.format: str = stored.format
        self.size: int = stored.size
        self.tree: Any = stored.tree
        # The checksums in the file are those of the values that the container gives back.
        self.storages: Sequence[StorageInfo] = [
            replace(storage, crc32=None, crc_fields=()) for storage in stored.storages
        ]
        self._runs = sorted((run for run in runs if run[0] < run[1]), key=lambda run: run[0])
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the directory where ``offset`` lies in a slice, else from the container."""
        at = bisect_right(self._runs, offset, key=lambda run: run[0]) - 1
        with self._lock:
            if at < 0 or offset >= self._runs[at][1]:
                self._stored.read_into(offset, buffer)
                return
            start, _, ref = self._runs[at]
            for first, end, place in cut(offset - start, buffer, ref.dtype.itemsize):
                place[:] = bytes_of(self._data.elements(ref, first, end))

    def check_unchanged(self) -> None:
        """Raise InputError when a file of the directory changed since it was opened."""
        self._data.check_unchanged()


def same_object(a: Checkpoint, b: Checkpoint) -> bool:
    """Whether two files hold the same object. Raises InputError for damage.

    Tensors are the same where type, shape and the bits of all elements are, however their storages are laid out.
    """
    return _Comparison(a, b).same(a.tree, b.tree)


class _Comparison:
    def __init__(self, a: Checkpoint, b: Checkpoint) -> None:
        self._a, self._b = RestBuilder(a), RestBuilder(b)
        self._is_value, self._equal = Leaves(), Equality()
        # By id: both trees keep their nodes.
        self._known: dict[tuple[int, int], bool] = {}

    def same(self, a: Any, b: Any) -> bool:
        """Whether two nodes of the trees are the same. Nodes that lead back to themselves are, if all else is."""
        if self._is_value(a) or self._is_value(b):
            return self._is_value(a) and self._is_value(b) and self._equal(a, b)
        if type(a) is not type(b):
            return False
        pair = id(a), id(b)
        if pair not in self._known:
            self._known[pair] = True
            self._known[pair] = self._compare(a, b)
        return self._known[pair]

    def _compare(self, a: Any, b: Any) -> bool:
        if isinstance(a, TensorRef):
            return (a.dtype, a.shape) == (b.dtype, b.shape) and _bits_equal(self._a.build(a), self._b.build(b))
        if isinstance(a, StorageRef):
            place = (a.dtype, a.numel, a.offset) == (b.dtype, b.numel, b.offset)
            return place and bytes(self._a.build(a)) == bytes(self._b.build(b))
        if isinstance(a, Inert):
            return a.name == b.name and all(
                self.same(getattr(a, field), getattr(b, field)) for field in ("args", "state", "items", "pairs")
            )
        if isinstance(a, dict):
            states = (value.state if isinstance(value, StatefulDict) else None for value in (a, b))
            return a.keys() == b.keys() and all(self.same(a[key], b[key]) for key in a) and self.same(*states)
        return len(a) == len(b) and all(map(self.same, a, b))


def _bits_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one type and shape have the same bits."""
    flat = [tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8) for tensor in (a, b)]
    return torch.equal(*flat)


_DIFFERS = "differs from the original"


def compare(
    stored: Stored, original: Path, workers: Workers, progress: Progress = lambda _: None, steps: int = 0
) -> tuple[list[Measured], list[str], ReplayFigures | None]:
    """Compare a container, or those of ranks one after the other, with the original, and replay ``steps``.

    Returns what is measured of each container, lines on values of ranks that differ, and the figures of replayed steps.
    Raises as ``measure``.
    """
    if isinstance(stored, ContainerReader):
        measured = [measure(stored, original, workers, progress)]
        return measured, [], replay_files(stored, original, steps, workers) if steps else None
    with open_source(original, containers=False) as source:
        originals = Originals(stored, source, workers)
        pairs = zip(stored.readers, originals.bundles, strict=True)
        measured = [measure_source(reader, bundle, workers, progress) for reader, bundle in pairs]
        values = [*_differing_values(stored, originals, workers)]
        return measured, values, _replay_ranks(stored, originals, steps, workers) if steps else None


def _replay_ranks(joined: JoinedReader, originals: Originals, steps: int, workers: Workers) -> ReplayFigures:
    """Replay the parameters of all ranks, each put together from its slices."""
    figures = ReplayFigures([ReplayedStepError() for _ in range(steps)])
    first, second = (
        ReplaySource(Bundle.of(assemble_distributed(Bundle(one.path, one.distributed, one.directory)).data, one.label))
        for one in (originals.source, sharded_bundle(joined, workers))
    )
    replay(first.of_member(""), second.of_member(""), figures, workers)
    return figures


def _differing_values(joined: JoinedReader, originals: Originals, workers: Workers) -> Iterator[str]:
    """A line for every value that torch.save has written, and that is another one in the original."""
    files, home = ShardedFiles(joined, workers), originals.home
    for name, place in joined.index.objects.items():
        changed = files.value(name, place) != home.content(name)
        if changed and not same_object(files.open_value(name, place), home.open_value(name)):
            yield f"{name}: {_DIFFERS}"
    for name, tensor in joined.index.tensors.items():
        for box in tensor.boxes() if not tensor.is_whole else ():
            if (kept := tensor.pickled(box)) is not None:
                part = name + box_text(box.offsets, box.sizes, tensor.shape)
                original = home.part(name, (box.offsets, box.sizes))
                if original is None:
                    yield f"{part}: {_DIFFERS} in how it is cut or kept, so that it cannot be compared"
                elif not same_object(files.open_value(name, kept), original):
                    yield f"{part}: {_DIFFERS}"


_OTHER_KIND = "the stored figures are of another kind"


def check_statistics(reader: ContainerReader, measured: Measured) -> list[str]:
    """A line for every stored figure that does not hold. Maxima must agree exactly, sums to 1e-9.

    Products of whole matrices depend on the machine, so that the figures of such an update agree to 1 %.
    """
    failures = [f"{name}: {_DIFFERS}" for name in measured.differing]
    storages, parameters = reader.manifest.storages, reader.manifest.parameters
    checked: list[tuple[str, dict[str, Any] | None, ErrorStats, bool]] = [
        (storages[index].name, storages[index].error, error, False) for index, error in measured.storages.items()
    ]
    checked += [
        (
            f"{parameters[index].name} (update)",
            parameters[index].error,
            update,
            bool(owner.replay and owner.replay.is_whole),
        )
        for index, (update, owner) in measured.parameters.items()
    ]
    for name, stated, error, is_whole in checked:
        known = read_error(stated)
        difference = (
            error.disagreement(known, 0.01 if is_whole else 1e-9, all_close=is_whole)
            if isinstance(known, type(error))
            else _OTHER_KIND
        )
        if stated is not None and difference:
            failures.append(f"{name}: {difference}")
    for index, parameter in enumerate(parameters):
        if parameter.steps is not None and (
            difference := _steps_disagreement(measured.steps.get(index), parameter.steps)
        ):
            failures.append(f"{parameter.name} (in steps): {difference}")
    return failures


def _steps_disagreement(measured: dict[str, Any] | None, stated: dict[str, Any]) -> str | None:
    """The first figure of an error in steps that differs; None if all agree."""
    mine, theirs = read_step_error(measured), read_step_error(stated)
    if measured is None or mine is None or theirs is None:
        return _OTHER_KIND
    for key, words in {"optimizer": "optimizer", "weight_storage": "weight"}.items():
        if measured[key] != stated.get(key):
            return f"its {words} is another"
    return mine.disagreement(theirs)


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Summarised):
    """The result of ``verify``. ``failures`` is empty if all holds; ``against`` says whether there was an original.

    ``resume`` holds the figures of the replayed steps, see ``ReplayFigures.to_json``, and ``steps`` the measured error
    in steps of a container under a budget, see ``container.steps``. ``links`` are the paths of the files that a delta
    needs, its base first. Of these all that it needs holds. Of a plain checkpoint ``plain`` says what was checked.
    """

    frames: int
    nbytes: int
    against: bool
    statistics: int
    unmeasured: int
    failures: tuple[str, ...]
    resume: dict[str, Any] | None = None
    steps: dict[str, Any] | None = None
    links: tuple[str, ...] = ()
    plain: PlainChecks | None = None

    def _summary(self) -> Iterator[tuple[str, str]]:
        against = f"{self.statistics:,} statistics compared, {self.unmeasured:,} tensors have none"
        yield "Verification", counted(len(self.failures), "failure") if self.failures else "holds"
        yield "failures", listed(self.failures, 1)
        frames = f"{counted(self.frames, 'frame')}, {size(self.nbytes)}"
        yield "checked", frames if self.plain is None else self.plain.line()
        if self.plain is None:
            yield "original", against if self.against else "none was given to compare with"
        yield "error", error_in_words(self.steps) if self.against else ""
        yield "needs", listed(self.links, 1)


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

    Of a directory that ranks wrote this checks all containers and what the index says of them; its ``original`` is a
    plain directory of torch.distributed.checkpoint, cut in any way. Of a delta this checks the files below it, too, as
    far as it needs them.

    Of a plain checkpoint, a file of torch or safetensors or a directory, this checks each checksum that there is, reads
    every byte, and says in ``plain`` what no checksum covers. It states no figures, so that there is no ``original``.

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
    source, original = as_path(source), None if original is None else as_path(original)
    if is_plain(source):
        with without_collection():
            checks = check_plain(source, original, progress)
        return Verification(0, checks.nbytes, False, 0, 0, (), plain=checks)
    with without_collection(), open_stored(source) as stored, Workers(threads) as workers:
        readers, tables = containers_of(stored), list[Manifest]()
        for reader in readers:
            check_frames(reader, workers, progress)
            tables.append(check_table(reader, workers))
        manifests = [reader.manifest for reader in readers]
        stated = [record.error for manifest in manifests for record in manifest.storages]
        stated += [
            error for manifest in manifests for record in manifest.parameters for error in (record.error, record.steps)
        ]
        failures, unmeasured, figures = list[str](), 0, None
        if original is not None:
            measured, values, figures = compare(stored, original, workers, progress, resume_steps)
            for reader, table, errors in zip(readers, tables, measured, strict=True):
                unmeasured += sum(reader.manifest.storages[index].error is None for index in errors.storages)
                prefix = "" if isinstance(stored, ContainerReader) else f"{reader.path.name}: "
                problems = [*table_differences(table, errors.table), *check_statistics(reader, errors)]
                failures += [prefix + problem for problem in problems]
                errors.replace_stated(reader.manifest)
            failures += values
        failures += [] if figures is None else figures.failures(max_replay_error)
        parts = [record.parts for manifest in manifests for record in manifest.storages]
        parts += [pack.parts for manifest in manifests for pack in manifest.packs]
        return Verification(
            sum(len(table.lengths) for by_part in parts for table in by_part.values()),
            stored.size,
            original is not None,
            0 if original is None else len(stated) - stated.count(None),
            unmeasured,
            tuple(failures),
            None if figures is None else figures.to_json(),
            None if original is None else step_facts(stored.manifest, count_whole),
            tuple(str(link.path) for reader in readers for link in reader.links()),
        )
