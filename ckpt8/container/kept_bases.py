"""The folder ``bases/`` beside containers: hard links to the files that deltas there need, named after their seals.

Frameworks and users remove checkpoints as they please. A link takes no room while the file itself is there, and keeps
its bytes when that goes. A save that links holds a lock on the folder until its delta is there; links that no delta
needs go when nobody holds one.

Nothing of ckpt8 replaces or removes a container that another one needs as its base.
"""

import errno
import fcntl
import filecmp
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import cache, lru_cache, partial
from pathlib import Path

from ckpt8.container.bases import (
    KEPT,
    Stated,
    bases_of,
    files_in,
    find_base,
    folders_that_need,
    is_kept_name,
    kept_name,
    stated_base,
)
from ckpt8.container.header import CONTAINER, HEAD_BYTES, begins_container, holds_seal, is_container, stated_seal
from ckpt8.container.reader import ContainerReader
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError, OutputError, require
from ckpt8.core.files.atomic import any_file, sync_directory
from ckpt8.core.files.source_file import RemotePath, resolved
from ckpt8.core.text import listed

_LINKING = ".linking"
"""A new link before it replaces a copy."""

_saving = Counter[str]()
"""Saves of this process under way, by folder: not every file system has locks."""

_counting = threading.Lock()
"""For ``_saving``, which threads change that save in the background."""


