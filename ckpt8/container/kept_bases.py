"""The folder ``bases/`` beside containers: hard links to the files that deltas there need, named after their seals.

Frameworks and users remove checkpoints as they please. A link takes no room while the file itself is there, and keeps
its bytes when that goes. A save that links holds a lock on the folder until its delta is there; links that no delta
needs go when nobody holds one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt8.container.bases import KEPT, Stated, find_base, is_kept_name, kept_name, stated_base
from ckpt8.container.head import stated_seal
from ckpt8.container.header import is_container
from ckpt8.container.target_names import CONTAINER
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError

_NEWEST = 4
"""Containers of a folder that are linked before a save: its base is one of them, or below one."""

_saving = Counter[str]()
"""Saves of this process under way, by folder: not every file system has locks."""

_counting = threading.Lock()
"""For ``_saving``, which threads change that save in the background."""


class KeptBases(Closing):
    """The links in ``folder``, for one save there: until it is closed nobody removes any. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._links = folder / KEPT
        self._locks = contextlib.ExitStack()
        self._locks.enter_context(_shared(folder))
        try:
            self._links.mkdir(exist_ok=True)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let others remove links."""
        self._locks.close()

    def link_newest(self, target: Path, are_kept: Callable[[Path], bool] = lambda _: True) -> list[Path]:
        """Link the newest containers but ``target``, and all files below them. Returns the links; raises OSError.

        Takes those that ``are_kept``, if there are any. Links the target as well, if it is there: others may need what
        a save is about to replace.
        """
        if is_container(target):
            with contextlib.suppress(InputError):
                self._link(target)
        times = {}
        containers = {path.resolve() for path in _containers(self._folder)} - {target.resolve()}
        for path in set(filter(are_kept, containers)) or containers:
            with contextlib.suppress(FileNotFoundError):
                times[path] = path.stat().st_mtime_ns
        found: dict[Path, None] = {}
        for container in sorted(times, key=times.__getitem__, reverse=True)[:_NEWEST]:
            with contextlib.suppress(InputError, FileNotFoundError):
                found.update(dict.fromkeys(self._link(container)))
        return list(found)

    def move(self, container: Path, seal: str) -> None:
        """Make a container one of the links, and link all files below it. Raises OSError."""
        # Damaged, or without its base, it is moved as it is.
        with contextlib.suppress(InputError):
            self._link_below(container, stated_base(container))
        link = self._links / kept_name(seal)
        if not link.exists():
            container.rename(link)

    def _link(self, container: Path) -> list[Path]:
        """Link a container, and before it the files below it: no link is ever without its base."""
        container = container.resolve()  # os.link may link a symbolic link itself
        head = stated_base(container)
        below = self._link_below(container, head)
        link = self._links / kept_name(head.seal)
        with contextlib.suppress(FileExistsError):
            os.link(container, link)
        return [link, *below]

    def _link_below(self, container: Path, head: Stated) -> list[Path]:
        return [] if head.base is None else self._link(find_base(container, head.base))


def remove_container(path: Path) -> None:
    """Remove a file; a container that others beside it may need moves to the links. Raises OSError."""
    folder, seal = path.parent, stated_seal(path)
    if seal is not None and not path.is_symlink() and _may_be_needed(path, seal):
        with KeptBases(folder) as kept:
            kept.move(path, seal)
    path.unlink(missing_ok=True)
    drop_unneeded(folder)


def drop_unneeded(folder: Path) -> None:
    """Remove the links that no container in ``folder`` needs, as far as possible.

    Leaves all while a save is under way there, and where a container cannot be read: it may need any.
    """
    if not (folder / KEPT).is_dir():
        return
    with contextlib.suppress(OSError), _alone(folder):
        heads, are_all = _heads(folder)
        if not are_all:
            return
        needed = _needed(heads, folder)
        unneeded = [path for path, head in heads.items() if path.parent != folder and head.seal not in needed]
        # A link goes before the one below it: a kill leaves none without its base.
        for path in sorted(unneeded, key=lambda path: heads[path].links, reverse=True):
            path.unlink()
        (folder / KEPT).rmdir()


def _may_be_needed(path: Path, seal: str) -> bool:
    """Whether containers beside ``path`` need it. True where there are chains, and a container cannot be read."""
    heads, are_all = _heads(path.parent, without=path)
    return seal in _needed(heads, path.parent) or (not are_all and (path.parent / KEPT).is_dir())


def _heads(folder: Path, without: Path | None = None) -> tuple[dict[Path, Stated], bool]:
    """The heads of the containers in a folder, but for one, and of its links; False where one cannot be read."""
    links = [path for path in _containers(folder / KEPT) if is_kept_name(path.name)]
    paths = [path for path in (*_containers(folder), *links) if path != without]
    found = {}
    for path in paths:
        with contextlib.suppress(InputError):
            found[path] = stated_base(path)
    return found, len(found) == len(paths)


def _containers(folder: Path) -> list[Path]:
    """The containers in a folder, and what has their suffix: a damaged one may not begin as they do."""
    found = folder.iterdir() if folder.is_dir() else ()
    return [path for path in found if (path.suffix == CONTAINER and path.is_file()) or is_container(path)]


def _needed(heads: dict[Path, Stated], folder: Path) -> set[str]:
    """The seals of all files that the containers in ``folder`` need."""
    below = {head.seal: head.base.seal for head in heads.values() if head.base is not None}
    waiting = [head.seal for path, head in heads.items() if path.parent == folder]
    needed: set[str] = set()
    while waiting:
        base = below.get(waiting.pop())
        if base is not None and base not in needed:
            needed.add(base)
            waiting.append(base)
    return needed


@contextlib.contextmanager
def _shared(folder: Path) -> Iterator[None]:
    """Keep others, in this process and on this machine, from removing links in a folder. Raises OSError."""
    key = os.path.realpath(folder)
    with _locked(folder, fcntl.LOCK_SH):
        with _counting:
            _saving[key] += 1
        try:
            yield
        finally:
            with _counting:
                _saving[key] -= 1


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from saving with links in a folder. Raises OSError, also where somebody does."""
    with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if _saving[os.path.realpath(folder)]:
            raise BlockingIOError
        yield


@contextlib.contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:
            raise
        except OSError:
            pass  # the file system has no locks
        yield
    finally:
        os.close(descriptor)
