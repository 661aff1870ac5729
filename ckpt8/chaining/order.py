"""The checkpoints of a run, oldest first: by the step that ``step_of`` finds, then by epoch, then by time.

A checkpoint is at rest when its files have stayed as they are for some seconds, and are complete.
"""

from __future__ import annotations

import math
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path

from ckpt8.checkpoint.readers.entries import walk
from ckpt8.checkpoint.replacing import checkpoints_in, epoch_in_name, incomplete, written_once
from ckpt8.container.manifest import FILE
from ckpt8.core.errors import InputError
from ckpt8.inspecting.run_files import Facts, step_of
from ckpt8.inspecting.runs import read_file, read_folder

Look = tuple[tuple[str, int, int, int, int], ...]
"""Path, mode, size, time and inode of every file, link and folder; of a folder no time, and no size."""


def look_at(path: Path) -> Look:
    """What a file, or a directory with everything in it, looks like without following links. Raises OSError."""
    entries = [_entry("", path.lstat())]
    if stat.S_ISDIR(entries[0][1]):
        for folder, folders, names in os.walk(path, onerror=_raise):
            for name in (*folders, *names):
                inside = Path(folder, name)
                entries.append(_entry(str(inside.relative_to(path)), inside.lstat()))
    return tuple(sorted(entries))


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


@dataclass(frozen=True, slots=True)
class Listing:
    """The ``progress`` of the checkpoints in a folder, oldest first: step and epoch, infinite where nothing says it.

    ``skipped`` says of other files that look like checkpoints why they are left alone.
    """

    progress: dict[Path, tuple[float, float]]
    skipped: dict[Path, str]

    def newest(self, count: int, among: list[Path]) -> set[Path]:
        """The ``count`` newest ``among`` some checkpoints, which are oldest first.

        Those of the same step and epoch count once. What is written again and again, such as ``last.pt``, does not
        count where it is a copy of a checkpoint with a number, by its step, or has no step: it stays with the newest.
        """
        if not count:
            return set()
        once = set(written_once(among))
        steps = {self.progress[path][0] for path in once} | {math.inf}
        counted = [path for path in among if path in once or self.progress[path][0] not in steps] or among
        slots = dict.fromkeys(map(self._slot, counted))
        kept = set(list(slots)[-count:])
        kept_steps = {self.progress[path][0] for path in counted if self._slot(path) in kept} | {math.inf}
        return {
            path
            for path in among
            if (self._slot(path) in kept if path in counted else self.progress[path][0] in kept_steps)
        }

    def _slot(self, path: Path) -> tuple[float, float] | Path:
        """What checkpoints of the same state share."""
        return self.progress[path] if self.progress[path][0] < math.inf else path


class RunOrder:
    """Lists the checkpoints in a folder. What it has read in a file it does not read again while the file stays."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Path, tuple[Look, Facts | None]] = {}

    def listing(self) -> Listing:
        """What is in the folder. Those that have no step come last, by epoch and time. Raises InputError."""
        rows = []
        skipped = {}
        for entry in checkpoints_in(self.folder):
            try:
                look = look_at(entry.path)
                changed = entry.path.stat().st_mtime_ns
            except OSError:
                continue
            facts = None if entry.skipped else self._facts(entry.path, look)
            step, epoch = (None, None) if facts is None else (facts.progress.step, facts.progress.epoch)
            problem = entry.skipped
            if entry.is_doubtful and step is None and not (facts and facts.trains):
                problem = "no step and no optimizer found"
            if problem is not None:
                skipped[entry.path] = problem
                continue
            name = entry.path.name
            step, _ = step_of(name, step, None if facts is None else facts.counted)
            epoch = epoch_in_name(name) if epoch is None else epoch
            order = (math.inf if step is None else step, math.inf if epoch is None else epoch)
            rows.append((order, changed, name, entry.path))
        return Listing({path: order for order, _, _, path in sorted(rows)}, skipped)

    def _facts(self, path: Path, look: Look) -> Facts | None:
        """What a checkpoint says; None for a file that is none."""
        known = self._known.get(path)
        if known is None or known[0] != look:
            known = self._known[path] = look, _read(path)
        return known[1]


def _read(path: Path) -> Facts | None:
    """Read what a checkpoint says; None for a file that is none. A damaged one counts: its error says so later."""
    try:
        if not path.is_dir():
            return read_file(path)
        return read_folder(path, [entry.path for entry in walk(path) if entry.format == FILE], needs_tensors=False)
    except (InputError, OSError):
        return Facts("damaged", 0, trains=True)
