"""Which member of a container is loaded, and those that are dicts of named tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.container.frames import bytes_of, host_bytes
from ckpt8.container.member_file import MemberFile
from ckpt8.core.errors import UsageError

if TYPE_CHECKING:
    import torch


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
