"""Tensors for a target: cast when somebody reads them, or held in memory."""

from __future__ import annotations

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.computed import computed
from ckpt8.checkpoint.tree import Held, TensorRef
from ckpt8.container.frames import bytes_of
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import DType

FLOATS = frozenset({DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})
"""The element types that can be cast."""


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
