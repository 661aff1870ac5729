"""Samples of a tensor: windows spread over it, always the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ckpt8.codecs.companded8 import GROUP
from ckpt8.container import header
from ckpt8.container.frames import FRAME

PER_TENSOR = 1 << 15
"""Elements in the sample of a long tensor."""

PER_CHART = 1 << 17
"""Elements in the sample of a histogram, whose tails need more."""

WINDOWS = 8
"""Windows of a sample, at least."""

CHUNK = 1 << 18
"""Elements that a survey reads at once: it needs memory for their temporaries."""

EVERY_ELEMENT = "every element"
"""The sample that leaves nothing out, in words."""

_WINDOW = 4096
_IN_ALL = 1 << 25
_FEWEST = 256
_MOST_CHUNKS = 16
_CHUNKS_IN_ALL = 1024


def budget(tensors: int) -> int:
    """Elements in the sample of each of ``tensors`` tensors: PER_TENSOR, or fewer to stay within 2^25 in all."""
    return max(_FEWEST, min(PER_TENSOR, _IN_ALL // max(tensors, 1)))


def windows(numel: int, most: int | None, row: int = 0) -> Iterator[tuple[int, int]]:
    """Start and length of the windows of ``numel`` elements, in order and without overlap.

    ``most`` bounds a sample; None takes all. The first and the last element belong to every sample. Windows begin where
    a group of 32 moments begins. With ``row``, and if two rows fit into the sample, they begin where a row of ``row``
    elements begins, and hold whole rows.
    """
    if most is None or numel <= most:
        yield from ((start, min(CHUNK, numel - start)) for start in range(0, numel, CHUNK))
        return
    length = min(_WINDOW, most // WINDOWS // GROUP * GROUP)
    step = GROUP
    if 0 < row <= most // 2:
        length, step = max(length // row, 1) * row, row
    *starts, last = _spread(numel - length, most // length)
    yield from ((start // step * step, length) for start in starts)
    # Round up: rounding down would make the last window longer.
    start = -(-last // step) * step
    yield start, numel - start


@dataclass(frozen=True, slots=True)
class ChunkSampling:
    """Samples of ``most`` elements of each tensor, None for all, from at most ``chunks`` of its stored chunks."""

    most: int | None
    chunks: int

    @classmethod
    def of(cls, tensors: int, *, full: bool) -> ChunkSampling:
        """For a checkpoint of ``tensors`` tensors: a container decodes a chunk to show any of it."""
        chunks = max(1, min(_MOST_CHUNKS, _CHUNKS_IN_ALL // max(tensors, 1)))
        return cls(None if full else PER_CHART, chunks)

    def __call__(self, numel: int) -> list[tuple[int, list[slice]]]:
        """Chunks of a tensor of ``numel`` elements, and the windows of each, in elements from its beginning."""
        count = header.chunk_count(numel)
        chosen = range(count) if self.most is None else _spread(count - 1, min(count, self.chunks))
        most = self.most and self.most // max(len(chosen), 1)
        return [
            (chunk, [slice(start, start + n) for start, n in windows(min(FRAME, numel - chunk * FRAME), most)])
            for chunk in chosen
        ]

    @property
    def text(self) -> str:
        """The sample in words."""
        return EVERY_ELEMENT if self.most is None else f"up to {self.most:,} elements of each tensor, evenly spread"


def _spread(last: int, count: int) -> list[int]:
    """``count`` numbers from 0 to ``last``, evenly; of one, the middle."""
    return [last * k // (count - 1) for k in range(count)] if count > 1 else [last // 2] * count
