"""Tensors that compute their elements when somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import torch

from ckpt8.checkpoint.sources.composite import BLOCK, Composite, cut, put
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.core.tensors import DType


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
