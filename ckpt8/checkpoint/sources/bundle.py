"""All members of a source, one after the other, as one checkpoint: the pipeline reads them through one address space.

Each member takes as many addresses as it has bytes, and behind them those of its skeleton. A source of one file is a
bundle of one member at address 0, whose tensors have no member before their names. The skeleton of a file is all its
bytes outside its storages, as one more storage behind the end of the file.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt8.checkpoint.meaning.names import rank_file
from ckpt8.checkpoint.readers import READERS
from ckpt8.checkpoint.readers.dcp import DcpMember
from ckpt8.checkpoint.readers.entries import DirectoryMember, refuse_share
from ckpt8.checkpoint.tree import Checkpoint, OpenCheckpoint, StorageInfo, cut_by_runs, gaps
from ckpt8.container.manifest import SKELETON
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array


class WithSkeleton:
    """A checkpoint whose last storage is the skeleton, at the offset that is the size of the source.

    ``reason`` says why a source that may be a checkpoint has nothing but a skeleton.
    """

    def __init__(self, checkpoint: Checkpoint, reason: str | None = None) -> None:
        self._checkpoint, self.reason = checkpoint, reason
        self.format, self.size = checkpoint.format, checkpoint.size
        self.tree: Any = checkpoint.tree
        # Where each run outside the storages begins: in the skeleton, and in the source.
        self._runs = [(0, 0)]
        length = 0
        for position, nbytes in gaps(checkpoint.storages, self.size):
            self._runs.append((length, position))
            length += nbytes
        self.skeleton = StorageInfo(SKELETON, DType.UINT8, self.size, length)
        self.source_storages = checkpoint.storages
        self.storages: Sequence[StorageInfo] = (*checkpoint.storages, self.skeleton)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the source or, behind its end, from the skeleton."""
        if offset < self.size:
            self._checkpoint.read_into(offset, buffer)
            return
        for (_, position), at, part in cut_by_runs(self._runs, offset - self.size, buffer):
            self._checkpoint.read_into(position + at, part)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of a storage of the source."""
        self._checkpoint.read_each(starts, length, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""
        self._checkpoint.check_unchanged()


@dataclass(frozen=True, slots=True)
class Member:
    """One member. Its storages have the indices from ``first`` on, its bytes the addresses from ``base`` on."""

    path: str
    checkpoint: WithSkeleton
    first: int = 0
    base: int = 0

    @property
    def skeleton(self) -> int:
        """Index of the skeleton, which is its last storage."""
        return self.first + len(self.checkpoint.storages) - 1


class Bundle:
    """An open source: a Checkpoint of all its members. ``opened`` are the members as readers gave them.

    ``label`` names the source in messages; ``directory`` is its name if it is a directory, or a container of one.
    ``check`` looks for changes that ``check_unchanged`` of a member cannot see. Keys of storages begin with the number
    of their member, unless the source is one file.
    """

    def __init__(
        self,
        path: Path,
        opened: Sequence[DirectoryMember],
        directory: str | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.path, self.label = path, path.name
        self.opened, self.directory, self._check = opened, directory, check

    @classmethod
    def of(cls, checkpoint: Checkpoint, name: str) -> Bundle:
        """A single file of that name."""
        return cls(Path(name), [DirectoryMember(name, checkpoint)])

    @property
    def checkpoints(self) -> list[DirectoryMember]:
        """The members that a reader knows."""
        return [member for member in self.opened if member.checkpoint.format in READERS]

    def keep_all(self, *, needs_room: bool = False) -> None:
        """Have what was read of a file in a store kept on the disk: see ``SourceFile.keep_all``."""
        for member in self.opened:
            if isinstance(member.checkpoint, OpenCheckpoint):
                member.checkpoint.file.keep_all(needs_room=needs_room)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which addresses and lengths will be read, in their order in each file. Skeletons are there."""
        members, wanted = self.members, dict[int, list[tuple[int, int]]]()
        for start, length in ranges:
            number = bisect_right(members, start, key=lambda member: member.base) - 1
            wanted.setdefault(number, []).append((start - members[number].base, length))
        for number, spans in wanted.items():
            checkpoint = self.opened[number].checkpoint
            if isinstance(checkpoint, OpenCheckpoint):
                checkpoint.file.expect(span for span in spans if span[0] < checkpoint.size)

    @property
    def distributed(self) -> list[DcpMember]:
        """The files of distributed checkpoints."""
        return [member for member in self.opened if isinstance(member, DcpMember)]

    def only(self, path: str) -> Bundle:
        """One member, or the folder of a distributed checkpoint, as a source. Raises UsageError with the choices."""
        distributed = (m for m in self.opened if isinstance(m, DcpMember) or rank_file(m.path, m.checkpoint.tree))
        folders = {member.path.rpartition("/")[0] for member in distributed} - {""}
        if path.rstrip("/") in folders:
            inside = [member for member in self.opened if member.path.startswith(f"{path.rstrip('/')}/")]
            return Bundle(self.path, inside, path)
        chosen = [member for member in self.checkpoints if member.path == path]
        if not chosen:
            choices = listed([*(member.path for member in self.checkpoints), *sorted(folders)], limit=20)
            raise UsageError(f"{self.path}: --member {path!r} is not one of {choices or 'nothing that can be read'}")
        refuse_share(chosen[0].checkpoint.tree, f"{self.path}: {path}")
        return Bundle(self.path, chosen)

    @cached_property
    def members(self) -> list[Member]:
        """The members with their places in the bundle."""
        members: list[Member] = []
        first = base = 0
        for member in self.opened:
            whole = WithSkeleton(member.checkpoint, member.reason)
            members.append(Member(member.path, whole, first, base))
            first += len(whole.storages)
            base += whole.size + whole.skeleton.nbytes
        return members

    @cached_property
    def storages(self) -> Sequence[StorageInfo]:
        """The storages of all members, skeletons among them, with their addresses in the bundle."""
        if self.directory is None and len(self.members) == 1:
            return self.members[0].checkpoint.storages
        return [
            StorageInfo(
                self.key(storage.key, number),
                storage.dtype,
                member.base + storage.offset,
                storage.nbytes,
                storage.crc32,
                storage.crc_fields,
            )
            for number, member in enumerate(self.members)
            for storage in member.checkpoint.storages
        ]

    @property
    def format(self) -> str:
        """The format of the one file, or ``directory``."""
        return self.opened[0].checkpoint.format if self.directory is None else "directory"

    @property
    def size(self) -> int:
        """Bytes of all members."""
        return sum(member.checkpoint.size for member in self.opened)

    @property
    def tree(self) -> Any:
        """The tree of the one file; None for a directory."""
        return self.opened[0].checkpoint.tree if self.directory is None else None

    def key(self, key: str, number: int) -> str:
        """The key that a storage of member ``number`` has among those of all members."""
        return key if self.directory is None else f"{number}/{key}"

    @property
    def holds_tensors(self) -> bool:
        """Whether any member has a storage with bytes, or is kept as it is with tensors in it."""
        return any(
            member.holds_tensors or any(storage.nbytes for storage in member.checkpoint.storages)
            for member in self.opened
        )

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the member at the address ``offset``. Thread-safe. Raises InputError."""
        member = self._member_at(offset)
        member.checkpoint.read_into(offset - member.base, buffer)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of one storage, which is no skeleton. Thread-safe. Raises InputError."""
        member = self._member_at(int(starts[0]))
        member.checkpoint.read_each(starts - member.base, length, buffer)

    def _member_at(self, offset: int) -> Member:
        return self.members[bisect_right(self.members, offset, key=lambda member: member.base) - 1]

    def check_unchanged(self) -> None:
        """Raise InputError when a member, or the list of files in the directory, changed since it was opened."""
        for member in self.opened:
            member.checkpoint.check_unchanged()
        self._check()
