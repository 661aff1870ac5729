"""Decodes whole storages and tensors, and checks every frame of a container by decoding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ckpt8.container.header import FRAME, chunk_count
from ckpt8.container.manifest import Pack, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.workers import Progress, Workers, assign, scratch_elements

Chunk = tuple[int, int]
"""The index of a storage, and the number of one of its chunks."""


def decode_storage(reader: ContainerReader, storage: int) -> torch.Tensor:
    """One storage as a flat CPU tensor. Raises InputError that names the tensor where it is damaged."""
    record = reader.manifest.storages[storage]
    out = torch.empty(record.numel, dtype=record.dtype.torch, device="cpu")
    for chunk, start in enumerate(range(0, record.numel, FRAME)):
        reader.fill_chunk(storage, chunk, out[start : start + FRAME])
    return out


def decode_tensor(reader: ContainerReader, tensor: TensorRecord) -> torch.Tensor:
    """One tensor with its shape, strides and flags. Raises InputError for damage, or where its storage is too small."""
    flat = decode_storage(reader, tensor.storage)
    try:
        view = flat.view(tensor.dtype.torch).as_strided(tensor.shape, tensor.stride, tensor.offset)
        view = view.conj() if "conj" in tensor.flags else view
        return torch._neg_view(view) if "neg" in tensor.flags else view
    except (AttributeError, RuntimeError) as exc:
        raise InputError(f"{reader.path}: {tensor.name}: does not fit its storage, or this torch") from exc


def fill_tensor(reader: ContainerReader, tensor: TensorRecord, target: torch.Tensor) -> None:
    """Decode a contiguous tensor that is all of its storage into ``target``, of any strides, chunk by chunk.

    Raises InputError for damage.
    """
    record, size = reader.manifest.storages[tensor.storage], tensor.dtype.itemsize
    # The storage may count elements of another size, such as bytes. A chunk has whole elements of any.
    flat = target.view(-1).view(record.dtype.torch) if target.is_contiguous() else None
    for chunk, start in enumerate(range(0, record.numel, FRAME)):
        if flat is not None:
            reader.fill_chunk(tensor.storage, chunk, flat[start : start + FRAME])
        else:
            elements = reader.read_chunk(tensor.storage, chunk).view(tensor.dtype.torch)
            assign(target, start * record.dtype.itemsize // size, elements)


def check_frames(
    reader: ContainerReader,
    workers: Workers,
    progress: Progress = lambda _: None,
    only: Iterable[int] | None = None,
) -> None:
    """Read, check and decode every chunk of all storages, or of ``only`` some. Raises InputError naming the tensor."""

    def decode(batch: list[Chunk]) -> int:
        nbytes = 0
        for storage, chunk in batch:
            out = scratch_tensor(reader, storage, chunk)
            reader.fill_chunk(storage, chunk, out)
            nbytes += out.numel() * out.element_size()
        return nbytes

    storages = range(len(reader.manifest.storages)) if only is None else only
    for nbytes in workers.map(decode, all_chunks(reader, storages)):
        progress(nbytes)


def all_chunks(reader: ContainerReader, storages: Iterable[int]) -> Iterator[list[Chunk]]:
    """Every chunk of the given storages, in batches for one thread: those of one pack come together."""
    packs: dict[Pack, list[Chunk]] = {}
    for index in storages:
        record = reader.manifest.storages[index]
        chunks = ((index, chunk) for chunk in range(chunk_count(record.numel)))
        if record.pack is None:
            yield from ([chunk] for chunk in chunks)
        else:
            packs.setdefault(record.pack, []).extend(chunks)
    yield from packs.values()


def scratch_tensor(reader: ContainerReader, storage: int, chunk: int) -> torch.Tensor:
    """The buffer of the calling thread, shaped for the elements of one chunk; the next call overwrites it."""
    spec = reader.chunk_spec(storage, chunk)
    return scratch_elements("decode", spec.dtype.torch, spec.numel)
