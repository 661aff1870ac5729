"""The modes in which the symbols of a chunk are packed into planes of bytes. Imports no torch.

Symbols are integers from 0 on, mostly small. zstd spends at least a bit on a byte, so several share one; and the lowest
bits of large ones are noise, which goes past zstd. A symbol s is

    bits plane      its lowest ``bits`` bits, 0 to 7 of them; x is the rest, s >> bits
    raw planes      the ``raw`` lowest bytes of x, 0 to 2 of them, a plane each; none where there are bits
    digits          min(x >> 8 raw, base - 1): a digit; so many of them share a byte, the first one as its lowest digit
    over planes     what x >> 8 raw has above base - 1, in ``over`` bytes; all zero where it has less

The planes are, in this order, digits, over planes, raw planes, both with the most significant byte first, and the bits
plane. There are always four; those that a mode does not use are empty. In the bits plane of n symbols, those whose
number is i modulo m = ceil(n / 8) make an integer of 8 ``bits`` bits, the first one as its lowest; its byte k is at
k m + i. The symbol ``top`` stands for -1: it is one more than the largest of the chunk, or 0, and all others are stored
as s + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PLANES = 4
"""Planes of a chunk, the empty ones among them."""

DIGITS = {3: 5, 6: 3, 16: 2, 256: 1}
"""The digits in a byte, by base."""

SYMBOL_LIMIT = 1 << 20
"""Symbols are below it, and so is the one that stands for -1."""

LANES = 8
"""The symbols whose bits make one integer of the bits plane."""

NO_TOP = -1
MOST_RAW, MOST_BITS = 2, 7


class Mode(NamedTuple):
    """How the symbols of one chunk are packed. ``top`` is NO_TOP where none of them is -1."""

    raw: int
    base: int
    over: int
    top: int
    bits: int = 0

    @classmethod
    def of(cls, value: Any) -> Mode:
        """The mode that a manifest states. Raises TypeError or ValueError for anything else."""
        raw, base, over, top, *rest = value
        if any(type(number) is not int for number in value):
            raise TypeError
        if rest and (len(rest) > 1 or raw or not 0 < rest[0] <= MOST_BITS):
            raise ValueError
        if base not in DIGITS or not 0 <= raw <= MOST_RAW or not 0 <= over < PLANES - raw - len(rest):
            raise ValueError
        if not NO_TOP <= top < SYMBOL_LIMIT:
            raise ValueError
        return cls(raw, base, over, top, *rest)

    @property
    def stated(self) -> tuple[int, ...]:
        """What a manifest states: no bits where there are none."""
        return self if self.bits else self[:-1]

    @property
    def largest(self) -> int:
        """The largest symbol that its planes may hold."""
        return self.top if self.top > 0 else SYMBOL_LIMIT - 1

    def plane_lengths(self, numel: int) -> list[int]:
        """The bytes of each plane of ``numel`` symbols."""
        lengths = [-(-numel // DIGITS[self.base]), *[numel] * (self.over + self.raw)]
        if self.bits:
            lengths.append(self.bits * -(-numel // LANES))
        return lengths + [0] * (PLANES - len(lengths))


class Packing(NamedTuple):
    """The mode and the number of the symbols that a row of planes holds."""

    mode: Mode
    numel: int

    @property
    def plane_lengths(self) -> list[int]:
        """The bytes of each plane."""
        return self.mode.plane_lengths(self.numel)
