"""One member of a container as the object that its own library would load."""

from __future__ import annotations

import pickle
from typing import IO, Any, cast

from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.manifest import DCP, DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_file import MemberFile
from ckpt8.container.reader import ContainerReader
from ckpt8.errors import InputError, UsageError
from ckpt8.readers.base import Checkpoint
from ckpt8.resuming.names import listed

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


NAMED_FORMATS = frozenset({"safetensors", DCP})
"""Formats of members that are loaded as a dict of tensors by name."""


def load_member(checkpoint: Checkpoint, file: MemberFile, map_location: Any) -> Any:
    """What ``file`` holds: of named tensors a dict of these, else what ``torch.load`` gives.

    The ``checkpoint`` is what our own reader, which checks every size, made of the file before anything else reads it.
    Raises InputError where torch cannot make anything of it, and what torch raises for objects that it does not allow.
    """
    import torch

    if checkpoint.format not in NAMED_FORMATS:
        return _torch_load(file, map_location)
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


def _torch_load(file: MemberFile, map_location: Any) -> Any:
    import torch

    file.seek(0)
    try:
        obj = torch.load(cast("IO[bytes]", file), map_location=map_location, weights_only=True)
    except Exception as exc:
        # torch does not always pass on what a read raises.
        if file.error is not None:
            raise file.error from exc
        if isinstance(exc, pickle.UnpicklingError):
            raise
        reason = (str(exc).splitlines() or [""])[0]
        raise InputError(f"{file.name}: torch cannot load it: {type(exc).__name__}: {reason}") from exc
    if file.error is not None:
        raise file.error
    return obj
