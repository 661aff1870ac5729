"""Writes a ``.ckpt8`` that is either complete under its name or not there at all.

``ckpt8.rebase`` writes a delta as a container that needs no base.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ckpt8.container import frames, header
from ckpt8.container.bases import sources_of
from ckpt8.container.checks import layout_of, slab_entries
from ckpt8.container.header import Entry, pack_manifest
from ckpt8.container.kept_bases import drop_unneeded, refuse_needed, unneeded_file
from ckpt8.container.manifest import FrameTable, Manifest, Pack, Packing
from ckpt8.container.manifest_json import manifest_json
from ckpt8.container.packing import packed
from ckpt8.container.reader import ContainerReader
from ckpt8.container.sharded import find_sharded
from ckpt8.core.arrays import Arrays
from ckpt8.core.closing import Closing
from ckpt8.core.errors import Ckpt8Error, OutputError, UsageError
from ckpt8.core.files.atomic import PIECE, AtomicFile, Room, start_writeback, write_all_at
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import RemotePath, refuse_target, resolved
from ckpt8.core.public import checked
from ckpt8.core.text import size
from ckpt8.core.workers import Progress, Workers

_WRITEBACK = 1 << 23
"""Bytes after which to start the flush to the disk: to start it for every small entry takes longer than writing it."""


class _FileOutput(Closing):
    """A file that is appended to behind ``reserved`` bytes for a head, which comes at the end. See ``AtomicFile``."""

    def __init__(self, target: Path, *, force: bool, reserved: int, tidy: bool, room: Room | None) -> None:
        self._start = reserved
        self._size = self._written = self._handed_over = 0
        self._waiting: list[bytes | memoryview] = []
        self._output = AtomicFile(target, force=force, check=unneeded_file, tidy=tidy, room=room)
        self._descriptor = self._output.file.fileno()

    def close(self) -> None:
        """Remove the file, unless it is published."""
        self._output.close()

    def append(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Write small buffers with those that follow."""
        self._waiting += buffers
        self._size += sum(map(len, buffers))
        if self._size - self._written >= PIECE:
            self._write()

    def _write(self) -> None:
        """Write the waiting buffers, and start the flush of what is written to the disk."""
        with self._output.guard():
            self._written += write_all_at(self._descriptor, self._waiting, self._start + self._written)
            self._waiting.clear()
            if self._written - self._handed_over >= _WRITEBACK:
                start_writeback(self._descriptor, self._start + self._handed_over, self._written - self._handed_over)
                self._handed_over = self._written

    def mark(self) -> None:
        """A file needs no note of the place to which ``rollback`` returns."""

    def rollback(self, size: int) -> None:
        """Take back everything behind the first ``size`` bytes."""
        self._write()
        self._size = self._written = size
        self._handed_over = min(self._handed_over, self._written)
        with self._output.guard():
            os.ftruncate(self._descriptor, self._start + size)

    def end(self, head: bytes, tail: Sequence[bytes]) -> Path:
        """Write the last bytes and the first ones; return where they can be read."""
        self.append(tail)
        self._write()
        if len(head) > self._start:
            self._move(len(head) - self._start)
        with self._output.guard():
            write_all_at(self._descriptor, [head], 0)
            self._output.path.stat()  # somebody may have removed the folder
        return self._output.path

    def _move(self, by: int) -> None:
        """Make room for a longer head: move all data, the last piece first."""
        with self._output.guard():
            for start in reversed(range(0, self._size, PIECE)):
                place = self._start + start
                piece = os.pread(self._descriptor, min(PIECE, self._size - start), place)
                write_all_at(self._descriptor, [piece], place + by)

    def publish(self, last_look: Callable[[Path], object]) -> None:
        """Give the file its name, see ``AtomicFile.publish``."""
        self._output.publish(last_look)


class ContainerWriter(Closing):
    """Appends entries after a reserved header, then fills the header in. A context manager.

    The header has room for entries of these ``names``. It may need more in the end.

    ``tidy`` is that of ``Partial``; ``room`` says how long the file becomes, for an error, and ``bound`` how many bytes
    an object of a store takes at most.

    ``approve`` gets the path of the whole file before it has its name; what it raises keeps the old one. For that what
    becomes an object of a store is a temporary file first, see ``AtomicFile``.
    """

    def __init__(
        self,
        target: Path,
        names: Iterable[str],
        *,
        force: bool,
        tidy: bool = True,
        room: Room | None = None,
        bound: int = 0,
        approve: Callable[[Path], object] | None = None,
    ) -> None:
        self._target, self._approve = target, approve
        self._header_size = header.reserved_size(names)
        reserved = header.LENGTH_BYTES + self._header_size
        self._entries: list[Entry] = []
        self._position = 0
        self._output = (
            target.new_object(force=force, check=unneeded_file, reserved=reserved, bound=bound)
            if isinstance(target, RemotePath) and approve is None
            else _FileOutput(target, force=force, reserved=reserved, tidy=tidy, room=room)
        )

    def close(self) -> None:
        """Remove what was written, unless it is finished."""
        self._output.close()

    def append(self, name: str, frames: Sequence[bytes | memoryview]) -> None:
        """Write one entry, whole."""
        start = self._position
        self._position += sum(map(len, frames))
        self._entries.append(Entry(name, start, self._position))
        self._output.append(frames)

    def mark(self) -> int:
        """The number of entries written so far."""
        self._output.mark()
        return len(self._entries)

    def rollback(self, mark: int) -> None:
        """Take back every entry written since ``mark``, which is the last one."""
        if mark < len(self._entries):
            self._position = self._entries[mark].start
            del self._entries[mark:]
            self._output.rollback(self._position)

    def finish(self, manifest: Manifest, last_look: Callable[[Path], object] = lambda _: None) -> bytes:
        """Write manifest, seal and header, and publish the file, see ``AtomicFile.publish``. Returns the seal.

        Raises OutputError where it cannot be written, or where the reader would refuse what it states.
        """
        reserved = header.LENGTH_BYTES + self._header_size
        stored = pack_manifest(manifest_json(manifest), reserved + self._position + header.SEAL_BYTES)
        after = self._position + len(stored)
        end = after + header.SEAL_BYTES
        ends = Entry(header.MANIFEST, self._position, after), Entry(header.SEAL, after, end)
        try:
            head = header.render([*self._entries, *ends], self._header_size, manifest.version)
        except ValueError:
            head = header.render([*self._entries, *ends], None, manifest.version)
        seal = hashlib.sha256(head + stored).digest()
        written = self._output.end(head, [stored, seal])
        self._check_readable(written)
        if self._approve is not None:
            self._approve(written)
        self._output.publish(last_look)
        manifest.stored_nbytes = len(head) + end
        return seal

    def _check_readable(self, path: Path) -> None:
        """Read header and manifest, not the data, as any reader will. Raises OutputError where it refuses them."""
        try:
            ContainerReader(path).close()
        except Ckpt8Error as exc:
            why = str(exc).removeprefix(f"{path}: ")
            raise OutputError(f"{self._target}: would not be readable: {why}; nothing was written") from exc


