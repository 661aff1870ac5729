"""Elements in flat, contiguous numpy arrays, which the kernels of the CPU take.

Only what has to do with tensors imports torch. numpy has no type for some elements: a bf16 or fp16 is its bits, uint16,
and what else it lacks are bytes or words.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ckpt8.core.tensors import DType, dtype_of

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
"""The parts of a codec by name, see ``tensors.Parts``."""

_TYPES = {
    DType.FLOAT64: "f8",
    DType.FLOAT32: "f4",
    DType.INT64: "i8",
    DType.INT32: "i4",
    DType.INT16: "i2",
    DType.INT8: "i1",
}
_COMPLEX = {DType.COMPLEX64: np.complex64, DType.COMPLEX128: np.complex128}
_EXACT = {*_TYPES, DType.BOOL, DType.UINT8, DType.UINT16, DType.UINT32, DType.UINT64}
_UNSIGNED = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}


@cache
def numpy_type(dtype: DType) -> np.dtype[Any]:
    """The type of the arrays that hold elements of ``dtype``."""
    return np.dtype(_TYPES.get(dtype) or _UNSIGNED[dtype.itemsize])


def array_at(memory: memoryview, dtype: DType) -> Array:
    """The elements in a piece of memory, which is shared."""
    return np.frombuffer(memory, numpy_type(dtype))


def empty(numel: int, dtype: DType) -> Array:
    """New memory for elements."""
    return np.empty(numel, numpy_type(dtype))


def as_tensor(x: Array, dtype: DType) -> torch.Tensor:
    """The same memory as a flat tensor."""
    import torch

    # As bytes: torch and numpy have few types in common.
    return torch.from_numpy(x.view(np.uint8)).view(dtype.torch)


def as_tensors(parts: Arrays) -> dict[str, torch.Tensor]:
    """The same parts as tensors."""
    return {name: as_tensor(part, _PART_TYPES[part.dtype.str[1:]]) for name, part in parts.items()}


_PART_TYPES = {numpy_type(dtype).str[1:]: dtype for dtype in (*_TYPES, DType.UINT8, DType.UINT16)}


def as_array(x: torch.Tensor) -> Array:
    """The memory of a flat CPU tensor, or a copy of one that is not contiguous."""
    dtype = dtype_of(x.dtype)
    # One element may have any stride.
    x = x.detach().contiguous().as_strided((x.numel(),), (1,))
    return np.asarray(x.view(DType.UINT8.torch).numpy().view(numpy_type(dtype)))


def as_arrays(parts: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """``as_array`` each of them."""
    return {name: as_array(part) for name, part in parts.items()}


def widened(x: Array) -> Array:
    """The elements, fp32 or bf16, in fp32; fp32 as it is."""
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


def floats(x: Array, dtype: DType) -> Array:
    """Elements of any type in fp32. torch converts types that are rare."""
    if dtype in (DType.FLOAT32, DType.BFLOAT16):
        return widened(x)
    if dtype is DType.FLOAT16 or dtype in _TYPES:
        with np.errstate(over="ignore", invalid="ignore"):
            return (x.view(np.float16) if dtype is DType.FLOAT16 else x).astype(np.float32)
    return as_array(as_tensor(x, dtype).float())


def doubles(x: Array, dtype: DType) -> Array:
    """Elements of any type in float64, complex ones in complex128. torch converts types that are rare."""
    # numpy warns of a NaN that signals.
    with np.errstate(invalid="ignore"):
        if dtype in _EXACT or dtype is DType.FLOAT16:
            return (x.view(np.float16) if dtype is DType.FLOAT16 else x).astype(np.float64)
        if dtype is DType.BFLOAT16:
            return widened(x).astype(np.float64)
        if dtype in _COMPLEX:
            return x.view(_COMPLEX[dtype]).astype(np.complex128)
    tensor = as_tensor(x, dtype)
    wide = DType.COMPLEX128 if tensor.is_complex() else DType.FLOAT64
    return np.asarray(tensor.to(wide.torch).numpy())


def narrowed(x: Array) -> Array:
    """The bits of finite or infinite fp32 elements rounded to bf16: to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def rounded(x: Array, dtype: DType) -> Array:
    """The bits of fp32 elements rounded to bf16 or fp16: to nearest, ties to even, as ``codecs.rounded_copy`` says."""
    if dtype is DType.BFLOAT16:
        return narrowed(x)
    with np.errstate(over="ignore", invalid="ignore"):
        bits = x.astype(np.float16).view(np.uint16)
    signs = (x.view(np.uint32) >> 16).astype(np.uint16) & np.uint16(1 << 15)
    return np.where(np.isnan(x), signs | np.uint16(0x7E00), bits)


def same_bits(x: Array, y: Array) -> bool:
    """Whether arrays of one size have the same bytes."""
    return np.array_equal(x.view(np.uint8), y.view(np.uint8))


def give(values: Array, out: Array) -> None:
    """Round fp32 values to ``out``, which is bf16, unless they have its memory. See ``room_for``."""
    if out is not values:
        out[:] = narrowed(values)


def room_for(out: Array) -> Array:
    """``out`` itself if it is fp32, else fp32 memory of its size, for ``give``."""
    return out if out.dtype == np.float32 else np.empty(out.size, np.float32)
