"""Files and directories that appear whole or not at all: their checks, temporaries and renames.

Temporaries lie next to their targets; those that killed processes left are removed. A temporary is named
``.NAME.MACHINExxxxxxxx.ckpt8-partial``, and its process holds a lock on it. A later write to the same target removes
the temporaries that nobody locks. Where locks say nothing (the file system has none, or another machine may hold one
unseen) a temporary counts as abandoned after an hour without a change.

Files are written at a position, and their flush to the disk starts early.
"""

import atexit
import ctypes
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from operator import methodcaller
from pathlib import Path
from typing import BinaryIO

from ckpt8.core.closing import Closing, deferred, setting
from ckpt8.core.errors import OutputError, require, system_errors
from ckpt8.core.files.source_file import RemotePath, refuse_target, resolved

SUFFIX = ".ckpt8-partial"
IDLE_SECONDS = 3600
_NAME_KEPT = 40
"""Characters of the target's name that the temporary file repeats: at most 160 bytes."""
_ATTEMPTS = 16
NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


unfinished: dict[Path, int] = {}
"""Temporary files and directories with the process of each, removed at exit: a signal may strike before the ``with``
that would remove one."""


@atexit.register
def _remove_unfinished() -> None:
    for path, process in list(unfinished.items()):  # threads of saves may still make some
        if process == os.getpid():
            remove(path)


def writing(name: object) -> AbstractContextManager[None]:
    """Turn an OSError of the block into an OutputError: ``name`` cannot be written."""
    return system_errors(lambda exc: OutputError(f"{name}: cannot be written: {exc.strerror or exc}"))


def remove(path: Path) -> None:
    """Remove a file or directory as far as possible, also where a process may open hardly any more files."""
    with suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            # What is left goes with one descriptor in all: ``shutil.rmtree`` holds three for each level.
            for name in os.listdir(path):  # noqa: PTH208 - iterdir keeps its descriptor
                remove(path / name)
            path.rmdir()
        else:
            path.unlink()


def discard(path: Path) -> None:
    """Remove a file, or a directory, which first gets the name of a temporary: it never looks like one of fewer files.

    Raises OSError where it cannot be renamed or removed. What a killed process leaves goes as its temporaries do.
    """
    if path.is_dir() and not path.is_symlink():
        aside = partial_path(path)
        path.rename(aside)
        remove(aside)
    else:
        path.unlink()


class Partial:
    """A new file or directory, for this user alone, next to ``final``; ``descriptor`` is open and holds its lock.

    Its owner calls ``close`` in the end, which removes whatever still has its name. Without ``tidy`` the remains of
    killed processes stay, and the directory is not listed. Raises OSError.
    """

    def __init__(self, final: Path, *, directory: bool = False, tidy: bool = True) -> None:
        if tidy:
            remove_abandoned(final)
        for attempt in range(1, _ATTEMPTS + 1):
            self.path = partial_path(final)
            unfinished[self.path] = os.getpid()
            self.descriptor = -1
            try:
                if directory:
                    self.path.mkdir(0o700)
                    with suppress(FileNotFoundError):  # another run took it for abandoned
                        self.descriptor = os.open(self.path, os.O_RDONLY | NO_LINK)
                else:
                    self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK, 0o600)
                # Another run may have taken it for abandoned before it was locked.
                if _hold(self.descriptor, self.path) or attempt == _ATTEMPTS:
                    return
                self.close()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Release the lock, which makes room for a descriptor, and remove whatever has the name of the temporary."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
        if self.path in unfinished:
            remove(self.path)
            unfinished.pop(self.path, None)


def partial_path(final: Path) -> Path:
    """A name for a temporary next to ``final``."""
    return final.with_name(f".{final.name[:_NAME_KEPT]}.{_machine()}{secrets.token_hex(4)}{SUFFIX}")


@functools.cache
def _machine() -> str:
    """8 hexadecimal digits for the running kernel: its processes see each other's locks."""
    try:
        name = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        name = os.uname().nodename.encode()
    return f"{zlib.crc32(name):08x}"


def _hold(descriptor: int, path: Path) -> bool:
    """Lock an open temporary; False if another run has removed it or is about to."""
    if descriptor < 0:
        return False
    try:
        # Shared, because a directory on NFS cannot be locked otherwise.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # the file system has no locks: only the age counts
    return path.exists()


