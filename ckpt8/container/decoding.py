"""Decodes storages, tensors and boxes of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from ckpt8.container.chunks import scratch_chunk
from ckpt8.container.header import FRAME
from ckpt8.container.manifest import TensorRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import as_array, as_tensor
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import Box, DType, cut_into_boxes, overlap, view_of_box
from ckpt8.core.workers import Workers


def decode_storage(reader: ContainerReader, storage: int) -> torch.Tensor:
    """One storage as a flat CPU tensor. Raises InputError that names the tensor where it is damaged."""
    record = reader.manifest.storages[storage]
    reader.need(storage)
    out = torch.empty(record.numel, dtype=record.dtype.torch, device="cpu")
    for chunk, start in enumerate(range(0, record.numel, FRAME)):
        reader.fill_chunk(storage, chunk, as_array(out[start : start + FRAME]))
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
            reader.fill_chunk(storage, chunk, as_array(out.view(-1).view(stored.torch)))
            return
        content = scratch_chunk(reader, storage, chunk)
        reader.fill_chunk(storage, chunk, content)
        elements = as_tensor(content, dtype)
        for at, (starts, sizes), both in parts:
            own = elements[at : at + prod(sizes)].view(sizes)
            view_of_box(target, both, offsets).copy_(view_of_box(own, both, starts))

    for _ in (workers.map if workers is not None else map)(decode, chunks()):
        pass


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at ``offsets`` is in the flat tensor."""
    return sum(offset * prod(shape[dim + 1 :]) for dim, offset in enumerate(offsets))
