"""Companded 8-bit moments in one pass on a CPU: the arithmetic of ``reference``, to the bit.

Maxima are of the bits of magnitudes, which are ordered as the magnitudes are, with NaN above all. ``cell`` is one fp32
number and ``cell_bits`` the same memory as int32. Loops are short and simple, so that a compiler turns them
into vector instructions. Kernels take whole groups, or blocks of eight of them.
"""

from functools import cache
from typing import Any

import numpy as np

from ckpt8.codecs.companded8 import (
    GROUP,
    INFINITE_SCALE,
    QUIET_NAN,
    REFUSAL_ROOT,
    REFUSAL_SIGNED,
    REFUSAL_UNSIGNED,
)
from ckpt8.core.arrays import Array, Arrays, give, room_for, widened
from ckpt8.core.errors import RefusedError
from ckpt8.core.numba import MAGNITUDE, f4, i4, kernel, with_bits

GROUPS = 8
BLOCK = GROUPS * GROUP
"""Elements that decoding, and measuring in numba, process at once."""

_INFINITE = 0x7F800000
_SMALLEST_MOMENT1 = 0x0D800000
"""The bits of 2^-100."""
_SMALLEST_ROOT2 = 0x26800000
"""The bits of 2^-50."""


@kernel
def _round_scale(largest):
    bits = min(np.int64(largest), np.int64(QUIET_NAN))
    return (((bits >> 15) & 1) + bits + 0x3FFF) >> 15


@kernel
def encode_first(x, x_bits, codes, scales, cell, cell_bits, levels):
    """Fill codes and scales; the largest scale, which is infinite if any value is not finite."""
    one, half, top = f4(1), f4(0.5), f4(levels)
    highest = np.int64(0)
    for g in range(scales.size):
        first = g * GROUP
        largest = i4(0)
        for i in range(first, first + GROUP):
            largest = max(largest, i4(x_bits[i] & i4(MAGNITUDE)))
        if largest < _SMALLEST_MOMENT1:
            largest = i4(0)
        scale16 = _round_scale(largest)
        highest = max(highest, scale16)
        scales[g] = scale16
        cell_bits[0] = scale16 << 15
        s = cell[0] if scale16 else one
        for i in range(first, first + GROUP):
            n = x[i] / s
            t = (n + n) / (abs(n) + one)
            codes[i] = i4(min(max(np.floor(t * top + half), -top), top))
    return highest


@kernel
def encode_second(v, v_bits, codes, scales, cell, cell_bits, root, root_bits, levels, fourth_root):
    """Fill codes and scales; whether any value is NaN or negative, and whether a decoded maximum overflows."""
    one, half, top = f4(1), f4(0.5), f4(levels)
    negative, highest, overflow = i4(0), i4(0), False
    for g in range(scales.size):
        first = g * GROUP
        for j in range(GROUP):
            b = v_bits[first + j]
            highest = max(highest, b)
            # The magnitude of a number below zero; -0 has none.
            negative = max(negative, i4(i4(b & i4(MAGNITUDE)) & i4(b >> i4(31))))
            root[j] = np.sqrt(v[first + j])
        largest = i4(0)
        for j in range(GROUP):
            largest = max(largest, root_bits[j])
        if largest > 0:
            largest = max(largest, i4(_SMALLEST_ROOT2))
        scale16 = _round_scale(largest)
        scales[g] = scale16
        cell_bits[0] = scale16 << 15
        s = cell[0] if scale16 else one
        overflow |= not s * s < np.inf
        for j in range(GROUP):
            t = root[j] / s
            if fourth_root:
                t = np.sqrt(t)
            code = i4(min(max(np.floor(t * top + half), f4(0)), top))
            codes[first + j] = max(code, i4(root_bits[j] > 0))
    return highest > _INFINITE or negative > 0, overflow


