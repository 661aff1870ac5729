"""How values and codes are distributed: counts that add up in any order, so that every machine finds the same ones.

A histogram has one bin for every factor of two of the magnitude, which is exact and needs no range in advance.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

LOWEST = -149
"""The exponent of the first bin: the smallest subnormal of fp32. It also counts what is smaller, as fp64 may be."""

OCTAVES = 277
"""Bins up to the exponent 127. The last one also counts what is larger."""


@dataclass(slots=True)
class Histogram:
    """Magnitudes by octave: ``counts[k]`` values lie in [2^(k-149), 2^(k-148)). ``negative`` of them are below zero."""

    zero: int = 0
    not_finite: int = 0
    negative: int = 0
    counts: list[int] = field(default_factory=lambda: [0] * OCTAVES)

    @classmethod
    def of(cls, x: torch.Tensor) -> Histogram:
        """Count a flat tensor of floats."""
        wide = x if x.dtype is torch.float64 else x.float()
        finite = wide[wide.isfinite()]
        values = finite[finite != 0]
        octaves = torch.frexp(values).exponent.sub_(1 + LOWEST).clamp_(0, OCTAVES - 1)
        counts = torch.bincount(octaves, minlength=OCTAVES).tolist()
        return cls(len(finite) - len(values), len(wide) - len(finite), int((values < 0).sum()), counts)

    def merge(self, other: Histogram) -> None:
        """Add what was counted elsewhere."""
        self.zero += other.zero
        self.not_finite += other.not_finite
        self.negative += other.negative
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]

    @property
    def total(self) -> int:
        """How many values were counted, with zeros, NaN and Inf."""
        return sum(self.counts) + self.zero + self.not_finite

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``counts`` are those from the octave ``first`` on, without empty bins at the ends."""
        used = [k for k, count in enumerate(self.counts) if count]
        first, stop = (used[0], used[-1] + 1) if used else (0, 0)
        return {
            "total": self.total,
            "zero": self.zero,
            "negative": self.negative,
            "not_finite": self.not_finite,
            "first": first + LOWEST if used else None,
            "counts": self.counts[first:stop],
        }


@dataclass(slots=True)
class Pair:
    """Histograms of the same elements: in the original, if that is at hand, and as they come back."""

    before: Histogram | None
    after: Histogram

    @classmethod
    def of(cls, before: torch.Tensor | None, after: torch.Tensor) -> Pair:
        """Count both."""
        return cls(None if before is None else Histogram.of(before), Histogram.of(after))

    def merge(self, other: Pair) -> None:
        """Add other elements."""
        if self.before is not None and other.before is not None:
            self.before.merge(other.before)
        self.after.merge(other.after)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"before": None if self.before is None else self.before.to_json(), "after": self.after.to_json()}


@dataclass(slots=True)
class Codes:
    """How often each code from ``first`` on was used."""

    first: int
    counts: list[int]

    @classmethod
    def of(cls, codes: torch.Tensor, first: int, last: int) -> Codes:
        """Count a flat tensor of codes, all of them between ``first`` and ``last``."""
        length = last - first + 1
        places = (codes.to(torch.int32) - first).clamp_(0, length - 1)
        return cls(first, torch.bincount(places, minlength=length).tolist())

    def merge(self, other: Codes) -> None:
        """Add codes of the same range."""
        self.counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]

    @property
    def entropy(self) -> float:
        """Bits of information in a code, if codes are independent of each other."""
        total = sum(self.counts)
        return max(0.0, -math.fsum(n / total * math.log2(n / total) for n in self.counts if n)) if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "total": sum(self.counts),
            "levels": len(self.counts),
            "used": sum(count > 0 for count in self.counts),
            "entropy_bits": self.entropy,
            "first": self.first,
            "counts": self.counts,
        }


CodesKey = tuple[str, str, str]
"""Role, codec and part."""


@dataclass(slots=True)
class Drawn:
    """Histograms and codes of some tensors. ``pairs`` has the keys of CHARTED."""

    elements: int = 0
    pairs: dict[str, Pair] = field(default_factory=dict)
    codes: dict[CodesKey, Codes] = field(default_factory=dict)

    def merge(self, other: Drawn) -> None:
        """Add what was counted elsewhere; ``other`` stays as it is."""
        self.elements += other.elements
        for what, pair in other.pairs.items():
            self.add(what, pair)
        for key, codes in other.codes.items():
            self.codes.setdefault(key, Codes(codes.first, [0] * len(codes.counts))).merge(codes)

    def add(self, what: str, pair: Pair) -> None:
        """Add a pair of histograms of ``weight``, ``moment1``, ``moment2`` or ``update``."""
        empty = Pair(None if pair.before is None else Histogram(), Histogram())
        self.pairs.setdefault(what, empty).merge(pair)

    def pairs_json(self) -> dict[str, Any]:
        """The pairs as plain values, in one order."""
        return {what: self.pairs[what].to_json() for what in CHARTED if what in self.pairs}

    def codes_json(self) -> list[dict[str, Any]]:
        """The codes as plain values."""
        return [
            {"role": role, "codec": codec, "part": part, **codes.to_json()}
            for (role, codec, part), codes in sorted(self.codes.items())
        ]


CHARTED = ("weight", "moment1", "moment2", "update")
"""What there are histograms of, in the order in which they are shown."""
