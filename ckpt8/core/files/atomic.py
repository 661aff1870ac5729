"""Files and directories that appear whole or not at all: their checks, temporaries and renames."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import stat
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import BinaryIO

from ckpt8.core.closing import Closing
from ckpt8.core.errors import OutputError
from ckpt8.core.files.partial import Partial, locked, partial_path, remove
from ckpt8.core.files.urls import refuse_url

Check = Callable[[Path], str]
"""Describes what is at a path. Raises OutputError where it must not be replaced, and OSError."""

Room = Callable[[], str]
"""Says how many bytes an output takes, in words."""

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_NOREPLACE, _EXCHANGE = 1, 2
"""Flags of renameat2."""
_AT_FDCWD = -100
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EPERM)

_sources: ContextVar[tuple[os.stat_result, ...]] = ContextVar("_sources", default=())

_noted: ContextVar[list[str] | None] = ContextVar("_noted", default=None)

_STATUS = Path("/proc/self/status")
_UMASK = re.compile(rb"^Umask:\s*([0-7]+)$", re.MULTILINE)
_changing_umask = threading.Lock()


@contextlib.contextmanager
def as_private_as(*sources: Path) -> Iterator[None]:
    """Have no output of the block more open to other users than any of ``sources``. Those that are missing say nothing.

    Of a directory the mode of its top counts.
    """
    known = []
    for source in sources:
        with contextlib.suppress(OSError):
            known.append(source.stat())
    token = _sources.set((*_sources.get(), *known))
    try:
        yield
    finally:
        _sources.reset(token)


@contextlib.contextmanager
def noting_replaced() -> Iterator[list[str]]:
    """Descriptions of what the outputs of the block replaced, in their order."""
    found: list[str] = []
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def mode_of_output(*, directory: bool, group: int | None = None, replaced: os.stat_result | None = None) -> int:
    """The permissions of an output that belongs to ``group``, by default that of the process.

    Those that the umask leaves, as far as all sources and the file that is ``replaced`` grant them. Members of a group
    that is not that of a source get what it grants to everybody. The owner may read a file, and do all in a directory.
    """
    mode = (0o777 if directory else 0o666) & ~_umask()
    for status in (*_sources.get(), *([] if replaced is None else [replaced])):
        granted = status.st_mode & 0o666
        if status.st_gid != (os.getegid() if group is None else group):
            granted &= ~0o070 | (granted & 0o007) << 3
        mode &= granted | (granted & 0o444) >> 2 if directory else granted
    return mode | (0o700 if directory else 0o400)


def _umask() -> int:
    with contextlib.suppress(OSError):
        if found := _UMASK.search(_STATUS.read_bytes()):
            return int(found[1], 8)
    # The system tells it only to those who change it, for all threads.
    with _changing_umask:
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


class AtomicOutput(Closing):
    """A temporary next to ``target`` that takes its name on ``publish``, or is removed. A context manager.

    It is open to its user alone until then, see ``mode_of_output``.

    A subclass names ``what`` it makes; ``is_kind`` tells whether a path leads to such a thing. With ``force`` it
    replaces an existing target if ``check`` accepts that, now and again on ``publish``; ``replaced`` then describes the
    old target. Every OSError becomes an OutputError that names the target, and where there is too little room what it
    needs, see ``Room``; a URL is a UsageError.
    """

    what: str
    is_kind: Callable[[Path], bool]
    _partial: Partial

    def __init__(self, target: Path, *, force: bool, check: Check, room: Room | None = None) -> None:
        self.target = target
        self._room = room
        self.replaced: str | None = None
        self._force = force
        self._check = check
        refuse_url(target)
        with self.guard():
            # Resolve symbolic links: the temporary must be on the file system of the final target.
            self._final = target.resolve()
            self.examine(target, force=force, check=check)

    @classmethod
    def examine(cls, target: Path, *, force: bool, check: Check) -> str | None:
        """The description of what a ``target`` would replace, if anything; writes nothing.

        Raises OutputError where it may not be replaced, and OSError.
        """
        if target.exists() and not cls.is_kind(target):
            raise OutputError(f"{target}: exists and is not a {cls.what}")
        if not force and (target.exists() or target.is_symlink()):
            raise _exists(target)
        return check(target.resolve()) if target.exists() else None

    def _look(self) -> str | None:
        """The description of the existing target, if any. Raises OutputError if it must stay."""
        return self._check(self._final) if self._final.exists() else None

    @property
    def path(self) -> Path:
        """The temporary."""
        return self._partial.path

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an OSError of the body into an OutputError."""
        try:
            yield
        except OSError as exc:
            raise OutputError(f"{self.target}: cannot be written: {exc.strerror or exc}{self._needs(exc)}") from exc

    def _needs(self, error: OSError) -> str:
        """The room that the output needs, where an error says that there is too little."""
        return f"; it needs {self._room()}" if error.errno in _NO_ROOM and self._room is not None else ""

    def _open_up(self, file: Path | int) -> None:
        """Give a file or directory of the output, which is open to nobody so far, its permissions. Raises OSError."""
        replaced = None
        with contextlib.suppress(FileNotFoundError):
            replaced = self._final.stat()
        status = os.stat(file)  # noqa: PTH116 - of a path or a descriptor
        mode = mode_of_output(directory=stat.S_ISDIR(status.st_mode), group=status.st_gid, replaced=replaced)
        # Some file systems have no permissions.
        with contextlib.suppress(PermissionError, NotImplementedError):
            os.chmod(file, mode)  # noqa: PTH101

    def _take_name(self, replace: Callable[[Path, Path], object]) -> None:
        """Rename to the target, with ``force`` by ``replace``, and flush the name to the disk."""
        if self._force:
            self.replaced = self._look()
            replace(self.path, self._final)
            if self.replaced is not None and (noted := _noted.get()) is not None:
                noted.append(self.replaced)
        else:
            try:
                rename_new(self.path, self._final)
            except FileExistsError as exc:
                raise _exists(self.target) from exc
        sync_directory(self._final.parent)

    def close(self) -> None:
        """Remove the temporary, unless it has become the target."""
        self._partial.close()


