"""Chooses the mode of symbols: how they are cut into planes, see ``manifest`` for the form.

The mode of a chunk is that whose planes zstd should make smallest, by a histogram of its symbols. It follows from this
alone, so that every device and backend chooses the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache

import numpy as np

from ckpt8.container.frames import SHORT_PLANE, SYMBOLS_WORTH_IT
from ckpt8.container.manifest import DIGITS, LANES, MOST_BITS, MOST_RAW, NO_TOP, PLANES, Mode
from ckpt8.core.arrays import Array

_BYTE = 256
BLOCK, BLOCK_BYTES, FRAME_BYTES = 1 << 17, 4.0, 9.0
TABLE_BYTES = 0.5
"""What a value of a byte takes in the Huffman table of every block."""
EFFORT = 0.01
"""Bits that a byte counts besides where zstd takes it: of modes that are nearly equal, that with fewer such bytes is
faster, and no larger as measured."""
LEAST_SHARE = 1 / 127
"""zstd stores bytes as they are unless one of them is more frequent."""
_FEWEST_ABOVE, _BASES_ABOVE = 4, (16, 256)
"""Below bits is no less than that, in digits of these bases: less has no noise below it."""

SHARES = (
    0.0, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.9925, 0.995, 0.997, 0.998, 0.999, 1.0,
)  # fmt: skip
EXCESS = (
    0.03, 0.03, 0.05, 0.08, 0.13, 0.28, 0.45, 0.59, 0.60, 0.53, 0.35, 0.236, 0.172, 0.0955, 0.073, 0.0425, 0.018, 0.013,
    0.005, 0.002,
)  # fmt: skip
"""Bits that zstd takes for a byte beyond its entropy, by the share of the most frequent byte, as measured. Huffman
takes one at least, and the matches that zstd finds where a byte repeats cost more than they save until it has 0.9."""

_EQUAL = 1e-9
"""Sums that differ by less than this share are equal: the last digits of a logarithm depend on who computes it."""

Expect = Callable[[Array, Array, Array, int], Array]
"""The bytes that the planes of each mode are expected to take: of the symbols from -1 on that occur and their counts,
of modes (rows of ``Mode`` with the digits in a byte behind) and of the number of all symbols."""


def choose(counts: Array, numel: int, expect: Expect | None = None) -> Mode:
    """The mode for ``numel`` symbols. ``counts`` say how often each value from -1 to the largest occurs, int64.

    The first one of equals. Bits are taken for noise.
    """
    modes, table = _modes(len(counts), bool(counts[0]))
    used = counts.nonzero()[0]
    totals = (expect or _expect)(used - 1, counts[used], table, numel)
    return modes[int(np.argmax(totals <= totals.min() * (1 + _EQUAL)))]


@lru_cache(maxsize=64)
def _modes(values: int, has_top: bool) -> tuple[list[Mode], Array]:
    """The modes to choose from, and their table, for so many values from -1 on; whether -1 is one of them."""
    modes = list[Mode]()
    for top in (values - 1, 0) if has_top else (NO_TOP,):
        largest = values - 1 if has_top else values - 2
        for bits in range(MOST_BITS + 1 if largest >= _FEWEST_ABOVE else 1):
            modes += _candidates(largest >> bits, top, bits)
    return modes, np.array([(*mode, DIGITS[mode.base]) for mode in modes])


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


def _expect(symbols: Array, counts: Array, modes: Array, numel: int) -> Array:
    """``Expect`` without a kernel."""
    totals = list[float]()
    for raw, base, over, top, bits, per_byte in modes.tolist():
        stored = np.where(symbols < 0, top, symbols + (top == 0))
        rest, lanes = stored >> bits + 8 * raw, -(-numel // LANES)
        above = (rest - (base - 1)).clip(min=0)
        bytes_of = [above >> 8 * k & 0xFF for k in reversed(range(over))]
        bytes_of += [stored >> 8 * k & 0xFF for k in reversed(range(raw))]
        total = bits * lanes + _stored(rest.clip(max=base - 1), counts, -(-numel // per_byte), per_byte)
        totals.append(sum((_stored(values, counts, numel, 1) for values in bytes_of), total))
    return np.array(totals)


def _stored(values: Array, counts: Array, length: int, per_byte: int) -> float:
    """The bytes that a plane of ``length`` is expected to take, which has so many of these values in each byte."""
    shares = np.bincount(values, counts) / max(int(counts.sum()), 1)
    shares = shares[shares > 0]
    most, entropy = float(shares.max(initial=0.0)) ** per_byte, -float((shares * np.log(shares)).sum()) / math.log(2)
    bits = per_byte * entropy + float(np.interp(most, SHARES, EXCESS)) + EFFORT
    table = TABLE_BYTES * min(len(shares) ** per_byte, _BYTE)
    packed = bits * length / 8 + -(-length // BLOCK) * (BLOCK_BYTES + table) + FRAME_BYTES
    worth = 1.0 if length < SHORT_PLANE else SYMBOLS_WORTH_IT
    return packed if packed < worth * length and most > LEAST_SHARE else length
