"""What rounding to every number format would do to one tensor, as it is and scaled.

*Unit scaling* (Blake, Orr and Luschi 2023, arXiv 2303.11257) keeps tensors at a scale of 1, where formats are best:

    unit = 2^round(-log2 RMS)         a power of two, so that multiplying by it rounds nothing

Float formats round x itself and unit * x, whose RMS is within a factor of sqrt 2 of 1. int8 rounds x to integers, and
x * 127 / max|x|, which is how it is used. NaN and Inf are counted and left out. Fractions are of the finite elements
that are not zero, since only these can over- or underflow.

A first pass finds RMS and range, a second one rounds. Sums are in float64 and in units of the RMS, so that they neither
over- nor underflow themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt8.inspecting.readiness.number_formats import FORMATS, NumberFormat

TILE = 1 << 16
"""Elements handled at once, so that temporaries stay in the L2 cache."""

RAW, SCALED = "raw", "scaled"

_LARGEST_EXPONENT = 1022
"""2^this and its reciprocal are normal in float64."""

_FLOAT32_SCALES = (1.0, 2.0**126)
"""Scales at which a float32 times a power of two is a float32: none in a tensor with that RMS leaves its range."""


@dataclass(slots=True)
class Extent:
    """What the first pass finds. ``square`` * 4^``exponent`` is the sum of squares.

    ``count`` elements are finite, and ``zeros`` of these are zero. ``largest`` and ``smallest`` are magnitudes; the
    smallest is not zero.
    """

    count: int = 0
    nonfinite: int = 0
    zeros: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    square: float = 0.0
    exponent: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Take in a flat tile of float32 or float64."""
        finite = finite_of(x)
        self.nonfinite += len(x) - len(finite)
        if not len(finite):
            return
        magnitudes = finite.abs()
        largest = float(magnitudes.amax())
        self.count += len(finite)
        self.largest = max(self.largest, largest)
        nonzero = int(magnitudes.count_nonzero())
        self.zeros += len(finite) - nonzero
        if not nonzero:
            return
        smallest = float(magnitudes.amin())
        if not smallest:
            smallest = float(magnitudes.masked_fill_(magnitudes == 0, math.inf).amin())
        self.smallest = min(self.smallest, smallest)
        exponent = _bounded(math.frexp(largest)[1])
        wide = finite.double() * 2.0**-exponent
        self._add_square(float(wide.dot(wide)), exponent)

    def _add_square(self, square: float, exponent: int) -> None:
        common = max(exponent, self.exponent) if self.square else exponent
        self.square = math.ldexp(self.square, 2 * (self.exponent - common)) + math.ldexp(
            square, 2 * (exponent - common)
        )
        self.exponent = common

    @property
    def nonzero(self) -> int:
        """Finite elements that are not zero."""
        return self.count - self.zeros

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements; 0 without any."""
        return math.ldexp(math.sqrt(self.square / self.count), self.exponent) if self.count else 0.0

    @property
    def unit(self) -> float:
        """The power of two that brings the RMS near 1; 1 where all is zero."""
        if not self.square:
            return 1.0
        log2 = 0.5 * math.log2(self.square / self.count) + self.exponent
        return 2.0 ** _bounded(round(-log2))


def _bounded(exponent: int) -> int:
    return max(-_LARGEST_EXPONENT, min(exponent, _LARGEST_EXPONENT))


def finite_of(x: torch.Tensor) -> torch.Tensor:
    """The elements that are neither NaN nor infinite."""
    return x if math.isfinite(float(x.sum(dtype=x.dtype).abs())) or bool(x.isfinite().all()) else x[x.isfinite()]


@dataclass(slots=True)
class Cast:
    """Elements that overflow, underflow or become subnormal, and noise in units of the RMS squared."""

    overflow: int = 0
    underflow: int = 0
    subnormal: int = 0
    noise: float = 0.0

    def to_json(self, extent: Extent) -> dict[str, Any]:
        """Fractions, and the SNR in dB, None where no error is made."""
        return {
            **{key: getattr(self, key) / max(extent.nonzero, 1) for key in ("overflow", "underflow", "subnormal")},
            "snr_db": decibels(self.nmse(extent)),
        }

    def nmse(self, extent: Extent) -> float:
        """Noise divided by signal; 0 where all is zero."""
        if not extent.square:
            return 0.0
        signal = math.ldexp(extent.square, 2 * (math.frexp(extent.unit)[1] - 1 + extent.exponent))
        return self.noise / signal


def decibels(nmse: float) -> float | None:
    """The SNR that belongs to noise divided by signal; None without noise."""
    return 0.0 - 10 * math.log10(nmse) if nmse > 0 else None


@dataclass(slots=True)
class Casts:
    """What every format does to one tensor: by format, then RAW or SCALED."""

    extent: Extent
    figures: dict[str, dict[str, Cast]] = field(
        default_factory=lambda: {each.id: {RAW: Cast(), SCALED: Cast()} for each in FORMATS}
    )

    def to_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By format, then RAW or SCALED, what ``Cast.to_json`` gives."""
        return {
            name: {kind: cast.to_json(self.extent) for kind, cast in kinds.items()}
            for name, kinds in self.figures.items()
        }

    def add(self, x: torch.Tensor) -> None:
        """Take in a flat tile in the second pass."""
        finite = finite_of(x)
        zeros = len(finite) - int(finite.count_nonzero())
        unit = self.extent.unit
        raw, scaled = _Tile(finite, 1.0, zeros, self.extent, unit), None
        for each in FORMATS:
            raw.measure(each, self.figures[each.id][RAW])
        for each in FORMATS:
            if each.scaling == "unit":
                scaled = scaled or _Tile(scaled_by(finite, unit), unit, zeros, self.extent, 1.0)
                scaled.measure(each, self.figures[each.id][SCALED])
            elif self.extent.largest:
                factor = each.largest / (self.extent.largest * unit)
                exact = finite.double() * unit * factor
                _Tile(exact, unit * factor, zeros, self.extent, 1 / factor).measure(each, self.figures[each.id][SCALED])


def scaled_by(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` times a power of two, exactly: float64 where float32 could lose something."""
    low, high = _FLOAT32_SCALES
    return x * scale if x.dtype is torch.float32 and low <= scale <= high else x.double() * scale


class _Tile:
    """Elements to be rounded. They were multiplied by ``scale``; times ``unit`` they have an RMS of 1.

    ``zeros`` of them are zero.
    """

    def __init__(self, exact: torch.Tensor, scale: float, zeros: int, extent: Extent, unit: float) -> None:
        self._exact = exact
        self._magnitudes = exact.abs()
        self._zeros = zeros
        self._largest = extent.largest * scale
        self._smallest = extent.smallest * scale
        self._unit = unit

    def measure(self, number_format: NumberFormat, into: Cast) -> None:
        """Round the elements and add what that does to ``into``."""
        if not len(self._exact):
            return
        rounded = number_format.round(self._exact)
        if self._largest > number_format.largest:
            into.overflow += int(number_format.overflows(self._magnitudes).count_nonzero())
        if self._smallest < number_format.smallest_normal:
            zeros = len(rounded) - int(rounded.count_nonzero())
            small = int((rounded.abs() < number_format.smallest_normal).count_nonzero())
            into.underflow += zeros - self._zeros
            into.subnormal += small - zeros
        error = (rounded - self._exact).double() * self._unit
        into.noise += float(error.dot(error))


def tiles(blocks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat blocks cut into tiles."""
    for block in blocks:
        for start in range(0, len(block), TILE):
            yield block[start : start + TILE]
