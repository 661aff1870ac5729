"""``ckpt8.rebase``: writes a delta as a container that needs no base."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpt8.container import frames, header
from ckpt8.container.bases import sources_of
from ckpt8.container.kept_bases import drop_unneeded, refuse_needed
from ckpt8.container.manifest import FrameTable, Manifest, Pack
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded.reading import find_sharded
from ckpt8.container.symbol_modes import Packing
from ckpt8.container.symbols import pack_parts
from ckpt8.container.writer import ContainerWriter
from ckpt8.core.arguments import checked
from ckpt8.core.errors import UsageError
from ckpt8.core.tensors import Parts
from ckpt8.core.text import size
from ckpt8.core.workers import Progress, Workers

Tables = dict[str, FrameTable]
Encoded = dict[str, tuple[frames.Frames, Packing | None]]


class _Slab(NamedTuple):
    """A slab of a storage, or a pack; ``chunks`` are its chunks, ``number`` is that of the slab among its ``slabs``."""

    owner: int | Pack
    chunks: range
    number: int = 0
    slabs: int = 1


@checked
def rebase(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> Path:
    """Write a container that needs no base and decodes to the same bits; return its path.

    Without ``target`` it takes the place of ``source``, which is left alone if it needs no base already, as a directory
    that ranks have packed never does. Raises UsageError where such a one is to be written elsewhere, InputError where a
    base is missing, anything is damaged, or another file takes the place of ``source`` meanwhile, and OutputError where
    the target exists and ``force`` is not given, where another container beside it needs what is there as its base, or
    where it cannot be written.

    >>> ckpt8.rebase("run.ckpt8", "whole.ckpt8").name
    'whole.ckpt8'
    """
    source = Path(source)
    if find_sharded(source) is not None:
        if target is None:
            return source
        raise UsageError(f"{source}: is a directory of containers of ranks, which need no base; copy it as it is")
    final = source if target is None else Path(target)
    with sources_of(source, None if target is None else final), ContainerReader(source, kernels=True) as reader:
        if target is None:
            if reader.manifest.base is None:
                return source
            refuse_needed(source)
        with Workers(threads) as workers:
            write_whole(reader, final, workers, force=force or target is None, progress=progress)
    drop_unneeded(Path(os.path.realpath(final)).parent)
    return final


def write_whole(
    reader: ContainerReader, target: Path, workers: Workers, *, force: bool, progress: Progress = lambda _: None
) -> None:
    """Write the container of ``reader`` without a base. Raises InputError, OutputError."""
    storages = reader.manifest.storages
    whole = {k: partial(reader.read_parts, k) for k, record in enumerate(storages) if record.base is not None}
    records = [replace(record, base=None) for record in storages]
    manifest = replace(reader.manifest, base=None, storages=records)
    write_again(reader, target, workers, manifest, whole, force=force, progress=progress)


def write_again(
    reader: ContainerReader,
    target: Path,
    workers: Workers,
    manifest: Manifest,
    changed: Mapping[int, Callable[[int], Parts]],
    *,
    force: bool,
    progress: Progress = lambda _: None,
) -> None:
    """Write the container of ``reader`` with another ``manifest``, and the parts of the storages in ``changed`` anew.

    ``changed`` gives the parts of each of their chunks; their records get new tables. All else is copied as it is.
    """
    slabs = sorted(_slabs(reader), key=lambda slab: _offset(reader, slab))
    names = [name for slab in slabs for name in _names(reader, slab)]
    tables: dict[int, Tables] = {index: {} for index in changed}
    room = partial(_room, reader, changed)
    with ContainerWriter(target, names, force=force, room=room) as writer:
        for slab in slabs:
            if isinstance(slab.owner, int) and slab.owner in changed:
                encoded = workers.map(partial(_encode, reader, changed[slab.owner]), slab.chunks)
                _write(reader, writer, slab, encoded, tables[slab.owner])
            else:
                _copy(reader, writer, slab)
            progress(_nbytes(reader, slab))
        for index, parts in tables.items():
            manifest.storages[index].parts = parts or manifest.storages[index].parts
        writer.finish(manifest, partial(_check_replaced, reader))


def _check_replaced(reader: ContainerReader, target: Path) -> None:
    """Raise InputError where the container of ``reader`` is to be replaced, and another one has taken its place."""
    if str(target) == os.path.realpath(reader.path):
        reader.check_in_place()


def _room(reader: ContainerReader, changed: Iterable[int]) -> str:
    """What the container takes with the storages in ``changed`` as long as they are where they are no differences."""
    more = 0
    for index in changed:
        owner, storage = reader, index
        while (below := owner.base_of(storage)) is not None:
            owner, storage = below
        more += owner.manifest.storages[storage].stored_bytes - reader.manifest.storages[index].stored_bytes
    return f"about {size(reader.size + more)}"


def _slabs(reader: ContainerReader) -> Iterator[_Slab]:
    """Everything that has entries."""
    for owner, places in reader.places.items():
        if isinstance(owner, Pack):
            if owner.numel:
                yield _Slab(owner, range(1))
        elif places:
            slabs = header.slab_chunks(reader.manifest.storages[owner].numel, reader.manifest.slab)
            yield from (_Slab(owner, chunks, k, len(slabs)) for k, chunks in enumerate(slabs))


def _offset(reader: ContainerReader, slab: _Slab) -> int:
    """Where its first entry begins."""
    return min(
        place.offsets[slab.chunks.start * (len(place.offsets) // _chunks(reader, slab.owner))]
        for place in reader.places[slab.owner].values()
    )


def _chunks(reader: ContainerReader, owner: int | Pack) -> int:
    return 1 if isinstance(owner, Pack) else header.chunk_count(reader.manifest.storages[owner].numel)


def _nbytes(reader: ContainerReader, slab: _Slab) -> int:
    """The size of its elements in bytes."""
    if isinstance(slab.owner, Pack):
        return slab.owner.numel * slab.owner.dtype.itemsize
    record = reader.manifest.storages[slab.owner]
    stop = min(slab.chunks.stop * header.FRAME, record.numel)
    return (stop - slab.chunks.start * header.FRAME) * record.dtype.itemsize


def _names(reader: ContainerReader, slab: _Slab) -> list[str]:
    """The names of its entries, in the order of its parts."""
    if isinstance(slab.owner, Pack):
        return [header.pack_entry(slab.owner.name, part) for part in slab.owner.parts]
    record = reader.manifest.storages[slab.owner]
    return [header.entry_name(record.name, part, slab.number, slab.slabs) for part in record.parts]


def _copy(reader: ContainerReader, writer: ContainerWriter, slab: _Slab) -> None:
    """Write its entries as they are stored."""
    for name, (part, place) in zip(_names(reader, slab), reader.places[slab.owner].items(), strict=True):
        planes = len(place.offsets) // _chunks(reader, slab.owner)
        run = range(slab.chunks.start * planes, slab.chunks.stop * planes)
        writer.append(name, [reader.stored_frame(slab.owner, part, index) for index in run])


def _encode(reader: ContainerReader, parts_of: Callable[[int], Parts], chunk: int) -> Encoded:
    """The frames of every part of a chunk, and how its symbols are packed."""
    parts, packings = pack_parts(parts_of(chunk), reader.backend)
    return {
        name: (frames.encode_part(name, part, packings.get(name)), packings.get(name)) for name, part in parts.items()
    }


def _write(
    reader: ContainerReader, writer: ContainerWriter, slab: _Slab, chunks: Iterable[Encoded], tables: Tables
) -> None:
    """Write its entries from encoded chunks, and add their frames to ``tables``."""
    entries: dict[str, list[bytes | memoryview]] = {part: [] for part in reader.places[slab.owner]}
    for encoded in chunks:
        for part, (stored, packing) in encoded.items():
            tables.setdefault(part, FrameTable()).add(stored, packing)
            entries[part] += [frame for frame, _ in stored]
    for name, content in zip(_names(reader, slab), entries.values(), strict=True):
        writer.append(name, content)
