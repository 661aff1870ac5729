"""Reads the values of saved tensors in pieces of bounded size, into tensors of any device and stride."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch

from ckpt8.checkpoint.tree import Checkpoint, TensorRef, is_dense
from ckpt8.container.frames import FRAME
from ckpt8.core.elements import assign

PIECE = 8 * FRAME
"""Elements to read at once: the copy needs 32 MiB of memory for float32."""


class Fill(Protocol):
    """A live value, mostly a tensor, that takes the values of one saved tensor."""

    @property
    def ref(self) -> TensorRef:
        """The saved tensor."""

    def fill(self, streamer: Streamer) -> None:
        """Read the saved tensor and write the live one. Raises InputError."""


class Streamer:
    """Reads tensors of one checkpoint piece by piece, through one buffer.

    ``copy_on_device``, where given, tries first: it fills a tensor and returns whether it could. Raises InputError.
    """

    def __init__(
        self, checkpoint: Checkpoint, copy_on_device: Callable[[TensorRef, torch.Tensor], bool] | None = None
    ) -> None:
        self._checkpoint = checkpoint
        self._copy_on_device = copy_on_device
        self._storages = {storage.key: storage for storage in checkpoint.storages}
        self._buffer = bytearray()

    def run(self, fills: Iterable[Fill]) -> None:
        """Run all ``fills`` in the order of the file. Raises InputError for damage and failed reads."""
        for fill in sorted(fills, key=lambda fill: (self._storages[fill.ref.key].offset, fill.ref.offset)):
            fill.fill(self)

    def values(self, ref: TensorRef) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements of ``ref`` as float32, flat, in the order of its dimensions: the start of a piece and the piece.

        A piece starts at a multiple of PIECE and is valid until the next.
        """
        if ref.is_contiguous:
            for start, stop in _pieces(0, ref.numel):
                yield start, self._read(ref, ref.offset + start, stop - start).float()
        else:
            whole = torch.empty(ref.shape, dtype=ref.dtype.torch, device="cpu")
            self.copy(ref, whole)
            yield 0, whole.view(-1).float()

    def copy(self, ref: TensorRef, target: torch.Tensor) -> None:
        """Fill ``target`` with the values of ``ref``."""
        if not target.numel() or (self._copy_on_device is not None and self._copy_on_device(ref, target)):
            return
        if is_dense(ref):
            self._copy_dense(ref, target)
        else:
            self._copy_strided(ref, target)

    def equal(self, one: TensorRef, other: TensorRef) -> bool:
        """Whether two tensors of one type and shape hold the same bytes."""
        if (one.key, one.offset, one.stride, one.conj, one.neg) == (
            other.key, other.offset, other.stride, other.conj, other.neg
        ):  # fmt: skip
            return True
        if (one.conj, one.neg) != (other.conj, other.neg):
            return False
        if not (is_dense(one) and one.stride == other.stride):
            # Rare, and small: rows of a flat buffer, saved twice.
            first, second = (torch.empty(ref.shape, dtype=ref.dtype.torch, device="cpu") for ref in (one, other))
            self.copy(one, first)
            self.copy(other, second)
            return torch.equal(_bytes(first), _bytes(second))
        for start, stop in _pieces(0, one.numel):
            first = self._read(one, one.offset + start, stop - start).clone()
            if not torch.equal(_bytes(first), _bytes(self._read(other, other.offset + start, stop - start))):
                return False
        return True

    def _copy_dense(self, ref: TensorRef, target: torch.Tensor) -> None:
        # In the order of its dimensions in memory a dense tensor is one run of its storage.
        order = sorted(range(len(ref.shape)), key=lambda dim: (-ref.stride[dim], ref.shape[dim] != 1))
        target = target.permute(order) if order else target.reshape(1)
        for start, stop in _pieces(ref.offset, ref.offset + target.numel()):
            assign(target, start - ref.offset, self._read(ref, start, stop - start))

    def _copy_strided(self, ref: TensorRef, target: torch.Tensor) -> None:
        """Copy a tensor with overlaps or gaps: cut it along the longest stride until its parts span few elements."""
        dims = [dim for dim, n in enumerate(ref.shape) if n > 1]
        if ref.span <= PIECE or not dims:
            values = self._read(ref, ref.offset, ref.span)
            target.copy_(values.as_strided(ref.shape, ref.stride))
            return
        dim = max(dims, key=lambda dim: ref.stride[dim])
        half = ref.shape[dim] // 2
        for start, length in ((0, half), (half, ref.shape[dim] - half)):
            shape = (*ref.shape[:dim], length, *ref.shape[dim + 1 :])
            part = replace(ref, offset=ref.offset + start * ref.stride[dim], shape=shape)
            self._copy_strided(part, target.narrow(dim, start, length))

    def _read(self, ref: TensorRef, start: int, length: int) -> torch.Tensor:
        """Elements of the storage of ``ref``, flat, in the buffer: valid until the next read."""
        nbytes = length * ref.dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        view = memoryview(self._buffer)[:nbytes]
        self._checkpoint.read_into(self._storages[ref.key].offset + start * ref.dtype.itemsize, view)
        return torch.frombuffer(view, dtype=torch.uint8).view(ref.dtype.torch)


def _pieces(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """``start`` to ``stop`` cut at multiples of PIECE, so that frames are read whole."""
    while start < stop:
        end = min(stop, (start // PIECE + 1) * PIECE)
        yield start, end
        start = end


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)
