"""Finds the chunks of a damaged container that cannot be decoded."""

from __future__ import annotations

from ckpt8.container.damaged import DamagedContainer
from ckpt8.container.decoding import Chunk, all_chunks, scratch_tensor
from ckpt8.core.workers import Workers


def find_lost(reader: DamagedContainer, workers: Workers) -> None:
    """Decode every chunk once and mark those that cannot be decoded."""

    def lost_of(batch: list[Chunk]) -> list[Chunk]:
        return [chunk for chunk in batch if not reader.is_whole(*chunk, scratch_tensor(reader, *chunk))]

    batches = all_chunks(reader, range(len(reader.manifest.storages)))
    # A copy is decoded from its master's chunks. Once marked these decode, to NaN, and the copy would seem intact:
    # check all chunks before marking the first.
    for batch in list(workers.map(lost_of, batches)):
        for lost in batch:
            reader.mark_lost(*lost)
