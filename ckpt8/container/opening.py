"""Opens what ckpt8 writes: one container, or a directory of those of ranks, also in a trainer's checkpoint."""

from __future__ import annotations

from pathlib import Path

from ckpt8.container.header import is_container
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.container.sharded.reading import find_sharded, refuse_directory

Stored = ContainerReader | JoinedReader


def is_stored(path: Path) -> bool:
    """Whether ckpt8 wrote what is at ``path``; False where it cannot be read."""
    return is_container(path) or find_sharded(path) is not None


def open_stored(path: Path, *, kernels: bool = False) -> Stored:
    """Open a container, or a directory of those of ranks. Raises InputError."""
    if (directory := find_sharded(path)) is not None:
        return JoinedReader(directory, kernels=kernels)
    refuse_directory(path)
    return ContainerReader(path, kernels=kernels)


def containers_of(stored: Stored) -> list[ContainerReader]:
    """The containers, of one or of all ranks."""
    return stored.readers if isinstance(stored, JoinedReader) else [stored]
