"""Distributions of a ``.ckpt8``: after is what it decodes to, before the original where that is at hand.

Errors are those of the manifest, which cover every element, whatever is sampled for the histograms.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.parameter_names import display_names
from ckpt8.checkpoint.meaning.update_rules import UpdateRule, read_rule
from ckpt8.checkpoint.sources.bundle import Bundle, open_bundle
from ckpt8.codecs.error_stats import read_error
from ckpt8.compressing.plan import Parameter
from ckpt8.compressing.policy import Policy
from ckpt8.container import layout
from ckpt8.container.facts import skeleton_role
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import Manifest, ParameterRecord
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import Drawn
from ckpt8.inspecting.distributions.drawing import Piece, draw, is_counted
from ckpt8.inspecting.distributions.gathering import Gathered, stored_update_error
from ckpt8.inspecting.distributions.layer_sizes import LayerNames, LayerSizes
from ckpt8.inspecting.sampling import Sampling
from ckpt8.optim.known_optimizers import MOMENT_SLOTS


@dataclass(frozen=True, slots=True)
class _Unit:
    """Storages of one length, and the number of the parameter whose moments they are."""

    storages: tuple[int, ...]
    number: int | None = None
    parameter: Parameter | None = None


_Work = tuple[_Unit, int, list[slice]]


def container_distributions(
    reader: ContainerReader, original: Path | None = None, *, full: bool = False
) -> dict[str, Any]:
    """The ``distributions`` of an open container, see ``Gathered``. Raises InputError for damage.

    ``original`` is the checkpoint that it was made from, whose structure was compared. ``full`` decodes every element,
    else a sample of every tensor.
    """
    manifest = reader.manifest
    counted = {index for index in range(len(manifest.storages)) if is_counted(reader.spec(index), reader.codec(index))}
    units = _units(manifest, counted)
    shown = _shown_names(manifest)
    gathered = Gathered(
        sampling=Sampling.of(len(counted), full=full),
        layers=_sizes(manifest, shown, counted),
        before="the original" if original is not None else None,
        after="as decoded from the container",
        errors_from="every element, against the original"
        if original is not None
        else "every element, when it was made",
        total=sum(manifest.storages[index].numel for index in counted),
    )
    work: list[_Work] = [(unit, *place) for unit in units for place in gathered.sampling(_numel(manifest, unit))]
    with ExitStack() as stack:
        source = None
        if original is not None:
            decode = not Policy(manifest.preset).keeps_compressed
            source = stack.enter_context(open_bundle(original, decode=decode))
        results = stack.enter_context(Workers()).map(_Look(reader, source).at, work)
        for unit in units:
            drawn = Drawn()
            for _ in gathered.sampling(_numel(manifest, unit)):
                drawn.merge(next(results))
            if unit.number is not None:
                error = stored_update_error(manifest.parameters[unit.number].error)
                gathered.add_parameter(shown[unit.number], error, drawn)
            else:
                record = manifest.storages[unit.storages[0]]
                gathered.add_weight(record.name, read_error(record.error), drawn)
        if source is not None:
            source.check_unchanged()
    return gathered.to_json()


def _numel(manifest: Manifest, unit: _Unit) -> int:
    return manifest.storages[unit.storages[0]].numel


def _units(manifest: Manifest, counted: set[int]) -> list[_Unit]:
    units, taken = [], set[int]()
    for number, record in enumerate(manifest.parameters):
        storages = tuple(dict.fromkeys(record.moments.values()))
        lengths = {manifest.storages[index].numel for index in storages}
        if len(lengths) == 1 and counted.issuperset(storages) and taken.isdisjoint(storages):
            taken.update(storages)
            units.append(_Unit(storages, number, _parameter(record)))
    return units + [_Unit((index,)) for index in sorted(counted - taken)]


def _parameter(record: ParameterRecord) -> Parameter | None:
    """The parameter with its rule, where an update can be made of its moments."""
    stored = read_rule(record.rule)
    known = "moment1" in record.moments and record.moments.keys() <= set(MOMENT_SLOTS.values())
    if stored is None or not known:
        return None
    rule = UpdateRule(**stored)
    if rule.kind == "adam" and not (rule.step >= 1 and 0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1):
        return None
    return Parameter(record.name, record.moments, rule, record.reason, ())


def _shown_names(manifest: Manifest) -> list[dict[str, Any]]:
    given = [
        (parameter.name, [manifest.storages[index].name for index in parameter.moments.values()])
        for parameter in manifest.parameters
    ]
    return display_names(given, directory=manifest.directory is not None)


def _sizes(manifest: Manifest, shown: list[dict[str, Any]], counted: set[int]) -> LayerSizes:
    layers = LayerNames((row["name"] for row in shown), directory=manifest.directory is not None)
    sizes = LayerSizes(layers, stored=True)
    skeletons = {member.skeleton: skeleton_role(member.format) for member in manifest.members}
    owners = {
        index: row["name"]
        for record, row in zip(manifest.parameters, shown, strict=True)
        for index in record.moments.values()
    }
    for index, record in enumerate(manifest.storages):
        role, name = skeletons.get(index, record.role.value), owners.get(index)
        if name is None and index not in skeletons and record.role is not Role.OTHER:
            name = record.name
        weights = record.numel if index in counted and record.role is Role.WEIGHT else 0
        sizes.add(name, role, record.nbytes, record.stored_bytes, weights)
    return sizes


class _Look:
    def __init__(self, reader: ContainerReader, source: Bundle | None) -> None:
        self._reader = reader
        self._source = source

    def at(self, work: _Work) -> Drawn:
        """Decode one chunk of a unit and count runs of it. Thread-safe."""
        unit, chunk, runs = work
        return draw([self._piece(index, chunk, runs) for index in unit.storages], unit.parameter)

    def _piece(self, index: int, chunk: int, runs: list[slice]) -> Piece:
        reader = self._reader
        record, codec = reader.manifest.storages[index], reader.codec(index)
        spec = layout.chunk_spec(record.name, record.role, record.dtype, record.numel, chunk)
        decoded = torch.empty(spec.numel, dtype=spec.dtype.torch, device="cpu")
        parts = reader.decode_chunk(index, chunk, decoded)
        after = torch.cat([decoded[run] for run in runs])
        before = None
        if self._source is not None:
            before = torch.cat(
                [self._read(self._source, index, chunk * FRAME + run.start, len(decoded[run])) for run in runs]
            )
        looked = {
            name: torch.cat([part[run] for run in runs]) for name, part in parts.items() if len(part) == spec.numel
        }
        return Piece(index, record.role, codec, before, after, looked)

    def _read(self, source: Bundle, index: int, start: int, length: int) -> torch.Tensor:
        record = self._reader.manifest.storages[index]
        if source.storages[index].nbytes != record.nbytes:
            raise InputError(f"{source.label}: changed while it was read; nothing was written")
        buffer = bytearray(length * record.dtype.itemsize)
        source.read_into(source.storages[index].offset + start * record.dtype.itemsize, memoryview(buffer))
        return torch.frombuffer(buffer, dtype=torch.uint8).view(record.dtype.torch)
