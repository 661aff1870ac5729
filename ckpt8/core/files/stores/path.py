"""A place in a store as a Path.

It answers what files are asked: size, kind, content. ``os.fspath`` of it raises, so that no call of the system takes
``s3://bucket/key`` for a local file of that name.
"""

from __future__ import annotations

import errno
import functools
import io
import os
import posixpath
import stat
import weakref
from collections.abc import Callable, Generator, Hashable, Mapping
from pathlib import Path
from typing import IO, Any, TypeVar, cast

from ckpt8.core.errors import InputError, UsageError
from ckpt8.core.files.atomic import AtomicFile, Check
from ckpt8.core.files.source_file import ByteRange, RemotePath, SourceFile, crc32
from ckpt8.core.files.stores.contract import Readable, Stat, Store, Write
from ckpt8.core.files.stores.folder import FolderOutput, remains_in, remove_folder
from ckpt8.core.files.stores.listing import Listing
from ckpt8.core.files.stores.reading import Content, StoreFile
from ckpt8.core.files.stores.writing import ObjectOutput

T = TypeVar("T")


@functools.cache
def _store(bucket: str) -> Store:
    from ckpt8.core.files.stores.s3 import S3Store

    return S3Store(bucket)


@functools.cache
def _repository(name: str) -> Readable:
    from ckpt8.core.files.stores.hf import HfStore

    return HfStore(name)


_known: weakref.WeakValueDictionary[tuple[str, str], Content] = weakref.WeakValueDictionary()
"""Versions that a path sees, by URL and tag: of one that a list shows to another path nothing is fetched again."""


