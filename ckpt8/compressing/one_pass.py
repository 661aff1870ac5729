"""Measures a chunk of the usual units on a CPU with fused kernels: each goes over memory once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule
from ckpt8.codecs.cutting import pieces, take
from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import ErrorStats, StepError, UpdateError
from ckpt8.compressing.plan import Stream, Unit
from ckpt8.compressing.step_measure import StepScales
from ckpt8.core.tensors import DType, Parts

_TILE = 1 << 17
"""Elements of a unit under a budget that are in memory more than once at a time: as many as fit the cache."""


@dataclass(frozen=True, slots=True)
class OnePass:
    """The errors of the first ``done`` elements of a chunk: by stream index, of the update, and in steps."""

    done: int = 0
    streams: Mapping[int, ErrorStats] = field(default_factory=dict)
    update: UpdateError | None = None
    steps: StepError | None = None


def cuts_of(stream: Stream, numel: int, step: int) -> list[Mapping[str, slice]]:
    """The slices of the parts of every run of ``step`` elements; empty ones of a codec that takes chunks whole."""
    if stream.codec.by_chunk:
        return [{} for _ in range(0, numel, step)]
    return [cuts for _, cuts in pieces(stream.codec, stream.spec.dtype, numel, step)]


def measure_packed(unit: Unit, originals: Sequence[torch.Tensor], parts: Sequence[Parts]) -> OnePass:
    """Decode and measure the first elements of a chunk; none of them if there is no kernel for the unit."""
    from ckpt8.codecs import error_stats_numba as stats_numba
    from ckpt8.codecs.companded8.numba import BLOCK

    length, streams = len(originals[0]), unit.streams
    done = length // BLOCK * BLOCK
    tensors = [x[:done] for x in originals]
    parts = [take(p, cuts_of(stream, length, done)[0]) for p, stream in zip(parts, streams, strict=True)]
    only = streams[0].codec
    if only.measured_as == "weight" and only.measured_in_one_pass and len(streams) == 1:
        error = stats_numba.weight_error(tensors[0], parts[0], only)  # type: ignore[arg-type]
        return OnePass(done, {streams[0].index: error})
    rule = unit.parameter.rule if unit.parameter else None
    places = _adam_places(unit)
    if rule is None or rule.divisor_eps is None or places is None:
        return OnePass()
    first, second = ((tensors[k], parts[k], streams[k].codec) for k in places)
    *found, update = stats_numba.adam_errors(first, second, rule.divisor_eps, rule.factor)  # type: ignore[arg-type]
    return OnePass(done, {streams[k].index: error for k, error in zip(places, found, strict=True)}, update)


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


def tiles_of(numel: int) -> list[slice]:
    """The elements of a chunk under a budget, cut into tiles."""
    return [slice(start, min(start + _TILE, numel)) for start in range(0, numel, _TILE)]


class BudgetedTiles:
    """Measures the tiles of a chunk under a budget in turn."""

    def __init__(self, weight: int | None, moments: Sequence[int], rule: UpdateRule, scales: StepScales) -> None:
        from ckpt8.codecs.budgeted_stats_numba import BudgetedSums

        self._sums = BudgetedSums()
        self._weight, self._moments, self._rule, self._scales = weight, moments, rule, scales
        self._done = 0

    @classmethod
    def of(cls, unit: Unit) -> BudgetedTiles | None:
        """New sums, all zero; None unless all codecs of the unit are those of a budget."""
        parameter, scales = unit.parameter, StepScales.of(unit.parameter)
        rule = parameter.rule if parameter else None
        if parameter is None or parameter.step is None or rule is None or rule.divisor_eps is None or scales is None:
            return None
        weight, moments = parameter.step.weight, parameter.moments
        usual = dict.fromkeys(moments.values(), "moment") | ({} if weight is None else {weight: "noise"})
        lossy = {each.index: each.codec.measured_as for each in unit.streams if not each.codec.measured_in_one_pass}
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
        assert self._rule.divisor_eps is not None  # noqa: S101 - as ``of`` found
        self._sums.add(pairs.get(self._weight), first, second, self._rule.divisor_eps)
        self._done += done
        return done

    def result(self) -> OnePass:
        """The errors of all that was added."""
        *found, update, steps = self._sums.errors(self._rule.factor)
        indices = self._weight, *self._moments
        errors = {index: error for index, error in zip(indices, found, strict=True) if index is not None}
        return OnePass(self._done, errors, update, self._scales.apply(steps))
