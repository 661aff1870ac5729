"""A directory of a store: the objects below a prefix, as one list has shown them.

Whoever reads the directory sees these versions and no others, and every range names the version that it is of. So a
directory that somebody writes meanwhile is an error, or what it was when it was listed, and never a mixture.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import PurePosixPath

from ckpt8.core.errors import InputError, require
from ckpt8.core.files.stores.contract import Readable, Stat
from ckpt8.core.files.stores.reading import HEAD, Content, Memory

_LEAST_HEAD, _HEADS = 64 << 10, 64 << 20
"""The first bytes of each object that come when it is opened, and the most bytes of all of these: they are kept."""


class Listing:
    """The ``objects`` of the directory ``url`` by their paths in it. Raises InputError for names that no path can have.

    ``key`` is that of the directory in the store, with a slash at its end, empty for all of the store.
    """

    def __init__(self, url: str, store: Readable, key: str, objects: Mapping[str, Stat]) -> None:
        self._url, self._store, self._key = url, store, key
        # Programs that show folders make an empty object for each, whose name ends with a slash.
        self.objects = {name: version for name, version in objects.items() if not name.endswith("/")}
        self._children: dict[str, set[str]] = {}
        for name in objects:
            path = name.rstrip("/")
            require(
                not name or (name.removesuffix("/") == path and _is_path(path)),
                f"{url}: holds an object with the key {key + name!r}, which is no path; rename it",
            )
            if path != name:
                self._children.setdefault(path, set())
            while path:
                above, _, own = path.rpartition("/")
                self._children.setdefault(above, set()).add(own)
                path = above
        for name in self._children.keys() & self.objects.keys():
            raise InputError(f"{url}/{name}: is an object and a folder; rename one of the two")
        self._memory, self._lock = Memory(), threading.Lock()
        self._contents: dict[str, Content] = {}

    def is_folder(self, path: str) -> bool:
        """Whether objects lie below a path, the empty one of the directory itself."""
        return path in self._children

    def children(self, path: str) -> list[str]:
        """The names right in a folder, in order; none of what is no folder."""
        return sorted(self._children.get(path, ()))

    def content(self, path: str) -> Content | None:
        """The version of an object, open; None where there is none. Raises InputError where it is there no more."""
        version = self.objects.get(path)
        if version is None:
            return None
        with self._lock:
            content = self._contents.get(path)
        if content is None:
            most = min(HEAD, max(_LEAST_HEAD, _HEADS // len(self.objects)))
            name = f"{self._url}/{path}"
            opened = Content.listed(name, self._store, self._key + path, version, self._memory, most)
            with self._lock:
                content = self._contents.setdefault(path, opened)
        return content


def _is_path(name: str) -> bool:
    return str(PurePosixPath(name)) == name and not {"..", "."} & {*name.split("/")}