def remove_abandoned(final: Path) -> None:
    """Remove the temporaries of ``final`` whose processes are gone, as far as possible."""
    with suppress(OSError):
        remove_abandoned_of(re.escape(final.name[:_NAME_KEPT]), final.parent.iterdir())


def remove_abandoned_of(names: str, paths: Iterable[Path]) -> None:
    """Remove those of ``paths`` that dead processes left as temporaries of targets whose names match a pattern."""
    name = re.compile(rf"\.(?:{names})\.(?P<machine>[0-9a-f]{{8}})[0-9a-f]{{8}}{re.escape(SUFFIX)}")
    for path in paths:
        if not isinstance(path, RemotePath) and (match := name.fullmatch(path.name)) is not None:
            _remove_if_abandoned(path, ours=match["machine"] == _machine())


def _remove_if_abandoned(path: Path, *, ours: bool) -> None:
    with suppress(OSError):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | NO_LINK)
        except (IsADirectoryError, PermissionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | NO_LINK)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                ours = False
            last_change = max(entry.lstat().st_mtime for entry in (path, *path.rglob("*")))
            if ours or time.time() - last_change > IDLE_SECONDS:
                remove(path)
        finally:
            os.close(descriptor)


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
_changing_umask = threading.Lock()


def as_private_as(*sources: Path) -> AbstractContextManager[object]:
    """Have no output of the block more open to other users than any of ``sources``. Those that are missing say nothing.

    Of a directory the mode of its top counts.
    """
    known = []
    for source in sources:
        with suppress(OSError):
            known.append(source.stat())
    return setting(_sources, (*_sources.get(), *known))


@contextmanager
def noting_replaced() -> Iterator[list[str]]:
    """Descriptions of what the outputs of the block replaced, in their order."""
    replaced: list[str] = []
    with setting(_noted, replaced):
        yield replaced


def note_replaced(what: str) -> None:
    """Describe what an output has replaced to ``noting_replaced``."""
    if (noted := _noted.get()) is not None:
        noted.append(what)


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
    with suppress(OSError):
        if match := re.search(rb"^Umask:\s*([0-7]+)$", _STATUS.read_bytes(), re.MULTILINE):
            return int(match[1], 8)
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
        self.replaced: str | None = None
        self._is_remote = isinstance(target, RemotePath)
        self._force, self._check, self._room = force, check, room
        refuse_target(target)
        with self.guard():
            # Resolve symbolic links: the temporary must be on the file system of the final target.
            self._final = resolved(target)
            self.examine(target, force=force, check=check)

    @classmethod
    def examine(cls, target: Path, *, force: bool, check: Check) -> str | None:
        """The description of what a ``target`` would replace, if anything; writes nothing.

        Raises OutputError where it may not be replaced, and OSError.
        """
        if isinstance(target, RemotePath):
            return target.answer((cls, force, check), lambda: cls._examine(target, force=force, check=check))
        return cls._examine(target, force=force, check=check)

    @classmethod
    def _examine(cls, target: Path, *, force: bool, check: Check) -> str | None:
        # In this order: a store lists what may be a directory.
        problem = f"{target}: exists and is not a {cls.what}; give another name"
        require(cls.is_kind(target) or not target.exists(), problem, OutputError)
        if not force and (target.exists() or target.is_symlink()):
            raise exists_error(target)
        if target.exists():
            return check(resolved(target))
        if target.is_symlink():
            with suppress(FileNotFoundError):
                target.stat()  # links in a circle are an OSError
        return None

    @property
    def path(self) -> Path:
        """The temporary."""
        return self._partial.path

    def guard(self) -> AbstractContextManager[None]:
        """Turn an OSError of the body into an OutputError."""
        return system_errors(self._unwritten)

    def _unwritten(self, exc: OSError) -> OutputError:
        needs = f"; it needs {self._room()}" if exc.errno in _NO_ROOM and self._room is not None else ""
        where = f", in {tempfile.gettempdir()} (TMPDIR) first" if self._is_remote else ""
        return OutputError(f"{self.target}: cannot be written: {exc.strerror or exc}{needs}{where}")

    def _beside(self) -> Path:
        """The place beside which the temporary lies."""
        return workspace(self._final.parent) / self._final.name

    def expect(self, nbytes: int) -> None:
        """Raise OutputError where a file of ``nbytes`` has no room in the folder of temporary files, if it goes there.

        A disk that is full is found when it is.
        """
        with self.guard():
            if self._is_remote and shutil.disk_usage(tempfile.gettempdir()).free < nbytes:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _open_up(self, file: Path | int) -> None:
        """Give a file or directory of the output, which is open to nobody so far, its permissions. Raises OSError."""
        replaced = None
        with suppress(FileNotFoundError):
            replaced = self._final.stat()
        status = os.stat(file)  # noqa: PTH116 - of a path or a descriptor
        mode = mode_of_output(directory=stat.S_ISDIR(status.st_mode), group=status.st_gid, replaced=replaced)
        # Some file systems have no permissions.
        with suppress(PermissionError, NotImplementedError):
            os.chmod(file, mode)  # noqa: PTH101

    def _take_name(self, replace: Callable[[Path, Path], object]) -> None:
        """Rename to the target, with ``force`` by ``replace``, and flush the name to the disk."""
        if self._force:
            self.replaced = self._check(self._final) if self._final.exists() else None
            try:
                replace(self.path, self._final)
            except FileExistsError:
                # Another run has just made the directory: check that one, too.
                self._take_name(replace)
                return
            if self.replaced is not None:
                note_replaced(self.replaced)
        else:
            try:
                rename_new(self.path, self._final)
            except FileExistsError as exc:
                raise exists_error(self.target) from exc
        sync_directory(self._final.parent)

    def close(self) -> None:
        """Remove the temporary, unless it has become the target."""
        self._partial.close()


