"""The kernels of ``symbols`` and ``differences`` on a CPU, with the same bits.

They pack and unpack symbols in a pass over memory for every plane, and take differences and sums in one pass.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from ckpt8.codecs.lattice.numba import from_zigzag, zigzag
from ckpt8.container.frames import SHORT_PLANE, SYMBOLS_WORTH_IT
from ckpt8.container.manifest import DIGITS, LANES, Mode
from ckpt8.container.modes import BLOCK, BLOCK_BYTES, EFFORT, EXCESS, FRAME_BYTES, LEAST_SHARE, SHARES, TABLE_BYTES
from ckpt8.core.arrays import Array
from ckpt8.core.numba import f8, i4, kernel

u4, u8 = np.uint32, np.uint64

_LOG_2 = math.log(2)

_HISTOGRAMS, _SMALL = 4, 1 << 12
_RUN = 30 << 7
"""Symbols whose digits are taken at once, so that these stay in the L1 cache; whole bytes for every base."""
_JOINT = 1 << 9
"""The integers of the bits plane that are made at once: they stay there as well."""


@kernel
def _place(symbol):
    """Where a symbol is counted; unsigned, or numba would ask whether it counts from the end."""
    return u8(u4(symbol + i4(1)))


@kernel
def _count(symbols, first, second, third, fourth):
    """Count in four histograms in turn: an increment need not wait for that of an equal neighbour."""
    n = symbols.size // 4 * 4
    for i in range(0, n, 4):
        first[_place(symbols[i])] += u4(1)
        second[_place(symbols[i + 1])] += u4(1)
        third[_place(symbols[i + 2])] += u4(1)
        fourth[_place(symbols[i + 3])] += u4(1)
    for i in range(n, symbols.size):
        first[_place(symbols[i])] += u4(1)


@kernel
def _stored(symbol, top):
    """A symbol with the one that stands for -1 in place."""
    return i4(top if symbol < 0 else i4(symbol + i4(top == 0)))


@kernel
def _expected_share(most, shares, excess):
    """A value between those at ``shares``, which rise."""
    k = 1
    while most > shares[k]:
        k += 1
    slope = (excess[k] - excess[k - 1]) / (shares[k] - shares[k - 1])
    return slope * (most - shares[k - 1]) + excess[k - 1]


@kernel
def _expect_plane(row, total, length, per_byte, shares, excess):
    """See ``modes._stored``; ``row`` has the counts of the values, of which there are ``total``."""
    largest, values, entropy = 0, 1, 0.0
    distinct = 0
    for k in range(row.size):
        if row[k]:
            share = row[k] / total
            entropy -= share * math.log(share)
            largest, distinct = max(largest, row[k]), distinct + 1
    most = 1.0
    for _ in range(per_byte):
        most *= largest / total
        values = min(values * distinct, 256)
    bits = per_byte * entropy / _LOG_2 + _expected_share(most, shares, excess) + EFFORT
    blocks = (length + BLOCK - 1) // BLOCK
    packed = bits * length / 8 + blocks * (BLOCK_BYTES + TABLE_BYTES * values) + FRAME_BYTES
    worth = 1.0 if length < SHORT_PLANE else SYMBOLS_WORTH_IT
    return packed if packed < worth * length and most > LEAST_SHARE else f8(length)


@kernel
def _expect(symbols, counts, modes, numel, shares, excess, row, out):
    total = max(counts.sum(), 1)
    for at in range(modes.shape[0]):
        raw, base, over, top, bits, per_byte = modes[at]
        lanes = (numel + LANES - 1) // LANES
        out[at] = bits * lanes
        for plane in range(1 + over + raw):
            row[:] = 0
            for k in range(symbols.size):
                stored = top if symbols[k] < 0 else symbols[k] + (top == 0)
                rest = stored >> bits + 8 * raw
                if plane == 0:
                    value = min(rest, base - 1)
                elif plane <= over:
                    value = max(rest - (base - 1), 0) >> 8 * (over - plane)
                else:
                    value = stored >> 8 * (over + raw - plane)
                row[value & 0xFF] += counts[k]
            length = numel if plane else (numel + per_byte - 1) // per_byte
            out[at] += _expect_plane(row, total, length, per_byte if plane == 0 else 1, shares, excess)


@kernel
def _take_digits(symbols, out, top, shift, escape):
    for i in range(symbols.size):
        out[i] = min(i4(_stored(symbols[i], top) >> shift), escape)


@kernel
def _at(digits, place, weight):
    return i4(i4(digits[u8(place)]) * i4(weight))


@kernel
def _join_bytes(digits, out, per_byte):
    """Put so many digits into each byte, the first one as the lowest."""
    if per_byte == 5:
        for i in range(out.size):
            k = 5 * i
            low = i4(_at(digits, k, 1) + _at(digits, k + 1, 3))
            high = i4(_at(digits, k + 2, 9) + _at(digits, k + 3, 27))
            out[i] = i4(i4(low + high) + _at(digits, k + 4, 81))
    elif per_byte == 3:
        for i in range(out.size):
            k = 3 * i
            out[i] = i4(i4(_at(digits, k, 1) + _at(digits, k + 1, 6)) + _at(digits, k + 2, 36))
    else:
        for i in range(out.size):
            k = 2 * i
            out[i] = i4(_at(digits, k, 1) + _at(digits, k + 1, 16))


@kernel
def _fill_digits(symbols, out, run, top, shift, base, per_byte):
    top, shift, escape = i4(top), i4(shift), i4(base - 1)
    if per_byte == 1:
        _take_digits(symbols, out, top, shift, escape)
        return
    for first in range(0, symbols.size, _RUN):
        block = symbols[first : first + _RUN]
        _take_digits(block, run, top, shift, escape)
        run[block.size :] = 0
        at = first // per_byte
        _join_bytes(run, out[at : at + (block.size + per_byte - 1) // per_byte], per_byte)


@kernel
def _fill_plane(symbols, out, top, less, shift):
    """One byte of what a symbol has above ``less``."""
    top, less, shift = i4(top), i4(less), i4(shift)
    for i in range(symbols.size):
        out[i] = max(i4(_stored(symbols[i], top) - less), i4(0)) >> shift


@kernel
def _fill_bits(symbols, out, joint, top, bits):
    """The lowest bits: those of eight symbols, an eighth of all apart, make an integer."""
    n, m, top = symbols.size, (symbols.size + LANES - 1) // LANES, i4(top)
    mask = i4((1 << bits) - 1)
    for first in range(0, m, _JOINT):
        block = joint[: min(_JOINT, m - first)]
        block[:] = 0
        for lane in range(LANES):
            own = symbols[lane * m + first : min(n, lane * m + first + block.size)]
            shift = u8(bits * lane)
            for i in range(own.size):
                block[i] |= u8(_stored(own[i], top) & mask) << shift
        for k in range(bits):
            shift = u8(8 * k)
            stored = out[k * m + first : k * m + first + block.size]
            for i in range(block.size):
                stored[i] = block[i] >> shift


@kernel
def _join_digits(plane, digits, per_byte, out):
    """Look up the digits of every byte."""
    n = out.size // per_byte
    if per_byte == 5:
        for i in range(n):
            at, own = 5 * i, digits[plane[i]]
            out[at], out[at + 1], out[at + 2], out[at + 3], out[at + 4] = own[0], own[1], own[2], own[3], own[4]
    elif per_byte == 3:
        for i in range(n):
            at, own = 3 * i, digits[plane[i]]
            out[at], out[at + 1], out[at + 2] = own[0], own[1], own[2]
    elif per_byte == 2:
        for i in range(n):
            out[2 * i], out[2 * i + 1] = i4(plane[i]) & i4(15), i4(plane[i]) >> i4(4)
    else:
        for i in range(n):
            out[i] = plane[i]
    for i in range(per_byte * n, out.size):
        out[i] = digits[plane[n], i - per_byte * n]


@kernel
def _add_over(plane, byte, escape, out):
    """Add bytes to digits that are escapes; return whether all others are zero. Digits must be the first byte's."""
    wrong = i4(0)
    byte, escape = i4(byte), i4(escape)
    for i in range(out.size):
        above = i4(i4(plane[i]) << byte)
        wrong |= i4((above != 0) & (out[i] < escape))
        out[i] += above
    return wrong == 0


