"""Split master weights in one pass on a CPU: the integer arithmetic of ``reference``, to the bit."""

import numpy as np

from ckpt8.codecs.split24 import FIRST_OVERFLOW, REFUSAL
from ckpt8.core.arrays import Array, Arrays
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import MAGNITUDE, f4, i4, kernel


@kernel
def split(bits, exponent, mantissa, rho, levels):
    """Fill the planes; return the largest magnitude."""
    largest = i4(0)
    r = i4(levels)
    for i in range(bits.size):
        b = bits[i]
        mag = i4(b & i4(MAGNITUDE))
        largest = max(largest, mag)
        hi = i4(i4(mag + i4(0x7FFF) + i4(i4(mag >> i4(16)) & i4(1))) >> i4(16))
        d = i4(mag - i4(hi << i4(16)))
        rho[i] = i4(i4(d * r + i4(d >> i4(31)) + i4(16384)) >> i4(15))
        exponent[i] = i4(hi >> i4(7))
        mantissa[i] = i4(i4(i4(b >> i4(24)) & i4(0x80)) | i4(hi & i4(0x7F)))
    return largest


@kernel
def join(exponent, mantissa, rho, bits, levels):
    """Fill ``bits`` with the fp32 bits that the planes stand for."""
    top = f4(levels)
    for i in range(bits.size):
        d = min(max(np.rint(f4(i4(rho[i])) * f4(32768) / top), f4(-32767)), f4(32767))
        m = i4(mantissa[i])
        hi = i4(i4(i4(m & i4(0x80)) << i4(8)) | i4(m & i4(0x7F)) | i4(i4(exponent[i]) << i4(7)))
        bits[i] = i4(i4(hi << i4(16)) + i4(d))


def refuse(largest: int) -> None:
    """Raise RefusedError where the bits of the largest magnitude are NaN, Inf, or round to Inf in bf16."""
    if largest >= FIRST_OVERFLOW:
        raise RefusedError(REFUSAL)


def encode(x: Array, out: Arrays, levels: int) -> None:
    """Fill ``out`` with the planes of fp32 ``x``, to the bit those of ``reference``. Raises RefusedError."""
    refuse(split(x.view(i4), out["exponent"], out["mantissa"], out["rho"], levels))


def decode(parts: Arrays, out: Array, levels: int) -> None:
    """Fill ``out`` with the weights that the planes stand for, to the bit those of ``reference``."""
    join(parts["exponent"], parts["mantissa"], parts["rho"], out.view(i4), levels)


@kernel
def _cut_exact(bits, exponent, mantissa, residual):
    """Fill the planes; return the largest magnitude."""
    largest = i4(0)
    for i in range(bits.size):
        mag = i4(bits[i] & i4(MAGNITUDE))
        largest = max(largest, mag)
        hi = i4(i4(mag + i4(0x8000)) >> i4(16))
        residual[i] = i4(mag - i4(hi << i4(16)))
        exponent[i] = i4(hi >> i4(7))
        mantissa[i] = i4(i4(i4(bits[i] >> i4(24)) & i4(0x80)) | i4(hi & i4(0x7F)))
    return largest


def encode_exact(x: Array, out: Arrays) -> None:
    """Fill the exact split planes of fp32 ``x``. Raises RefusedError as ``split24``."""
    if _cut_exact(x.view(i4), out["exponent"], out["mantissa"], out["residual"]) >= FIRST_OVERFLOW:
        raise RefusedError(REFUSAL)


@kernel
def _join_exact(exponent, mantissa, residual, bits):
    for i in range(bits.size):
        m = i4(mantissa[i])
        hi = i4(i4(i4(exponent[i]) << i4(7)) | i4(m & i4(0x7F)))
        bits[i] = i4(i4(i4(hi << i4(16)) + i4(residual[i])) | i4(i4(m >> i4(7)) << i4(31)))


def decode_exact(parts: Arrays, out: Array) -> None:
    """Fill ``out`` with the weights of exact split planes."""
    _join_exact(parts["exponent"], parts["mantissa"], parts["residual"], out.view(i4))
