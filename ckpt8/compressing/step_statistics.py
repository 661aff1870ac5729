"""What a budget needs to know of weights and moments, from a fixed sample: sums, and a salt.

A sample is some windows of a tensor, or all of a small one. Histograms count the upper bits of its magnitudes, and sums
follow from these, exactly rounded: neither threads nor devices show in them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import blake2b
from typing import Literal, NamedTuple

import torch

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.compressing.plan import Stream
from ckpt8.core.files.crc import crc32
from ckpt8.core.tensors import DType
from ckpt8.core.workers import Workers

SAMPLE = 1 << 16
"""The most elements of a tensor that are read."""

_LEAST_WINDOWS, _MOST_WINDOWS = 16, 1 << 14
_PER_WINDOW = 1 << 12
"""Elements of a tensor for each window: few, since a few rows of an embedding may carry the step."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 times the golden ratio: windows begin at places that no row length divides."""

_SHIFT, _BINS, _INFINITE = 19, 1 << 12, 255 << 4
"""Exponent and four bits of the mantissa of an fp32 number choose its bin; that of Inf is the first with no number."""

Power = Literal["value", "square", "root"]


class Spread:
    """How the magnitudes of one or more tensors of ``numel`` elements are spread: ``counts`` of a sample by bin.

    NaN and Inf count for nothing; ``is_finite`` says whether the sample holds neither.
    """

    def __init__(self, numel: int, counts: torch.Tensor) -> None:
        self.numel = numel
        present = counts[:_INFINITE].nonzero().flatten()
        self.is_finite = not counts[_INFINITE:].any()
        self._counts = list(zip(present.tolist(), counts[present].tolist(), strict=True))
        self._sampled = sum(count for _, count in self._counts)

    def total(self, power: Power) -> float:
        """The sum of a power of the magnitudes over all elements, as the sample tells it."""
        of = _powers(power)
        found = math.fsum(of[bin_] * count for bin_, count in self._counts)
        return found if self._sampled in (0, self.numel) else found * self.numel / self._sampled

    def mean(self, power: Power) -> float:
        """The mean of a power of the magnitudes; 0 without elements."""
        return self.total(power) / self.numel if self.numel else 0.0


@cache
def _powers(power: Power) -> list[float]:
    """The power of the middle of every bin; that of numbers below 2^-130 counts as zero."""
    function = {"value": float, "square": lambda x: x * x, "root": math.sqrt}[power]
    middles = (math.ldexp(16 * (e > 0) + f + 0.5, max(e, 1) - 131) for e in range(256) for f in range(16))
    return [function(x) if bin_ else 0.0 for bin_, x in enumerate(middles)]


class Sample(NamedTuple):
    """What is sampled together: one stream, or several small ones; none gives an empty spread.

    ``factors`` gives what the elements of a range are multiplied by.
    """

    streams: Sequence[Stream]
    factors: Callable[[range], torch.Tensor] | None = None


class Sampler:
    """Reads samples of one source, and keeps a checksum of all that it read."""

    def __init__(self, source: Checkpoint) -> None:
        self._source = source
        self._crc = 0

    def spreads(self, samples: Sequence[Sample]) -> list[Spread]:
        """How the elements of every sample are spread. Raises InputError."""
        found = []
        with Workers() as workers:
            for spread, crc in workers.map(self._spread, samples):
                self._crc = crc32(crc.to_bytes(4, "little"), self._crc)
                found.append(spread)
        return found

    def salt(self, storage: int) -> int:
        """A uint32 that depends on everything read so far and on the number of a storage."""
        message = b"%d %d" % (self._crc, storage)
        return int.from_bytes(blake2b(message, digest_size=4).digest(), "little")

    def _spread(self, sample: Sample) -> tuple[Spread, int]:
        """The spread of a sample, and the crc32 of what was read. Thread-safe."""
        counts, crc = torch.zeros(_BINS, dtype=torch.int64, device="cpu"), 0
        for stream in sample.streams:
            windows = _windows(stream.spec.numel)
            buffer = bytearray(sum(map(len, windows)) * stream.spec.dtype.itemsize)
            self._read(stream, windows, memoryview(buffer))
            crc = crc32(buffer, crc)
            if buffer:
                x = torch.frombuffer(buffer, dtype=DType.UINT8.torch).view(stream.spec.dtype.torch).float()
                if sample.factors is not None:
                    x = x * torch.cat([sample.factors(window) for window in windows])
                counts += torch.bincount((x.view(DType.INT32.torch) >> _SHIFT) & (_BINS - 1), minlength=_BINS)
        return Spread(sum(stream.spec.numel for stream in sample.streams), counts), crc

    def _read(self, stream: Stream, windows: Sequence[range], view: memoryview) -> None:
        """Fill ``view`` with the elements of ``windows``, one behind the other."""
        at, size = 0, stream.spec.dtype.itemsize
        for window in windows:
            stop = at + len(window) * size
            self._source.read_into(stream.storage.offset + window.start * size, view[at:stop])
            at = stop


def _windows(numel: int) -> list[range]:
    """The elements of the sample: one window in each of equal parts, at another place in each."""
    if numel <= SAMPLE:
        return [range(numel)] if numel else []
    count = min(max(1 << (numel // _PER_WINDOW).bit_length() - 1, _LEAST_WINDOWS), _MOST_WINDOWS)
    length, part = SAMPLE // count, numel // count
    starts = (k * part + ((k * _GOLDEN >> 32 & 0xFFFFFFFF) * (part - length) >> 32) for k in range(count))
    return [range(start, start + length) for start in starts]
