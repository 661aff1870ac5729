"""All members of a source side by side, as one checkpoint: the pipeline reads them through one address space.

Member after member takes as many addresses as it has bytes, and behind them those of its skeleton. A source that is one
file is a bundle of one member at address 0, whose tensors have no member before their names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ckpt8.checkpoint.meaning.dcp_states import JointState, in_bundle
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import DirectoryMember, is_directory, walk
from ckpt8.checkpoint.sources.skeleton import WithSkeleton
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo
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
            states: Sequence[JointState] = ()
            if isinstance(member, DcpMember):
                states = in_bundle(member.home, member.states, member.path, len(self.members))
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

    def key(self, key: str, number: int) -> str:
        """The key that a storage of member ``number`` has among those of all members."""
        return key if self.directory is None else f"{number}/{key}"

    def _shifted(self, storage: StorageInfo, number: int) -> StorageInfo:
        base = self.members[number].base
        return replace(storage, key=self.key(storage.key, number), offset=base + storage.offset)

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
