"""Directories that appear whole or not at all: by a rename on the disk, by the last of their objects in a store."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from operator import methodcaller
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.core.errors import OutputError, require
from ckpt8.core.files.atomic import (
    NO_LINK,
    AtomicOutput,
    Check,
    Partial,
    Room,
    discard,
    replace_directory,
    sync_directory,
)
from ckpt8.core.files.source_file import RemotePath

if TYPE_CHECKING:
    from ckpt8.core.files.stores.folder import FolderOutput

Turn = Callable[[str], int]
"""When a file of a directory is sent to a store: in order, files that complete the directory last. 0 is at any time."""


def remove_directory(path: Path, turn: Turn) -> None:
    """Remove a directory so that it never looks like a whole one with files missing. Raises OSError.

    It gets another name first. Where nothing can be renamed, what completes it goes first: one of a store that was
    listed, as far as it is as the list has shown it; raises OutputError.
    """
    if isinstance(path, RemotePath):
        path.remove_objects(turn)
        return
    discard(path)


def is_set_aside(path: Path) -> bool:
    """Whether a directory gets another name before it is removed, and so its old one again where that fails."""
    return not isinstance(path, RemotePath)


def without_remains(folder: Path, *, remove: bool) -> Path:
    """A folder as it is now; in a store without what a killed ``remove_directory`` has left, which may go now.

    On the disk that is a temporary: see ``remove_abandoned_of``.
    """
    return folder.without_remains(remove=remove) if isinstance(folder, RemotePath) else folder


class AtomicDirectory(AtomicOutput):
    """A directory, written next to ``target`` first.

    With ``force`` it replaces an existing directory if ``check`` accepts that, but never a mount point or one that
    holds ``keep``, the current directory or the home directory. Callers have checked paths inside: see
    ``checks``. This class makes the directories above them, which hold no links until ``publish`` makes them.

    What goes to a store is written to the folder of temporary files. Each file whose ``turn`` is 0 is sent once it is
    written, unless the directory replaces another or ``waits``, and the others by ``publish``, in their turns.
    """

    what = "directory"
    is_kind = staticmethod(methodcaller("is_dir"))

    def __init__(
        self,
        target: Path,
        *,
        force: bool,
        keep: Path,
        check: Check,
        turn: Turn,
        waits: bool = False,
        room: Room | None = None,
    ) -> None:
        super().__init__(target, force=force, check=lambda final: self._check_place(final, keep, check), room=room)
        self._turn, self._made, self.nbytes = turn, {Path()}, 0
        self._links: list[tuple[str, str]] = []
        with self.guard():
            self._waits = waits or self._final.exists()
            self._objects = target.new_objects() if isinstance(target, RemotePath) else None
            self._partial = Partial(self._beside(), directory=True)

    def _check_place(self, final: Path, keep: Path, check: Check) -> str:
        """Describe the directory ``final``. Raises OutputError for one that must never be replaced."""
        # A user may have no home directory, which pathlib takes for an error.
        here, home = Path.cwd(), Path(os.path.expanduser("~")).resolve()  # noqa: PTH111
        kept = (here, *here.parents, *keep.resolve().parents, keep.parent.resolve(), *keep.parent.resolve().parents)
        for refused, why in (
            (final in kept, "holds the file that is read, or the current directory; give another"),
            (final in (home, *home.parents), "is or holds the home directory; give another name"),
            (final.is_mount(), "is a mount point, which cannot be replaced; give a name in it"),
        ):
            require(not refused, f"{self.target}: {why}", OutputError)
        return check(final)

    def make_directory(self, path: str | Path) -> None:
        """Make a directory and its parents inside the output."""
        with self.guard():
            for folder in (*reversed(Path(path).parents), Path(path)):
                if folder not in self._made:
                    (self.path / folder).mkdir()
                    self._made.add(folder)

    def add_link(self, path: str, target: str) -> None:
        """Make a symbolic link on ``publish``. Raises OutputError for a store, which has none."""
        if self._objects is not None:
            raise OutputError(f"{self.target}: has a link {path[:80]!r}, which a store cannot hold; give a local path")
        self._links.append((path, target))

    @contextmanager
    def new_file(self, path: str) -> Iterator[int]:
        """The descriptor of a new file, flushed to the disk at the end, or sent."""
        with self.guard():
            self.make_directory(Path(path).parent)
            descriptor = os.open(self.path / path, os.O_RDWR | os.O_CREAT | os.O_EXCL | NO_LINK, 0o666)
        try:
            yield descriptor
            with self.guard():
                self.nbytes += os.fstat(descriptor).st_size
                if self._objects is None:
                    os.fsync(descriptor)
                elif not (self._waits or self._turn(path)):
                    self._send(self._objects, path)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Make the links, set the modes, flush to the disk, rename to the target; or send what has waited."""
        with self.guard():
            if self._objects is not None:
                self._publish_objects(self._objects)
                return
            for path, target in self._links:
                self.make_directory(Path(path).parent)
                (self.path / path).symlink_to(target)
            for folder, _, names in os.walk(self.path):
                for inner in (*(Path(folder, name) for name in names), Path(folder)):
                    if not inner.is_symlink():
                        self._open_up(inner)
            for directory in self._made:
                sync_directory(self.path / directory)
            self._take_name(replace_directory)

    def _publish_objects(self, objects: FolderOutput) -> None:
        """Send what has waited, in place of an older directory where there is one."""
        if self._final.exists():
            objects.clear(self._check, self._turn)
        files = [path.relative_to(self.path).as_posix() for path in self.path.rglob("*") if path.is_file()]
        for turn, waiting in groupby(sorted(files, key=self._turn), self._turn):
            if turn:
                objects.check_alone()
            for path in waiting:
                self._send(objects, path)
        self.replaced = objects.publish()

    def _send(self, objects: FolderOutput, path: str) -> None:
        """Send a file, which then goes from the disk."""
        objects.send(path, self.path / path)
        (self.path / path).unlink()

    def close(self) -> None:
        """Remove the temporary, and what was sent, unless the directory is there."""
        if self._objects is not None:
            self._objects.close()
        super().close()
