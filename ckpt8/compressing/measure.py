"""The errors of a unit: tiles of the originals against what decoding gives. ``error_stats`` has the figures.

Two engines take them: ``measure_torch``, on any device, and ``measure_numba``, on a CPU, for units whose update divides
by second moments or has no rule. Their maxima are equal bit for bit, their sums to 1e-9 of themselves.

The measure of a budget for one parameter is what one step moves, and what errors of weights and moments count.
``policy`` has the formulas. Sums over elements are taken without what all elements of a parameter have in common:

    step     m^2, for CAME with its confidence c it is v (m c)^2      weight   v dW^2
    moment1  dm^2, for CAME v (dm c)^2                                moment2  (e m)^2, e the relative error of sqrt(v)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from ckpt8.codecs.error_stats import ErrorStats, LatticeError, MomentError, StepError, UpdateError, WeightError
from ckpt8.codecs.lattice import Lattice, MomentLattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing.momentum import StepSums
from ckpt8.compressing.plan import Measure, Parameter, Refusal, Share, Unit
from ckpt8.compressing.policy import carry
from ckpt8.core.arrays import Array

if TYPE_CHECKING:
    import torch

Moments = Mapping[str, "torch.Tensor"]
"""Elements of the state of one parameter, by the key of its rule."""


@dataclass(slots=True)
class UnitErrors:
    """The errors of a unit: by stream index, and in update space where a moment is lossy and the rule is known.

    ``steps`` is its error in the measure of a budget, of exact parameters too: their steps count in those of the file.
    Those of a replayed step are known of exact moments too: its figure is that of all parameters, as in a replay.
    Empty where nothing is measured. ``sums`` and ``pieces`` wait for ``ErrorMeter.finish``: what an element counts, or
    a step, takes the whole parameter.
    """

    streams: dict[int, ErrorStats] = field(default_factory=dict)
    update: UpdateError | None = None
    steps: StepError | None = None
    sums: StepSums | None = None
    pieces: list[tuple[Moments, Moments]] = field(default_factory=list)

    @classmethod
    def for_unit(cls, unit: Unit) -> UnitErrors:
        """New sums for the lossy streams and the rule of ``unit``, all zero."""
        kinds = {"weight": WeightError, "lattice": LatticeError, "moment": MomentError}
        streams = {s.index: kinds[s.codec.measured_as]() for s in unit.streams if s.codec.measured_as is not None}
        parameter = unit.parameter
        moved = parameter is not None and parameter.rule is not None and (parameter.replay is not None or streams)
        return cls(
            streams,
            UpdateError() if moved else None,
            StepError() if step_scales(parameter) is not None else None,
            StepSums() if measure_of(parameter) is not None else None,
        )

    def merge(self, later: UnitErrors) -> None:
        """Add the errors of the chunk that follows."""
        for index, error in later.streams.items():
            self.streams[index].merge(error)
        self.pieces += later.pieces
        if self.update is not None and later.update is not None:
            self.update.merge(later.update)
        if self.steps is not None and later.steps is not None:
            self.steps.merge(later.steps)
        if self.sums is not None and later.sums is not None:
            self.sums.merge(later.sums)


def measure_of(parameter: Parameter | None) -> Measure | None:
    """How known steps of a parameter are counted whose second moments are no stream; None for others."""
    return parameter.measure if parameter is not None and parameter.step is not None else None


def step_scales(parameter: Parameter | None) -> StepError | None:
    """What sums over the elements of a parameter are multiplied by.

    None unless its step is known and divides by second moments.
    """
    if parameter is None or (step := parameter.step) is None or (rule := parameter.rule) is None:
        return None
    if rule.kind == "came" and parameter.squares:
        carried = 0.0
    elif rule.divisor_eps is None or parameter.denominator is None:
        return None
    else:
        carried = carry(step.beta1, step.beta2)
    lr, reach = step.lr / rule.bias1, step.beta1 / (1.0 - step.beta1)
    return StepError(lr * lr, 1.0 / rule.root_bias2**2, (lr * reach) ** 2, (lr * carried) ** 2)


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
        has_fallen = any(stream.fallback_codec is None for stream in own)
        if own and not 0 <= energy < math.inf and (has_fallen or error is not None):
            return Refusal("its error in steps is unknown", step.weight if is_weight else None)
        if has_fallen and energy > sum(shares[stream.index].allowed for stream in own):
            return Refusal("flash errs by more than the budget", step.weight if is_weight else None)
    return None


def excess(
    shares: Mapping[int, Share], units: Sequence[tuple[Unit, StepError | None]], steps: float
) -> tuple[float, Mapping[int, float], Mapping[int, float]]:
    """How many times a budget of ``steps`` the largest error of an optimizer is, and the mappings of ``Measured``.

    ``units`` are the units with their errors. What rules decide does not count.
    """
    moved, errors = defaultdict[int, float](float), defaultdict[int, float](float)
    per_square: dict[int, float] = {}
    for unit, error in units:
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
            elif isinstance(stream.codec, MomentLattice):
                per_square[stream.index] = error.moment1 / step_of(stream.codec.k) ** 2
            elif isinstance(stream.codec, RowColumnLog):
                per_square[stream.index] = error.moment2 / stream.codec.S**2
    squares = (errors[optimizer] / energy for optimizer, energy in moved.items() if energy)
    return math.sqrt(max(squares, default=0.0)) / steps, moved, per_square


class ChunkErrors(Protocol):
    """The errors of a chunk, whose tiles come in turn. ``by_torch`` says who measures."""

    by_torch: ClassVar[bool]

    def add_packed(self, originals: Sequence[Any], parts: Sequence[Mapping[str, Any]], *, fills: bool) -> int:
        """Measure the chunk from its parts, and with ``fills`` fill those of lossy streams before.

        Returns how many elements these are: all, or 0 where tiles have to be decoded. Raises RefusedError.
        """

    def add(
        self, first: int, originals: Sequence[Any], decoded: Sequence[Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add a tile whose first element has the index ``first``."""

    def result(self) -> UnitErrors:
        """The errors of all tiles."""


