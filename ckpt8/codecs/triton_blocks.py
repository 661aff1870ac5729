"""The common ground of the Triton kernels of all codecs: blocks, rows of 32, the bits of floats, and the launch.

A program handles ``BLOCK`` elements as rows of 32 along the flat storage. The whole blocks of a tensor are one launch
without masks, so that accesses are as wide as they can be; a short last block is a second launch, of one program.

Arithmetic is on integers, or fp32 add, multiply, ``div_rn`` and ``sqrt_rn`` without fusion, each rounded once. bf16
is read and written as its 16 bits, and rounded to nearest even by integer operations:

    bf16 = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16           NaN: 0x7fc0
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 4096
"""Elements of a program: 16 for each of its 256 threads, a 16-byte store of codes."""

OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""How every kernel is compiled: a fused multiply-add would change bits."""

MAGNITUDE = tl.constexpr(0x7FFFFFFF)

INFINITY = tl.constexpr(0x7F800000)

QUIET_NAN = tl.constexpr(0x7FC00000)


@triton.jit
def group_offsets(block: tl.constexpr):
    """Offsets in a block, as rows of 32."""
    return tl.arange(0, block // 32)[:, None] * 32 + tl.arange(0, 32)[None, :]


@triton.jit
def store_offsets(stored, block: tl.constexpr):
    """Offsets in a block, as rows of 32, for programs that mostly write to ``stored``.

    A thread then has as many neighbours as one 16-byte store holds, and narrower loads follow that layout: no element
    changes its thread.
    """
    width: tl.constexpr = 128 // stored.dtype.element_ty.primitive_bitwidth
    column = tl.max_contiguous(tl.arange(0, 32), width)
    return tl.arange(0, block // 32)[:, None] * 32 + column[None, :]


@triton.jit
def bits_of(x):
    """The bits of fp32 as int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """The bits of |x| as int32: in the order of the magnitudes, then Inf, then NaN."""
    return bits_of(x) & MAGNITUDE


@triton.jit
def widen(x):
    """Convert a loaded value, fp32 or the bits of bf16 as int16, to fp32."""
    if x.dtype == tl.int16:
        x = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x


@triton.jit
def narrow(x, to: tl.constexpr):
    """Convert fp32 to the type that is stored: to the bits of bf16 where ``to`` is int16."""
    if to == tl.int16:
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        x = tl.where(magnitude_bits(x) > INFINITY, QUIET_NAN >> 16, rounded).to(tl.int16)
    return x


@triton.jit
def refuse(flag, rows):
    """Set the int32 ``flag`` to 1 where any of ``rows`` is true. Plain stores, since all store the same."""
    tl.store(flag + tl.zeros_like(rows.to(tl.int32)), 1, rows)


@triton.jit
def refuse_any(flag, elements):
    """Set the int32 ``flag`` to 1 where any of the ``elements`` of a program is true."""
    tl.store(flag, 1, tl.max(elements.to(tl.int32)) != 0)


def raw(x: torch.Tensor) -> torch.Tensor:
    """A tensor as kernels take it: bf16 as int16, in the same memory."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Makes ``device`` the current one, where kernels are launched."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(kernel: Any, numel: int, device: torch.device, *args: Any, block: int = BLOCK) -> None:
    """Run ``kernel`` over ``numel`` elements.

    Its parameters are ``args``, then ``first``, the block of its first program; ``count``, the elements of that block,
    and ``masked``, whether to mask the others; ``block``, the elements of a whole block.
    """
    whole, rest = divmod(numel, block)
    with on_device(device):
        if whole:
            kernel[(whole,)](*args, first=0, count=block, masked=False, block=block, **OPTIONS)
        if rest:
            kernel[(1,)](*args, first=whole, count=rest, masked=True, block=block, **OPTIONS)
