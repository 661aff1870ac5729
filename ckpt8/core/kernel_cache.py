"""Keeps the object code of numba's kernels on disk, so that a machine compiles each only once.

A kept kernel is machine code, so it is read only from a folder that no other user can write. Each file begins with a
SHA-256 over its content and its origin: the bytecode of the kernel and of those that it calls, the constants in them,
the processor, Python and numba. A file that is cut off, has a flipped bit or another origin is compiled anew and
replaced. numba's own cache looks at the file of the kernel alone and misses a change of another kernel that it calls.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np

from ckpt8.core.closing import deferred
from ckpt8.core.errors import KernelCacheWarning
from ckpt8.core.text import printable

_DIGEST_BYTES, _LENGTH_BYTES = 32, 4


_NOT_KEPT = (
    "compiled kernels are not kept, and each run compiles them: {}; name a folder of your own in NUMBA_CACHE_DIR"
)
_NOT_USED = "a compiled kernel is not used, and made anew: {}"

_warned: set[str] = set()
"""Warnings already given: each is given once."""


class ObjectCode(NamedTuple):
    """A compiled kernel: the name of its function, types of its arguments in LLVM and of its results in numba, code."""

    symbol: str
    arguments: list[str]
    results: list[str]
    is_tuple: bool
    code: bytes


@runtime_checkable
class _Callee(Protocol):
    """A kernel that a kernel calls."""

    function: Callable[..., Any]


class KernelCache:
    """The file of a kernel for one ``key``, the types of its arguments.

    It never raises: a bad file costs only the time to compile.
    """

    def __init__(self, function: Callable[..., Any], key: tuple[Any, ...]) -> None:
        import llvmlite.binding as llvm

        processor = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
        wanted = [os.environ.get(name) for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES")]
        machine = processor, wanted, sys.implementation.cache_tag
        place = hashlib.sha256(repr((function.__module__, function.__qualname__, key, machine)).encode()).hexdigest()
        self._name = f"{function.__qualname__}-{place[:16]}.o"
        """It leaves out the source and the version of numba, so newer code replaces older code."""
        self._origin = repr((place, _packages(), [*_origin(function)])).encode()

    def load(self) -> ObjectCode | None:
        """The kept kernel; None if it must be compiled."""
        with contextlib.suppress(Exception):
            if (folder := _folder(make=False)) and (content := _read(folder / self._name, self._origin)):
                end = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
                symbol, arguments, results, is_tuple = json.loads(content[_LENGTH_BYTES:end])
                return ObjectCode(symbol, arguments, results, is_tuple, content[end:])
        return None

    def save(self, kernel: ObjectCode) -> None:
        """Keep a kernel."""
        with contextlib.suppress(Exception):
            if folder := _folder(make=True):
                head = json.dumps(kernel[:-1]).encode()
                content = len(head).to_bytes(_LENGTH_BYTES, "little") + head + kernel.code
                _write(folder / self._name, self._origin, content)


@cache
def _packages() -> list[str]:
    """The versions of numba, llvmlite and numpy. Raises ImportError without numba, which is not imported."""
    import llvmlite

    spec = find_spec("numba")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'numba'")
    try:
        # The metadata of packages takes ten times as long.
        stated = Path(spec.origin).with_name("_version.py").read_text()
    except OSError:
        from importlib.metadata import version

        stated = version("numba")
    return [stated, llvmlite.__version__, np.__version__]


def _origin(function: Callable[..., Any]) -> Iterator[Any]:
    """Everything that a kernel is compiled from: its bytecode, and what its global names stand for."""
    names = set[str]()
    for code in _codes(function.__code__):
        names.update(code.co_names)
        yield code.co_code, [const for const in code.co_consts if not isinstance(const, CodeType)]
    for name in sorted(names & function.__globals__.keys()):
        yield name, _meaning(function.__globals__[name], names)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _codes(const)


def _meaning(value: Any, names: set[str]) -> Any:
    """What a global name stands for; of a module those parts that have one of the ``names``."""
    if isinstance(value, _Callee):
        return [*_origin(value.function)]
    if isinstance(value, ModuleType):
        return [(name, _meaning(vars(value)[name], set())) for name in sorted(names & vars(value).keys())]
    if isinstance(value, (bool, int, float, tuple, np.generic)):
        return repr(value)
    # A type or function of Python or numpy, which is that of its version.
    return value.__name__


@cache
def _folder(*, make: bool) -> Path | None:
    """The folder of this user for kernels; None if it is missing, or, with a warning, if it cannot be used.

    It cannot where another user could put files into it or replace it. ``make`` makes it, with the folders above it.
    """
    try:
        folder = _chosen()
        _check_way(folder.absolute(), 0, make=make)
        final = folder.resolve()
        check_private(final, final.lstat())
    except (OSError, RuntimeError) as exc:
        if make or not isinstance(exc, FileNotFoundError):
            _warn(_NOT_KEPT, exc)
        return None
    return folder


def _chosen() -> Path:
    """Below ``NUMBA_CACHE_DIR``, or in the cache of the user. Raises RuntimeError where there is no home directory."""
    if named := os.environ.get("NUMBA_CACHE_DIR"):
        return Path(named) / "ckpt8"
    if sys.platform == "darwin":
        named, usual = "", Path("Library", "Caches")
    else:
        named, usual = os.environ.get("XDG_CACHE_HOME", ""), Path(".cache")
    return (Path(named) if Path(named).is_absolute() else Path.home() / usual) / "ckpt8" / "kernels"


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


def _check_way(path: Path, links: int, *, make: bool) -> None:
    """Check folders and links on the way to ``path``; ``make`` missing ones, for this user alone. Raises OSError."""
    for folder in (*reversed(path.parents), path):
        if make and not os.path.lexists(folder):
            # Another process may be making it at the same time.
            with contextlib.suppress(FileExistsError):
                folder.mkdir(0o700)
        status = folder.lstat()
        check_private(folder, status, on_the_way=True)
        if stat.S_ISLNK(status.st_mode):
            if links == 40:  # as many as Linux follows: more go in a circle
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
            _check_way(folder.parent / folder.readlink(), links + 1, make=make)
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
