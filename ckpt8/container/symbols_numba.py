"""Packs and unpacks symbols in a pass over memory for every plane: the bits of ``symbols``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ckpt8.container.symbol_modes import DIGITS, Mode
from ckpt8.core.numba_kernels import i4, kernel

_LANES, _SMALL = 4, 1 << 12
_RUN = 1 << 12
"""Symbols that are handled at once, so that they stay in the L1 cache."""


@kernel
def _largest(symbols):
    largest = i4(0)
    for i in range(symbols.size):
        largest = max(largest, symbols[i])
    return largest


@kernel
def _count(symbols, counts):
    """Count in four histograms in turn: an increment need not wait for that of an equal neighbour."""
    n = symbols.size // 4 * 4
    for i in range(0, n, 4):
        counts[0, symbols[i] + 1] += 1
        counts[1, symbols[i + 1] + 1] += 1
        counts[2, symbols[i + 2] + 1] += 1
        counts[3, symbols[i + 3] + 1] += 1
    for i in range(n, symbols.size):
        counts[0, symbols[i] + 1] += 1


@kernel
def _count_many(symbols, counts):
    for i in range(symbols.size):
        counts[0, symbols[i] + 1] += 1


@kernel
def _stored(symbol, top):
    """A symbol with the one that stands for -1 in place."""
    return i4(top if symbol < 0 else i4(symbol + i4(top == 0)))


@kernel
def _digit(symbol, top, shift, escape):
    return min(i4(_stored(symbol, top) >> shift), escape)


@kernel
def _fill_digits(symbols, out, top, shift, base, per_byte):
    top, shift, base, escape = i4(top), i4(shift), i4(base), i4(base - 1)
    n = symbols.size // per_byte
    if per_byte == 5:
        for i in range(n):
            at = 5 * i
            a = _digit(symbols[at], top, shift, escape) + i4(3) * _digit(symbols[at + 1], top, shift, escape)
            b = i4(9) * _digit(symbols[at + 2], top, shift, escape) + i4(27) * _digit(
                symbols[at + 3], top, shift, escape
            )
            out[i] = a + b + i4(81) * _digit(symbols[at + 4], top, shift, escape)
    elif per_byte == 3:
        for i in range(n):
            at = 3 * i
            a = _digit(symbols[at], top, shift, escape) + i4(6) * _digit(symbols[at + 1], top, shift, escape)
            out[i] = a + i4(36) * _digit(symbols[at + 2], top, shift, escape)
    elif per_byte == 2:
        for i in range(n):
            at = 2 * i
            out[i] = _digit(symbols[at], top, shift, escape) + i4(16) * _digit(symbols[at + 1], top, shift, escape)
    else:
        for i in range(n):
            out[i] = _digit(symbols[i], top, shift, escape)
    if n < out.size:
        weight, last = i4(1), i4(0)
        for i in range(per_byte * n, symbols.size):
            last += weight * _digit(symbols[i], top, shift, escape)
            weight *= base
        out[n] = last


@kernel
def _fill_plane(symbols, out, top, shift, less, byte):
    """One byte of what a symbol has above ``less``, once it is shifted."""
    top, shift, less, byte = i4(top), i4(shift), i4(less), i4(byte)
    for i in range(symbols.size):
        out[i] = i4(max(i4(i4(_stored(symbols[i], top) >> shift) - less), i4(0)) >> byte) & i4(0xFF)


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
def _largest_byte(plane):
    largest = plane[0]
    for i in range(plane.size):
        largest = max(largest, plane[i])
    return largest


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
def _set_top(out, top):
    """Give -1 to those that are ``top``, and take back what made room for it; return the largest of all before."""
    largest, top, less = i4(0), i4(top), i4(top == 0)
    for i in range(out.size):
        largest = max(largest, out[i])
        out[i] = i4(-1) if out[i] == top else i4(out[i] - less)
    return largest


def largest(symbols: torch.Tensor) -> int:
    """As ``symbols``."""
    return int(_largest(symbols.numpy()))


def histogram(symbols: torch.Tensor, largest: int) -> torch.Tensor:
    """As ``symbols``."""
    lanes = _LANES if largest < _SMALL else 1
    counts = np.zeros((lanes, largest + 2), np.int64)
    (_count if lanes > 1 else _count_many)(symbols.numpy(), counts)
    return torch.from_numpy(counts.sum(0))


def fill(symbols: torch.Tensor, mode: Mode, planes: Sequence[torch.Tensor]) -> None:
    """As ``symbols``."""
    x, (raw, base, over, top) = symbols.numpy(), mode
    _fill_digits(x, planes[0].numpy(), top, 8 * raw, base, DIGITS[base])
    for k in range(over):
        _fill_plane(x, planes[over - k].numpy(), top, 8 * raw, base - 1, 8 * k)
    for k in range(raw):
        _fill_plane(x, planes[over + raw - k].numpy(), top, 0, 0, 8 * k)


def join(planes: Sequence[torch.Tensor], mode: Mode, out: torch.Tensor) -> bool:
    """As ``symbols``."""
    arrays, found, (raw, base, over, top) = [plane.numpy() for plane in planes], out.numpy(), mode
    per_byte = DIGITS[base]
    if _largest_byte(arrays[0]) >= base**per_byte:
        return False
    values = np.arange(base**per_byte, dtype=np.int32)
    digits = np.stack([values // base**k % base for k in range(per_byte)], 1)
    _join_digits(arrays[0], digits, per_byte, found)
    # From the most significant byte on: a digit that is no escape stays below it.
    if not all(_add_over(arrays[over - k], 8 * k, base - 1, found) for k in reversed(range(over))):
        return False
    for k in range(raw):
        _add_raw(arrays[over + 1 + k], found)
    return bool(_set_top(found, top) <= mode.largest)
