"""Takes parts of tensors from a container, with only the chunks that they need."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch

from ckpt8.container import frames
from ckpt8.container.reader import ContainerReader
from ckpt8.core.workers import Workers

_BLOCK = 1 << 20
"""Elements to decode at once where the elements of a part do not follow each other in the tensor."""

_Piece = tuple[int, slice, slice]
"""A chunk, the elements to take from it, and their place in the target."""


class SliceReader:
    """Fills tensors from parts of the storages of one container."""

    def __init__(self, reader: ContainerReader, workers: Workers) -> None:
        self._reader = reader
        self._workers = workers
        self._last: tuple[int, int, torch.Tensor] | None = None

    def copy(
        self,
        storage: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """Fill ``target`` with a box of the contiguous tensor of ``shape`` in ``storage``. Raises InputError."""
        if not prod(lengths):
            return
        if _is_flagged(target):
            whole = torch.empty(tuple(lengths), dtype=target.dtype, device="cpu")
            self.copy(storage, shape, offsets, lengths, whole)
            target.copy_(whole)
        elif target.is_contiguous() and _is_run(shape, lengths):
            self._copy_run(storage, _position(shape, offsets), target.view(-1))
        else:
            self._copy_box(storage, 0, shape, offsets, lengths, target)

    def copy_bytes(
        self,
        storage: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
        dtype: torch.dtype,
    ) -> None:
        """As ``copy``, of a tensor of ``dtype`` in a storage of bytes."""
        size = dtype.itemsize
        plain = target.is_contiguous() and not _is_flagged(target)
        direct = plain and target.device.type == "cpu" and target.dtype == dtype
        whole = target if direct else torch.empty(tuple(lengths), dtype=dtype, device="cpu")
        view = whole.view(-1).view(torch.uint8).view(*lengths, size)
        self.copy(storage, (*shape, size), (*offsets, 0), (*lengths, size), view)
        if not direct:
            target.copy_(whole)

    def read_bytes(self, storage: int, start: int, length: int) -> torch.Tensor:
        """Bytes ``start`` to ``start + length`` of a storage of bytes."""
        found = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._copy_run(storage, start, found)
        return found

    def _copy_run(self, storage: int, start: int, target: torch.Tensor) -> None:
        dtype = self._reader.manifest.storages[storage].dtype.torch

        def decode(piece: _Piece) -> None:
            chunk, inside, place = piece
            out = target[place]
            direct = out.dtype == dtype and out.device.type == "cpu"
            if direct and len(out) == self._reader.chunk_spec(storage, chunk).numel:
                self._reader.decode_chunk(storage, chunk, out)
            else:
                out.copy_(self._reader.read_chunk(storage, chunk)[inside])

        for _ in self._workers.map(decode, _pieces(start, target.numel())):
            pass

    def _copy_box(
        self,
        storage: int,
        base: int,
        shape: Sequence[int],
        offsets: Sequence[int],
        lengths: Sequence[int],
        target: torch.Tensor,
    ) -> None:
        """As ``copy``, some rows at a time. ``base`` is the position of the tensor in its storage."""
        row = prod(shape[1:])
        start = base + offsets[0] * row
        if len(shape) > 1 and row > _BLOCK:
            for k in range(lengths[0]):
                self._copy_box(storage, start + k * row, shape[1:], offsets[1:], lengths[1:], target[k])
            return
        step = max(1, _BLOCK // row)
        for first in range(0, lengths[0], step):
            rows = min(step, lengths[0] - first)
            block = self._flat(storage, start + first * row, rows * row).view(rows, *shape[1:])
            for dim, (offset, length) in enumerate(zip(offsets[1:], lengths[1:], strict=True), 1):
                block = block.narrow(dim, offset, length)
            target[first : first + rows].copy_(block)

    def _flat(self, storage: int, start: int, length: int) -> torch.Tensor:
        """A run of a storage. Keeps the last chunk, since the next run begins in it."""
        out = torch.empty(length, dtype=self._reader.manifest.storages[storage].dtype.torch, device="cpu")
        for chunk, inside, place in _pieces(start, length):
            if self._last is None or self._last[:2] != (storage, chunk):
                self._last = storage, chunk, self._reader.read_chunk(storage, chunk)
            out[place] = self._last[2][inside]
        return out


def _is_flagged(target: torch.Tensor) -> bool:
    """Whether the values of a tensor are not those in its memory, but their conjugates or negatives."""
    return target.is_conj() or target.is_neg()


def _pieces(start: int, length: int) -> Iterator[_Piece]:
    """The chunks that hold ``length`` elements of a storage from ``start`` on."""
    at = 0
    while at < length:
        chunk, first = divmod(start + at, frames.FRAME)
        count = min(frames.FRAME - first, length - at)
        yield chunk, slice(first, first + count), slice(at, at + count)
        at += count


def _is_run(shape: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether the elements of a box follow each other in the tensor."""
    cut = next((k for k, length in enumerate(lengths) if length != 1), len(lengths))
    return list(lengths[cut + 1 :]) == list(shape[cut + 1 :])


def _position(shape: Sequence[int], offsets: Sequence[int]) -> int:
    """Where the element at ``offsets`` is in the flat tensor."""
    position = 0
    for size, offset in zip(shape, offsets, strict=True):
        position = position * size + offset
    return position
