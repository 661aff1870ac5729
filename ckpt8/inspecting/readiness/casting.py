"""Rounds one tensor to every number format, as it is and scaled, and counts the losses.

*Unit scaling* (Blake, Orr and Luschi 2023, arXiv 2303.11257) keeps tensors at a scale of 1, which suits formats best:

    unit = 2^round(-log2 RMS)         a power of two, so that multiplying by it rounds nothing

Float formats round x itself and unit * x, whose RMS is within a factor of sqrt 2 of 1. int8 rounds x to integers, and
x * 127 / max|x|, as programs use it. NaN and Inf are counted and left out. Fractions are of the finite elements that
are not zero, since only these can over- or underflow.

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
"""Elements that are rounded at once: their temporaries fit the L2 cache."""

RAW, SCALED = "raw", "scaled"

_LARGEST_EXPONENT = 1022
"""2^this and its reciprocal are normal in float64."""

_FLOAT32_SCALES = (1.0, 2.0**126)
"""Scales at which a float32 times a power of two stays a float32: no element of the tensor leaves the range."""


@dataclass(slots=True)
class Extent:
    """The result of the first pass. ``square`` * 4^``exponent`` is the sum of squares.

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
        """Add a flat tile of float32 or float64."""
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
        common = max(exponent, self.exponent) if self.square else exponent
        mine, added = math.ldexp(self.square, 2 * (self.exponent - common)), float(wide.dot(wide))
        self.square, self.exponent = mine + math.ldexp(added, 2 * (exponent - common)), common

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
        """The power of two that brings the RMS near 1; 1 if all is zero."""
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
    """Numbers of elements that overflow, underflow or become subnormal; noise in units of the RMS squared."""

    overflow: int = 0
    underflow: int = 0
    subnormal: int = 0
    noise: float = 0.0

    def to_json(self, extent: Extent) -> dict[str, Any]:
        """Fractions, and the SNR in dB, None without any error."""
        return {
            **{key: getattr(self, key) / max(extent.nonzero, 1) for key in ("overflow", "underflow", "subnormal")},
            "snr_db": decibels(self.nmse(extent)),
        }

    def nmse(self, extent: Extent) -> float:
        """Noise divided by signal; 0 if all is zero."""
        if not extent.square:
            return 0.0
        signal = math.ldexp(extent.square, 2 * (math.frexp(extent.unit)[1] - 1 + extent.exponent))
        return self.noise / signal


def decibels(nmse: float) -> float | None:
    """The SNR that belongs to noise divided by signal; None without noise."""
    return 0.0 - 10 * math.log10(nmse) if nmse > 0 else None


@dataclass(slots=True)
class Casts:
    """The effect of every format on one tensor: by format, then RAW or SCALED."""

    extent: Extent
    figures: dict[str, dict[str, Cast]] = field(
        default_factory=lambda: {each.id: {RAW: Cast(), SCALED: Cast()} for each in FORMATS}
    )

    def to_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By format, then RAW or SCALED, the values of ``Cast.to_json``."""
        return {
            name: {kind: cast.to_json(self.extent) for kind, cast in kinds.items()}
            for name, kinds in self.figures.items()
        }

    def add(self, x: torch.Tensor) -> None:
        """Round a flat tile of float32 or float64 and add the losses."""
        finite = finite_of(x)
        if not len(finite):
            return
        unit, largest = self.extent.unit, self.extent.largest
        scaled = scaled_by(finite, unit)
        for each in FORMATS:
            self._round(each, RAW, finite, 1.0, unit)
            if each.scaling == "unit":
                self._round(each, SCALED, scaled, unit, 1.0)
            elif largest:
                factor = each.largest / (largest * unit)
                self._round(each, SCALED, finite.double() * unit * factor, unit * factor, 1 / factor)

    def _round(self, form: NumberFormat, kind: str, exact: torch.Tensor, scale: float, unit: float) -> None:
        """Round ``exact``: finite elements times ``scale``. Times ``unit`` they have an RMS of 1."""
        cast, rounded = self.figures[form.id][kind], form.round(exact)
        if self.extent.largest * scale > form.largest:
            cast.overflow += int(form.overflows(exact.abs()).count_nonzero())
        if self.extent.smallest * scale < form.smallest_normal:
            nonzero = int(rounded.count_nonzero())
            cast.underflow += int(exact.count_nonzero()) - nonzero
            normal = int((rounded.abs() >= form.smallest_normal).count_nonzero())
            cast.subnormal += nonzero - normal
        error = (rounded - exact).double() * unit
        cast.noise += float(error.dot(error))


def scaled_by(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` times a power of two, exactly: as float64 if float32 could lose bits."""
    low, high = _FLOAT32_SCALES
    return x * scale if x.dtype is torch.float32 and low <= scale <= high else x.double() * scale


def tiles(blocks: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat blocks cut into tiles."""
    for block in blocks:
        for start in range(0, len(block), TILE):
            yield block[start : start + TILE]
