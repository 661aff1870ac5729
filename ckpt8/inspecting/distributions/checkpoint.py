"""Distributions of a raw checkpoint: before are its values, after those that preset ``flash`` would give back.

Both, and the errors between them, come from the same sample of every tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing import lockstep
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.measure import ErrorMeter
from ckpt8.compressing.plan import Stream, Unit, read_elements
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container.facts import NO_PARAMETER, NOT_MEASURED
from ckpt8.container.frames import FRAME
from ckpt8.core.backend import Backend
from ckpt8.core.errors import RefusedError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import Piece, draw, is_counted
from ckpt8.inspecting.distributions.gathering import Gathered, Seen, Work, look_at
from ckpt8.inspecting.opening import describe
from ckpt8.inspecting.sampling import ChunkSampling

PRESET = "flash"


def checkpoint_distributions(path: Path, *, full: bool = False) -> dict[str, Any]:
    """The ``distributions`` of a checkpoint file or directory, see ``Gathered``. Raises InputError.

    ``full`` reads every element, else a sample of every tensor.
    """
    with open_source(path, containers=False) as source, Workers() as workers:
        plan = plan_bundle(source, Policy.of(PRESET))
        counted = {each.index for each in plan.streams if is_counted(each.spec, each.codec)}
        units = [unit for unit in plan.units if any(each.index in counted for each in unit.streams)]
        gathered = Gathered(
            describe(source, plan),
            counted,
            sampling=ChunkSampling.of(sum(len(unit.streams) for unit in units), full=full),
            stored=False,
            before="the checkpoint",
            after=f"as preset {PRESET} would give it back",
            errors_from=f"preset {PRESET} on the sample",
            total=sum(unit.numel * len(unit.streams) for unit in units),
        )
        meter = ErrorMeter(source)
        look = partial(_look, source, meter)
        for unit, seen in look_at(units, gathered.sampling, look, workers):
            meter.finish(unit, seen.errors)
            _add(gathered, unit, seen)
        source.check_unchanged()
        return gathered.to_json()


def _add(gathered: Gathered, unit: Unit, seen: Seen) -> None:
    if seen.refused is not None:
        gathered.refused[unit.parameter.name if unit.parameter else unit.streams[0].spec.name] = seen.refused
        # A refused unit is stored lossless: it comes back as it was, and has no codes.
        found = seen.drawn.histograms
        found |= {(what, "after"): before for (what, side), before in found.items() if side == "before"}
        seen.drawn.codes.clear()
        seen.errors = UnitErrors()
    for each in unit.streams:
        if each.index in seen.errors.streams:
            gathered.measure(each.spec.role.value, seen.errors.streams[each.index])
    if seen.errors.update is not None:
        gathered.measure(gathered.figure(unit), seen.errors.update, unit.parameter.name if unit.parameter else None)
    elif seen.refused is None and any(each.lossy_moment for each in unit.streams):
        parameter, name = unit.parameter, unit.streams[0].spec.name.rpartition(".")[0]
        reason = (parameter.reason or NOT_MEASURED) if parameter else NO_PARAMETER
        gathered.unknown[reason].append(parameter.name if parameter else name)
    gathered.add(unit, seen)


def _look(source: Bundle, meter: ErrorMeter, work: Work) -> Seen:
    """Read windows of one chunk of a unit, encode, decode, count and measure them. Thread-safe."""
    unit, chunk, windows = work
    seen = Seen(UnitErrors.for_unit(unit))
    for window in windows:
        start, count = chunk * FRAME + window.start, window.stop - window.start
        originals = [read_elements(source, s.storage, s.spec.dtype, start, count) for s in unit.streams]
        pieces, refused = _encode(unit.streams, originals, start, meter.backend, source)
        seen.refused = seen.refused or refused
        seen.drawn.merge(draw(pieces, unit.parameter))
        if refused is None and unit.measured:
            seen.errors.merge(meter.measure(unit, start, originals, [each.parts for each in pieces]))
    return seen


def _encode(
    streams: Sequence[Stream],
    originals: Sequence[torch.Tensor],
    start: int,
    backend: Backend | None,
    source: Bundle,
) -> tuple[list[Piece], str | None]:
    """The decoded pieces of a unit, and the reason if a codec refuses them."""
    try:
        parts = lockstep.encode(streams, originals, start, backend, source)
    except RefusedError as exc:
        pairs = zip(streams, originals, strict=True)
        return [Piece(each.index, each.spec.role, LOSSLESS, x, x, {}) for each, x in pairs], str(exc)
    decoded = lockstep.decode(streams, parts, originals, start, backend, source)
    return [
        Piece(stream.index, stream.spec.role, stream.codec, x, after, part)
        for stream, x, after, part in zip(streams, originals, decoded, parts, strict=True)
    ], None
