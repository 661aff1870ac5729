"""One checkpoint made of parts: storages of several files, and storages whose bytes are computed on reading.

A part is a region, with as many addresses as it has bytes. Tensors refer to regions as the tensors of a file refer to
its storages. So all that works on the tree of a file works on this one. ``Streamer`` reads the values of saved tensors
in pieces of bounded size, into tensors of any device and stride.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ckpt8.checkpoint.tree import Checkpoint, ReadsPieces, StorageInfo, StorageRef, TensorRef, cut_by_runs, is_dense
from ckpt8.container.frames import FRAME, bytes_of
from ckpt8.core.arrays import Array, as_array, as_tensor, empty
from ckpt8.core.errors import InputError
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType
from ckpt8.core.workers import assign, rows

BLOCK = 4 * FRAME
"""Elements to read and write at once, a multiple of every group and tile: 16 MiB of float32."""


class Fill(NamedTuple):
    """Fills a live value, mostly a tensor: ``write`` reads the saved tensor ``ref``, and may raise InputError."""

    ref: TensorRef
    write: Callable[[Streamer], None]


class Streamer:
    """Reads tensors of one checkpoint piece by piece, through one buffer.

    ``copy_on_device``, where given, tries first: it fills a tensor and returns whether it could. Raises InputError.
    """

    def __init__(
        self, checkpoint: Checkpoint, copy_on_device: Callable[[TensorRef, torch.Tensor], bool] | None = None
    ) -> None:
        self._checkpoint, self._copy_on_device = checkpoint, copy_on_device
        self._storages = {storage.key: storage for storage in checkpoint.storages}
        self._buffer = bytearray()

    def run(self, fills: Iterable[Fill]) -> None:
        """Run all ``fills`` in the order of the file. Raises InputError for damage and failed reads."""
        for fill in sorted(fills, key=lambda fill: (self._storages[fill.ref.key].offset, fill.ref.offset)):
            fill.write(self)

    def values(self, ref: TensorRef) -> Iterator[tuple[int, torch.Tensor]]:
        """The elements of ``ref`` as float32, flat, in the order of its dimensions: the start of a piece and the piece.

        A piece starts at a multiple of BLOCK and is valid until the next.
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
        if not is_dense(ref):
            self._copy_strided(ref, target)
            return
        # In the order of its dimensions in memory a dense tensor is one run of its storage.
        order = sorted(range(len(ref.shape)), key=lambda dim: (-ref.stride[dim], ref.shape[dim] != 1))
        target = target.permute(order) if order else target.reshape(1)
        for start, stop in _pieces(ref.offset, ref.offset + target.numel()):
            assign(target, start - ref.offset, self._read(ref, start, stop - start))

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
        return all(
            bytes(self._content(one, one.offset + start, stop - start))
            == self._content(other, other.offset + start, stop - start)
            for start, stop in _pieces(0, one.numel)
        )

    def _copy_strided(self, ref: TensorRef, target: torch.Tensor) -> None:
        """Copy a tensor with overlaps or gaps: cut it along the longest stride until its parts span few elements."""
        dims = [dim for dim, n in enumerate(ref.shape) if n > 1]
        if ref.span <= BLOCK or not dims:
            target.copy_(self._read(ref, ref.offset, ref.span).as_strided(ref.shape, ref.stride))
            return
        dim = max(dims, key=lambda dim: ref.stride[dim])
        half = ref.shape[dim] // 2
        for start, length in ((0, half), (half, ref.shape[dim] - half)):
            shape = (*ref.shape[:dim], length, *ref.shape[dim + 1 :])
            part = replace(ref, offset=ref.offset + start * ref.stride[dim], shape=shape)
            self._copy_strided(part, target.narrow(dim, start, length))

    def _read(self, ref: TensorRef, start: int, length: int) -> torch.Tensor:
        """Elements of the storage of ``ref``, flat, in the buffer: valid until the next read."""
        return torch.frombuffer(self._content(ref, start, length), dtype=torch.uint8).view(ref.dtype.torch)

    def _content(self, ref: TensorRef, start: int, length: int) -> memoryview:
        """The bytes of elements, as ``_read``."""
        nbytes = length * ref.dtype.itemsize
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        view = memoryview(self._buffer)[:nbytes]
        self._checkpoint.read_into(self._storages[ref.key].offset + start * ref.dtype.itemsize, view)
        return view


