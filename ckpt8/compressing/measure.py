"""Measures the errors of a unit: tiles of the originals against what decoding gives. ``error_stats`` has the figures.

Two engines take them: torch, on any device, and ``measure_numba``, on a CPU, for units whose update divides by second
moments or has no rule. Their maxima are equal bit for bit, their sums to 1e-9 of themselves.

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
from typing import TYPE_CHECKING, NamedTuple

from ckpt8.checkpoint.meaning.replayed import Confidence, Order
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.companded8.reference import as_groups, root_of_tile
from ckpt8.codecs.error_stats import (
    SMALLEST_NORMAL,
    ErrorStats,
    LatticeError,
    MomentError,
    StepError,
    UpdateError,
    WeightError,
    larger,
)
from ckpt8.codecs.lattice import Lattice, MomentLattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing.coded import CodedMoments
from ckpt8.compressing.momentum import StepSums
from ckpt8.compressing.plan import (
    Measure,
    Measured,
    Parameter,
    Refusal,
    Share,
    Unit,
    read_beside,
    read_factors,
    read_tensor,
)
from ckpt8.compressing.policy import carry
from ckpt8.compressing.relative import SecondRoots
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import Parts, Role

if TYPE_CHECKING:
    from ckpt8.compressing.measure_numba import BlockSums

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""A flat fp32 tile as it was, and as it comes back."""

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


def _largest(x: torch.Tensor) -> float:
    """The largest magnitude, in one pass; NaN if there is one."""
    low, high = x.aminmax()
    return larger(-float(low), float(high))


def _square_sum(x: torch.Tensor) -> float:
    wide = x.double()
    # cuBLAS would keep a workspace for every thread.
    return float(wide.dot(wide) if x.device.type == "cpu" else wide.square().sum())


def weight_error(original: torch.Tensor, decoded: torch.Tensor) -> WeightError:
    """Measure a flat fp32 tile of weights."""
    relative = (decoded - original).abs_().div_(original.abs().clamp_min_(SMALLEST_NORMAL))
    steps = _largest(decoded.view(torch.int32) - original.view(torch.int32))
    return WeightError(original.numel(), float(relative.amax()), float(relative.sum(dtype=torch.float64)), int(steps))


def moment_error(
    original: torch.Tensor,
    decoded: torch.Tensor,
    scales: torch.Tensor | None,
    roots: Pair | None = None,
) -> MomentError:
    """Measure a flat fp32 tile of a moment. ``scales`` is the fp32 scale of each group of 32, if any.

    ``roots`` are the square roots of ``original`` and ``decoded`` for a second moment, else None.
    """
    error = decoded - original
    noise, signal = _square_sum(error), _square_sum(original)
    if scales is None:
        return MomentError(noise, signal)
    largest = as_groups(error if roots is None else roots[1] - roots[0]).abs().amax(1)
    # A zero group has no scale and no error.
    return MomentError(noise, signal, float(largest.mul_(scales.sign()).div_(scales.clamp_min(SMALLEST_NORMAL)).amax()))


def update_error(original: torch.Tensor, decoded: torch.Tensor, factor: float) -> UpdateError:
    """Measure a flat fp32 tile of updates, both given without their ``factor``."""
    error = decoded - original
    return UpdateError(
        _square_sum(error) * factor * factor,
        _square_sum(original) * factor * factor,
        _largest(error) * factor,
        _largest(original) * factor,
    )


def lattice_error(original: torch.Tensor, decoded: torch.Tensor) -> LatticeError:
    """Measure a flat fp32 tile of weights on a lattice."""
    error = decoded - original
    return LatticeError(_square_sum(error), _square_sum(original), _largest(error))


def step_sums(weight: Pair | None, m: torch.Tensor, error: MomentError, roots: Pair) -> StepError:
    """Sums over a tile in the measure of a budget, without the factors of its parameter.

    They are the sums of m^2, v dW^2, dm^2 and (e m)^2, with e the relative error of sqrt(v), 0 where v is 0. ``error``
    is that of m; ``roots`` are the square roots of second moments and of these as they come back.
    """
    root, decoded = roots
    moved = (decoded - root).mul_(root.sign()).div_(root.clamp_min(SMALLEST_NORMAL)).mul_(m)
    weighed = 0.0 if weight is None else _square_sum((weight[1] - weight[0]).mul_(root))
    return StepError(error.sum_square, weighed, error.sum_square_error, _square_sum(moved))


def factored_step_sums(weight: Pair | None, update: Pair, inverse_roots: torch.Tensor) -> StepError:
    """Sums over a tile of CAME: of v u^2, v dW^2 and v du^2. ``inverse_roots`` are 1 / sqrt(v)."""
    u, decoded = update
    weighed = 0.0 if weight is None else _square_sum((weight[1] - weight[0]).div_(inverse_roots))
    return StepError(_square_sum(u / inverse_roots), weighed, _square_sum((decoded - u).div_(inverse_roots)))


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
) -> tuple[float, Measured]:
    """How many times a budget of ``steps`` the largest error of an optimizer is, and what that tells of the source.

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
    return math.sqrt(max(squares, default=0.0)) / steps, Measured(moved, per_square)


class _Factors(NamedTuple):
    """CAME's confidence, and 1 / sqrt(v) from its second moments; ``beside`` is for weights without these."""

    confidence: Confidence | None = None
    squares: Confidence | None = None
    beside: SecondRoots | CodedMoments | None = None


