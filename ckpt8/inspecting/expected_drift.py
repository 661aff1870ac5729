"""What an error in steps of the optimizer is expected to cost: the mean |loss - loss| of a resumed run, on its batches.

    noise    NOISE sqrt(S)        what a batch sees of an error in any direction; S is the energy of the error
    rise     RISE S / sqrt(M1)    what curvature adds; M1 is the energy of one step, see ``compressing.budget``

The constants are fitted to runs, see ``fixtures/bench/drift.json``. S weighs with v^, the square of gradients as the
optimizer got them; the loss follows gradients before they are clipped. A checkpoint does not state their norm, so the
constants hold for the median of the runs, 1.28 sqrt(sum(v^)), and the expectation is an interval: from mean / WIDTH to
mean * WIDTH.

Second moments and rates do not tell everything in four cases, where the interval is wider:

* A decay of d in each step takes its part of the error. Over HORIZON steps (1 - exp(-HORIZON d)) / (HORIZON d) is left
  of the mean at least.
* In the first YOUNG steps some runs amplify differences: adapters at a large rate drifted 20 times as far, GPT-2 2.6.
* A decay that is part of the gradient is part of v^ too, and the loss does not follow it: the drift may be any smaller.
* A rate of 0 counts as a part of the initial one. While it is 0, errors of moments move nothing; the next is unknown.

CAME amplifies differences: within sixty steps they grow by a factor that depends on the run, and that no checkpoint
states. Two stable runs, stored eight times, drifted 3.3 to 25 times as far as others would. AMPLIFIED is the least
factor with which none of them drifts more than 1.5 times the mean: 25 / 1.5. A run at twice the rate is unstable: any
difference grows until the drift is 5e-3, one of 1e-7 in the weights as well. No expectation holds there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ckpt8.codecs.error_stats import StepError

NOISE = 0.65
RISE = 0.047
WIDTH = 2.0
AMPLIFIED = {"came": 16.5}
"""By the kind of an update rule."""

HORIZON = 60
"""The steps over which drifts were measured."""

YOUNG = 100
"""The steps that a run has taken from which on no interval is open for its age."""

_MOST = 1e100


class ExpectedDrift(NamedTuple):
    """The mean |Δloss| that is expected, and the ends of its interval; where it ``is_open``, some runs exceed it."""

    mean: float
    low: float
    high: float
    is_open: bool = False


def expected_drift(error: StepError, steps: Iterable[Mapping[str, Any]] = ()) -> ExpectedDrift:
    """What an ``error`` is expected to cost in the loss.

    ``steps`` are the records of parameters as a manifest has them, each with the ``kind`` of its update rule and its
    ``age``: how many steps that has taken, 0 for unknown.
    """
    steps = list(steps)
    factor = max((AMPLIFIED.get(str(each.get("kind")), 1.0) for each in steps), default=1.0)
    is_idle = any(each.get("stated_rate") == 0 for each in steps)
    mean = _drift(error.energy, error.step)
    low = _drift(error.weight, error.step) if is_idle else mean
    if any(each.get("coupled_decay") for each in steps):
        low = 0.0
    rates = [number(each, "rate") * number(each, "decay") * HORIZON for each in steps]
    if (decay := max(rates, default=0.0)) > 0:
        low *= -math.expm1(-decay) / decay
    is_young = any(0 < number(each, "age") < YOUNG for each in steps)
    return ExpectedDrift(mean * factor, low / WIDTH, mean * factor * WIDTH, factor > 1 or is_idle or is_young)


def _drift(energy: float, step: float) -> float:
    return NOISE * math.sqrt(energy) + RISE * energy / math.sqrt(step)


def number(record: Mapping[str, Any], key: str) -> float:
    """A number from 0 on that a record states; 0 for anything else."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) and 0 <= value < _MOST else 0.0