def exists_error(target: object) -> OutputError:
    """That a target is there already."""
    return OutputError(f"{target}: exists; use force=True to replace it, or give another name")


def sync_directory(path: Path) -> None:
    """Flush the names in a directory to the disk, where the file system can. Raises OSError. Nothing in a store."""
    if isinstance(path, RemotePath):
        return
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
    code = _errno_of("renameat2", _AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new), flags)
    if code not in (0, *_UNSUPPORTED):
        raise OSError(code, os.strerror(code), str(old), None, str(new))
    return code == 0


def _errno_of(name: str, *arguments: object) -> int:
    """Call a function of the system: 0, or the number of its error; ENOSYS where the system has none of that name."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name, None)
    if function is None:
        return errno.ENOSYS
    return ctypes.get_errno() if function(*arguments) else 0


def rename_new(old: Path, new: Path) -> None:
    """Rename to an unused name. Raises FileExistsError, OSError."""
    if not _renameat2(old, new, _NOREPLACE):
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
        old = partial_path(final)
        # While its lock is held, no other run removes it as abandoned.
        descriptor = os.open(final, os.O_RDONLY | NO_LINK)
        try:
            _hold(descriptor, final)
            final.rename(old)
            new.rename(final)
        except BaseException:
            with suppress(OSError):
                rename_new(old, final)
            raise
        finally:
            os.close(descriptor)
        remove(old)


def refuse_source(target: Path, source: Path) -> None:
    """Raise OutputError when the target is the very file that is read, or lies in the directory that is read."""
    with suppress(OSError):
        require(
            not (target.exists() and target.samefile(source)),
            f"{target}: is the file that is read; give another name",
            OutputError,
        )
        require(
            not (source.is_dir() and resolved(source) in resolved(target).parents),
            f"{target}: lies in the directory {source}; give a place outside of it",
            OutputError,
        )


def default_path(target: Path) -> Path:
    """A target that the user did not name. Raises OutputError for a link to nothing, which could lead anywhere."""
    with writing(target):
        dead = target.is_symlink() and not target.exists()
    require(
        not dead,
        f"{target}: is a link to something that does not exist; remove it, or give a name with -o",
        OutputError,
    )
    return target


def any_file(path: Path) -> str:
    """Describe the file at ``path``: the check for a target that the user named. Raises OSError."""
    return f"{path}: a file of {path.stat().st_size:,} bytes"


def workspace(folder: Path) -> Path:
    """The folder in which outputs in ``folder`` come about: that of temporary files for one of a store."""
    return Path(tempfile.gettempdir()) if isinstance(folder, RemotePath) else folder


def may_write(folder: Path) -> bool:
    """Whether this user may make files in a folder, as far as the system says it: a store says it when asked to."""
    return isinstance(folder, RemotePath) or os.access(folder, os.W_OK | os.X_OK)


class AtomicFile(AtomicOutput):
    """A file, written next to ``target`` first. ``tidy`` is that of ``Partial``.

    What becomes an object of a store is written to the folder of temporary files first.
    """

    what = "regular file"
    is_kind = staticmethod(methodcaller("is_file"))

    def __init__(
        self, target: Path, *, force: bool, check: Check = any_file, tidy: bool = True, room: Room | None = None
    ) -> None:
        super().__init__(target, force=force, check=check, room=room)
        with self.guard():
            self._partial = Partial(self._beside(), tidy=tidy or self._is_remote)
            # The descriptor stays with the temporary: it holds the lock until the file has its name.
            self.file: BinaryIO = os.fdopen(self._partial.descriptor, "r+b", closefd=False)

    def publish(self, last_look: Callable[[Path], object] = lambda _: None) -> None:
        """Set the permissions, flush to the disk, rename to the target, flush the directory; or send the object.

        Before the rename ``last_look`` gets the path that the file is about to have; what it raises keeps the old file.
        """
        with self.guard():
            self.file.flush()
            if isinstance(self.target, RemotePath):
                self._send(self.target, last_look)
                return
            self._open_up(self._partial.descriptor)
            os.fsync(self._partial.descriptor)
            last_look(self._final)
            self._take_name(Path.replace)

    def _send(self, target: RemotePath, last_look: Callable[[Path], object]) -> None:
        at, end = 0, os.fstat(self._partial.descriptor).st_size
        with target.new_object(force=self._force, check=self._check, bound=end) as output:
            while piece := os.pread(self._partial.descriptor, PIECE, at):
                output.append([piece])
                at += len(piece)
            output.publish(last_look)
            self.replaced = output.replaced

    def close(self) -> None:
        """Close the file and remove the temporary; buffered data is dropped."""
        with suppress(OSError):
            self.file.close()
        super().close()


Guard = Callable[[], AbstractContextManager[None]]
"""Makes a context that turns an OSError into an OutputError."""


@contextmanager
def temporary_directory(prefix: str, where: Path | None = None) -> Iterator[Path]:
    """A new directory in ``where`` (default: the system's), removed with its content at the end. Raises OSError."""
    path: Path | None = None
    try:
        with deferred():
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=where))
        yield path
    finally:
        if path is not None:
            remove(path)


