"""Reads two tensors side by side, in pieces of bounded size, and measures how they differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from ckpt8.checkpoint.tree import TensorRef
from ckpt8.container.frames import FRAME, bytes_of
from ckpt8.core.errors import InputError
from ckpt8.core.files.crc import crc32
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Progress, Workers
from ckpt8.inspecting.diff.change import Change, measure
from ckpt8.inspecting.diff.leaves import Tensor

_READ = 4 * FRAME
"""Elements of one read: enough for a container to decode on several threads."""

OPAQUE = frozenset({DType.FLOAT4_E2M1FN_X2, DType.QINT8, DType.QUINT8, DType.QINT32, DType.QUINT4X2, DType.QUINT2X4})
"""Types whose elements torch does not give as numbers: ``diff`` compares only their bits."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one shape; ``first`` and ``second`` have their dimensions in the order that suits the first.

    Every element counts ``repeat`` times: elements that both only repeat, as expanded tensors do, are read once.
    """

    a: Tensor
    b: Tensor
    first: TensorRef
    second: TensorRef
    repeat: int = 1


_Piece = tuple[int, int, torch.Tensor, torch.Tensor]
"""The number of a pair, the bytes of each opaque element (0 for numbers), and the same elements of both."""


def make_pair(a: Tensor, b: Tensor) -> Pair:
    """Pair two tensors of one shape. Raises InputError if both repeat more elements than they store, in two ways."""
    first, second, repeat = a.ref, b.ref, 1
    if not (first.is_contiguous and second.is_contiguous):
        first, second, repeat = _collapsed(first, second)
        order = sorted(range(len(first.shape)), key=lambda dim: -first.stride[dim])
        first, second = _permuted(first, order), _permuted(second, order)
        if _is_expanded(a, first) and _is_expanded(b, second):
            if first.stride != second.stride:
                a.part.data.check_extent(a.name, first)
            # Windows that overlap: compare the run of elements under them instead.
            first, second = (replace(ref, shape=(ref.span,), stride=(1,)) for ref in (first, second))
    if a.ref.dtype in OPAQUE or b.ref.dtype in OPAQUE:
        first, second = _as_bytes(first), _as_bytes(second)
    return Pair(a, b, first, second, repeat)


def _collapsed(a: TensorRef, b: TensorRef) -> tuple[TensorRef, TensorRef, int]:
    """Both with size 1 in dimensions that both only repeat, and how often these repeat every element."""
    dims = range(len(a.shape))
    repeated = {dim for dim in dims if a.shape[dim] > 1 and a.stride[dim] == b.stride[dim] == 0}
    shape = tuple(1 if dim in repeated else a.shape[dim] for dim in dims)
    return replace(a, shape=shape), replace(b, shape=shape), prod(a.shape[dim] for dim in repeated)


def _permuted(ref: TensorRef, order: Sequence[int]) -> TensorRef:
    shape, stride = (tuple(values[dim] for dim in order) for values in (ref.shape, ref.stride))
    return replace(ref, shape=shape, stride=stride)


def _is_expanded(tensor: Tensor, ref: TensorRef) -> bool:
    return ref.nbytes > max(tensor.part.data.storage(ref.key).nbytes, FRAME)


def _as_bytes(ref: TensorRef) -> TensorRef:
    size = ref.dtype.itemsize
    stride = (*(step * size for step in ref.stride), 1)
    return TensorRef(ref.key, DType.UINT8, ref.offset * size, (*ref.shape, size), stride)


def compare(pairs: Sequence[Pair], workers: Workers, progress: Progress) -> list[Change]:
    """Measure all pairs; calls ``progress`` with numbers of bytes that it has read. Raises InputError for damage."""
    changes = [Change() for _ in pairs]
    for number, found in workers.map(_measure, _pieces(pairs, progress), ahead=0):
        changes[number].merge(found)
    return [
        change if pair.repeat == 1 else change.times(pair.repeat) for change, pair in zip(changes, pairs, strict=True)
    ]


def _measure(piece: _Piece) -> tuple[int, Change]:
    number, itemsize, a, b = piece
    if itemsize == 0:
        return number, measure(a, b)
    unequal = a.ne(b).view(-1, itemsize).any(1)
    return number, Change(len(unequal), int(unequal.count_nonzero()), excluded=len(unequal))


def _pieces(pairs: Sequence[Pair], progress: Progress) -> Iterator[_Piece]:
    """All pairs, in the order of the first source, cut into pieces of a frame."""
    places = {id(part.data): k for k, part in enumerate({id(p.a.part.data): p.a.part for p in pairs}.values())}

    def place(number: int) -> tuple[int, int, int]:
        pair = pairs[number]
        data = pair.a.part.data
        return places[id(data)], data.storage(pair.first.key).offset, pair.first.offset

    for number in sorted(range(len(pairs)), key=place):
        pair = pairs[number]
        numel = pair.first.numel
        if not (numel or pair.a.part.crcs or pair.b.part.crcs):
            continue  # nothing to read, and no checksum of nothing
        views = _View(pair.a, pair.first, progress), _View(pair.b, pair.second, progress)
        opaque = pair.first.dtype is DType.UINT8 and pair.a.ref.dtype in OPAQUE
        itemsize = pair.a.ref.dtype.itemsize if opaque else 0
        for start in range(0, numel, _READ):
            a, b = (view.read(start, min(start + _READ, numel)) for view in views)
            for at in range(0, len(a), FRAME):
                yield number, itemsize, a[at : at + FRAME], b[at : at + FRAME]
        for view in views:
            view.finish()


class _View:
    """Reads a tensor block by block, and checks its bytes if the source states a checksum for exactly these."""

    def __init__(self, tensor: Tensor, ref: TensorRef, progress: Progress) -> None:
        self._tensor, self._ref, self._progress = tensor, ref, progress
        storage = tensor.part.data.storage(ref.key)
        whole = ref.is_contiguous and not ref.offset and ref.nbytes == storage.nbytes
        plain = whole and not (ref.conj or ref.neg)
        self._expected = tensor.part.crcs.get(ref.key) if plain else None
        self._crc = 0

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Elements ``start`` to ``stop``. The caller reads every block once, in order. Raises InputError."""
        block = self._tensor.part.data.elements(self._ref, start, stop)
        if self._expected is not None:
            self._crc = crc32(bytes_of(block), self._crc)
        self._progress((stop - start) * self._ref.dtype.itemsize)
        return block

    def finish(self) -> None:
        """Raise InputError unless all blocks together have the stated checksum."""
        if self._expected is not None and self._crc != self._expected:
            where = f"{self._tensor.part.data.label}: {self._tensor.name}"
            raise InputError(f"{where}: checksum and bytes do not match; the file is damaged")
