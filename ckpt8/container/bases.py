"""Finds the base of a delta: beside it, or in folders that the user names.

``looked_for_in`` adds folders for all containers that are opened in a ``with`` block, and the environment for all.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from ckpt8.container.header import (
    CONTAINER,
    SEAL_BYTES,
    holds_seal,
    is_container,
    manifest_text,
    parse_manifest,
    read_head,
    stated_seal,
)
from ckpt8.container.manifest import BaseRecord, read_base
from ckpt8.core.closing import setting
from ckpt8.core.errors import InputError
from ckpt8.core.files.atomic import as_private_as, refuse_source
from ckpt8.core.files.paths import as_path
from ckpt8.core.files.source_file import ByteRange, RemotePath, open_range, resolved
from ckpt8.core.json_text import Fields

_directories: ContextVar[tuple[Path, ...]] = ContextVar("_directories", default=())

_VARIABLE = "CKPT8_BASE_DIR"
"""Names folders for all containers, separated as in PATH; some may be in stores."""

_FOLDER = re.compile(rf"(?:(?:s3|hf)://)?[^{os.pathsep}]+")

KEPT = "bases"
"""The folder beside deltas that holds links to what they need."""

_NAME = re.compile(r"[0-9a-f]{16}\.ckpt8")


def directories() -> tuple[Path, ...]:
    """Folders where readers look for a base, besides that of the delta."""
    named = _FOLDER.findall(os.environ.get(_VARIABLE, ""))
    return tuple(dict.fromkeys((*_directories.get(), *map(as_path, named))))


def looked_for_in(folders: Iterable[str | os.PathLike[str]]) -> AbstractContextManager[object]:
    """Have all readers that are made in the block look for bases in ``folders``, too."""
    return setting(_directories, (*map(as_path, folders), *_directories.get()))


class Stated(NamedTuple):
    """What a container says of its place in a chain."""

    seal: str
    base: BaseRecord | None

    @property
    def key(self) -> str:
        """The seal of the first container of its chain: its own without a base."""
        return self.seal if self.base is None else self.base.key

    @property
    def place(self) -> int:
        """Its number in its chain, in which the first has 0."""
        return 0 if self.base is None else self.base.place

    @property
    def links(self) -> int:
        """The number of containers below it."""
        return 0 if self.base is None else self.base.links


def stated_base(container: Path) -> Stated:
    """Seal and base of a container by its head. Raises InputError."""
    with closing(open_range(ByteRange.of(container))) as file:
        where, size = str(container), file.source.length
        text, seal = manifest_text(read_head(file, where).manifest, where), file.read(size - SEAL_BYTES, SEAL_BYTES)
        # Most manifests are not parsed.
        record = read_base(Fields(parse_manifest(text, size, where), where)) if b'"base"' in text else None
        return Stated(seal.hex(), record)


def files_of(source: Path, *, damaged_too: bool = False) -> list[Path]:
    """A source and, of a container, the files below it.

    Raises InputError where one is missing or has a damaged head; ``damaged_too`` returns what was found up to it.
    """
    files = [source]
    with suppress(InputError) if damaged_too else nullcontext():
        while is_container(files[-1]) and (record := stated_base(files[-1]).base) is not None:
            files.append(find_base(files[-1], record, directories()))
    return files


def refuse_any(target: Path, sources: Iterable[Path]) -> None:
    """Raise OutputError where a target is one of ``sources``: see ``refuse_source``."""
    for source in sources:
        refuse_source(target, source)


@contextmanager
def sources_of(source: Path, target: Path | None = None, *, damaged_too: bool = False) -> Iterator[list[Path]]:
    """``files_of`` for a block whose outputs are no more open than they. Raises OutputError for a target among them."""
    sources = files_of(source, damaged_too=damaged_too)
    if target is not None:
        refuse_any(target, sources)
    with as_private_as(*sources):
        yield sources


def find_base(
    container: Path, record: BaseRecord, base_dirs: Sequence[Path] = (), *, damaged_too: bool = False
) -> Path:
    """The file whose seal is that of ``record``, for the delta at ``container``, under whatever name it is there.

    Where there is none, ``damaged_too`` takes a file that states the seal, and whose head does not match it.

    Raises InputError, which names the base and all places where it was looked for.
    """
    for base in bases_of(container, record, base_dirs):
        return base
    places = _places(container, record, base_dirs)
    there = [place for place in places if _exists(place)]
    damaged = [place for place in there if stated_seal(place) == record.seal]
    if damaged_too and damaged:
        return damaged[0]
    state = f"changed: another file is at {_listed(there)}" if there else "missing"
    if damaged:
        state = f"damaged: header or manifest of {_listed(damaged)} does not match the seal"
    raise InputError(
        f"{container}: its base {record.path} (seal {record.seal[:12]}) is {state}; "
        f"looked for {_listed(places)}; give its folder with --base-dir or {_VARIABLE}"
    )


def bases_of(container: Path, record: BaseRecord, base_dirs: Sequence[Path] = ()) -> Iterator[Path]:
    """All files with the seal of ``record``: where the base should be, then any beside the delta and in ``base_dirs``.

    Their headers and manifests match that seal; their frames are not read. A delta comes from anywhere: folders that
    only its path names are not listed.
    """
    folders = _folders(container, base_dirs)
    others = (path for home in folders for folder in (home, home / KEPT) for path in files_in(folder))
    places = _places(container, record, base_dirs)
    return (path for path in chain(places, others) if holds_seal(path, record.seal))


def folders_that_need(folder: Path) -> list[Path]:
    """The folders whose containers find their bases in ``folder``: itself, ``bases/`` in it, of such a one that above.

    From a folder that the user names for bases anything may need them: then also the other such folders, and the
    current one.
    """
    folders = [folder, folder / KEPT, *([folder.parent] if folder.name == KEPT else [])]
    named = directories()
    if {*map(resolved, named)} & {*map(resolved, folders)}:
        folders += [*named, Path.cwd()]
    return list({resolved(path): path for path in reversed(folders)}.values())[::-1]


def _folders(container: Path, base_dirs: Sequence[Path]) -> list[Path]:
    homes = dict.fromkeys((container.parent, container.resolve().parent))
    return list(dict.fromkeys((*homes, *(home.parent for home in homes if home.name == KEPT), *base_dirs)))


def _places(container: Path, record: BaseRecord, base_dirs: Sequence[Path]) -> list[Path]:
    """Where the base should be, in the order in which to look."""
    names = (record.path, record.path.rpartition("/")[2], f"{KEPT}/{kept_name(record.seal)}")
    folders = _folders(container, base_dirs)
    places = (folder / name for folder in folders for name in names)
    return list(dict.fromkeys(place.resolve() if isinstance(place, RemotePath) else place for place in places))


def _exists(place: Path) -> bool:
    with suppress(OSError):  # a name that is too long
        return place.exists()
    return False


def files_in(folder: Path) -> list[Path]:
    """Everything in a folder; nothing of one that cannot be listed. In a store, what has the suffix of a container.

    There each costs two requests.
    """
    try:
        files = sorted(folder.iterdir())
        return [path for path in files if path.suffix == CONTAINER] if isinstance(folder, RemotePath) else files
    except OSError:
        return []


def kept_name(seal: str) -> str:
    """The name of the link to the container with this seal."""
    return f"{seal[:16]}.ckpt8"


def is_kept_name(name: str) -> bool:
    """Whether a file in the folder ``KEPT`` has the name of such a link."""
    return _NAME.fullmatch(name) is not None


def _listed(paths: Iterable[Path]) -> str:
    return ", ".join(map(str, paths))
