"""The errors that lossy storage makes, as accumulators that merge in the order of the chunks.

    weight   e = |w' - w| / max(|w|, 2^-126): maximum and mean; the distance in units of the bf16 step (2^16 fp32 steps)
    moment   NMSE = sum((x' - x)^2) / sum(x^2); the largest |x' - x| / s, with s the scale of the group and x = sqrt(v)
             for second moments (the domain in which they are quantised)
    update   NMSE = sum((u' - u)^2) / sum(u^2), max |u' - u|, max |u|, with u the update per unit of learning rate

Sums are taken in float64, maxima in fp32, so that another machine gets the same maxima, and sums to 1e-9.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

SMALLEST_NORMAL = 2.0**-126
FP32_STEPS_PER_BF16_STEP = 1 << 16
_LARGEST = 1 << 1000


def larger(a: float, b: float) -> float:
    """The larger of two numbers; NaN when either is."""
    return a if a >= b or math.isnan(a) else b


@dataclass(slots=True)
class ErrorStats:
    """Base of the accumulators: fields named ``max_*`` merge by maximum, all others by sum."""

    @classmethod
    def total(cls, errors: Iterable[Self]) -> Self:
        """What was measured on all of several pieces, in their order."""
        total = cls()
        for error in errors:
            total.merge(error)
        return total

    def merge(self, later: Self) -> None:
        """Add what was measured on the elements that follow."""
        for field in fields(self):
            mine, other = getattr(self, field.name), getattr(later, field.name)
            merged = larger(mine, other) if field.name.startswith("max_") else mine + other
            setattr(self, field.name, merged)

    def to_json(self) -> dict[str, Any]:
        """Plain numbers."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def finite(self) -> bool:
        """Whether every figure is a finite number."""
        return all(math.isfinite(getattr(self, field.name)) for field in fields(self))

    def disagreement(self, other: Self, tolerance: float = 1e-9, *, all_close: bool = False) -> str | None:
        """The first figure that differs, or None. Sums differ beyond ``tolerance`` relative, maxima unless equal.

        With ``all_close`` the tolerance is that of maxima, too.
        """
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            exact = (field.name.startswith("max_") and not all_close) or isinstance(mine, int)
            if not (mine == theirs if exact else math.isclose(mine, theirs, rel_tol=tolerance)):
                return f"{field.name} is {theirs!r}, measured {mine!r}"
        return None


@dataclass(slots=True)
class WeightError(ErrorStats):
    """Error of weights. ``sum_relative`` over ``count`` elements; ``max_steps`` in fp32 steps."""

    count: int = 0
    max_relative: float = 0.0
    sum_relative: float = 0.0
    max_steps: int = 0

    @property
    def mean_relative(self) -> float:
        """Mean relative error."""
        return self.sum_relative / self.count if self.count else 0.0

    @property
    def max_bf16_ulp(self) -> float:
        """The largest error in steps of bf16."""
        return self.max_steps / FP32_STEPS_PER_BF16_STEP


@dataclass(slots=True)
class NoiseError(ErrorStats):
    """Error energy against signal energy."""

    sum_square_error: float = 0.0
    sum_square: float = 0.0

    @property
    def nmse(self) -> float:
        """Normalised mean square error; 0 where there is no signal and no error."""
        if self.sum_square:
            return self.sum_square_error / self.sum_square
        return math.inf if self.sum_square_error else 0.0

    @property
    def snr_db(self) -> float | None:
        """Signal-to-noise ratio in decibels, or None where the error is zero."""
        nmse = self.nmse
        return -10 * math.log10(nmse) if 0 < nmse < math.inf else None


@dataclass(slots=True)
class MomentError(NoiseError):
    """Error of a moment; ``max_scaled`` relative to the scale of the group."""

    max_scaled: float = 0.0


@dataclass(slots=True)
class LatticeError(NoiseError):
    """Error of weights on a lattice; ``max_distance`` is the largest |w' - w|."""

    max_distance: float = 0.0


@dataclass(slots=True)
class StepError(ErrorStats):
    """Error of a parameter in the measure of a budget, see ``compressing.policy``; all are energies of weights.

    ``step`` is what one step of the optimizer moves, ``weight``, ``moment1`` and ``moment2`` what the errors of the
    three move. The error in steps is sqrt((weight + moment1 + moment2) / step), each summed over an optimizer.
    """

    step: float = 0.0
    weight: float = 0.0
    moment1: float = 0.0
    moment2: float = 0.0

    @property
    def energy(self) -> float:
        """What the errors move together."""
        return self.weight + self.moment1 + self.moment2


@dataclass(slots=True)
class UpdateError(NoiseError):
    """Error in update space, per unit of learning rate."""

    max_error: float = 0.0
    max_update: float = 0.0


def read_error(stored: Mapping[str, Any] | None) -> WeightError | LatticeError | MomentError | UpdateError | None:
    """The accumulator of a stored record, or None where nothing was measured or the record is of another kind."""
    kind: type[WeightError | LatticeError | MomentError | UpdateError]
    for kind in (WeightError, LatticeError, MomentError, UpdateError):
        if stored is not None and set(stored) == {field.name for field in fields(kind)}:
            return kind(**stored) if _plain(stored.values()) else None
    return None


def read_step_error(stored: Mapping[str, Any] | None) -> StepError | None:
    """The error in steps of a stored record of a parameter, or None where nothing was measured."""
    values: list[Any] = [(stored or {}).get(term.name) for term in fields(StepError)]
    return StepError(*values) if _plain(values) and min(values) >= 0 else None


def _plain(values: Iterable[Any]) -> bool:
    return all(isinstance(value, (int, float)) and abs(value) < _LARGEST for value in values)
