"""Reads header, manifest and seal of a container, and what a file states as its seal."""

from __future__ import annotations

import hashlib
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from ckpt8.container import header
from ckpt8.container.header import Entry
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile


class Head(NamedTuple):
    """The entries but manifest and seal, the stored manifest, and the offset that entries count from."""

    entries: list[Entry]
    manifest: bytes
    data_start: int


def read_head(file: SourceFile, where: str) -> Head:
    """The head of a container, once header and manifest match the seal. Raises InputError."""
    size = file.source.length
    if size < header.LENGTH_BYTES + 2:
        raise InputError(f"{where}: is not a ckpt8 file ({size} bytes)")
    length = int.from_bytes(file.read(0, header.LENGTH_BYTES), "little")
    if length > min(header.MAX_HEADER, size - header.LENGTH_BYTES):
        raise InputError(f"{where}: is not a ckpt8 file, or is cut off")
    head = file.read(0, header.LENGTH_BYTES + length)
    start = len(head)
    entries = header.parse(head[header.LENGTH_BYTES :], size - start, where)
    if [entry.name for entry in entries[-2:]] != [header.MANIFEST, header.SEAL]:
        raise InputError(f"{where}: does not end in a manifest and a seal")
    manifest, seal = entries[-2:]
    stored = file.read(start + manifest.start, manifest.nbytes)
    if file.read(start + seal.start, seal.nbytes) != hashlib.sha256(head + stored).digest():
        raise InputError(f"{where}: header or manifest does not match the seal; the file is damaged")
    return Head(entries[:-2], stored, start)


def holds_seal(path: Path, seal: str) -> bool:
    """Whether a file states this seal, in hexadecimal digits, and its header and manifest match it.

    Most files are told by their last bytes, and no more of them is read.
    """
    if stated_seal(path) != seal:
        return False
    try:
        with closing(SourceFile(ByteRange.of(path))) as file:
            read_head(file, str(path))
    except InputError:
        return False
    return True


def stated_seal(path: Path) -> str | None:
    """The last bytes of a container, which should be its seal, in hexadecimal digits; None for any other file."""
    if not header.is_container(path):
        return None
    try:
        with path.open("rb") as file:
            file.seek(-header.SEAL_BYTES, 2)
            return file.read().hex()
    except OSError:
        return None
