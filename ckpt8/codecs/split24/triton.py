"""Split master weights as Triton kernels: the integer arithmetic of ``reference``, to the bit.

    mag, sign = bits & 0x7fffffff, bits >> 31
    hi        = (mag + 0x7fff + ((mag >> 16) & 1)) >> 16        with the sign on top: the bits of bf16
    d         = mag - (hi << 16)                                in [-32768, 32768], fp32 steps
    rho       = (R*d - (d < 0) + 16384) >> 15                   in [-R, R], halves away from zero
    decode    : d' = sign(rho) * min((32768*|rho| + R//2) // R, 32767);  bits = (hi << 16) + d'

``split_weight``, ``join_weight`` and what they are made of are device functions, for every kernel that handles split
weights. ``encode`` and ``decode`` have the signatures of the reference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ckpt8.codecs.split24 import FIRST_OVERFLOW, REFUSAL
from ckpt8.codecs.triton_blocks import MAGNITUDE, bits_of, group_offsets, launch, refuse, store_offsets
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Parts

_FIRST_OVERFLOW = tl.constexpr(FIRST_OVERFLOW)


@triton.jit
def upper_half(mag):
    """``hi``, the bits of bf16, and the distance ``d`` from it, of the int32 bits of magnitudes."""
    hi = (mag + 0x7FFF + ((mag >> 16) & 1)) >> 16
    return hi, mag - (hi << 16)


@triton.jit
def split_weight(bits, levels: tl.constexpr):
    """``hi``, the bits of bf16, and ``rho``, both int32, of the int32 bits of fp32 weights."""
    hi, d = upper_half(bits & MAGNITUDE)
    # Rounding half away from zero is one floor division: the sign of d moves the tie from 16384 to 16383.
    rho = (d * levels + (d >> 31) + 16384) >> 15
    return hi | ((bits >> 16) & 0x8000), rho


@triton.jit
def residual_steps(rho, levels: tl.constexpr):
    """The distance d' in fp32 steps that int32 ``rho`` stands for."""
    d = tl.minimum((32768 * tl.abs(rho) + levels // 2) // levels, 32767)
    return tl.where(rho < 0, -d, d)


@triton.jit
def join_weight(hi, rho, levels: tl.constexpr):
    """The int32 bits of fp32 weights, from ``hi`` and ``rho`` as ``split_weight`` gives them."""
    # The magnitude stays below 2^31 when d' is added, so the sign may be in place before.
    return (hi << 16) + residual_steps(rho, levels)


@triton.jit(do_not_specialize=["first", "count"])
def encode_kernel(
    weights,
    exponent,
    mantissa,
    rho,
    flags,
    levels: tl.constexpr,
    first,
    count,
    masked: tl.constexpr,
    block: tl.constexpr,
):
    """Split fp32 weights into three planes; ``flags[0]`` becomes 1 where bf16 overflows."""
    start = (tl.program_id(0) + first).to(tl.int64) * block
    at = group_offsets(block)
    mask = at < count if masked else None
    bits = bits_of(tl.load(weights + start + at, mask, 0.0 if masked else None))
    refuse(flags, tl.max(bits & MAGNITUDE, axis=1) >= _FIRST_OVERFLOW)
    hi, residual = split_weight(bits, levels)
    tl.store(exponent + start + at, ((hi >> 7) & 0xFF).to(tl.uint8), mask)
    tl.store(mantissa + start + at, (((hi >> 8) & 0x80) | (hi & 0x7F)).to(tl.uint8), mask)
    tl.store(rho + start + at, residual.to(tl.int8), mask)


@triton.jit(do_not_specialize=["first", "count"])
def decode_kernel(
    weights, exponent, mantissa, rho, levels: tl.constexpr, first, count, masked: tl.constexpr, block: tl.constexpr
):
    """Join three planes to fp32 weights."""
    start = (tl.program_id(0) + first).to(tl.int64) * block
    at = store_offsets(weights, block)
    mask = at < count if masked else None
    high = tl.load(exponent + start + at, mask).to(tl.int32)
    low = tl.load(mantissa + start + at, mask).to(tl.int32)
    residual = tl.load(rho + start + at, mask).to(tl.int32)
    bits = join_weight(((low & 0x80) << 8) | (high << 7) | (low & 0x7F), residual, levels)
    tl.store(weights + start + at, bits.to(tl.float32, bitcast=True), mask)


def encode(x: torch.Tensor, out: Parts, levels: int) -> None:
    """Split a flat fp32 tensor into ``exponent`` uint8, ``mantissa`` uint8 (sign on top) and ``rho`` int8.

    Raises RefusedError on NaN, Inf and magnitudes that overflow bf16.
    """
    flags = torch.zeros(1, dtype=torch.int32, device=x.device)
    planes = (out["exponent"], out["mantissa"], out["rho"])
    launch(encode_kernel, x.numel(), x.device, x.contiguous(), *planes, flags, levels)
    if flags.item():
        raise RefusedError(REFUSAL)


def decode(parts: Parts, out: torch.Tensor, levels: int) -> None:
    """Join parts into the flat fp32 tensor ``out``."""
    planes = (parts[name].contiguous() for name in ("exponent", "mantissa", "rho"))
    launch(decode_kernel, out.numel(), out.device, out, *planes, levels)
