"""The scales of a matrix, from one pass over it.

    absmax   s = bf16(max|w| / Q)
    unit     s = 2^e, e = max(round(log2(rms(w))), ceil(log2(max|w| / Q))): what is stored has an rms near 1 (Unit
             Scaling, arXiv 2303.11257), and nothing overflows

Rounding max|w| / Q down to bf16 takes no level away: max|w| / s is then below Q * (1 + 2^-8), which still rounds to Q.
Rows of zeros have the scale 1; no other scale is below 2^-126.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckpt8.container.frames import FRAME
from ckpt8.converting.composite import Composite
from ckpt8.quantizing.scheme import TENSOR, UNIT, Scheme
from ckpt8.readers.base import TensorRef
from ckpt8.stats import SMALLEST_NORMAL

if TYPE_CHECKING:
    import torch

BEYOND = 2.0**127
"""Magnitudes from here on are refused, as are NaN and Inf: their codes times the scale could overflow."""


def row_parts(start: int, stop: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Elements ``start`` to ``stop`` of a matrix as (first row, rows, first element, end): whole rows, parts of one."""
    while start < stop:
        row, into = divmod(start, columns)
        rows = (stop - start) // columns if into == 0 else 0
        end = start + rows * columns if rows else min(stop, start + columns - into)
        yield row, rows or 1, start, end
        start = end


@dataclass(frozen=True, slots=True)
class Extent:
    """Of every row of a matrix, the largest magnitude (fp32) and the sum of the squares (float64)."""

    largest: torch.Tensor
    squares: torch.Tensor
    columns: int

    @property
    def usable(self) -> bool:
        """Whether all elements are finite, and below BEYOND."""
        # Not the other way round: NaN is not below anything.
        return bool((self.largest < BEYOND).all())

    def scales(self, scheme: Scheme) -> torch.Tensor:
        """The scales as fp32: of the shape (rows, 1), or (1,) for one that all share."""
        largest, squares, count = self.largest, self.squares, self.columns
        if scheme.per == TENSOR:
            largest, squares = largest.amax().view(1), squares.sum().view(1)
            count *= len(self.largest)
        found = _unit(largest, squares / count, scheme) if scheme.scale == UNIT else _absmax(largest, scheme)
        found = found.clamp_min(SMALLEST_NORMAL).masked_fill(largest == 0, 1.0)
        return found if scheme.per == TENSOR else found.view(-1, 1)


def _absmax(largest: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    return (largest / scheme.largest).bfloat16().float()


def _unit(largest: torch.Tensor, mean_square: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    import torch

    needed = torch.log2(largest.double() / scheme.largest).ceil()
    wanted = (torch.log2(mean_square) / 2).round()
    exponent = torch.maximum(needed, wanted).clamp_(-126, 127).int()
    return ((exponent + 127) << 23).view(torch.float32)


def measure_extent(data: Composite, ref: TensorRef, progress: Callable[[int], None]) -> Extent:
    """Read a matrix once. ``progress`` is called with the bytes of what was read. Raises InputError."""
    import torch

    rows, columns = ref.shape
    largest = torch.zeros(rows)
    squares = torch.zeros(rows, dtype=torch.float64)
    start = 0
    for block in data.blocks(ref):
        for at in range(0, len(block), FRAME):
            values = block[at : at + FRAME].float()
            for row, count, begin, end in row_parts(start, start + len(values), columns):
                part, place = values[begin - start : end - start].view(count, -1), slice(row, row + count)
                largest[place] = torch.maximum(largest[place], part.abs().amax(1))
                squares[place] += torch.linalg.vector_norm(part, dim=1, dtype=torch.float64).square_()
            start += len(values)
        progress(len(block) * ref.dtype.itemsize)
    return Extent(largest, squares, columns)
