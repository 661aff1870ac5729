"""Opens what ckpt8 writes: one container, or a directory of those of ranks."""

from __future__ import annotations

from pathlib import Path

from ckpt8.container.header import is_container
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.container.sharded.reading import is_sharded

Stored = ContainerReader | JoinedReader


def is_stored(path: Path) -> bool:
    """Whether ckpt8 wrote what is at ``path``; False where it cannot be read."""
    return is_container(path) or is_sharded(path)


def open_stored(path: Path, *, kernels: bool = False) -> Stored:
    """Open a container, or a directory of those of ranks. Raises InputError."""
    return JoinedReader(path, kernels=kernels) if is_sharded(path) else ContainerReader(path, kernels=kernels)


def containers_of(stored: Stored) -> list[ContainerReader]:
    """The containers, of one or of all ranks."""
    return stored.readers if isinstance(stored, JoinedReader) else [stored]
