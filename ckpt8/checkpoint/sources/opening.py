"""Opens a source: a file, a directory with everything in it, or a ``.ckpt8`` of either; or one member of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path

from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.readers.dcp_metadata import METADATA
from ckpt8.checkpoint.readers.directory import Choice, open_directory, open_distributed
from ckpt8.checkpoint.readers.entries import DirectoryMember, Entry, directory_name, is_directory, refuse_share, walk
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.distributed import OPEN_FILES, ShardedFiles, tree_of
from ckpt8.checkpoint.sources.stored_member import MemberSource, StoredParts, member_index, read_member
from ckpt8.checkpoint.tree import Checkpoint, OpenCheckpoint, StorageInfo
from ckpt8.container.chunks import check_frames
from ckpt8.container.header import is_container
from ckpt8.container.joined import JoinedReader
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import find_sharded
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.files.source_file import ByteRange, crc32
from ckpt8.core.workers import Workers

_BLOCK = 1 << 22


@contextmanager
def open_source(
    path: Path,
    *,
    containers: bool = True,
    decode: bool = True,
    nested: bool = True,
    threads: int | None = None,
    choice: Choice | None = None,
) -> Iterator[Bundle]:
    """Open ``path`` with everything in it, recognised by content; ``nested`` is that of ``walk``. Raises InputError.

    Without ``containers`` a ``.ckpt8``, or a directory of those of ranks, is an error. ``decode`` decompresses the
    slices of distributed checkpoints; without it files with compressed slices are kept as they are. Of plain ones only
    the slices of the ``choice`` are read, if there is one.
    """
    if containers and is_container(path):
        with ContainerReader(path) as reader, Workers(threads) as workers:
            yield stored_bundle(reader, workers)
    elif containers and is_directory(path) and (directory := find_sharded(path)) is not None:
        with JoinedReader(directory) as joined, Workers(threads) as workers:
            yield sharded_bundle(joined, workers)
    elif is_directory(path):
        entries = walk(path, nested=nested)

        def check() -> None:
            if walk(path, nested=nested) != entries:
                raise InputError(f"{path}: changed while it was read; nothing was written")

        with open_directory(path, entries, decode=decode, choice=choice) as members:
            yield Bundle(path, members, directory_name(path), check)
    else:
        with open_checkpoint(path) as checkpoint:
            yield Bundle(path, [DirectoryMember(path.name, checkpoint)])


def stored_bundle(reader: ContainerReader, workers: Workers, *, decode: bool = True) -> Bundle:
    """The files in a container as a source, see ``open_source``. Raises InputError."""
    member_file = lru_cache(OPEN_FILES)(partial(MemberFile, reader, workers=workers))
    records = reader.manifest.members
    stored = {record.path: index for index, record in enumerate(records) if record.format not in (SYMLINK, DIRECTORY)}

    def open_file(path: str) -> MemberSource:
        source = ByteRange(reader.path, 0, records[stored[path]].size, path)
        return MemberSource(reader, source, partial(member_file, stored[path]))

    members = open_distributed([Entry(path, FILE) for path in stored], open_file, decode=decode)
    for path, index in stored.items():
        if path not in members:
            file, plain = open_file(path), records[index].format in (FILE, DCP)
            checkpoint = OpenCheckpoint(FILE, file) if plain else read_member(reader, index, file)
            members[path] = DirectoryMember(path, checkpoint)
    directory = None if reader.manifest.directory is None else reader.path.name
    return Bundle(reader.path, [members[path] for path in stored], directory)


def sharded_bundle(joined: JoinedReader, workers: Workers) -> Bundle:
    """Containers of ranks as one distributed checkpoint. Raises InputError."""
    return Bundle(joined.path, ShardedFiles(joined, workers).members(), directory_name(joined.path))


def check_storages(checkpoint: Checkpoint, where: str) -> None:
    """Read every storage that has a checksum. Raises InputError for the first that does not match."""
    for storage in checkpoint.storages:
        if storage.crc32 is not None and storage_crc(checkpoint, storage) != storage.crc32:
            raise InputError(f"{where}: storage {storage.key!r} is damaged: its CRC does not match")


def storage_crc(checkpoint: Checkpoint, storage: StorageInfo) -> int:
    """The CRC-32 of the bytes of a storage. Raises InputError."""
    crc, buffer = 0, memoryview(bytearray(min(_BLOCK, storage.nbytes)))
    for start in range(0, storage.nbytes, _BLOCK):
        view = buffer[: min(_BLOCK, storage.nbytes - start)]
        checkpoint.read_into(storage.offset + start, view)
        crc = crc32(view, crc)
    return crc


@dataclass(frozen=True, slots=True)
class OpenMember:
    """One open checkpoint. ``stored`` are its encoded parts if it is in a ``.ckpt8`` of its own.

    ``checks`` read every byte and raise InputError that names the damage: they decode all frames of the member, or
    compare the checksums of a raw file. ``notes`` are lines about values that the tree does not hold.
    """

    path: Path
    checkpoint: Checkpoint
    checks: Sequence[Callable[[], None]]
    stored: StoredParts | None = None
    notes: list[str] = field(default_factory=list)


@contextmanager
def open_member(path: Path, *, member: str | None = None, threads: int | None = None) -> Iterator[OpenMember]:
    """Open one checkpoint: a file, or the ``member`` of a directory or container, without reading the others.

    A file in a store is kept as it is read: the checks are not the last to read it.

    A directory of torch.distributed.checkpoint is one checkpoint with whole tensors: as it is, in a container, or as
    containers of ranks. Raises InputError for damage, UsageError where ``member`` must be given.
    """
    if (directory := find_sharded(path)) is not None:
        if member is not None:
            raise UsageError(f"{path}: is a directory of containers of ranks, and one checkpoint; leave out member")
        with JoinedReader(directory) as joined, Workers(threads) as workers:
            bundle = sharded_bundle(joined, workers)
            yield _whole(path, bundle, [partial(check_frames, reader, workers) for reader in joined.readers])
        return
    if member is None and is_directory(path) and (path / METADATA).is_file():
        with open_source(path) as bundle:
            yield _whole(
                path,
                bundle,
                [partial(check_storages, member.checkpoint, f"{path}/{member.path}") for member in bundle.opened],
            )
        return
    if not is_container(path):
        if member is not None and is_directory(path):
            path /= member
        elif member not in (None, path.name):
            raise UsageError(f"{path}: is one file, and has no member {member!r}")
        with open_checkpoint(path) as checkpoint:
            checkpoint.file.keep_all(needs_room=True)
            yield OpenMember(path, checkpoint, [partial(check_storages, checkpoint, str(path))])
        return
    with ContainerReader(path) as reader, Workers(threads) as workers:
        if member is None and any(record.path == METADATA for record in reader.manifest.members):
            yield _whole(path, stored_bundle(reader, workers), [partial(check_frames, reader, workers)])
            return
        reader.keep_all()
        index = member_index(reader, member)
        record = reader.manifest.members[index]
        if record.format == DCP:
            raise UnsupportedError(
                f"{path}: {record.path!r} is a file of a distributed checkpoint, whose values are spread over several; "
                "leave out member, or restore it and load it with torch.distributed.checkpoint"
            )
        checkpoint = read_member(reader, index, MemberSource.of(reader, MemberFile(reader, index, workers)))
        refuse_share(checkpoint.tree, f"{path}: {record.path!r}")
        check = partial(check_frames, reader, workers, only=[record.skeleton, *(at for _, at in record.segments)])
        yield OpenMember(path, checkpoint, [check], StoredParts(reader, index, checkpoint, workers))


def _whole(path: Path, bundle: Bundle, checks: Sequence[Callable[[], None]]) -> OpenMember:
    """The files of a distributed checkpoint as one; ``checks`` read every byte. Raises InputError, UnsupportedError."""
    data, notes = Composite(str(path)), list[str]()
    members = bundle.distributed
    if not members:
        raise InputError(f"{path}: {METADATA} names no file that can be read; give the whole directory")
    if any(member.home is not members[0].home for member in members):
        raise InputError(f"{path}: holds several distributed checkpoints; give the directory of one")
    data.tree = tree_of(data, members, notes)
    return OpenMember(path, data, checks, notes=notes)
