"""The file that a run began with, which ``--frozen-from`` names, and its container: the base of frozen weights.

The containers of a run need nothing outside of their folder. So the container of a plain checkpoint is made in
``bases/`` there, named after its name and content. A ``.ckpt8`` is linked there beside ``base="auto"``, and copied
where it cannot be linked. What is damaged there is made again.

A bucket has no links: a ``.ckpt8`` of the bucket in which the run is stays where it is, and one of elsewhere is copied.

A mistake is an error when a run begins. Later it must not end the run: it goes on without the file.
"""

from __future__ import annotations

import hashlib
import secrets
import shutil
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from ckpt8.checkpoint.readers.entries import walk
from ckpt8.checkpoint.sources.opening import open_source
from ckpt8.compressing.compressor import Compressor, Options
from ckpt8.compressing.planning import plan_bundle
from ckpt8.compressing.policy import Policy
from ckpt8.container.bases import KEPT, files_of, kept_name
from ckpt8.container.header import holds_seal, is_meant_as_container, stated_seal
from ckpt8.container.kept_bases import KeptBases, is_sound, stated_bases
from ckpt8.core.errors import Ckpt8Error, OutputError, require
from ckpt8.core.files.atomic import (
    PIECE,
    AtomicFile,
    as_private_as,
    refuse_source,
    rename_new,
    sync_directory,
    writing,
)
from ckpt8.core.files.source_file import RemotePath, reading, resolved
from ckpt8.core.json_text import is_unicode

_CALLER = 9
"""Frames from a warning to the caller of ``save``."""

_passed_over = set[tuple[Path, Path]]()
"""Files, and folders of runs that go on without them, of which somebody was warned."""


