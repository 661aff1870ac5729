"""Which containers need another one as their base: nothing of ckpt8 replaces or removes that."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from ckpt8.container.bases import bases_of, stated_base
from ckpt8.container.head import stated_seal
from ckpt8.core.errors import InputError, OutputError
from ckpt8.core.files.atomic import any_file
from ckpt8.core.text import listed

_SHOWN = 4


def dependents(path: Path) -> list[Path]:
    """The containers beside ``path`` that find their base there and nowhere else, by their heads."""
    seal = stated_seal(path)
    if seal is None:
        return []
    with suppress(OSError):
        return [each for each in sorted(path.parent.iterdir()) if _needs(each, path, seal)]
    return []


def refuse_needed(path: Path) -> None:
    """Raise OutputError where a container beside ``path`` needs it as its base."""
    needing = dependents(path)
    if needing:
        names = listed([each.name for each in needing], _SHOWN)
        raise OutputError(f"{path}: is the base of {names}; rebase or remove what needs it first")


def unneeded_file(path: Path) -> str:
    """Describe the file at ``path``. Raises OutputError for a base that is needed, and OSError."""
    refuse_needed(path)
    return any_file(path)


def _needs(container: Path, path: Path, seal: str) -> bool:
    """Whether a file is a container whose base has this seal and is at ``path`` only."""
    if stated_seal(container) is None:
        return False
    try:
        # Most files are not parsed.
        record = stated_base(container, only=seal).base
    except InputError:
        return False
    if record is None or record.seal != seal:
        return False
    return all(each.resolve() == path.resolve() for each in bases_of(container, record))
