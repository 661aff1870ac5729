"""Chooses the mode of symbols: how they are cut into planes, see ``manifest`` for the form.

The mode of a chunk is that whose planes zstd should make smallest, by a histogram of its symbols. It follows from this
alone, so that every device and backend chooses the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from ckpt8.container.frames import SHORT_PLANE, SYMBOLS_WORTH_IT
from ckpt8.container.manifest import DIGITS, LANES, MOST_BITS, MOST_RAW, NO_TOP, PLANES, Mode
from ckpt8.core.arrays import Array

_BYTE = 256
_BLOCK, _BLOCK_BYTES, _FRAME_BYTES = 1 << 17, 4.0, 9.0
_TABLE_BYTES = 0.5
"""What a value of a byte takes in the Huffman table of every block."""
_EFFORT = 0.01
"""Bits that a byte counts besides where zstd takes it: of modes that are nearly equal, that with fewer such bytes is
faster, and no larger as measured."""
_LEAST_SHARE = 1 / 127
"""zstd stores bytes as they are unless one of them is more frequent."""
_FEWEST_ABOVE, _BASES_ABOVE = 4, (16, 256)
"""Below bits is no less than that, in digits of these bases: less has no noise below it."""

_SHARES = (
    0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.9925, 0.995, 0.997, 0.998, 0.999, 1.0,
)  # fmt: skip
_EXCESS = (
    0.03, 0.03, 0.05, 0.08, 0.13, 0.28, 0.45, 0.59, 0.60, 0.53, 0.35, 0.236, 0.172, 0.0955, 0.073, 0.0425, 0.018, 0.013,
    0.005, 0.002,
)  # fmt: skip
"""Bits that zstd takes for a byte beyond its entropy, by the share of the most frequent byte, as measured. Huffman
takes one at least, and the matches that zstd finds where a byte repeats cost more than they save until it has 0.9."""

Tabulate = Callable[[Array, Sequence[Mode]], Array]
"""The counts of the values in each plane of each mode but that of the bits, of digits in the first, a row of 256 for
each: from the counts of what symbols have above the bits."""


def choose(counts: Array, numel: int, tabulate: Tabulate | None = None) -> Mode:
    """The mode for ``numel`` symbols. ``counts`` say how often each value from -1 on occurs, int64.

    The first one of equals. Bits are taken for noise.
    """
    candidates, tables = list[Mode](), list[Array]()
    for top in (len(counts) - 1, 0) if counts[0] else (NO_TOP,):
        stored = _with_top(counts, top)
        largest = _largest_counted(stored)
        for bits in range(MOST_BITS + 1 if largest >= _FEWEST_ABOVE else 1):
            modes = list(_candidates(largest >> bits, top, bits))
            if modes:
                candidates += modes
                tables.append((tabulate or _tabulate)(_above_bits(stored, bits), modes))
    planes = [mode.plane_lengths(numel)[: 1 + mode.over + mode.raw] for mode in candidates]
    lengths = [length for plane in planes for length in plane]
    digits = [
        size for mode, own in zip(candidates, planes, strict=True) for size in (DIGITS[mode.base], *[1] * len(own[1:]))
    ]
    sizes = iter(_stored(np.concatenate(tables), np.array(lengths, float), np.array(digits, float)).tolist())
    totals = [
        sum(islice(sizes, len(own)), mode.bits * -(-numel // LANES))
        for mode, own in zip(candidates, planes, strict=True)
    ]
    return candidates[totals.index(min(totals))]


def _above_bits(counts: Array, bits: int) -> Array:
    """``counts`` of what symbols have above their lowest bits."""
    width = 1 << bits
    return _rows(counts, width).sum(1) if bits else counts


def _rows(counts: Array, width: int) -> Array:
    """The counts in rows of ``width``, with zeros behind them."""
    rows = np.zeros(-(-len(counts) // width) * width, counts.dtype)
    rows[: len(counts)] = counts
    return rows.reshape(-1, width)


def _with_top(counts: Array, top: int) -> Array:
    """``counts`` of the stored symbols from 0 on."""
    if top == 0:
        return counts
    return counts[1:] if top == NO_TOP else np.concatenate([counts[1:], counts[:1]])


def _candidates(largest: int, top: int, bits: int) -> Iterator[Mode]:
    """The modes of so many bits that hold values up to ``largest`` above them, apart from those that gain nothing."""
    if bits and largest < _FEWEST_ABOVE:
        return
    for raw in range(1 if bits else MOST_RAW + 1):
        rest = largest >> 8 * raw
        if raw and not rest:
            return
        for base in _BASES_ABOVE if bits else DIGITS:
            over = ((rest - (base - 1)).bit_length() + 7) // 8 if rest >= base else 0
            if raw + over + (bits > 0) < PLANES:
                yield Mode(raw, base, over, top, bits)


def _tabulate(counts: Array, modes: Sequence[Mode]) -> Array:
    """How often every byte occurs in every plane of every mode: ``Tabulate`` without a kernel."""
    rests, lowest = [counts], list[Array]()
    for _ in range(max(mode.raw for mode in modes)):
        low, above = _cut_off_byte(rests[-1])
        lowest.insert(0, low)
        rests.append(above)
    rows: list[Array] = []
    for raw, base, over, *_ in modes:
        rest = rests[raw]
        digits = np.zeros(_BYTE, counts.dtype)
        digits[: len(rest[: base - 1])] = rest[: base - 1]
        digits[base - 1] = rest[base - 1 :].sum()
        rows += [digits, *_over_planes(rest, base, over), *lowest[len(lowest) - raw :]]
    return np.stack(rows)


def _over_planes(rest: Array, base: int, over: int) -> list[Array]:
    above = rest[base - 1 :].copy()
    if over:
        above[0] += rest[: base - 1].sum()
    planes: list[Array] = []
    for _ in range(over):
        low, above = _cut_off_byte(above)
        planes.insert(0, low)
    return planes


def _cut_off_byte(counts: Array) -> tuple[Array, Array]:
    """The counts of the lowest byte, and those of what is above it."""
    by_byte = _rows(counts, _BYTE)
    return by_byte.sum(0), by_byte.sum(1)


def _largest_counted(counts: Array) -> int:
    used = counts.nonzero()[0]
    return int(used[-1]) if len(used) else 0


def _stored(counts: Array, lengths: Array, digits: Array) -> Array:
    """The bytes that planes are expected to take, by row: ``digits`` share a byte, ``lengths`` are in bytes."""
    shares = counts / counts.sum(1, keepdims=True).clip(min=1)
    most = shares.max(1) ** digits
    logarithms = np.log(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy = digits * -(shares * logarithms).sum(1) / math.log(2)
    bits = entropy + np.interp(most, _SHARES, _EXCESS) + _EFFORT
    values = ((counts > 0).sum(1) ** digits).clip(max=_BYTE)
    blocks = np.ceil(lengths / _BLOCK)
    packed = bits * lengths / 8 + blocks * (_BLOCK_BYTES + _TABLE_BYTES * values) + _FRAME_BYTES
    worth = np.where(lengths < SHORT_PLANE, 1.0, SYMBOLS_WORTH_IT)
    return np.where((packed < worth * lengths) & (most > _LEAST_SHARE), packed, lengths)
