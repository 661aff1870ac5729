"""A dithered lattice in one pass on a CPU: the arithmetic of ``reference``, to the bit.

Symbols and the dither of an element are functions for the kernels of all codecs that write symbols.
"""

import numpy as np

from ckpt8.codecs.lattice import CODES, MULTIPLIERS, REFUSAL, RESERVED, modulo, step_of
from ckpt8.core.arrays import Array, Arrays, give, room_for, widened
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, i4, kernel

u4 = np.uint32

_SPREAD, _SECOND, _THIRD = MULTIPLIERS

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


@kernel
def _encode(x, codes, step, salt, first):
    """Fill codes; whether any value must be refused."""
    refused = i4(0)
    for i in range(x.size):
        q = np.floor(x[i] / step + dither(u4(first + u4(i)), salt))
        refused |= i4(not abs(q) < f4(CODES))
        codes[i] = i4(RESERVED) if x[i] == f4(0) else zigzag(i4(q))
    return refused != 0


@kernel
def _decode(codes, out, step, salt, first):
    for i in range(out.size):
        offset = f4(0.5) - dither(u4(first + u4(i)), salt)
        w = (f4(from_zigzag(codes[i])) + offset) * step
        out[i] = f4(0) if codes[i] == i4(RESERVED) else w


def encode(x: Array, out: Arrays, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with the codes of weights, to the bit those of ``reference``. Raises RefusedError."""
    if _encode(widened(x), out["codes"], f4(step_of(k)), u4(salt), u4(modulo(first))):
        raise RefusedError(REFUSAL)


def decode(parts: Arrays, out: Array, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with weights, to the bit those of ``reference``."""
    flat = room_for(out)
    _decode(parts["codes"], flat, f4(step_of(k)), u4(salt), u4(modulo(first)))
    give(flat, out)
