"""Reads bytes of source files by position. A short read, or a file that changes meanwhile, raises InputError.

``open_range`` opens a file, or an object of a store. Other URLs are refused where a path is expected. ``combine`` makes
the CRC-32 of a whole from those of two pieces and the length of the second, so that different threads can check them.
"""

from __future__ import annotations

import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from isal.isal_zlib import crc32
from isal.isal_zlib import crc32_combine as combine

from ckpt8.core.backend import runs_numba
from ckpt8.core.errors import InputError, MissingError, UsageError, require, system_errors

if TYPE_CHECKING:
    from ckpt8.core.arrays import Array
    from ckpt8.core.files.stores.folder import FolderOutput
    from ckpt8.core.files.stores.writing import ObjectOutput

__all__ = ["combine", "crc32"]

T = TypeVar("T")

_TOOLS = {
    "http": "curl -LO",
    "https": "curl -LO",
    "s3": "aws s3 cp",
    "gs": "gcloud storage cp",
    "hf": "hf download",
}


class RemotePath(PosixPath):
    """A path to an object of a store, see ``stores.path.StorePath``."""

    def open_range(self, source: ByteRange) -> SourceFile:
        """An open range of the object."""
        raise NotImplementedError

    def check_target(self) -> None:
        """Raise UsageError for a store that is only read."""
        raise NotImplementedError

    def iterdir(self) -> Generator[RemotePath, None, None]:
        """What is right below."""
        raise NotImplementedError

    def listed(self) -> RemotePath:
        """The folder as one list shows it now."""
        raise NotImplementedError

    def answer(self, question: Hashable, ask: Callable[[], T]) -> T:
        """What is answered to a question about the version of the object that this path sees."""
        raise NotImplementedError

    def new_object(
        self, *, force: bool, check: Callable[[Path], str], reserved: int = 0, bound: int = 0
    ) -> ObjectOutput:
        """What writes the object."""
        raise NotImplementedError

    def new_objects(self) -> FolderOutput:
        """What writes a directory."""
        raise NotImplementedError

    def remove_objects(self, turn: Callable[[str], int]) -> None:
        """Remove a directory that was listed."""
        raise NotImplementedError

    def without_remains(self, *, remove: bool) -> RemotePath:
        """The folder as one list shows it now, without what killed processes left of directories in it."""
        raise NotImplementedError


def resolved(path: Path) -> Path:
    """The place to which a path leads, without links; of links in a circle, the path. Raises nothing."""
    return path.resolve() if isinstance(path, RemotePath) else Path(os.path.realpath(path))


def listed(folder: Path) -> Path:
    """The folder as it is now: one of a store is listed, and that answers all questions to it. Raises InputError."""
    return folder.listed() if isinstance(folder, RemotePath) else folder


Entry: TypeAlias = "os.DirEntry[str] | RemotePath"


def scan(folder: Path) -> Sequence[Entry]:
    """What is right in a folder: its name, its kind, and links. Raises OSError."""
    if isinstance(folder, RemotePath):
        return list(folder.iterdir())
    with os.scandir(folder) as entries:
        return list(entries)


def is_folder(entry: Entry) -> bool:
    """Whether an entry is a folder or a link to one; False where a link leads in a circle, or to what is not open."""
    with nullcontext() if isinstance(entry, RemotePath) else suppress(OSError):
        return entry.is_dir()
    return False


def refuse_target(target: Path) -> None:
    """Raise UsageError for a URL to which nothing is written."""
    refuse_url(target)
    if isinstance(target, RemotePath):
        target.check_target()


def refuse_url(path: Path) -> None:
    """Raise UsageError for a URL that is not read in place, unless there is a folder of its first name."""
    if isinstance(path, RemotePath):
        return
    # A path has lost one of the two slashes.
    match = re.fullmatch(r"([a-z][a-z0-9+.-]+):/+(.*)", os.fspath(path), re.IGNORECASE | re.DOTALL)
    if match is None or os.path.lexists(path.parts[0]):
        return
    scheme, rest = match.groups()
    tool = _TOOLS.get(scheme.lower())
    if scheme.lower() == "file":
        rest = f"/{rest}"
        what = f"give the path alone, {rest}"
    else:
        what = f"copy it to or from a local file{f' with {tool}' if tool else ''}"
    # Where an object is read, it is a RemotePath.
    is_read = scheme.lower() in ("s3", "hf")
    why = "which is not read or written here" if is_read else "and ckpt8 reads and writes local files"
    raise UsageError(f"{scheme}://{rest}: is a URL, {why}; {what}")


def reading(name: object) -> AbstractContextManager[None]:
    """Turn an OSError of the block into an InputError: ``name`` cannot be read."""

    def unread(exc: OSError) -> InputError:
        error = MissingError if isinstance(exc, FileNotFoundError) else InputError
        return error(f"{name}: cannot be read: {exc.strerror}")

    return system_errors(unread)


@dataclass(frozen=True, slots=True)
class ByteRange:
    """A readable stretch of a file: a whole ``.pt``, or a slice inside a larger file. Offsets in bytes.

    Messages show the ``name``, where there is one, after the path.
    """

    path: Path
    offset: int
    length: int
    name: str = ""

    @classmethod
    def of(cls, path: Path) -> ByteRange:
        """The whole file. Raises InputError unless it is a regular file that can be read, UsageError for a URL."""
        refuse_url(path)
        with reading(path):
            require(path.is_file() or not path.exists(), f"{path}: is not a regular file, expected a checkpoint")
            return cls(path, 0, path.stat().st_size)

    def __str__(self) -> str:
        return f"{self.path}: {self.name}" if self.name else str(self.path)


