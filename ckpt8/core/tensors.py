"""Element types, roles and specifications of tensors. Only ``DType.torch`` imports torch."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from math import prod
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

Parts = dict[str, "torch.Tensor"]
"""The named flat tensors that a codec stores, for example ``{"codes": int8, "scales": uint16}``."""


class DType(enum.Enum):
    """Element types. The value is torch's name; ``itemsize`` is in bytes.

    ``storage_class`` is the legacy typed storage under which torch pickles the type, or None where there is none.
    """

    FLOAT64 = ("float64", 8, "DoubleStorage")
    FLOAT32 = ("float32", 4, "FloatStorage")
    FLOAT16 = ("float16", 2, "HalfStorage")
    BFLOAT16 = ("bfloat16", 2, "BFloat16Storage")
    INT64 = ("int64", 8, "LongStorage")
    INT32 = ("int32", 4, "IntStorage")
    INT16 = ("int16", 2, "ShortStorage")
    INT8 = ("int8", 1, "CharStorage")
    UINT8 = ("uint8", 1, "ByteStorage")
    BOOL = ("bool", 1, "BoolStorage")
    UINT16 = ("uint16", 2, None)
    UINT32 = ("uint32", 4, None)
    UINT64 = ("uint64", 8, None)
    COMPLEX32 = ("complex32", 4, None)
    COMPLEX64 = ("complex64", 8, "ComplexFloatStorage")
    COMPLEX128 = ("complex128", 16, "ComplexDoubleStorage")
    FLOAT8_E4M3FN = ("float8_e4m3fn", 1, None)
    FLOAT8_E5M2 = ("float8_e5m2", 1, None)
    FLOAT8_E4M3FNUZ = ("float8_e4m3fnuz", 1, None)
    FLOAT8_E5M2FNUZ = ("float8_e5m2fnuz", 1, None)
    FLOAT8_E8M0FNU = ("float8_e8m0fnu", 1, None)
    FLOAT4_E2M1FN_X2 = ("float4_e2m1fn_x2", 1, None)
    QINT8 = ("qint8", 1, "QInt8Storage")
    QUINT8 = ("quint8", 1, "QUInt8Storage")
    QINT32 = ("qint32", 4, "QInt32Storage")
    QUINT4X2 = ("quint4x2", 1, "QUInt4x2Storage")
    QUINT2X4 = ("quint2x4", 1, "QUInt2x4Storage")

    __hash__ = object.__hash__
    """A checkpoint has millions of lookups by type, and an ``Enum`` hashes its name in Python."""

    def __init__(self, label: str, itemsize: int, storage_class: str | None) -> None:
        self.label, self.itemsize, self.storage_class = label, itemsize, storage_class

    @property
    def is_plane_float(self) -> bool:
        """Whether this is an IEEE-style float of 16 to 64 bits, which is stored as byte planes."""
        return self in _PLANE_FLOATS

    @property
    def is_floating(self) -> bool:
        """Whether this is a real float of 8 to 64 bits."""
        return self in _PLANE_FLOATS or self in _FLOAT8

    @cached_property
    def torch(self) -> torch.dtype:
        """The torch dtype (imports torch)."""
        import torch

        return getattr(torch, self.label)  # type: ignore[no-any-return]

    @classmethod
    def from_label(cls, label: str) -> DType:
        """Look up by torch's name, with or without the ``torch.`` prefix. Raises KeyError."""
        return _BY_LABEL[label.removeprefix("torch.")]

    @classmethod
    def from_storage_class(cls, name: str) -> DType:
        """Look up by legacy storage class (``FloatStorage``). Raises KeyError."""
        return _BY_STORAGE_CLASS[name]


_FLOAT8 = frozenset({DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2, DType.FLOAT8_E4M3FNUZ, DType.FLOAT8_E5M2FNUZ})
_PLANE_FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
_BY_LABEL = {dtype.label: dtype for dtype in DType}
_BY_STORAGE_CLASS = {dtype.storage_class: dtype for dtype in DType if dtype.storage_class}


@cache
def dtype_of(dtype: torch.dtype) -> DType:
    """The element type of torch. Raises KeyError for one that no file has."""
    return DType.from_label(str(dtype))


class Role(str, enum.Enum):
    """The purpose of a tensor, judged by its place in the checkpoint and never by its values."""

    WEIGHT = "weight"
    MOMENT1 = "moment1"
    MOMENT2 = "moment2"
    OTHER = "other"


class TensorSpec(NamedTuple):
    """Name, role, element type and shape of a tensor, without its values."""

    name: str
    role: Role
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


class Strided:
    """Base of records of a strided tensor over a storage; ``stride`` is in elements of ``dtype``."""

    __slots__ = ()

    dtype: DType
    shape: Sequence[int]
    stride: Sequence[int]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def span(self) -> int:
        """Elements of the storage from the first to the last of the tensor; 0 for an empty tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in the storage in the order of the dimensions."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a tensor whose elements follow each other, in elements: one for each dimension."""
    strides, step = list[int](), 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


class PartSpec(NamedTuple):
    """Element type and element count of one part."""

    dtype: DType
    numel: int

    @property
    def nbytes(self) -> int:
        """Size in bytes before entropy coding."""
        return self.numel * self.dtype.itemsize

    @property
    def is_symbols(self) -> bool:
        """Whether it holds symbols, which the container packs: see ``container.symbols``."""
        return self.dtype is DType.INT32


SMALL_NUMEL = 4096
"""Biases and norms: below this size, 1-D tensors below 65,536, a tensor costs little and stays exact."""


def is_small(shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape is a bias, a norm or otherwise too small to be worth an error."""
    numel = prod(shape)
    return numel < SMALL_NUMEL or (len(shape) <= 1 and numel < 65_536)


Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a part of a tensor, by dimension."""


def cut_into_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[int, Box]]:
    """Boxes that make up elements ``start`` to ``stop`` of a tensor, each with the position of its first element.

    Whole rows and parts of rows: at most two boxes for each dimension.
    """
    if not shape:
        yield start, ((), ())
        return
    inner = prod(shape[1:])
    while start < stop:
        row, into = divmod(start, inner)
        rows = (stop - start) // inner if into == 0 else 0
        if rows:
            yield start, ((row, *(0 for _ in shape[1:])), (rows, *shape[1:]))
            start += rows * inner
        else:
            taken = min(stop - start, inner - into)
            for at, (offsets, sizes) in cut_into_boxes(shape[1:], into, into + taken):
                yield row * inner + at, ((row, *offsets), (1, *sizes))
            start += taken


def overlap(one: Box, other: Box) -> Box | None:
    """The part of a tensor that is in both boxes, or None."""
    starts = tuple(map(max, one[0], other[0]))
    ends = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
    return (starts, sizes) if all(size > 0 for size in sizes) else None


def view_of_box(tensor: torch.Tensor, box: Box, origin: Sequence[int] | None = None) -> torch.Tensor:
    """The view of a box in a tensor, which is itself a box that begins at ``origin``. Sparse tensors have no parts."""
    for dim, (offset, size, first) in enumerate(zip(*box, origin or [0] * len(box[0]), strict=True)):
        tensor = tensor if size == tensor.shape[dim] else tensor.narrow(dim, offset - first, size)
    return tensor
