"""Removes a checkpoint once its container was verified against it, and never otherwise.

The checkpoint first gets another name in one step, so that it never looks like one with files missing. A process that
is killed after that leaves ``.NAME.SEAL.ckpt8-removed``; ``finish_removals`` removes what has such a name.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ckpt8.chaining.rest import Look, look_at
from ckpt8.container.header import SEAL_BYTES, is_container
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import CheckFailedError, InputError, OutputError, UsageError
from ckpt8.core.files.atomic import rename_new, sync_directory
from ckpt8.core.files.partial import remove
from ckpt8.core.workers import Progress
from ckpt8.inspecting.verify import verify

_SUFFIX = ".ckpt8-removed"
_NAME_KEPT, _SEAL_KEPT = 160, 16
_ASIDE = re.compile(rf"\.(.+)\.([0-9a-f]{{{_SEAL_KEPT}}}){re.escape(_SUFFIX)}", re.DOTALL)


def refuse_removal(source: Path) -> None:
    """Raise UsageError for a source that must not be removed, and OutputError for one that cannot be."""
    if source.is_symlink():
        raise UsageError(f"{source}: is a link; --remove removes what it leads to only where that is given itself")
    try:
        final = source.resolve()
        homes = {Path.cwd(), Path(os.path.expanduser("~")).resolve()}  # noqa: PTH111 - a user may have none
        if any(final == home or final in home.parents for home in homes):
            raise UsageError(f"{source}: is or holds the current or the home directory, which --remove leaves alone")
        device = final.stat().st_dev
        folders = [Path(each) for each, _, _ in os.walk(final)] if final.is_dir() else []
        for folder in folders:
            if folder.lstat().st_dev != device or os.path.ismount(folder):
                raise OutputError(f"{source}: holds another file system, {folder}, and cannot be removed")
        for folder in (final.parent, *folders):
            if not os.access(folder, os.W_OK | os.X_OK):
                raise OutputError(f"{source}: cannot be removed: {folder} cannot be written")
    except OSError as exc:
        raise InputError(f"{source}: cannot be read: {exc.strerror}") from exc


def remove_verified(
    source: Path, container: Path, *, threads: int | None = None, progress: Progress = lambda _: None
) -> None:
    """Verify ``container``, also against ``source``; then remove ``source``.

    Raises CheckFailedError if they do not agree, InputError for damage or where ``source``, ``container`` or a file
    below it changes meanwhile, UsageError where ``source`` holds one of these, OutputError where it cannot be removed.
    It is then still there.
    """
    refuse_removal(source)
    kept = _needed(container)
    for path in kept:
        if source.resolve() in (path, *path.parents):
            raise UsageError(f"{source}: is kept: {path} in it is what {container} is read from")
    before = [_look(path) for path in (source, *kept)]
    result = verify(container, source, threads=threads, progress=progress)
    if result.failures:
        raise CheckFailedError(f"{source}: is kept: {container}: {result.failures[0]}")
    if result.unmeasured:
        raise CheckFailedError(
            f"{source}: is kept: {container} carries no statistics, so its tensors cannot be checked"
        )
    _discard(source, container, kept, before)


def _needed(container: Path) -> list[Path]:
    """The files that ``container`` is read from: itself and those below it. Raises InputError."""
    with ContainerReader(container) as reader:
        return [each.path.resolve() for each in (reader, *reader.links())]


def _look(path: Path) -> Look:
    try:
        return look_at(path)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc


def _discard(source: Path, container: Path, kept: Sequence[Path], verified: Sequence[Look]) -> None:
    """Remove ``source`` if it and ``kept`` still look as they did when ``verified``. Raises InputError, OutputError."""
    aside = source.with_name(f".{source.name[:_NAME_KEPT]}.{_seal(container)}{_SUFFIX}")

    def check(path: Path) -> None:
        for each, known in zip((path, *kept), verified, strict=True):
            if _look(each) != known:
                name = "it" if each == path else str(each)
                raise InputError(f"{source}: is kept: {name} changed after {container} was verified against it")

    try:
        check(source)
        rename_new(source, aside)
        try:
            check(aside)
            sync_directory(aside.parent)
        except BaseException:
            with suppress(OSError):
                rename_new(aside, source)
            raise
    except OSError as exc:
        raise OutputError(f"{source}: cannot be removed: {exc.strerror}") from exc
    _remove_aside(aside)


def _remove_aside(aside: Path) -> None:
    remove(aside)
    if os.path.lexists(aside):
        raise OutputError(f"{aside}: was verified and cannot be removed; remove it yourself")


def _seal(container: Path) -> str:
    """The first digits of the seal of a container."""
    with container.open("rb") as file:
        file.seek(-SEAL_BYTES, os.SEEK_END)
        return file.read().hex()[:_SEAL_KEPT]


def _is_sound(container: Path) -> bool:
    """Whether a container and the files below it are there, by their heads."""
    try:
        return bool(_needed(container))
    except InputError:
        return False


def finish_removals(folder: Path, home: Path) -> None:
    """Remove what killed processes left in ``folder``, where ``home`` has the container that it was verified against.

    What cannot be read is left alone. Raises OutputError for what cannot be removed.
    """
    with suppress(OSError):
        found = [(path, match) for path in folder.iterdir() if (match := _ASIDE.fullmatch(path.name)) is not None]
        containers = [path for path in home.iterdir() if is_container(path)] if found else []
        seals = {_seal(path) for path in containers if _is_sound(path)}
        for path, match in found:
            if match[2] in seals and stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                _remove_aside(path)
