"""The maths of quantised weights: scales from one pass over a matrix, then codes and their error as they are read.

    absmax   s = bf16(max|w| / Q)
    unit     s = 2^e, e = max(round(log2(rms(w))), ceil(log2(max|w| / Q))): what is stored has an rms near 1 (Unit
             Scaling, arXiv 2303.11257), and nothing overflows

No level is lost where max|w| / Q is rounded down to bf16: max|w| / s is then below Q * (1 + 2^-8), and that still
rounds to Q. Rows of zeros have the scale 1; no other scale is below 2^-126.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ckpt8.checkpoint.sources.composite import Composite
from ckpt8.checkpoint.sources.computed import computed
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, NoiseError
from ckpt8.container.frames import FRAME
from ckpt8.converting.quantizing.scheme import TENSOR, UNIT, Scheme
from ckpt8.core.tensors import DType

_BEYOND = 2.0**127
"""Magnitudes from here on are refused, as are NaN and Inf: their codes times the scale could overflow."""


def find_scales(
    data: Composite, ref: TensorRef, scheme: Scheme, progress: Callable[[int], None]
) -> torch.Tensor | None:
    """The fp32 scales of a matrix, of the shape (rows, 1), or (1,) for one scale of the whole matrix.

    None where an element is NaN, Inf or beyond 2^127. Reads the matrix once, and calls ``progress`` with the number of
    bytes read. Raises InputError.
    """
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
    # Compared this way round, since NaN is below nothing.
    if not bool((largest < _BEYOND).all()):
        return None
    found = (largest / scheme.largest).bfloat16().float()
    if scheme.scale == UNIT:
        needed = torch.log2(largest.double() / scheme.largest).ceil()
        wanted = (torch.log2(squares / columns) / 2).round()
        exponent = torch.maximum(needed, wanted).clamp_(-126, 127).int()
        found = ((exponent + 127) << 23).view(torch.float32)
    found = found.clamp_min(SMALLEST_NORMAL).masked_fill(largest == 0, 1.0)
    return found if scheme.per == TENSOR else found.view(-1, 1)


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


@dataclass(slots=True)
class QuantizationError(NoiseError):
    """Error of quantised weights.

    The relative error of an element is |decoded - w| / max(|w|, 2^-126), so 1 for one that became zero, and ``zeroed``
    counts these. ``max_relative`` is the largest, ``sum_square_relative`` the sum of squares over ``count`` elements.
    """

    count: int = 0
    max_relative: float = 0.0
    sum_square_relative: float = 0.0
    zeroed: int = 0

    @property
    def rms_relative(self) -> float:
        """Root mean square of the relative errors of the elements."""
        return math.sqrt(self.sum_square_relative / self.count) if self.count else 0.0

    def figures(self) -> dict[str, Any]:
        """The figures of a report; ``snr_db`` is None where there is no error."""
        return {
            "elements": self.count,
            "max_relative": self.max_relative,
            "rms_relative": self.rms_relative,
            "snr_db": self.snr_db,
            "zeroed": self.zeroed,
        }


def measured(original: torch.Tensor, decoded: torch.Tensor) -> QuantizationError:
    """The error of decoded fp32 elements."""

    def squares(x: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2

    error = decoded - original
    zeroed = int(((decoded == 0) & (original != 0)).sum())
    noise, signal = squares(error), squares(original)
    relative = error.abs_().div_(original.abs().clamp_min_(SMALLEST_NORMAL))
    return QuantizationError(noise, signal, original.numel(), float(relative.amax()), squares(relative), zeroed)


def quantize(values: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of finite fp32 values, in the element type of the scheme."""
    found = (values / scales).clamp_(-scheme.largest, scheme.largest)
    # A cast to int8 cuts off, one to a float rounds.
    return (found.round_() if scheme.dtype is DType.INT8 else found).to(scheme.dtype.torch)


def encode_matrix(
    data: Composite, ref: TensorRef, scales: torch.Tensor, scheme: Scheme
) -> tuple[TensorRef, QuantizationError]:
    """The codes of a matrix as a tensor that is computed when it is read, and their error.

    Every read adds the error of what was read: read the codes once to know it.
    """
    error = QuantizationError()
    _, columns = scheme.groups(ref.shape)

    def encode(start: int, stop: int) -> torch.Tensor:
        values = data.elements(ref, start, stop).float()
        codes = torch.empty_like(values, dtype=scheme.dtype.torch)
        decoded = torch.empty_like(values)
        for row, count, begin, end in row_parts(start, stop, columns):
            place = slice(begin - start, end - start)
            shared = scales[row : row + count]
            found = quantize(values[place].view(count, -1), shared, scheme)
            codes[place] = found.view(-1)
            decoded[place] = (found.float() * shared).view(-1)
        error.merge(measured(values, decoded))
        return codes

    return computed(data, scheme.dtype, ref.shape, encode, FRAME), error
