"""``ckpt8.open``: the tensors of a checkpoint by name, one at a time, whether ckpt8, torch or safetensors wrote it."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path

import torch

from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint
from ckpt8.checkpoint.sources.objects import read_storage, view_of
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.header import is_meant_as_container
from ckpt8.container.opened import CheckpointDirectory, CheckpointFile, Tensors
from ckpt8.container.sharded import find_sharded
from ckpt8.core.errors import UsageError
from ckpt8.core.files.paths import as_path
from ckpt8.core.public import checked, described


class PlainFile(Tensors[TensorRef]):
    """A file of torch or safetensors, opened as ``CheckpointFile`` opens its container, with the same names."""

    def __init__(self, path: Path, device: torch.device | str = "cpu") -> None:
        with ExitStack() as opened:
            self._checkpoint = opened.enter_context(open_checkpoint(path))
            self._storages = {storage.key: storage for storage in self._checkpoint.storages}
            tensors = {tensor.name: tensor.ref for tensor in classify(self._checkpoint.tree).tensors}
            super().__init__(path, device, tensors)
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the file."""
        self._opened.close()

    def metadata(self) -> dict[str, str]:
        """The format of the file."""
        return {"format": self._checkpoint.format}

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Read one tensor. Raises UsageError for an unknown name, InputError where the file cannot be read."""
        ref = self._tensor(name)
        return view_of(ref, read_storage(self._checkpoint, self._storages[ref.key])).to(self._device)


@checked
def open(  # noqa: A001 - as torch has load and save
    path: str | os.PathLike[str], *, device: torch.device | str = "cpu"
) -> CheckpointFile | CheckpointDirectory | PlainFile:
    """Open a checkpoint lazily, as ``safetensors.safe_open`` does. Raises InputError for damage.

    It may be a ``.ckpt8``, an original of torch or safetensors, or a directory that ``Ckpt8StorageWriter`` wrote, whose
    tensors are put together from the slices of all ranks. ``in``, iteration and ``len`` go over the names; ``f[name]``,
    ``get_tensor(name)`` and ``get_slice(name)[:10]`` give tensors on ``device``. An unknown name is a UsageError and a
    KeyError.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     file["model.weight"].dtype
    torch.float32
    """
    path = as_path(path)
    try:
        device = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as exc:
        raise UsageError(f"open: device is {described(device)}; give one of torch, such as 'cpu' or 'cuda:0'") from exc
    if (directory := find_sharded(path)) is not None:
        return CheckpointDirectory(directory, device)
    return CheckpointFile(path, device) if is_meant_as_container(path) else PlainFile(path, device)
