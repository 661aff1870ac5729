"""A ``.ckpt8`` or a raw checkpoint as one and the same open checkpoint, with a check of all its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.checksums import check_storages
from ckpt8.checkpoint.gate import TORCH_FORMATS, load_member
from ckpt8.checkpoint.readers import READERS, get_reader, open_checkpoint
from ckpt8.checkpoint.readers.dcp.dcp import DcpFile
from ckpt8.checkpoint.readers.entries import is_directory
from ckpt8.checkpoint.readers.pickle.rebuild import make_tensor
from ckpt8.checkpoint.sources.stored_parts import StoredParts
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, StorageRef, TensorRef
from ckpt8.container.checking import check_frames
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.header import is_container
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UnsupportedError, UsageError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed
from ckpt8.core.workers import Workers

_BLOCK = 8 << 20


class MemberSource(SourceFile):
    """A member of a container in place of the file that it was: ``member`` gives it. For one thread at a time."""

    def __init__(self, reader: ContainerReader, source: ByteRange, member: Callable[[], MemberFile]) -> None:
        self.source = source
        self._reader = reader
        self._member = member

    @property
    def stored(self) -> int:
        """Bytes of the container."""
        return self._reader.size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with decoded bytes. Raises InputError for damage and behind the end."""
        if offset < 0 or offset + len(buffer) > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + len(buffer)}")
        member = self._member()
        member.seek(offset)
        member.readinto(buffer)

    def check_unchanged(self) -> None:
        """Every frame that is read is checked on the way."""

    def close(self) -> None:
        """The caller closes the container."""


@dataclass(frozen=True, slots=True)
class Source:
    """An open checkpoint. Of a ``.ckpt8``, ``container`` is the reader and its workers, ``stored`` the parts.

    ``member`` is the index of the member that the checkpoint is.
    """

    path: Path
    checkpoint: Checkpoint
    container: tuple[ContainerReader, Workers] | None = None
    stored: StoredParts | None = None
    member: int = 0

    def check(self) -> None:
        """Read every byte and check it: decode all frames of the member, or compare the checksums of a raw file.

        Raises InputError that names what is damaged.
        """
        if self.container is not None:
            reader, workers = self.container
            record = reader.manifest.members[self.member]
            check_frames(reader, workers, only=[record.skeleton, *(index for _, index in record.segments)])
            return
        check_storages(self.checkpoint, str(self.path))


def member_source(reader: ContainerReader, file: MemberFile) -> MemberSource:
    """An open member as the file that it was."""
    return MemberSource(reader, ByteRange(reader.path, 0, file.size), lambda: file)


def member_checkpoint(reader: ContainerReader, index: int, file: MemberFile) -> Checkpoint:
    """A member as the open checkpoint that it was. Raises InputError for a format that is not known.

    Of a file of a distributed checkpoint these are the tensors that the container knows, slices by their names.
    """
    source = member_source(reader, file)
    if reader.manifest.members[index].format == DCP:
        return stored_checkpoint(reader, index, source)
    return read_member(reader, index, source)


def load_source(reader: ContainerReader, index: int, file: MemberFile, map_location: Any) -> tuple[Any, Any]:
    """The object that a member's own library would load, and the tree that our own reader made. Raises InputError."""
    kind = reader.manifest.members[index].format
    if kind in TORCH_FORMATS:
        return load_member(file, member_source(reader, file), kind, map_location)
    checkpoint = member_checkpoint(reader, index, file)
    return load_named(checkpoint, file, map_location), checkpoint.tree


def read_member(reader: ContainerReader, index: int, source: MemberSource) -> Checkpoint:
    """What the reader of its format makes of a member. Raises InputError for a format that is not known."""
    record = reader.manifest.members[index]
    if record.format not in dict(READERS):
        raise InputError(f"{reader.path}: {record.path!r} is of the format {record.format!r}, which is not known")
    return get_reader(record.format).read(source)


