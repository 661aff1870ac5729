"""Errors in steps of Adafactor without momentum, whose steps may go with the size of the weights.

Second moments of a matrix are row and column statistics R and C: v = R (x) C / mean(R). An element counts as v does, as
with other second moments. One step moves each element of a tensor by p, an estimate of its root mean square:

    M1 = p^2 sum(v)      S_W = sum(v dW^2)      S_W = c^2 M1

    p = max(eps2, rms(w)) min(lr, 1 / sqrt(t)) min(1, d, sqrt(mean(v)) / eps1)

An update is a gradient divided by sqrt(v), clipped to a root mean square of d: it has one near 1. Where gradients are
smaller than eps1, which is .0078 for weights in bf16, it is divided by eps1 instead.

That is torch's. The one of transformers adds its eps1 to squares. With a ``relative_step`` its rate is
min(.01, 1 / sqrt(t)), or min(1e-6 t, 1 / sqrt(t)) with ``warmup_init``, else that of the group alone; and
max(eps2, rms(w)) is 1 where it does not scale parameters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from ckpt8.checkpoint.meaning.optimizer_state import LARGEST_STEP, finite, parameter_shape
from ckpt8.checkpoint.meaning.replayed import Confidence
from ckpt8.checkpoint.tree import TensorRef, is_dense
from ckpt8.codecs.error_stats import StepError, larger
from ckpt8.compressing.momentum import StepSums
from ckpt8.container.steps import Origin
from ckpt8.core.lazy import torch
from ckpt8.optim.known_optimizers import SIDE_STATE, TENSORS

_LEAST_MEAN = 2.0**-1000
"""What the mean of row statistics counts at least, so that v is zero where all of them are."""


_LARGEST = 1e100
"""Energies of larger steps are no numbers."""


@dataclass(frozen=True, slots=True)
class RelativeStep:
    """How Adafactor moves one tensor: by ``reach`` times the size of its weights, which is ``least`` at least.

    ``most`` is the largest learning rate, ``floor`` the least divisor of a gradient. All sizes are 1 unless it
    ``is_scaled``.
    """

    reach: float
    least: float
    most: float
    floor: float
    is_scaled: bool = True

    stated: ClassVar[Mapping[str, Origin]] = {"origin": "estimate"}
    by_value: ClassVar[bool] = True
    is_of_stream: ClassVar[bool] = True
    unreplayed: ClassVar[str] = "its state has no first moment"

    def weighs(self, sums: StepSums) -> float:
        """What the square of an error of a weight counts, on average."""
        return sums.second / sums.count

    def energies(self, lr: float, sums: StepSums) -> StepError:
        """What one step and the errors move, from sums over a tensor."""
        if not sums.count:
            return StepError()
        size = larger(self.least, math.sqrt(sums.square / sums.count)) if self.is_scaled else 1.0
        divided = math.sqrt(sums.second / sums.count) / self.floor if self.floor else 1.0
        step = size * min(lr, self.most) * min(self.reach, divided)
        return StepError(step * step * sums.second, sums.weight)

    @classmethod
    def of(
        cls, state: Mapping[Any, Any], group: Mapping[Any, Any]
    ) -> tuple[tuple[int, ...], list[TensorRef], RelativeStep] | None:
        """That of a matrix of Adafactor with its shape and its statistics; None for other states and settings."""
        found, eps, count = _statistics_of(state), group.get("eps"), finite(state.get("step")) or 0.0
        if found is None or not 1 <= count <= LARGEST_STEP or not isinstance(eps, (tuple, list)) or len(eps) != 2:
            return None
        if "row_var" in state and "beta2_decay" in group:
            floor = torch.finfo(found[1][0].dtype.torch).eps if eps[0] is None else eps[0]
            given, most = (group.get("d"), eps[1], floor), 1 / math.sqrt(count)
        elif group.get("beta1", "") is None and "relative_step" in group:
            relative = min(1e-6 * count if group.get("warmup_init") else 1e-2, 1 / math.sqrt(count))
            given, most = (group.get("clip_threshold"), eps[1], 0), relative if group["relative_step"] else math.inf
        else:
            return None
        numbers = [number for number in map(finite, given) if number is not None]
        if len(numbers) < len(given) or not (numbers[0] > 0 <= min(numbers) and numbers[1] <= _LARGEST):
            return None
        clip, least, floor = numbers
        return *found, cls(min(1.0, clip), least, most, floor, group.get("scale_parameter") is not False)


def _statistics_of(state: Mapping[Any, Any]) -> tuple[tuple[int, ...], list[TensorRef]] | None:
    """The shape of a matrix, and its row and column statistics, in a state that has no other tensors.

    None where they do not fit, are empty, or are no floats.
    """
    keys = ("row_var", "col_var") if "row_var" in state else ("exp_avg_sq_row", "exp_avg_sq_col")
    refs, shape = [ref for key in keys if isinstance(ref := state.get(key), TensorRef)], parameter_shape(state)
    if shape is None or len(shape) < 2 or len(refs) < 2 or state.keys() - SIDE_STATE != set(keys):
        return None
    fit = all(
        ref.shape == TENSORS[key].shape(shape) and ref.dtype.is_plane_float and ref.numel and is_dense(ref)
        for key, ref in zip(keys, refs, strict=True)
    )
    return (shape, refs) if fit else None


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
