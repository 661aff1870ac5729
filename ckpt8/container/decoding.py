"""Decodes storages, tensors and boxes of tensors, and checks every frame by decoding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from ckpt8.container.header import FRAME, chunk_count
from ckpt8.container.manifest import Pack, TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import Box, DType, cut_into_boxes, overlap, view_of_box
from ckpt8.core.workers import Progress, Workers, scratch_elements

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


def fill_box(
    reader: ContainerReader,
    storage: int,
    dtype: DType,
    shape: Sequence[int],
    target: torch.Tensor,
    offsets: Sequence[int] | None = None,
    workers: Workers | None = None,
) -> None:
    """Fill ``target``, of any type, strides and device, with its box of a tensor, which begins at ``offsets``.

    The contiguous tensor of ``dtype`` and ``shape`` is all of a storage; that may count elements of another size, such
    as bytes. Decodes only the chunks that have elements of the box. Raises InputError for damage.
    """
    if not target.numel():
        return
    shape, offsets = tuple(shape), tuple(offsets or [0] * len(shape))
    if shape and target.is_contiguous():
        # Dimensions behind the last one that is cut are one with it: most chunks then go where they belong.
        cut = max((dim for dim, size in enumerate(target.shape) if size != shape[dim]), default=0)
        inner = prod(shape[cut + 1 :])
        shape, offsets = (*shape[:cut], shape[cut] * inner), (*offsets[:cut], offsets[cut] * inner)
        target = target.view(*target.shape[:cut], -1)
    stored, box = reader.manifest.storages[storage].dtype, (offsets, tuple(target.shape))
    in_chunk = FRAME * stored.itemsize // dtype.itemsize

    def chunks() -> Iterator[tuple[int, list[tuple[int, Box, Box]]]]:
        """The chunks to decode, with their boxes, where these begin, and what is in the target."""
        ends = [offset + size - 1 for offset, size in zip(*box, strict=True)]
        for chunk in range(_position(shape, offsets) // in_chunk, _position(shape, ends) // in_chunk + 1):
            first = chunk * in_chunk
            boxes = cut_into_boxes(shape, first, min(first + in_chunk, prod(shape)))
            parts = [(at - first, own, both) for at, own in boxes if (both := overlap(own, box)) is not None]
            if parts:
                yield chunk, parts

    def decode(work: tuple[int, list[tuple[int, Box, Box]]]) -> None:
        chunk, parts = work
        spec = reader.chunk_spec(storage, chunk)
        out = view_of_box(target, parts[0][2], offsets)
        if (
            out.numel() * dtype.itemsize == spec.numel * stored.itemsize
            and (out.dtype, out.device.type) == (dtype.torch, "cpu")
            and out.is_contiguous()
            and not (out.is_conj() or out.is_neg())
            and stored.itemsize <= dtype.itemsize
        ):
            reader.fill_chunk(storage, chunk, out.view(-1).view(stored.torch))
            return
        elements = scratch_tensor(reader, storage, chunk)
        reader.fill_chunk(storage, chunk, elements)
        elements = elements.view(dtype.torch)
        for at, (starts, sizes), both in parts:
            own = elements[at : at + prod(sizes)].view(sizes)
            view_of_box(target, both, offsets).copy_(view_of_box(own, both, starts))

    for _ in (workers.map if workers is not None else map)(decode, chunks()):
        pass


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at ``offsets`` is in the flat tensor."""
    return sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))


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
