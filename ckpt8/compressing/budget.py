"""A budget: how far a container may be from its source, in steps of the optimizer.

Weigh an error dW of the weights by v^, the mean square gradient: S_W = sum(v^ dW^2), the variance of the change of the
loss that it makes. One step of the optimizer moves the weights by M1 = sum(lr^2 m^^2) in the same measure. An error of
c steps is S_W + S_M + S_V = c^2 M1, where the errors of the moments count what they will move:

    S_M = sum((lr b1 / (1 - b1))^2 dm^^2)       an error of m decays by b1 in each step
    S_V = G^2 sum(lr^2 (e m^)^2)                e is the relative error of sqrt(v)
    G^2 = g^2 (1 + b1 b2) / ((1 - b2^2) (1 - b1 b2))

G is how far an error that decays by b2 in each step carries a weight whose updates correlate by b1 from step to step.
m^ and v^ are free of bias. Each of the three gets the share c / sqrt(3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ckpt8.core.arguments import described
from ckpt8.core.errors import UsageError

LEAST_STEPS, MOST_STEPS = 0.01, 10.0

_LARGEST_U = 4.0
"""Errors of an update beyond it save nothing."""


@dataclass(frozen=True, slots=True)
class Budget:
    """An error of ``steps`` optimizer steps.

    ``u_max`` is twice the largest error of an update, in units of the learning rate. ``cap`` is the largest step of a
    lattice, in units of the RMS of its weights.
    """

    steps: float
    u_max: float
    cap: float

    @classmethod
    def of(cls, steps: float) -> Budget:
        """The budget of so many steps that somebody asked for. Raises UsageError unless from 0.01 to 10."""
        if not LEAST_STEPS <= steps <= MOST_STEPS:
            raise UsageError(
                f"a budget is a number of steps from {LEAST_STEPS:g} to {MOST_STEPS:g}, not {described(steps)}"
            )
        return cls(float(steps), min(_LARGEST_U, 2.0 ** math.floor(math.log2(steps))), 1.0)

    @property
    def share(self) -> float:
        """The steps that each of weights, first and second moments may take."""
        return self.steps / math.sqrt(3)


PRESET_BUDGETS = {"archive": Budget(1.0, 1.0, 0.25), "compact": Budget(0.15, 0.125, 0.25)}
"""The budgets of presets."""
