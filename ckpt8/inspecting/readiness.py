"""``inspect --readiness``: how weights and moments survive fp16, bf16, fp8 and int8, as they are and scaled.

Values are rounded, errors counted and added up, and a verdict given; the maths of each is below. Of a ``.ckpt8`` the
decoded values are taken. With an original, the error is measured too of tensors of equal name and shape:

    SNR = 10 log10( sum x^2 / sum (y - x)^2 ) dB        x of the original, y of the checkpoint, if both are finite

y of 8-bit elements with scales is their product, see ``tensors``.

``pair_tensors`` finds each tensor of a checkpoint in a compressed, restored or converted copy. Tensors of equal names
are pairs. But a conversion moves tensors: files of a directory become one file, a nested state dict a flat one, and
moments by number become moments by name. So two other tensors are a pair if the label of one is the end, by whole
components, of the label of the other, and of no second label. Shapes must be equal, those of slices too.

The keys of ``readiness`` in the JSON of ``inspect``; an SNR is in dB, and None where no error is made:

    full, sample         whether every element was read; else elements and windows of the sample of a long tensor
    elements, looked_at  of all weights and moments; ``nonfinite`` of them were left out
    left_out             tensors that were not looked at, counted by reason
    thresholds           underflow and few, see below
    formats[]            format, label, scaling, ideal_snr_db, floor_snr_db, line
      roles{}            tensors, verdict, text; raw and scaled: overflow, underflow, subnormal (fractions), snr_db,
                         failing (number of tensors that the format does not suit), worst (name, label, snr_db)
    tensors[]            name, label, role, dtype, shape, elements, looked_at, nonfinite, nonzero (fraction), rms,
                         absmax, unit_scale
      formats{}          by format, raw and scaled: overflow, underflow, subnormal, snr_db; None for 8-bit elements
      measured           name (in the original), snr_db, max_error, differing (fraction); None where there is none
    against              path, unpaired (tensors), and by role tensors, snr_db, worst; only with an original

Rounds one tensor to every number format, as it is and scaled, and counts the losses.

*Unit scaling* (Blake, Orr and Luschi 2023, arXiv 2303.11257) keeps tensors at a scale of 1, which suits formats best:

    unit = 2^round(-log2 RMS)         a power of two, so that multiplying by it rounds nothing

Float formats round x itself and unit * x, whose RMS is within a factor of sqrt 2 of 1. int8 rounds x to integers, and
x * 127 / max|x|, as programs use it. NaN and Inf are counted and left out. Fractions are of the finite elements that
are not zero, since only these can over- or underflow.

A first pass finds RMS and range, a second one rounds. Sums are in float64 and in units of the RMS, so that they neither
over- nor underflow themselves.

The number formats of low-precision training: range, best signal-to-noise ratio, and rounding.

A format holds the integers times a power of two, the step, which floats choose by the magnitude of the number. Rounding
is to nearest, ties to even. The rounded value of x is x^, and over the elements of a tensor

    SNR = 10 log10( sum x^2 / sum (x^ - x)^2 )  in dB
    overflow    |x| so large that rounding, were the range of exponents unbounded, gives more than the largest number
    underflow   x is not zero, and x^ is
    subnormal   0 < |x^| < the smallest normal number: fewer bits than the format has elsewhere

An overflow is stored as the largest number, as casts that saturate do; a plain cast gives infinity or NaN there.

The *ideal* SNR is that of a normal distribution. A step D makes the noise D^2 / 12, and a float of m stored bits of
mantissa has D = 2^(e - m) for 2^e <= |x| < 2^(e+1). So at a standard deviation of 1, with an unbounded exponent,

    SNR = -10 log10( sum over e of P(2^e <= |x| < 2^(e+1)) 4^(e - m) / 12 ) = 13.4 + 6.02 m  dB

int8 is scaled so that the largest magnitude is 127, and its ideal is that of a largest magnitude of 4.5 standard
deviations: D = 4.5 / 127. The *floor* lies 7.4 dB lower. Any normal numbers of a float format reach it, for the error
is at most half a step, |x| 2^-(m+1) at most: SNR >= 6.02 (m + 1) dB. An SNR below it is the fault of the range, not
bad luck. For int8 the same 7.4 dB are a largest magnitude of 10.6 standard deviations.

Turns the figures of all tensors into a verdict for each number format and role, and a line for each format.

A format suits a tensor, raw or scaled, if

    overflow    is zero
    SNR         is no lower than the floor of the format: rounding alone cannot do worse
    underflow   is at most 5 % of the nonzero elements of a weight or a first moment: an int8 whose SNR is at its floor
                loses 3.3 % of a normal distribution, so more means that small elements have no place in the format;
                is zero for a second moment, since an update divides by its root

A role is *ready* if the format suits all its tensors raw, *ready with scaling* if it suits all scaled, *ready but for a
few* if the tensors that it does not suit scaled have at most 1 % of the elements: a few biases and norms, which cost
next to nothing in 16 bits. Else it is *not ready*. Over several tensors, noise counts in units of the RMS of each, and
every element the same:

    SNR = 10 log10( sum n / sum n NMSE )        n the elements of a tensor, NMSE = sum (x^ - x)^2 / sum x^2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt8.core.errors import CheckFailedError
from ckpt8.core.grouping import grouped
from ckpt8.core.tensors import DType, Role
from ckpt8.core.text import percent
from ckpt8.core.workers import Workers
from ckpt8.inspecting.facts import ROLE_WORDS
from ckpt8.inspecting.tensors import (
    PER_TENSOR,
    WINDOWS,
    SourceTensor,
    TensorSource,
    open_tensors,
    tiles,
)

CREST = 4.5
"""Largest magnitude by standard deviation that the ideal of int8 assumes: that of 150,000 normal values."""

_BIT_DB = 20 * math.log10(2)

_EXPONENTS = range(-60, 8)
"""Exponents of normally distributed values: others change no sum in float64."""


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A format. ``mantissa`` counts its stored bits, None for integers; ``step`` separates the largest numbers."""

    id: str
    label: str
    dtype: DType
    mantissa: int | None
    largest: float
    step: float
    smallest_normal: float

    @property
    def scaling(self) -> str:
        """How to scale a tensor for it: ``unit`` brings the RMS near 1, ``absmax`` the largest magnitude to 127."""
        return "unit" if self.mantissa is not None else "absmax"

    @property
    def ideal_snr(self) -> float:
        """SNR of a normal distribution, in dB."""
        if self.mantissa is None:
            return 10 * math.log10(12 * (self.largest / CREST) ** 2)
        return _normal_snr() + _BIT_DB * self.mantissa

    @property
    def floor_snr(self) -> float:
        """The least SNR, in dB, at which the format suits a tensor."""
        return self.ideal_snr - (_normal_snr() - _BIT_DB)

    def overflows(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Which magnitudes overflow."""
        tie = self.largest + self.step / 2
        return magnitudes >= tie if self.largest / self.step % 2 == 1 else magnitudes > tie

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The numbers that finite ``x``, float32 or float64, become: float32, saturated if they overflow.

        torch rounds to float8. Its versions cast an overflow differently, so that none reaches the cast.
        """
        if self.mantissa is None:
            return x.round().clamp_(-self.largest, self.largest).float()
        narrow = x if x.dtype is torch.float32 else round_to_odd(x)
        return narrow.clamp(-self.largest, self.largest).to(self.dtype.torch).float()


FORMATS: tuple[NumberFormat, ...] = (
    NumberFormat("fp16", "fp16", DType.FLOAT16, 10, 65504.0, 32.0, 2.0**-14),
    NumberFormat("bf16", "bf16", DType.BFLOAT16, 7, 255 * 2.0**120, 2.0**120, 2.0**-126),
    NumberFormat("float8_e4m3fn", "fp8 e4m3fn", DType.FLOAT8_E4M3FN, 3, 448.0, 32.0, 2.0**-6),
    NumberFormat("float8_e5m2", "fp8 e5m2", DType.FLOAT8_E5M2, 2, 57344.0, 8192.0, 2.0**-14),
    NumberFormat("int8", "int8", DType.INT8, None, 127.0, 1.0, 1.0),
)
"""Every format, in the order of the report. int8 is symmetric: it has no -128."""


def _normal_snr() -> float:
    """SNR in dB of a standard normal distribution in a float format without stored mantissa bits."""
    noise = sum((math.erf(2.0 ** (e + 0.5)) - math.erf(2.0 ** (e - 0.5))) * 4.0**e / 12 for e in _EXPONENTS)
    return -10 * math.log10(noise)


def round_to_odd(x: torch.Tensor) -> torch.Tensor:
    """``x``, float64, as float32 that any shorter format rounds as it would round ``x`` itself.

    Bits that float32 does not hold are cut off, and its last bit is set: so no value moves onto a tie, or off one.
    """
    nearest = x.float()
    bits = nearest.view(torch.int32)
    wide = nearest.double()
    bits = bits - (wide.abs() > x.abs()).int()
    return torch.where(wide == x, bits, bits | 1).view(torch.float32)


RAW, SCALED = "raw", "scaled"

_LARGEST_EXPONENT = 1022
"""2^this and its reciprocal are normal in float64."""

_LARGEST_SCALE = 2.0**126
"""From 1 to this scale a float32 times a power of two stays a float32: no element of the tensor leaves the range."""


@dataclass(slots=True)
class Extent:
    """The result of the first pass. ``square`` * 4^``exponent`` is the sum of squares.

    ``count`` elements are finite, and ``nonzero`` of these are not zero. ``largest`` and ``smallest`` are magnitudes;
    the smallest is not zero.
    """

    count: int = 0
    nonfinite: int = 0
    nonzero: int = 0
    largest: float = 0.0
    smallest: float = math.inf
    square: float = 0.0
    exponent: int = 0

    def add(self, x: torch.Tensor) -> None:
        """Add a flat tile of float32 or float64."""
        finite = finite_of(x)
        self.nonfinite += len(x) - len(finite)
        magnitudes = finite.abs()
        nonzero = int(magnitudes.count_nonzero())
        self.count += len(finite)
        self.nonzero += nonzero
        if not nonzero:
            return
        largest, smallest = float(magnitudes.amax()), float(magnitudes.amin())
        if not smallest:
            smallest = float(magnitudes.masked_fill_(magnitudes == 0, math.inf).amin())
        self.largest, self.smallest = max(self.largest, largest), min(self.smallest, smallest)
        exponent = _bounded(math.frexp(largest)[1])
        wide = finite.double() * 2.0**-exponent
        common = max(exponent, self.exponent) if self.square else exponent
        mine, added = math.ldexp(self.square, 2 * (self.exponent - common)), float(wide.dot(wide))
        self.square, self.exponent = mine + math.ldexp(added, 2 * (exponent - common)), common

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite elements; 0 without any."""
        return math.ldexp(math.sqrt(self.square / self.count), self.exponent) if self.count else 0.0

    @property
    def unit(self) -> float:
        """The power of two that brings the RMS near 1; 1 if all is zero."""
        if not self.square:
            return 1.0
        return 2.0 ** _bounded(round(-(0.5 * math.log2(self.square / self.count) + self.exponent)))


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


def decibels(nmse: float) -> float | None:
    """The SNR that belongs to noise divided by signal; None without noise."""
    return 0.0 - 10 * math.log10(nmse) if nmse > 0 else None


@dataclass(slots=True)
class Casts:
    """The effect of every format on one tensor: by format, then RAW or SCALED."""

    extent: Extent
    figures: dict[str, dict[str, Cast]] = field(
        default_factory=lambda: {number_format.id: {RAW: Cast(), SCALED: Cast()} for number_format in FORMATS}
    )

    def to_json(self) -> dict[str, dict[str, dict[str, Any]]]:
        """By format, then RAW or SCALED, fractions, and the SNR in dB, None without any error."""
        extent = self.extent
        signal = math.ldexp(extent.square, 2 * (math.frexp(extent.unit)[1] - 1 + extent.exponent))
        return {
            name: {
                kind: {
                    **{key: getattr(cast, key) / max(extent.nonzero, 1) for key in _FRACTIONS},
                    "snr_db": decibels(cast.noise / signal if signal else 0.0),
                }
                for kind, cast in kinds.items()
            }
            for name, kinds in self.figures.items()
        }

    def add(self, x: torch.Tensor) -> None:
        """Round a flat tile of float32 or float64 and add the losses."""
        finite = finite_of(x)
        unit, largest = self.extent.unit, self.extent.largest
        scaled = scaled_by(finite, unit)
        for number_format in FORMATS if len(finite) else ():
            self._round(number_format, RAW, finite, 1.0, unit)
            if number_format.scaling == "unit":
                self._round(number_format, SCALED, scaled, unit, 1.0)
            elif largest:
                factor = number_format.largest / (largest * unit)
                self._round(number_format, SCALED, finite.double() * unit * factor, unit * factor, 1 / factor)

    def _round(self, form: NumberFormat, kind: str, exact: torch.Tensor, scale: float, unit: float) -> None:
        """Round ``exact``: finite elements times ``scale``. Times ``unit`` they have an RMS of 1."""
        cast, rounded = self.figures[form.id][kind], form.round(exact)
        if self.extent.largest * scale > form.largest:
            cast.overflow += int(form.overflows(exact.abs()).count_nonzero())
        if self.extent.smallest * scale < form.smallest_normal:
            nonzero = int(rounded.count_nonzero())
            cast.underflow += int(exact.count_nonzero()) - nonzero
            cast.subnormal += nonzero - int((rounded.abs() >= form.smallest_normal).count_nonzero())
        error = (rounded - exact).double() * unit
        cast.noise += float(error.dot(error))


def scaled_by(x: torch.Tensor, scale: float) -> torch.Tensor:
    """``x`` times a power of two, exactly: as float64 if float32 could lose bits."""
    return x * scale if x.dtype is torch.float32 and 1.0 <= scale <= _LARGEST_SCALE else x.double() * scale


MOST_UNDERFLOW = 0.05
"""The share of the nonzero elements that may become zero."""

FEW = 0.01
"""The share of the elements of a role that may stay in a longer format."""

READY, READY_SCALED, READY_MOSTLY, NOT_READY = "ready", "ready with scaling", "ready but for a few", "not ready"
_FRACTIONS = ("overflow", "underflow", "subnormal")

_REASONS = ("underflow", "snr_db", "overflow")
"""Figures that make a format unsuitable for a tensor, the worst last."""

_BECOME = {"overflow": "overflow", "underflow": "become zero"}


def format_report(number_format: NumberFormat, tensors: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The bounds of a format, the losses and the verdict by role, and all verdicts in one line."""
    by_role = grouped((tensor["role"], tensor) for tensor in tensors if tensor["formats"] is not None)
    roles = {role: _role_report(number_format, by_role[role]) for role in ROLE_WORDS if role in by_role}
    parts = [f"{ROLE_WORDS[role]} {report['text']}" for role, report in roles.items()]
    return {
        "format": number_format.id,
        "label": number_format.label,
        "scaling": number_format.scaling,
        "ideal_snr_db": number_format.ideal_snr,
        "floor_snr_db": number_format.floor_snr,
        "roles": roles,
        "line": f"{number_format.label}: {'; '.join(parts) or 'nothing to round'}",
    }


def _role_report(number_format: NumberFormat, tensors: Sequence[dict[str, Any]]) -> dict[str, Any]:
    failing = {kind: [tensor for tensor in tensors if fails(number_format, tensor, kind)] for kind in (RAW, SCALED)}
    report = {
        "tensors": len(tensors),
        "verdict": _verdict(tensors, failing),
        **{kind: _total(number_format, tensors, kind) | {"failing": len(failing[kind])} for kind in (RAW, SCALED)},
    }
    return report | {"text": _text(number_format, report, failing[SCALED])}


def _verdict(tensors: Sequence[dict[str, Any]], failing: dict[str, list[dict[str, Any]]]) -> str:
    if not failing[RAW]:
        return READY
    left, total = (sum(tensor["elements"] for tensor in some) for some in (failing[SCALED], tensors))
    if left > FEW * total:
        return NOT_READY
    return READY_MOSTLY if left else READY_SCALED


def fails(number_format: NumberFormat, tensor: dict[str, Any], kind: str) -> str | None:
    """The figure of a tensor that is out of bounds, ``overflow``, ``snr_db`` or ``underflow``; None if all hold."""
    figures = tensor["formats"][number_format.id][kind]
    if figures["overflow"]:
        return "overflow"
    if figures["snr_db"] is not None and figures["snr_db"] < number_format.floor_snr:
        return "snr_db"
    bound = 0.0 if tensor["role"] == Role.MOMENT2.value else MOST_UNDERFLOW
    return "underflow" if figures["underflow"] > bound else None


def _total(number_format: NumberFormat, tensors: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    """Figures over several tensors; ``worst`` is the one of the lowest SNR, None if none has noise."""
    figures = [(tensor, tensor["formats"][number_format.id][kind]) for tensor in tensors]
    # Nonzero elements, estimated from the sample.
    counts = [tensor["elements"] * tensor["nonzero"] for tensor in tensors]
    nonzero = sum(counts)
    fractions = {
        key: sum(n * figure[key] for n, (_, figure) in zip(counts, figures, strict=True)) / nonzero if nonzero else 0.0
        for key in _FRACTIONS
    }
    return {**fractions, **_snr((tensor, figure["snr_db"]) for tensor, figure in figures)}


def _snr(snrs: Iterable[tuple[dict[str, Any], float | None]]) -> dict[str, Any]:
    elements, noise, worst = 0, 0.0, None
    for tensor, snr in snrs:
        elements += tensor["elements"]
        if snr is not None:
            noise += tensor["elements"] * 10 ** (-snr / 10)
            if worst is None or snr < worst["snr_db"]:
                worst = {"name": tensor["name"], "label": tensor["label"], "snr_db": snr}
    return {"snr_db": decibels(noise / elements) if elements else None, "worst": worst}


def _text(number_format: NumberFormat, report: dict[str, Any], failing: Sequence[dict[str, Any]]) -> str:
    if report["verdict"] == READY:
        return f"ready ({snr_text(report[RAW])})"
    how = f"ready with {number_format.scaling} scaling"
    if not failing:
        return f"{how} ({snr_text(report[SCALED])})"
    few = f"{len(failing)} of {report['tensors']} tensors ({_worst_failing(number_format, failing)})"
    return f"not ready, {few}" if report["verdict"] == NOT_READY else f"{how} but for {few}"


def snr_text(total: dict[str, Any]) -> str:
    """The SNR of several tensors and the worst of them in words."""
    if total["worst"] is None:
        return "exact"
    worst = total["worst"]
    return f"SNR {snr(total['snr_db'])} dB, worst {worst['label']} {snr(worst['snr_db'])} dB"


def snr(value: float | None) -> str:
    """An SNR with one decimal, or ``exact`` for None."""
    return "exact" if value is None else f"{round(value, 1) + 0.0:.1f}"


def _worst_failing(number_format: NumberFormat, failing: Sequence[dict[str, Any]]) -> str:
    """One tensor in words: first comes overflow, then the lowest SNR below the floor, then underflow."""

    def badness(tensor: dict[str, Any]) -> tuple[int, float, str]:
        reason = fails(number_format, tensor, SCALED) or _REASONS[0]
        figure = float(tensor["formats"][number_format.id][SCALED][reason])
        return _REASONS.index(reason), -figure if reason == "snr_db" else figure, tensor["label"]

    rank, figure, label = max((badness(tensor) for tensor in failing), key=lambda badness_of: badness_of[:2])
    if _REASONS[rank] == "snr_db":
        return f"worst {label} {snr(-figure)} dB"
    return f"{percent(figure)} of {label} {_BECOME[_REASONS[rank]]}"


def inspect_readiness(path: Path, *, full: bool = False, original: Path | None = None) -> dict[str, Any]:
    """Figures of every weight and moment, and a verdict for each format. All values are plain JSON.

    Tensors of more than PER_TENSOR elements are sampled, unless ``full``. Raises InputError for damage,
    CheckFailedError if the ``original`` has none of the tensors.
    """
    with open_tensors(path) as source, Workers() as workers:
        measured = {} if original is None else _measure_all(source, original, workers, full=full)
        tensors = [
            {**facts, "measured": measured.get(tensor)}
            for tensor, facts in zip(
                source.tensors, workers.map(lambda t: _tensor_facts(source, t, full=full), source.tensors), strict=True
            )
        ]
        source.bundle.check_unchanged()
        report = {
            "full": full,
            "sample": None if full else {"elements": PER_TENSOR, "windows": WINDOWS},
            "elements": sum(tensor["elements"] for tensor in tensors),
            "looked_at": sum(tensor["looked_at"] for tensor in tensors),
            "nonfinite": sum(tensor["nonfinite"] for tensor in tensors),
            "left_out": dict(source.left_out),
            "thresholds": {"underflow": MOST_UNDERFLOW, "few": FEW},
            "formats": [format_report(number_format, tensors) for number_format in FORMATS],
            "tensors": tensors,
        }
        if original is not None:
            paired = [(tensor, tensor["measured"]["snr_db"]) for tensor in tensors if tensor["measured"] is not None]
            by_role = grouped((tensor["role"], (tensor, snr_db)) for tensor, snr_db in paired)
            report["against"] = {
                "path": str(original),
                "unpaired": len(tensors) - len(paired),
                "roles": {role: {"tensors": len(snrs), **_snr(snrs)} for role, snrs in by_role.items()},
            }
        return report


def _tensor_facts(source: TensorSource, tensor: SourceTensor, *, full: bool) -> dict[str, Any]:
    extent = Extent()
    elements = tensor.in_memory_order
    for (tile,) in tiles(zip(source.blocks(elements, full=full))):
        extent.add(tile)
    casts = None
    if tensor.scale is None:
        casts = Casts(extent)
        for (tile,) in tiles(zip(source.blocks(elements, full=full))):
            casts.add(tile)
    count = extent.count + extent.nonfinite
    return {
        "name": tensor.name,
        "label": tensor.label,
        "role": tensor.role.value,
        "dtype": tensor.dtype.label,
        "shape": None if tensor.shape is None else list(tensor.shape),
        "elements": tensor.numel,
        "looked_at": count,
        "nonfinite": extent.nonfinite,
        "nonzero": extent.nonzero / count,
        "rms": extent.rms,
        "absmax": extent.largest,
        "unit_scale": extent.unit,
        "formats": casts and casts.to_json(),
    }


def _measure_all(
    source: TensorSource, original: Path, workers: Workers, *, full: bool
) -> dict[SourceTensor, dict[str, Any]]:
    """The measured error of every tensor that the original has too."""
    with open_tensors(original) as other:
        pairs = pair_tensors(source.tensors, other.tensors)
        if source.tensors and not pairs:
            raise CheckFailedError(
                f"{original}: has no weight or moment with the name and shape of one in the other; "
                "give the checkpoint that it was made from"
            )
        errors = workers.map(lambda pair: _measure(source, pair[0], other, pair[1], full=full), pairs)
        measured = {mine: error for (mine, _), error in zip(pairs, errors, strict=True)}
        other.bundle.check_unchanged()
    return measured


def _measure(
    source: TensorSource, mine: SourceTensor, other: TensorSource, theirs: SourceTensor, *, full: bool
) -> dict[str, Any]:
    signal, error, differing = Extent(), Extent(), 0
    one, two = mine, theirs
    same_strides = [ref.stride for ref in mine.pieces] == [ref.stride for ref in theirs.pieces]
    if same_strides and mine.scale is theirs.scale is None:
        one, two = mine.in_memory_order, theirs.in_memory_order
    for y, x in tiles(zip(source.blocks(one, full=full), other.blocks(two, full=full), strict=True)):
        finite = y.isfinite() & x.isfinite()
        y_finite, x_finite = (y, x) if bool(finite.all()) else (y[finite], x[finite])
        differing += int((y_finite != x_finite).count_nonzero())
        signal.add(x_finite)
        error.add(y_finite.double() - x_finite.double())
    nmse = math.ldexp(error.square / signal.square, 2 * (error.exponent - signal.exponent)) if signal.square else None
    return {
        "name": theirs.name,
        "differing": differing / max(signal.count, 1),
        "max_error": error.largest,
        "snr_db": None if nmse is None else decibels(nmse),
    }


def pair_tensors(
    mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]
) -> list[tuple[SourceTensor, SourceTensor]]:
    """The pairs, in the order of ``mine``."""
    by_name = {(tensor.name, tensor.role): tensor for tensor in theirs}
    equal = {tensor.name: by_name[tensor.name, tensor.role] for tensor in mine if (tensor.name, tensor.role) in by_name}
    taken = {tensor.name for tensor in equal.values()}
    loose = _match_by_end(
        [tensor for tensor in mine if tensor.name not in equal],
        [tensor for tensor in theirs if tensor.name not in taken],
    )
    pairs = ((tensor, equal.get(tensor.name) or loose.get(tensor.name)) for tensor in mine)
    # Tensors whose slices have the same shapes have their elements in the same order.
    return [
        (one, other)
        for one, other in pairs
        if other is not None and [ref.shape for ref in one.pieces] == [ref.shape for ref in other.pieces]
    ]


def _match_by_end(mine: Sequence[SourceTensor], theirs: Sequence[SourceTensor]) -> dict[str, SourceTensor]:
    """By name of mine, the only one of theirs such that the label of one is the end of the label of the other."""
    forward, backward = _pairs_by_end(mine, theirs), _pairs_by_end(theirs, mine)
    pairs = dict.fromkeys([*forward, *((long, short) for short, long in backward)])
    others_of = grouped((one.name, other) for one, other in pairs)
    owners = Counter(name for _, name in {(one.name, other.name) for one, other in pairs})
    return {name: others[0] for name, others in others_of.items() if len(others) == owners[others[0].name] == 1}


def _pairs_by_end(
    short: Sequence[SourceTensor], long: Sequence[SourceTensor]
) -> list[tuple[SourceTensor, SourceTensor]]:
    """Pairs such that the label of the first is the end of the label of the second."""
    labels = ((tensor, _components(tensor.label)) for tensor in long)
    ends = grouped(((parts[start:], tensor.role), tensor) for tensor, parts in labels for start in range(len(parts)))
    return [(tensor, other) for tensor in short for other in ends.get((_components(tensor.label), tensor.role), ())]


def _components(label: str) -> tuple[str, ...]:
    return tuple(label.replace(":", ".").split("."))
