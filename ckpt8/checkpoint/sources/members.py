"""A file, a directory or a ``.ckpt8`` of either as the same thing: a list of open members."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ckpt8.checkpoint.readers import READERS, open_checkpoint
from ckpt8.checkpoint.readers.dcp.dcp import DcpMember
from ckpt8.checkpoint.readers.dcp.directory import open_distributed
from ckpt8.checkpoint.readers.directory import open_directory
from ckpt8.checkpoint.readers.entries import DirectoryMember, Entry, PlainFile, is_directory, walk
from ckpt8.checkpoint.sources.one_file import MemberSource, read_member
from ckpt8.container.header import is_container
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import NamedRange
from ckpt8.core.text import listed
from ckpt8.core.workers import Workers

_OPEN_FILES = 4
"""Members of a container of which decoded bytes are kept, a chunk each."""
_LISTED = 20


@dataclass(frozen=True, slots=True)
class Members:
    """The open members of a source."""

    path: Path
    is_directory: bool
    found: Sequence[DirectoryMember]

    @property
    def checkpoints(self) -> list[DirectoryMember]:
        """Those that a reader knows."""
        return [member for member in self.found if member.checkpoint.format in dict(READERS)]

    def only(self, path: str) -> Members:
        """One of them, or a folder with a distributed one, as the source. Raises UsageError that lists checkpoints."""
        folders = {member.path.rpartition("/")[0] for member in self.found if isinstance(member, DcpMember)} - {""}
        if path.rstrip("/") in folders:
            inside = [member for member in self.found if member.path.startswith(f"{path.rstrip('/')}/")]
            return Members(self.path, True, inside)
        chosen = [member for member in self.checkpoints if member.path == path]
        if not chosen:
            choices = [*(member.path for member in self.checkpoints), *sorted(folders)]
            known = listed(choices, _LISTED) or "nothing that can be read"
            raise UsageError(f"{self.path}: --member {path!r} is not one of {known}")
        return Members(self.path, False, chosen)


class _Files:
    """The member files of a container that were read last: each remembers a decoded chunk, so they must be few."""

    def __init__(self, reader: ContainerReader, workers: Workers) -> None:
        self.reader = reader
        self._workers = workers
        self._open: OrderedDict[int, MemberFile] = OrderedDict()

    def file(self, index: int) -> MemberFile:
        """The member of that number as a file."""
        if index not in self._open:
            self._open[index] = MemberFile(self.reader, index, self._workers)
        self._open.move_to_end(index)
        if len(self._open) > _OPEN_FILES:
            self._open.popitem(last=False)
        return self._open[index]


@contextmanager
def open_members(path: Path, *, threads: int | None = None) -> Iterator[Members]:
    """Open ``path`` with everything in it, recognised by content. Raises InputError."""
    if is_directory(path):
        with open_directory(path, walk(path), decode=True) as found:
            yield Members(path, True, found)
    elif not is_container(path):
        with open_checkpoint(path) as checkpoint:
            yield Members(path, False, [DirectoryMember(path.name, checkpoint)])
    else:
        with ContainerReader(path, kernels=True) as reader, Workers(threads) as workers:
            files = _Files(reader, workers)
            yield Members(path, reader.manifest.directory is not None, _stored_members(files))


def _stored_members(files: _Files) -> list[DirectoryMember]:
    members = enumerate(files.reader.manifest.members)
    stored = {each.path: index for index, each in members if each.format not in (SYMLINK, DIRECTORY)}
    entries = [Entry(path, FILE) for path in stored]
    known = open_distributed(entries, lambda path: _source(files, stored[path]), decode=True)
    return [known.get(path) or _stored(files, index) for path, index in stored.items()]


def _source(files: _Files, index: int) -> MemberSource:
    record = files.reader.manifest.members[index]
    return MemberSource(
        files.reader, NamedRange(files.reader.path, 0, record.size, record.path), partial(files.file, index)
    )


def _stored(files: _Files, index: int) -> DirectoryMember:
    record, source = files.reader.manifest.members[index], _source(files, index)
    if record.format in (FILE, DCP):
        return DirectoryMember(record.path, PlainFile(source))
    return DirectoryMember(record.path, read_member(files.reader, index, source))
