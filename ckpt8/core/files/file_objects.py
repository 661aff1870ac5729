"""Open files and ``io.BytesIO`` in place of paths, as ``torch.save`` and ``torch.load`` take them.

Everything here reads at positions and writes whole files by rename, so what is in an object goes through a temporary
file. An open file of the disk that is read from its beginning is read in place.
"""

from __future__ import annotations

import io
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from ckpt8.core.errors import Ckpt8Error, InputError, OutputError, UsageError
from ckpt8.core.files.atomic import writing


@contextmanager
def path_to_read(file: IO[bytes]) -> Iterator[Path]:
    """A path with what ``file`` holds from its position on.

    Raises UsageError for a file of texts, InputError where it cannot be read, OutputError for the temporary file.
    """
    if (own := _own_path(file)) is not None:
        yield own
        return
    with _temporary(file) as path:
        with writing(tempfile.gettempdir()), path.open("wb") as out:
            while content := _read(file):
                out.write(content)
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
            except (OSError, ValueError) as exc:  # a ValueError is that of a closed file
                raise OutputError(f"{_name(file)}: cannot be written: {getattr(exc, 'strerror', 0) or exc}") from exc


@contextmanager
def _temporary(file: IO[bytes]) -> Iterator[Path]:
    """A path in a new folder that goes with the block. Messages name ``file`` in its place."""
    with writing(tempfile.gettempdir()):
        folder = tempfile.TemporaryDirectory(prefix="ckpt8-")
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
    """The path of an open file of the disk at its beginning, None for any other, such as one that unpacks it."""
    with suppress(OSError, AttributeError, TypeError, ValueError):
        if not isinstance(getattr(file, "raw", file), io.FileIO) or not file.readable():
            return None
        path = Path(file.name)
        if file.tell() == 0 and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return path
    return None


_PIECE = 1 << 20


def _read(file: Any) -> Any:
    """The next bytes of ``file``. Raises UsageError for a file of texts, InputError where it cannot be read."""
    try:
        content = file.read(_PIECE)
    except UnicodeError:
        content = None
    except (OSError, ValueError) as exc:  # a ValueError is that of a closed file
        raise InputError(f"{_name(file)}: cannot be read: {getattr(exc, 'strerror', 0) or exc}") from exc
    if not isinstance(content, (bytes, bytearray, memoryview)):
        raise UsageError(f"{_name(file)}: is open for texts; open it with 'rb'")
    return content


def _name(file: IO[bytes]) -> str:
    name = getattr(file, "name", None)
    return name if isinstance(name, str) else f"the {type(file).__name__}"
