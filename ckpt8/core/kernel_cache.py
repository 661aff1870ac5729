"""Keeps numba's compiled kernels on disk, so that a machine compiles each only once.

A kept kernel is machine code, so it is read only from a folder that no other user can write. Each file begins with a
SHA-256 over its content and its origin: the source of this package, the signature, the processor, Python and numba. A
file that is cut off, has a flipped bit or comes from other source is compiled anew and replaced. numba's own cache
looks at the file of the kernel alone and misses a change of another kernel that it calls.
"""

import contextlib
import errno
import hashlib
import os
import pickle
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from numba.core.caching import NullCache
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

from ckpt8 import __version__
from ckpt8.core.errors import KernelCacheWarning
from ckpt8.core.files.atomic import deferred
from ckpt8.core.text import printable

_PACKAGE = Path(__file__).parents[1]
_DIGEST_BYTES = 32


_NOT_KEPT = (
    "compiled kernels are not kept, and each run compiles them: {}; name a folder of your own in NUMBA_CACHE_DIR"
)
_NOT_USED = "a compiled kernel is not used, and made anew: {}"

_warned: set[str] = set()
"""Warnings already given: each is given once."""


class KernelCache(NullCache):
    """The cache that numba uses for one ``function``.

    It never raises: a bad file, or a numba with other internals, costs only the time to compile.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The kept kernel for ``signature``; None if numba must compile it."""
        with contextlib.suppress(Exception):
            if folder := _folder():
                path, origin = self._file(folder, signature, target_context)
                if code := _read(path, origin):
                    target_context.refresh()
                    return CompileResult._rebuild(target_context, *pickle.loads(code))  # noqa: S301
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a kernel, unless it holds addresses of this process."""
        with contextlib.suppress(Exception):
            folder = _folder()
            if folder and not compiled.lifted and not compiled.library.has_dynamic_globals:
                path, origin = self._file(folder, signature, compiled.target_context)
                _write(path, origin, dumps(compiled._reduce()))

    def _file(self, folder: Path, signature: Any, target_context: Any) -> tuple[Path, bytes]:
        """The file for the kernel of a ``signature``, and a digest of everything that the kernel is made from.

        The name leaves out the source and the version of numba, so newer code replaces older code.
        """
        name, python = self._function.__qualname__, (sys.implementation.cache_tag, getattr(sys, "abiflags", ""))
        place = (self._function.__module__, name, signature, target_context.codegen().magic_tuple(), python, _PACKAGE)
        key = hashlib.sha256(repr(place).encode(errors="surrogateescape")).digest()
        return folder / f"{name}-{key.hex()[:16]}.nbc", key + _source()


@cache
def _folder() -> Path | None:
    """The folder of this user for kernels, made with those above it; None, with a warning, if it cannot be used.

    It cannot where another user could put files into it or replace it.
    """
    try:
        folder = _chosen()
        _check_way(folder.absolute(), 0)
        final = folder.resolve()
        check_private(final, final.lstat())
    except (OSError, RuntimeError) as exc:
        _warn(_NOT_KEPT, exc)
        return None
    return folder


def _chosen() -> Path:
    """Below ``NUMBA_CACHE_DIR``, or in the cache of the user. Raises RuntimeError where there is no home directory."""
    if named := vars(numba.config)["CACHE_DIR"]:
        return Path(named) / "ckpt8"
    if sys.platform == "darwin":
        named, usual = "", Path("Library", "Caches")
    else:
        named, usual = os.environ.get("XDG_CACHE_HOME", ""), Path(".cache")
    return (Path(named) if Path(named).is_absolute() else Path.home() / usual) / "ckpt8" / "kernels"


@cache
def _source() -> bytes:
    """A digest of this whole package, since a kernel contains constants and kernels of it, and of the compiler."""
    digest = hashlib.sha256(f"{__version__} {numba.__version__} {llvmlite.__version__}".encode())
    for path in sorted(_PACKAGE.rglob("*.py")):
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.digest()


def _read(path: Path, origin: bytes) -> bytes | None:
    """The content of a file of this user, if it is whole and was made from ``origin``. Raises OSError."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        return None
    try:
        check_private(path, status)
    except PermissionError as exc:
        _warn(_NOT_USED, exc)
        return None
    content = path.read_bytes()
    code = content[_DIGEST_BYTES:]
    return code if hashlib.sha256(origin + code).digest() == content[:_DIGEST_BYTES] else None


def _write(path: Path, origin: bytes, code: bytes) -> None:
    """Write a file whole or not at all. Warns where that is not possible."""
    content = hashlib.sha256(origin + code).digest() + code
    try:
        with deferred():
            descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(content)
                Path(name).replace(path)
            except OSError:
                Path(name).unlink()
                raise
    except OSError as exc:
        _warn(_NOT_KEPT, OSError(exc.errno, exc.strerror, str(path)))


def _warn(text: str, error: OSError | RuntimeError) -> None:
    """Give the warning ``text`` the first time that it applies."""
    if text not in _warned:
        _warned.add(text)
        why = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        warnings.warn(printable(text.format(why)), KernelCacheWarning, stacklevel=2)


def _check_way(path: Path, links: int) -> None:
    """Check every folder and link on the way to ``path``; make missing folders, for this user alone. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if not os.path.lexists(folder):
            # Another process may be making it at the same time.
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
        status = folder.lstat()
        check_private(folder, status, on_the_way=True)
        if stat.S_ISLNK(status.st_mode):
            if links == 40:  # as many as Linux follows: more go in a circle
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            _check_way(folder.parent / folder.readlink(), links + 1)
        elif not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def check_private(path: Path, status: os.stat_result, *, on_the_way: bool = False) -> None:
    """Raise PermissionError unless ``path``, with this status, belongs to this user and nobody else can write it.

    A path that is only ``on_the_way`` may also belong to root, and be a link or a sticky folder: in one such as /tmp
    everybody can make entries, but only the owner of an entry can move it away.
    """
    kept = stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX)
    if status.st_uid != os.geteuid() and not (on_the_way and status.st_uid == 0):
        raise PermissionError(errno.EPERM, f"it belongs to another user, {status.st_uid}", str(path))
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not (on_the_way and kept):
        raise PermissionError(errno.EPERM, "other users can write to it", str(path))
