"""What every reader gives: storages with their place in the source, and the tree of objects around them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

from ckpt8.errors import InputError
from ckpt8.tensors import DType


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


@dataclass(frozen=True, slots=True)
class StorageInfo:
    """One storage of the source.

    ``key`` is the reader's name for it, unique in the checkpoint. ``offset`` and ``nbytes`` place its bytes in the
    source. ``crc32`` is the checksum the source states for exactly these bytes, or None. ``crc_fields`` are offsets
    in the source of 4-byte little-endian fields that repeat ``crc32`` and must follow when the bytes change.
    ``dtype`` is the type it was saved with; UINT8 for untyped storages.
    """

    key: str
    dtype: DType
    offset: int
    nbytes: int
    crc32: int | None = None
    crc_fields: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StorageRef:
    """A storage as the pickle refers to it: a leaf that is not (yet) seen as a tensor.

    ``offset`` and ``numel`` are in elements of ``dtype``; a legacy view storage has a non-zero offset.
    """

    key: str
    dtype: DType
    numel: int
    offset: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class TensorRef:
    """A strided tensor over a storage. ``offset`` and ``stride`` are in elements of ``dtype``.

    ``conj`` and ``neg``: its values are the conjugate, or the negative, of what the storage holds.
    """

    key: str
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    conj: bool = False
    neg: bool = False

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements follow each other in the storage in the order of the dimensions."""
        expected = 1
        for size, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True


@dataclass(slots=True, eq=False)
class Inert:
    """An object of a class that is not interpreted: the global's name and everything it was built from."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None
    items: list[Any] = field(default_factory=list)
    pairs: list[tuple[Any, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Global:
    """A reference to a class or function by dotted name. It was not imported."""

    name: str


class Checkpoint(Protocol):
    """An open source. ``tree`` holds dict, list, tuple, scalars, and the types of this module; a set is an Inert."""

    format: str
    size: int
    storages: Sequence[StorageInfo]
    tree: Any

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with source bytes at ``offset``. Thread-safe. Raises InputError."""

    def check_unchanged(self) -> None:
        """Raise InputError when the source changed since it was opened."""


class Reader(Protocol):
    """Recognises and opens one format."""

    id: ClassVar[str]

    def sniff(self, source: ByteRange) -> bool:
        """Whether the content (never the name) is of this format."""

    def open(self, source: ByteRange) -> AbstractContextManager[Checkpoint]:
        """Open it. Raises InputError when it is damaged."""

    def read(self, file: SourceFile) -> Checkpoint:
        """As ``open``, from a file that the caller has opened and closes, and that may only look like one."""
