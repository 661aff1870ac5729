"""Elements in numpy arrays, which the kernels of the CPU take: flat, contiguous; a 16-bit float is its bits, uint16."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

Array = np.ndarray[Any, Any]
Arrays = Mapping[str, Array]
"""The parts of a codec by name, see ``tensors.Parts``."""

_HALVES = ("torch.bfloat16", "torch.float16")


def array_of(x: torch.Tensor) -> Array:
    """The memory of a flat CPU tensor, or a copy of one that is not contiguous."""
    x = x.detach().contiguous()
    if str(x.dtype) in _HALVES:
        import torch

        x = x.view(torch.uint16)
    return x.numpy()


def arrays_of(parts: Mapping[str, torch.Tensor]) -> dict[str, Array]:
    """``array_of`` each of them."""
    return {name: array_of(part) for name, part in parts.items()}


def widened(x: Array) -> Array:
    """The elements, fp32 or bf16, in fp32; fp32 as it is."""
    return x if x.dtype == np.float32 else (x.astype(np.uint32) << 16).view(np.float32)


def narrowed(x: Array) -> Array:
    """The bits of finite or infinite fp32 elements rounded to bf16: to nearest, ties to even."""
    bits = x.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def give(values: Array, out: Array) -> None:
    """Copy fp32 values to ``out``, fp32 or bf16, unless this is their memory."""
    if out.dtype != np.float32:
        out[:] = narrowed(values)
    elif out is not values:
        out[:] = values


def room_for(out: Array) -> Array:
    """``out`` itself if it is fp32, else fp32 memory of its size, for ``give``."""
    return out if out.dtype == np.float32 else np.empty(out.size, np.float32)