def _pieces(start: int, stop: int) -> Iterable[tuple[int, int]]:
    """``start`` to ``stop`` cut at multiples of BLOCK, so that frames are read whole."""
    while start < stop:
        end = min(stop, (start // BLOCK + 1) * BLOCK)
        yield start, end
        start = end


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1).view(torch.uint8)


Read = Callable[[int, memoryview], None]
"""Fills a buffer with the bytes at an offset, where an element begins. Raises InputError."""


class Composite(ReadsPieces):
    """A Checkpoint of regions. ``label`` names the source in messages; the caller sets ``tree``.

    ``places`` are the storages by key, in the order of their addresses.
    """

    def __init__(self, label: str) -> None:
        self.label, self.format, self.size = label, "composite", 0
        self.tree: Any = None
        self._regions: list[tuple[int, Read]] = []
        self.places: dict[str, StorageInfo] = {}
        self._adopted: list[Checkpoint] = []
        self._streamer: tuple[int, Streamer] | None = None

    def add(self, read: Read, nbytes: int, dtype: DType, key: str | None = None) -> str:
        """Give a region addresses, and a key of its own unless ``key`` is given. Returns the key.

        Raises InputError for a key that is taken: files choose the keys of their storages.
        """
        if key is None:
            key = f"computed/{len(self._regions)}"
            while key in self.places:
                key += "'"
        if key in self.places:
            raise InputError(f"{self.label}: has two storages of the name {key[:60]!r}")
        self.places[key] = StorageInfo(key, dtype, self.size, nbytes)
        self._regions.append((self.size, read))
        # An empty region has an address too, so that no two begin at the same.
        self.size += max(nbytes, 1)
        return key

    def add_storage(self, checkpoint: Checkpoint, storage: StorageInfo, key: str) -> None:
        """Take over a storage of an open checkpoint under ``key``. Raises InputError."""
        self.add(
            lambda offset, buffer: checkpoint.read_into(storage.offset + offset, buffer),
            storage.nbytes,
            storage.dtype,
            key,
        )

    def adopt(self, checkpoint: Checkpoint, prefix: str = "") -> None:
        """Take over all storages of an open checkpoint; ``prefix`` comes before their keys. Raises InputError."""
        self._adopted.append(checkpoint)
        for storage in checkpoint.storages:
            self.add_storage(checkpoint, storage, prefix + storage.key)

    @property
    def storages(self) -> Sequence[StorageInfo]:
        """The storages in the order of their addresses."""
        return list(self.places.values())

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the region at the address ``offset``. Raises InputError."""
        for (_, read), at, part in cut_by_runs(self._regions, offset, buffer):
            read(at, part)

    def check_unchanged(self) -> None:
        """Raise InputError when an adopted file changed since it was opened."""
        for checkpoint in self._adopted:
            checkpoint.check_unchanged()

    def elements(self, ref: TensorRef, start: int, stop: int) -> torch.Tensor:
        """A flat copy of elements ``start`` to ``stop`` of a tensor, in the order of its dimensions.

        Raises InputError.
        """
        if ref.is_contiguous:
            values = as_tensor(self._run(ref, start, stop), ref.dtype)
        else:
            # A tensor without memory shows the offsets, shapes and strides of the rows.
            whole = torch.empty(ref.offset + ref.span, dtype=torch.uint8, device="meta")
            whole, copied = whole.as_strided(ref.shape, ref.stride, ref.offset), []
            if self._streamer is None or self._streamer[0] != len(self.places):
                self._streamer = len(self.places), Streamer(self)
            for part in rows(whole, start, stop):
                copied.append(torch.empty(part.shape, dtype=ref.dtype.torch, device="cpu"))
                shape, stride = tuple(part.shape), part.stride()
                piece = replace(ref, offset=int(part.storage_offset()), shape=shape, stride=stride)
                self._streamer[1].copy(piece, copied[-1])
            values = torch.cat([rows_of.view(-1) for rows_of in copied])
        values = values.conj_physical() if ref.conj else values
        return values.neg() if ref.neg else values

    def array(self, ref: TensorRef, start: int, stop: int) -> Array:
        """``elements`` in an array; without torch where they follow each other in their storage. Raises InputError."""
        plain = ref.is_contiguous and not (ref.conj or ref.neg)
        return self._run(ref, start, stop) if plain else as_array(self.elements(ref, start, stop))

    def _run(self, ref: TensorRef, start: int, stop: int) -> Array:
        """Elements that follow each other in their storage."""
        content = empty(stop - start, ref.dtype)
        place = self.places[ref.key].offset + (ref.offset + start) * ref.dtype.itemsize
        self.read_into(place, content.view(np.uint8).data)
        return content

    def blocks(self, ref: TensorRef) -> Iterator[Array]:
        """All elements of a tensor, flat, block by block. Raises InputError."""
        for start in range(0, ref.numel, BLOCK):
            yield self.array(ref, start, min(start + BLOCK, ref.numel))

    def check_extent(self, name: str, ref: TensorRef) -> None:
        """Raise InputError for a tensor that repeats elements of its storage: a few bytes could fill a disk."""
        if ref.nbytes > max(self.places[ref.key].nbytes, FRAME):
            raise InputError(f"{self.label}: {name}: has more elements than are stored (it was expanded)")


def cut(offset: int, buffer: memoryview, itemsize: int, block: int = BLOCK) -> Iterator[tuple[int, int, memoryview]]:
    """The elements that ``buffer`` takes from ``offset`` bytes on, ``block`` at a time, as (first, end, place)."""
    first, count = offset // itemsize, len(buffer) // itemsize
    for start in range(0, count, block):
        stop = min(start + block, count)
        yield first + start, first + stop, buffer[start * itemsize : stop * itemsize]


def add_prefix(node: Any, prefix: str) -> Any:
    """A copy of plain containers with ``prefix`` before the keys of all storages. Other objects stay as they are.

    A container that stands at several places, or in itself, is copied once.
    """
    made: dict[int, Any] = {}

    def copy(node: Any) -> Any:
        if isinstance(node, (TensorRef, StorageRef)):
            return replace(node, key=prefix + node.key)
        if id(node) not in made and isinstance(node, dict):
            copied: dict[Any, Any] = {}
            made[id(node)] = copied
            copied.update((key, copy(value)) for key, value in node.items())
        elif id(node) not in made and isinstance(node, list):
            several: list[Any] = []
            made[id(node)] = several
            several += map(copy, node)
        elif id(node) not in made and isinstance(node, tuple):
            made[id(node)] = tuple(map(copy, node))
        return made.get(id(node), node)

    return copy(node)


def computed(
    data: Composite,
    dtype: DType,
    shape: tuple[int, ...],
    compute: Callable[[int, int], Array | torch.Tensor],
    block: int = BLOCK,
) -> TensorRef:
    """A contiguous tensor of ``data``. ``compute(start, stop)`` returns its elements ``start`` to ``stop``, flat.

    It is called for a ``block`` of elements at a time when somebody reads them.
    """

    def read(offset: int, buffer: memoryview) -> None:
        for start, stop, place in cut(offset, buffer, dtype.itemsize, block):
            place[:] = bytes_of(compute(start, stop))

    return TensorRef.whole(data.add(read, prod(shape) * dtype.itemsize, dtype), dtype, shape)
