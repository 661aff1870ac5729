"""The modes in which the symbols of a chunk are packed into planes of bytes. Imports no torch.

Symbols are integers from 0 on, mostly small. zstd spends at least a bit on a byte, so several share one. A symbol s is

    raw planes      its ``raw`` lowest bytes, 0 to 2 of them, a plane each
    digits          min(s >> 8 raw, base - 1): a digit; so many of them share a byte, the first one as its lowest digit
    over planes     what s >> 8 raw has above base - 1, in ``over`` bytes; all zero where it has less

The planes are, in this order, digits, over planes and raw planes, both with the most significant byte first. There are
always four; those that a mode does not use are empty. The symbol ``top`` stands for -1: it is one more than the largest
of the chunk, or 0, and all others are stored as s + 1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

PLANES = 4
"""Planes of a chunk, the empty ones among them."""

DIGITS = {3: 5, 6: 3, 16: 2, 256: 1}
"""The digits in a byte, by base."""

SYMBOL_LIMIT = 1 << 20
"""Symbols are below it, and so is the one that stands for -1."""

NO_TOP = -1
_MOST_RAW = 2


class Mode(NamedTuple):
    """How the symbols of one chunk are packed. ``top`` is NO_TOP where none of them is -1."""

    raw: int
    base: int
    over: int
    top: int

    @classmethod
    def of(cls, value: Any) -> Mode:
        """The mode that a manifest states. Raises TypeError or ValueError for anything else."""
        raw, base, over, top = value
        if any(type(each) is not int for each in (raw, base, over, top)):
            raise TypeError
        if base not in DIGITS or not 0 <= raw <= _MOST_RAW or not 0 <= over < PLANES - raw:
            raise ValueError
        if not NO_TOP <= top < SYMBOL_LIMIT:
            raise ValueError
        return cls(raw, base, over, top)

    @property
    def largest(self) -> int:
        """The largest symbol that its planes may hold."""
        return self.top if self.top > 0 else SYMBOL_LIMIT - 1

    def plane_lengths(self, numel: int) -> list[int]:
        """The bytes of each plane of ``numel`` symbols."""
        used = self.over + self.raw
        return [-(-numel // DIGITS[self.base]), *[numel] * used, *[0] * (PLANES - 1 - used)]


class Packing(NamedTuple):
    """The mode and the number of the symbols that a row of planes holds."""

    mode: Mode
    numel: int

    @property
    def plane_lengths(self) -> list[int]:
        """The bytes of each plane."""
        return self.mode.plane_lengths(self.numel)