PIECE = 1 << 20
"""Bytes for each call. Larger writes take up to twice as long: the system then looks for large pages."""


def start_writeback(descriptor: int, offset: int, length: int) -> None:
    """Ask the system to start writing a range to the disk, so that the final flush is short."""
    if hasattr(os, "posix_fadvise") and length:
        with suppress(OSError):  # a file system that takes no advice still writes
            os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_DONTNEED)


def allocate(descriptor: int, nbytes: int) -> None:
    """Make an empty file ``nbytes`` long, and take that room where the file system can, which makes writes quicker.

    Raises OSError, at once where it sees that there is too little room.
    """
    os.ftruncate(descriptor, nbytes)
    # Not posix_fallocate, which writes all over the file where the file system cannot.
    code = _errno_of("fallocate", descriptor, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes))
    if code in _NO_ROOM:
        raise OSError(code, os.strerror(code))


def write_at(descriptor: int, view: memoryview, offset: int) -> None:
    """Write ``view`` at ``offset`` and start its flush. Raises OSError."""
    start_writeback(descriptor, offset, write_all_at(descriptor, [view], offset))


def write_all_at(descriptor: int, buffers: Iterable[bytes | memoryview], offset: int) -> int:
    """Write all buffers one after the other from ``offset`` on; return the number of bytes. Raises OSError."""
    start = offset
    for call in _calls(buffers):
        while call:
            written = os.pwritev(descriptor, call, offset)
            offset += written
            while call and written >= len(call[0]):
                written -= len(call.pop(0))
            if call:
                call[0] = call[0][written:]
    return offset - start


def _calls(buffers: Iterable[bytes | memoryview]) -> Iterator[list[memoryview]]:
    """The buffers cut into pieces, grouped by call."""
    call: list[memoryview] = []
    room = PIECE
    for buffer in buffers:
        view = memoryview(buffer)
        while view:
            call.append(view[:room])
            view, room = view[room:], room - len(call[-1])
            if not room or len(call) == 1024:  # no call accepts more buffers
                yield call
                call, room = [], PIECE
    yield call
