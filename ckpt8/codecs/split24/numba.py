"""Split master weights in one pass on a CPU: the arithmetic of ``reference``, element by element."""

from __future__ import annotations

import numpy as np
import torch

from ckpt8.codecs.split24.reference import FIRST_OVERFLOW, REFUSAL
from ckpt8.errors import RefusedError
from ckpt8.jit import kernel
from ckpt8.tensors import Parts

_i4 = np.int32
_f4 = np.float32


@kernel
def _split(bits, exponent, mantissa, rho, levels):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    largest = _i4(0)
    r = _i4(levels)
    for i in range(bits.size):
        b = bits[i]
        mag = _i4(b & _i4(0x7FFFFFFF))
        largest = max(largest, mag)
        hi = _i4(_i4(mag + _i4(0x7FFF) + _i4(_i4(mag >> _i4(16)) & _i4(1))) >> _i4(16))
        d = _i4(mag - _i4(hi << _i4(16)))
        rho[i] = _i4(_i4(d * r + _i4(d >> _i4(31)) + _i4(16384)) >> _i4(15))
        exponent[i] = _i4(hi >> _i4(7))
        mantissa[i] = _i4(_i4(_i4(b >> _i4(24)) & _i4(0x80)) | _i4(hi & _i4(0x7F)))
    return largest


@kernel
def _join(exponent, mantissa, rho, out, levels):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    r = _f4(levels)
    for i in range(out.size):
        d = np.rint(_f4(_i4(rho[i])) * _f4(32768) / r)
        d = min(max(d, _f4(-32767)), _f4(32767))
        m = _i4(mantissa[i])
        hi = _i4(_i4(_i4(m & _i4(0x80)) << _i4(8)) | _i4(m & _i4(0x7F)) | _i4(_i4(exponent[i]) << _i4(7)))
        out[i] = _i4(hi << _i4(16)) + _i4(d)


def encode(x: torch.Tensor, out: Parts, levels: int) -> None:
    """As ``reference.encode``, of any length."""
    bits = x.view(torch.int32).numpy()
    if _split(bits, *(out[name].numpy() for name in ("exponent", "mantissa", "rho")), levels) >= FIRST_OVERFLOW:
        raise RefusedError(REFUSAL)


def decode(parts: Parts, out: torch.Tensor, levels: int) -> None:
    """As ``reference.decode``, of any length."""
    planes = (parts[name].numpy() for name in ("exponent", "mantissa", "rho"))
    _join(*planes, out.view(torch.int32).numpy(), levels)