@dataclass(frozen=True, slots=True)
class FrozenFile:
    """What ``path`` is for the containers in ``folder``, which has no links in its path."""

    path: Path
    folder: Path
    threads: int | None = None

    @classmethod
    def beside(cls, target: Path, path: Path, threads: int | None = None) -> FrozenFile:
        """What ``path`` is for ``target``. Raises OutputError where that would be written to it."""
        folder = resolved(target).parent
        if not path.is_dir() or folder == resolved(path):
            refuse_source(target, path)
        return cls(path, folder, threads)

    @property
    def is_container(self) -> bool:
        """Whether it is a container itself, or should be one."""
        return is_meant_as_container(self.path)

    @property
    def is_nested(self) -> bool:
        """Whether what is in folders of a directory counts: not where one of them holds the run, which changes."""
        return resolved(self.path) not in self.folder.parents

    def name(self) -> str:
        """The name of its container in ``bases/``: by its seal, or by the name and the content of a plain checkpoint.

        A process reads that again only where it has changed. In a store, the version stands for the content. Raises
        InputError, also where it holds no tensors.
        """
        if self.is_container:
            return kept_name(stated_seal(self.path) or "")
        with reading(self.path):
            is_directory = self.path.is_dir()
            names = [entry.path for entry in walk(self.path, nested=self.is_nested)] if is_directory else [""]
            states = [(self.path / name if name else resolved(self.path)).lstat() for name in names]
        looks = tuple((state.st_ino, state.st_size, state.st_mtime_ns) for state in states)
        if isinstance(self.path, RemotePath):
            return kept_name(hashlib.sha256(repr((str(self.path), names, looks)).encode()).hexdigest())
        return kept_name(_content_name(self.path, self.is_nested, looks))

    def container(self, kept: KeptBases | None) -> Path:
        """Its container, sound: in ``bases/``, or where it is, if that is ``kept`` there or the links are not.

        Raises InputError, and OutputError where there is none and none can be made.
        """
        if not self.is_container:
            return self._made(self.name(), self._pack)
        with reading(self.path):
            self.path.open("rb").close()
        is_apart = _store_of(self.path) != _store_of(self.folder)
        try:
            if kept is not None and not is_apart:
                kept.link(self.path)
        except OSError:
            is_apart = True
        place = self.path
        for file in reversed(files_of(self.path)) if is_apart else ():
            place = self._made(kept_name(stated_seal(file) or ""), partial(_copy, file))
        return place

    def mend(self, kept: KeptBases) -> bool:
        """Make its container in ``bases/`` again where others need it there, and it is damaged or gone.

        Returns whether it did. Raises as ``container``.
        """
        place = f"{KEPT}/{self.name()}"
        is_needed = place in stated_bases(self.folder) and not is_sound(self.folder / place)
        if is_needed:
            self.container(kept)
        return is_needed

    def pass_over(self, error: Ckpt8Error, *, is_under_way: bool, stacklevel: int = _CALLER) -> None:
        """Warn once that a run which ``is_under_way`` goes on without the file. Raises ``error`` otherwise."""
        if not is_under_way:
            raise error
        if (self.path, self.folder) not in _passed_over:
            _passed_over.add((self.path, self.folder))
            warnings.warn(f"{self.folder}: the run goes on without its file: {error}", stacklevel=stacklevel)

    def _made(self, name: str, make: Callable[[Path], object]) -> Path:
        """The container of that name in ``bases/``: what is there if it is sound, else what ``make`` writes."""
        place = self.folder / KEPT / name
        if isinstance(place, RemotePath):
            return self._made_there(name, make)
        if is_sound(place):
            return place
        new = place.with_name(f".{secrets.token_hex(4)}.{name}")
        try:
            with writing(place), as_private_as(self.path):
                place.parent.mkdir(exist_ok=True)
                make(new)
                old = stated_seal(place)
                if old is not None and old != stated_seal(new) and holds_seal(place, old):
                    with suppress(FileExistsError):  # its deltas find by the seal what is left of it
                        rename_new(place, place.with_name(kept_name(old)))
                new.replace(place)
                sync_directory(place.parent)
        finally:
            new.unlink(missing_ok=True)
        return place

    def _made_there(self, name: str, make: Callable[[Path], object]) -> Path:
        """As ``_made``, of an object: the end of its upload shows that it is whole, so its head is enough."""
        for is_last in (False, True):
            place = self.folder / KEPT / name
            seal = stated_seal(place)
            if seal is not None and holds_seal(place, seal):
                break
            try:
                place.unlink(missing_ok=True)
                make(place)
                break
            except OutputError:  # another run has made it meanwhile
                if is_last:
                    raise
        return place

    def _pack(self, target: Path) -> None:
        policy, options = Policy.of("lossless", (), None, None), Options(self.threads)
        with open_source(self.path, containers=False, decode=False, nested=self.is_nested) as source:
            name = source.directory or self.path.name
            require(is_unicode(name), f"{self.path}: its name is not valid UTF-8, and a container states it; rename it")
            Compressor(source, plan_bundle(source, policy), options).run(target, policy, force=False)


def _store_of(path: Path) -> tuple[str, ...]:
    """What tells the bucket of a path from others; the same for all local paths."""
    return path.parts[:2] if isinstance(path, RemotePath) else ()


def _copy(container: Path, target: Path) -> None:
    """Copy a container. Raises InputError where it is damaged, OSError, OutputError."""
    is_sent = isinstance(target, RemotePath)
    require(not is_sent or is_sound(container), f"{container}: is damaged")
    with container.open("rb") as source, AtomicFile(target, force=False) as output:
        output.expect(container.stat().st_size)
        shutil.copyfileobj(source, output.file, PIECE)
        output.publish()
    require(is_sent or is_sound(target), f"{container}: is damaged")


@lru_cache(maxsize=1 << 8)
def _content_name(path: Path, is_nested: bool, _: tuple[tuple[int, int, int], ...]) -> str:
    digest, buffer = hashlib.sha256(f"{path.name} ".encode(errors="surrogateescape")), memoryview(bytearray(PIECE))
    with open_source(path, containers=False, decode=False, nested=is_nested) as source:
        require(source.holds_tensors, f"{path}: holds no tensors, and so no frozen weights")
        for member in source.opened:
            size = member.checkpoint.size
            digest.update(f"{len(member.path)} {member.path} {size}".encode() if source.directory else b"")
            for offset in range(0, size, PIECE):
                piece = buffer[: min(PIECE, size - offset)]
                member.checkpoint.read_into(offset, piece)
                digest.update(piece)
        source.check_unchanged()
    return digest.hexdigest()
