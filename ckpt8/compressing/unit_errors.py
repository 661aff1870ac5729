"""The errors of a unit: of a chunk at once by fused kernels on a CPU, which go over memory once, or in tiles.

The measure of a budget for one parameter is what one step moves, and what errors of weights and moments count.
``budget`` has the formulas. Sums over elements are taken without what all elements of a parameter have in common:

    step     m^2, for CAME with its confidence c it is v (m c)^2      weight   v dW^2
    moment1  dm^2, for CAME v (dm c)^2                                moment2  (e m)^2, e the relative error of sqrt(v)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.codecs.base import pieces, take
from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import ErrorStats, LatticeError, MomentError, StepError, UpdateError, WeightError
from ckpt8.codecs.lattice import Lattice, step_of
from ckpt8.codecs.rclog import RowColumnLog
from ckpt8.codecs.vscaled import VScaled
from ckpt8.compressing.plan import Measured, OptimizerStep, Parameter, Refusal, Share, Stream, Unit
from ckpt8.compressing.policy import carry
from ckpt8.core.tensors import DType, Parts


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
            elif isinstance(stream.codec, RowColumnLog):
                per_square[stream.index] = error.moment2 / stream.codec.S**2
    squares = (errors[optimizer] / energy for optimizer, energy in moved.items() if energy)
    return math.sqrt(max(squares, default=0.0)) / steps, Measured(moved, per_square)


_TILE = 1 << 17
"""Elements of a unit under a budget that are in memory more than once at a time: as many as fit the cache."""


def cuts_of(stream: Stream, numel: int, step: int) -> list[Mapping[str, slice]]:
    """The slices of the parts of every run of ``step`` elements; empty ones of a codec that takes chunks whole."""
    if stream.codec.by_chunk:
        return [{} for _ in range(0, numel, step)]
    return [cuts for _, cuts in pieces(stream.codec, stream.spec.dtype, numel, step)]


def measure_packed(unit: Unit, originals: Sequence[torch.Tensor], parts: Sequence[Parts]) -> tuple[int, UnitErrors]:
    """Decode and measure the first elements of a chunk; how many these are, 0 if there is no kernel for the unit."""
    from ckpt8.codecs import error_numba
    from ckpt8.codecs.companded8.numba import BLOCK

    length, streams = len(originals[0]), unit.streams
    done = length // BLOCK * BLOCK
    tensors = [x[:done] for x in originals]
    parts = [take(p, cuts_of(stream, length, done)[0]) for p, stream in zip(parts, streams, strict=True)]
    only = streams[0].codec
    if only.measured_as == "weight" and only.measured_in_one_pass and len(streams) == 1:
        error = error_numba.weight_error(tensors[0], parts[0], only)  # type: ignore[arg-type]
        return done, UnitErrors({streams[0].index: error})
    rule = unit.parameter.rule if unit.parameter else None
    places = _adam_places(unit)
    if rule is None or rule.divisor_eps is None or places is None:
        return 0, UnitErrors()
    first, second = ((tensors[k], parts[k], streams[k].codec) for k in places)
    *moments, update = error_numba.adam_errors(first, second, rule.divisor_eps, rule.factor)  # type: ignore[arg-type]
    return done, UnitErrors({streams[k].index: error for k, error in zip(places, moments, strict=True)}, update)


def _adam_places(unit: Unit) -> tuple[int, int] | None:
    """The places of the first and second moment in the streams; None unless these are all, fp32 and companded."""
    places = {stream.index: k for k, stream in enumerate(unit.streams)}
    moments = unit.parameter.moments if unit.parameter else {}
    if len(places) != 2 or moments.keys() != {"moment1", "moment2"}:
        return None
    first, second = places[moments["moment1"]], places[moments["moment2"]]
    roots = [unit.streams[k].codec.stores_roots for k in (first, second)]
    fits = all(stream.spec.dtype is DType.FLOAT32 and stream.codec.measured_in_one_pass for stream in unit.streams)
    return (first, second) if fits and roots == [False, True] else None


def tiles_of(numel: int) -> list[slice]:
    """The elements of a chunk under a budget, cut into tiles."""
    return [slice(start, min(start + _TILE, numel)) for start in range(0, numel, _TILE)]


class BudgetedTiles:
    """Measures the tiles of a chunk under a budget in turn."""

    def __init__(self, weight: int | None, moments: Sequence[int], rule: UpdateRule, scales: StepScales) -> None:
        from ckpt8.codecs.error_numba import BudgetedSums

        self._sums = BudgetedSums()
        self._weight, self._moments, self._rule, self._scales = weight, moments, rule, scales

    @classmethod
    def of(cls, unit: Unit) -> BudgetedTiles | None:
        """New sums, all zero; None unless all codecs of the unit are those of a budget."""
        parameter, scales = unit.parameter, StepScales.of(unit.parameter)
        rule = parameter.rule if parameter else None
        if parameter is None or parameter.step is None or rule is None or rule.divisor_eps is None or scales is None:
            return None
        weight, moments = parameter.step.weight, parameter.moments
        usual = dict.fromkeys(moments.values(), "moment") | ({} if weight is None else {weight: "lattice"})
        lossy = {
            stream.index: stream.codec.measured_as for stream in unit.streams if not stream.codec.measured_in_one_pass
        }
        if lossy != usual or len(moments) != 2:
            return None
        return cls(weight, [moments["moment1"], moments["moment2"]], rule, scales)

    def add(self, unit: Unit, originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor]) -> int:
        """Measure the elements that follow, by stream, but those behind the last whole block; how many these are."""
        from ckpt8.codecs.companded8.numba import BLOCK

        done = len(originals[0]) // BLOCK * BLOCK
        pairs: dict[int | None, Pair] = {
            stream.index: (x[:done].float(), y[:done].float())
            for stream, x, y in zip(unit.streams, originals, decoded, strict=True)
        }
        first, second = (pairs[index] for index in self._moments)
        assert self._rule.divisor_eps is not None  # noqa: S101 - ``of`` looked
        self._sums.add(pairs.get(self._weight), first, second, self._rule.divisor_eps)
        return done

    def result(self) -> UnitErrors:
        """The errors of all that was added."""
        *measured, update, steps = self._sums.errors(self._rule.factor)
        indices = self._weight, *self._moments
        errors: dict[int, ErrorStats] = {
            index: error for index, error in zip(indices, measured, strict=True) if index is not None
        }
        return UnitErrors(errors, update, self._scales.apply(steps))


Moments = Mapping[str, torch.Tensor]
"""Elements of the state of one parameter, by the key of its rule."""


@dataclass(slots=True)
class UnitErrors:
    """The errors of a unit: by stream index, and in update space where a moment is lossy and the rule is known.

    ``steps`` is its error in the measure of a budget, of exact parameters too: their steps count in those of the file.
    Those of a replayed step are known of exact moments too: its figure is that of all parameters, as in a replay.
    Empty where nothing is measured. ``pieces`` wait for ``ErrorMeter.finish`` where a step takes the whole parameter.
    """

    streams: dict[int, ErrorStats] = field(default_factory=dict)
    update: UpdateError | None = None
    steps: StepError | None = None
    pieces: list[tuple[Moments, Moments]] = field(default_factory=list)

    @classmethod
    def for_unit(cls, unit: Unit) -> UnitErrors:
        """New sums for the lossy streams and the rule of ``unit``, all zero."""
        kinds = {"weight": WeightError, "lattice": LatticeError, "moment": MomentError}
        streams = {s.index: kinds[s.codec.measured_as]() for s in unit.streams if s.codec.measured_as is not None}
        parameter = unit.parameter
        has_rule = parameter is not None and parameter.rule is not None
        replayed = parameter is not None and parameter.replay is not None
        moved = replayed or bool(streams)
        in_steps = StepScales.of(unit.parameter) is not None
        return cls(streams, UpdateError() if has_rule and moved else None, StepError() if in_steps else None)

    def merge(self, later: UnitErrors) -> None:
        """Add the errors of the chunk that follows."""
        for index, error in later.streams.items():
            self.streams[index].merge(error)
        self.pieces += later.pieces
        if self.update is not None and later.update is not None:
            self.update.merge(later.update)
        if self.steps is not None and later.steps is not None:
            self.steps.merge(later.steps)


@dataclass(frozen=True, slots=True)
class TiledErrors:
    """Measures the tiles of a chunk in turn: ``tiles`` its whole blocks, ``measure_rest`` what is behind the last."""

    unit: Unit
    tiles: BudgetedTiles
    rest: UnitErrors
    measure_rest: Callable[[int, Sequence[Pair], Sequence[Parts]], None]

    def add(self, first: int, originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor]) -> None:
        """Add the tile whose first element has the index ``first``: the elements of every stream."""
        done = self.tiles.add(self.unit, originals, decoded)
        if done < len(originals[0]):
            pairs = [(x[done:].float(), y[done:].float()) for x, y in zip(originals, decoded, strict=True)]
            self.measure_rest(first + done, pairs, [{}] * len(pairs))

    def result(self) -> UnitErrors:
        """The errors of all tiles."""
        errors = UnitErrors.for_unit(self.unit)
        errors.merge(self.tiles.result())
        errors.merge(self.rest)
        return errors