class KeptBases(Closing):
    """The links in ``folder``, for one save there: until it is closed nobody removes any.

    A store has none, so that ``has_links`` is False and nothing is linked.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._links = folder, folder / KEPT
        self.has_links = not isinstance(folder, RemotePath)
        self._linked = set[str]()
        self._locks = ExitStack()
        if self.has_links:
            # Where a folder cannot be opened nobody lists it, so nobody removes links there.
            with suppress(OSError):
                self._locks.enter_context(_shared(folder))

    def close(self) -> None:
        """Let others remove links."""
        self._locks.close()

    def link(self, container: Path) -> None:
        """Link a container, and before it the files below it: no link is ever without its base.

        Raises InputError where one of them cannot be read, OSError where it cannot be linked.
        """
        if self.has_links:
            self._link(container)
            sync_directory(self._links)

    def __contains__(self, seal: str) -> bool:
        """Whether there is a link to the container with that seal, or that itself among the links."""
        return seal in self._linked or (self._links / kept_name(seal)).exists()

    def hold(self, containers: Callable[[], Iterable[Path]]) -> None:
        """Link containers as far as they can be: one that is removed meanwhile can still become a base."""
        for path in containers() if self.has_links else ():
            if (seal := stated_seal(path)) is not None:
                with suppress(OSError):
                    self._links.mkdir(exist_ok=True)
                    _make_link(self._links / kept_name(seal), path.resolve(), seal)

    def link_needed(self) -> None:
        """Link the bases of the containers in the folder, as far as they are there and can be linked."""
        for path in containers_in(self._folder) if self.has_links else ():
            with suppress(InputError, OSError):
                self._link_below(path, _head(path))

    def move(self, container: Path, seal: str) -> None:
        """Make a container one of the links, and link all files below it. Raises OSError."""
        # Damaged, or without its base, it is moved as it is.
        with suppress(InputError):
            self._link_below(container, _head(container))
        self._links.mkdir(exist_ok=True)
        link = self._links / kept_name(seal)
        if not link.exists() or _is_to_be_replaced(link, container, seal):
            container.rename(link)

    def _link(self, container: Path) -> None:
        container = container.resolve()  # os.link may link a symbolic link itself
        head = _head(container)
        self._link_below(container, head)
        link = self._links / kept_name(head.seal)
        if container.parent != self._links.resolve():
            self._links.mkdir(exist_ok=True)
            try:
                _make_link(link, container, head.seal)
            except FileExistsError:
                # A copy of the folder has copies of the links.
                if _is_to_be_replaced(link, container, head.seal):
                    _replace(link, container)
        self._linked.add(head.seal)

    def _link_below(self, container: Path, head: Stated) -> None:
        if head.base is not None and head.base.seal not in self._linked:
            self._link(find_base(container, head.base))


def remove_container(path: Path) -> None:
    """Remove a file; a container that others may need moves to the links. Raises OSError.

    In a store, which has none, one that another container needs stays: raises OutputError.
    """
    folder = path.parent
    if isinstance(folder, RemotePath):
        refuse_needed(path)
        path.unlink(missing_ok=True)
        return
    seal = stated_seal(path)
    if seal is not None and not path.is_symlink() and _may_be_needed(path, seal):
        with KeptBases(folder) as kept:
            kept.move(path, seal)
    path.unlink(missing_ok=True)
    drop_unneeded(folder)


def drop_unneeded(folder: Path) -> None:
    """Remove the links that no container needs, as far as possible.

    Leaves all while a save is under way there, and where a container cannot be read: it may need any. A store has none.
    """
    if isinstance(folder, RemotePath):
        return
    with suppress(OSError, InputError), _alone(folder):
        _drop(folder)


def release(folder: Path) -> tuple[int, int]:
    """Free the room of links that no container needs, and of those that are a file of their own beside the same one.

    Returns the bytes freed, and those of the links whose files are gone: none in a store. Raises OutputError where a
    save is under way or they cannot be removed, and InputError where a container cannot be read, which may need any of
    them.
    """
    if isinstance(folder, RemotePath):
        return 0, 0
    try:
        with _alone(folder):
            freed, heads = _drop(folder)
            beside = {head.seal: path for path, head in heads.items() if path.parent == folder}
            links = {path: beside.get(head.seal) for path, head in heads.items() if _is_link(path, folder)}
            freed += sum(_linked_again(path, twin) for path, twin in links.items() if twin is not None)
            left = sum(status.st_size for path in links if (status := path.stat()).st_nlink == 1)
    except BlockingIOError as exc:
        raise OutputError(f"{folder}: a checkpoint is being saved there; try again once that is done") from exc
    except OSError as exc:
        raise OutputError(f"{folder / KEPT}: cannot be released: {exc.strerror}") from exc
    return freed, left


def _drop(folder: Path) -> tuple[int, dict[Path, Stated]]:
    """Remove links that nothing needs; return the bytes that this frees, and the other heads.

    Raises InputError where a container cannot be read, and OSError.
    """
    if not (folder / KEPT).is_dir():
        return 0, {}
    require(
        not (folder / KEPT).is_symlink(),
        f"{folder / KEPT}: is a link; containers of other folders may need anything in it",
    )
    heads, unreadable = _heads(folder)
    if unreadable:
        raise InputError(f"{unreadable[0]}: cannot be read, so it may need anything in {folder / KEPT}")
    freed, needed = 0, _needed(heads, folder)
    # A link goes before the one below it: a kill leaves none without its base.
    for path, head in sorted(heads.items(), key=lambda item: item[1].links, reverse=True):
        if _is_link(path, folder) and head.seal not in needed:
            status = path.stat()
            path.unlink()
            del heads[path]
            freed += status.st_size if status.st_nlink == 1 else 0
    (folder / KEPT / _LINKING).unlink(missing_ok=True)
    with suppress(OSError):
        (folder / KEPT).rmdir()
    return freed, heads


def _make_link(link: Path, container: Path, seal: str) -> None:
    """Link a container. Raises OSError, FileNotFoundError also where another save has just replaced it."""
    os.link(container, link)
    if stated_seal(link) != seal:
        link.unlink()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(container))


def _is_to_be_replaced(link: Path, container: Path, seal: str) -> bool:
    """Whether there is a damaged copy of ``container`` at ``link``, and not the same file or a sound copy.

    Raises FileExistsError for anything else, and where both are damaged: each may hold what the other lacks.
    """
    if link.samefile(container):
        return False
    if holds_seal(link, seal):
        if is_sound(link):
            return False
        if is_sound(container):
            return True
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(link))


def is_sound(path: Path) -> bool:
    """Whether a container is there and all of its frames hold; read again only where it is another file."""
    with suppress(OSError):
        status = path.stat()
        return _frames_hold(path, status.st_ino, status.st_size, status.st_mtime_ns)
    return False


@lru_cache(maxsize=1 << 12)
def _frames_hold(path: Path, *_: int) -> bool:
    with suppress(InputError), ContainerReader(path) as reader:
        reader.check_stored()
        return True
    return False


def _replace(link: Path, container: Path) -> None:
    """Make a link to ``container`` of what is at ``link``. Raises OSError."""
    linking = link.with_name(_LINKING)
    linking.unlink(missing_ok=True)
    os.link(container.resolve(), linking)
    linking.replace(link)


def _linked_again(path: Path, twin: Path) -> int:
    """Make a link to ``twin`` of the copy of it at ``path``; return the bytes that this frees. Raises OSError."""
    size = path.stat().st_size
    if path.samefile(twin) or not filecmp.cmp(path, twin, shallow=False):
        return 0
    _replace(path, twin)
    return size


def containers_in(folder: Path, *, strict: bool = False) -> list[Path]:
    """The containers in a folder, and what may be one: by its suffix, or unreadable.

    Empty where the folder cannot be listed; with ``strict`` that raises OSError. In a store, those with the suffix.
    """
    if isinstance(folder, RemotePath) and not strict:
        return files_in(folder)
    with nullcontext() if strict else suppress(OSError):
        return [path for path in folder.iterdir() if _may_be_container(path)]
    return []


def _may_be_container(path: Path) -> bool:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        if path.suffix == CONTAINER:
            return True
        with path.open("rb") as file:
            return begins_container(file.read(HEAD_BYTES))
    except OSError as exc:
        return exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def stated_bases(folder: Path) -> set[str]:
    """The paths of the bases of the containers and links in a folder, as these state them."""
    paths = set()
    for path in (*containers_in(folder), *links_in(folder)):
        with suppress(InputError, OSError):
            paths |= {base.path for base in [_head(path).base] if base is not None}
    return paths


def links_in(folder: Path) -> list[Path]:
    """The links in ``folder/bases``."""
    return [path for path in containers_in(folder / KEPT) if is_kept_name(path.name)]


def _may_be_needed(path: Path, seal: str) -> bool:
    """Whether containers need the one at ``path``. True where there are chains, and a container cannot be read."""
    heads, unreadable = _heads(path.parent, without=path)
    return seal in _needed(heads, path.parent) or (bool(unreadable) and (path.parent / KEPT).is_dir())


def _heads(folder: Path, without: Path | None = None) -> tuple[dict[Path, Stated], list[Path]]:
    """The heads of the links in a folder and of the containers, but for one, that may need them; what has none.

    Raises OSError where a folder that is there and open to this user cannot be listed.
    """
    paths = links_in(folder)
    for home in folders_that_need(folder):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            paths += containers_in(home, strict=True)
    heads, unreadable = {}, []
    for path in paths:
        if path != without:
            try:
                heads[path] = _head(path)
            except (InputError, OSError):
                unreadable.append(path)
    return heads, unreadable


def _head(path: Path) -> Stated:
    """What a container states of its chain; read again only where it is another file. Raises InputError, OSError."""
    status = path.stat()
    return _read_head(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=1 << 12)
def _read_head(path: Path, *_: int) -> Stated:
    return stated_base(path)


def _is_link(path: Path, folder: Path) -> bool:
    return path.parent == folder / KEPT and is_kept_name(path.name)


def _needed(heads: dict[Path, Stated], folder: Path) -> set[str]:
    """The seals of all files that containers other than the links in ``folder`` need."""
    below = {head.seal: head.base.seal for head in heads.values() if head.base is not None}
    waiting = [head.seal for path, head in heads.items() if not _is_link(path, folder)]
    needed: set[str] = set()
    while waiting:
        base = below.get(waiting.pop())
        if base is not None and base not in needed:
            needed.add(base)
            waiting.append(base)
    return needed


@contextmanager
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


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Keep others from saving with links in a folder. Raises OSError, also where somebody does."""
    with _locked(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
        if _saving[os.path.realpath(folder)]:
            raise BlockingIOError
        yield


@contextmanager
def _locked(folder: Path, how: int) -> Iterator[None]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, how)
        except OSError as exc:
            if isinstance(exc, BlockingIOError):
                raise
            # Else the file system has no locks.
        yield
    finally:
        os.close(descriptor)


