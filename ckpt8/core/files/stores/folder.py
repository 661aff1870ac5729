"""Writes a directory of a store: object after object, the one that completes it last; and removes one.

A store renames nothing. So what is there before the last object is a part of a directory, which its readers refuse.
The removal begins with that object, and a note beside the directory says what else belongs to it: it is removed once a
killed process has left it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ckpt8.core.closing import Closing
from ckpt8.core.errors import Ckpt8Error, OutputError, require
from ckpt8.core.files.atomic import PIECE, Check, note_replaced
from ckpt8.core.files.stores.contract import Write
from ckpt8.core.files.stores.writing import ObjectOutput

if TYPE_CHECKING:
    from ckpt8.core.files.stores.path import StorePath


_NOTE = ".ckpt8-removal"


def remove_folder(path: StorePath, turn: Callable[[str], int]) -> None:
    """Remove the objects that a list of the directory has shown, first what has the last ``turn``.

    Raises OutputError where somebody has replaced one meanwhile, which stays, and those that would go after it.
    """
    objects = dict(sorted(path.objects.items(), key=lambda item: (-turn(item[0]), item[0])))
    note = path.with_name(f".{path.name}{_NOTE}")
    path.store.put(Write(note.key, None), json.dumps({name: version.tag for name, version in objects.items()}).encode())
    note.forget()
    for name, version in objects.items():
        path.store.delete(f"{path.key}/{name}", version.tag)
    note.unlink()


def remains_in(folder: StorePath, *, remove: bool) -> set[str]:
    """The objects that belong to directories in a folder whose removal a killed process has begun, and the notes of it.

    The folder was listed. With ``remove`` they go now, but for those that were replaced since. So do notes of
    directories of which nothing was removed.
    """
    objects, remains = folder.objects, set[str]()
    for name in [name for name in objects if name.endswith(_NOTE) and name.rpartition("/")[2].startswith(".")]:
        above, slash, own = name.rpartition("/")
        directory = f"{above}{slash}{own[1:].removesuffix(_NOTE)}"
        noted = {f"{directory}/{inside}": tag for inside, tag in _noted(folder / name).items()}
        left = [path for path, tag in noted.items() if path in objects and objects[path].tag == tag]
        is_begun = bool(noted) and next(iter(noted)) not in objects
        going = [*(left if is_begun else ()), *([name] if noted else ())]
        remains.update(going)
        for path in going if remove else ():
            (folder / path).unlink()
    return remains


def _noted(note: StorePath) -> dict[str, str]:
    """The tags of objects that a note lists, in the order in which they go; none where it is none of ours."""
    with suppress(ValueError), note.open() as file:
        noted = json.loads(file.read())
        if isinstance(noted, dict) and all(isinstance(tag, str) for tag in noted.values()):
            return noted
    return {}


class FolderOutput(Closing):
    """Objects below ``path``, under names that nobody has. ``close`` removes those that were sent, unless published."""

    def __init__(self, path: StorePath) -> None:
        self._path, self._store = path, path.store
        self._replaced: str | None = None
        self._sent: dict[str, Write] = {}

    def clear(self, check: Check, turn: Callable[[str], int]) -> None:
        """Remove the directory that is there, if ``check`` accepts it: first what has the last ``turn``.

        Raises OutputError, also where somebody replaces an object meanwhile.
        """
        found = self._path.listed()
        if found.exists():
            self._replaced = check(found)
            for name, version in sorted(found.objects.items(), key=lambda item: -turn(item[0])):
                self._store.delete(self._key_of(name), version.tag)

    def send(self, name: str, file: Path) -> None:
        """Send a file as the object of this name below the path. Raises OutputError, OSError."""
        write = Write(self._key_of(name), None)
        self._sent[name] = write
        size = file.stat().st_size
        with file.open("rb") as content, ObjectOutput(self._path / name, write, bound=size) as output:
            while piece := content.read(PIECE):
                output.append([piece])
            output.publish()

    def check_alone(self) -> None:
        """Raise OutputError where there is more or less than what was sent: somebody else writes there."""
        found = self._store.objects(f"{self._path.key}/", deep=True)
        require(
            {name for name in found if not name.endswith("/")} == self._sent.keys(),
            f"{self._path}: another program writes or removes files there, too; what was sent is removed",
            OutputError,
        )

    def publish(self) -> str | None:
        """Keep all that was sent; return what it replaced."""
        self._sent.clear()
        self._path.forget()
        if self._replaced is not None:
            note_replaced(self._replaced)
        return self._replaced

    def close(self) -> None:
        """Remove what was sent, the last first, as far as possible."""
        while self._sent:
            _, write = self._sent.popitem()
            with suppress(Ckpt8Error):
                version = self._store.stat(write.key)
                if version is not None and version.write == write.id:
                    self._store.delete(write.key, version.tag)

    def _key_of(self, name: str) -> str:
        return f"{self._path.key}/{name}"
