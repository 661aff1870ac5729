"""Makes folders that only their user can write to: the code in them may be executed."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MOST_LINKS = 40
"""Links that lead to a link, as many as Linux follows: more go in a circle."""


def make_private(folder: Path) -> None:
    """Make ``folder`` and those above it, for this user alone, as far as they are missing.

    Raises OSError where that is not possible, and PermissionError where another user could put files into ``folder``
    or replace it.
    """
    _check_way(folder.absolute(), 0)
    final = folder.resolve()
    check_private(final, final.lstat())


def _check_way(path: Path, links: int) -> None:
    """Check every folder and link on the way to ``path``, and make missing folders. Raises OSError."""
    for each in (*reversed(path.parents), path):
        status = _status_of_made(each)
        check_private(each, status, on_the_way=True)
        if stat.S_ISLNK(status.st_mode):
            if links == _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(each))
            _check_way(each.parent / each.readlink(), links + 1)
        elif not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(each))


def check_private(path: Path, status: os.stat_result, *, on_the_way: bool = False) -> None:
    """Raise PermissionError unless ``path``, with this status, belongs to this user and nobody else can write it.

    A path that is only ``on_the_way`` may also belong to root, and be a link or a sticky folder: in one such as /tmp
    everybody can make entries, but only the owner of an entry can move it away.
    """
    kept = stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    if status.st_uid != os.geteuid() and not (on_the_way and status.st_uid == 0):
        raise PermissionError(errno.EPERM, f"it belongs to another user, {status.st_uid}", str(path))
    if status.st_mode & _OTHERS_WRITE and not (on_the_way and kept):
        raise PermissionError(errno.EPERM, "other users can write to it", str(path))


def _status_of_made(entry: Path) -> os.stat_result:
    try:
        return entry.lstat()
    except FileNotFoundError:
        # Another process may be making it at the same time.
        with contextlib.suppress(FileExistsError):
            entry.mkdir(_PRIVATE)
        return entry.lstat()