def read_pieces(read_into: Callable[[int, memoryview], None], starts: Array, length: int, buffer: memoryview) -> None:
    """Fill ``buffer`` with pieces of ``length`` bytes, which begin at ``starts``, one by one."""
    for at, start in enumerate(starts.tolist()):
        read_into(start, buffer[at * length : (at + 1) * length])


class SourceFile:
    """An open ByteRange, read by position. Safe to share between threads."""

    ahead = 1 << 12
    """Bytes that a reader of small records may read at once: more costs as much."""

    in_order = False
    """Whether all of it is best read from its beginning to its end."""

    _fd = -1
    """Subclasses that read from elsewhere open nothing, and close nothing."""

    def __init__(self, source: ByteRange) -> None:
        self.source = source
        with reading(source):
            self._fd = os.open(source.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        self._place: Path | int = self._fd
        self._identity = self._identify(self._place)

    def _identify(self, file: Path | int) -> tuple[int, int, int, int]:
        with reading(self.source):
            status = os.stat(file)  # noqa: PTH116 - of a path or a descriptor
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns

    @property
    def stored(self) -> int:
        """Bytes that the source takes on the disk: fewer than its length where it is compressed."""
        return self.source.length

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which offsets and lengths will be read, in their order. A store then sends them ahead."""

    def expect_all(self) -> None:
        """Say that all will be read, after a look at the end. A store then sends it ahead."""

    def need(self, start: int, length: int) -> None:
        """Say that these bytes are read now, piece by piece. A store then sends them at once."""

    def keep_all(self, *, needs_room: bool = False) -> None:
        """Say that the same bytes will be read again, in any order. A store then sends them once.

        It takes as much room for temporary files. Where there is none and it ``needs_room`` they are sent again.
        """

    def close(self) -> None:
        """Release the file descriptor."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset`` of the range. Raises InputError on a short or failed read."""
        self._check_extent(offset, len(buffer))
        self._read_at(self._fd, offset, buffer)

    def read_each(self, starts: Array, length: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with pieces of ``length`` bytes, which begin at ``starts``, int64. Raises InputError."""
        done = 0
        if self._fd >= 0 and len(starts) and runs_numba():
            from ckpt8.core.files import pieces_numba

            self._check_extent(int(starts.min()), length)
            self._check_extent(int(starts.max()), length)
            done = pieces_numba.read(self._fd, starts + self.source.offset, length, buffer)
        read_pieces(self.read_into, starts[done:], length, buffer[done * length :])

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
        self._check_extent(offset, length)
        buffer = bytearray(length)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def _check_extent(self, offset: int, length: int) -> None:
        if length < 0 or offset < 0 or offset + length > self.source.length:
            raise InputError(f"{self.source}: ends at byte {self.source.length}, needed {offset + length}")

    def check_unchanged(self) -> None:
        """Raise InputError when what is read changed: by size, modification time, or in a pool another file."""
        self._check_same(self._place)

    def check_in_place(self) -> None:
        """Raise InputError when what is read changed, or another file has taken the path."""
        self._check_same(self.source.path)

    def _check_same(self, file: Path | int) -> None:
        require(
            self._identify(file) == self._identity, f"{self.source}: changed while it was read; nothing was written"
        )


class Window(SourceFile):
    """``length`` bytes of ``base`` from ``offset`` on; messages call them ``name``. Closing it leaves ``base`` open."""

    def __init__(self, base: SourceFile, offset: int, length: int, name: str) -> None:
        self.source = ByteRange(base.source.path, offset, length, name)
        self._base = base

    @property
    def stored(self) -> int:
        """Bytes that the window takes on the disk: no more than its base."""
        return min(self.source.length, self._base.stored)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` with the bytes at ``offset`` of the stretch. Raises InputError."""
        self._check_extent(offset, len(buffer))
        self._base.read_into(self.source.offset + offset, buffer)

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Say which ranges of the stretch will be read."""
        self._base.expect((self.source.offset + start, length) for start, length in ranges)

    def check_unchanged(self) -> None:
        """Raise InputError when the file changed since it was opened."""
        self._base.check_unchanged()


class _Handle:
    """An open file descriptor; it closes when its last reader drops it."""

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)


class FilePool:
    """Keeps the most recently used descriptors open. Thread-safe.

    By default 64, fewer than any system allows: directories are read in order, so few files are in use at once.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit, self._lock = limit, threading.Lock()
        self._handles: OrderedDict[Path, _Handle] = OrderedDict()

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
        """Drop all files."""
        with self._lock:
            self._handles.clear()


class PooledFile(SourceFile):
    """A SourceFile whose descriptor comes from a pool. It is unchanged as long as its inode, size and time are."""

    def __init__(self, source: ByteRange, pool: FilePool) -> None:
        self.source, self._pool, self._place = source, pool, source.path
        self._identity = self._identify(self._place)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill ``buffer`` from ``offset``. Raises InputError, also where another file has taken the path."""
        self._check_extent(offset, len(buffer))
        with reading(self.source):
            handle, opened = self._pool.get(self.source.path)
        if opened:
            self._check_same(handle.descriptor)
        self._read_at(handle.descriptor, offset, buffer)


@contextmanager
def sent_ahead(path: Path) -> Iterator[None]:
    """Have all of an object of a store sent in the block, before it is known what is in it. Raises InputError."""
    if isinstance(path, RemotePath):
        with closing(open_range(ByteRange.of(path))) as file:
            file.expect_all()
            yield
    else:
        yield


def open_range(source: ByteRange, pool: FilePool | None = None) -> SourceFile:
    """Open a file, or an object of a store. Raises InputError. A ``pool`` bounds how many files are open at a time."""
    if isinstance(source.path, RemotePath):
        with reading(source):
            return source.path.open_range(source)
    return SourceFile(source) if pool is None else PooledFile(source, pool)