@kernel
def _add_raw(plane, out):
    for i in range(out.size):
        out[i] = i4(out[i] << i4(8)) | i4(plane[i])


@kernel
def _add_bits(plane, joint, bits, out):
    """Put bits below what is there; return whether those behind the last symbol are zero."""
    n, m = out.size, plane.size // bits
    mask, wrong = u8((1 << bits) - 1), u8(0)
    for first in range(0, m, _JOINT):
        block = joint[: min(_JOINT, m - first)]
        block[:] = 0
        for k in range(bits):
            shift = u8(8 * k)
            stored = plane[k * m + first : k * m + first + block.size]
            for i in range(block.size):
                block[i] |= u8(stored[i]) << shift
        for lane in range(LANES):
            own = out[lane * m + first : min(n, lane * m + first + block.size)]
            shift = u8(bits * lane)
            for i in range(own.size):
                own[i] = i4(own[i] << i4(bits)) | i4((block[i] >> shift) & mask)
            for i in range(own.size, block.size):
                wrong |= (block[i] >> shift) & mask
    return wrong == 0


@kernel
def _set_top(out, top):
    """Give -1 to those that are ``top``, and take back what made room for it; return the largest of all before."""
    largest, top, less = i4(0), i4(top), i4(top == 0)
    for i in range(out.size):
        largest = max(largest, out[i])
        out[i] = i4(-1) if out[i] == top else i4(out[i] - less)
    return largest


