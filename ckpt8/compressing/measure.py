"""Measures the error of one chunk of a unit: the originals against what decoding gives.

``compress`` and ``verify --against`` both use it, so that they take the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from ckpt8.checkpoint.meaning.optimizer_state import UpdateRule
from ckpt8.checkpoint.meaning.replayed import Confidence, Order
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs.base import TILE, take
from ckpt8.codecs.error_measures import (
    Pair,
    factored_step_sums,
    lattice_error,
    moment_error,
    root,
    step_sums,
    update_error,
    weight_error,
)
from ckpt8.codecs.error_stats import StepError, UpdateError
from ckpt8.compressing import lockstep
from ckpt8.compressing.plan import Parameter, Replay, Unit, read_tensor
from ckpt8.compressing.unit_errors import (
    BudgetedTiles,
    Moments,
    StepScales,
    TiledErrors,
    UnitErrors,
    cuts_of,
    measure_packed,
    tiles_of,
)
from ckpt8.container.frames import FRAME
from ckpt8.core.backend import for_checkpoint, resolve
from ckpt8.core.tensors import Parts, Role


class _Factors(NamedTuple):
    """CAME's factored terms: its confidence, and 1 / sqrt(v) from its second moments."""

    confidence: Confidence | None = None
    squares: Confidence | None = None


class ErrorMeter:
    """Measures chunks of units of one checkpoint. Thread-safe; keeps CAME's factored statistics of the last parameter.

    ``backend`` is the one that codecs use for tensors on the CPU: the last digits of sums depend on it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.backend = for_checkpoint(sum(storage.nbytes for storage in checkpoint.storages))
        self._last: tuple[Parameter, _Factors] | None = None

    def measure(self, unit: Unit, start: int, originals: Sequence[torch.Tensor], parts: Sequence[Parts]) -> UnitErrors:
        """Measure the chunk that begins at element ``start``: one original and one set of parts for each stream.

        All must be on one device, which computes the errors.
        """
        tiled = self.tiled(unit, originals)
        if tiled is not None:
            self._add_tiles(tiled, unit, start, originals, parts)
            return tiled.result()
        errors, length, done = UnitErrors.for_unit(unit), len(originals[0]), 0
        whole = any(stream.codec.by_chunk or stream.codec.factored for stream in unit.streams)
        source = self._checkpoint
        decoded = None
        if whole:
            decoded = lockstep.decode(unit.streams, parts, originals, start, self.backend, source, reuse=True)
        elif self._has_kernels(unit, originals):
            done, tile_errors = measure_packed(unit, originals, parts)
            errors.merge(tile_errors)
        factors = self._factors(unit.parameter)
        # Tiles fit the cache of a CPU. On a GPU each would cost a wait for its result.
        step = done or (TILE if originals[0].device.type == "cpu" else FRAME)
        cuts = [cuts_of(stream, length, step) for stream in unit.streams]
        for position in range(done, length, step):
            run = slice(position, min(position + step, length))
            tile_parts = [take(p, cut[position // step]) for p, cut in zip(parts, cuts, strict=True)]
            tiles = [x[run].float() for x in originals]
            if decoded is None:
                there = lockstep.decode(unit.streams, tile_parts, tiles, start + position, self.backend, source)
            else:
                there = [y[run] for y in decoded]
            pairs = [(x, y.float()) for x, y in zip(tiles, there, strict=True)]
            self._measure_tile(unit, errors, factors, start + position, pairs, tile_parts)
        return errors

    def _has_kernels(self, unit: Unit, originals: Sequence[torch.Tensor]) -> bool:
        """Whether numba measures a chunk, if it has a kernel for its codecs."""
        is_replayed = unit.parameter is not None and unit.parameter.replay is not None
        return not is_replayed and resolve(self.backend, originals[0].device, len(originals[0])) == "numba"

    def tiled(self, unit: Unit, originals: Sequence[torch.Tensor]) -> TiledErrors | None:
        """Measures the tiles of a chunk in turn; None where ``measure`` needs the chunk whole."""
        tiles = BudgetedTiles.of(unit) if self._has_kernels(unit, originals) else None
        if tiles is None:
            return None
        rest = UnitErrors.for_unit(unit)
        return TiledErrors(unit, tiles, rest, partial(self._measure_tile, unit, rest, _Factors()))

    def _add_tiles(
        self,
        tiled: TiledErrors,
        unit: Unit,
        start: int,
        originals: Sequence[torch.Tensor],
        parts: Sequence[Parts],
    ) -> None:
        """Decode a chunk tile by tile, and measure it."""
        for run in tiles_of(len(originals[0])):
            xs = [x[run] for x in originals]
            there = [
                stream.codec.tile(part, stream.spec.dtype, start, run)
                for stream, part in zip(unit.streams, parts, strict=True)
            ]
            first = start + run.start
            decoded = lockstep.decode(unit.streams, there, xs, first, "numba", self._checkpoint, reuse=True)
            tiled.add(first, xs, decoded)

    def _measure_tile(
        self,
        unit: Unit,
        errors: UnitErrors,
        factors: _Factors,
        start: int,
        pairs: Sequence[Pair],
        parts: Sequence[Parts],
    ) -> None:
        sides: list[Pair] = []
        for stream, (x, y), part in zip(unit.streams, pairs, parts, strict=True):
            # Square roots count where the codec stores them, or the update is divided by them.
            is_second = stream.spec.role is Role.MOMENT2 or stream.codec.stores_roots
            roots = (root(x), root(y)) if is_second else None
            if stream.codec.measured_as == "weight":
                errors.streams[stream.index].merge(weight_error(x, y))
            elif stream.codec.measured_as == "lattice":
                errors.streams[stream.index].merge(lattice_error(x, y))
            elif stream.lossy:
                errors.streams[stream.index].merge(moment_error(x, y, stream.codec.group_scales(part), roots))
            sides.append(roots or (x, y))
        parameter = unit.parameter
        if parameter is None or parameter.rule is None:
            return
        if parameter.replay is None:
            updates = _updates(unit, parameter, parameter.rule, factors, start, sides)
            if errors.update is not None:
                errors.update.merge(update_error(*updates, parameter.rule.factor))
            if errors.steps is not None:
                errors.steps.merge(_step_error(unit, parameter, factors, start, pairs, sides, updates))
        elif errors.update is not None:
            was, there = (_by_key(unit, parameter.replay, [pair[side] for pair in pairs]) for side in (0, 1))
            if parameter.replay.is_whole:
                errors.pieces.append((was, there))
            else:
                errors.update.merge(_replayed_error(parameter.replay, was, there, Order((len(pairs[0][0]),))))

    def finish(self, unit: Unit, errors: UnitErrors) -> None:
        """Replay the step that takes the whole parameter, once all chunks of ``unit`` are merged into ``errors``.

        Without all of them the error of the update is unknown.
        """
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
        statistics = {key: self._statistic(*where) for key, where in replay.statistics.items()}
        errors.update = _replayed_error(replay, original | statistics, decoded | statistics, replay.order)

    def _statistic(self, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
        return read_tensor(self._checkpoint, storage, ref)

    def _factors(self, parameter: Parameter | None) -> _Factors:
        """CAME's factored terms; none of them for other rules."""
        if parameter is None or not parameter.confidence:
            return _Factors()
        last = self._last  # another thread may replace it at any time
        if last is None or last[0] is not parameter:
            given = parameter.confidence, parameter.squares if parameter.step else ()
            some = parameter.has_some_rows
            factors = [
                Confidence(*(self._statistic(*ref) for ref in pair), has_some_rows=some) if pair else None
                for pair in given
            ]
            self._last = last = (parameter, _Factors(*factors))
        return last[1]


