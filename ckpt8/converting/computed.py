"""Tensors that compute their elements when somebody reads them: casts, codes, scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from ckpt8.checkpoint.sources.composite import BLOCK, Composite, cut, put
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType

FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""The element types that can be cast."""


@dataclass(frozen=True, slots=True)
class Computed:
    """A region of ``numel`` elements. ``compute(start, stop)`` returns a block of them, flat and contiguous."""

    numel: int
    dtype: DType
    compute: Callable[[int, int], torch.Tensor]
    block: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.numel * self.dtype.itemsize

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises what ``compute`` raises."""
        for start, stop, place in cut(offset, buffer, self.dtype.itemsize, self.block):
            put(self.compute(start, stop), place)


def computed(
    data: Composite,
    dtype: DType,
    shape: tuple[int, ...],
    compute: Callable[[int, int], torch.Tensor],
    block: int = BLOCK,
) -> TensorRef:
    """A contiguous tensor of ``data``. ``compute(start, stop)`` returns its elements ``start`` to ``stop``, flat."""
    return data.tensor(Computed(prod(shape), dtype, compute, block), dtype, shape)


def hold(data: Composite, values: torch.Tensor) -> TensorRef:
    """A tensor of ``data`` with the values of one in memory, such as a step."""
    content = Held(bytes(bytes_of(values.contiguous())))
    return data.tensor(content, DType.from_label(str(values.dtype)), tuple(values.shape))


def cast(data: Composite, name: str, ref: TensorRef, dtype: DType) -> TensorRef:
    """``ref`` in ``dtype``, contiguous: rounded to nearest, halves to even, float64 by way of float32.

    Raises InputError for a tensor that was expanded. Reading it raises InputError, and UsageError, opened by ``name``,
    where a finite value would become infinite in fp16.
    """
    if ref.dtype is dtype:
        return ref
    data.check_extent(name, ref)

    def convert(start: int, stop: int) -> torch.Tensor:
        values = data.elements(ref, start, stop)
        found = values.to(dtype.torch)
        if dtype is DType.FLOAT16 and bool((found.isinf() & values.isfinite()).any()):
            largest = float(values[values.isfinite()].abs().max())
            raise UsageError(f"{data.label}: {name}: {largest:.6g} is beyond the range of float16; use bfloat16")
        return found

    return computed(data, dtype, ref.shape, convert)
