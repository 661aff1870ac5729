"""Removes a checkpoint once its container was verified against it, and never otherwise.

The checkpoint first gets another name in one step, ``.NAME.SEAL.ckpt8-removed``, so that it never looks like one with
files missing; a directory then becomes ``.NAME.SEAL.ckpt8-removing`` before the first of its files goes. A process that
is killed leaves one of them. ``interrupted`` finds these, and ``finish_removal`` verifies again before it removes one.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ckpt8.chaining.rest import Look, look_at
from ckpt8.container.head import stated_seal
from ckpt8.container.manifest import Manifest
from ckpt8.container.member_paths import name_problem
from ckpt8.container.reader import ContainerReader
from ckpt8.container.target_names import original_name
from ckpt8.core.errors import CheckFailedError, Ckpt8Error, InputError, OutputError, UsageError
from ckpt8.core.files.atomic import rename_new, sync_directory
from ckpt8.core.files.partial import remove
from ckpt8.core.workers import Progress
from ckpt8.inspecting.verify import verify

_WHOLE, _PARTIAL = ".ckpt8-removed", ".ckpt8-removing"
_NAME_KEPT, _SEAL_KEPT = 222, 16
"""Bytes of a name, so that it has no more than the 255 of a file system with the rest, and digits of a seal."""
_LONGEST_CHARACTER, _CUT = 4, "…"
_ASIDE = re.compile(rf"\.(.+)\.([0-9a-f]{{{_SEAL_KEPT}}})\.ckpt8-(?:removed|removing)", re.DOTALL)


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
    _discard(source, container, *_verified(source, source, container, threads, progress))


def _verified(
    original: Path, source: Path, container: Path, threads: int | None, progress: Progress
) -> tuple[list[Path], list[Look]]:
    """Verify ``container`` against ``original``, which is or was ``source``.

    Returns the files that it is read from, and how original and files looked before. Raises as ``remove_verified``.
    """
    kept = _needed(container)
    for path in kept:
        if original.resolve() in (path, *path.parents):
            raise UsageError(f"{source}: is kept: {path} in it is what {container} is read from")
    before = [_look(path) for path in (original, *kept)]
    result = verify(container, original, threads=threads, progress=progress)
    if result.failures:
        raise CheckFailedError(f"{source}: is kept: {container}: {result.failures[0]}")
    if result.unmeasured:
        raise CheckFailedError(
            f"{source}: is kept: {container} carries no statistics, so its tensors cannot be checked"
        )
    return kept, before


def _needed(container: Path) -> list[Path]:
    """The files that ``container`` is read from: itself and those below it. Raises InputError."""
    with ContainerReader(container) as reader:
        return [each.path.resolve() for each in (reader, *reader.links())]


def _look(path: Path) -> Look:
    try:
        return look_at(path)
    except OSError as exc:
        raise InputError(f"{path}: cannot be read: {exc.strerror}") from exc


def _check(source: Path, container: Path, paths: Sequence[Path], verified: Sequence[Look]) -> None:
    """Raise InputError unless all paths look as they did when ``container`` was ``verified`` against the first."""
    for path, known in zip(paths, verified, strict=True):
        if _look(path) != known:
            name = "it" if path == paths[0] else str(path)
            raise InputError(f"{source}: is kept: {name} changed after {container} was verified against it")


def _discard(source: Path, container: Path, kept: Sequence[Path], verified: Sequence[Look]) -> None:
    """Remove ``source`` if it and ``kept`` still look as they did when ``verified``. Raises InputError, OutputError."""
    seal = (stated_seal(container) or "")[:_SEAL_KEPT]
    aside = source.with_name(f".{_shortened(source.name)}.{seal}{_WHOLE}")
    try:
        _check(source, container, (source, *kept), verified)
        rename_new(source, aside)
        try:
            _check(source, container, (aside, *kept), verified)
            sync_directory(aside.parent)
            going = _going(aside)
        except BaseException:
            with suppress(OSError):
                rename_new(aside, source)
            raise
    except OSError as exc:
        raise OutputError(f"{source}: cannot be removed: {exc.strerror}") from exc
    _remove(going)


def _shortened(name: str) -> str:
    """The beginning of a name, at most _NAME_KEPT bytes."""
    while len(os.fsencode(name)) > _NAME_KEPT:
        name = name[:-1]
    return name


def _going(aside: Path) -> Path:
    """The name of what is set aside once its removal begins: a directory gets another one. Raises OSError."""
    if not aside.is_dir():
        return aside
    going = aside.with_name(aside.name.removesuffix(_WHOLE) + _PARTIAL)
    rename_new(aside, going)
    return going


def _remove(path: Path) -> None:
    remove(path)
    if os.path.lexists(path):
        raise OutputError(f"{path}: was verified and cannot be removed; remove it yourself")


def interrupted(folder: Path, homes: Iterable[Path]) -> list[tuple[Path, Path, Path | None]]:
    """What killed processes left in ``folder``: where it is, where it was, and its container, there or in ``homes``.

    The container is None where there is none with its seal. Then a long name ends with ``…``, since it may have been
    cut. Empty where a folder cannot be read.
    """
    with suppress(OSError):
        found = [(path, match) for path in sorted(folder.iterdir()) if (match := _ASIDE.fullmatch(path.name))]
        homes = dict.fromkeys((*homes, folder)) if found else ()
        seals = {(stated_seal(path) or "")[:_SEAL_KEPT]: path for each in homes for path in sorted(each.iterdir())}
        return [
            (path, folder / _name_of(match[1], seals.get(match[2])), seals.get(match[2]))
            for path, match in found
            if stat.S_IFMT(path.lstat().st_mode) in (stat.S_IFREG, stat.S_IFDIR)
        ]
    return []


def _name_of(start: str, container: Path | None) -> str:
    """The name of a checkpoint that begins so, by its container where it may have been cut."""
    if len(os.fsencode(start)) <= _NAME_KEPT - _LONGEST_CHARACTER:
        return start
    with suppress(Ckpt8Error):
        if container is not None:
            with ContainerReader(container) as reader:
                name = original_name(reader.manifest)
            if name_problem(name) is None and _shortened(name) == start:
                return name
    return start + _CUT


def finish_removal(
    aside: Path,
    source: Path,
    container: Path | None,
    *,
    unwanted: Callable[[Manifest], str | None] = lambda _: None,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> None:
    """Verify what ``interrupted`` found: ``container`` against it, and every byte of the files below; then remove it.

    Otherwise, and where ``unwanted`` says that the container is not what was asked for now, it becomes ``source``
    again, unless that name is taken or files of it are gone. Raises a Ckpt8Error that says why, and where it is.
    """
    is_partial = aside.name.endswith(_PARTIAL)
    try:
        if container is None:
            raise InputError("the container that it was verified against is not here")
        if is_partial:
            for path in _needed(container):
                verify(path, threads=threads, progress=progress)
        else:
            with ContainerReader(container) as reader:
                difference = unwanted(reader.manifest)
            if difference is not None:
                raise CheckFailedError(f"{container}: {difference}")
            kept, before = _verified(aside, source, container, threads, progress)
            for path in kept[1:]:
                verify(path, threads=threads)
            _check(source, container, (aside, *kept), before)
            aside = _going(aside)
    except (Ckpt8Error, OSError) as exc:
        reason = str(exc).removeprefix(f"{source}: is kept: ")
        where = f"what is left of it is {aside}, with files missing" if is_partial else _brought_back(aside, source)
        error = type(exc) if isinstance(exc, Ckpt8Error) else OutputError
        raise error(f"{source}: its removal was interrupted, and is not finished: {reason}; {where}") from exc
    _remove(aside)


def _brought_back(aside: Path, source: Path) -> str:
    """Give what was set aside its name again; say where it is."""
    if source.name.endswith(_CUT):
        return f"it stays at {aside}, since its whole name is not known"
    try:
        rename_new(aside, source)
        sync_directory(source.parent)
    except FileExistsError:
        return f"another {source.name} is there, so that it stays at {aside}"
    except OSError as exc:
        return f"it stays at {aside}, which cannot be renamed: {exc.strerror}"
    return f"{source.name} is back"
