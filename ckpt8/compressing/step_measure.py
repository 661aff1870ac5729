"""The measure of a budget for one parameter: what one step moves, and what errors of weights and moments count.

``budget`` has the formulas. Sums over elements are taken without what all elements of a parameter have in common:

    step     m^2, for CAME with its confidence c it is v (m c)^2      weight   v dW^2
    moment1  dm^2, for CAME v (dm c)^2                                moment2  (e m)^2, e the relative error of sqrt(v)
"""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.codecs.error_stats import StepError
from ckpt8.compressing.budget import carry
from ckpt8.compressing.parameters import OptimizerStep, Parameter


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
