"""The safetensors header of a ``.ckpt8``: reserved before the first byte of data, filled in and padded at the end.

    u64 little-endian length of the header | JSON padded with spaces | data

safetensors demands that the entries cover the data without holes or overlaps, in any order of keys; ckpt8 writes and
reads them in the order of their offsets. Every entry has dtype U8.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.json_text import parse_json

MAX_HEADER = 100_000_000
"""safetensors' own limit in bytes."""

LENGTH_BYTES = 8
FORMAT_KEY = "ckpt8"
MAJOR = 1
"""A reader refuses another major version. A higher minor version adds codecs, modes of symbols and fields; a reader
may ignore the fields."""

FILE_VERSION, DIRECTORY_VERSION, REFERENCE_VERSION, SHARED_VERSION, BUDGET_VERSION, CHAIN_VERSION, BITS_VERSION = (
    f"{MAJOR}.{minor}" for minor in range(7)
)
"""A writer states the lowest version that covers the content of the container."""

MANIFEST = "ckpt8.manifest"
SEAL = "ckpt8.seal"
SEAL_BYTES = 32
METADATA = "__metadata__"
"""The key of a safetensors header that is no tensor."""
HEAD_BYTES = 4096
"""Bytes at the start of a file that show whether it is a container."""

_WIDEST_OFFSET = 10**16 - 1


class Entry(NamedTuple):
    """One named run of bytes; ``start`` and ``stop`` count from the end of the header."""

    name: str
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.stop - self.start


def is_container(path: Path) -> bool:
    """Whether a file begins as a ``.ckpt8`` does; False where it cannot be read."""
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
    except OSError:
        return False
    return begins_container(head)


def begins_container(head: bytes) -> bool:
    """Whether the first HEAD_BYTES of a file are those of a ``.ckpt8``."""
    return head[LENGTH_BYTES : LENGTH_BYTES + 1] == b"{" and f'"{FORMAT_KEY}":'.encode() in head


def render_safetensors(header: Mapping[str, object], size: int | None = None, *, ascii_only: bool = True) -> bytes:
    """The length field and a safetensors header, padded with spaces to ``size`` bytes, or to a multiple of 8.

    Raises ValueError where it does not fit, UnicodeEncodeError for a name that is not valid.
    """
    text = json.dumps(header, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    size = -(-len(text) // 8) * 8 if size is None else size
    if len(text) > size:
        raise ValueError("the header does not fit the room reserved for it")
    return size.to_bytes(LENGTH_BYTES, "little") + text.ljust(size)


def tensor_entry(dtype: str, shape: Iterable[int], start: int, stop: int) -> dict[str, object]:
    """The header entry of a tensor; ``start`` and ``stop`` count from the end of the header."""
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop]}


_WIDEST_ENTRY = len(
    json.dumps(tensor_entry("U8", [_WIDEST_OFFSET], _WIDEST_OFFSET, 2 * _WIDEST_OFFSET), separators=(",", ":"))
) + len(",:")
"""Bytes of the longest entry besides its name."""


def render(entries: Iterable[Entry], size: int | None, version: str) -> bytes:
    """The length field and the header of a ``.ckpt8``, padded to the reserved ``size``."""
    header: dict[str, object] = {METADATA: {"format": FORMAT_KEY, FORMAT_KEY: version}}
    header.update((each.name, tensor_entry("U8", [each.nbytes], each.start, each.stop)) for each in entries)
    return render_safetensors(header, size)


def reserved_size(names: Iterable[str]) -> int:
    """Bytes that a header for entries of these names needs at most, a multiple of 8."""
    metadata = {METADATA: {"format": FORMAT_KEY, FORMAT_KEY: BITS_VERSION}}
    length = len(json.dumps(metadata, separators=(",", ":"))) + sum(map(reserved_entry, (*names, MANIFEST, SEAL)))
    return -(-length // 8) * 8


def reserved_entry(name: str) -> int:
    """Bytes that the entry of this name takes in a header at most."""
    return _WIDEST_ENTRY + len(json.dumps(name))


def parse_safetensors(text: bytes, where: str) -> tuple[object, dict[str, Any]]:
    """The metadata of a safetensors header, empty without any, and its entries by name. Raises InputError."""
    header = parse_json(text, where)
    if not isinstance(header, dict):
        raise InputError(f"{where}: its header is not an object; it is damaged")
    return header.pop(METADATA, {}), header


def check_version(text: object, where: str) -> None:
    """Raise UnsupportedError for a format version that this reader does not know."""
    major = str(text).partition(".")[0]
    if major != str(MAJOR):
        raise UnsupportedError(f"{where}: is ckpt8 format {text}; this version reads format {MAJOR}")


def _entry(name: str, value: object, where: str) -> Entry:
    match value:
        case {"dtype": "U8", "shape": [int(length)], "data_offsets": [int(start), int(stop)], **rest} if not rest:
            if 0 <= start <= stop and length == stop - start:
                return Entry(name, start, stop)
    raise InputError(f"{where}: header entry {name[:80]!r} is malformed")


def parse(text: bytes, data_bytes: int, where: str) -> list[Entry]:
    """The entries in the order of their offsets. Raises InputError unless they tile ``data_bytes`` exactly."""
    metadata, header = parse_safetensors(text, where)
    if not isinstance(metadata, Mapping) or FORMAT_KEY not in metadata:
        raise InputError(f"{where}: is not a ckpt8 file; its header has no {FORMAT_KEY!r} entry")
    check_version(metadata[FORMAT_KEY], where)
    entries = sorted(
        (_entry(name, value, where) for name, value in header.items()), key=lambda entry: (entry.start, entry.stop)
    )
    position = 0
    for entry in entries:
        if entry.start != position:
            raise InputError(f"{where}: header entry {entry.name[:80]!r} leaves a hole or overlaps another")
        position = entry.stop
    if position != data_bytes:
        raise InputError(f"{where}: holds {data_bytes} bytes of data, the header describes {position}; truncated?")
    return entries
