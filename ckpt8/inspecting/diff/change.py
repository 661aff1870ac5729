"""The difference between two tensors: figures in float64 that add up over tiles, in the order of the elements.

Elements of one type differ if their bits do; elements of two types, if their values do. Elements that are NaN or Inf on
either side are counted, and left out of all other figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from ckpt8.codecs.error_stats import ErrorStats

_TILE = 1 << 16
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


def measure(a: Tensor, b: Tensor) -> Change:
    """Compare two flat tensors of one length, on the CPU, both of types that have numbers."""
    total = Change()
    for start in range(0, len(a), _TILE):
        total.merge(_tile(a[start : start + _TILE], b[start : start + _TILE]))
    return total


def count_differing(a: Tensor, b: Tensor) -> int:
    """How many elements of two flat contiguous tensors of one type differ in their bits."""
    size = a.element_size()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    x, y = (each.view(integers[min(size, 8)]) for each in (a, b))
    unequal = x.ne(y)
    return int((unequal.view(-1, 2).any(1) if size > 8 else unequal).count_nonzero())


def _tile(a: Tensor, b: Tensor) -> Change:
    same_type = a.dtype == b.dtype
    found = Change(len(a), count_differing(a, b) if same_type else 0)
    x = _wide(a)
    y = x if same_type and not found.differ else _wide(b)
    if not same_type:
        found.differ = int((x.ne(y) & ~(x.isnan() & y.isnan())).count_nonzero())
    difference = None if y is x else _difference(a, b, x, y)
    _add_energy(found, x, difference)
    if math.isfinite(found.square + found.change):
        return found
    finite = x.isfinite() & y.isfinite()
    found.nan_a, found.nan_b = int(x.isnan().count_nonzero()), int(y.isnan().count_nonzero())
    found.infinite_a, found.infinite_b = int(x.isinf().count_nonzero()), int(y.isinf().count_nonzero())
    found.excluded = len(a) - int(finite.count_nonzero())
    _add_energy(found, x[finite], None if difference is None else difference[finite])
    return found


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.complex128 if x.is_complex() else torch.float64)


def _difference(a: Tensor, b: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """``b - a``; ``x`` and ``y`` are their values in float64."""
    wide = y - x
    if a.dtype != b.dtype or a.dtype not in (torch.int64, torch.uint64):
        return wide
    # Modulo 2^64, and so exact if the difference is small enough.
    exact = (b.view(torch.int64) - a.view(torch.int64)).double()
    return torch.where(wide.abs() < _EXACT, exact, wide)


def _add_energy(found: Change, x: Tensor, difference: Tensor | None) -> None:
    """Set the sums and the maximum."""
    found.square = _square_sum(x)
    found.change = found.max_change = 0.0
    if difference is not None and len(difference):
        found.change = _square_sum(difference)
        found.max_change = float(difference.abs().max())


def _square_sum(x: Tensor) -> float:
    flat = torch.view_as_real(x).view(-1) if x.is_complex() else x
    return float(flat.dot(flat))