class StorePath(RemotePath):
    """``s3://bucket/key``. It sees one version of the object: that of its first question, and an error afterwards.

    A call or command makes one and hands it on, so all its readers share what was fetched. Paths that derive from it,
    such as ``parent``, see for themselves, and so does it after it was written.

    Where no object has its name it may be a directory: ``is_dir`` lists what lies below, all of it at once, and then
    the path and all below it see what the list has shown.
    """

    _seen: tuple[Content | None] | None = None
    _within: tuple[Listing, str] | None = None
    """The directory that was listed, and the path in it."""
    _answers: dict[Hashable, object] | None = None
    _listed: Stat | None = None
    """The version that a list of the folder has shown, until the object itself is asked for."""

    def __str__(self) -> str:
        return "://".join(super().__str__().split(":/", 1))

    def __fspath__(self) -> str:
        raise TypeError(f"{self}: BUG: the system was asked for an object of a store")

    @property
    def content(self) -> Content | None:
        """The version of the object that this path sees, None where there was none. Raises InputError, UsageError."""
        if self._within is not None:
            listing, path = self._within
            content = listing.content(path)
            if content is not None:
                _known[str(self), content.version.tag] = content
            return content
        if not self.key:
            return None
        if self._seen is None:
            known = None if self._listed is None else _known.get((str(self), self._listed.tag))
            content = known or Content.at(str(self), self._readable(), self.key)
            if content is not None:
                _known[str(self), content.version.tag] = content
            self._seen = (content,)
        return self._seen[0]

    @property
    def version(self) -> Stat | None:
        """The version of the object that this path sees, None where there was none. Raises InputError, UsageError."""
        if self._within is not None:
            listing, path = self._within
            return listing.objects.get(path)
        if self._seen is None and self._listed is not None:
            return self._listed
        return None if self.content is None else self.content.version

    @property
    def store(self) -> Store:
        """The store that has the object. Raises UsageError for one that is only read."""
        self.check_target()
        return _store(self.parts[1])

    @property
    def key(self) -> str:
        """The name of the object there."""
        return "/".join(self.parts[2:])

    def names_something(self) -> bool:
        """Whether this is more than a bucket."""
        return bool(self.key)

    def check_target(self) -> None:
        """Raise nothing: buckets are written."""

    def _readable(self) -> Readable:
        return self.store

    def new_object(self, *, force: bool, check: Check, reserved: int = 0, bound: int = 0) -> ObjectOutput:
        """What writes the object, see ``ObjectOutput``. Raises OutputError as ``AtomicFile.examine`` does."""
        self.check_target()
        replaced = AtomicFile.examine(self, force=force, check=check)
        write = Write(self.key, None if self.version is None else self.version.tag)
        return ObjectOutput(self, write, replaced, check, reserved=reserved, bound=bound)

    def answer(self, question: Hashable, ask: Callable[[], T]) -> T:
        """What ``ask`` returned when it was first asked, of the version that this path sees."""
        answers = self._answers or {}
        if question not in answers:
            answers[question] = ask()
            self._answers = answers
        return cast("T", answers[question])

    def new_objects(self) -> FolderOutput:
        """What writes a directory, see ``FolderOutput``."""
        return FolderOutput(self)

    @property
    def objects(self) -> Mapping[str, Stat]:
        """What lies in a directory that was listed, by its path in it; nothing of another."""
        if self._within is None:
            return {}
        listing, own = self._within
        start = own and f"{own}/"
        return {name[len(start) :]: version for name, version in listing.objects.items() if name.startswith(start)}

    def remove_objects(self, turn: Callable[[str], int]) -> None:
        """Remove a directory that was listed, see ``remove_folder``."""
        remove_folder(self, turn)

    def without_remains(self, *, remove: bool) -> StorePath:
        """The folder as one list shows it now, without what ``remains_in`` names."""
        path = self.listed()
        left = path.objects.keys() - remains_in(path, remove=remove)
        if len(left) < len(path.objects):
            path._within = self._listing_of({name: path.objects[name] for name in left}), ""
        return path

    def forget(self) -> None:
        """See the object anew, which was written."""
        self._seen = self._listed = self._within = self._answers = None

    def __truediv__(self, key: str | os.PathLike[str]) -> StorePath:
        """A path below: of a directory that was listed, what the list has shown; of an object nothing."""
        path = super().__truediv__(key)
        below = path.parts[len(self.parts) :]
        if path.parts[: len(self.parts)] == self.parts and ".." not in below:
            if self._within is not None:
                listing, own = self._within
                path._within = listing, "/".join([*([own] if own else []), *below])
            elif self._listed is not None or self._seen not in (None, (None,)):
                path._within = Listing(str(self), self._readable(), self.key, {}), "/".join(below)
        return path

    def with_name(self, name: str) -> StorePath:
        """The path beside it: of one in a directory that was listed, what the list has shown."""
        path = super().with_name(name)
        if self._within is not None and self._within[1]:
            listing, own = self._within
            above, slash, _ = own.rpartition("/")
            path._within = listing, f"{above}{slash}{name}"
        return path

    def with_suffix(self, suffix: str) -> StorePath:
        """As ``with_name``."""
        return self.with_name(super().with_suffix(suffix).name)

    def that_reads(self, store: Readable) -> StorePath:
        """The same path to an object of another store."""
        path = StorePath(self)
        path._seen = (Content.at(str(self), store, self.key),)
        return path

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove the version of the object that this path sees. Raises OutputError where another is there."""
        version = self.version
        if version is not None:
            self.store.delete(self.key, version.tag)
        elif not missing_ok:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        self.forget()

    def open_range(self, source: ByteRange) -> SourceFile:
        """An open range of the object. Raises InputError."""
        return StoreFile(source, self._existing())

    def _existing(self) -> Content:
        if self.content is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        return self.content

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:  # noqa: ARG002
        """Kind, size and time, and an inode for each version.

        The mode restricts no copy of the object: who may read it is not in it.
        """
        version, kind = self.version, stat.S_IFREG | 0o666
        if version is None and self._is_listed_folder():
            version, kind = Stat(0, str(self), 0), stat.S_IFDIR | 0o777
        if version is None:
            raise FileNotFoundError(errno.ENOENT, "no such object", str(self))
        inode, seconds, ns = crc32(f"{self} {version.tag}".encode()), [version.changed] * 3, int(version.changed * 1e9)
        first = kind, inode, 0, 1, os.getuid(), os.getgid(), version.size, *seconds
        return os.stat_result(first, {"st_atime_ns": ns, "st_mtime_ns": ns, "st_ctime_ns": ns})

    def lstat(self) -> os.stat_result:
        """As ``stat``: a store has no links."""
        return self.stat()

    def is_file(self, **_: Any) -> bool:
        """Whether there is an object."""
        return self.version is not None

    def exists(self, **_: Any) -> bool:
        """Whether there is an object, or a directory that was listed."""
        return self._is_listed_folder() or self.is_file()

    def is_dir(self, **_: Any) -> bool:
        """Whether objects lie below, and none is here. Raises InputError."""
        if self._within is None and self.version is None:
            self._within = self._list(), ""
        return self._is_listed_folder()

    def listed(self) -> StorePath:
        """The same path as a directory, which is listed now. Raises InputError."""
        path = type(self)(self)
        path._within = self._list(), ""
        return path

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Nothing: a store has a directory where it has something in it."""

    def rmdir(self) -> None:
        """Nothing, as for ``mkdir``."""

    def _is_listed_folder(self) -> bool:
        return self._within is not None and self._within[0].is_folder(self._within[1])

    def _list(self) -> Listing:
        return self._listing_of(self._readable().objects(self._prefix, deep=True))

    @property
    def _prefix(self) -> str:
        return f"{self.key}/" if self.key else ""

    def _listing_of(self, objects: Mapping[str, Stat]) -> Listing:
        return Listing(str(self), self._readable(), self._prefix, objects)

    def is_symlink(self) -> bool:
        """False."""
        return False

    def is_mount(self) -> bool:
        """False."""
        return False

    def resolve(self, strict: bool = False) -> StorePath:  # noqa: ARG002
        """The path without ``..``, which leads out of no bucket: a store has no links."""
        if ".." not in self.parts:
            return self
        key = posixpath.normpath("/" + "/".join(self.parts[2:]))
        return type(self)(*self.parts[:2], key.lstrip("/"))

    def absolute(self) -> StorePath:
        """The path itself."""
        return self

    def samefile(self, other: object) -> bool:
        """Whether the other path is of the same object."""
        return isinstance(other, StorePath) and other == self

    def iterdir(self) -> Generator[StorePath, None, None]:
        """What is right in a directory that was listed, else the objects right below. Raises PermissionError."""
        if self._within is not None:
            listing, path = self._within
            yield from (self / name for name in listing.children(path))
            return
        try:
            objects = self.store.objects(f"{self.key}/" if self.key else "")
        except InputError as exc:
            raise PermissionError(errno.EACCES, str(exc), str(self)) from exc
        for name, version in objects.items():
            child = self / name
            child._listed = version
            yield child

    def open(self, *_: Any, **__: Any) -> IO[Any]:  # type: ignore[override]
        """The object as a stream of bytes to read. Raises OSError, InputError."""
        self._existing()
        return io.BufferedReader(_Stream(self.open_range(ByteRange.of(self))))


