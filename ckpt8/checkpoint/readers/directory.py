"""A directory as its members: checkpoints, other files, links, and empty directories.

Content decides what a file is. Compressing keeps a file that no reader knows as it is, and a checkpoint in an
unsupported layout too; a damaged checkpoint is an error. Outside the directory only files are read that a link in it
leads to: such a file is a member in place of the link. The files of a distributed checkpoint, at the top or in a
folder, are opened with the ``.metadata`` that describes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ckpt8.checkpoint.readers import match_reader
from ckpt8.checkpoint.readers.dcp import DcpCheckpoint
from ckpt8.checkpoint.readers.dcp_metadata import MAX_METADATA_BYTES, METADATA, Slice, read_metadata, rewritten
from ckpt8.checkpoint.readers.entries import DirectoryMember, Entry, is_named_shard, kept, refuse_lone_shard
from ckpt8.checkpoint.tree import Held, OpenCheckpoint
from ckpt8.container.manifest import FILE, SYMLINK
from ckpt8.container.sharded import INDEX, RANK_FILE, explain_missing, is_part
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import ByteRange, FilePool, SourceFile, open_range
from ckpt8.core.text import shown

_INTERRUPTED = re.compile(rf"{RANK_FILE}|\..*\.ckpt8-partial")
"""What a distributed save that was interrupted leaves."""

Choice = Callable[[DcpCheckpoint], Container[Slice]]
"""Says which slices of a distributed checkpoint somebody wants to read."""


@contextmanager
def open_directory(
    root: Path, entries: Sequence[Entry], *, decode: bool, choice: Choice | None = None
) -> Iterator[list[DirectoryMember]]:
    """Open the entries of a directory. Raises InputError for a damaged checkpoint, and where there are no entries.

    ``decode`` decompresses the slices of distributed checkpoints; only those of the ``choice`` are read.
    """
    require(entries, f"{root}: an empty directory; give a checkpoint file, or a directory that holds some")
    require(
        not any(entry.path == INDEX or is_part(entry.path) for entry in entries),
        f"{root}: is compressed already, by Ckpt8StorageWriter; restore it to a plain directory (restore DIR -o "
        "PLAIN) and give that",
    )
    if all(_INTERRUPTED.fullmatch(entry.path) for entry in entries):
        raise InputError(explain_missing(root))
    with closing(FilePool()) as pool:
        known = open_distributed(
            entries, lambda path: open_range(ByteRange.of(root / path), pool), decode=decode, choice=choice
        )
        yield [known.get(entry.path) or _open(root, entry, pool) for entry in entries]


def _open(root: Path, entry: Entry, pool: FilePool) -> DirectoryMember:
    if entry.format != FILE:
        return DirectoryMember(entry.path, Held(entry.target.encode(), entry.format))
    file = open_range(ByteRange.of(root / entry.path), pool)
    try:
        refuse_lone_shard(entry.path, str(file.source))
        reader = match_reader(file) if file.source.length else None
        return DirectoryMember(entry.path, OpenCheckpoint(FILE, file) if reader is None else reader.read(file))
    except UnsupportedError as exc:
        return DirectoryMember(entry.path, OpenCheckpoint(FILE, file), kept(exc, file.source))


def open_distributed(
    entries: Sequence[Entry], open_file: Callable[[str], SourceFile], *, decode: bool, choice: Choice | None = None
) -> dict[str, DirectoryMember]:
    """The members of all distributed checkpoints, by path; ``open_file`` opens the file at a path.

    Raises InputError for a damaged or hostile checkpoint.
    """
    members: dict[str, DirectoryMember] = {}
    by_path = {entry.path: entry for entry in entries}
    for folder, file in _metadata_files(entries, open_file):
        where = str(file.source)
        checkpoint = DcpCheckpoint(read_metadata(file.read(0, file.source.length), where, file.stored))
        only = None if choice is None else choice(checkpoint)
        for path in checkpoint.files:
            entry = by_path.get(folder + path)
            if entry is None or entry.format not in (FILE, SYMLINK) or entry.path in members:
                is_known = entry is not None and entry.path in members
                what = "belongs to another .metadata" if is_known else "is not there; the checkpoint is not complete"
                raise InputError(f"{where}: names {shown(path)}, which {what}")
            if entry.format != FILE:
                continue
            shard = open_file(entry.path)
            try:
                members[entry.path] = checkpoint.open(path, shard, entry.path, decode=decode, only=only)
            except UnsupportedError as exc:
                plain, reason = OpenCheckpoint(FILE, shard), kept(exc, shard.source)
                members[entry.path] = DirectoryMember(entry.path, plain, reason, holds_tensors=True)
        if checkpoint.moved:
            held = Held(rewritten(checkpoint.metadata, checkpoint.moved, where), FILE, file)
            reason = "written anew: slices that were compressed with zstd lie elsewhere without it"
            members[folder + METADATA] = DirectoryMember(folder + METADATA, held, reason)
        checkpoint.metadata.tree = None  # by far the largest part of it in memory
    return members


def _metadata_files(
    entries: Sequence[Entry], open_file: Callable[[str], SourceFile]
) -> Iterator[tuple[str, SourceFile]]:
    """Every ``.metadata`` with shards below its folder: the folder with a slash, empty for the top, and the file."""
    shards = [entry.path for entry in entries if is_named_shard(entry.path)]
    for entry in entries:
        folder = entry.path.removesuffix(METADATA)
        is_named = entry.path.rpartition("/")[2] == METADATA and entry.format == FILE
        if is_named and any(path.startswith(folder) for path in shards):
            file = open_file(entry.path)
            require(
                file.source.length <= MAX_METADATA_BYTES,
                f"{file.source}: has {file.source.length} bytes, more than {MAX_METADATA_BYTES}",
            )
            if file.source.length and file.read(0, 1) == b"\x80":  # a pickle
                yield folder, file
