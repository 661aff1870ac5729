"""Distributions of a raw checkpoint: before is what it holds, after what the preset ``flash`` would give back.

Both, and the errors between them, are of the same sample of every tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.sources.bundle import Bundle, open_bundle
from ckpt8.compressing import lockstep
from ckpt8.compressing.bundle_plan import plan_bundle
from ckpt8.compressing.chunk_encoder import ChunkMeters
from ckpt8.compressing.measure import UnitErrors
from ckpt8.compressing.plan import Plan, Stream, Unit
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.container.facts import skeleton_role
from ckpt8.container.frames import FRAME
from ckpt8.core.backend import Backend
from ckpt8.core.errors import RefusedError
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import Drawn
from ckpt8.inspecting.distributions.drawing import Piece, draw, is_counted
from ckpt8.inspecting.distributions.gathering import Gathered
from ckpt8.inspecting.distributions.layer_sizes import LayerNames, LayerSizes
from ckpt8.inspecting.sampling import Sampling

PRESET = "flash"

_Work = tuple[Unit, int, list[slice]]


def checkpoint_distributions(path: Path, *, full: bool = False) -> dict[str, Any]:
    """The ``distributions`` of a checkpoint file or directory, see ``Gathered``. Raises InputError.

    ``full`` reads every element, else a sample of every tensor.
    """
    with open_bundle(path) as source, Workers() as workers:
        plan = plan_bundle(source, Policy.of(PRESET))
        units = [unit for unit in plan.units if any(is_counted(each.spec, each.codec) for each in unit.streams)]
        shown = _shown_names(source, plan)
        gathered = Gathered(
            sampling=Sampling.of(sum(len(unit.streams) for unit in units), full=full),
            layers=_sizes(source, plan, shown),
            before="the checkpoint",
            after=f"as preset {PRESET} would give it back",
            errors_from=f"preset {PRESET} on the sample",
            total=sum(unit.numel * len(unit.streams) for unit in units),
        )
        work: list[_Work] = [(unit, *place) for unit in units for place in gathered.sampling(unit.numel)]
        results = workers.map(_Look(source).at, work)
        for unit in units:
            seen = _Seen(UnitErrors.of(unit))
            for _ in gathered.sampling(unit.numel):
                seen.merge(next(results))
            _add(gathered, unit, seen, shown)
        source.check_unchanged()
        return gathered.to_json()


def _add(gathered: Gathered, unit: Unit, seen: _Seen, shown: dict[str, dict[str, Any]]) -> None:
    stream = unit.streams[0]
    if seen.refused is not None:
        gathered.refused[unit.parameter.name if unit.parameter else stream.spec.name] = seen.refused
        # What is refused is stored as it is: nothing comes back otherwise, and no code is made of it.
        for pair in seen.drawn.pairs.values():
            pair.after = pair.before or pair.after
        seen.drawn.codes.clear()
        seen.errors = UnitErrors()
    for each in unit.streams:
        if each.index in seen.errors.streams:
            gathered.measure(each.spec.role.value, seen.errors.streams[each.index])
    if seen.errors.update is not None:
        gathered.measure("update", seen.errors.update)
    elif seen.refused is None and any(each.lossy_moment for each in unit.streams):
        gathered.unknown += 1
    if unit.parameter is not None:
        gathered.add_parameter(shown[unit.parameter.name], seen.errors.update, seen.drawn)
    else:
        gathered.add_weight(stream.spec.name, seen.errors.streams.get(stream.index), seen.drawn)


def _shown_names(source: Bundle, plan: Plan) -> dict[str, dict[str, Any]]:
    streams = plan.streams
    found = [unit.parameter for unit in plan.units if unit.parameter is not None]
    given = [(each.name, [streams[index].spec.name for index in each.moments.values()]) for each in found]
    names = display_names(given, directory=source.directory is not None)
    return {each.name: shown for each, shown in zip(found, names, strict=True)}


def _sizes(source: Bundle, plan: Plan, shown: dict[str, dict[str, Any]]) -> LayerSizes:
    layers = LayerNames((row["name"] for row in shown.values()), directory=source.directory is not None)
    sizes = LayerSizes(layers, stored=False)
    skeletons = {member.skeleton: skeleton_role(member.checkpoint.format) for member in source.members}
    for unit in plan.units:
        for stream in unit.streams:
            role, name = stream.spec.role.value, None
            if unit.parameter is not None:
                name = shown[unit.parameter.name]["name"]
            elif stream.index in skeletons:
                role = skeletons[stream.index]
            elif stream.spec.role is not Role.OTHER:
                name = stream.spec.name
            weights = stream.spec.numel if is_counted(stream.spec, stream.codec) and role == Role.WEIGHT.value else 0
            sizes.add(name, role, stream.storage.nbytes, elements=weights)
    return sizes


@dataclass(slots=True)
class _Seen:
    """Some elements of a unit."""

    errors: UnitErrors
    drawn: Drawn = field(default_factory=Drawn)
    refused: str | None = None

    def merge(self, later: _Seen) -> None:
        self.errors.merge(later.errors)
        self.drawn.merge(later.drawn)
        self.refused = self.refused or later.refused


class _Look:
    def __init__(self, source: Bundle) -> None:
        self._source = source
        self._meters = ChunkMeters(source)

    def at(self, work: _Work) -> _Seen:
        """Read runs of one chunk of a unit, encode, decode, count and measure them. Thread-safe."""
        unit, chunk, runs = work
        seen = _Seen(UnitErrors.of(unit))
        for run in runs:
            start = chunk * FRAME + run.start
            originals = [self._read(stream, start, run.stop - run.start) for stream in unit.streams]
            pieces, refused = _pieces(unit, originals, start, self._meters.backend)
            seen.refused = seen.refused or refused
            seen.drawn.merge(draw(pieces, unit.parameter))
            if refused is None and any(stream.lossy for stream in unit.streams):
                seen.errors.merge(self._meters.of(unit).measure(start, originals, [each.parts for each in pieces]))
        return seen

    def _read(self, stream: Stream, start: int, length: int) -> torch.Tensor:
        dtype = stream.spec.dtype
        buffer = bytearray(length * dtype.itemsize)
        self._source.read_into(stream.storage.offset + start * dtype.itemsize, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype.torch)


def _pieces(
    unit: Unit, originals: list[torch.Tensor], start: int, backend: Backend | None
) -> tuple[list[Piece], str | None]:
    """The pieces of a unit, and why a codec refuses them: then they come back as they are."""
    streams = unit.streams
    try:
        parts = lockstep.encode(streams, originals, start, backend)
    except RefusedError as exc:
        kept = [
            Piece(each.index, each.spec.role, LOSSLESS, x, x, {}) for each, x in zip(streams, originals, strict=True)
        ]
        return kept, str(exc)
    decoded = lockstep.decode(streams, parts, originals, start, backend)
    return [
        Piece(stream.index, stream.spec.role, stream.codec, x, after, part)
        for stream, x, after, part in zip(streams, originals, decoded, parts, strict=True)
    ], None
