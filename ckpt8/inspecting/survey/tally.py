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
_MOMENTS = (Role.MOMENT1, Role.MOMENT2)


class Rows:
    """Which of ``count`` rows of ``row`` elements the survey has seen, and which have a moment that is not zero."""

    def __init__(self, count: int, row: int) -> None:
        self.count, self._row = count, row
        self._alive, self._seen = torch.zeros(2, count, dtype=torch.bool, device="cpu")

    def add(self, present: torch.Tensor, start: int, *, whole: bool) -> None:
        """Add elements from ``start`` on: ``present`` says which are not zero.

        ``whole`` says that the caller adds all elements, in several calls.
        """
        stop = start + len(present)
        first, last = -(-start // self._row), stop // self._row
        if first > last:  # within one row
            self._alive[start // self._row] |= present.any()
        else:
            head, tail = first * self._row - start, last * self._row - start
            if head:
                self._alive[first - 1] |= present[:head].any()
            if tail < len(present):
                self._alive[last] |= present[tail:].any()
            if head < tail:
                self._alive[first:last] |= present[head:tail].view(-1, self._row).any(dim=1)
                self._seen[first:last] = True
        if whole:
            self._seen.fill_(True)

    @property
    def seen(self) -> int:
        """How many rows the survey has seen whole."""
        return int(self._seen.sum())

    @property
    def dead(self) -> int:
        """How many of these are zero in all moments."""
        return int((self._seen & ~self._alive).sum())


@dataclass(slots=True)
class Tally:
    """Counts over the ``seen`` elements of a tensor.

    ``present`` are not zero. ``negative`` are second moments below zero. ``wide`` says that an fp32 value has bits that
    bf16 does not hold. ``flushed`` are second moments that fp16 rounds to zero. Of ``groups`` of 32 moments that are
    not all zero, the scale of ``lost`` is zero in fp16, and that of ``coarse`` subnormal. ``values`` are the bits of up
    to 16 different elements.
    """

    role: Role
    dtype: DType
    numel: int
    seen: int = 0
    nan: int = 0
    inf: int = 0
    present: int = 0
    negative: int = 0
    wide: bool = False
    flushed: int = 0
    groups: int = 0
    lost: int = 0
    coarse: int = 0
    values: set[int] = field(default_factory=set)
    digest: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=16))

    def add(self, x: torch.Tensor, start: int, rows: Rows | None = None, *, whole: bool = False) -> None:
        """Count the elements ``x`` from ``start`` on; ``rows`` gets them too."""
        if self.role is Role.WEIGHT:
            self.digest.update(bytes_of(x))
        bits = x.view(_BITS[self.dtype.itemsize].torch)
        if self.dtype is DType.FLOAT32:
            self.wide = self.wide or bool((bits & 0xFFFF).any())
        if len(self.values) < _VARIETY:
            self.values.update(bits[:_VARIED_IN].unique()[:_VARIETY].tolist())  # type: ignore[no-untyped-call]
        values = x if x.dtype in (torch.float32, torch.float64) else x.float()
        finite = values.isfinite()
        if not finite.all():
            nan = int(values.isnan().sum())
            self.nan += nan
            self.inf += len(x) - int(finite.sum()) - nan
        present = values != 0
        count = int(present.sum())
        self.seen += len(x)
        self.present += count
        if rows is not None:
            rows.add(present, start, whole=whole)
        if self.role is Role.MOMENT2:
            self.negative += int((values < 0).sum())
        if self.role in _MOMENTS and count:
            self._moments(values.abs(), start)

    @property
    def varied(self) -> bool:
        """Whether the tensor is neither a mask nor a constant."""
        return len(self.values) >= _VARIETY

    def merge(self, other: Tally) -> None:
        """Add the counts of another slice of the same tensor."""
        for name in ("numel", "seen", "nan", "inf", "present", "negative", "flushed", "groups", "lost", "coarse"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.wide |= other.wide
        self.values |= other.values

    def _moments(self, magnitude: torch.Tensor, start: int) -> None:
        """Count the groups that lie whole in a window; the last one of the tensor may be short."""
        if self.role is Role.MOMENT2 and self.dtype is not DType.FLOAT16:
            self.flushed += int(((magnitude > 0) & (magnitude <= FP16_ZERO)).sum())
        skip = min(-start % GROUP, len(magnitude))
        stop = skip + (len(magnitude) - skip) // GROUP * GROUP
        self._scales(magnitude[skip:stop].view(-1, GROUP).amax(dim=1))
        if stop < len(magnitude) and start + len(magnitude) == self.numel:
            self._scales(magnitude[stop:].amax(dim=0, keepdim=True))

    def _scales(self, largest: torch.Tensor) -> None:
        scales = (largest.sqrt() if self.role is Role.MOMENT2 else largest).float()
        halves = scales.to(torch.float16)
        self.groups += int((scales != 0).sum())
        self.lost += int(((scales > 0) & (halves == 0)).sum())
        self.coarse += int(((halves > 0) & (halves.float() < _FP16_NORMAL)).sum())