class ErrorMeter:
    """Measures units of one checkpoint. Thread-safe; keeps the factored statistics of the last parameter."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._last: tuple[Parameter, _Factors] | None = None

    def begin(self, unit: Unit, blocks: BlockSums | None) -> ChunkErrors:
        """New sums for one chunk of ``unit``; ``blocks`` measure what numba can."""
        return ChunkErrors(unit, UnitErrors.for_unit(unit), self._factors(unit.parameter), blocks)

    def finish(self, unit: Unit, errors: UnitErrors) -> None:
        """Take what takes the whole parameter, once all chunks of ``unit`` are merged into ``errors``.

        That is what its elements count, and the replay of its step: without all chunks the error of the update is
        unknown.
        """
        count_steps(unit, errors)
        replay = unit.parameter.replay if unit.parameter else None
        pieces, errors.pieces = errors.pieces, []
        if replay is None or errors.update is None or not pieces:
            return
        original, decoded = (
            {key: torch.cat([piece[side][key] for piece in pieces]) for key in replay.state} for side in (0, 1)
        )
        if len(next(iter(original.values()))) < unit.numel:
            errors.update = None
            return
        statistics = {key: read_tensor(self._checkpoint, *where) for key, where in replay.statistics.items()}
        updates = replay.rule.first_updates(original | statistics, decoded | statistics, replay.order)
        errors.update = update_error(*updates, 1.0)

    def _factors(self, parameter: Parameter | None) -> _Factors:
        """What weighs elements besides the streams of a unit, read once a parameter."""
        if parameter is None or not (parameter.confidence or parameter.squares):
            return _Factors()
        last = self._last  # another thread may replace it at any time
        if (last is None or last[0] is not parameter) and parameter.measure is not None:
            self._last = last = (parameter, _Factors(beside=read_beside(self._checkpoint, parameter)))
        elif last is None or last[0] is not parameter:
            factors = [
                read_factors(self._checkpoint, parameter, pair) if pair else None
                for pair in (parameter.confidence, parameter.squares if parameter.step else ())
            ]
            self._last = last = (parameter, _Factors(factors[0], factors[1]))
        return last[1]


@dataclass(slots=True)
class ChunkErrors:
    """The errors of a chunk, whose tiles come in turn: in ``blocks`` what numba measures, all else in ``_errors``."""

    _unit: Unit
    _errors: UnitErrors
    _factors: _Factors
    _blocks: BlockSums | None

    def add_packed(self, originals: Sequence[torch.Tensor], parts: Sequence[Parts], *, fills: bool) -> int:
        """Measure the first elements of a chunk from its parts, and with ``fills`` fill those of lossy streams before.

        Returns how many elements these are: 0 where tiles have to be decoded. Raises RefusedError.
        """
        return 0 if self._blocks is None else self._blocks.add_packed(originals, parts, fills=fills)

    def add(
        self, first: int, originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor], parts: Sequence[Parts]
    ) -> None:
        """Add a tile whose first element has the index ``first``. All tensors are on one device, which measures."""
        done = 0 if self._blocks is None else self._blocks.add(originals, decoded, parts)
        if done == len(originals[0]):
            return
        rest = slice(done, len(originals[0]))
        pairs = [(x[rest].float(), y[rest].float()) for x, y in zip(originals, decoded, strict=True)]
        sides: list[Pair] = []
        energies: dict[int, MomentError] = {}
        for stream, (x, y), part in zip(self._unit.streams, pairs, parts, strict=True):
            codec, roots = stream.codec, None
            # Square roots count where the codec stores them, or the update is divided by them.
            if stream.spec.role is Role.MOMENT2 or codec.stores_roots:
                roots = root_of_tile(x), root_of_tile(y)
            if codec.measured_as == "weight":
                self._errors.streams[stream.index].merge(weight_error(x, y))
            elif codec.measured_as == "lattice":
                self._errors.streams[stream.index].merge(lattice_error(x, y))
            elif codec.measured_as == "moment":
                scales = codec.group_scales(codec.tile(part, stream.spec.dtype, first, rest))
                energies[stream.index] = moment_error(x, y, scales, roots)
                self._errors.streams[stream.index].merge(energies[stream.index])
            sides.append(roots or (x, y))
        if self._errors.sums is not None and (beside := self._factors.beside) is not None:
            elements = first + done, first + len(originals[0]), originals[0].device
            self._errors.sums.merge(_weight_sums(pairs[0], beside.followed(*elements), beside.roots(*elements)))
        elif self._errors.sums is not None:
            self._errors.sums.merge(_momentum_sums(self._unit, pairs, energies))
        self._add_update(first + done, pairs, sides, energies)

    def result(self) -> UnitErrors:
        """The errors of all tiles."""
        if self._blocks is not None:
            self._errors.merge(self._blocks.result())
        return self._errors

    def _add_update(
        self, first: int, pairs: Sequence[Pair], sides: Sequence[Pair], energies: Mapping[int, MomentError]
    ) -> None:
        """Measure a tile in update space and in steps.

        In ``sides`` are roots of the second moments of ``pairs``, in ``energies`` the errors of lossy moments.
        """
        parameter, errors = self._unit.parameter, self._errors
        if parameter is None or (rule := parameter.rule) is None:
            return
        place = {stream.index: k for k, stream in enumerate(self._unit.streams)}
        if (replay := parameter.replay) is None:
            m = sides[place[parameter.moments["moment1"]]]
            v = sides[place[parameter.moments[parameter.denominator]]] if parameter.denominator else (None, None)
            confidence = self._factors.confidence
            at = confidence.at(first, first + len(m[0]), m[0].device) if confidence else None
            updates = rule.apply(m[0], v[0], at), rule.apply(m[1], v[1], at)
            if errors.update is not None:
                errors.update.merge(update_error(*updates, rule.factor))
            if errors.steps is not None:
                errors.steps.merge(self._step_error(parameter, first, pairs, sides, updates, energies))
        elif errors.update is not None:
            # On the CPU, where all arithmetic of a replay is done.
            was, there = (
                {key: pairs[place[index]][side].cpu() for key, index in replay.state.items()} for side in (0, 1)
            )
            if replay.is_whole:
                # Copies, since a buffer may hold the tile.
                was, there = ({key: x.clone() for key, x in side.items()} for side in (was, there))
                errors.pieces.append((was, there))
            else:
                updates = replay.rule.first_updates(was, there, Order((len(pairs[0][0]),)))
                errors.update.merge(update_error(*updates, 1.0))

    def _step_error(
        self,
        parameter: Parameter,
        first: int,
        pairs: Sequence[Pair],
        sides: Sequence[Pair],
        updates: Pair,
        energies: Mapping[int, MomentError],
    ) -> StepError:
        """The error of a tile in the measure of a budget."""
        assert parameter.step is not None  # noqa: S101 - errors are measured in steps only for a known step
        place = {stream.index: k for k, stream in enumerate(self._unit.streams)}
        weight = None if parameter.step.weight is None else pairs[place[parameter.step.weight]]
        if self._factors.squares is not None:
            inverse_roots = self._factors.squares.at(first, first + len(updates[0]), updates[0].device)
            sums = factored_step_sums(weight, updates, inverse_roots)
        else:
            assert parameter.denominator is not None  # noqa: S101 - nor without second moments
            one, other = parameter.moments["moment1"], parameter.moments[parameter.denominator]
            m = pairs[place[one]][0]
            error = energies[one] if one in energies else MomentError(0.0, _square_sum(m))
            sums = step_sums(weight, m, error, sides[place[other]])
        return scaled_steps(self._unit, sums)


def exact_errors(unit: Unit, moment1: torch.Tensor) -> UnitErrors:
    """The errors of a unit that comes back bit for bit, from its first moments: how far one step moves it."""
    if measure_of(unit.parameter) is not None:
        errors = UnitErrors(sums=StepSums(_square_sum(moment1), count=len(moment1)))
        count_steps(unit, errors)
        return errors
    if step_scales(unit.parameter) is None:
        return UnitErrors()
    return UnitErrors(steps=scaled_steps(unit, StepError(_square_sum(moment1))))


def _momentum_sums(unit: Unit, pairs: Sequence[Pair], energies: Mapping[int, MomentError]) -> StepSums:
    """The sums of a tile; ``energies`` are the errors of lossy moments. What comes back as it was errs by nothing."""
    at = {stream.index: k for k, stream in enumerate(unit.streams)}
    assert unit.parameter is not None  # noqa: S101 - it has the momentum
    moment1, weight, moved = unit.parameter.moments["moment1"], unit.weight, 0.0
    error = energies.get(moment1) or MomentError(0.0, _square_sum(pairs[at[moment1]][0]))
    if weight is not None and unit.streams[at[weight]].lossy:
        here, there = pairs[at[weight]]
        moved = _square_sum(there - here)
    return StepSums(error.sum_square, 0.0, moved, error.sum_square_error, len(pairs[0][0]))


def _weight_sums(weight: Pair, followed: torch.Tensor | None, roots: torch.Tensor) -> StepSums:
    """The sums of a tile of weights, whose step follows from ``followed``, or from themselves; ``roots`` are sqrt(v).

    What comes back as it was errs by nothing.
    """
    here, there = weight
    square = _square_sum(here if followed is None else followed)
    return StepSums(square, _square_sum(roots), _square_sum((there - here).mul_(roots)), count=len(here))


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