_SHARES, _EXCESS = np.array(SHARES), np.array(EXCESS)


def largest(symbols: Array) -> int:
    """The largest symbol, at least 0. See ``symbols``."""
    return int(symbols.max(initial=0))


def histogram(symbols: Array, largest: int) -> Array:
    """How often each value from -1 to ``largest`` occurs. See ``symbols``."""
    lanes = _HISTOGRAMS if largest < _SMALL else 1
    counts = np.zeros((lanes, largest + 2), np.uint32)
    _count(symbols, *(counts[k % lanes] for k in range(_HISTOGRAMS)))
    return np.asarray(counts.sum(0, dtype=np.int64))


def expect(symbols: Array, counts: Array, modes: Array, numel: int) -> Array:
    """The bytes that the planes of each mode are expected to take. See ``modes.Expect``."""
    out = np.empty(len(modes))
    _expect(symbols, counts, modes, numel, _SHARES, _EXCESS, np.empty(256, np.int64), out)
    return out


def fill(symbols: Array, mode: Mode, planes: Sequence[Array]) -> None:
    """Fill the planes of a mode with symbols. See ``symbols``."""
    raw, base, over, top, bits = mode
    low = bits + 8 * raw
    _fill_digits(symbols, planes[0], np.empty(_RUN, np.uint8), top, low, base, DIGITS[base])
    for k in range(over):
        # Shifted once: a second shift of each symbol would take twice as long.
        _fill_plane(symbols, planes[over - k], top, (base - 1) << low, 8 * k + low)
    for k in range(raw):
        _fill_plane(symbols, planes[over + raw - k], top, 0, 8 * k)
    if bits:
        _fill_bits(symbols, planes[1 + over], np.empty(_JOINT, np.uint64), top, bits)


def join(planes: Sequence[Array], mode: Mode, out: Array) -> bool:
    """Fill ``out`` with the symbols of planes; whether the planes are sound. See ``symbols``."""
    raw, base, over, top, bits = mode
    per_byte = DIGITS[base]
    if planes[0].max() >= base**per_byte:
        return False
    _join_digits(planes[0], _digits(base), per_byte, out)
    # From the most significant byte on: a digit that is no escape stays below it.
    if not all(_add_over(planes[over - k], 8 * k, base - 1, out) for k in reversed(range(over))):
        return False
    for k in range(raw):
        _add_raw(planes[over + 1 + k], out)
    if bits and not _add_bits(planes[over + 1], np.empty(_JOINT, np.uint64), bits, out):
        return False
    return bool(_set_top(out, top) <= mode.largest)


@cache
def _digits(base: int) -> Array:
    """The digits of every byte, int32, the lowest first."""
    per_byte = DIGITS[base]
    values = np.arange(base**per_byte, dtype=np.int32)
    return np.stack([values // base**k % base for k in range(per_byte)], 1)


@kernel
def _subtract(symbols, base, out):
    """Return the largest of the differences."""
    largest = i4(0)
    for i in range(symbols.size):
        own, other = symbols[i], base[i]
        far = i4(-1) if own < 0 else zigzag(i4(from_zigzag(own) - from_zigzag(other)))
        symbol = i4(own + i4(1)) if other < 0 else far
        out[i] = symbol
        largest = max(largest, symbol)
    return largest


@kernel
def _add(symbols, base):
    """Add in place; return the smallest and the largest of the sums."""
    least, largest = i4(0), i4(0)
    for i in range(symbols.size):
        own, other = symbols[i], base[i]
        far = i4(-1) if own < 0 else zigzag(i4(from_zigzag(own) + from_zigzag(other)))
        symbol = i4(own - i4(1)) if other < 0 else far
        symbols[i] = symbol
        least, largest = min(least, symbol), max(largest, symbol)
    return least, largest


def subtract(symbols: Array, base: Array) -> tuple[Array, int]:
    """Differences of symbols to those of a base, and the largest of them. See ``symbols``."""
    out = np.empty_like(symbols)
    return out, int(_subtract(symbols, base, out))


def add(symbols: Array, base: Array) -> tuple[int, int]:
    """Add symbols of a base in place; the least and the largest of the sums. See ``symbols``."""
    least, largest = _add(symbols, base)
    return int(least), int(largest)
