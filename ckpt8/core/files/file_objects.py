"""Open files and ``io.BytesIO`` in place of paths, as ``torch.save`` and ``torch.load`` take them.

Everything here reads at positions and writes whole files by rename, so what is in an object goes through a temporary
file. An open file of the disk that is read from its beginning is read in place.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from ckpt8.core.errors import Ckpt8Error, OutputError, UsageError


@contextmanager
def path_to_read(file: IO[bytes]) -> Iterator[Path]:
    """A path with what ``file`` holds from its position on. Raises UsageError for a file of texts, OutputError."""
    if (own := _own_path(file)) is not None:
        yield own
        return
    with _temporary(file) as path:
        with path.open("wb") as out:
            try:
                shutil.copyfileobj(file, out)
            except TypeError as exc:
                raise UsageError(f"{_name(file)}: is open for texts; open it with 'rb'") from exc
        yield path


@contextmanager
def path_to_write(file: IO[bytes]) -> Iterator[Path]:
    """A path whose content goes into ``file`` when the block has ended well. Raises UsageError, OutputError."""
    with _temporary(file) as path:
        yield path
        with path.open("rb") as content:
            try:
                shutil.copyfileobj(content, file)
            except TypeError as exc:
                raise UsageError(f"{_name(file)}: is open for texts; open it with 'wb'") from exc
            except OSError as exc:
                raise OutputError(f"{_name(file)}: cannot be written: {exc.strerror or exc}") from exc


@contextmanager
def _temporary(file: IO[bytes]) -> Iterator[Path]:
    """A path in a new folder that goes with the block. Messages name ``file`` in its place."""
    try:
        folder = tempfile.TemporaryDirectory(prefix="ckpt8-")
    except OSError as exc:
        raise OutputError(f"{tempfile.gettempdir()}: cannot be written: {exc.strerror or exc}") from exc
    with folder as name:
        path = Path(name, "checkpoint")
        try:
            yield path
        except Ckpt8Error as exc:
            exc.args = tuple(
                part.replace(str(path), _name(file)) if isinstance(part, str) else part for part in exc.args
            )
            raise


def _own_path(file: IO[bytes]) -> Path | None:
    """The path of an open file of the disk at its beginning, None for any other."""
    with suppress(OSError, AttributeError, TypeError, ValueError):
        path = Path(file.name)
        if file.tell() == 0 and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return path
    return None


def _name(file: IO[bytes]) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"the {type(file).__name__}"