def dependents(path: Path) -> list[Path]:
    """The containers that find their base at ``path``, and no sound copy of it elsewhere.

    It looks at the heads of those in ``folders_that_need``. Another name of the same file keeps its bytes; of a copy
    all frames are read.
    """
    path = resolved(path)
    files = [file for folder in folders_that_need(path.parent) for file in files_in(folder) if file != path]
    seal = stated_seal(path) if files else None
    if seal is None:
        return []
    is_kept = cache(partial(_keeps_bytes, path))
    return [file for file in files if _needs(file, path, seal, is_kept)]


def refuse_needed(path: Path) -> None:
    """Raise OutputError where a container needs what is at ``path`` as its base, see ``dependents``."""
    if needing := dependents(path):
        home = resolved(path).parent
        names = listed([file.name if file.parent == home else str(file) for file in needing], 4)
        raise OutputError(f"{path}: is the base of {names}; rebase or remove what needs it first")


def unneeded_file(path: Path) -> str:
    """Describe the file at ``path``. Raises OutputError for a base that is needed, and OSError."""
    refuse_needed(path)
    return any_file(path)


def _needs(container: Path, path: Path, seal: str, is_kept: Callable[[Path], bool]) -> bool:
    """Whether a file is a container whose base has this seal, and is at ``path`` only."""
    if not is_container(container):
        return False  # to find that it has no head takes long
    try:
        stated, record = _head(container)
    except (InputError, OSError):
        return False
    if record is None or record.seal != seal or stated == seal:  # none is its own base
        return False
    for other in bases_of(container, record):
        if resolved(other) != path:
            return not is_kept(other)  # what readers take without ``path``
    return True


def _keeps_bytes(path: Path, other: Path) -> bool:
    """Whether ``other`` is the file at ``path`` under another name, or holds whole: all frames, and the files below."""
    try:
        if other.samefile(path):
            return True
        with ContainerReader(other) as reader:
            for part in (reader, *reader.links()):
                part.check_stored()
    except (InputError, OSError):
        return False
    return True
