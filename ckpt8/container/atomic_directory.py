"""Writes a directory so that it is either complete under its name, or not there at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from ckpt8.container.writer import partial_path, remove, sync_directory, unfinished
from ckpt8.errors import OutputError


class AtomicDirectory:
    """A temporary directory beside ``target`` that takes its name on ``publish`` and vanishes otherwise.

    With ``force`` it replaces an existing directory, but never one that holds ``keep``. Paths are relative, with
    slashes, and have been checked: see ``member_paths``. What is above them is made here and holds no links, since all
    links are made last. Every OSError becomes an OutputError that names the target.
    """

    def __init__(self, target: Path, *, force: bool, keep: Path) -> None:
        self.target = target
        self._made = {Path()}
        self._links: list[tuple[str, str]] = []
        with self.guard():
            self._final = target.resolve()
            exists = target.exists() or target.is_symlink()
            if self._final.exists() and not self._final.is_dir():
                raise OutputError(f"{target}: exists and is not a directory")
            if exists and not force:
                raise OutputError(f"{target}: exists; use --force to replace it, or -o for another name")
            here = Path.cwd()
            if self._final in (here, *here.parents, *keep.resolve().parents):
                raise OutputError(f"{target}: holds the file that is read, or the current directory; give another")
            self.path = partial_path(self._final)
            unfinished[self.path] = os.getpid()
            self.path.mkdir()

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turn an OSError of the body into an OutputError."""
        try:
            yield
        except OSError as exc:
            raise OutputError(f"{self.target}: cannot be written: {exc.strerror or exc}") from exc

    def make_directory(self, path: str) -> None:
        """Make a directory and those above it, which must not exist but by this."""
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
        """Make the links, flush to the disk, rename to the target."""
        with self.guard():
            for path, target in self._links:
                self._make(Path(path).parent)
                (self.path / path).symlink_to(target)
            for directory in self._made:
                sync_directory(self.path / directory)
            self._rename()
            unfinished.pop(self.path, None)
            sync_directory(self._final.parent)

    def _rename(self) -> None:
        """Put what is under the target's name aside, and back should the new directory not take its place."""
        old = partial_path(self._final) if self._final.exists() else None
        if old is not None:
            self._final.rename(old)
        try:
            self.path.rename(self._final)
        except BaseException:
            if old is not None:
                old.rename(self._final)
            raise
        if old is not None:
            remove(old)

    def __enter__(self) -> AtomicDirectory:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.path in unfinished:
            remove(self.path)
            unfinished.pop(self.path, None)
