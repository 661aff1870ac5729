"""Writes a directory that is either complete under its name or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ckpt8.core.errors import OutputError
from ckpt8.core.files.atomic import AtomicOutput, Check, Room, replace_directory, sync_directory
from ckpt8.core.files.partial import Partial


class AtomicDirectory(AtomicOutput):
    """A directory, written next to ``target`` first.

    With ``force`` it replaces an existing directory if ``check`` accepts that, but never a mount point or one that
    holds ``keep``, the current directory or the home directory. Callers have checked paths inside: see
    ``member_paths``. This class makes the directories above them, which hold no links until ``publish`` makes them.
    """

    what = "directory"
    is_kind = staticmethod(Path.is_dir)

    def __init__(self, target: Path, *, force: bool, keep: Path, check: Check, room: Room | None = None) -> None:
        super().__init__(target, force=force, check=lambda final: self._check_place(final, keep, check), room=room)
        self._made = {Path()}
        self._links: list[tuple[str, str]] = []
        with self.guard():
            self._partial = Partial(self._final, directory=True)

    def _check_place(self, final: Path, keep: Path, check: Check) -> str:
        """Describe the directory ``final``. Raises OutputError for one that must never be replaced."""
        # A user may have no home directory, which pathlib takes for an error.
        here, home = Path.cwd(), Path(os.path.expanduser("~")).resolve()  # noqa: PTH111
        kept = (here, *here.parents, *keep.resolve().parents, keep.parent.resolve(), *keep.parent.resolve().parents)
        refusals = (
            (final in kept, "holds the file that is read, or the current directory; give another"),
            (final in (home, *home.parents), "is or holds the home directory; give another name"),
            (os.path.ismount(final), "is a mount point, which cannot be replaced; give a name in it"),
        )
        for refused, why in refusals:
            if refused:
                raise OutputError(f"{self.target}: {why}")
        return check(final)

    def make_directory(self, path: str) -> None:
        """Make a directory and its parents inside the output."""
        with self.guard():
            self._make(Path(path))

    def _make(self, path: Path) -> None:
        for each in (*reversed(path.parents), path):
            if each not in self._made:
                (self.path / each).mkdir()
                self._made.add(each)

    def add_link(self, path: str, target: str) -> None:
        """Make a symbolic link on ``publish``."""
        self._links.append((path, target))

    @contextlib.contextmanager
    def new_file(self, path: str) -> Iterator[int]:
        """The descriptor of a new file, flushed to the disk at the end."""
        with self.guard():
            self._make(Path(path).parent)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
            descriptor = os.open(self.path / path, flags, 0o666)
        try:
            yield descriptor
            with self.guard():
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Make the links, set the modes, flush to the disk, rename to the target."""
        with self.guard():
            for path, target in self._links:
                self._make(Path(path).parent)
                (self.path / path).symlink_to(target)
            self._set_modes()
            for directory in self._made:
                sync_directory(self.path / directory)
            self._take_name(replace_directory)

    def _set_modes(self) -> None:
        """Open the directory and what is in it to others, as far as they may read the sources. Raises OSError."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                if not (path := Path(folder, name)).is_symlink():
                    self._open_up(path)
            self._open_up(Path(folder))