Tables = dict[str, FrameTable]
Encoded = dict[str, tuple[frames.Frames, Packing | None]]


class _Slab(NamedTuple):
    """A slab of a storage, or a pack, of ``nbytes`` in memory, whose first entry begins at ``offset``.

    ``entries`` are the part, the name and the numbers of the frames of each.
    """

    owner: int | Pack
    chunks: range
    entries: list[tuple[str, str, range]]
    offset: int
    nbytes: int


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
    source, target = as_path(source), None if target is None else as_path(target)
    refuse_target(source if target is None else target)
    if find_sharded(source) is not None:
        if target is None:
            return source
        raise UsageError(f"{source}: is a directory of containers of ranks, which need no base; copy it as it is")
    final = source if target is None else target
    with sources_of(source, None if target is None else final), ContainerReader(source) as reader:
        if target is None:
            if reader.manifest.base is None:
                return source
            refuse_needed(source)
        storages = reader.manifest.storages
        whole = {k: partial(reader.read_parts, k) for k, record in enumerate(storages) if record.base is not None}
        manifest = replace(reader.manifest, base=None, storages=[replace(record, base=None) for record in storages])
        with Workers(threads) as workers:
            write_again(reader, final, workers, manifest, whole, force=force or target is None, progress=progress)
    drop_unneeded(resolved(final).parent)
    return final


def write_again(
    reader: ContainerReader,
    target: Path,
    workers: Workers,
    manifest: Manifest,
    changed: Mapping[int, Callable[[int], Arrays]],
    *,
    force: bool,
    progress: Progress = lambda _: None,
) -> None:
    """Write the container of ``reader`` with another ``manifest``, and the parts of the storages in ``changed`` anew.

    ``changed`` gives the parts of each of their chunks; their records get new tables. All else is copied as it is.
    """
    slabs = sorted(_slabs(reader), key=lambda slab: slab.offset)
    names = [name for slab in slabs for _, name, _ in slab.entries]
    tables: dict[int, Tables] = {index: {} for index in changed}

    def check_replaced(final: Path) -> None:
        if final == resolved(reader.path):
            reader.check_in_place()

    whole = reader.whole_size
    with ContainerWriter(target, names, force=force, room=lambda: f"about {size(whole)}", bound=whole) as writer:
        for slab in slabs:
            if isinstance(slab.owner, int) and slab.owner in changed:
                encoded = workers.map(partial(_encode, reader, changed[slab.owner]), slab.chunks)
                _write(writer, slab, encoded, tables[slab.owner])
            else:
                for part, name, frames_of_part in slab.entries:
                    writer.append(name, [reader.stored_frame(slab.owner, part, index) for index in frames_of_part])
            progress(slab.nbytes)
        for index, parts in tables.items():
            manifest.storages[index].parts = parts or manifest.storages[index].parts
        writer.finish(manifest, check_replaced)


def _slabs(reader: ContainerReader) -> Iterator[_Slab]:
    """Everything that has entries."""
    for owner, record in reader.owners():
        layout, places = layout_of(record, reader.codec(owner)), reader.places[owner]
        for chunks, entries in slab_entries(record, layout, reader.manifest.slab) if layout else ():
            offset = min(places[part].offsets[frames_of_part.start] for part, _, frames_of_part in entries)
            numel = min(chunks.stop * header.FRAME, record.numel) - chunks.start * header.FRAME
            yield _Slab(owner, chunks, entries, offset, numel * record.dtype.itemsize)


def _encode(reader: ContainerReader, parts_of: Callable[[int], Arrays], chunk: int) -> Encoded:
    """The frames of every part of a chunk, and how its symbols are packed."""
    parts, packings = packed(parts_of(chunk), reader.backend)
    return {name: (stored, packings.get(name)) for name, stored in frames.encode_parts(parts, packings).items()}


def _write(writer: ContainerWriter, slab: _Slab, chunks: Iterable[Encoded], tables: Tables) -> None:
    """Write its entries from encoded chunks, and add their frames to ``tables``."""
    entries: dict[str, list[bytes | memoryview]] = {part: [] for part, _, _ in slab.entries}
    for encoded in chunks:
        for part, (stored, packing) in encoded.items():
            tables.setdefault(part, FrameTable()).add(stored, packing)
            entries[part] += [frame for frame, _ in stored]
    for part, name, _ in slab.entries:
        writer.append(name, entries[part])
