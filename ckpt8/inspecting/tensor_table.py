"""Compares the tensor table of a manifest with the one that its members show: seal and checksums prove neither.

The members are opened like checkpoints, which decodes their structure and no more, and planned again. What must agree
are facts: names, shapes, element types, places in storages, and the checksum fields.

Roles and parameters are conclusions of the writer, which are compared with what the members show today. A writer may
know less than today. So roles may differ, but they must not contradict the members, the codecs that follow from them,
or each other. Names of parameters are not compared; the numbers of a rule are facts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import stored_bundle
from ckpt8.checkpoint.tree import NamedTensor
from ckpt8.codecs import codec_from_config
from ckpt8.compressing.plan import views_of
from ckpt8.compressing.planning import plan_members
from ckpt8.compressing.policy import Policy
from ckpt8.container.manifest import (
    DIRECTORY,
    FILE,
    SYMLINK,
    Manifest,
    MemberRecord,
    ParameterRecord,
    StorageRecord,
    TensorRecord,
)
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import DType, Role
from ckpt8.core.workers import Workers
from ckpt8.inspecting.tensors import describe
from ckpt8.optim.cards import role_of

_NUMBERS = ("step", "beta1", "beta2", "eps")
_MEASURED = {Role.WEIGHT: "weight", Role.MOMENT1: "moment", Role.MOMENT2: "moment"}
_ALWAYS_MOMENTS = (".exp_avg", ".exp_avg_sq", ".momentum_buffer")
"""Ends of the names of moments that every version knows."""


def role_problems(
    stated: Manifest, actual: Manifest, index_of: Mapping[int, int], views: Mapping[int, Sequence[NamedTensor]]
) -> Iterator[str]:
    """Roles that contradict the tree, or the codec of their storage; ``views`` are the tensors of every storage."""
    try:
        policy = Policy.of(stated.preset, [text if isinstance(text, str) else "" for text in stated.rules])
    except UsageError:
        policy = None  # this version does not know the preset or the rules
    shown = {other: actual.storages[index].role for index, other in index_of.items()}
    skeletons = {member.skeleton for member in stated.members}
    for index, record in enumerate(stated.storages):
        role, now = record.role, shown.get(index, Role.OTHER)
        if index in skeletons and role is not Role.OTHER:
            yield f"{record.name}: has the role {role.value} in the manifest, and is no tensor"
        elif Role.OTHER not in (role, now) and role is not now:
            yield f"{record.name}: has the role {role.value} in the manifest, and is a {now.value} in the file in it"
        elif policy is not None and (problem := _codec_problem(record, views.get(index, ()), policy)):
            yield f"{record.name}: has the role {role.value} in the manifest, and {problem}"


def _codec_problem(record: StorageRecord, views: Sequence[NamedTensor], policy: Policy) -> str | None:
    """Why a storage of this role does not have its codec from the preset, or None."""
    codec, paths = codec_from_config(record.codec), [path for view in views for path in view.paths]
    if policy.has_rule(paths):
        return None
    kind = "weight" if codec.copied is not None or codec.measured_as == "lattice" else codec.measured_as
    if kind not in (None, _MEASURED.get(record.role)):
        return f"is encoded as a {kind}"
    if kind is None and record.reason is None and views:
        wanted, reason = policy.choose(record.spec, paths, [view.ref.shape for view in views])
        return "is lossless for no reason" if reason or wanted.measured_as is not None else None
    return None


def parameter_problems(
    stated: Manifest, actual: Manifest, index_of: Mapping[int, int], views: Mapping[int, Sequence[NamedTensor]]
) -> Iterator[str]:
    """Parameters that share a moment, have a moment of another slot or parameter, or other numbers in their rule.

    Also lossy moments of no parameter: no error of an update would tell of them.
    """
    owners = {
        index_of[index]: (parameter, slot)
        for parameter in actual.parameters
        for slot, index in parameter.moments.items()
        if index in index_of
    }
    taken: set[int] = set()
    for parameter in stated.parameters:
        moments = list(parameter.moments.values())
        if not taken.isdisjoint(moments) or len(set(moments)) < len(moments):
            yield f"{parameter.name}: shares a moment with another parameter in the manifest"
        taken.update(moments)
        if problem := _parameter_problem(parameter, stated, owners):
            yield f"{parameter.name}: {problem}"
    for index in owners:
        record = stated.storages[index]
        is_known = any(view.paths[0].endswith(_ALWAYS_MOMENTS) for view in views.get(index, ()))
        if is_known and index not in taken and codec_from_config(record.codec).measured_as is not None:
            yield f"{record.name}: is a moment of no parameter in the manifest"


def _parameter_problem(
    parameter: ParameterRecord, stated: Manifest, owners: Mapping[int, tuple[ParameterRecord, str]]
) -> str | None:
    """Why the moments or the rule of a parameter cannot be its own, or None."""
    known = {}
    for slot, index in parameter.moments.items():
        record, (owner, slot_there) = stated.storages[index], owners.get(index, (None, slot))
        if slot_there != slot:
            return f"{record.name} is its {slot} in the manifest, and its {slot_there} in the file in it"
        if record.role not in (Role.OTHER, role_of(slot)):
            return f"{record.name} is its {slot}, and has the role {record.role.value} in the manifest"
        if owner is not None:
            known[id(owner)] = owner
    if len(known) > 1:
        return "has moments of several parameters in the manifest"
    for owner in known.values():
        mine, theirs = parameter.rule or {}, owner.rule or {}
        for key in _NUMBERS if mine.get("kind") == theirs.get("kind") else ():
            if mine.get(key) != theirs.get(key):
                return f"{key} {mine.get(key)!r} in the manifest, {theirs.get(key)!r} in the file in it"
    return None


_KEPT = (FILE, SYMLINK, DIRECTORY)
_FACTS = ("dtype", "shape", "stride", "offset", "flags")


def check_table(reader: ContainerReader, workers: Workers) -> Manifest:
    """The table that the members of an open container show, as a manifest.

    Raises InputError that names the first tensor of which the manifest of the container says something else.
    """
    stated = reader.manifest
    bundle = stored_bundle(reader, workers, decode=False)
    plan = plan_members(bundle, Policy.of("lossless"))
    actual = describe(bundle, plan)
    pairs = _Pairs(stated, actual, "the manifest", "the file in it")
    views = {pairs.index_of.get(index, -1): tensors for index, tensors in views_of(plan.tensors).items()}
    problems = chain(
        pairs.differences(),
        _checksum_problems(stated, bundle),
        role_problems(stated, actual, pairs.index_of, views),
        parameter_problems(stated, actual, pairs.index_of, views),
    )
    for problem in problems:
        raise InputError(f"{reader.path}: {problem}; the manifest does not belong to what the container holds")
    return actual


def table_differences(stored: Manifest, original: Manifest) -> Iterator[str]:
    """In what the tensors of a container differ from those of an original; both as ``describe`` gives them."""
    return _Pairs(stored, original, "the container", "the original").differences()


class _Pairs:
    """The storages of two manifests by their place. ``index_of`` has the index in ``stated`` of each in ``found``.

    ``here`` and ``there`` are what messages call the two. Members that are kept as they are have no pairs.
    """

    def __init__(self, stated: Manifest, actual: Manifest, here: str, there: str) -> None:
        self._stated, self._found, self._here, self._there = stated, actual, here, there
        self._misplaced: list[str] = []
        self.index_of: dict[int, int] = {}
        mine, theirs = stated.members, actual.members
        by_path = {member.path: member for member in mine}
        alone = stated.directory is actual.directory is None and len(mine) == len(theirs) == 1
        for member in theirs:
            other = mine[0] if alone else by_path.get(member.path)
            if member.format not in _KEPT and other is not None and other.format not in _KEPT:
                self._pair(other, member)

    def _pair(self, stated: MemberRecord, actual: MemberRecord) -> None:
        mine, theirs = (
            [((offset, manifest.storages[index].nbytes), index) for offset, index in member.segments]
            for manifest, member in ((self._stated, stated), (self._found, actual))
        )
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

    def _difference(self, stated: TensorRecord, actual: TensorRecord) -> str | None:
        for fact in _FACTS:
            mine, theirs = getattr(stated, fact), getattr(actual, fact)
            if mine != theirs and (fact != "flags" or sorted(mine) != sorted(theirs)):
                texts = [value.label if isinstance(value, DType) else value for value in (mine, theirs)]
                return f"{fact} {texts[0]} in {self._here}, {texts[1]} in {self._there}"
        expected = self.index_of[actual.storage]
        if stated.storage != expected:
            names = [self._stated.storages[index].name for index in (stated.storage, expected)]
            return f"lies in storage {names[0]!r} in {self._here}, in {names[1]!r} in {self._there}"
        return None

    def _storage_differences(self) -> Iterator[str]:
        storages, taken = self._stated.storages, set(self.index_of.values())
        seen = {tensor.storage for tensor in self._found.tensors}
        for index, other in self.index_of.items():
            mine, theirs = storages[other], self._found.storages[index]
            if index not in seen:
                continue
            if mine.name != theirs.name:
                yield f"{mine.name}: is the storage {theirs.name!r} in {self._there}"
            elif mine.dtype not in (theirs.dtype, DType.UINT8):
                yield f"{mine.name}: dtype {mine.dtype.label} in {self._here}, {theirs.dtype.label} in {self._there}"
        owned = {index for member in self._stated.members for _, index in [*member.segments, [0, member.skeleton]]}
        for index, record in enumerate(storages):
            if index not in owned and index not in taken:
                yield f"{record.name}: is a storage of no member"


def _checksum_problems(stated: Manifest, bundle: Bundle) -> Iterator[str]:
    """Checksum fields that are none, and those of storages with other values that the manifest does not list."""
    records = {member.path: member for member in stated.members}
    for member in bundle.opened:
        record, checkpoint = records[member.path], member.checkpoint
        storages = {(storage.offset, storage.nbytes): storage for storage in checkpoint.storages}
        for offset, index in record.segments:
            storage = stated.storages[index]
            place = storages.get((offset, storage.nbytes))
            lossy = codec_from_config(storage.codec).is_lossy
            # While it is decoded, a member has zeros in every field that the manifest lists.
            if lossy and place is not None and place.nbytes and place.crc32:
                yield f"{storage.name}: the manifest does not list the field of its checksum"
        if checkpoint.format == "torch-zip" and record.crc_fields:
            places = {place.offset: place.crc_fields or place.zero_fields for place in checkpoint.storages}
            offsets = {index: offset for offset, index in record.segments}
            for field, index in record.crc_fields:
                if field not in places.get(offsets.get(index, -1), ()):
                    yield f"{stated.storages[index].name}: the manifest lists a field of its checksum that is none"
