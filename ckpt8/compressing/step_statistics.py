"""What a budget needs to know of weights and moments, from a fixed sample: sums, and a salt.

A sample is some windows of a tensor, or all of a small one. Histograms count the upper bits of its magnitudes, and sums
follow from these, exactly rounded: neither threads nor devices show in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b
from typing import Literal

import torch

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.compressing.plan import Stream
from ckpt8.core.files.crc import crc32
from ckpt8.core.tensors import DType

SAMPLE = 1 << 16
"""The most elements of a tensor that are read."""

_LEAST_WINDOWS, _MOST_WINDOWS = 16, 256
_PER_WINDOW = 1 << 15
"""Elements of a tensor for each window."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 times the golden ratio: windows begin at places that no row length divides."""

_SHIFT, _BINS = 19, 1 << 12
"""Exponent and four bits of the mantissa of an fp32 number choose its bin."""

Power = Literal["value", "square", "root"]


class Spread:
    """How the magnitudes of one or more tensors of ``numel`` elements are spread: ``counts`` of a sample by bin."""

    def __init__(self, numel: int, counts: torch.Tensor) -> None:
        self.numel = numel
        present = counts.nonzero().flatten()
        self._counts = list(zip(present.tolist(), counts[present].tolist(), strict=True))
        self._sampled = sum(count for _, count in self._counts)

    @classmethod
    def of(cls, numel: int, sample: torch.Tensor) -> Spread:
        """That of ``numel`` elements from a sample of them, which is rounded to fp32."""
        return cls(numel, _count(sample))

    @property
    def is_finite(self) -> bool:
        """Whether the sample holds neither NaN nor Inf."""
        return not self._counts or self._counts[-1][0] < _BINS - 16

    def total(self, power: Power) -> float:
        """The sum of a power of the magnitudes over all elements, as the sample tells it."""
        of = _powers(power)
        found = math.fsum(of[bin_] * count for bin_, count in self._counts)
        return found if self._sampled == self.numel else found * self.numel / self._sampled

    def mean(self, power: Power) -> float:
        """The mean of a power of the magnitudes; 0 without elements."""
        return self.total(power) / self.numel if self.numel else 0.0


@cache
def _powers(power: Power) -> list[float]:
    """The power of the middle of every bin; that of numbers below 2^-130 counts as zero."""
    function = {"value": float, "square": lambda x: x * x, "root": math.sqrt}[power]
    middles = (math.ldexp(16 * (e > 0) + f + 0.5, max(e, 1) - 131) for e in range(256) for f in range(16))
    return [function(x) if bin_ else 0.0 for bin_, x in enumerate(middles)]


class Sampler:
    """Reads samples of the streams of one source, and keeps a checksum of what it read."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._crc = 0

    def spread(self, streams: Sequence[Stream]) -> Spread:
        """How the elements of one stream are spread, or those of several small ones together. Raises InputError."""
        counts = torch.zeros(_BINS, dtype=torch.int64, device="cpu")
        for stream in streams:
            counts += _count(self.read(stream))
        return Spread(sum(stream.spec.numel for stream in streams), counts)

    def salt(self, storage: int) -> int:
        """A uint32 that depends on everything read so far and on the number of a storage."""
        message = b"%d %d" % (self._crc, storage)
        return int.from_bytes(blake2b(message, digest_size=4).digest(), "little")

    def read(self, stream: Stream) -> torch.Tensor:
        """The sample of a stream, flat. Raises InputError."""
        size = stream.spec.dtype.itemsize
        windows = _windows(stream.spec.numel)
        buffer = bytearray(sum(map(len, windows)) * size)
        view, at = memoryview(buffer), 0
        for window in windows:
            stop = at + len(window) * size
            self._source.read_into(stream.storage.offset + window.start * size, view[at:stop])
            at = stop
        self._crc = crc32(view, self._crc)
        if not at:
            return torch.empty(0, device="cpu")
        return torch.frombuffer(buffer, dtype=DType.UINT8.torch).view(stream.spec.dtype.torch)


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over the elements of one or more parameters, without what all of them have in common.

    ``moved`` is the sum of what a step moves, in the measure of a budget, ``roots`` that of sqrt(v), and
    ``mean_square`` the mean of v.
    """

    numel: int
    moved: float
    roots: float
    mean_square: float
    is_finite: bool


def sampled(numel: int, values: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
    """The sample of ``numel`` values, which ``values`` gives from one place to another."""
    found = [values(window.start, window.stop) for window in _windows(numel)]
    return torch.cat(found) if found else torch.empty(0, device="cpu")


def _count(x: torch.Tensor) -> torch.Tensor:
    """The number of elements of every bin."""
    bins = (x.float().view(torch.int32) >> _SHIFT) & (_BINS - 1)
    return torch.bincount(bins, minlength=_BINS)


def _windows(numel: int) -> list[range]:
    """The elements of the sample: one window in each of equal parts, at another place in each."""
    if numel <= SAMPLE:
        return [range(numel)] if numel else []
    count = min(max(1 << (numel // _PER_WINDOW).bit_length() - 1, _LEAST_WINDOWS), _MOST_WINDOWS)
    length, part = SAMPLE // count, numel // count
    starts = (k * part + ((k * _GOLDEN >> 32 & 0xFFFFFFFF) * (part - length) >> 32) for k in range(count))
    return [range(start, start + length) for start in starts]
