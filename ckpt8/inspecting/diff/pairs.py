"""The elements of two tensors side by side, in pieces of bounded size, and what is measured on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
"""Elements that are read at once: enough that a container decodes on several threads."""

OPAQUE = frozenset({DType.FLOAT4_E2M1FN_X2, DType.QINT8, DType.QUINT8, DType.QINT32, DType.QUINT4X2, DType.QUINT2X4})
"""Types whose elements torch does not give as numbers: only their bits are compared."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tensors of one shape, seen so that they are read in an order that suits the first.

    Every element stands for ``repeat``: those that a tensor repeats without storing them are read once.
    """

    a: Tensor
    b: Tensor
    first: TensorRef
    second: TensorRef
    repeat: int = 1

    @property
    def numel(self) -> int:
        """Elements to read of each."""
        return self.first.numel


@dataclass(frozen=True, slots=True)
class _Piece:
    """``itemsize`` bytes are an element of what is compared as bytes; it is 0 for numbers."""

    number: int
    a: torch.Tensor
    b: torch.Tensor
    itemsize: int


def make_pair(a: Tensor, b: Tensor) -> Pair:
    """Two tensors of one shape. Raises InputError where both repeat more elements than are stored, and differently."""
    first, second, repeat = _collapsed(a.ref, b.ref)
    order = sorted(range(len(first.shape)), key=lambda dim: -first.stride[dim])
    first, second = _permuted(first, order), _permuted(second, order)
    if _is_expanded(a, first) and _is_expanded(b, second):
        if first.stride != second.stride:
            a.part.data.check_extent(a.name, first)
        # Windows that overlap: all that they lie over stands for them.
        first, second = (replace(ref, shape=(ref.span,), stride=(1,)) for ref in (first, second))
    if a.ref.dtype in OPAQUE or b.ref.dtype in OPAQUE:
        first, second = _as_bytes(first), _as_bytes(second)
    return Pair(a, b, first, second, repeat)


def _collapsed(a: TensorRef, b: TensorRef) -> tuple[TensorRef, TensorRef, int]:
    """Both without the dimensions that both only repeat, and how often all is repeated."""
    dims = range(len(a.shape))
    repeated = {dim for dim in dims if a.shape[dim] > 1 and a.stride[dim] == b.stride[dim] == 0}
    shape = tuple(1 if dim in repeated else a.shape[dim] for dim in dims)
    return replace(a, shape=shape), replace(b, shape=shape), prod(a.shape[dim] for dim in repeated)


def _permuted(ref: TensorRef, order: Sequence[int]) -> TensorRef:
    shape, stride = (tuple(values[dim] for dim in order) for values in (ref.shape, ref.stride))
    return replace(ref, shape=shape, stride=stride)


def _is_expanded(tensor: Tensor, ref: TensorRef) -> bool:
    stored = tensor.part.data.storage(ref.key).nbytes
    return ref.nbytes > max(stored, FRAME)


def _as_bytes(ref: TensorRef) -> TensorRef:
    size = ref.dtype.itemsize
    stride = (*(step * size for step in ref.stride), 1)
    return TensorRef(ref.key, DType.UINT8, ref.offset * size, (*ref.shape, size), stride)


def compare(pairs: Sequence[Pair], workers: Workers, progress: Progress) -> list[Change]:
    """Measure all pairs; ``progress`` is called with bytes that were read. Raises InputError for damage."""
    changes = [Change() for _ in pairs]
    for number, found in workers.map(_measure, _pieces(pairs, progress), ahead=0):
        changes[number].merge(found)
    return [change.times(pair.repeat) for change, pair in zip(changes, pairs, strict=True)]


def _measure(piece: _Piece) -> tuple[int, Change]:
    if piece.itemsize == 0:
        return piece.number, measure(piece.a, piece.b)
    count = len(piece.a) // piece.itemsize
    unequal = piece.a.ne(piece.b).view(count, piece.itemsize).any(1)
    return piece.number, Change(count, int(unequal.count_nonzero()), excluded=count)


def _pieces(pairs: Sequence[Pair], progress: Progress) -> Iterator[_Piece]:
    """Of all pairs, in the order in which the first source has them: pieces to be measured, of a frame each."""
    places = {id(part.data): k for k, part in enumerate({id(p.a.part.data): p.a.part for p in pairs}.values())}

    def place(number: int) -> tuple[int, int, int]:
        pair = pairs[number]
        data = pair.a.part.data
        return places[id(data)], data.storage(pair.first.key).offset, pair.first.offset

    for number in sorted(range(len(pairs)), key=place):
        pair = pairs[number]
        checks = [_Checksum(pair.a, pair.first), _Checksum(pair.b, pair.second)]
        for start in range(0, pair.numel, _READ):
            stop = min(start + _READ, pair.numel)
            blocks = []
            for tensor, ref, check in zip((pair.a, pair.b), (pair.first, pair.second), checks, strict=True):
                block = tensor.part.data.elements(ref, start, stop)
                check.add(block)
                progress((stop - start) * ref.dtype.itemsize)
                blocks.append(block)
            opaque = pair.first.dtype is DType.UINT8 and pair.a.ref.dtype in OPAQUE
            itemsize = pair.a.ref.dtype.itemsize if opaque else 0
            for at in range(0, stop - start, FRAME):
                yield _Piece(number, blocks[0][at : at + FRAME], blocks[1][at : at + FRAME], itemsize)
        for check in checks:
            check.finish()


class _Checksum:
    """Of a tensor that is the whole of a storage whose checksum the source states: holds its bytes against that."""

    def __init__(self, tensor: Tensor, ref: TensorRef) -> None:
        crcs: Mapping[str, int] = tensor.part.crcs
        storage = tensor.part.data.storage(ref.key)
        whole = ref.is_contiguous and not ref.offset and ref.nbytes == storage.nbytes
        plain = whole and not (ref.conj or ref.neg)
        self._expected = crcs.get(ref.key) if plain else None
        self._crc = 0
        self._where = f"{tensor.part.data.label}: {tensor.name}"

    def add(self, block: torch.Tensor) -> None:
        """The next elements."""
        if self._expected is not None:
            self._crc = crc32(bytes_of(block), self._crc)

    def finish(self) -> None:
        """Raise InputError unless the checksum is that of all that was added."""
        if self._expected is not None and self._crc != self._expected:
            raise InputError(f"{self._where}: checksum and bytes do not match; the file is damaged")
