"""A place in a store as a Path.

It answers what files are asked: size, kind, content. ``os.fspath`` of it raises, so that no call of the system takes
``s3://bucket/key`` for a local file of that name.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import IO, Any

from ckpt8.core.errors import UsageError
from ckpt8.core.files.source_file import ByteRange, RemotePath, SourceFile
from ckpt8.core.files.stores.contract import Store
from ckpt8.core.files.stores.reading import Content, StoreFile


@functools.cache
def _store(bucket: str) -> Store:
    from ckpt8.core.files.stores.s3 import S3Store

    return S3Store(bucket)


class StorePath(RemotePath):
    """``s3://bucket/key``. It sees one version of the object: that of its first question, and an error afterwards.

    A call or command makes one and hands it on, so all its readers share what was fetched. Paths that derive from it,
    such as ``parent``, see for themselves. A store has no directories.
    """

    _seen: tuple[Content | None] | None = None

    def __str__(self) -> str:
        return "://".join(super().__str__().split(":/", 1))

    def __fspath__(self) -> str:
        raise TypeError(f"{self}: BUG: the system was asked for an object of a store")

    @property
    def content(self) -> Content | None:
        """The version of the object that this path sees, None where there was none. Raises InputError, UsageError."""
        if self._seen is None:
            _, bucket, *key = self.parts
            self._seen = (Content.at(str(self), _store(bucket), "/".join(key)),)
        return self._seen[0]

    def open_range(self, source: ByteRange) -> SourceFile:
        """An open range of the object. Raises InputError."""
        return StoreFile(source, self._existing())

    def _existing(self) -> Content:
        if self.content is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return self.content

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        """Kind, size and time. The mode restricts no copy of the object: who may read it is not in it."""
        version = self._existing().version
        times = (version.changed, version.changed, version.changed)
        return os.stat_result((stat.S_IFREG | 0o666, 0, 0, 1, os.getuid(), os.getgid(), version.size, *times))

    def lstat(self) -> os.stat_result:
        """As ``stat``: a store has no links."""
        return self.stat()

    def is_file(self, **_: Any) -> bool:
        """Whether there is an object."""
        return self.content is not None

    def exists(self, **_: Any) -> bool:
        """Whether there is an object."""
        return self.is_file()

    def is_dir(self, **_: Any) -> bool:
        """False."""
        return False

    def is_symlink(self) -> bool:
        """False."""
        return False

    def is_mount(self) -> bool:
        """False."""
        return False

    def resolve(self, strict: bool = False) -> StorePath:  # noqa: ARG002
        """The path itself."""
        return self

    def absolute(self) -> StorePath:
        """The path itself."""
        return self

    def samefile(self, other: object) -> bool:
        """Whether the other path is of the same object."""
        return isinstance(other, StorePath) and other == self

    def iterdir(self) -> Generator[StorePath, None, None]:
        """Raises NotADirectoryError."""
        raise NotADirectoryError(errno.ENOTDIR, "a store has no directories", str(self))

    def open(self, *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        """The object as a stream of bytes to read. Raises OSError, InputError."""
        self._existing()
        return io.BufferedReader(_Stream(self.open_range(ByteRange.of(self))))


class _Stream(io.RawIOBase):
    """A SourceFile as a stream; it closes the file."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.source.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._file.source.length - self._at))
        self._file.read_into(self._at, out[:count])
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def store_path(url: str) -> Path:
    """The path of an object. Raises UsageError for a URL that names none."""
    path = StorePath(url)
    if len(path.parts) < 3:
        raise UsageError(f"{path}: names no object; give s3://BUCKET/KEY")
    if ".." in path.parts:
        raise UsageError(f"{path}: has .. in its key; give the key itself")
    return path