@contextmanager
def open_source(path: Path, *, member: str | None = None, threads: int | None = None) -> Iterator[Source]:
    """Open ``path``, recognised by content. Raises InputError for damage, UsageError where ``member`` must be given.

    Of a directory, ``member`` is the path in it.
    """
    if not is_container(path):
        file = path if member is None else _member_path(path, member)
        with open_checkpoint(file) as checkpoint:
            yield Source(file, checkpoint)
        return
    with ContainerReader(path) as reader, Workers(threads) as workers:
        index = member_index(reader, member)
        record = reader.manifest.members[index]
        if record.format == DCP:
            raise UnsupportedError(
                f"{path}: {record.path!r} is a file of a distributed checkpoint, whose values are spread over several; "
                "restore it and load it with torch.distributed.checkpoint"
            )
        checkpoint = member_checkpoint(reader, index, MemberFile(reader, index, workers))
        yield Source(path, checkpoint, (reader, workers), StoredParts(reader, index, checkpoint, workers), index)


def _member_path(path: Path, member: str) -> Path:
    """A file of a checkpoint directory; of a file, which has one member, the file itself by its name."""
    if is_directory(path):
        return path / member
    if member != path.name:
        raise UsageError(f"{path}: is one file, and has no member {member!r}")
    return path


_SHOWN_MEMBERS = 20


def member_index(reader: ContainerReader, member: str | None) -> int:
    """Which member is meant. Raises UsageError that lists checkpoints where that is not clear, or it is none."""
    members = reader.manifest.members
    names = [record.path for record in members]
    if member is None and len(names) == 1:
        return 0
    checkpoints = [record.path for record in members if record.format not in (FILE, SYMLINK, DIRECTORY)]
    if member not in names:
        found = f"no member {member!r}" if member is not None else f"{len(names)} members"
        raise UsageError(f"{reader.path}: has {found}; give member= one of {listed(checkpoints, _SHOWN_MEMBERS)}")
    if member not in checkpoints:
        raise UsageError(
            f"{reader.path}: {member!r} is no checkpoint, it was kept as it is; "
            f"give member= one of {listed(checkpoints, _SHOWN_MEMBERS)}, or restore it"
        )
    return names.index(member)


def stored_checkpoint(reader: ContainerReader, index: int, file: SourceFile) -> Checkpoint:
    """Member ``index``, whose bytes are ``file``: a dict of its tensors by name, without the path of the member.

    Raises InputError for a tensor that does not fit its storage.
    """
    manifest = reader.manifest
    record = manifest.members[index]
    storages = {
        storage: StorageInfo(str(storage), manifest.storages[storage].dtype, offset, manifest.storages[storage].nbytes)
        for offset, storage in record.segments
    }
    tree: dict[str, TensorRef] = {}
    for tensor in manifest.tensors:
        place = storages.get(tensor.storage)
        if place is None:
            continue
        whole = StorageRef(place.key, DType.UINT8, place.nbytes)
        try:
            ref = make_tensor(whole, tensor.dtype, tensor.offset, tuple(tensor.shape), tuple(tensor.stride))
        except ValueError as exc:
            raise InputError(f"{reader.path}: {tensor.name}: does not fit its storage: {exc}") from exc
        tree[tensor.name.removeprefix(f"{record.path}:")] = ref
    return DcpFile(file, list(storages.values()), tree)


def load_named(checkpoint: Checkpoint, file: MemberFile, map_location: Any) -> dict[str, torch.Tensor]:
    """The tensors of ``file`` by name, as our own reader, which checks every size, found them. Raises InputError."""
    if not isinstance(map_location, (type(None), str, torch.device)):
        raise UsageError(
            f"{file.name}: is loaded tensor by tensor and takes a device for map_location, not {map_location!r}"
        )
    places = {storage.key: storage for storage in checkpoint.storages}
    loaded = {}
    for name, ref in checkpoint.tree.items():
        place = places[ref.key]
        content = host_bytes(place.nbytes)
        file.seek(place.offset)
        file.readinto(bytes_of(content))
        tensor = content.view(ref.dtype.torch).as_strided(ref.shape, ref.stride, ref.offset)
        loaded[name] = tensor.to(map_location or "cpu")
    return loaded
