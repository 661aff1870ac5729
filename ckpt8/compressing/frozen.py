"""Frozen weights: storages that no optimizer updates, and that another container holds bit for bit.

They become lossless differences to it, which are all zero: such a storage takes next to nothing, and comes back
exactly. Small ones, which may share entries, are stored as before. Names do not count: the first bytes of
a storage find what may be its equal; then every bit is compared.
"""

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

import torch

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.compressing.plan import Plan, Stream, read_elements
from ckpt8.compressing.policy import LOSSLESS
from ckpt8.container import frames, header
from ckpt8.container.reader import ContainerReader
from ckpt8.core.tensors import Role
from ckpt8.core.workers import Workers

FROZEN = "frozen: equal to that in the base"
"""The reason of a storage that is lossless since its base holds it bit for bit."""

_HEAD = 1 << 12
"""Elements that find what may be equal."""


def frozen_in(plan: Plan, source: Checkpoint, base: ContainerReader, threads: int | None) -> dict[int, Stream]:
    """The streams of ``plan`` that ``base`` holds bit for bit, by index, as differences to it. Raises InputError."""
    return _equal(plan, source, base, range(len(base.manifest.storages)), threads)


def still_frozen(plan: Plan, source: Checkpoint, base: ContainerReader, threads: int | None) -> dict[int, Stream]:
    """As ``frozen_in``, of the storages that are frozen in ``base`` itself."""
    storages = base.manifest.storages
    return _equal(plan, source, base, [k for k, record in enumerate(storages) if record.reason == FROZEN], threads)


def _equal(
    plan: Plan, source: Checkpoint, base: ContainerReader, among: Iterable[int], threads: int | None
) -> dict[int, Stream]:
    updated = {index for parameter in plan.parameters for index in parameter.streams}
    named = {index for _, index in plan.tensors} - updated
    weights = [plan.by_index[index] for index in sorted(named) if plan.by_index[index].spec.role is Role.WEIGHT]
    streams = [stream for stream in weights if stream.spec.numel > header.PACK and stream.codec.copied is None]
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


def _is_equal(stream: Stream, source: Checkpoint, base: ContainerReader, index: int) -> Iterator[bool]:
    """Chunk by chunk, whether a storage of the base has the same bits."""
    for chunk in range(header.chunk_count(stream.spec.numel)):
        count = stream.chunk_spec(chunk).numel
        own = read_elements(source, stream.storage, stream.spec.dtype, chunk * frames.FRAME, count)
        yield torch.equal(own.view(torch.uint8), _stored(base, index, chunk).view(torch.uint8))


def _stored(base: ContainerReader, index: int, chunk: int) -> torch.Tensor:
    """The decoded elements of a chunk."""
    return LOSSLESS.decode(base.read_parts(index, chunk), base.chunk_spec(index, chunk), backend=base.backend)


def _digest(elements: torch.Tensor) -> bytes:
    return hashlib.sha256(frames.bytes_of(elements.contiguous().view(torch.uint8))).digest()
