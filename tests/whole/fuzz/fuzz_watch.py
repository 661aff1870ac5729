"""What must not change while ckpt8 reads something: the source, and every file outside of the folder for its output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Content = bytes | dict[str, bytes | str | None]

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = {
    "os.mkdir": 1, "os.rename": 2, "os.link": 2, "os.remove": 1, "os.rmdir": 1, "os.truncate": 1, "os.chmod": 1,
    "shutil.rmtree": 1, "os.chown": 1, "os.utime": 1,
}  # fmt: skip
"""Names of audit events with the number of their first arguments that are paths. A link may point anywhere."""
_allowed: list[str] = []
_found: list[str] = []
_hooked: list[bool] = []


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _allowed:
        return
    if event == "open":
        path, mode, flags = arguments
        writes = flags & _WRITES if isinstance(flags, int) else isinstance(mode, str) and set(mode) & set("wxa+")
        _check((path,) if writes else ())
    elif event == "os.symlink":
        _check(arguments[1:2])
    elif event in _EVENTS:
        _check(arguments[: _EVENTS[event]])


def _check(paths: tuple[Any, ...]) -> None:
    for path in paths:
        if isinstance(path, (str, bytes, os.PathLike)):
            text = os.fsdecode(path)
            # A relative path is one of a directory that is open; it must not lead up.
            inside = os.path.normpath(text).startswith((*_allowed, "/dev/null")) if text.startswith("/") else True
            if not inside or ".." in text.split("/"):
                _found.append(text[:200])


@contextlib.contextmanager
def writes_only_in(folder: Path) -> Iterator[list[str]]:
    """Yield the paths outside of ``folder`` that the body writes, makes, renames or removes."""
    if not _hooked:
        sys.addaudithook(_audit)
        _hooked.append(True)
    _found.clear()
    _allowed.append(str(folder.resolve()))
    try:
        yield _found
    finally:
        _allowed.pop()


def content_of(path: Path) -> Content:
    """The bytes of a file, or everything below a directory: bytes, targets of links, None for directories."""
    if not path.is_dir():
        return path.read_bytes()
    found: dict[str, bytes | str | None] = {}
    for folder, directories, files in os.walk(path):
        for name in (*directories, *files):
            each = Path(folder, name)
            key = str(each.relative_to(path))
            is_directory = each.is_dir() and not each.is_symlink()
            found[key] = str(each.readlink()) if each.is_symlink() else None if is_directory else each.read_bytes()
    return found
