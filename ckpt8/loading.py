"""Which member of a container is loaded, and those that are dicts of named tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import UsageError
from ckpt8.core.text import listed
from ckpt8.readers.base import Checkpoint

if TYPE_CHECKING:
    import torch

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


def load_named(checkpoint: Checkpoint, file: MemberFile, map_location: Any) -> dict[str, torch.Tensor]:
    """The tensors of ``file`` by name, as our own reader, which checks every size, found them. Raises InputError."""
    import torch

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
