"""Compares the tensor table of a manifest with the one that its members show: seal and checksums prove neither.

The members are opened like checkpoints, which decodes their structure and no more, and planned again. What must agree
are facts: names, shapes, element types, places in storages, and the checksum fields. ``conclusions`` looks at what the
writer concluded from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.live_object import with_crc_fields
from ckpt8.checkpoint.sources.opening import stored_bundle
from ckpt8.checkpoint.tree import OpenCheckpoint
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.bundle_plan import plan_members
from ckpt8.compressing.plan import views_of
from ckpt8.compressing.policy import Policy
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK, Manifest, MemberRecord, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers
from ckpt8.inspecting.conclusions import View, parameter_problems, role_problems
from ckpt8.inspecting.opening import describe

_KEPT = (FILE, SYMLINK, DIRECTORY)
_FACTS = ("dtype", "shape", "stride", "offset", "flags")

MANIFEST, FILE_INSIDE = "the manifest", "the file in it"


def check_table(reader: ContainerReader, workers: Workers) -> Manifest:
    """The table that the members of an open container show, as a manifest.

    Raises InputError that names the first tensor of which the manifest of the container says something else.
    """
    stated = reader.manifest
    bundle = stored_bundle(reader, workers, decode=False)
    plan = plan_members(bundle, Policy.of("lossless"))
    found = describe(bundle, plan)
    pairs = _Pairs(stated, found, MANIFEST, FILE_INSIDE)
    views = {
        pairs.index_of[index]: [View(each.paths, each.ref.shape) for each in views]
        for index, views in views_of(plan.tensors).items()
        if index in pairs.index_of
    }
    problems = chain(
        pairs.differences(),
        _checksum_problems(stated, bundle),
        role_problems(stated, found, pairs.index_of, views),
        parameter_problems(stated, found, pairs.index_of, views),
    )
    for problem in problems:
        raise InputError(f"{reader.path}: {problem}; the manifest does not belong to what the container holds")
    return found


def table_differences(stored: Manifest, original: Manifest) -> Iterator[str]:
    """In what the tensors of a container differ from those of an original; both as ``describe`` gives them."""
    return _Pairs(stored, original, "the container", "the original").differences()


class _Pairs:
    """The storages of two manifests by their place. ``index_of`` has the index in ``stated`` of each in ``found``.

    ``here`` and ``there`` are what messages call the two. Members that are kept as they are have no pairs.
    """

    def __init__(self, stated: Manifest, found: Manifest, here: str, there: str) -> None:
        self._stated, self._found, self._here, self._there = stated, found, here, there
        self._misplaced: list[str] = []
        self.index_of: dict[int, int] = {}
        mine, theirs = stated.members, found.members
        by_path = {member.path: member for member in mine}
        alone = stated.directory is found.directory is None and len(mine) == len(theirs) == 1
        for member in theirs:
            other = mine[0] if alone else by_path.get(member.path)
            if member.format not in _KEPT and other is not None and other.format not in _KEPT:
                self._pair(other, member)

    def _pair(self, stated: MemberRecord, found: MemberRecord) -> None:
        mine, theirs = _places(self._stated, stated), _places(self._found, found)
        if [place for place, _ in mine] == [place for place, _ in theirs]:
            self.index_of |= {index: other for (_, other), (_, index) in zip(mine, theirs, strict=True)}
            return
        sides = ((self._stated, self._here, mine, theirs), (self._found, self._there, theirs, mine))
        for manifest, name, places, others in sides:
            known = {place for place, _ in others}
            alone = next((index for place, index in places if place not in known), None)
            if alone is not None:
                self._misplaced.append(f"{manifest.storages[alone].name}: is a storage of {name} alone")
                return
        self._misplaced.append(f"{stated.path!r} has its empty storages in another number in {self._there}")

    def differences(self) -> Iterator[str]:
        """A line for every difference, which begins with the name of the tensor or storage."""
        yield from self._misplaced
        mine: dict[str, TensorRecord] = {}
        for tensor in self._stated.tensors:
            if tensor.name in mine:
                yield f"{tensor.name}: {self._here} has it twice"
            mine[tensor.name] = tensor
        for tensor in self._found.tensors:
            if tensor.storage not in self.index_of:
                continue
            other = mine.pop(tensor.name, None)
            if other is None:
                yield f"{tensor.name}: is a tensor of {self._there}, and {self._here} has no such name"
            elif problem := self._difference(other, tensor):
                yield f"{tensor.name}: {problem}"
        for name in mine:
            yield f"{name}: is a tensor of {self._here}, and {self._there} has no such name"
        yield from self._storage_differences()

    def _difference(self, stated: TensorRecord, found: TensorRecord) -> str | None:
        for fact in _FACTS:
            mine, theirs = getattr(stated, fact), getattr(found, fact)
            if mine != theirs and (fact != "flags" or sorted(mine) != sorted(theirs)):
                return f"{fact} {_shown(mine)} in {self._here}, {_shown(theirs)} in {self._there}"
        expected = self.index_of[found.storage]
        if stated.storage != expected:
            names = [self._stated.storages[index].name for index in (stated.storage, expected)]
            return f"lies in storage {names[0]!r} in {self._here}, in {names[1]!r} in {self._there}"
        return None

    def _storage_differences(self) -> Iterator[str]:
        storages, taken = self._stated.storages, set(self.index_of.values())
        seen = {tensor.storage for tensor in self._found.tensors}
        for index, other in self.index_of.items():
            mine, theirs = storages[other], self._found.storages[index]
            if index in seen and mine.name != theirs.name:
                yield f"{mine.name}: is the storage {theirs.name!r} in {self._there}"
            elif index in seen and mine.dtype not in (theirs.dtype, DType.UINT8):
                yield f"{mine.name}: dtype {mine.dtype.label} in {self._here}, {theirs.dtype.label} in {self._there}"
        owned = {index for member in self._stated.members for _, index in [*member.segments, [0, member.skeleton]]}
        for index, record in enumerate(storages):
            if index not in owned and index not in taken:
                yield f"{record.name}: is a storage of no member"


def _places(manifest: Manifest, member: MemberRecord) -> list[tuple[tuple[int, int], int]]:
    """Offset and length of every storage of a member, with its index."""
    return [((offset, manifest.storages[index].nbytes), index) for offset, index in member.segments]


def _shown(value: object) -> object:
    return value.label if isinstance(value, DType) else value


def _checksum_problems(stated: Manifest, bundle: Bundle) -> Iterator[str]:
    """Checksum fields that are none, and those of storages with other values that the manifest does not list."""
    records = {member.path: member for member in stated.members}
    for member in bundle.found:
        record, checkpoint = records[member.path], member.checkpoint
        storages = {(storage.offset, storage.nbytes): storage for storage in checkpoint.storages}
        for offset, index in record.segments:
            storage = stated.storages[index]
            place = storages.get((offset, storage.nbytes))
            lossy = codec_from_config(storage.codec).is_lossy
            # While it is decoded, a member has zeros in every field that the manifest lists.
            if lossy and place is not None and place.nbytes and place.crc32:
                yield f"{storage.name}: the manifest does not list the field of its checksum"
        if checkpoint.format == "torch-zip" and isinstance(checkpoint, OpenCheckpoint) and record.crc_fields:
            places = {place.offset: place.crc_fields for place in with_crc_fields(checkpoint)}
            offsets = {index: offset for offset, index in record.segments}
            for field, index in record.crc_fields:
                if field not in places.get(offsets.get(index, -1), ()):
                    yield f"{stated.storages[index].name}: the manifest lists a field of its checksum that is none"
