"""Symbols and the dither of ``symbols``, element by element, for numba kernels."""

from __future__ import annotations

import numpy as np

from ckpt8.codecs import symbols
from ckpt8.core.numba import f4, i4, kernel

u4 = np.uint32

_SPREAD, _SECOND, _THIRD = symbols.MULTIPLIERS
_UNIT = 2.0**-24


@kernel
def zigzag(q):
    """The symbol of an int32 integer."""
    return i4(i4(q << i4(1)) ^ i4(q >> i4(31)))


@kernel
def from_zigzag(symbol):
    """The integer of an int32 symbol."""
    return i4(i4(symbol >> i4(1)) ^ i4(-i4(symbol & i4(1))))


@kernel
def dither(index, salt):
    """The dither of the element with the uint32 ``index``."""
    h = u4(u4(index * u4(_SPREAD)) + salt)
    h = u4(u4(h ^ u4(h >> u4(15))) * u4(_SECOND))
    h = u4(u4(h ^ u4(h >> u4(12))) * u4(_THIRD))
    h = u4(h ^ u4(h >> u4(15)))
    return f4(i4(h >> u4(8))) * f4(_UNIT)
