"""Measures tiles in torch, on any device: the engine for every rule and every codec.

Its tensors are those of a device, or the memory of arrays. See ``measure`` for the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import numpy as np

from ckpt8.checkpoint.meaning.replayed import Confidence, Order
from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.codecs.companded8.reference import as_groups, root_of_tile
from ckpt8.codecs.error_stats import (
    SMALLEST_NORMAL,
    LatticeError,
    MomentError,
    StepError,
    UpdateError,
    WeightError,
    larger,
)
from ckpt8.compressing.coded import CodedMoments
from ckpt8.compressing.measure import UnitErrors, count_steps, scaled_steps
from ckpt8.compressing.momentum import StepSums
from ckpt8.compressing.plan import Parameter, Unit, read_beside, read_factors, read_tensor
from ckpt8.compressing.relative import SecondRoots
from ckpt8.core.arrays import as_tensor, as_tensors
from ckpt8.core.lazy import torch
from ckpt8.core.tensors import DType, Parts, Role

Pair = tuple["torch.Tensor", "torch.Tensor"]
"""A flat fp32 tile as it was, and as it comes back."""


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

    def begin(self, unit: Unit) -> TileErrors:
        """New sums for one chunk of ``unit``."""
        return TileErrors(unit, UnitErrors.for_unit(unit), self._factors(unit.parameter))

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


def _tensor(x: Any, dtype: DType) -> torch.Tensor:
    return as_tensor(x, dtype) if isinstance(x, np.ndarray) else cast("torch.Tensor", x)


def _tensors(parts: Mapping[str, Any]) -> Parts:
    return as_tensors(parts) if any(isinstance(part, np.ndarray) for part in parts.values()) else dict(parts)


@dataclass(slots=True)
class TileErrors:
    """The errors of a chunk, whose tiles come in turn."""

    by_torch: ClassVar[bool] = True

    _unit: Unit
    _errors: UnitErrors
    _factors: _Factors

    def add_packed(self, originals: Sequence[Any], parts: Sequence[Mapping[str, Any]], *, fills: bool) -> int:  # noqa: ARG002
        """How many elements can be measured from their parts: none, tiles have to be decoded."""
        return 0

    def add(
        self, first: int, originals: Sequence[Any], decoded: Sequence[Any], parts: Sequence[Mapping[str, Any]]
    ) -> None:
        """Add a tile whose first element has the index ``first``: tensors of one device, which measures, or arrays."""
        pairs = [
            (_tensor(x, stream.spec.dtype).float(), _tensor(y, stream.spec.dtype).float())
            for stream, x, y in zip(self._unit.streams, originals, decoded, strict=True)
        ]
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
                scales = codec.group_scales(_tensors(part))
                energies[stream.index] = moment_error(x, y, scales, roots)
                self._errors.streams[stream.index].merge(energies[stream.index])
            sides.append(roots or (x, y))
        if self._errors.sums is not None and (beside := self._factors.beside) is not None:
            elements = first, first + len(pairs[0][0]), pairs[0][0].device
            self._errors.sums.merge(_weight_sums(pairs[0], beside.followed(*elements), beside.roots(*elements)))
        elif self._errors.sums is not None:
            self._errors.sums.merge(_momentum_sums(self._unit, pairs, energies))
        self._add_update(first, pairs, sides, energies)

    def result(self) -> UnitErrors:
        """The errors of all tiles."""
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
