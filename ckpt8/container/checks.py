"""Checks what a container states of its parts: references, bases, members, paths and frames. Nobody is trusted.

``check_references``: a reference costs nothing to store, so limits keep a small file from asking for much work: a copy
is as long as its runs, padding is no more than half of it, its runs touch few chunks of masters for its length, and no
master is copied more than a few times.

``check_members``: the bytes of a member are runs of the skeleton between runs of storages.

``check_paths``: nothing lands outside of the directory of a member. Its path is relative, its components are names, and
everything above it is a directory, never a file or a link. A link goes up with leading ``..`` only, and no higher than
its directory: resolved step by step, over other links or not, it then stays inside.

``Locator`` and ``check_frame_count``: the frames of every part in the entries of a container fit what the manifest
states.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, dropwhile, pairwise
from typing import NamedTuple

from ckpt8.codecs import Codec
from ckpt8.codecs.base import Copied, Factors
from ckpt8.container import header
from ckpt8.container.header import FRAME, Entry
from ckpt8.container.manifest import (
    DIRECTORY,
    FILE,
    MAX_PATH_BYTES,
    SYMLINK,
    FrameTable,
    Manifest,
    MemberRecord,
    Pack,
    StorageRecord,
    planes,
)
from ckpt8.core.errors import DamagedError, InputError, require
from ckpt8.core.files.source_file import crc32
from ckpt8.core.json_text import is_unicode
from ckpt8.core.tensors import DType, PartSpec

MOST_COPIES = 4
"""The most copies of a master, counted by its elements."""

_WORK = 4
"""The most elements of masters to decode for every element of a copy, on top of as many chunks."""


class ReferenceCheck:
    """Checks references one after the other and counts the copies of every master.

    ``numel_of`` gives the elements of a storage, None if it is no master of the copy.
    """

    def __init__(self, numel_of: Callable[[int, Copied], int | None]) -> None:
        self._numel_of = numel_of
        self._elements: Counter[int] = Counter()

    def problem(self, copied: Copied) -> str | None:
        """Why a reference is not sound; None for a sound one, whose copies then count."""
        padding = work = 0
        more = Counter[int]()
        for storage, start, count in copied.runs:
            if storage is None:
                padding += count
                continue
            numel = self._numel_of(storage, copied)
            if numel is None or start + count > numel:
                return "refers to something other than elements of fp32 masters"
            work += min(numel, -(-(start + count) // FRAME) * FRAME) - start // FRAME * FRAME
            more[storage] += count
        if 2 * padding > copied.numel:
            return "is mostly padding"
        if work > _WORK * (copied.numel + FRAME):
            return "refers to masters in too many small pieces"
        if any(
            self._elements[master] + count > MOST_COPIES * (self._numel_of(master, copied) or 0)
            for master, count in more.items()
        ):
            return "is one copy too many of its masters"
        self._elements += more
        return None


def check_references(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a reference that is not sound."""
    storages = manifest.storages

    def numel_of(storage: int, copied: Copied) -> int | None:
        if storage >= len(storages) or storages[storage].dtype is not DType.FLOAT32:
            return None
        codec = codec_of(storage)
        return storages[storage].numel if codec.keeps_masters or (codec.may_be_copied and not copied.is_exact) else None

    check = ReferenceCheck(numel_of)
    for index, record in enumerate(storages):
        copied = codec_of(index).copied
        if copied is not None:
            problem = check.problem(copied)
            if copied.numel != record.numel:
                problem = f"refers to {copied.numel} elements for the {record.numel} that it has"
            require(problem is None, f"{where}: {record.name}: {problem}")