_KINDS = ("models", "datasets", "spaces")


class HubPath(StorePath):
    """``hf://[datasets/]owner/name[@revision]/file``: it is read, and not written. Without a file, the repository."""

    def _places(self) -> int:
        """How many parts name the repository."""
        count = 3 + (self.parts[1:2] != () and self.parts[1] in _KINDS)
        # A revision such as refs/pr/1 has slashes.
        return count + 2 * self.parts[count - 1 : count][0].endswith("@refs") if len(self.parts) >= count else count

    @property
    def key(self) -> str:
        """The name of the file in the repository."""
        return "/".join(self.parts[self._places() :])

    def names_something(self) -> bool:
        """Whether this names a repository: all of it is a directory."""
        return len(self.parts) >= self._places()

    def _readable(self) -> Readable:
        return _repository("/".join(self.parts[1 : self._places()]))

    def iterdir(self) -> Generator[HubPath, None, None]:
        """What is in a folder that was listed; else raises PermissionError: no base is looked for by its seal there."""
        if self._within is None:
            raise PermissionError(errno.EACCES, "the Hub is not listed", str(self))
        return cast("Generator[HubPath, None, None]", super().iterdir())

    def check_target(self) -> None:
        """Raise UsageError."""
        raise UsageError(f"{self}: is on the Hub, which is read here: write a local file, and push it with hf upload")


class _Stream(io.RawIOBase):
    """A SourceFile as a stream; it closes the file."""

    def __init__(self, file: SourceFile) -> None:
        self._file, self._at = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.source.length}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        count = max(0, min(len(out), self._file.source.length - self._at))
        self._file.read_into(self._at, out[:count])
        self._at += count
        return count

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def store_path(url: str) -> Path:
    """The path of an object. Raises UsageError for a URL that names none."""
    path = HubPath(url) if url.startswith("hf:") else StorePath(url)
    if len(path.parts) < 3 or not path.names_something():
        form = "hf://OWNER/NAME/FILE" if isinstance(path, HubPath) else "s3://BUCKET/KEY"
        raise UsageError(f"{path}: names no object; give {form}")
    if ".." in path.parts:
        raise UsageError(f"{path}: has .. in its key; give the key itself")
    return path
