"""Companded 8-bit moments as Triton kernels: the operations of ``reference``, each rounded once, to the bit.

    moment1 (signed)    x = m          phi(n) = 2n / (1 + |n|)     phi^-1(y) = y / (2 - |y|)
    moment2 (unsigned)  x = sqrt(v)    phi(n) = n, or sqrt(n)      phi^-1(y) = y, or y*y
    scale16  = (bits(max|x|) + 0x3fff + ((bits >> 15) & 1)) >> 15;  s = fp32 with bits scale16 << 15
    code     = clamp(floor(Q*phi(x/s) + 0.5), -Q or 0, Q);  moment2: at least 1 where v > 0
    decode   : x = s * phi^-1(code / Q);  v = x*x

Maxima are taken over the bits of magnitudes as integers, in which Inf is above all numbers and NaN above Inf: so the
scale alone shows that a group must be refused. ``compand_signed``, ``expand_signed``, ``compand_unsigned``,
``expand_unsigned`` and ``group_scale`` are device functions over rows of 32, for every kernel that handles moments.
``encode`` and ``decode`` have the signatures of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ckpt8.codecs.companded8 import REFUSAL_ROOT, REFUSAL_SIGNED, REFUSAL_UNSIGNED
from ckpt8.codecs.triton_blocks import (
    QUIET_NAN,
    group_offsets,
    launch,
    magnitude_bits,
    narrow,
    raw,
    refuse,
    store_offsets,
    widen,
)
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

_SMALLEST_MOMENT1 = tl.constexpr((127 - 100) << 23)
"""The bits of 2^-100."""

SMALLEST_ROOT2 = tl.constexpr((127 - 50) << 23)
"""The bits of 2^-50."""

_INFINITE_SCALE = tl.constexpr(0xFF00)

_INFINITE_SQUARE = tl.constexpr((127 + 64) << 8)
"""The scale 2^64, the first whose square is infinite."""


@triton.jit
def group_scale(largest):
    """The 16-bit scale, in an int32, of the int32 bits of max|x|."""
    bits = tl.minimum(largest, QUIET_NAN)
    return (bits + 0x3FFF + ((bits >> 15) & 1)) >> 15


@triton.jit
def scale_value(scale16):
    """The fp32 value of 16-bit scales given as int32."""
    return (scale16 << 15).to(tl.float32, bitcast=True)


@triton.jit
def normalise(x, scale16):
    """x/s for rows of 32; a zero group is divided by one."""
    divisor = tl.where(scale16 == 0, 1.0, scale_value(scale16))
    return tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))


@triton.jit
def nearest_code(t, lowest: tl.constexpr, levels: tl.constexpr):
    """The int32 code of Q*t, halves upward. NaN gives some code."""
    # The sum is zero or at least 2^-25, so it does not matter that CUDA's floor flushes subnormal numbers.
    code = tl.floor(t * levels + 0.5)
    return tl.maximum(tl.minimum(code, levels * 1.0), lowest * 1.0).to(tl.int32)


@triton.jit
def compand_signed(x, levels: tl.constexpr):
    """int32 codes, and scales as int32, of fp32 rows of 32 of moment1. A NaN or Inf makes its group meaningless."""
    largest = tl.max(magnitude_bits(x), axis=1)
    scale16 = group_scale(tl.where(largest < _SMALLEST_MOMENT1, 0, largest))
    n = normalise(x, scale16)
    t = tl.div_rn(n * 2.0, tl.abs(n) + 1.0)
    return nearest_code(t, -levels, levels), scale16


@triton.jit
def expand_signed_each(codes, scale16, levels: tl.constexpr):
    """fp32 moment1 from int32 codes, each with its scale."""
    y = tl.div_rn(codes.to(tl.float32), levels * 1.0)
    return scale_value(scale16) * tl.div_rn(y, 2.0 - tl.abs(y))


@triton.jit
def expand_signed(codes, scale16, levels: tl.constexpr):
    """fp32 moment1 from int32 rows of codes and their scales."""
    return expand_signed_each(codes, scale16[:, None], levels)


@triton.jit
def compand_unsigned(v, levels: tl.constexpr, fourth_root: tl.constexpr):
    """int32 codes, and scales as int32, of fp32 rows of 32 of moment2; v > 0 never becomes 0.

    A NaN, an Inf or a negative value makes its group meaningless. The root of a NaN is quiet, with a scale above Inf's.
    """
    root = tl.sqrt_rn(v)
    largest = tl.max(magnitude_bits(root), axis=1)
    scale16 = group_scale(tl.where(largest == 0, 0, tl.maximum(largest, SMALLEST_ROOT2)))
    n = normalise(root, scale16)
    t = tl.sqrt_rn(n) if fourth_root else n
    return tl.maximum(nearest_code(t, 0, levels), (root > 0).to(tl.int32)), scale16


@triton.jit
def expand_unsigned(codes, scale16, levels: tl.constexpr, fourth_root: tl.constexpr):
    """fp32 moment2 from int32 rows of codes and their scales."""
    y = tl.div_rn(codes.to(tl.float32), levels * 1.0)
    root = scale_value(scale16)[:, None] * (y * y if fourth_root else y)
    return root * root


@triton.jit
def groups(at, first, count, masked: tl.constexpr, block: tl.constexpr):
    """The first element of a program, the mask of its offsets ``at``, its groups and their mask.

    Masks are None for a whole block.
    """
    start, group = (tl.program_id(0) + first).to(tl.int64) * block, tl.arange(0, block // 32)
    return start, at < count if masked else None, start // 32 + group, group * 32 < count if masked else None


# The kernels of all codecs end in the parameters of ``launch``: Triton takes neither structures nor keyword lists.
@triton.jit(do_not_specialize=["first", "count"])
def encode_kernel(
    moments,
    codes,
    scales,
    flags,
    levels: tl.constexpr,
    signed: tl.constexpr,
    fourth_root: tl.constexpr,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Compand moments, fp32 or the bits of bf16; ``flags[0]`` becomes 1 on overflow, ``flags[1]`` on a root of NaN."""
    at = group_offsets(block)
    start, mask, group, group_mask = groups(at, first, count, masked, block)
    x = widen(tl.load(moments + start + at, mask, 0 if masked else None))
    if signed:
        code, scale16 = compand_signed(x, levels)
        refuse(flags, scale16 >= _INFINITE_SCALE)
    else:
        code, scale16 = compand_unsigned(x, levels, fourth_root)
        refuse(flags + (scale16 > _INFINITE_SCALE).to(tl.int32), scale16 >= _INFINITE_SQUARE)
    tl.store(codes + start + at, code.to(codes.dtype.element_ty), mask)
    tl.store(scales + group, scale16.to(tl.uint16), group_mask)