def check_companions(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a storage whose companion is missing, no float, of another length or a dependent one."""
    storages = manifest.storages
    for index, record in enumerate(storages):
        for name, other in codec_of(index).companion_storages.items():
            require(
                type(other) is int and 0 <= other < len(storages) and storages[other].numel == record.numel,
                f"{where}: {record.name}: {name} is not a storage of as many elements",
            )
            require(
                storages[other].dtype.is_plane_float,
                f"{where}: {record.name}: {name} is a storage of {storages[other].dtype.label}, not of floats",
            )
            require(
                not codec_of(other).companions and codec_of(other).copied is None,
                f"{where}: {record.name}: {name} is coded with another storage itself",
            )
        for name, factors in codec_of(index).factored.items():
            if problem := _factors_problem(factors, manifest, codec_of, record.numel):
                raise InputError(f"{where}: {record.name}: {name} {problem}")


def _factors_problem(factors: Factors, manifest: Manifest, codec_of: Callable[[int], Codec], numel: int) -> str | None:
    """Why statistics do not give ``numel`` elements; None if they do."""
    storages = manifest.storages
    if max(factors.rows, factors.columns) >= len(storages):
        return "is not a pair of storages"
    for index, size in ((factors.rows, factors.width), (factors.columns, factors.height)):
        record, codec = storages[index], codec_of(index)
        if record.dtype is not DType.FLOAT32 or codec.is_lossy or codec.companions or codec.copied is not None:
            return "has statistics that are not kept exactly in fp32"
        # A chunk of elements takes no more than a chunk of each.
        if record.numel * size != numel or record.numel > FRAME:
            return "has statistics of another shape"
    return None if numel % (factors.height * factors.width) == 0 else "has statistics of another shape"


def check_deltas(manifest: Manifest, codec_of: Callable[[int], Codec], where: str) -> None:
    """Raise InputError for a storage that cannot be a difference."""
    skeletons = {member.skeleton for member in manifest.members}
    for index, record in enumerate(manifest.storages):
        if record.base is not None:
            codec = codec_of(index)
            require(manifest.base, f"{where}: {record.name}: is a difference, but the file names no base")
            require(index not in skeletons, f"{where}: {record.name}: is a difference, but no tensor")
            require(
                not codec.companions and codec.copied is None,
                f"{where}: {record.name}: {codec.id} cannot be kept as a difference",
            )


CRC_BYTES = 4


class Run(NamedTuple):
    """Bytes ``start`` to ``stop`` of the member, which are those from ``origin`` on of one stored record."""

    start: int
    stop: int
    storage: int
    origin: int


def member_runs(manifest: Manifest, member: int, where: str) -> list[Run]:
    """Cut a member at the borders of its storages. Raises InputError where storages and skeleton do not fill it."""
    record = manifest.members[member]
    runs: list[Run] = []
    position = skeleton = 0
    seen = {record.skeleton}
    for offset, index in [*record.segments, [record.size, -1]]:
        if offset < position or index in seen:
            raise InputError(f"{where}: manifest is malformed: storages of {record.path!r} overlap or repeat")
        if position < offset:
            runs.append(Run(position, offset, record.skeleton, skeleton))
            skeleton += offset - position
        position = offset
        if index >= 0 and manifest.storages[index].nbytes:
            position += manifest.storages[index].nbytes
            runs.append(Run(offset, position, index, 0))
        seen.add(index)
    require(
        position == record.size and skeleton == manifest.storages[record.skeleton].nbytes,
        f"{where}: manifest is malformed: {record.path!r} has another size than its parts",
    )
    return runs


def check_members(manifest: Manifest, where: str) -> None:
    """Raise InputError unless every member is filled exactly and its checksum fields lie in its skeleton."""
    require(manifest.members, f"{where}: manifest is malformed: it has no member")
    taken: set[int] = set()
    for index, record in enumerate(manifest.members):
        runs = member_runs(manifest, index, where)
        own = {record.skeleton, *(storage for _, storage in record.segments)}
        require(not own & taken, f"{where}: manifest is malformed: {record.path!r} has storages of another member")
        taken |= own
        _check_crc_fields(record, [run for run in runs if run.storage == record.skeleton], where)


def _check_crc_fields(record: MemberRecord, skeleton: list[Run], where: str) -> None:
    at = free_from = 0
    for place, _ in sorted(record.crc_fields):
        while at < len(skeleton) and skeleton[at].stop < place + CRC_BYTES:
            at += 1
        if at == len(skeleton) or place < max(skeleton[at].start, free_from):
            raise InputError(f"{where}: manifest is malformed: a checksum field lies outside the skeleton")
        free_from = place + CRC_BYTES


MAX_NAME_BYTES = 255
"""The longest name in a directory that systems take."""

MAX_COMPONENTS = 256
"""The most names in a path: Python cannot remove deeper directories."""

_SEPARATORS = ("/", "\0") if os.sep == "/" else ("/", "\0", os.sep, ":")


def is_plain_name(name: str) -> bool:
    """Whether a text names an entry of a directory and nothing else."""
    return name not in ("", ".", "..") and not any(mark in name for mark in _SEPARATORS)


def name_problem(name: str) -> str | None:
    """What is wrong with a name that a file states, of a file beside it; None where every system takes it."""
    if not is_plain_name(name):
        return "is no name of a file"
    if not is_unicode(name):
        return "is not valid UTF-8"
    return f"has a name longer than {MAX_NAME_BYTES} bytes" if len(name.encode()) > MAX_NAME_BYTES else None


def path_problem(path: str) -> str | None:
    """What is wrong with the path of a file in a directory, which a file states; None where every system takes it."""
    if not is_unicode(path):
        return "is not valid UTF-8"
    if len(path.encode()) > MAX_PATH_BYTES:
        return f"is longer than {MAX_PATH_BYTES} bytes"
    names = path.split("/")
    if len(names) > MAX_COMPONENTS:
        return f"has more than {MAX_COMPONENTS} components"
    if not all(map(is_plain_name, names)):
        return "leaves its directory"
    return next(filter(None, map(name_problem, names)), None)


def link_stays_inside(path: str, target: str) -> bool:
    """Whether a link at ``path``, whose own directory is no link, leads nowhere but into the member directory."""
    components = target.split("/")
    rest = list(dropwhile("..".__eq__, components))
    up = len(components) - len(rest)
    if rest and rest[-1] == "":
        rest.pop()  # a slash at the end says that it is a directory
    return up <= path.count("/") and bool(components[0]) and all(is_plain_name(part) or part == "." for part in rest)


def check_paths(manifest: Manifest, where: str) -> None:
    """Raise InputError unless the members of a directory can be written side by side, and only there."""
    malformed = f"{where}: manifest is malformed:"
    if manifest.directory is None:
        require(len(manifest.members) == 1, f"{malformed} {len(manifest.members)} members, but no directory")
        return
    seen: set[str] = set()
    for member in manifest.members:
        if (problem := path_problem(member.path)) is not None:
            raise InputError(f"{where}: holds a member {member.path[:80]!r}, whose path {problem}; nothing is written")
        shown = repr(member.path[:80])
        require(member.format != DIRECTORY or not member.size, f"{malformed} the directory {shown} has content")
        require(
            member.format != SYMLINK or 0 < member.size <= MAX_PATH_BYTES,
            f"{malformed} the link {shown} has {member.size} bytes",
        )
        require(
            member.format not in (FILE, SYMLINK, DIRECTORY) or not (member.segments or member.crc_fields),
            f"{malformed} {shown} is no checkpoint but has storages",
        )
        require(member.path not in seen, f"{malformed} it has two members {shown}")
        seen.add(member.path)
    # In this order whatever lies below a path follows it at once.
    for above, below in pairwise(sorted(path.split("/") for path in seen)):
        shown = repr("/".join(below)[:80])
        require(below[: len(above)] != above, f"{malformed} {shown} lies below another member")


_FRAME_RATIO = 1 << 15
"""The most bytes that a zstd frame holds for each stored one: a block of at most 128 KiB takes at least four bytes."""


class PartPlace(NamedTuple):
    """Where the frames of one part lie: offset in the file, stored length and crc32 of each."""

    offsets: list[int]
    table: FrameTable


Places = Mapping[str, PartPlace]
"""The place of every part by name."""

NOWHERE: Places = {}
"""The places of a storage that has no frames of its own."""


def layout_of(record: StorageRecord | Pack, codec: Codec) -> dict[str, PartSpec]:
    """The specification of each part of a storage or a pack."""
    if isinstance(record, StorageRecord):
        return codec.layout(record.spec)
    return {part: own for part, (own, _) in header.pack_layout(codec, record.spec, record.numels).items()}


def slab_entries(
    record: StorageRecord | Pack, layout: Mapping[str, PartSpec], slab: int
) -> Iterator[tuple[range, list[tuple[str, str, range]]]]:
    """The chunks of every slab, and its entries: the part, the name and the numbers of the frames of each."""
    shares = isinstance(record, Pack)
    slabs = header.slab_chunks(record.numel, slab)
    for number, chunks in enumerate(slabs):
        yield (
            chunks,
            [
                (
                    part,
                    header.pack_entry(record.name, part)
                    if shares
                    else header.entry_name(record.name, part, number, len(slabs)),
                    range(chunks.start * planes(spec), chunks.stop * planes(spec)),
                )
                for part, spec in layout.items()
            ],
        )


@dataclass(frozen=True, slots=True)
class Locator:
    """Takes the ``entries`` of storages and packs from those of the container. Raises InputError.

    ``where`` opens messages. ``start`` is the offset of the first entry, ``slab`` the elements of a slab.
    """

    where: str
    start: int
    slab: int
    entries: dict[str, Entry]

    def places(self, record: StorageRecord | Pack, codec: Codec) -> Places:
        """The places of a pack, or of a storage that is in none."""
        require(
            isinstance(record, StorageRecord) or not (codec.companions or codec.copied is not None),
            f"{self.where}: {record.name}: storages that share entries cannot depend on others",
        )
        require(
            codec.accepts(record.spec),
            f"{self.where}: {record.name}: {codec.id} does not hold {record.dtype.label}",
        )
        layout = layout_of(record, codec)
        require(set(record.parts) == set(layout), f"{self.where}: {record.name}: parts do not fit its codec")
        if not layout:
            return NOWHERE
        if isinstance(record, StorageRecord):
            check_frame_count(record, self.where)
        names: dict[str, dict[str, int]] = {part: {} for part in layout}
        for _, entries in slab_entries(record, layout, self.slab):
            for part, name, frames in entries:
                names[part][name] = len(frames)
        return {part: self._part(record, part, spec, names[part]) for part, spec in layout.items()}

    def _part(self, record: StorageRecord | Pack, part: str, spec: PartSpec, names: Mapping[str, int]) -> PartPlace:
        """Where the frames of a part lie; ``names`` are those of its entries, each with its number of frames."""
        table = record.parts[part]
        nbytes = self._plane_bytes(record, part, spec)
        # Bound the memory that a declared size can cause by the bytes that are really there.
        if sum(table.lengths) * _FRAME_RATIO < nbytes:
            raise InputError(f"{self.where}: {record.name}: {part!r} cannot hold the {nbytes} bytes it must hold")
        offsets: list[int] = []
        position = 0
        for name, count in names.items():
            entry = self.entries.pop(name, None)
            lengths = table.lengths[position : position + count]
            if entry is None or sum(lengths) != entry.nbytes:
                raise InputError(f"{self.where}: {record.name}: frames of {part!r} do not fill their entry")
            offsets += accumulate(lengths[:-1], initial=self.start + entry.start)
            position += len(lengths)
        if position < len(table.lengths):
            raise InputError(f"{self.where}: {record.name}: {part!r} has more frames than elements")
        return PartPlace(offsets, table)

    def _plane_bytes(self, record: StorageRecord | Pack, part: str, spec: PartSpec) -> int:
        """The bytes of all planes of a part. Raises InputError where the modes of symbols do not fit its frames."""
        table = record.parts[part]
        if not spec.is_symbols and not table.modes:
            return spec.nbytes
        chunks = zip(table.modes, range(spec.numel, 0, -FRAME), strict=False)
        lengths = [length for mode, rest in chunks for length in mode.plane_lengths(min(FRAME, rest))]
        # Every chunk of symbols has a mode, and stored bytes for those planes that this mode uses.
        are_stored = list(map(bool, table.lengths)) == list(map(bool, lengths))
        require(
            spec.is_symbols and len(table.modes) == header.chunk_count(spec.numel) and are_stored,
            f"{self.where}: {record.name}: modes of {part!r} do not fit its frames",
        )
        return sum(lengths)


def check_frame(stored: bytes | memoryview, expected: int, where: str) -> None:
    """Raise DamagedError when stored bytes do not have the ``expected`` crc32."""
    if crc32(stored) != expected:
        raise DamagedError(f"{where}: checksum does not match; the file is damaged")


def check_frame_count(record: StorageRecord | Pack, where: str) -> None:
    """Bound the work that a declared element count can cause by the frames that are really there."""
    chunks = header.chunk_count(record.numel)
    require(
        all(len(table.lengths) >= chunks for table in record.parts.values()),
        f"{where}: {record.name}: has fewer frames than its {record.numel} elements need",
    )
