"""The entries of a directory: files, links and empty directories by path, and the same as open members."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ckpt8.checkpoint.tree import Checkpoint
from ckpt8.container.manifest import DIRECTORY, FILE, SYMLINK
from ckpt8.container.member_paths import MAX_COMPONENTS, link_stays_inside, path_problem
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange
from ckpt8.core.files.urls import refuse_url


@dataclass(frozen=True, slots=True)
class Entry:
    """A file, link or empty directory. ``path`` is relative, with slashes; ``target`` is empty unless it is a link."""

    path: str
    format: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class DirectoryMember:
    """An open entry. ``reason`` says why a file that may be a checkpoint is kept as it is.

    ``holds_tensors``: the file is kept as it is although it holds tensors.
    """

    path: str
    checkpoint: Checkpoint
    reason: str | None = None
    holds_tensors: bool = False


def is_directory(path: Path) -> bool:
    """Whether a path leads to a directory. Raises InputError where it cannot be looked up."""
    try:
        return path.is_dir()
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc


def directory_name(path: Path) -> str:
    """The name of a directory however it was given: ``.``, ``run/``, ``run/..``. Raises InputError for the root."""
    name = path.name if path.name not in ("", "..") else path.resolve().name
    if not name:
        raise InputError(f"{path}: the root of the file system; give a checkpoint directory")
    return name


def walk(root: Path) -> list[Entry]:
    """All entries below ``root``, sorted by path. Raises InputError for an entry that a container cannot hold."""
    found: list[Entry] = []
    waiting = [""]
    while waiting:
        above = waiting.pop()
        try:
            with os.scandir(root / above) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as exc:
            raise InputError(f"{root / above}: cannot be read: {exc.strerror}") from exc
        if above.count("/") >= MAX_COMPONENTS - 1:
            raise InputError(f"{root}: its directories are nested deeper than {MAX_COMPONENTS}")
        if above and not names:
            found.append(Entry(above, DIRECTORY))
        for name in names:
            path = f"{above}/{name}" if above else name
            entry = _entry(root, path)
            if entry is None:
                waiting.append(path)
            else:
                found.append(entry)
    return sorted(found, key=lambda entry: entry.path.split("/"))


def _entry(root: Path, path: str) -> Entry | None:
    """The entry at ``path``; None for a directory. Raises InputError for an entry that a container cannot hold."""
    full = root / path
    if (problem := path_problem(path)) is not None:
        raise InputError(f"{full}: its path in {root} {problem}; rename it")
    try:
        mode = full.lstat().st_mode
        target = os.readlink(full) if stat.S_ISLNK(mode) else ""  # noqa: PTH115 - a Path would drop redundant parts
        target.encode()
        leads_out = bool(target) and not link_stays_inside(path, target)
        leads_nowhere = leads_out and not full.is_file()
    except UnicodeEncodeError as exc:
        raise InputError(f"{full}: where it leads is not valid UTF-8; make the link anew") from exc
    except OSError as exc:
        raise InputError(f"{full}: cannot be read: {exc.strerror}") from exc
    if target and not leads_out:
        return Entry(path, SYMLINK, target)
    if leads_nowhere:
        raise InputError(f"{full}: a link out of the directory that leads to no file; remove it, or copy what it means")
    if stat.S_ISDIR(mode):
        return None
    if not target and not stat.S_ISREG(mode):
        raise InputError(f"{full}: is neither a file nor a directory nor a link; remove it")
    return Entry(path, FILE)


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a directory. Raises InputError, UsageError for a URL."""
    refuse_url(path)
    entries = walk(path) if is_directory(path) else [Entry("", FILE)]
    try:
        return sum((path / entry.path).stat().st_size for entry in entries if entry.format == FILE)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc


def kept(why: Exception | str, source: ByteRange) -> str:
    """The text of a member's ``reason``, from the error that ``source`` raised."""
    return f"kept as it is: {str(why).removeprefix(f'{source}: ')}"
