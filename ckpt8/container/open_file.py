"""``ckpt8.open``: the tensors of a container, or of a directory of those of ranks, one by one, by name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from ckpt8.container.decoding import decode_tensor
from ckpt8.container.facts import tensor_facts
from ckpt8.container.manifest import Manifest, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.damaged import CheckpointDirectory
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.core.arguments import checked
from ckpt8.core.closing import Closing
from ckpt8.core.errors import UsageError


class CheckpointFile(Closing):
    """A ``.ckpt8`` opened for reading tensor by tensor; a context manager. See ``open``.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     "model.weight" in file.keys()
    True
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reader = ContainerReader(Path(path))
        self._tensors = {tensor.name: tensor for tensor in self._reader.manifest.tensors}

    def close(self) -> None:
        """Close the file."""
        self._reader.close()

    @property
    def manifest(self) -> Manifest:
        """Everything the container states about itself."""
        return self._reader.manifest

    def keys(self) -> list[str]:
        """Paths of all tensors, in the order of the checkpoint."""
        return list(self._tensors)

    def _record(self, name: str) -> TensorRecord:
        if name not in self._tensors:
            raise UsageError(f"{self._reader.path}: has no tensor {name!r}")
        return self._tensors[name]

    @checked
    def get_tensor(self, name: str) -> torch.Tensor:
        """Decode one tensor, with its shape, strides and flags, on the CPU. Raises UsageError for an unknown name."""
        return decode_tensor(self._reader, self._record(name))

    @checked
    def stats(self, name: str) -> dict[str, Any]:
        """Role, codec, sizes in bytes and error of one tensor. Raises UsageError for an unknown name."""
        return tensor_facts(self._reader.manifest, self._record(name))


@checked
def open_container(path: str | os.PathLike[str]) -> CheckpointFile | CheckpointDirectory:
    """Open a ``.ckpt8`` lazily: ``keys``, ``get_tensor``, ``stats``. Raises InputError for damage.

    Of a directory that ``Ckpt8StorageWriter`` wrote it gives whole tensors, put together from the slices of all ranks.

    >>> with ckpt8.open("run.ckpt8") as file:
    ...     file.get_tensor("model.weight").dtype
    torch.float32
    """
    directory = find_sharded(Path(path))
    return CheckpointFile(path) if directory is None else CheckpointDirectory(directory)
