"""Histograms of values and usage of codes: counts add up in any order, so that every machine finds the same ones.

A histogram has one bin for every factor of two of the magnitude, which is exact and needs no range in advance.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.codecs import Codec, config_of
from ckpt8.codecs.error_measures import root
from ckpt8.codecs.error_stats import ErrorStats
from ckpt8.compressing.parameters import Parameter
from ckpt8.container.facts import codec_kind
from ckpt8.core.tensors import DType, Parts, Role, TensorSpec

LOWEST = -149
"""The exponent of the first bin: the smallest subnormal of fp32. Smaller fp64 values count here, too."""

HIGHEST = 127
"""The exponent of the last bin. Larger fp64 values count here, too."""

MOST_CODES = 512
"""The codes that a chart of symbols shows."""

CHARTED = ("weight", "moment1", "moment2", "update")
"""What has histograms, in the order in which the report shows them."""

_NOT_DRAWN = ("came", "replayed")
"""Kinds of updates that do not follow from the moments of the same elements alone."""

_SIDES = ("before", "after")
_COUNTED = (Role.WEIGHT, Role.MOMENT1, Role.MOMENT2)


@dataclass(slots=True)
class Histogram(ErrorStats):
    """Magnitudes by octave: ``counts[e]`` values lie in [2^e, 2^(e+1)); ``negative`` of all values are below zero."""

    zero: int = 0
    not_finite: int = 0
    negative: int = 0
    counts: Counter[int] = field(default_factory=Counter)

    @classmethod
    def of(cls, x: torch.Tensor) -> Histogram:
        """Count a flat tensor of floats."""
        wide = x if x.dtype is torch.float64 else x.float()
        finite = wide[wide.isfinite()]
        values = finite[finite != 0]
        bins = torch.frexp(values).exponent.sub_(1).clamp_(LOWEST, HIGHEST).sub_(LOWEST)
        counts = Counter({LOWEST + k: count for k, count in enumerate(torch.bincount(bins).tolist()) if count})
        return cls(len(finite) - len(values), len(wide) - len(finite), int((values < 0).sum()), counts)

    @property
    def total(self) -> int:
        """How many values were counted, with zeros, NaN and Inf."""
        return self.counts.total() + self.zero + self.not_finite

    def to_json(self) -> dict[str, Any]:
        """Plain values; ``counts`` begins with the octave ``first`` and ends with the last one in use."""
        octaves = range(min(self.counts), max(self.counts) + 1) if self.counts else range(0)
        return {
            "total": self.total,
            "zero": self.zero,
            "negative": self.negative,
            "not_finite": self.not_finite,
            "first": octaves.start if octaves else None,
            "counts": [self.counts[octave] for octave in octaves],
        }


@dataclass(slots=True)
class Codes:
    """How often each code is used. ``levels`` is the range that the codec has, None for one without limits.

    ``reserved`` counts exact zeros that have a code of their own, which has no number.
    """

    levels: range | None
    counts: Counter[int] = field(default_factory=Counter)
    reserved: int = 0

    @classmethod
    def of(cls, codes: torch.Tensor, levels: range) -> Codes:
        """Count a flat tensor of codes, all of them in ``levels``."""
        places = (codes.to(torch.int32) - levels.start).clamp_(0, len(levels) - 1)
        return cls(levels, _counter(torch.bincount(places, minlength=len(levels)), levels.start))

    @classmethod
    def of_symbols(cls, symbols: torch.Tensor) -> Codes:
        """Count a flat tensor of symbols: zigzag codes of no fixed range, and -1 for a reserved value."""
        given = symbols[symbols >= 0]
        values, counts = torch.unique(given, return_counts=True)
        found = zip(values.tolist(), counts.tolist(), strict=True)
        return cls(None, Counter({(k >> 1) ^ -(k & 1): n for k, n in found}), symbols.numel() - given.numel())

    def merge(self, other: Codes) -> None:
        """Add codes of the same codec."""
        self.counts.update(other.counts)
        self.reserved += other.reserved

    @property
    def entropy(self) -> float:
        """Bits of information in a code, if codes are independent of each other."""
        counts = [*self.counts.values(), self.reserved]
        total = sum(counts)
        return max(0.0, -math.fsum(n / total * math.log2(n / total) for n in counts if n)) if total else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``counts`` of the codes from ``first`` on.

        Without a range they are those in use, at most MOST_CODES about zero, and ``outside`` counts all others.
        """
        total, levels = self.counts.total(), self.levels
        if levels is None:
            used = [code for code in self.counts if -MOST_CODES // 2 <= code < MOST_CODES // 2]
            levels = range(min(used, default=0), max(used, default=0) + 1)
        counts = [self.counts[code] for code in levels]
        return {
            "total": total + self.reserved,
            "levels": None if self.levels is None else len(levels),
            "used": len(self.counts),
            "entropy_bits": self.entropy,
            "first": levels.start,
            "counts": counts,
            "outside": total - sum(counts),
            "reserved": self.reserved,
        }


def _counter(counts: torch.Tensor, first: int) -> Counter[int]:
    return Counter({first + k: count for k, count in enumerate(counts.tolist()) if count})


@dataclass(slots=True)
class Drawn:
    """Counts of ``elements`` elements: histograms by name in CHARTED and side, codes by role, codec and part."""

    elements: int = 0
    histograms: dict[tuple[str, str], Histogram] = field(default_factory=dict)
    codes: dict[tuple[str, str, str], Codes] = field(default_factory=dict)

    def merge(self, other: Drawn) -> None:
        """Add the counts of ``other``, which stays as it is."""
        self.elements += other.elements
        for what, histogram in other.histograms.items():
            self.histograms.setdefault(what, Histogram()).merge(histogram)
        for key, codes in other.codes.items():
            self.codes.setdefault(key, Codes(codes.levels)).merge(codes)

    def add(self, what: str, before: torch.Tensor | None, after: torch.Tensor) -> None:
        """Count values of ``what``, a name in CHARTED: the original ones, if known, and the decoded ones."""
        sides = zip(_SIDES, (before, after), strict=True)
        self.merge(Drawn(0, {(what, side): Histogram.of(values) for side, values in sides if values is not None}))

    def pairs_json(self) -> dict[str, Any]:
        """By name {before, after} as plain values, in the order of CHARTED; ``before`` is None if unknown."""
        found = {key: histogram.to_json() for key, histogram in self.histograms.items()}
        return {
            what: {side: found.get((what, side)) for side in _SIDES} for what in CHARTED if (what, "after") in found
        }

    def codes_json(self) -> list[dict[str, Any]]:
        """The codes as plain values."""
        return [
            {"role": role, "codec": codec, "part": part, **codes.to_json()}
            for (role, codec, part), codes in sorted(self.codes.items())
        ]


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements of one storage: the original ones, if known, the decoded ones, and the parts that hold them."""

    index: int
    role: Role
    codec: Codec
    before: torch.Tensor | None
    after: torch.Tensor
    parts: Parts


def is_counted(spec: TensorSpec, codec: Codec) -> bool:
    """Whether the report counts a storage: floating weights and moments, without rounded copies."""
    return spec.role in _COUNTED and spec.dtype.is_plane_float and spec.numel > 0 and codec.copied is None


def draw(pieces: Sequence[Piece], parameter: Parameter | None) -> Drawn:
    """Count one unit: a weight, or the moments of ``parameter`` together with the update that they make."""
    drawn = Drawn(sum(piece.after.numel() for piece in pieces))
    for piece in pieces:
        drawn.add(piece.role.value, piece.before, piece.after)
        for part, codes in _codes(piece):
            drawn.merge(Drawn(codes={(piece.role.value, codec_kind(config_of(piece.codec)), part): codes}))
    # The update of an element follows from its own moments alone, but for CAME's factored statistics.
    if parameter is not None and parameter.rule is not None and parameter.rule.kind not in _NOT_DRAWN:
        originals = {piece.index: piece.before for piece in pieces if piece.before is not None}
        before = _update(parameter, parameter.rule, originals) if len(originals) == len(pieces) else None
        drawn.add("update", before, _update(parameter, parameter.rule, {piece.index: piece.after for piece in pieces}))
    return drawn


def _codes(piece: Piece) -> Iterator[tuple[str, Codes]]:
    """How often the codes of each part are used, by the name of the part."""
    if found := piece.codec.codes:
        yield found.part, Codes.of(piece.parts[found.part], range(found.lowest, found.highest + 1))
    for name, part in piece.parts.items():
        if part.dtype == DType.INT32.torch:
            yield name, Codes.of_symbols(part)


def _update(parameter: Parameter, rule: UpdateRule, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
    moment = values[parameter.moments["moment1"]].float()
    slot = parameter.denominator
    divisor = None if slot is None else root(values[parameter.moments[slot]].float())
    return rule.apply(moment, divisor, None) * rule.factor
