"""Writes a ``.ckpt8`` so that it is either complete under its name, or not there at all."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import zstandard

from ckpt8.container import header
from ckpt8.container.atomic import AtomicOutput
from ckpt8.container.header import Entry
from ckpt8.container.manifest import Manifest
from ckpt8.container.partial import Partial
from ckpt8.errors import OutputError

_BUFFER = 1 << 20
_MANIFEST_LEVEL = 9


def refuse_same_file(target: Path, source: Path) -> None:
    """Raise OutputError when the target is the very file that is read."""
    with contextlib.suppress(OSError):
        if target.samefile(source):
            raise OutputError(f"{target}: is the file that is read; give another name")


def refuse_inside(target: Path, directory: Path) -> None:
    """Raise OutputError when the target lies in the very directory that is read, or holds."""
    with contextlib.suppress(OSError):
        if directory.is_dir() and directory.resolve() in target.resolve().parents:
            raise OutputError(f"{target}: lies in the directory {directory}; give a place outside of it")


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Let the kernel begin to write a range to the disk, so that the flush at the end finds little left to do."""
    if hasattr(os, "posix_fadvise") and length:
        os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


class AtomicFile(AtomicOutput):
    """A file that is written beside ``target``."""

    what = "regular file"

    def __init__(self, target: Path, *, force: bool) -> None:
        super().__init__(target, force=force)
        with self.guard():
            self._partial = Partial(self._final, mode=0o666)
            # The descriptor stays with the temporary: it holds the lock until the file has its name.
            self.file: BinaryIO = os.fdopen(self._partial.descriptor, "r+b", buffering=_BUFFER, closefd=False)

    def _is_replaceable(self) -> bool:
        return self._final.is_file()

    def publish(self) -> None:
        """Flush to the disk, rename to the target, flush the directory."""
        with self.guard():
            self.file.flush()
            os.fsync(self._partial.descriptor)
            self._take_name()

    def _replace(self) -> None:
        self.path.replace(self._final)

    def close(self) -> None:
        """As every AtomicOutput; what is not written yet is dropped."""
        with contextlib.suppress(OSError):
            self.file.close()
        super().close()


class ContainerWriter:
    """Appends entries behind a reserved header, then fills the header in. Use as a context manager."""

    def __init__(self, target: Path, names: Iterable[str], *, force: bool) -> None:
        self._header_size = header.reserved_size(names)
        self._entries: list[Entry] = []
        self._position = 0
        self._output = AtomicFile(target, force=force)
        with self._output.guard():
            self._output.file.seek(self._data_start)

    @property
    def _data_start(self) -> int:
        return header.LENGTH_BYTES + self._header_size

    def __enter__(self) -> ContainerWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.close()

    def append(self, name: str, frames: Iterable[bytes]) -> None:
        """Write one entry, whole."""
        start = self._position
        with self._output.guard():
            for frame in frames:
                self._output.file.write(frame)
                self._position += len(frame)
            start_writeback(self._output.file.fileno(), self._data_start + start, self._position - start)
        self._entries.append(Entry(name, start, self._position))

    def mark(self) -> int:
        """The number of entries written so far."""
        return len(self._entries)

    def rollback(self, mark: int) -> None:
        """Take back every entry written since ``mark``."""
        if mark == len(self._entries):
            return
        self._position = self._entries[mark].start
        del self._entries[mark:]
        with self._output.guard():
            self._output.file.seek(self._data_start + self._position)
            self._output.file.truncate()

    def finish(self, manifest: Manifest) -> None:
        """Write manifest, header and seal, and publish the file."""
        text = json.dumps(manifest.to_json(), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        stored = zstandard.ZstdCompressor(level=_MANIFEST_LEVEL).compress(text.encode("ascii"))
        self.append(header.MANIFEST, [stored])
        start = self._position
        entries = [*self._entries, Entry(header.SEAL, start, start + header.SEAL_BYTES)]
        head = header.render(entries, self._header_size, manifest.version)
        with self._output.guard():
            self._output.file.write(hashlib.sha256(head + stored).digest())
            self._output.file.seek(0)
            self._output.file.write(head)
        self._output.publish()
