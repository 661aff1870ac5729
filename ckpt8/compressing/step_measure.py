"""The measure of a budget for one parameter: what one step moves, and what errors of weights and moments count.

``budget`` has the formulas. Sums over elements are taken without what all elements of a parameter have in common:

    step     m^2, for CAME with its confidence c it is v (m c)^2      weight   v dW^2
    moment1  dm^2, for CAME v (dm c)^2                                moment2  (e m)^2, e the relative error of sqrt(v)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.codecs.error_stats import StepError
from ckpt8.codecs.lattice import Lattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing.budget import carry
from ckpt8.compressing.parameters import OptimizerStep, Parameter
from ckpt8.compressing.plan import Measured, Refusal, Share, Unit


@dataclass(frozen=True, slots=True)
class StepScales:
    """What sums over the elements of a parameter are multiplied by."""

    step: float
    weight: float
    moment1: float
    moment2: float

    @classmethod
    def of(cls, parameter: Parameter | None) -> StepScales | None:
        """The scales of a parameter; None unless its step is known and divides by second moments."""
        if parameter is None or parameter.step is None or parameter.rule is None:
            return None
        if parameter.rule.kind == "came" and parameter.squares:
            return cls._of(parameter.step, parameter.rule, 0.0)
        if parameter.rule.divisor_eps is None or parameter.denominator is None:
            return None
        return cls._of(parameter.step, parameter.rule, carry(parameter.step.beta1, parameter.step.beta2))

    @classmethod
    def _of(cls, step: OptimizerStep, rule: UpdateRule, carried: float) -> StepScales:
        lr, reach = step.lr / rule.bias1, step.beta1 / (1.0 - step.beta1)
        return cls(lr * lr, 1.0 / rule.root_bias2**2, (lr * reach) ** 2, (lr * carried) ** 2)

    def apply(self, sums: StepError) -> StepError:
        """The error of a parameter from its sums."""
        return StepError(
            self.step * sums.step, self.weight * sums.weight, self.moment1 * sums.moment1, self.moment2 * sums.moment2
        )


def exceeded_share(shares: Mapping[int, Share], unit: Unit, error: StepError | None) -> Refusal | None:
    """Why codecs of a unit do not keep its share of a budget: what they err is too much, or unknown. None if they do.

    Steps that the budget chose may err as a sample does: see ``excess``. A known step makes an error of what it moves
    measurable; where it was not measured, or is no energy, the storages have to be exact.
    """
    step = unit.parameter.step if unit.parameter else None
    lossy = [stream for stream in unit.streams if stream.lossy and stream.index in shares]
    if step is None or not lossy:
        return None
    moved = {True: math.nan, False: math.nan}
    if error is not None and math.isfinite(error.step):
        moved = {True: error.weight, False: error.moment1 + error.moment2}
    for is_weight, energy in moved.items():
        own = [stream for stream in lossy if (stream.index == step.weight) == is_weight]
        has_fallen = any(stream.second is None for stream in own)
        if own and not 0 <= energy < math.inf and (has_fallen or error is not None):
            return Refusal("its error in steps is unknown", step.weight if is_weight else None)
        if has_fallen and energy > sum(shares[stream.index].allowed for stream in own):
            return Refusal("flash errs by more than the budget", step.weight if is_weight else None)
    return None


def excess(
    shares: Mapping[int, Share], found: Sequence[tuple[Unit, StepError | None]], steps: float
) -> tuple[float, Measured]:
    """How many times a budget of ``steps`` the largest error of an optimizer is, and what that tells of the source.

    ``found`` are the units with their errors. What rules decide does not count.
    """
    moved, errors = defaultdict[int, float](float), defaultdict[int, float](float)
    per_square: dict[int, float] = {}
    for unit, error in found:
        step = unit.parameter.step if unit.parameter else None
        if step is None or error is None or not error.finite:
            continue
        moved[step.optimizer] += error.step
        chosen = [stream for stream in unit.streams if stream.index in shares]
        if any(stream.index == step.weight for stream in chosen):
            errors[step.optimizer] += error.weight
        if any(stream.index != step.weight for stream in chosen):
            errors[step.optimizer] += error.moment1 + error.moment2
        for stream in chosen:
            if isinstance(stream.codec, Lattice):
                per_square[stream.index] = error.weight / step_of(stream.codec.k) ** 2
            elif isinstance(stream.codec, VScaled):
                per_square[stream.index] = error.moment1 / stream.codec.k**2
            elif isinstance(stream.codec, RowColumnLog):
                per_square[stream.index] = error.moment2 / stream.codec.S**2
    squares = (errors[optimizer] / energy for optimizer, energy in moved.items() if energy)
    return math.sqrt(max(squares, default=0.0)) / steps, Measured(moved, per_square)
