"""Errors in steps of torch's Adafactor, whose steps go with the size of the weights. It has no momentum.

Second moments of a matrix are row and column statistics R and C: v = R (x) C / mean(R). An element counts as v does, as
with other second moments. One step moves each element of a tensor by p, an estimate of its root mean square:

    M1 = p^2 sum(v)      S_W = sum(v dW^2)      S_W = c^2 M1

    p = max(eps2, rms(w)) min(lr, 1 / sqrt(t)) min(1, d, sqrt(mean(v)) / eps1)

An update is a gradient divided by sqrt(v), clipped to a root mean square of d: it has one near 1. Where gradients are
smaller than eps1, which is .0078 for weights in bf16, it is divided by eps1 instead.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch

from ckpt8.checkpoint.meaning.optimizer_state import LARGEST_STEP, finite
from ckpt8.checkpoint.meaning.replayed import Confidence
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.codecs.error_stats import StepError, larger
from ckpt8.compressing.momentum import StepSums
from ckpt8.container.steps import Origin

_LEAST_MEAN = 2.0**-1000
"""What the mean of row statistics counts at least, so that v is zero where all of them are."""


_LARGEST = 1e100
"""Energies of larger steps are no numbers."""


@dataclass(frozen=True, slots=True)
class RelativeStep:
    """How Adafactor moves one tensor: by ``reach`` times the size of its weights, which is ``least`` at least.

    ``most`` is the largest learning rate, ``floor`` the least divisor of a gradient.
    """

    reach: float
    least: float
    most: float
    floor: float

    stated: ClassVar[Mapping[str, Origin]] = {"origin": "estimate"}
    by_value: ClassVar[bool] = True
    is_of_stream: ClassVar[bool] = True

    def weighs(self, sums: StepSums) -> float:
        """What the square of an error of a weight counts, on average."""
        return sums.second / sums.count

    def energies(self, lr: float, sums: StepSums) -> StepError:
        """What one step and the errors move, from sums over a tensor."""
        if not sums.count:
            return StepError()
        size = larger(self.least, math.sqrt(sums.square / sums.count))
        divided = math.sqrt(sums.second / sums.count) / self.floor if self.floor else 1.0
        step = size * min(lr, self.most) * min(self.reach, divided)
        return StepError(step * step * sums.second, sums.weight)

    @classmethod
    def of(cls, state: Mapping[Any, Any], group: Mapping[Any, Any], step: object) -> RelativeStep | None:
        """That of a matrix with this state of torch's Adafactor; None for other states and settings."""
        rows, columns, eps = state.get("row_var"), state.get("col_var"), group.get("eps")
        if not (isinstance(rows, TensorRef) and isinstance(columns, TensorRef) and "beta2_decay" in group):
            return None
        if not isinstance(eps, (tuple, list)) or len(eps) != 2 or shape_of(rows, columns) is None:
            return None
        floor = torch.finfo(rows.dtype.torch).eps if eps[0] is None else finite(eps[0])
        least, clip, count = finite(eps[1]), finite(group.get("d")), finite(step)
        if floor is None or least is None or clip is None or count is None:
            return None
        if not (floor >= 0 and 0 <= least <= _LARGEST and clip > 0 and 1 <= count <= LARGEST_STEP):
            return None
        return cls(min(1.0, clip), least, 1 / math.sqrt(count), floor)


def shape_of(rows: TensorRef, columns: TensorRef) -> tuple[int, ...] | None:
    """The shape of the matrices with these statistics; None where they do not fit, are empty, or are no floats."""
    one, other = rows.shape, columns.shape
    fits = len(one) == len(other) >= 2 and one[:-2] == other[:-2] and one[-1] == other[-2] == 1
    known = all(ref.dtype.is_plane_float and ref.numel and is_dense(ref) for ref in (rows, columns))
    return (*one[:-1], other[-1]) if fits and known else None


class SecondRoots(Confidence):
    """sqrt(v) for a range of elements at a time, from row and column statistics."""

    @cached_property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Row and column factors, computed in float64 and rounded once: the same on every machine."""
        row = (self.rows.double() / self._means.clamp_min(_LEAST_MEAN)).sqrt().float().reshape(-1)
        return row, self.columns.double().sqrt().float().reshape(-1, self.columns.shape[-1])

    def followed(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor | None:  # noqa: ARG002
        """None: a step follows from the weights themselves."""
        return None

    def roots(self, start: int, stop: int, device: torch.device | None = None) -> torch.Tensor:
        """sqrt(v) of elements ``start`` to ``stop``."""
        return self.at(start, stop, device)

    def totals(self, windows: Sequence[range], numel: int) -> StepSums:  # noqa: ARG002
        """The sum of v over all elements; NaN where statistics are no numbers from zero on."""
        rows, columns = (factor.double().square() for factor in self.factors)
        pairs = zip(rows.reshape(-1, self.rows.shape[-1]).tolist(), columns.tolist(), strict=True)
        second = math.fsum(math.fsum(of_rows) * math.fsum(of_columns) for of_rows, of_columns in pairs)
        return StepSums(second=second, count=numel)
