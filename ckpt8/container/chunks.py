"""All chunks of a container, and the check of every frame by decoding it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ckpt8.container.header import chunk_count
from ckpt8.container.manifest import Pack
from ckpt8.container.reader import ContainerReader
from ckpt8.core.arrays import Array, numpy_type
from ckpt8.core.workers import Progress, Workers, scratch_array

Chunk = tuple[int, int]
"""The index of a storage, and the number of one of its chunks."""


def check_frames(
    reader: ContainerReader,
    workers: Workers,
    progress: Progress = lambda _: None,
    only: Iterable[int] | None = None,
) -> None:
    """Read, check and decode every chunk of all storages, or of ``only`` some. Raises InputError naming the tensor."""

    def decode(batch: list[Chunk]) -> int:
        nbytes = 0
        for storage, chunk in batch:
            out = scratch_chunk(reader, storage, chunk)
            reader.fill_chunk(storage, chunk, out)
            nbytes += out.nbytes
        return nbytes

    if only is None:
        reader.expect_all()
    storages = range(len(reader.manifest.storages)) if only is None else only
    batches = all_chunks(reader, storages)
    if reader.in_order:
        batches = iter(sorted(batches, key=lambda batch: reader.start_of(*batch[0])))
    for nbytes in workers.map(decode, batches):
        progress(nbytes)


def all_chunks(reader: ContainerReader, storages: Iterable[int]) -> Iterator[list[Chunk]]:
    """Every chunk of the given storages, in batches for one thread: those of one pack come together."""
    packs: dict[Pack, list[Chunk]] = {}
    for index in storages:
        record = reader.manifest.storages[index]
        chunks = ((index, chunk) for chunk in range(chunk_count(record.numel)))
        if record.pack is None:
            yield from ([chunk] for chunk in chunks)
        else:
            packs.setdefault(record.pack, []).extend(chunks)
    yield from packs.values()


def scratch_chunk(reader: ContainerReader, storage: int, chunk: int) -> Array:
    """The buffer of the calling thread, shaped for the elements of one chunk; the next call overwrites it."""
    spec = reader.chunk_spec(storage, chunk)
    return scratch_array("decode", numpy_type(spec.dtype), spec.numel)
