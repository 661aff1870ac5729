"""Finds the scales of a matrix in one pass over it.

    absmax   s = bf16(max|w| / Q)
    unit     s = 2^e, e = max(round(log2(rms(w))), ceil(log2(max|w| / Q))): what is stored has an rms near 1 (Unit
             Scaling, arXiv 2303.11257), and nothing overflows

No level is lost where max|w| / Q is rounded down to bf16: max|w| / s is then below Q * (1 + 2^-8), and that still
rounds to Q. Rows of zeros have the scale 1; no other scale is below 2^-126.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.error_stats import SMALLEST_NORMAL
from ckpt8.container.frames import FRAME
from ckpt8.converting.quantizing.scheme import TENSOR, UNIT, Scheme

BEYOND = 2.0**127
"""Magnitudes from here on are refused, as are NaN and Inf: their codes times the scale could overflow."""


def row_parts(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements ``start`` to ``stop`` of a matrix as (first row, rows, first element, end): whole rows, parts of one.

    No more than three.
    """
    while start < stop:
        row, into = divmod(start, columns)
        rows = (stop - start) // columns if into == 0 else 0
        end = start + rows * columns if rows else min(stop, start + columns - into)
        yield row, rows or 1, start, end
        start = end


@dataclass(frozen=True, slots=True)
class Extent:
    """What the scales are made from. Each of them covers ``count`` elements.

    ``largest`` is their largest magnitude (fp32); ``squares``, for unit alone, the sum of their squares (float64).
    """

    scheme: Scheme
    largest: torch.Tensor
    squares: torch.Tensor
    count: int

    @property
    def usable(self) -> bool:
        """Whether all elements are finite, and below BEYOND."""
        # Compared this way round, since NaN is below nothing.
        return bool((self.largest < BEYOND).all())

    def scales(self) -> torch.Tensor:
        """The scales as fp32: of the shape (rows, 1), or (1,) for one scale of the whole matrix."""
        found = self._unit() if self.scheme.scale == UNIT else (self.largest / self.scheme.largest).bfloat16().float()
        found = found.clamp_min(SMALLEST_NORMAL).masked_fill(self.largest == 0, 1.0)
        return found if self.scheme.per == TENSOR else found.view(-1, 1)

    def _unit(self) -> torch.Tensor:
        needed = torch.log2(self.largest.double() / self.scheme.largest).ceil()
        wanted = (torch.log2(self.squares / self.count) / 2).round()
        exponent = torch.maximum(needed, wanted).clamp_(-126, 127).int()
        return ((exponent + 127) << 23).view(torch.float32)


def measure_extent(data: Composite, ref: TensorRef, scheme: Scheme, progress: Callable[[int], None]) -> Extent:
    """Read a matrix once. Calls ``progress`` with the number of bytes read. Raises InputError."""
    rows, columns = scheme.groups(ref.shape)
    largest = torch.zeros(rows, device="cpu")
    squares = torch.zeros(rows if scheme.scale == UNIT else 0, dtype=torch.float64, device="cpu")
    start = 0
    for block in data.blocks(ref):
        for at in range(0, len(block), FRAME):
            values = block[at : at + FRAME].float()
            for row, count, begin, end in row_parts(start, start + len(values), columns):
                part, place = values[begin - start : end - start].view(count, -1), slice(row, row + count)
                largest[place] = torch.maximum(largest[place], part.abs().amax(1))
                if scheme.scale == UNIT:
                    squares[place] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square_()
            start += len(values)
        progress(len(block) * ref.dtype.itemsize)
    return Extent(scheme, largest, squares, columns)
