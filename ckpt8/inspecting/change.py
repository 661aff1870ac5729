"""``Change``: the difference between two tensors, in figures that add up over tiles, in the order of the elements.

Elements of one type differ if their bits do; elements of two types, if their values do. Elements that are NaN or Inf on
either side are counted, and left out of all other figures, which are computed in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ckpt8.codecs.error_stats import ErrorStats
from ckpt8.core.arrays import Array, doubles
from ckpt8.core.tensors import DType

_TILE = 1 << 16
"""Elements that are looked at together: their temporaries fit the L2 cache."""

_EXACT = 2.0**62
"""Smaller differences of 64-bit integers are computed as integers: float64 has too few bits for their values."""


@dataclass(slots=True)
class Change(ErrorStats):
    """Sums over ``elements``; ``differ`` of them differ.

    ``excluded`` of them are in no figure: they are NaN or Inf on either side, or of a type without numbers.

    ``square`` is the sum of a^2, ``change`` that of (b - a)^2, ``max_change`` is max |b - a|; of complex numbers |.| is
    the magnitude.
    """

    elements: int = 0
    differ: int = 0
    square: float = 0.0
    change: float = 0.0
    max_change: float = 0.0
    nan_a: int = 0
    nan_b: int = 0
    infinite_a: int = 0
    infinite_b: int = 0
    excluded: int = 0

    def times(self, count: int) -> Change:
        """The change of ``count`` copies of these elements."""
        values = {field.name: getattr(self, field.name) * count for field in fields(self)}
        return Change(**{**values, "max_change": self.max_change})

    @property
    def is_known(self) -> bool:
        """Whether there are figures: elements that differ give none if all are NaN or Inf."""
        return not self.differ or self.elements > self.excluded

    @property
    def relative(self) -> float | None:
        """||b - a|| / ||a||; None if it is unknown, if only a is zero, or beyond float64."""
        if not self.change:
            return 0.0 if self.is_known else None
        return _finite(math.sqrt(self.change / self.square)) if self.square else None

    @property
    def largest(self) -> float | None:
        """Largest |b - a|; None if it is unknown, or beyond float64."""
        return _finite(self.max_change) if self.is_known else None

    @property
    def rms(self) -> float | None:
        """Root mean square of a, over the elements that count; None without any."""
        return self._root_mean(self.square)

    def _root_mean(self, total: float) -> float | None:
        counted = self.elements - self.excluded
        return _finite(math.sqrt(total / counted)) if counted else None

    def to_json(self) -> dict[str, Any]:
        """For ``--json``; ``nan`` and ``infinite`` count those of either side. What is unknown is None."""
        return {
            "elements": self.elements,
            "differ": self.differ,
            "max_change": self.largest,
            "relative": self.relative,
            "rms_change": self._root_mean(self.change),
            "rms": self.rms,
            "nan": [self.nan_a, self.nan_b],
            "infinite": [self.infinite_a, self.infinite_b],
            "excluded": self.excluded,
        }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def measure(a: Array, b: Array, types: tuple[DType, DType]) -> Change:
    """Compare two arrays of one length, of elements of types that have numbers."""
    tiles = (slice(start, start + _TILE) for start in range(0, len(a), _TILE))
    return Change.total(_measure_tile(a[tile], b[tile], types) for tile in tiles)


def _count_differing(a: Array, b: Array) -> int:
    """How many elements of one type differ in their bits."""
    words = a.view(f"u{min(a.itemsize, 8)}") != b.view(f"u{min(a.itemsize, 8)}")
    return int(np.count_nonzero(words.reshape(len(a), -1).any(1)))


def _measure_tile(a: Array, b: Array, types: tuple[DType, DType]) -> Change:
    same_type = types[0] is types[1]
    change = Change(len(a), _count_differing(a, b) if same_type else 0)
    x = doubles(a, types[0])
    y = x if same_type and not change.differ else doubles(b, types[1])
    with np.errstate(all="ignore"):
        if not same_type:
            change.differ = int(np.count_nonzero((x != y) & ~(np.isnan(x) & np.isnan(y))))
        difference = None if y is x else _difference(a, b, x, y, types)
        _add_energy(change, x, difference)
    if math.isfinite(change.square + change.change):
        return change
    finite = np.isfinite(x) & np.isfinite(y)
    change.nan_a, change.nan_b = (int(np.count_nonzero(np.isnan(side))) for side in (x, y))
    change.infinite_a, change.infinite_b = (int(np.count_nonzero(np.isinf(side))) for side in (x, y))
    change.excluded = len(a) - int(np.count_nonzero(finite))
    with np.errstate(all="ignore"):
        _add_energy(change, x[finite], None if difference is None else difference[finite])
    return change


def _difference(a: Array, b: Array, x: Array, y: Array, types: tuple[DType, DType]) -> Array:
    """``b - a``; ``x`` and ``y`` are their values in float64."""
    wide = y - x
    if types[0] is not types[1] or types[0] not in (DType.INT64, DType.UINT64):
        return wide
    # Modulo 2^64, and so exact if the difference is small enough.
    return np.where(np.abs(wide) < _EXACT, (b.view(np.int64) - a.view(np.int64)).astype(np.float64), wide)


def _add_energy(into: Change, x: Array, difference: Array | None) -> None:
    """Set the sums and the maximum."""
    into.square = _square_sum(x)
    into.change = into.max_change = 0.0
    if difference is not None and len(difference):
        into.change = _square_sum(difference)
        into.max_change = float(np.abs(difference).max())


def _square_sum(x: Array) -> float:
    return float(np.square(x.view(np.float64)).sum())