@triton.jit(do_not_specialize=["first", "count"])
def decode_kernel(
    moments,
    codes,
    scales,
    levels: tl.constexpr,
    signed: tl.constexpr,
    fourth_root: tl.constexpr,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Expand moments, to fp32 or the bits of bf16."""
    at = store_offsets(moments, block)
    start, mask, group, group_mask = groups(at, first, count, masked, block)
    code = tl.load(codes + start + at, mask, 0 if masked else None).to(tl.int32)
    scale16 = tl.load(scales + group, group_mask, 0 if masked else None).to(tl.int32)
    x = expand_signed(code, scale16, levels) if signed else expand_unsigned(code, scale16, levels, fourth_root)
    tl.store(moments + start + at, narrow(x, moments.dtype.element_ty), mask)


def encode(x: torch.Tensor, out: Parts, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Fill ``out`` with codes and scales, to the bit those of ``reference``. Raises RefusedError."""
    flags = torch.zeros(2, dtype=torch.int32, device=x.device)
    parts = (out["codes"], out["scales"], flags)
    launch(encode_kernel, x.numel(), x.device, raw(x.contiguous()), *parts, levels, signed, fourth_root)
    overflow, no_root = flags.tolist()
    if overflow or no_root:
        unsigned = REFUSAL_ROOT if no_root else REFUSAL_UNSIGNED
        raise RefusedError(REFUSAL_SIGNED if signed else unsigned)


def decode(parts: Parts, out: torch.Tensor, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Fill ``out`` with moments, to the bit those of ``reference``."""
    stored = (parts["codes"].contiguous(), parts["scales"].contiguous())
    launch(decode_kernel, out.numel(), out.device, raw(out), *stored, levels, signed, fourth_root)
