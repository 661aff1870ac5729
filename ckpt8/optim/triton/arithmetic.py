"""Device functions on blocks of values: random bits, stochastic rounding and master weights, as in ``ckpt8.optim``.

    bits of an element    hash of (seed, parameter, step, element): ``rounding.random_bits`` and ``stream_key``
    second moment         code floor(t) or the next, scale rounded up: ``rounding.encode_second_moment``
    24-bit weight         hi = bf16(w);  d = w - hi in fp32 steps;  rho = (R d + noise) >> 15
    powers                in float64, by multiplication alone, so that they are the same everywhere

Operations are on integers, or on fp32 and rounded once: results are those of the torch path on a CPU, bit for bit.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ckpt8.codecs.companded8.triton import SMALLEST_ROOT2, normalise
from ckpt8.codecs.split24.triton import residual_steps, upper_half
from ckpt8.codecs.triton_blocks import MAGNITUDE, QUIET_NAN, bits_of, magnitude_bits
from ckpt8.optim import rounding

_GOLDEN64 = tl.constexpr(rounding.GOLDEN64)
_GOLDEN32 = tl.constexpr(rounding.GOLDEN32)
_MIX64_FIRST, _MIX64_SECOND = tl.constexpr(rounding.MIX64[0]), tl.constexpr(rounding.MIX64[1])
_MIX32_FIRST, _MIX32_SECOND = tl.constexpr(rounding.MIX32[0]), tl.constexpr(rounding.MIX32[1])
_NARROW, _NARROW_ROOT = tl.constexpr(rounding.NARROW), tl.constexpr(rounding.NARROW**0.5)
_WEIGHT_MARGIN = tl.constexpr(rounding.WEIGHT_MARGIN)


@triton.jit
def extended_key(key, counter):
    """The uint64 key of one more counter: ``stream_key(*counters, counter)`` from ``stream_key(*counters)``."""
    key = (key + _GOLDEN64) ^ counter
    key = (key ^ (key >> 30)) * _MIX64_FIRST
    key = (key ^ (key >> 27)) * _MIX64_SECOND
    return key ^ (key >> 31)


@triton.jit
def _mixed(x, word):
    x = x ^ word
    x = (x ^ (x >> 16)) * _MIX32_FIRST
    x = (x ^ (x >> 15)) * _MIX32_SECOND
    return x ^ (x >> 16)


@triton.jit
def random_bits(key, start, at):
    """uint32 for the elements ``start + at``; ``key`` is uint64, ``start`` int64 and a multiple of the block."""
    x = _mixed(start.to(tl.uint32) + at.to(tl.uint32), key.to(tl.uint32))
    return _mixed(x, (key >> 32).to(tl.uint32) ^ (start >> 32).to(tl.uint32))


@triton.jit
def weight_noise(bits):
    """int32 from 127 to 32640, from random bits."""
    noise = ((bits * _GOLDEN32) >> 17).to(tl.int32)
    return noise - (noise >> 8) * 2 + _WEIGHT_MARGIN


@triton.jit
def split24(x, bits, levels: tl.constexpr):
    """``hi``, the bits of bf16, and ``rho``, both int32, of fp32 weights, rounded by random ``bits``. NaN is kept."""
    hi, d = upper_half(tl.minimum(magnitude_bits(x), QUIET_NAN))
    rho = (d * levels + weight_noise(bits)) >> 15
    return hi | ((bits_of(x) >> 16) & 0x8000), tl.maximum(tl.minimum(rho, levels), -levels)


@triton.jit
def split32(x):
    """``hi``, the bits of bf16 with halves rounded up, and the 16-bit remainder, both int32, of fp32 weights."""
    mag = tl.minimum(magnitude_bits(x), QUIET_NAN)
    hi = (mag + 0x8000) >> 16
    return hi | ((bits_of(x) >> 16) & 0x8000), mag - (hi << 16)


@triton.jit
def join(hi, residual, levels: tl.constexpr):
    """fp32 weights from the bits of bf16 and their residual, both int32: split24, or split32 where ``levels`` is 0.

    A parameter that somebody set to zero may keep a negative residual.
    """
    d = residual_steps(residual, levels) if levels else residual
    mag = tl.maximum(((hi << 16) & MAGNITUDE) + d, 0)
    return (mag | ((hi << 16) & ~MAGNITUDE)).to(tl.float32, bitcast=True)


@triton.jit
def compand_unsigned_randomly(v, levels: tl.constexpr, fourth_root: tl.constexpr, bits):
    """int32 codes and scales of fp32 rows of 32 of moment2, rounded by random ``bits``.

    Rounding keeps the mean of 1/x for codes under 1/16 of the scale, the mean of v above.
    """
    root = tl.sqrt_rn(v)
    largest = tl.max(magnitude_bits(root), axis=1)
    largest = tl.where(largest == 0, 0, tl.maximum(largest, SMALLEST_ROOT2))
    scale16 = (tl.minimum(largest, QUIET_NAN) + 0x7FFF) >> 15
    n = normalise(root, scale16)
    t = (tl.sqrt_rn(n) if fourth_root else n) * levels
    # A value flushed to zero by CUDA's floor is raised to 1 like any below it.
    low = tl.maximum(tl.minimum(tl.floor(t), levels * 1.0), 1.0)
    drawn = (bits >> 8).to(tl.int32).to(tl.float32) * (2.0**-24)
    up = drawn < _chance_up(t, low, levels, fourth_root)
    code = tl.minimum(low + up.to(tl.float32), levels * 1.0)
    return tl.where(root > 0, code, 0.0).to(tl.int32), scale16


@triton.jit
def _chance_up(t, low, levels: tl.constexpr, fourth_root: tl.constexpr):
    """The probability of the code above ``low``: see ``rounding``."""
    high = low + 1.0
    narrow = low < levels / (_NARROW_ROOT if fourth_root else _NARROW)
    a, b, c = (high * high, t * t, low * low) if fourth_root else (high, t, low)
    chance = tl.div_rn(tl.where(narrow, a, b + c), tl.where(narrow, b, a + c)) * (t - low)
    return tl.div_rn(chance * (t + low), high + low) if fourth_root else chance


@triton.jit
def double(bits):
    """The float64 with these integer bits; a Python float as argument of a kernel would become fp32."""
    return bits.to(tl.int64).to(tl.float64, bitcast=True)


@triton.jit
def power(base, exponent):
    """``base ** exponent`` of float64 and an integer of at least 0, as ``rounding.power``."""
    result = base * 0.0 + 1.0
    while exponent > 0:
        result = tl.where((exponent & 1) == 1, result * base, result)
        base = base * base
        exponent = exponent >> 1
    return result
