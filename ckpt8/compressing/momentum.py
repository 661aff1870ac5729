"""Errors in steps of optimizers without second moments: SGD with momentum, Lion and Muon.

An element of a tensor counts as B = mean(b^2), the mean square of its momentum b, does. Where gradients are white, the
mean square gradient is f B, so that f makes energies of such optimizers those of ``policy``. One step moves an element
by p, and an error of its momentum whose root mean square is e moves it by a e, before it has healed:

    M1 = f sum(B p^2)      S_W = f sum(B dW^2)      S_M = f sum(B (a^2 e^2 + h a e p))      S_W + S_M = c^2 M1

            p                               a                                                f
    SGD     lr sqrt(B)                      lr b / (1 - b)                                   (1 - b^2) / (1 - d)^2
    Lion    lr                              G lr / sqrt(B)                                   (1 + b2) / (1 - b2)
    Muon    .72 lr s / sqrt(max(r, c))      p / sqrt(B) b / (1 - b)                          (1 + b) / (1 - b)

    G = .8 b1 sqrt((1 - b2) / (1 + b2)) / ((1 - b2) sqrt((1 - b1)^2 + b1^2 (1 - b2) / (1 + b2)))

b is the momentum and d the dampening; a gets another factor b with Nesterov's. r and c are rows and columns of a
matrix, s is the scale that Muon has for its shape. Lion's p is what it is. SGD's and Muon's are estimates: Nesterov's
step has the next gradient in it, and an update of Muon has a root mean square from .48 to .95 of 1 / sqrt(max(r, c)).

Lion takes a sign. G is how far an error shifts the mean of these; it also flips single ones, which adds what goes with
e itself: h is sqrt(3) for Lion, 0 for the others. Under white gradients both together are right to 8 % from e of .0014
to .95 of sqrt(B), at betas of .9 and .99, and of .95 and .98.

An error of Muon's momentum changes its update mostly in directions where gradients are small. What it costs is that of
an error of the update as large as the relative error of the momentum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ckpt8.checkpoint.meaning.replayed import Replayed
from ckpt8.codecs.error_stats import ErrorStats, StepError
from ckpt8.container.steps import Origin

_MUON = 0.72
"""The root mean square of an update of Muon, times sqrt(max(rows, columns)): the mean over trained matrices."""

_LION = 0.8
"""sqrt(2 / pi): twice the density of a normal distribution at 0, where signs change."""


@dataclass(slots=True)
class StepSums(ErrorStats):
    """Sums over the elements of a parameter that a ``plan.Measure`` counts, and their number.

    ``square`` is that of what a step follows from, squared: momentum, or weights. ``second`` is that of v, ``weight``
    that of v dW^2, or of dW^2 where there is no v; ``moment1`` that of db^2.
    """

    square: float = 0.0
    second: float = 0.0
    weight: float = 0.0
    moment1: float = 0.0
    count: int = 0


@dataclass(frozen=True, slots=True)
class Momentum:
    """How a rule moves the elements of one tensor, per unit of learning rate.

    ``step`` is p and ``reach`` is a. With ``by_value`` p goes with sqrt(B) and a does not; else a goes with 1 / sqrt(B)
    and p is the same whatever B is. ``gain`` is f, ``flips`` is h. ``origin`` says what p is.
    """

    step: float
    reach: float
    gain: float
    by_value: bool
    origin: Origin
    flips: float = 0.0

    is_of_stream: ClassVar[bool] = True
    """Whether ``square`` is that of a stream."""

    @property
    def stated(self) -> dict[str, Origin]:
        """What a manifest says of the measure."""
        return {"momentum": self.origin}

    def weighs(self, sums: StepSums) -> float:
        """What the square of an error of a weight counts."""
        return self.gain * (sums.square / sums.count)

    def energies(self, lr: float, sums: StepSums) -> StepError:
        """What one step and the errors move, from sums over a tensor."""
        if not sums.count:
            return StepError()
        unit = self._unit(lr, sums)
        shift = self.reach * math.sqrt(sums.moment1 / sums.square) if sums.square else 0.0
        return StepError(
            unit * self.step * self.step, self.weighs(sums) * sums.weight, unit * shift * (shift + self.flips)
        )

    def error(self, lr: float, sums: StepSums, allowed: float) -> float:
        """The root mean square of an error of the momentum that moves ``allowed``."""
        unit, mean = self._unit(lr, sums), sums.square / sums.count
        if not (unit and self.reach):
            return math.inf
        part = 2 * allowed / unit
        return part / (self.flips + math.sqrt(self.flips**2 + 2 * part)) / self.reach * math.sqrt(mean)

    def _unit(self, lr: float, sums: StepSums) -> float:
        """What a tensor counts whose elements all move by ``lr``; by ``lr`` times sqrt(B) with ``by_value``."""
        return lr * lr * self.gain * sums.square * (sums.square / sums.count if self.by_value else 1.0)

    @classmethod
    def of(cls, rule: Replayed, shape: tuple[int, ...]) -> Momentum | None:
        """That of a parameter of ``shape``; None for other rules, without momentum, and for a Muon of no matrix."""
        find = {"sgd": _sgd, "lion": _lion}.get(rule.card.rule_id, _muon if rule.card.name == "Muon" else None)
        return None if find is None else find(rule.arguments, shape)


def _sgd(given: Mapping[str, Any], _: tuple[int, ...]) -> Momentum | None:
    beta, rest = given["momentum"], 1 - given["dampening"]
    if not (0 < beta < 1 and rest > 0):
        return None
    reach = beta / (1 - beta) * (beta if given["nesterov"] else 1)
    return Momentum(1.0, reach, (1 - beta * beta) / (rest * rest), by_value=True, origin="estimate")


def _lion(given: Mapping[str, Any], _: tuple[int, ...]) -> Momentum | None:
    beta1, beta2 = given["betas"]
    if not (0 <= beta1 < 1 and 0 <= beta2 < 1):
        return None
    memory = beta1 * math.sqrt((1 - beta2) / (1 + beta2))
    reach = _LION * memory / ((1 - beta2) * math.hypot(1 - beta1, memory))
    return Momentum(1.0, reach, (1 + beta2) / (1 - beta2), by_value=False, origin="known", flips=math.sqrt(3))


def _muon(given: Mapping[str, Any], shape: tuple[int, ...]) -> Momentum | None:
    beta = given["momentum"]
    if len(shape) != 2 or not (0 < beta < 1 and math.prod(shape)):
        return None
    rows, columns = shape
    is_matched = given.get("use_adjusted_lr") or given.get("adjust_lr_fn") == "match_rms_adamw"
    scale = 0.2 * math.sqrt(max(rows, columns)) if is_matched else math.sqrt(max(1, rows / columns))
    step = _MUON * scale / math.sqrt(max(rows, columns))
    reach = step * beta / (1 - beta) * (beta if given.get("nesterov", True) else 1)
    return Momentum(step, reach, (1 + beta) / (1 - beta), by_value=False, origin="estimate")
