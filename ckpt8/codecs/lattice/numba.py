"""Weights on a dithered lattice in one pass on a CPU: the arithmetic of ``reference``, to the bit."""

from __future__ import annotations

import numpy as np
import torch

from ckpt8.codecs.lattice import reference, step_of
from ckpt8.codecs.symbols import RESERVED, modulo
from ckpt8.codecs.symbols_numba import dither, from_zigzag, u4, zigzag
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, i4, kernel
from ckpt8.core.tensors import Parts


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
