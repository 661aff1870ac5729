"""A member of a container as the open checkpoint that it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt8.checkpoint.gate import TORCH_FORMATS, load_member
from ckpt8.checkpoint.readers import READERS, get_reader
from ckpt8.checkpoint.readers.pickle.rebuild import make_tensor
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, StorageRef, TensorRef
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType
from ckpt8.core.text import listed

_SHOWN_MEMBERS = 20


class MemberSource(SourceFile):
    """A member of a container in place of the file that it was: ``member`` gives it. For one thread at a time."""

    def __init__(self, reader: ContainerReader, source: ByteRange, member: Callable[[], MemberFile]) -> None:
        self.source = source
        self._reader = reader
        self._member = member

    @classmethod
    def of(cls, reader: ContainerReader, file: MemberFile) -> MemberSource:
        """The member that is open as ``file``, called by the path of the container in messages."""
        return cls(reader, ByteRange(reader.path, 0, file.size), lambda: file)

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
        """Nothing to check: every frame is checked when it is read."""

    def close(self) -> None:
        """The caller closes the container."""


def member_index(reader: ContainerReader, member: str | None) -> int:
    """The number of the ``member``. Raises UsageError that lists checkpoints where it is not clear, or is none."""
    names = {record.path: index for index, record in enumerate(reader.manifest.members)}
    if member is None and len(names) == 1:
        return 0
    kept = (FILE, SYMLINK, DIRECTORY)
    checkpoints = [record.path for record in reader.manifest.members if record.format not in kept]
    choices = f"give member= one of {listed(checkpoints, _SHOWN_MEMBERS)}"
    if member is None or member not in names:
        found = f"no member {member!r}" if member is not None else f"{len(names)} members"
        raise UsageError(f"{reader.path}: has {found}; {choices}")
    if member not in checkpoints:
        raise UsageError(f"{reader.path}: {member!r} is no checkpoint, it was kept as it is; {choices}, or restore it")
    return names[member]


def read_member(reader: ContainerReader, index: int, source: MemberSource) -> OpenCheckpoint:
    """The member as the reader of its format gives it. Raises InputError for damage and an unknown format."""
    record = reader.manifest.members[index]
    if record.format not in READERS:
        raise InputError(f"{reader.path}: {record.path!r} is of the format {record.format!r}, which is not known")
    return get_reader(record.format).read(source)


def slices_of_member(reader: ContainerReader, index: int, file: SourceFile) -> OpenCheckpoint:
    """A file of a distributed checkpoint: a dict of the slices in it by name, without the path of the member.

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
    return OpenCheckpoint(DCP, file, list(storages.values()), tree)


def load_source(reader: ContainerReader, index: int, file: MemberFile, map_location: Any) -> tuple[Any, Any]:
    """The object that a member's own library would load, and the tree that our own reader made. Raises InputError."""
    kind = reader.manifest.members[index].format
    source = MemberSource.of(reader, file)
    if kind in TORCH_FORMATS:
        return load_member(file, source, kind, map_location)
    checkpoint = (slices_of_member if kind == DCP else read_member)(reader, index, source)
    return _load_named(checkpoint, file, map_location), checkpoint.tree


def _load_named(checkpoint: OpenCheckpoint, file: MemberFile, map_location: Any) -> dict[str, torch.Tensor]:
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
