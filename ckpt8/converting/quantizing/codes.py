"""Computes the codes of a matrix when they are read, and measures their error."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch

from ckpt8.checkpoint.sources.composite import Composite, cut, put
from ckpt8.checkpoint.tree import TensorRef
from ckpt8.codecs.error_stats import SMALLEST_NORMAL, NoiseError
from ckpt8.container.frames import FRAME
from ckpt8.converting.quantizing.scales import row_parts
from ckpt8.converting.quantizing.scheme import Scheme
from ckpt8.core.tensors import DType


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


@dataclass(frozen=True, slots=True)
class Codes:
    """The codes of the matrix ``ref``, one byte each; ``scales`` are those of ``Extent``.

    Every read adds the error of what was read to ``error``: read a matrix once to know its error.
    """

    source: Composite
    ref: TensorRef
    scales: torch.Tensor
    scheme: Scheme
    error: QuantizationError = field(default_factory=QuantizationError)

    @property
    def nbytes(self) -> int:
        """One byte for each element."""
        return self.ref.numel

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer``. Raises InputError."""
        for start, stop, place in cut(offset, buffer, self.scheme.dtype.itemsize, FRAME):
            put(self._encode(start, self.source.elements(self.ref, start, stop).float()), place)

    def _encode(self, first: int, values: torch.Tensor) -> torch.Tensor:
        codes = torch.empty_like(values, dtype=self.scheme.dtype.torch)
        decoded = torch.empty_like(values)
        _, columns = self.scheme.groups(self.ref.shape)
        for row, count, begin, end in row_parts(first, first + len(values), columns):
            place = slice(begin - first, end - first)
            scales = self.scales[row : row + count]
            found = quantize(values[place].view(count, -1), scales, self.scheme)
            codes[place] = found.view(-1)
            decoded[place] = (found.float() * scales).view(-1)
        self.error.merge(measured(values, decoded))
        return codes
