"""All members of a source side by side, as one checkpoint: the pipeline reads them through one address space.

Member after member takes as many addresses as it has bytes, and behind them those of its skeleton. A source that is one
file is a bundle of one member at address 0, whose tensors have no member before their names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.dcp_states import JointState, in_bundle, joint_parameters
from ckpt8.checkpoint.meaning.deepspeed_universal import Universal
from ckpt8.checkpoint.meaning.names_beside import NamesBeside
from ckpt8.checkpoint.meaning.roles import Names, short_name
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import DirectoryMember, is_directory, walk
from ckpt8.checkpoint.sources.skeleton import WithSkeleton
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo
from ckpt8.compressing.master_copies import refer_to_masters
from ckpt8.compressing.plan import Parameter, Plan, Stream, Unit, make_plan, plan_joint
from ckpt8.compressing.policy import Policy
from ckpt8.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Member:
    """One member. Its storages have the indices from ``first`` on, its bytes the addresses from ``base`` on.

    ``states`` are its slices of the optimizer state of a distributed checkpoint.
    """

    path: str
    checkpoint: WithSkeleton
    first: int = 0
    base: int = 0
    states: Sequence[JointState] = ()

    @property
    def skeleton(self) -> int:
        """Index of the skeleton, which is its last storage."""
        return self.first + len(self.checkpoint.storages) - 1


class Bundle:
    """A Checkpoint of all members. ``label`` names the source in messages, ``directory`` is its name if it is one.

    ``check`` is called for what ``check_unchanged`` of a member cannot see. Keys of storages have the number of their
    member in front, unless the source is one file.
    """

    def __init__(
        self,
        members: Sequence[DirectoryMember],
        label: str,
        directory: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.label = label
        self.directory = directory
        self._check = check
        self.members: list[Member] = []
        self.storages: Sequence[StorageInfo] = ()
        storages: list[StorageInfo] = []
        base = 0
        for member in members:
            whole = WithSkeleton(member.checkpoint, member.reason)
            states = (
                () if member.home is None else in_bundle(member.home, member.states, member.path, len(self.members))
            )
            self.members.append(Member(member.path, whole, len(storages), base, states))
            storages += [self._shifted(storage, len(self.members) - 1) for storage in whole.storages]
            base += whole.size + whole.skeleton.nbytes
        self.storages = storages
        self.format = members[0].checkpoint.format if directory is None else "directory"
        self.size = sum(member.checkpoint.size for member in self.members)
        self.tree: Any = None if directory is not None else self.members[0].checkpoint.tree
        self._keeps_tensors = any(member.holds_tensors for member in members)
        self._bases = [member.base for member in self.members]

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> Bundle:
        """A single file of that name."""
        return cls([DirectoryMember(name, checkpoint)], name)

    def _key(self, key: str, number: int) -> str:
        return key if self.directory is None else f"{number}/{key}"

    def _shifted(self, storage: StorageInfo, number: int) -> StorageInfo:
        base = self.members[number].base
        return replace(storage, key=self._key(storage.key, number), offset=base + storage.offset)

    @property
    def holds_tensors(self) -> bool:
        """Whether any member has a storage that is not empty, or is kept as it is with tensors in it."""
        return self._keeps_tensors or any(
            storage.nbytes for member in self.members for storage in member.checkpoint.source_storages
        )

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the member at the address ``offset``. Thread-safe. Raises InputError."""
        member = self.members[bisect_right(self._bases, offset) - 1]
        member.checkpoint.read_into(offset - member.base, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when a member, or what the directory holds, changed since it was opened."""
        for member in self.members:
            member.checkpoint.check_unchanged()
        self._check()

    def plan(self, policy: Policy) -> Plan:
        """The plan of all members, one after the other, with indices and places as they are here."""
        names = Names()
        plan = Plan([])
        beside = NamesBeside([(member.path, member.checkpoint) for member in self.members])
        universal = Universal(self.members)
        for number, member in enumerate(self.members):
            names.prefix = "" if self.directory is None else f"{member.path}:"
            own = make_plan(member.checkpoint, policy, names, universal.role(member.path))
            named = self._parameter_names(member, beside) if any(unit.parameter for unit in own.units) else {}
            plan.units += [self._unit(unit, number, named) for unit in own.units]
            plan.tensors += [(tensor, member.first + index) for tensor, index in own.tensors]
        joint = joint_parameters(state for member in self.members for state in member.states)
        joint += universal.parameters()
        if joint:
            plan_joint(self, plan, joint)
        refer_to_masters(plan, self, [(member.path, member.checkpoint.tree) for member in self.members], policy)
        return plan

    def _parameter_names(self, member: Member, beside: NamesBeside) -> Mapping[str, str]:
        """Names for parameters of a member from the weights with it, by the name that they have without them."""
        before = "" if self.directory is None else f"{member.path}:"
        return {before + place: short_name(before + name) for place, name in beside.of(member.path).items()}

    def _unit(self, unit: Unit, number: int, names: Mapping[str, str]) -> Unit:
        streams = tuple(self._stream(stream, number) for stream in unit.streams)
        parameter = unit.parameter
        if parameter is not None:
            parameter = replace(self._parameter(parameter, number), name=names.get(parameter.name, parameter.name))
        return Unit(streams, parameter)

    def _stream(self, stream: Stream, number: int) -> Stream:
        index = self.members[number].first + stream.index
        return replace(stream, index=index, storage=self.storages[index])

    def _parameter(self, parameter: Parameter, number: int) -> Parameter:
        first = self.members[number].first
        confidence = parameter.confidence
        if confidence is not None:
            rows, columns = (replace(ref, key=self._key(ref.key, number)) for ref in confidence)
            confidence = rows, columns
        moments = {slot: first + index for slot, index in parameter.moments.items()}
        return replace(parameter, moments=moments, confidence=confidence)


@contextmanager
def open_bundle(path: Path, *, decode: bool = True) -> Iterator[Bundle]:
    """Open a checkpoint file, or a directory with everything in it. Raises InputError.

    ``decode``: slices of distributed checkpoints that are compressed are presented as if they were not; else the files
    are kept as they are.
    """
    if not is_directory(path):
        with open_checkpoint(path) as checkpoint:
            yield Bundle.of(checkpoint, path.name)
        return
    entries = walk(path)

    def check() -> None:
        if walk(path) != entries:
            raise InputError(f"{path}: changed while it was read; nothing was written")

    with open_directory(path, entries, decode=decode) as members:
        yield Bundle(members, path.name, directory_name(path), check)


def directory_name(path: Path) -> str:
    """The name of a directory however it was given: ``.``, ``run/``, ``run/..``. Raises InputError for the root."""
    name = path.name if path.name not in ("", "..") else path.resolve().name
    if not name:
        raise InputError(f"{path}: the root of the file system; give a checkpoint directory")
    return name
