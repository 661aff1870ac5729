"""Which containers need another one as their base: nothing of ckpt8 replaces or removes that."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

from ckpt8.container.bases import bases_of, folders_that_need, stated_base
from ckpt8.container.head import stated_seal
from ckpt8.container.reader import ContainerReader
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.atomic import any_file
from ckpt8.core.text import listed

_SHOWN = 4


def dependents(path: Path) -> list[Path]:
    """The containers that find their base at ``path``, and no sound copy of it elsewhere.

    It looks at the heads of those in ``folders_that_need``. Another name of the same file keeps its bytes; of a copy
    all frames are read.
    """
    seal, path = stated_seal(path), Path(os.path.realpath(path))
    if seal is None:
        return []
    found: list[Path] = []
    for folder in folders_that_need(path.parent):
        with suppress(OSError):
            found += sorted(folder.iterdir())
    is_kept = cache(partial(_keeps_bytes, path))
    return [each for each in found if _needs(each, path, seal, is_kept)]


def refuse_needed(path: Path) -> None:
    """Raise OutputError where a container needs what is at ``path`` as its base, see ``dependents``."""
    needing = dependents(path)
    if needing:
        home = Path(os.path.realpath(path)).parent
        names = listed([each.name if each.parent == home else str(each) for each in needing], _SHOWN)
        raise OutputError(f"{path}: is the base of {names}; rebase or remove what needs it first")


def unneeded_file(path: Path) -> str:
    """Describe the file at ``path``. Raises OutputError for a base that is needed, and OSError."""
    refuse_needed(path)
    return any_file(path)


def _needs(container: Path, path: Path, seal: str, is_kept: Callable[[Path], bool]) -> bool:
    """Whether a file is a container whose base has this seal, and is at ``path`` only."""
    if stated_seal(container) is None:
        return False
    try:
        # Most files are not parsed.
        record = stated_base(container, only=seal).base
    except InputError:
        return False
    if record is None or record.seal != seal:
        return False
    others = (each for each in bases_of(container, record) if os.path.realpath(each) != str(path))
    other = next(others, None)  # what readers take without ``path``
    return other is None or not is_kept(other)


def _keeps_bytes(path: Path, other: Path) -> bool:
    """Whether ``other`` is the file at ``path`` under another name, or holds whole: all frames, and the files below."""
    try:
        if other.samefile(path):
            return True
        with ContainerReader(other) as reader:
            for each in (reader, *reader.links()):
                each.check_stored()
    except (InputError, OSError):
        return False
    return True
