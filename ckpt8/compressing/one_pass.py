"""Measures a chunk of the usual units on a CPU with fused kernels: each goes over memory once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ckpt8.codecs.cutting import pieces, take
from ckpt8.codecs.error_measures import Pair
from ckpt8.codecs.error_stats import ErrorStats, StepError, UpdateError
from ckpt8.compressing.plan import Stream, Unit
from ckpt8.compressing.step_measure import StepScales
from ckpt8.core.tensors import DType, Parts


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


def measure_budgeted(unit: Unit, originals: Sequence[torch.Tensor], decoded: Sequence[torch.Tensor]) -> OnePass:
    """Measure the first elements of a chunk under a budget; none unless all its codecs are those of a budget."""
    from ckpt8.codecs import budgeted_stats_numba as stats_numba
    from ckpt8.codecs.companded8.numba import BLOCK

    parameter, scales = unit.parameter, StepScales.of(unit.parameter)
    rule = parameter.rule if parameter else None
    if parameter is None or parameter.step is None or rule is None or rule.divisor_eps is None or scales is None:
        return OnePass()
    weight, moments = parameter.step.weight, parameter.moments
    usual = dict.fromkeys(moments.values(), "moment") | ({} if weight is None else {weight: "noise"})
    lossy = {each.index: each.codec.measured_as for each in unit.streams if not each.codec.measured_in_one_pass}
    if lossy != usual or len(moments) != 2:
        return OnePass()
    done = len(originals[0]) // BLOCK * BLOCK
    pairs: dict[int | None, Pair] = {
        stream.index: (x[:done].float(), y[:done].float())
        for stream, x, y in zip(unit.streams, originals, decoded, strict=True)
    }
    indices = weight, moments["moment1"], moments["moment2"]
    *found, update, steps = stats_numba.budgeted_errors(
        pairs.get(weight), pairs[indices[1]], pairs[indices[2]], rule.divisor_eps, rule.factor
    )
    errors = {index: error for index, error in zip(indices, found, strict=True) if index is not None}
    return OnePass(done, errors, update, scales.apply(steps))
