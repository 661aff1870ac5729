"""Files of a directory, any number of them, of which a few are open at a time."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from pathlib import Path

from ckpt8.errors import InputError
from ckpt8.source_file import ByteRange, SourceFile

_OPEN_FILES = 64
"""Fewer than any system allows; the pipeline reads a directory in order, so that few are needed at once."""


class _Handle:
    """An open file descriptor, closed when the last reader has let go of it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class FilePool:
    """Keeps the descriptors that were used last. Thread-safe."""

    def __init__(self, limit: int = _OPEN_FILES) -> None:
        self._limit = limit
        self._handles: OrderedDict[Path, _Handle] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, path: Path) -> tuple[_Handle, bool]:
        """The open file, and whether it has just been opened. Raises OSError."""
        with self._lock:
            handle = self._handles.pop(path, None)
            opened = handle is None
            handle = handle or _Handle(path)
            self._handles[path] = handle
            if len(self._handles) > self._limit:
                self._handles.popitem(last=False)
            return handle, opened

    def close(self) -> None:
        """Let go of all files."""
        with self._lock:
            self._handles.clear()


class PooledFile(SourceFile):
    """As SourceFile, with a descriptor from a pool. Files are the same as long as inode, size and time are."""

    def __init__(self, source: ByteRange, pool: FilePool) -> None:
        self.source = source
        self._pool = pool
        self._identity = self._identify(source.path)

    def _identify(self, file: Path | int) -> tuple[int, int, int, int]:
        try:
            status = os.stat(file)  # noqa: PTH116 - of a path or a descriptor
        except OSError as exc:
            raise InputError(f"{self.source}: cannot be read: {exc.strerror}") from exc
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """As SourceFile. Raises InputError, also where the path has become another file."""
        if offset < 0 or offset + len(buffer) > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + len(buffer)}")
        try:
            handle, opened = self._pool.get(self.source.path)
        except OSError as exc:
            raise InputError(f"{self.source}: cannot be read: {exc.strerror}") from exc
        if opened and self._identify(handle.descriptor) != self._identity:
            raise self._changed()
        self._read_at(handle.descriptor, offset, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the path leads to another file, or one of another size or time."""
        if self._identify(self.source.path) != self._identity:
            raise self._changed()

    def close(self) -> None:
        """The pool closes files."""
