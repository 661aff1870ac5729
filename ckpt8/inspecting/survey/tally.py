"""What a survey counts in one tensor, window by window."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch

from ckpt8.codecs.companded8 import GROUP
from ckpt8.container.frames import bytes_of
from ckpt8.core.tensors import DType, Role

FP16_ZERO = 2.0**-25
"""fp16 rounds numbers up to this one, half of its smallest, to zero."""

_FP16_NORMAL = 2.0**-14
_VARIETY = 16
"""A tensor with fewer different values is a mask or a constant."""

_VARIED_IN = 4096
"""Elements of every window in which the tally looks for different values."""

_BITS = {1: DType.UINT8, 2: DType.INT16, 4: DType.INT32, 8: DType.INT64}
_SUMMED = (
    "numel",
    "seen",
    "nan",
    "inf",
    "nonzero",
    "negative",
    "fp16_zero",
    "groups",
    "zero_scales",
    "subnormal_scales",
)
"""The fields of a tally that are counts: those of slices add up."""

_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


class Rows:
    """Which of ``count`` rows of ``row`` elements were read in full, and which have a moment that is not zero."""

    def __init__(self, count: int, row: int) -> None:
        self.count, self._row = count, row
        self._alive, self._seen = torch.zeros(2, count, dtype=torch.bool, device="cpu")

    def add(self, nonzero: torch.Tensor, start: int, *, reads_all: bool) -> None:
        """Add elements from ``start`` on: ``nonzero`` is True where one is not zero.

        ``reads_all`` says that the caller adds all elements, in several calls: rows may then be cut between two calls.
        """
        stop = start + len(nonzero)
        first, last = -(-start // self._row), stop // self._row
        if first > last:  # within one row
            self._alive[start // self._row] |= nonzero.any()
        else:
            head, tail = first * self._row - start, last * self._row - start
            if head:
                self._alive[first - 1] |= nonzero[:head].any()
            if tail < len(nonzero):
                self._alive[last] |= nonzero[tail:].any()
            if head < tail:
                self._alive[first:last] |= nonzero[head:tail].view(-1, self._row).any(dim=1)
                self._seen[first:last] = True
        if reads_all:
            self._seen.fill_(True)

    @property
    def seen(self) -> int:
        """How many rows were read in full."""
        return int(self._seen.sum())

    @property
    def dead(self) -> int:
        """How many of these rows are zero in all moments."""
        return int((self._seen & ~self._alive).sum())


@dataclass(slots=True)
class Tally:
    """Counts over the ``seen`` elements that were read of a tensor.

    ``nonzero`` counts those that are not zero, ``negative`` second moments below zero, ``fp16_zero`` second moments
    that fp16 rounds to zero. ``fits_bf16`` says that no fp32 value has bits that bf16 lacks. ``groups`` counts the
    groups of 32 moments that are not all zero; in fp16 the scale is zero in ``zero_scales`` of them and subnormal in
    ``subnormal_scales``. ``values`` holds the bits of up to 16 different elements.
    """

    role: Role
    dtype: DType
    numel: int
    seen: int = 0
    nan: int = 0
    inf: int = 0
    nonzero: int = 0
    negative: int = 0
    fits_bf16: bool = True
    fp16_zero: int = 0
    groups: int = 0
    zero_scales: int = 0
    subnormal_scales: int = 0
    values: set[int] = field(default_factory=set)
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, x: torch.Tensor, start: int, rows: Rows | None = None, *, reads_all: bool = False) -> None:
        """Count the elements ``x`` from ``start`` on, and add them to ``rows`` if given."""
        if self.role is Role.WEIGHT:
            self.digest.update(bytes_of(x))
        bits = x.view(_BITS[self.dtype.itemsize].torch)
        if self.dtype is DType.FLOAT32:
            self.fits_bf16 = self.fits_bf16 and not bool((bits & 0xFFFF).any())
        if len(self.values) < _VARIETY:
            self.values.update(bits[:_VARIED_IN].unique()[:_VARIETY].tolist())  # type: ignore[no-untyped-call]
        values = x if x.dtype in (torch.float32, torch.float64) else x.float()
        finite = values.isfinite()
        if not finite.all():
            nan = int(values.isnan().sum())
            self.nan += nan
            self.inf += len(x) - int(finite.sum()) - nan
        nonzero = values != 0
        count = int(nonzero.sum())
        self.seen += len(x)
        self.nonzero += count
        if rows is not None:
            rows.add(nonzero, start, reads_all=reads_all)
        if self.role is Role.MOMENT2:
            self.negative += int((values < 0).sum())
        if self.role in _MOMENTS and count:
            self._moments(values.abs(), start)

    @property
    def is_varied(self) -> bool:
        """Whether the tensor is neither a mask nor a constant."""
        return len(self.values) >= _VARIETY

    def merge(self, other: Tally) -> None:
        """Add the counts of another slice of the same tensor."""
        for name in _SUMMED:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fits_bf16 &= other.fits_bf16
        self.values |= other.values

    def _moments(self, magnitude: torch.Tensor, start: int) -> None:
        """Count the groups that a window holds in full. The last group of the tensor may be short."""
        if self.role is Role.MOMENT2 and self.dtype is not DType.FLOAT16:
            self.fp16_zero += int(((magnitude > 0) & (magnitude <= FP16_ZERO)).sum())
        skip = min(-start % GROUP, len(magnitude))
        stop = skip + (len(magnitude) - skip) // GROUP * GROUP
        self._scales(magnitude[skip:stop].view(-1, GROUP).amax(dim=1))
        if stop < len(magnitude) and start + len(magnitude) == self.numel:
            self._scales(magnitude[stop:].amax(dim=0, keepdim=True))

    def _scales(self, largest: torch.Tensor) -> None:
        scales = (largest.sqrt() if self.role is Role.MOMENT2 else largest).float()
        halves = scales.to(torch.float16)
        self.groups += int((scales != 0).sum())
        self.zero_scales += int(((scales > 0) & (halves == 0)).sum())
        self.subnormal_scales += int(((halves > 0) & (halves.float() < _FP16_NORMAL)).sum())
