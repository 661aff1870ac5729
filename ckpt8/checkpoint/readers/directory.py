"""A directory as the members that it is made of: checkpoints, other files, links, and directories without anything.

Files are recognised by content. What no reader knows is kept as it is, and so is a checkpoint in a layout that no
reader reads; one that is damaged is refused. Nothing outside the directory is read but files that a link in it leads
to: such a file is a member in place of the link.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.dcp.directory import open_distributed
from ckpt8.checkpoint.readers.entries import PACKED_INDEX, DirectoryMember, Entry, kept
from ckpt8.checkpoint.readers.shards import is_named_shard, lone_shard
from ckpt8.checkpoint.tree import Held, OpenCheckpoint
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, FilePool, PooledFile


@contextmanager
def open_directory(root: Path, entries: Sequence[Entry], *, decode: bool) -> Iterator[list[DirectoryMember]]:
    """Open the entries of a directory. Raises InputError for a damaged checkpoint, and where there are no entries.

    ``decode``: slices of distributed checkpoints that are compressed are presented as if they were not.
    """
    if not entries:
        raise InputError(f"{root}: an empty directory; give a checkpoint file, or a directory that holds some")
    if any(entry.path == PACKED_INDEX for entry in entries):
        raise InputError(
            f"{root}: is compressed already, by Ckpt8StorageWriter; load it with Ckpt8StorageReader, "
            "or give one of the .ckpt8 files in it"
        )
    pool = FilePool()
    try:
        known = open_distributed(entries, lambda path: PooledFile(ByteRange.of(root / path), pool), decode=decode)
        yield [known.get(entry.path) or _open(root, entry, pool) for entry in entries]
    finally:
        pool.close()


def _open(root: Path, entry: Entry, pool: FilePool) -> DirectoryMember:
    if entry.format != FILE:
        return DirectoryMember(entry.path, Held(entry.target.encode(), entry.format))
    source = ByteRange.of(root / entry.path)
    file = PooledFile(source, pool)
    try:
        if is_named_shard(entry.path):
            raise lone_shard(str(source))
        reader = match_reader(file) if source.length else None
        return DirectoryMember(entry.path, OpenCheckpoint(FILE, file) if reader is None else reader.read(file))
    except UnsupportedError as exc:
        return DirectoryMember(entry.path, OpenCheckpoint(FILE, file), kept(exc, source))
