"""Frozen weights: storages that no optimizer updates.

Where another container holds one bit for bit, it becomes a lossless difference to it, which is all zero: such a storage
takes next to nothing, and comes back exactly. Small ones are stored as before. Names do not count: the first bytes of
a storage find what may be its equal; then every bit is compared.

The files of a chain hold their frozen weights exactly, most of them as differences to the first, or to the container of
a file that the user names: see ``frozen_file``.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ckpt8.checkpoint.meaning.parameters import weights_without_state
from ckpt8.checkpoint.sources.bundle import Bundle
from ckpt8.compressing.plan import Plan, Stream, read_elements, views_of
from ckpt8.compressing.policy import LOSSLESS, Policy
from ckpt8.container import frames, header
from ckpt8.core.arrays import Array, empty, same_bits
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers

if TYPE_CHECKING:
    from ckpt8.compressing.deltas import Base

FROZEN = "frozen: equal to that in the base"
"""The reason of a storage that is lossless since its base holds it bit for bit."""

KEPT = "frozen: kept exactly, for all later files of the chain"
"""The reason of a storage that is lossless since no optimizer updates it."""

_LEAST = 1 << 13
"""A storage of no more elements takes hardly more room whole."""

_HEAD = 1 << 12
"""Elements that find what may be equal."""


def kept_frozen(plan: Plan, source: Bundle, policy: Policy) -> dict[int, Stream]:
    """The streams of ``plan`` that are frozen, lossless, by index. A rule decides before. Raises InputError."""
    keys = weights_without_state(source.opened, source.key, directory=source.directory is not None)
    views = views_of(plan.tensors)
    return {
        stream.index: replace(stream, codec=LOSSLESS, reason=KEPT, fallback_codec=None)
        for stream in _large_weights(plan)
        if stream.storage.key in keys
        and stream.index in plan.chosen
        and stream.index not in plan.copies
        and not policy.has_rule([path for view in views[stream.index] for path in view.paths])
    }


def frozen_in(plan: Plan, source: Bundle, base: Base, threads: int | None) -> dict[int, Stream]:
    """The streams of ``plan`` that ``base`` holds bit for bit, by index, as differences to it.

    Raises InputError, and BrokenBaseError for what cannot be read of the base.
    """
    return _equal(plan, source, base, range(len(base.manifest.storages)), threads)


def still_frozen(plan: Plan, source: Bundle, base: Base, threads: int | None) -> dict[int, Stream]:
    """As ``frozen_in``, of the storages that are frozen in ``base`` itself."""
    storages = base.manifest.storages
    among = [index for index, record in enumerate(storages) if record.reason in (FROZEN, KEPT)]
    return _equal(plan, source, base, among, threads)


def _large_weights(plan: Plan) -> list[Stream]:
    """The weights that the step of no parameter moves, and that are neither copies of masters nor small."""
    updated = {index for parameter in plan.parameters for index in parameter.streams}
    named = {index for _, index in plan.tensors} - updated
    weights = [plan.by_index[index] for index in sorted(named) if plan.by_index[index].spec.role is Role.WEIGHT]
    return [stream for stream in weights if stream.spec.numel > _LEAST and stream.codec.copied is None]


def _equal(plan: Plan, source: Bundle, base: Base, among: Iterable[int], threads: int | None) -> dict[int, Stream]:
    streams = _large_weights(plan)
    wanted = {(stream.spec.dtype, stream.spec.numel) for stream in streams}
    found: dict[Hashable, list[int]] = defaultdict(list)
    for index in among:
        record = base.manifest.storages[index]
        is_partner = record.pack is None and base.codec(index) == LOSSLESS
        if is_partner and (record.dtype, record.numel) in wanted:
            found[record.dtype, record.numel, _digest(_stored(base, index, 0)[:_HEAD])].append(index)

    def frozen(stream: Stream) -> Stream | None:
        head = _digest(read_elements(source, stream.storage, stream.spec.dtype, 0, min(stream.spec.numel, _HEAD)))
        for index in found.get((stream.spec.dtype, stream.spec.numel, head), ()):
            if all(_is_equal(stream, source, base, index)):
                return replace(stream, codec=LOSSLESS, base=index, reason=FROZEN, fallback_codec=None)
        return None

    if not found:
        return {}
    with Workers(threads) as workers:
        return {stream.index: stream for stream in workers.map(frozen, streams) if stream is not None}


def _is_equal(stream: Stream, source: Bundle, base: Base, index: int) -> Iterator[bool]:
    """Chunk by chunk, whether a storage of the base has the same bits."""
    for chunk in range(header.chunk_count(stream.spec.numel)):
        count = stream.chunk_spec(chunk).numel
        own = read_elements(source, stream.storage, stream.spec.dtype, chunk * frames.FRAME, count)
        yield same_bits(own, _stored(base, index, chunk))


def _stored(base: Base, index: int, chunk: int) -> Array:
    """The decoded elements of a chunk."""
    spec = header.chunk_spec(base.manifest.storages[index].spec, chunk)
    elements = empty(spec.numel, spec.dtype)
    LOSSLESS.decode_arrays(base.parts(index, chunk, LOSSLESS), spec, elements, backend=base.backend)
    return elements


def _digest(elements: Array) -> bytes:
    return hashlib.sha256(elements.view(np.uint8).data).digest()
