"""A stretch of a file as a file of its own."""

from __future__ import annotations

from dataclasses import dataclass

from ckpt8.errors import InputError
from ckpt8.source_file import ByteRange, SourceFile


@dataclass(frozen=True, slots=True)
class NamedRange(ByteRange):
    """A ByteRange that messages call by the path of its file and its own ``name``."""

    name: str

    def __str__(self) -> str:
        return f"{self.path}: {self.name}"


class Window(SourceFile):
    """``length`` bytes of ``base`` from ``offset`` on, called ``name`` in messages. ``base`` stays its owner's."""

    def __init__(self, base: SourceFile, offset: int, length: int, name: str) -> None:
        self.source = NamedRange(base.source.path, offset, length, name)
        self._base = base

    @property
    def stored(self) -> int:
        """Bytes on the disk: no more than those of ``base``."""
        return min(self.source.length, self._base.stored)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset`` of the stretch. Raises InputError."""
        if offset < 0 or offset + len(buffer) > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + len(buffer)}")
        self._base.read_into(self.source.offset + offset, buffer)

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self._base.check_unchanged()

    def close(self) -> None:
        """The file stays open."""
