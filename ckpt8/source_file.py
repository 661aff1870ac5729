"""Bytes of a file, or of a run of them: read at a place, and never changed.

A short read, or a file that changes while it is read, is an InputError that names it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ckpt8.errors import InputError


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A readable stretch of a file: a whole ``.pt``, or a slice inside a larger file. Offsets in bytes."""

    path: Path
    offset: int
    length: int

    @classmethod
    def of(cls, path: Path) -> ByteRange:
        """The whole file. Raises InputError when it is missing, unreadable or not a regular file."""
        try:
            if path.exists() and not path.is_file():
                raise InputError(f"{path}: is not a regular file, expected a checkpoint")
            return cls(path, 0, path.stat().st_size)
        except OSError as exc:
            raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc

    def __str__(self) -> str:
        return str(self.path)


class SourceFile:
    """An open ByteRange, read by position. Safe to share between threads."""

    def __init__(self, source: ByteRange) -> None:
        self.source = source
        try:
            self._fd = os.open(source.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as exc:
            raise InputError(f"{source}: cannot be read: {exc.strerror}") from exc
        self._stamp = self._now()

    def _now(self) -> tuple[int, int]:
        status = os.fstat(self._fd)
        return status.st_size, status.st_mtime_ns

    @property
    def stored(self) -> int:
        """Bytes on the disk that all of the source comes from: fewer than it has where it is decompressed."""
        return self.source.length

    def close(self) -> None:
        """Release the file descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset`` of the range. Raises InputError on a short or failed read."""
        if offset < 0 or offset + len(buffer) > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + len(buffer)}")
        self._read_at(self._fd, offset, buffer)

    def _read_at(self, descriptor: int, offset: int, buffer: memoryview) -> None:
        done = 0
        try:
            while done < len(buffer):
                got = os.preadv(descriptor, [buffer[done:]], self.source.offset + offset + done)
                if got == 0:
                    raise InputError(f"{self.source}: became shorter while it was read")
                done += got
        except OSError as exc:
            raise InputError(f"{self.source}: read failed at byte {offset + done}: {exc.strerror}") from exc

    def read(self, offset: int, length: int) -> bytes:
        """The ``length`` bytes at ``offset``. The caller bounds ``length``."""
        if length < 0 or offset < 0 or offset + length > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + length}")
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the file's size or modification time changed since it was opened."""
        if self._now() != self._stamp:
            raise self._changed()

    def _changed(self) -> InputError:
        return InputError(f"{self.source}: changed while it was read; nothing was written")
