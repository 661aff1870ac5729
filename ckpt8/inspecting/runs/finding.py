"""Which files of a run are one checkpoint.

A file is a checkpoint of its own, unless it is one of several parts in its folder, see ``parts_in``. Everything below
a folder belongs to it where a file says that the folder is one checkpoint, such as the ``.metadata`` of a distributed
one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ckpt8.checkpoint.readers.dcp.metadata import METADATA
from ckpt8.checkpoint.run_folder import TRAINER_STATE, is_one_checkpoint, may_be_checkpoint, parts_in
from ckpt8.container.bases import KEPT, is_kept_name
from ckpt8.core.errors import InputError

SUFFIXES = frozenset({".ckpt8", ".pt", ".pth", ".ckpt", ".safetensors"})
"""A file of such a name that is no checkpoint is damaged."""

_DEEPEST = 3
"""Levels of folders below that of the run."""

_OF_A_RUN = re.compile(r"checkpoint[-_]\d+(?:\.ckpt8)?")


@dataclass(frozen=True, slots=True)
class Place:
    """One checkpoint: a file, or a folder and the paths of ``files`` in it, with slashes. ``name`` is for people.

    ``run`` is the folder of the run that it belongs to.
    """

    path: Path
    name: str
    run: str
    files: tuple[str, ...] = ()


@dataclass(slots=True)
class Found:
    """The checkpoints of a run, and the containers in folders of bases."""

    places: list[Place] = field(default_factory=list)
    bases: list[Path] = field(default_factory=list)


def find(directory: Path) -> Found:
    """All files below a directory that may be checkpoints. Raises InputError where it cannot be read."""
    found = Found()
    _visit(directory, "", found)
    return found


def _visit(root: Path, above: str, found: Found) -> None:
    """Look into the folder ``above``, a path with slashes."""
    files, folders = _listed(root / above)
    level = above.count("/") + bool(above)
    if above.rpartition("/")[2] == KEPT:
        kept = [name for name in files if is_kept_name(name)]
        found.bases += [root / above / name for name in kept]
        files = [name for name in files if name not in kept]
    run = above.rpartition("/")[0]
    if _is_whole(files, folders, is_top=not above):
        found.places.append(Place(root / above, above or ".", run, tuple(sorted(_below(root / above, found)))))
        return
    parts = parts_in(root / above, files)
    if parts:
        found.places.append(Place(root / above, above or ".", run if above else "", tuple(parts)))
    for name in files:
        if name not in parts and name != TRAINER_STATE and may_be_checkpoint(name):
            path = f"{above}/{name}" if above else name
            found.places.append(Place(root / path, path, above))
    if level < _DEEPEST:
        for name in folders:
            _visit(root, f"{above}/{name}" if above else name, found)


def _listed(folder: Path) -> tuple[list[str], list[str]]:
    """The names of files and folders, without hidden ones, and without links to others below this folder."""
    files, folders = [], []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name == METADATA or not entry.name.startswith("."):
                    if not entry.is_dir():
                        files += [] if entry.is_symlink() and _stays_below(folder, entry.name) else [entry.name]
                    elif not entry.is_symlink():
                        folders.append(entry.name)
    except OSError as exc:
        raise InputError(f"{folder}: cannot be read: {exc.strerror}") from exc
    return sorted(files), sorted(folders)


def _stays_below(folder: Path, link: str) -> bool:
    """Whether a link is another name for something below its folder, such as ``last.ckpt``."""
    return (folder / link).resolve().is_relative_to(folder.resolve())


def _below(folder: Path, found: Found) -> Iterator[str]:
    """The paths of all files below the folder of one checkpoint, without those of bases."""
    waiting = [""]
    while waiting:
        above = waiting.pop()
        files, folders = _listed(folder / above)
        for name in files:
            path = f"{above}/{name}" if above else name
            if above.rpartition("/")[2] == KEPT and is_kept_name(name):
                found.bases.append(folder / path)
            else:
                yield path
        waiting += [f"{above}/{name}" if above else name for name in folders]


def _is_whole(files: Iterable[str], folders: Iterable[str], *, is_top: bool) -> bool:
    """Whether all below a folder with these entries is one checkpoint. At the top Trainer leaves its last state."""
    if is_one_checkpoint(files):
        return True
    return not is_top and TRAINER_STATE in files and not any(map(_OF_A_RUN.fullmatch, (*files, *folders)))
