"""Folders in which only their user can have put anything: what lies there may be executed.

POSIX alone has an owner and a mode to go by. Elsewhere a folder is taken as it is.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_PRIVATE = 0o700
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_OPEN = "other users can write to it"
_MOST_LINKS = 40
"""Links on the way to one folder, as Linux counts them: more go in a circle."""


def make_private(folder: Path) -> None:
    """Make ``folder`` and those above it, for this user alone, as far as they are missing.

    Raises OSError where that is not possible, and PermissionError where another user could put files into ``folder``,
    or another folder into its place.
    """
    if os.name != "posix":
        folder.mkdir(parents=True, exist_ok=True)
        return
    found, rest, links = Path("/"), _names(folder.absolute()), 0
    _check_above(found, found.lstat())
    while rest:
        name = rest.pop()
        if name == "..":
            found = found.parent
            continue
        entry = found / name
        status = _status_of_made(entry)
        _check_above(entry, status)
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _MOST_LINKS:
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            target = entry.readlink()
            rest += _names(target)
            found = Path("/") if target.is_absolute() else found
        elif stat.S_ISDIR(status.st_mode):
            found = entry
        else:
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(entry))
    check_private(found, found.lstat())


def check_private(path: Path, status: os.stat_result) -> None:
    """Raise PermissionError unless ``path``, with this status, belongs to this user and nobody else can write it."""
    if os.name != "posix":
        return
    _check_owner(path, status, os.geteuid())
    if status.st_mode & _OTHERS_WRITE:
        raise _refusal(path, _OPEN)


def _names(path: Path) -> list[str]:
    """The components of ``path`` without its root, in reverse order."""
    return [name for name in reversed(path.parts) if name != path.anchor]


def _status_of_made(entry: Path) -> os.stat_result:
    try:
        return entry.lstat()
    except FileNotFoundError:
        # Another process may be making it at the same time.
        with contextlib.suppress(FileExistsError):
            entry.mkdir(_PRIVATE)
        return entry.lstat()


def _check_above(path: Path, status: os.stat_result) -> None:
    """Whether nobody but this user and root can put another thing into the place of what lies in ``path``.

    In a sticky folder, as /tmp is, everybody can make entries, but only the owner of one can move it away.
    """
    _check_owner(path, status, os.geteuid(), 0)
    sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & _OTHERS_WRITE and not sticky and not stat.S_ISLNK(status.st_mode):
        raise _refusal(path, _OPEN)


def _check_owner(path: Path, status: os.stat_result, *trusted: int) -> None:
    if status.st_uid not in trusted:
        raise _refusal(path, f"it belongs to another user, {status.st_uid}")


def _refusal(path: Path, why: str) -> PermissionError:
    return PermissionError(errno.EPERM, why, str(path))
