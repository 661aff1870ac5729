"""One checkpoint made of parts: storages of several files, and storages whose bytes are computed on reading.

A part is a ``Region``, with as many addresses as it has bytes. Tensors refer to regions as the tensors of a file refer
to its storages. So all that works on the tree of a file works on this one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from ckpt8.checkpoint.sources.values import Streamer
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, StorageRef, TensorRef, cut_by_runs
from ckpt8.container.frames import FRAME, bytes_of, host_bytes
from ckpt8.core.elements import rows
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import DType

BLOCK = 8 * FRAME
"""Elements to read and write at once, a multiple of every group and tile: 32 MiB of float32."""


class Region(Protocol):
    """Bytes that can be read from the start of any element."""

    @property
    def nbytes(self) -> int:
        """The number of bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset``, where an element begins. Raises InputError."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of bytes of an open checkpoint."""

    checkpoint: Checkpoint
    start: int
    nbytes: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the checkpoint."""
        self.checkpoint.read_into(self.start + offset, buffer)


class Composite:
    """A Checkpoint of regions. ``label`` names the source in messages; the caller sets ``tree``."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.format = "composite"
        self.size = 0
        self.tree: Any = None
        self._regions: list[tuple[int, Region]] = []
        self._places: dict[str, StorageInfo] = {}
        self._adopted: list[Checkpoint] = []
        self._streamer: tuple[int, Streamer] | None = None

    def add(self, region: Region, dtype: DType, key: str | None = None) -> str:
        """Give a region addresses, and a key of its own unless ``key`` is given. Returns the key.

        Raises InputError for a key that is taken: files choose the keys of their storages.
        """
        if key is None:
            key = f"computed/{len(self._regions)}"
            while key in self._places:
                key += "'"
        if key in self._places:
            raise InputError(f"{self.label}: has two storages of the name {key[:60]!r}")
        self._places[key] = StorageInfo(key, dtype, self.size, region.nbytes)
        self._regions.append((self.size, region))
        # An empty region has an address too, so that no two begin at the same.
        self.size += max(region.nbytes, 1)
        return key

    def tensor(self, region: Region, dtype: DType, shape: tuple[int, ...]) -> TensorRef:
        """A contiguous tensor that is all of a region."""
        return TensorRef.whole(self.add(region, dtype), dtype, shape)

    def adopt(self, checkpoint: Checkpoint, prefix: str = "") -> None:
        """Take over all storages of an open checkpoint; ``prefix`` comes before their keys. Raises InputError."""
        self._adopted.append(checkpoint)
        for storage in checkpoint.storages:
            self.add(Stretch(checkpoint, storage.offset, storage.nbytes), storage.dtype, prefix + storage.key)

    @property
    def storages(self) -> Sequence[StorageInfo]:
        """The storages in the order of their addresses."""
        return list(self._places.values())

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def storage(self, key: str) -> StorageInfo:
        """Where the region of that key is."""
        return self._places[key]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from the region at the address ``offset``. Raises InputError."""
        for (_, region), at, part in cut_by_runs(self._regions, offset, buffer):
            region.read_into(at, part)

    def check_unchanged(self) -> None:
        """Raise InputError when an adopted file changed since it was opened."""
        for checkpoint in self._adopted:
            checkpoint.check_unchanged()

    def elements(self, ref: TensorRef, start: int, stop: int) -> torch.Tensor:
        """A flat copy of elements ``start`` to ``stop`` of a tensor, in the order of its dimensions.

        Raises InputError.
        """
        if ref.is_contiguous:
            content = host_bytes((stop - start) * ref.dtype.itemsize)
            place = self._places[ref.key].offset + (ref.offset + start) * ref.dtype.itemsize
            self.read_into(place, bytes_of(content))
            found = content.view(ref.dtype.torch)
        else:
            # A tensor without memory shows the offsets, shapes and strides of the rows.
            shape = torch.empty(ref.offset + ref.span, dtype=torch.uint8, device="meta")
            parts = rows(shape.as_strided(ref.shape, ref.stride, ref.offset), start, stop)
            found = torch.cat([self._copied(ref, part) for part in parts])
        found = found.conj_physical() if ref.conj else found
        return found.neg() if ref.neg else found

    def _copied(self, ref: TensorRef, part: torch.Tensor) -> torch.Tensor:
        """The elements of a ``part`` of a tensor, flat."""
        if self._streamer is None or self._streamer[0] != len(self._places):
            self._streamer = len(self._places), Streamer(self)
        copied = torch.empty(part.shape, dtype=ref.dtype.torch, device="cpu")
        place = replace(ref, offset=int(part.storage_offset()), shape=tuple(part.shape), stride=part.stride())
        self._streamer[1].copy(place, copied)
        return copied.view(-1)

    def blocks(self, ref: TensorRef) -> Iterator[torch.Tensor]:
        """All elements of a tensor, flat, block by block. Raises InputError."""
        for start in range(0, ref.numel, BLOCK):
            yield self.elements(ref, start, min(start + BLOCK, ref.numel))

    def check_extent(self, name: str, ref: TensorRef) -> None:
        """Raise InputError for a tensor that repeats elements of its storage: a few bytes could fill a disk."""
        if ref.nbytes > max(self._places[ref.key].nbytes, FRAME):
            raise InputError(f"{self.label}: {name}: has more elements than are stored (it was expanded)")


def cut(offset: int, buffer: memoryview, itemsize: int, block: int = BLOCK) -> Iterator[tuple[int, int, memoryview]]:
    """The elements that ``buffer`` takes from ``offset`` bytes on, ``block`` at a time, as (first, end, place)."""
    first, count = offset // itemsize, len(buffer) // itemsize
    for start in range(0, count, block):
        stop = min(start + block, count)
        yield first + start, first + stop, buffer[start * itemsize : stop * itemsize]


def put(values: torch.Tensor, buffer: memoryview) -> None:
    """Copy the bytes of flat, contiguous ``values`` into ``buffer``, which has their length."""
    buffer[:] = bytes_of(values)


def add_prefix(node: Any, prefix: str) -> Any:
    """A copy of plain containers with ``prefix`` before the keys of all storages. Other objects stay as they are.

    A container that stands at several places, or in itself, is copied once.
    """
    made: dict[int, Any] = {}

    def copy(node: Any) -> Any:
        if isinstance(node, (TensorRef, StorageRef)):
            return replace(node, key=prefix + node.key)
        if id(node) not in made and isinstance(node, dict):
            found: dict[Any, Any] = {}
            made[id(node)] = found
            found.update((key, copy(value)) for key, value in node.items())
        elif id(node) not in made and isinstance(node, list):
            several: list[Any] = []
            made[id(node)] = several
            several += map(copy, node)
        elif id(node) not in made and isinstance(node, tuple):
            made[id(node)] = tuple(map(copy, node))
        return made.get(id(node), node)

    return copy(node)
