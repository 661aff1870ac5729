"""Writes a ``.ckpt8`` so that it is either complete under its name, or not there at all."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import zstandard

from ckpt8.container import header
from ckpt8.container.header import Entry
from ckpt8.container.manifest import Manifest
from ckpt8.errors import OutputError

_BUFFER = 1 << 20
_MANIFEST_LEVEL = 9
PARTIAL_SUFFIX = ".ckpt8-partial"
_NAME_KEPT = 40
"""Characters of the target's name that the temporary file repeats: at most 160 bytes."""


unfinished: dict[Path, int] = {}
"""Temporary files and directories and their processes: a signal may strike before the ``with`` that would remove one
is entered."""


@atexit.register
def _remove_unfinished() -> None:
    for path, process in unfinished.items():
        if process == os.getpid():
            remove(path)


def remove(path: Path) -> None:
    """Remove a temporary file or directory as far as that can be done."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def partial_path(final: Path) -> Path:
    """A name for a temporary file or directory beside ``final``."""
    return final.with_name(f".{final.name[:_NAME_KEPT]}.{secrets.token_hex(4)}{PARTIAL_SUFFIX}")


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


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk. Raises OSError."""
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


class AtomicFile:
    """A temporary file beside ``target`` that takes its name on ``publish`` and vanishes otherwise.

    Every OSError becomes an OutputError that names the target.
    """

    def __init__(self, target: Path, *, force: bool) -> None:
        self.target = target
        with self.guard():
            # Through a symbolic link to what it names; the temporary file must be on the same file system.
            self._final = target.resolve()
            exists = target.exists() or target.is_symlink()
            if self._final.exists() and not self._final.is_file():
                raise OutputError(f"{target}: exists and is not a regular file")
            if exists and not force:
                raise OutputError(f"{target}: exists; use --force to replace it, or give another name")
            self.path = partial_path(self._final)
            unfinished[self.path] = os.getpid()
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            self.file: BinaryIO = os.fdopen(descriptor, "r+b", buffering=_BUFFER)

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an OSError of the body into an OutputError."""
        try:
            yield
        except OSError as exc:
            raise OutputError(f"{self.target}: cannot be written: {exc.strerror or exc}") from exc

    def publish(self) -> None:
        """Flush to the disk, rename to the target, flush the directory."""
        with self.guard():
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.path.replace(self._final)
            unfinished.pop(self.path, None)
            sync_directory(self._final.parent)

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.suppress(OSError):
            self.file.close()
        remove(self.path)
        unfinished.pop(self.path, None)


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
        self._output.__exit__(kind, error, trace)

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