def _exists(target: Path) -> OutputError:
    return OutputError(f"{target}: exists; use --force to replace it, or give another name")


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, where the file system can. Raises OSError."""
    try:
        directory = os.open(path, os.O_RDONLY)
    except PermissionError:
        return  # one may write into a directory that one may not list
    try:
        os.fsync(directory)
    except OSError as exc:
        if exc.errno not in _UNSUPPORTED:
            raise
    finally:
        os.close(directory)


def _renameat2(old: Path, new: Path, flags: int) -> bool:
    """Call renameat2; False if the system has no such call or the file system no such flag. Raises OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if function is None:
        return False
    if function(_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(old), None, str(new))


def rename_new(old: Path, new: Path) -> None:
    """Rename to an unused name. Raises FileExistsError, OSError."""
    if _renameat2(old, new, _NOREPLACE):
        return
    if os.path.lexists(new):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(new))
    old.rename(new)


def replace_directory(new: Path, final: Path) -> None:
    """Replace the directory ``final`` with ``new``: in one step where the system can exchange two names.

    Elsewhere the old directory is moved aside first, and back if the new one cannot take its place. Raises OSError.
    """
    if not final.exists():
        rename_new(new, final)
    elif _renameat2(new, final, _EXCHANGE):
        remove(new)
    else:
        _replace_in_two_steps(new, final)


def _replace_in_two_steps(new: Path, final: Path) -> None:
    old = partial_path(final)
    with locked(final):
        try:
            final.rename(old)
            new.rename(final)
        except BaseException:
            with contextlib.suppress(OSError):
                rename_new(old, final)
            raise
    remove(old)


def refuse_source(target: Path, source: Path) -> None:
    """Raise OutputError when the target is the very file that is read, or lies in the directory that is read."""
    with contextlib.suppress(OSError):
        if target.exists() and target.samefile(source):
            raise OutputError(f"{target}: is the file that is read; give another name")
        if source.is_dir() and source.resolve() in target.resolve().parents:
            raise OutputError(f"{target}: lies in the directory {source}; give a place outside of it")


def any_file(path: Path) -> str:
    """Describe the file at ``path``: the check for a target that the user named. Raises OSError."""
    return f"{path}: a file of {path.stat().st_size:,} bytes"


class AtomicFile(AtomicOutput):
    """A file, written next to ``target`` first. ``tidy`` is that of ``Partial``."""

    what = "regular file"
    is_kind = staticmethod(Path.is_file)

    def __init__(
        self, target: Path, *, force: bool, check: Check = any_file, tidy: bool = True, room: Room | None = None
    ) -> None:
        super().__init__(target, force=force, check=check, room=room)
        with self.guard():
            self._partial = Partial(self._final, tidy=tidy)
            # The descriptor stays with the temporary: it holds the lock until the file has its name.
            self.file: BinaryIO = os.fdopen(self._partial.descriptor, "r+b", closefd=False)

    def publish(self, last_look: Callable[[Path], object] = lambda _: None) -> None:
        """Set the permissions, flush to the disk, rename to the target, flush the directory.

        Before the rename ``last_look`` gets the path that the file is about to have; what it raises keeps the old file.
        """
        with self.guard():
            self.file.flush()
            self._open_up(self._partial.descriptor)
            os.fsync(self._partial.descriptor)
            last_look(self._final)
            self._take_name(Path.replace)

    def close(self) -> None:
        """Close the file and remove the temporary; buffered data is dropped."""
        with contextlib.suppress(OSError):
            self.file.close()
        super().close()


Guard = Callable[[], contextlib.AbstractContextManager[None]]
"""Makes a context that turns an OSError into an OutputError."""
