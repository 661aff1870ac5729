"""The container that a new one continues, open while the new one is encoded."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt8.codecs import Codec
from ckpt8.container.base_record import MOST_LINKS, BaseRecord
from ckpt8.container.bases import find_base
from ckpt8.container.json_fields import is_unicode
from ckpt8.container.manifest import Manifest
from ckpt8.container.predicted import predicted_parts
from ckpt8.container.reader import ContainerReader
from ckpt8.core.closing import Closing
from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.tensors import Parts


class BrokenBaseError(InputError):
    """A part of a base cannot be read."""


class OpenBase(Closing):
    """The base of a new container, which has the number ``place`` in its chain, by default the next one.

    Raises InputError where it cannot be read, UsageError where the chain is too long.
    """

    def __init__(self, path: Path, place: int | None = None) -> None:
        self.path = path
        self.reader = ContainerReader(path, kernels=True)
        below = self.manifest.base
        self._place = place or (below.place + 1 if below else 1)
        if below is not None and below.links == MOST_LINKS:
            self.close()
            raise UsageError(f"{path}: has {MOST_LINKS} containers below it; give a base with fewer")

    @property
    def manifest(self) -> Manifest:
        """The manifest of the base."""
        return self.reader.manifest

    def close(self) -> None:
        """Close the base and the files below it."""
        self.reader.close()

    def check_target(self, target: Path) -> None:
        """Raise UsageError where writing ``target`` would replace the base or a file below it, InputError for these."""
        replaced = os.path.realpath(target)
        for each in (self.reader, *self.reader.links()):
            if os.path.realpath(each.path) == replaced:
                raise UsageError(f"{target}: the base {self.path} needs this file; give another name")

    def parts(self, storage: int, chunk: int, codec: Codec) -> Parts:
        """What the parts of a chunk under ``codec`` count from. Raises BrokenBaseError. Thread-safe."""
        try:
            return predicted_parts(codec, self.reader, storage, chunk)
        except InputError as exc:
            raise BrokenBaseError(str(exc)) from exc

    def whole_bytes(self, storage: int) -> int:
        """What a storage takes where it is kept whole: in the base or in a file below it. Raises BrokenBaseError."""
        reader, record = self.reader, self.manifest.storages[storage]
        while record.base is not None and (found := reader.base()) is not None:
            reader, record = found, found.manifest.storages[record.base]
        return record.stored_bytes

    def record(self, target: Path) -> BaseRecord:
        """What the manifest of ``target`` says of this base. Raises UsageError for a path that is no Unicode."""
        seal, below, path = self.reader.seal.hex(), self.manifest.base, relative_path(self.path, target)
        if not is_unicode(path):
            raise UsageError(f"{self.path}: a file whose name is no Unicode cannot be a base; rename it")
        return BaseRecord(
            seal=seal,
            path=path,
            key=below.key if below else seal,
            place=self._place,
            links=below.links + 1 if below else 1,
        )


def relative_path(base: Path, target: Path) -> str:
    """The path of ``base`` from the folder of ``target``, or of what that leads to, with slashes."""
    home = os.path.realpath(base.parent)
    return Path(os.path.relpath(Path(home) / base.name, Path(os.path.realpath(target)).parent)).as_posix()


def check_base(record: BaseRecord | None, target: Path) -> None:
    """Raise BrokenBaseError where ``target``, which is about to be there, would not find its base any more."""
    if record is not None:
        try:
            find_base(target, record)
        except InputError as exc:
            raise BrokenBaseError(str(exc)) from exc
