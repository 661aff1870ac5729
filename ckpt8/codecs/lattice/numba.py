"""A dithered lattice in one pass on a CPU: the arithmetic of ``reference``, to the bit.

Symbols and the dither of an element are functions for the kernels of all codecs that write symbols.
"""

import numpy as np
import torch

from ckpt8.codecs.lattice import reference, step_of
from ckpt8.codecs.lattice.reference import MULTIPLIERS, RESERVED, modulo
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, i4, kernel
from ckpt8.core.tensors import Parts

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
        refused |= i4(not abs(q) < f4(reference.CODES))
        codes[i] = i4(RESERVED) if x[i] == f4(0) else zigzag(i4(q))
    return refused != 0


@kernel
def _decode(codes, out, step, salt, first):
    for i in range(out.size):
        offset = f4(0.5) - dither(u4(first + u4(i)), salt)
        w = (f4(from_zigzag(codes[i])) + offset) * step
        out[i] = f4(0) if codes[i] == i4(RESERVED) else w


def encode(x: torch.Tensor, out: Parts, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with the codes of weights, to the bit those of ``reference``. Raises RefusedError."""
    flat = x.float().contiguous()
    if _encode(flat.numpy(), out["codes"].numpy(), f4(step_of(k)), u4(salt), u4(modulo(first))):
        raise RefusedError(reference.REFUSAL)


def decode(parts: Parts, out: torch.Tensor, *, k: int, salt: int, first: int) -> None:
    """Fill ``out`` with weights, to the bit those of ``reference``."""
    flat = out if out.dtype is torch.float32 else torch.empty(out.numel())
    codes = parts["codes"].contiguous()
    _decode(codes.numpy(), flat.numpy(), f4(step_of(k)), u4(salt), u4(modulo(first)))
    if flat is not out:
        out.copy_(flat)
