"""Makes temporary files and directories next to their targets, and removes those that killed processes left.

A temporary is named ``.NAME.MACHINExxxxxxxx.ckpt8-partial``, and its process holds a lock on it. A later write to the
same target removes the temporaries that nobody locks. Where locks say nothing (the file system has none, or another
machine may hold one unseen) a temporary counts as abandoned after an hour without a change.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import re
import secrets
import shutil
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

SUFFIX = ".ckpt8-partial"
IDLE_SECONDS = 3600
_NAME_KEPT = 40
"""Characters of the target's name that the temporary file repeats: at most 160 bytes."""
_ATTEMPTS = 16
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)


unfinished: dict[Path, int] = {}
"""Temporary files and directories with the process of each, removed at exit: a signal may strike before the ``with``
that would remove one."""


@atexit.register
def _remove_unfinished() -> None:
    for path, process in unfinished.items():
        if process == os.getpid():
            remove(path)


def remove(path: Path) -> None:
    """Remove a file or directory as far as possible, also where a process may open hardly any more files."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
            _remove_tree(path)
        else:
            path.unlink()


def _remove_tree(path: Path) -> None:
    """As ``shutil.rmtree``, which holds three descriptors for each level, with one in all. Raises OSError."""
    for name in os.listdir(path):  # noqa: PTH208 - iterdir keeps its descriptor
        remove(path / name)
    path.rmdir()


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
                    self.descriptor = _make_directory(self.path)
                else:
                    self.descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
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


def _make_directory(path: Path) -> int:
    path.mkdir(0o700)
    try:
        return os.open(path, os.O_RDONLY | _NO_LINK)
    except FileNotFoundError:
        return -1  # another run took it for abandoned, as in ``_hold``


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of a directory, so that no other run removes it as abandoned. Raises OSError."""
    descriptor = os.open(directory, os.O_RDONLY | _NO_LINK)
    try:
        _hold(descriptor, directory)
        yield
    finally:
        os.close(descriptor)


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
    with contextlib.suppress(OSError):
        remove_abandoned_of(re.escape(final.name[:_NAME_KEPT]), final.parent.iterdir())


def remove_abandoned_of(names: str, paths: Iterable[Path]) -> None:
    """As ``remove_abandoned``, those of ``paths`` that are temporaries of targets whose names match a pattern."""
    name = re.compile(rf"\.(?:{names})\.(?P<machine>[0-9a-f]{{8}})[0-9a-f]{{8}}{re.escape(SUFFIX)}")
    for path in paths:
        match = name.fullmatch(path.name)
        if match is not None:
            _remove_if_abandoned(path, ours=match["machine"] == _machine())


def _remove_if_abandoned(path: Path, *, ours: bool) -> None:
    with contextlib.suppress(OSError):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | _NO_LINK)
        except (IsADirectoryError, PermissionError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | _NO_LINK)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
            except OSError:
                ours = False
            last_change = max(each.lstat().st_mtime for each in (path, *path.rglob("*")))
            if ours or time.time() - last_change > IDLE_SECONDS:
                remove(path)
        finally:
            os.close(descriptor)
