"""What an error in steps of the optimizer is expected to cost: the mean |loss - loss| of a resumed run, on its batches.

    noise    NOISE sqrt(S)     any batch sees it; S is the energy of the error, see ``compressing.budget``
    rise     RISE c^2          curvature; c is the error in steps

The constants are fitted to runs. A checkpoint does not say whether gradients were clipped or how large batches are, so
that the expectation is an interval: from mean / WIDTH to mean * WIDTH.
"""

from __future__ import annotations

import math
from typing import NamedTuple

NOISE = 0.75
RISE = 3e-5
WIDTH = 2.0


class ExpectedDrift(NamedTuple):
    """The mean |Δloss| that is expected, and the ends of its interval."""

    mean: float
    low: float
    high: float


def expected_drift(energy: float, steps: float) -> ExpectedDrift:
    """What an error of so much ``energy``, and of so many ``steps``, is expected to cost."""
    mean = NOISE * math.sqrt(energy) + RISE * steps * steps
    return ExpectedDrift(mean, mean / WIDTH, mean * WIDTH)
