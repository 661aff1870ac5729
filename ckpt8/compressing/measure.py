"""Measures the error of one chunk of a unit: the originals against what decoding gives.

``compress`` and ``verify --against`` both use it, so that they take the same sums in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt8.checkpoint.meaning.confidence import Confidence
from ckpt8.checkpoint.meaning.replayed import Order
from ckpt8.checkpoint.tree import Checkpoint, StorageInfo, TensorRef
from ckpt8.codecs.cutting import TILE, pieces, take
from ckpt8.codecs.error_measures import moment_error, root, update_error, weight_error
from ckpt8.codecs.error_stats import ErrorStats, MomentError, UpdateError, WeightError
from ckpt8.compressing import lockstep
from ckpt8.compressing.parameters import Parameter, Replay
from ckpt8.compressing.plan import Stream, Unit, read_elements
from ckpt8.container.frames import FRAME
from ckpt8.core.backend import for_checkpoint, resolve
from ckpt8.core.tensors import DType, Parts, Role

Moments = Mapping[str, torch.Tensor]
"""Elements of the state of one parameter, by the key of its rule."""


@dataclass(slots=True)
class UnitErrors:
    """The errors of a unit: by stream index, and in update space where a moment is lossy and the rule is known.

    Those of a replayed step are known of exact moments too: its figure is that of all parameters, as in a replay.
    Empty where nothing is measured. ``pieces`` wait for ``ErrorMeter.finish`` where a step takes the whole parameter.
    """

    streams: dict[int, ErrorStats] = field(default_factory=dict)
    update: UpdateError | None = None
    pieces: list[tuple[Moments, Moments]] = field(default_factory=list)

    @classmethod
    def for_unit(cls, unit: Unit) -> UnitErrors:
        """New sums for the lossy streams and the rule of ``unit``, all zero."""
        kinds = {"weight": WeightError, "moment": MomentError}
        streams = {s.index: kinds[s.codec.measured_as]() for s in unit.streams if s.codec.measured_as is not None}
        has_rule = unit.parameter is not None and unit.parameter.rule is not None
        return cls(streams, UpdateError() if has_rule and unit.measured else None)

    def merge(self, later: UnitErrors) -> None:
        """Add the errors of the chunk that follows."""
        for index, error in later.streams.items():
            self.streams[index].merge(error)
        self.pieces += later.pieces
        if self.update is not None and later.update is not None:
            self.update.merge(later.update)


class ErrorMeter:
    """Measures chunks of units of one checkpoint. Thread-safe; keeps CAME's factored statistics of the last parameter.

    ``backend`` is the one that codecs use for tensors on the CPU: the last digits of sums depend on it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.backend = for_checkpoint(checkpoint.storages)
        self._last: tuple[Parameter, Confidence] | None = None

    def measure(self, unit: Unit, start: int, originals: Sequence[torch.Tensor], parts: Sequence[Parts]) -> UnitErrors:
        """Measure the chunk that begins at element ``start``: one original and one set of parts for each stream.

        All must be on one device, which computes the errors.
        """
        errors, length, done = UnitErrors.for_unit(unit), len(originals[0]), 0
        is_replayed = unit.parameter is not None and unit.parameter.replay is not None
        if resolve(self.backend, originals[0].device, length) == "numba" and not is_replayed:
            done = _measure_in_one_pass(unit, errors, originals, parts)
        confidence = self._confidence(unit.parameter)
        # Tiles fit the cache of a CPU. On a GPU each would cost a wait for its result.
        step = done or (TILE if originals[0].device.type == "cpu" else FRAME)
        cuts = [_cuts(stream, length, step) for stream in unit.streams]
        for position in range(done, length, step):
            run = slice(position, min(position + step, length))
            tile_parts = [take(p, cut[position // step]) for p, cut in zip(parts, cuts, strict=True)]
            tiles = [x[run].float() for x in originals]
            self._measure_tile(unit, errors, confidence, start + position, tiles, tile_parts)
        return errors

    def _measure_tile(
        self,
        unit: Unit,
        errors: UnitErrors,
        confidence: Confidence | None,
        start: int,
        originals: Sequence[torch.Tensor],
        parts: Sequence[Parts],
    ) -> None:
        sides: list[tuple[torch.Tensor, torch.Tensor]] = []
        decoded = [y.float() for y in lockstep.decode(unit.streams, parts, originals, start, self.backend)]
        for stream, x, part, y in zip(unit.streams, originals, parts, decoded, strict=True):
            # Square roots count where the codec stores them, or the update is divided by them.
            is_second = stream.spec.role is Role.MOMENT2 or stream.codec.stores_roots
            roots = (root(x), root(y)) if is_second else None
            if stream.codec.measured_as == "weight":
                errors.streams[stream.index].merge(weight_error(x, y))
            elif stream.lossy:
                errors.streams[stream.index].merge(moment_error(x, y, stream.codec.group_scales(part), roots))
            sides.append(roots or (x, y))
        if errors.update is None:
            return
        replay = unit.parameter.replay if unit.parameter else None
        if replay is None:
            errors.update.merge(_update_error(unit, confidence, start, sides))
            return
        piece = _by_key(unit, replay, originals), _by_key(unit, replay, decoded)
        if replay.is_whole:
            errors.pieces.append(piece)
        else:
            errors.update.merge(_replayed_error(replay, *piece, Order((len(originals[0]),))))

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
        statistics = {key: self._statistic(*each) for key, each in replay.statistics.items()}
        errors.update = _replayed_error(replay, original | statistics, decoded | statistics, replay.order)

    def _statistic(self, storage: StorageInfo, ref: TensorRef) -> torch.Tensor:
        values = read_elements(self._checkpoint, storage, ref.dtype, ref.offset, ref.numel)
        return values.as_strided(ref.shape, ref.stride).float().contiguous()

    def _confidence(self, parameter: Parameter | None) -> Confidence | None:
        """CAME's factored term; None for other rules."""
        if parameter is None or not parameter.confidence:
            return None
        last = self._last  # another thread may replace it at any time
        if last is None or last[0] is not parameter:
            rows, columns = (self._statistic(*each) for each in parameter.confidence)
            self._last = last = (parameter, Confidence(rows, columns))
        return last[1]


def _update_error(
    unit: Unit, confidence: Confidence | None, start: int, sides: Sequence[tuple[torch.Tensor, torch.Tensor]]
) -> UpdateError:
    """``sides`` by stream: m, or sqrt(v), of the original and as decoded."""
    parameter = unit.parameter
    if parameter is None or parameter.rule is None:
        raise AssertionError("update errors are measured only for a known rule")
    place = {stream.index: k for k, stream in enumerate(unit.streams)}
    m = sides[place[parameter.moments["moment1"]]]
    v = sides[place[parameter.moments[parameter.denominator]]] if parameter.denominator else (None, None)
    factors = confidence.at(start, start + len(m[0]), m[0].device) if confidence else None
    original, decoded = (parameter.rule.apply(m[k], v[k], factors) for k in (0, 1))
    return update_error(original, decoded, parameter.rule.factor)


def _by_key(unit: Unit, replay: Replay, values: Sequence[torch.Tensor]) -> Moments:
    """``values`` by stream, of the streams that a replayed step takes: on the CPU, where all its arithmetic is done.

    A whole step takes copies, since a buffer may hold the originals.
    """
    place = {stream.index: k for k, stream in enumerate(unit.streams)}
    found = {key: values[place[index]].cpu() for key, index in replay.state.items()}
    return {key: x.clone() for key, x in found.items()} if replay.is_whole else found


def _replayed_error(replay: Replay, original: Moments, decoded: Moments, order: Order) -> UpdateError:
    return update_error(*replay.rule.first_updates(original, decoded, order), 1.0)


def _measure_in_one_pass(
    unit: Unit, errors: UnitErrors, originals: Sequence[torch.Tensor], parts: Sequence[Parts]
) -> int:
    """Measure the first elements of a chunk with a fused kernel if there is one; return how many it measured."""
    from ckpt8.codecs import error_stats_numba as stats_numba
    from ckpt8.codecs.companded8.numba import BLOCK

    length, streams = len(originals[0]), unit.streams
    done = length // BLOCK * BLOCK
    tensors = [x[:done] for x in originals]
    parts = [take(p, _cuts(stream, length, done)[0]) for p, stream in zip(parts, streams, strict=True)]
    only = streams[0].codec
    if only.measured_as == "weight" and only.measured_in_one_pass and len(streams) == 1:
        errors.streams[streams[0].index].merge(stats_numba.weight_error(tensors[0], parts[0], only))  # type: ignore[arg-type]
        return done
    rule = unit.parameter.rule if unit.parameter else None
    places = _adam_places(unit)
    if errors.update is None or rule is None or rule.divisor_eps is None or places is None:
        return 0
    first, second = ((tensors[k], parts[k], streams[k].codec) for k in places)
    found = stats_numba.adam_errors(first, second, rule.divisor_eps, rule.factor)  # type: ignore[arg-type]
    for k, error in zip(places, found, strict=False):
        errors.streams[streams[k].index].merge(error)
    errors.update.merge(found[-1])
    return done


def _cuts(stream: Stream, numel: int, step: int) -> list[Mapping[str, slice]]:
    return [cuts for _, cuts in pieces(stream.codec, stream.spec.dtype, numel, step)]


def _adam_places(unit: Unit) -> tuple[int, int] | None:
    """The places of the first and second moment in the streams; None unless these are all, fp32 and companded."""
    places = {stream.index: k for k, stream in enumerate(unit.streams)}
    moments = unit.parameter.moments if unit.parameter else {}
    if len(places) != 2 or moments.keys() != {"moment1", "moment2"}:
        return None
    first, second = places[moments["moment1"]], places[moments["moment2"]]
    roots = [unit.streams[k].codec.stores_roots for k in (first, second)]
    fits = all(each.spec.dtype is DType.FLOAT32 and each.codec.measured_in_one_pass for each in unit.streams)
    return (first, second) if fits and roots == [False, True] else None
