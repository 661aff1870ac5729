"""What an error in steps of the optimizer is expected to cost: the mean |loss - loss| of a resumed run, on its batches.

    noise    NOISE sqrt(S)        what a batch sees of an error in any direction; S is the energy of the error
    rise     RISE S / sqrt(M1)    what curvature adds; M1 is the energy of one step, see ``compressing.budget``

The constants are fitted to runs, see ``fixtures/bench/drift.json``. S weighs with v^, the square of gradients as the
optimizer got them; the loss follows gradients before they are clipped. A checkpoint does not state their norm, so the
constants hold for the median of the runs, 1.28 sqrt(sum(v^)), and the expectation is an interval: from mean / WIDTH to
mean * WIDTH.

CAME amplifies differences: within sixty steps they grow by a factor that depends on the run, and that no checkpoint
states. Two stable runs, stored eight times, drifted 3.3 to 25 times as far as others would. AMPLIFIED is the least
factor with which none of them drifts more than 1.5 times the mean: 25 / 1.5. A run at twice the rate is unstable: any
difference grows until the drift is 5e-3, one of 1e-7 in the weights as well. No expectation holds there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

NOISE = 0.65
RISE = 0.047
WIDTH = 2.0
AMPLIFIED = {"came": 16.5}
"""By the kind of an update rule."""


class ExpectedDrift(NamedTuple):
    """The mean |Δloss| that is expected, and the ends of its interval; where it ``is_open``, some runs exceed it."""

    mean: float
    low: float
    high: float
    is_open: bool = False


def expected_drift(error: float, step: float, kinds: Iterable[str] = ()) -> ExpectedDrift:
    """What an ``error`` is expected to cost where the optimizer moves ``step`` at once; both are energies.

    ``kinds`` are those of the update rules.
    """
    mean = NOISE * math.sqrt(error) + RISE * error / math.sqrt(step)
    factor = max((AMPLIFIED.get(kind, 1.0) for kind in kinds), default=1.0)
    mean *= factor
    return ExpectedDrift(mean, mean / WIDTH, mean * WIDTH, factor > 1)
