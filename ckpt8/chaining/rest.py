"""Tells whether a checkpoint is still being written: its files stay as they are for some seconds, and are complete."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

from ckpt8.checkpoint.run_folder import incomplete

Look = tuple[tuple[str, int, int, int, int], ...]
"""Path, mode, size, time and inode of every file, link and folder; of a folder no time, and no size."""


def look_at(path: Path) -> Look:
    """What a file, or a directory with everything in it, looks like without following links. Raises OSError."""
    found = [_entry("", path.lstat())]
    if stat.S_ISDIR(found[0][1]):
        for folder, folders, names in os.walk(path, onerror=_raise):
            for name in (*folders, *names):
                each = Path(folder, name)
                found.append(_entry(str(each.relative_to(path)), each.lstat()))
    return tuple(sorted(found))


def _raise(error: OSError) -> None:
    raise error


def _entry(path: str, status: os.stat_result) -> tuple[str, int, int, int, int]:
    if stat.S_ISDIR(status.st_mode):
        return path, status.st_mode, 0, 0, status.st_ino
    return path, status.st_mode, status.st_size, status.st_mtime_ns, status.st_ino


def last_change(look: Look) -> int:
    """The latest time of a file, in nanoseconds."""
    return max(changed for _, _, _, changed, _ in look)


class Rest:
    """Remembers how checkpoints looked. One is at rest once it has looked the same for ``seconds``.

    Unless all are ``watched``, one that nobody has touched for so long, by its times, is at rest when it is first seen.
    """

    def __init__(self, seconds: float, *, watched: bool) -> None:
        self.seconds = seconds
        self._watched = watched
        self._first: dict[Path, float] = {}
        self._seen: dict[Path, tuple[Look, float]] = {}

    def problem(self, path: Path) -> str | None:
        """Why a checkpoint may still be being written; None if it is at rest and complete."""
        now = time.monotonic()
        self._first.setdefault(path, now)
        try:
            look = look_at(path)
        except OSError:
            self._seen.pop(path, None)
            return "its files change"
        known, since = self._seen.get(path, (None, now))
        if look != known:
            since = now
            self._seen[path] = look, since
        # A time that is yet to come says nothing.
        untouched = not self._watched and time.time() - last_change(look) / 1e9 >= self.seconds
        if now - since < self.seconds and not untouched:
            return f"it changed within the last {self.seconds:g} s"
        return incomplete(path)

    def look(self, path: Path) -> Look | None:
        """How a checkpoint looked last."""
        return self._seen[path][0] if path in self._seen else None

    def is_patient(self, path: Path) -> bool:
        """Whether a checkpoint was given as much time as one at rest needs."""
        return time.monotonic() - self._first[path] >= self.seconds
