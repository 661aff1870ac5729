"""Writes a ``.ckpt8`` that is either complete under its name or not there at all."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from ckpt8.container import header
from ckpt8.container.header import Entry, pack_manifest
from ckpt8.container.kept_bases import unneeded_file
from ckpt8.container.manifest import Manifest
from ckpt8.container.manifest_json import manifest_json
from ckpt8.container.reader import ContainerReader
from ckpt8.core.closing import Closing
from ckpt8.core.errors import Ckpt8Error, OutputError
from ckpt8.core.files.atomic import AtomicFile, Room
from ckpt8.core.files.write_at import PIECE, start_writeback, write_all_at

_WRITEBACK = 1 << 23
"""Bytes after which to start the flush to the disk: to start it for every small entry takes longer than writing it."""


class ContainerWriter(Closing):
    """Appends entries after a reserved header, then fills the header in. A context manager.

    The header has room for entries of these ``names``. Where it needs more in the end, the data is moved.

    ``tidy`` is that of ``Partial``; ``room`` says how long the file becomes, for an error.
    """

    def __init__(
        self, target: Path, names: Iterable[str], *, force: bool, tidy: bool = True, room: Room | None = None
    ) -> None:
        self._header_size = header.reserved_size(names)
        self._data_start = header.LENGTH_BYTES + self._header_size
        self._entries: list[Entry] = []
        self._position = self._written = self._handed_over = 0
        self._waiting: list[bytes | memoryview] = []
        self._output = AtomicFile(target, force=force, check=unneeded_file, tidy=tidy, room=room)
        self._descriptor = self._output.file.fileno()

    def close(self) -> None:
        """Remove the file, unless it is finished."""
        self._output.close()

    def append(self, name: str, frames: Sequence[bytes | memoryview]) -> None:
        """Write one entry, whole: small ones with those that follow."""
        start = self._position
        self._waiting += frames
        self._position += sum(map(len, frames))
        self._entries.append(Entry(name, start, self._position))
        if self._position - self._written >= PIECE:
            self._write()

    def _write(self) -> None:
        """Write the waiting frames, and start the flush of what is written to the disk."""
        with self._output.guard():
            self._written += write_all_at(self._descriptor, self._waiting, self._data_start + self._written)
            self._waiting.clear()
            if self._written - self._handed_over >= _WRITEBACK:
                place, length = self._data_start + self._handed_over, self._written - self._handed_over
                start_writeback(self._descriptor, place, length)
                self._handed_over = self._written

    def mark(self) -> int:
        """The number of entries written so far."""
        return len(self._entries)

    def rollback(self, mark: int) -> None:
        """Take back every entry written since ``mark``."""
        if mark == len(self._entries):
            return
        self._write()
        self._position = self._written = self._entries[mark].start
        self._handed_over = min(self._handed_over, self._written)
        del self._entries[mark:]
        with self._output.guard():
            os.ftruncate(self._descriptor, self._data_start + self._position)

    def finish(self, manifest: Manifest, last_look: Callable[[Path], object] = lambda _: None) -> bytes:
        """Write manifest, header and seal, and publish the file, see ``AtomicFile.publish``. Returns the seal.

        Raises OutputError where it cannot be written, or where the reader would refuse what it states.
        """
        stored = pack_manifest(manifest_json(manifest), self._data_start + self._position + header.SEAL_BYTES)
        self.append(header.MANIFEST, [stored])
        self._write()
        start = self._position
        entries = [*self._entries, Entry(header.SEAL, start, start + header.SEAL_BYTES)]
        try:
            head = header.render(entries, self._header_size, manifest.version)
        except ValueError:
            head = header.render(entries, None, manifest.version)
            self._move(len(head) - self._data_start)
        seal = hashlib.sha256(head + stored).digest()
        with self._output.guard():
            write_all_at(self._descriptor, [seal], self._data_start + start)
            write_all_at(self._descriptor, [head], 0)
        self._check_readable()
        self._output.publish(last_look)
        return seal

    def _check_readable(self) -> None:
        """Read header and manifest, not the data, as any reader will. Raises OutputError where it refuses them."""
        with self._output.guard():
            self._output.path.stat()  # somebody may have removed the folder
        try:
            ContainerReader(self._output.path).close()
        except Ckpt8Error as exc:
            why = str(exc).removeprefix(f"{self._output.path}: ")
            raise OutputError(f"{self._output.target}: would not be readable: {why}; nothing was written") from exc

    def _move(self, by: int) -> None:
        """Make the header longer: move all data, the last piece first."""
        with self._output.guard():
            for start in reversed(range(0, self._position, PIECE)):
                place = self._data_start + start
                piece = os.pread(self._descriptor, min(PIECE, self._position - start), place)
                write_all_at(self._descriptor, [piece], place + by)
        self._data_start += by