@cache
def table_of(signed: bool, levels: int, fourth_root: bool) -> np.ndarray[Any, Any]:
    """What each of the 256 codes, as a byte, stands for in fp32, before it is multiplied by the scale of its group.

    A first moment, or the square root of a second one.
    """
    with np.errstate(all="ignore"):
        y = np.arange(256, dtype=np.uint8).view(np.int8 if signed else np.uint8).astype(f4) / f4(levels)
        if signed:
            return np.asarray(y / (f4(2) - abs(y)))
        return y * y if fourth_root else y


@kernel
def decode_block(codes, scales, cell, cell_bits, table, out):
    """Fill ``out`` with a block: what its codes stand for, times the scales of its groups."""
    for g in range(GROUPS):
        cell_bits[0] = i4(scales[g]) << 15
        s = cell[0]
        for i in range(g * GROUP, (g + 1) * GROUP):
            out[i] = table[np.uint8(codes[i])] * s


@kernel
def square(x, out):
    """Fill ``out``, which may be ``x``, with the squares of a block."""
    for i in range(BLOCK):
        out[i] = x[i] * x[i]


@kernel
def _decode(codes, scales, cell, cell_bits, table, squares, out):
    """Fill ``out`` with the moments of whole blocks, or their squares."""
    for first in range(0, out.size, BLOCK):
        last, at = first + BLOCK, first // GROUP
        x = out[first:last]
        decode_block(codes[first:last], scales[at : at + GROUPS], cell, cell_bits, table, x)
        if squares:
            square(x, x)


def refuse_first(highest: int) -> None:
    """Raise RefusedError where the largest scale of first moments is infinite."""
    if not highest < INFINITE_SCALE:
        raise RefusedError(REFUSAL_SIGNED)


def refuse_second(is_wrong: bool, overflows: bool) -> None:
    """Raise RefusedError where a second moment is NaN or negative, or a decoded maximum overflows."""
    if is_wrong or overflows:
        raise RefusedError(REFUSAL_ROOT if is_wrong else REFUSAL_UNSIGNED)


def encode(x: Array, out: Arrays, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Fill ``out`` with codes and scales, to the bit those of ``reference``. Raises RefusedError."""
    flat, codes, scales = widened(x), out["codes"], out["scales"]
    whole = flat.size // GROUP * GROUP
    _encode_groups(flat[:whole], codes[:whole], scales[: whole // GROUP], signed, levels, fourth_root)
    if whole < flat.size:
        # Zeros fill up the last group: they change no scale.
        last, last_codes = np.zeros(GROUP, f4), np.empty(GROUP, codes.dtype)
        last[: flat.size - whole] = flat[whole:]
        _encode_groups(last, last_codes, scales[whole // GROUP :], signed, levels, fourth_root)
        codes[whole:] = last_codes[: flat.size - whole]


def _encode_groups(x: Array, codes: Array, scales: Array, signed: bool, levels: int, fourth_root: bool) -> None:
    """Encode whole groups."""
    if signed:
        refuse_first(encode_first(x, x.view(i4), codes, scales, *with_bits(1), levels))
    else:
        memory = (*with_bits(1), *with_bits(GROUP))
        refuse_second(*encode_second(x, x.view(i4), codes, scales, *memory, levels, fourth_root))


def decode(parts: Arrays, out: Array, *, signed: bool, levels: int, fourth_root: bool) -> None:
    """Fill ``out`` with moments, to the bit those of ``reference``."""
    flat, codes, scales = room_for(out), parts["codes"], parts["scales"]
    table, whole = table_of(signed, levels, fourth_root), flat.size // BLOCK * BLOCK
    _decode(codes[:whole], scales[: whole // GROUP], *with_bits(1), table, not signed, flat[:whole])
    if whole < flat.size:
        last_codes, last_scales, last = (
            np.zeros(BLOCK, codes.dtype),
            np.zeros(GROUPS, scales.dtype),
            np.empty(BLOCK, f4),
        )
        last_codes[: flat.size - whole] = codes[whole:]
        last_scales[: scales.size - whole // GROUP] = scales[whole // GROUP :]
        _decode(last_codes, last_scales, *with_bits(1), table, not signed, last)
        flat[whole:] = last[: flat.size - whole]
    give(flat, out)
