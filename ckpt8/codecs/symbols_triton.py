"""Symbols and the dither of ``symbols`` as device functions, for the Triton kernels of codecs that write symbols."""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.codecs import symbols

BLOCK = 1024
"""Elements of a program: 4 for each of its 256 threads, a 16-byte store of symbols. More would take its registers."""

RESERVED = tl.constexpr(symbols.RESERVED)
_FIRST, _SECOND, _THIRD = (tl.constexpr(each) for each in symbols.MULTIPLIERS)


@triton.jit
def zigzag(q):
    """Symbols of int32 integers."""
    return (q << 1) ^ (q >> 31)


@triton.jit
def from_zigzag(symbol):
    """The integers of int32 symbols."""
    return (symbol >> 1) ^ -(symbol & 1)


@triton.jit
def floor(x):
    """The fp32 floor. CUDA's own one takes a subnormal number for zero, and gives 0 for one below zero."""
    below = tl.floor(x)
    return tl.where(below > x, below - 1.0, below)


@triton.jit
def dither(origin, start, at, salt):
    """The dither of the elements ``start + at``. ``origin`` is the index in the storage of element 0, modulo 2^32."""
    index = origin.to(tl.uint32) + start.to(tl.uint32) + at.to(tl.uint32)
    h = index * _FIRST + salt.to(tl.uint32)
    h = (h ^ (h >> 15)) * _SECOND
    h = (h ^ (h >> 12)) * _THIRD
    h = h ^ (h >> 15)
    return (h >> 8).to(tl.int32).to(tl.float32) * 2.0**-24
