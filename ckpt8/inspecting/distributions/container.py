"""Distributions of a ``.ckpt8``: after are its decoded values, before those of the original, if given.

Errors come from the manifest. They cover every element, also where the histograms cover a sample.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ckpt8.checkpoint.meaning.update_rules import UpdateRule, read_rule
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.checkpoint.tree import StorageInfo
from ckpt8.codecs.error_stats import UpdateError, read_error
from ckpt8.compressing.parameters import Parameter
from ckpt8.compressing.plan import Stream, Unit, join, read_elements
from ckpt8.compressing.policy import Policy
from ckpt8.compressing.unit_errors import UnitErrors
from ckpt8.container.frames import FRAME
from ckpt8.container.manifest import ParameterRecord
from ckpt8.container.opening import Stored
from ckpt8.container.sharded.joined import JoinedReader
from ckpt8.core.errors import InputError
from ckpt8.core.workers import Workers
from ckpt8.inspecting.distributions.counts import Piece, draw, is_counted
from ckpt8.inspecting.distributions.gathering import Gathered, Seen, Work, look_at
from ckpt8.inspecting.sampling import ChunkSampling
from ckpt8.inspecting.slice_originals import open_originals
from ckpt8.optim.known_optimizers import MOMENT_SLOTS


def container_distributions(reader: Stored, original: Path | None = None, *, full: bool = False) -> dict[str, Any]:
    """The ``distributions`` of an open container, see ``Gathered``. Raises InputError for damage.

    ``original`` is the checkpoint that it was made from; the caller compared their structures. ``full`` decodes every
    element, else a sample of every tensor.
    """
    manifest = reader.manifest
    counted = {index for index in range(len(manifest.storages)) if is_counted(reader.spec(index), reader.codec(index))}
    made = "when it was made" if original is None else "against the original"
    gathered = Gathered(
        manifest,
        counted,
        sampling=ChunkSampling.of(len(counted), full=full),
        stored=True,
        before=None if original is None else "the original",
        after="as decoded from the container",
        errors_from=f"every element, {made}",
        total=sum(manifest.storages[index].numel for index in counted),
    )
    updates = {parameter.name: read_error(parameter.error) for parameter in manifest.parameters}
    with ExitStack() as stack:
        workers = stack.enter_context(Workers())
        source = None if original is None else _open_original(reader, original, workers, stack)
        look = partial(_look, reader, source)
        for unit, seen in look_at(_units(reader, counted), gathered.sampling, look, workers):
            weight = read_error(manifest.storages[unit.streams[0].index].error)
            update = updates[unit.parameter.name] if unit.parameter else None
            seen.errors = UnitErrors(
                {} if weight is None else {unit.streams[0].index: weight},
                update if isinstance(update, UpdateError) else None,
            )
            gathered.add(unit, seen)
        if source is not None:
            source.check_unchanged()
    return gathered.to_json()


def _open_original(reader: Stored, original: Path, workers: Workers, stack: ExitStack) -> Bundle:
    """The original, with storages of the same numbers."""
    if isinstance(reader, JoinedReader):
        return stack.enter_context(open_originals(reader, original, workers)).together
    decode = not Policy(reader.manifest.preset).keeps_compressed
    return stack.enter_context(open_source(original, containers=False, decode=decode))


def _units(reader: Stored, counted: set[int]) -> list[Unit]:
    storages = reader.manifest.storages
    streams = [
        Stream(index, reader.spec(index), StorageInfo(each.name, each.dtype, 0, each.nbytes), reader.codec(index))
        for index, each in enumerate(storages)
        if index in counted
    ]
    parameters = [
        _parameter(record)
        for record in reader.manifest.parameters
        if counted.issuperset(record.moments.values())
        and len({storages[index].numel for index in record.moments.values()}) == 1
    ]
    return join([Unit((stream,)) for stream in streams], parameters)


def _parameter(record: ParameterRecord) -> Parameter:
    """The parameter, with its rule if its moments determine an update."""
    stored = read_rule(record.rule)
    known = "moment1" in record.moments and record.moments.keys() <= set(MOMENT_SLOTS.values())
    rule = UpdateRule(**stored) if stored is not None and known else None
    if rule and rule.kind == "adam" and not (rule.step >= 1 and 0 <= rule.beta1 < 1 and 0 <= rule.beta2 < 1):
        rule = None
    return Parameter(record.name, record.moments, rule, record.reason, ())


def _look(reader: Stored, source: Bundle | None, work: Work) -> Seen:
    """Decode one chunk of a unit, read the same elements of the original, count windows of both. Thread-safe."""
    unit, chunk, windows = work
    pieces = [_piece(reader, source, stream, chunk, windows) for stream in unit.streams]
    return Seen(UnitErrors(), draw(pieces, unit.parameter))


def _piece(reader: Stored, source: Bundle | None, stream: Stream, chunk: int, windows: list[slice]) -> Piece:
    spec = stream.chunk_spec(chunk)
    decoded = torch.empty(spec.numel, dtype=spec.dtype.torch, device="cpu")
    parts = reader.decode_chunk(stream.index, chunk, decoded)
    before = None
    if source is not None:
        before = torch.cat([_original(source, stream, chunk, window) for window in windows])
    by_element = {name: part for name, part in parts.items() if len(part) == spec.numel}
    seen = {name: torch.cat([part[window] for window in windows]) for name, part in by_element.items()}
    after = torch.cat([decoded[window] for window in windows])
    return Piece(stream.index, spec.role, stream.codec, before, after, seen)


def _original(source: Bundle, stream: Stream, chunk: int, window: slice) -> torch.Tensor:
    storage = source.storages[stream.index]
    if storage.nbytes != stream.storage.nbytes:
        raise InputError(f"{source.label}: changed while it was read; nothing was written")
    start = chunk * FRAME + window.start
    return read_elements(source, storage, stream.spec.dtype, start, window.stop - window.start)
