"""First moments in steps of their second moments in one pass on a CPU: the arithmetic of ``reference``, to the bit."""

import numpy as np

from ckpt8.codecs.lattice import modulo
from ckpt8.codecs.lattice.numba import dither, from_zigzag, u4, zigzag
from ckpt8.codecs.vscaled import CODES, LARGEST_UPDATE, REACH, REFUSAL, SMALLEST_STEP, STEP_SHARE
from ckpt8.core.arrays import Array, Arrays, give, room_for, widened
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import f4, i4, kernel


@kernel
def _divisor(v, bias1, root_bias2, eps):
    return f4(f4(f4(np.sqrt(v) / root_bias2) + eps) * bias1)


@kernel
def _step(v, divisor, k, share):
    largest = f4(divisor * share)
    step = f4(np.sqrt(np.sqrt(v)) * k)
    return largest if v == f4(0) or largest < step else step


@kernel
def _encode(x, second, original, codes, k, u_max, bias1, root_bias2, eps, salt, first):
    """Fill codes; whether any value must be refused."""
    share, reach = f4(u_max * f4(STEP_SHARE)), f4(u_max * f4(REACH))
    most, least = f4(u_max * f4(LARGEST_UPDATE)), f4(SMALLEST_STEP)
    zero, half, infinite = f4(0), f4(0.5), f4(np.inf)
    refused = i4(0)
    for i in range(x.size):
        m, v = x[i], second[i]
        empty = v == zero
        divisor = _divisor(v, bias1, root_bias2, eps)
        step = _step(v, divisor, k, share)
        t = dither(u4(first + u4(i)), salt)
        t = half if empty else t
        offset = half - t
        u = m / _divisor(original[i], bias1, root_bias2, eps)
        u = zero if m == zero else u
        low = np.ceil(f4(f4((u - reach) * divisor) / step) - offset)
        high = np.floor(f4(f4((u + reach) * divisor) / step) - offset)
        q = np.floor(m / step + t)
        q = max(q, low)
        q = min(q, high)
        nothing = empty & (step == zero) & (m == zero)
        bounded = (step >= least) & (step < infinite) & (divisor < infinite)
        bounded &= (abs(u) < most) & (abs(q) < f4(CODES))
        refused |= i4(not (nothing | bounded))
        codes[i] = zigzag(i4(zero if nothing else q))
    return refused != 0


@kernel
def _decode(codes, second, out, k, u_max, bias1, root_bias2, eps, salt, first):
    share, zero, half = f4(u_max * f4(STEP_SHARE)), f4(0), f4(0.5)
    for i in range(out.size):
        v = second[i]
        empty = v == zero
        step = _step(v, _divisor(v, bias1, root_bias2, eps), k, share)
        offset = half - dither(u4(first + u4(i)), salt)
        offset = zero if empty else offset
        out[i] = (f4(from_zigzag(codes[i])) + offset) * step


def encode(
    x: Array,
    out: Arrays,
    *,
    second: Array,
    original_second: Array,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Fill ``out`` with the codes of first moments, to the bit those of ``reference``. Raises RefusedError."""
    given = map(widened, (x, second, original_second))
    settings = map(f4, (k, u_max, bias1, root_bias2, eps))
    if _encode(*given, out["codes"], *settings, u4(salt), u4(modulo(first))):
        raise RefusedError(REFUSAL)


def decode(
    parts: Arrays,
    out: Array,
    *,
    second: Array,
    first: int,
    k: float,
    u_max: float,
    bias1: float,
    root_bias2: float,
    eps: float,
    salt: int,
) -> None:
    """Fill ``out`` with first moments, to the bit those of ``reference``."""
    flat, settings = room_for(out), map(f4, (k, u_max, bias1, root_bias2, eps))
    _decode(parts["codes"], second, flat, *settings, u4(salt), u4(modulo(first)))
    give(flat, out)