def _updates(
    unit: Unit, parameter: Parameter, rule: UpdateRule, factors: _Factors, start: int, sides: Sequence[Pair]
) -> Pair:
    """The updates without their factor. ``sides`` by stream: m, or sqrt(v), of the original and as decoded."""
    place = {stream.index: k for k, stream in enumerate(unit.streams)}
    m = sides[place[parameter.moments["moment1"]]]
    v = sides[place[parameter.moments[parameter.denominator]]] if parameter.denominator else (None, None)
    confidence = factors.confidence.at(start, start + len(m[0]), m[0].device) if factors.confidence else None
    return rule.apply(m[0], v[0], confidence), rule.apply(m[1], v[1], confidence)


def _step_error(
    unit: Unit,
    parameter: Parameter,
    factors: _Factors,
    start: int,
    pairs: Sequence[Pair],
    sides: Sequence[Pair],
    updates: Pair,
) -> StepError:
    """The error in the measure of a budget. ``pairs`` and ``sides`` are by stream; these have roots of v."""
    scales = StepScales.of(parameter)
    if scales is None or parameter.step is None:
        raise AssertionError("errors are measured in steps only for a known step")
    place = {stream.index: k for k, stream in enumerate(unit.streams)}
    weight = None if parameter.step.weight is None else pairs[place[parameter.step.weight]]
    first = place[parameter.moments["moment1"]]
    second = None if parameter.denominator is None else place[parameter.moments[parameter.denominator]]
    if factors.squares is not None:
        inverse_roots = factors.squares.at(start, start + len(updates[0]), updates[0].device)
        sums = factored_step_sums(weight, updates, inverse_roots)
    elif second is not None:
        sums = step_sums(weight, pairs[first], pairs[second][0], sides[second])
    else:
        raise AssertionError("an error in steps needs second moments")
    # What comes back as it was errs by nothing, NaN too.
    if parameter.step.weight is not None and not unit.streams[place[parameter.step.weight]].lossy:
        sums.weight = 0.0
    if not unit.streams[first].lossy:
        sums.moment1 = 0.0
    if second is not None and not unit.streams[second].lossy:
        sums.moment2 = 0.0
    return scales.apply(sums)


def _by_key(unit: Unit, replay: Replay, values: Sequence[torch.Tensor]) -> Moments:
    """``values`` by stream, of the streams that a replayed step takes: on the CPU, where all its arithmetic is done.

    A whole step takes copies, since a buffer may hold the originals.
    """
    place = {stream.index: k for k, stream in enumerate(unit.streams)}
    moments = {key: values[place[index]].cpu() for key, index in replay.state.items()}
    return {key: x.clone() for key, x in moments.items()} if replay.is_whole else moments


def _replayed_error(replay: Replay, original: Moments, decoded: Moments, order: Order) -> UpdateError:
    return update_error(*replay.rule.first_updates(original, decoded, order), 1.0)