def exact_errors(unit: Unit, moment1: Array) -> UnitErrors:
    """The errors of a unit that comes back bit for bit, from its first moments in float64: how far a step moves it."""
    if measure_of(unit.parameter) is not None:
        errors = UnitErrors(sums=StepSums(float(np.square(moment1).sum()), count=len(moment1)))
        count_steps(unit, errors)
        return errors
    if step_scales(unit.parameter) is None:
        return UnitErrors()
    return UnitErrors(steps=scaled_steps(unit, StepError(float(np.square(moment1).sum()))))


def count_steps(unit: Unit, errors: UnitErrors) -> None:
    """Make the error in steps of sums over a whole parameter, or over a sample of it."""
    sums, errors.sums = errors.sums, None
    parameter = unit.parameter
    if sums is not None and parameter is not None and parameter.step is not None and parameter.measure is not None:
        errors.steps = parameter.measure.energies(parameter.step.lr, sums)


def scaled_steps(unit: Unit, sums: StepError) -> StepError:
    """The error in steps of a unit whose step is known, from sums over its elements.

    What comes back as it was errs by nothing, NaN too.
    """
    parameter, scales = unit.parameter, step_scales(unit.parameter)
    assert parameter is not None and parameter.step is not None and scales is not None  # noqa: S101, PT018
    lossy = {stream.index for stream in unit.streams if stream.lossy}
    moments = parameter.moments
    return StepError(
        scales.step * sums.step,
        scales.weight * sums.weight if parameter.step.weight in lossy else 0.0,
        scales.moment1 * sums.moment1 if moments["moment1"] in lossy else 0.0,
        scales.moment2 * sums.moment2 if moments.get(parameter.denominator or "") in lossy else 0.0,
    )
