"""Checks every frame of a container against its checksum and its declared size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ckpt8.container import layout
from ckpt8.container.reader import ContainerReader
from ckpt8.core.workers import Progress, Workers, scratch


def check_frames(
    reader: ContainerReader,
    workers: Workers,
    progress: Progress = lambda _: None,
    only: Iterable[int] | None = None,
) -> None:
    """Read, check and decode every chunk of every storage, or of some. Raises InputError that names the tensor."""

    def decode(work: tuple[int, int]) -> int:
        storage, chunk = work
        out = scratch_tensor(reader, storage, chunk)
        reader.decode_chunk(storage, chunk, out)
        return out.numel() * out.element_size()

    storages = range(len(reader.manifest.storages)) if only is None else only
    for nbytes in workers.map(decode, all_chunks(reader, storages)):
        progress(nbytes)


def all_chunks(reader: ContainerReader, storages: Iterable[int]) -> Iterator[tuple[int, int]]:
    """(storage, chunk) for every chunk of the given storages."""
    for index in storages:
        for chunk in range(layout.chunk_count(reader.manifest.storages[index].numel)):
            yield index, chunk


def scratch_tensor(reader: ContainerReader, storage: int, chunk: int) -> torch.Tensor:
    """The buffer of the calling thread, shaped for the elements of one chunk; the next call overwrites it."""
    spec = reader.chunk_spec(storage, chunk)
    view = scratch("decode", spec.numel * spec.dtype.itemsize)
    return torch.frombuffer(view, dtype=torch.uint8).view(spec.dtype.torch)
