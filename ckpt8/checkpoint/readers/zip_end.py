"""The end records of a zip file: where its directory lies and how many entries it has."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import SourceFile

MAX_DIRECTORY_BYTES = 64 * 2**20
"""Room for about half a million records."""
_MAX_COMMENT_BYTES = 65_535
END_SIGNATURE = b"PK\x05\x06"
_END = struct.Struct("<4s4H2IH")
END_BYTES = _END.size
NO_COMMENT = b"\0\0"
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_UNCOUNTED_64 = 12  # the signature and the length field, which the length does not count
_SATURATED = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)
_TORCH_VERSIONS = (0x031E, 45)


@dataclass(frozen=True, slots=True)
class EndRecords:
    """The directory's ``offset`` and ``size`` in bytes, and its entry ``count``.

    ``torch_style``: every field has the value that torch's zip library would write.
    """

    offset: int
    size: int
    count: int
    torch_style: bool


def read_end_records(file: SourceFile) -> EndRecords:
    """Find and check the end records. Raises InputError, or UnsupportedError for several zip files in one."""
    position, comment, numbers = _find_end(file)
    locator = position - _LOCATOR.size
    lead = file.read(locator, _LOCATOR.size) if locator >= 0 else b""
    if lead[:4] == b"PK\x06\x07":
        return _zip64_end(file, locator, lead, numbers, comment)
    disk, start_disk, here, count, size, offset = numbers
    if disk or start_disk or here != count:
        raise InputError(f"{file.source}: damaged zip file: it claims to be one of several disks")
    _check_extent(file, offset, size, position)
    return EndRecords(offset, size, count, torch_style=not comment)


def _find_end(file: SourceFile) -> tuple[int, int, tuple[int, ...]]:
    """The last end record whose comment ends with the file: position, comment length, numbers. Raises InputError."""
    span = min(file.source.length, _END.size + _MAX_COMMENT_BYTES)
    base = file.source.length - span
    tail = file.read(base, span)
    at = tail.rfind(END_SIGNATURE)
    while at >= 0:
        if at + _END.size <= span:
            _, *numbers, comment = _END.unpack_from(tail, at)
            if at + _END.size + comment == span:
                return base + at, comment, tuple(numbers)
        at = tail.rfind(END_SIGNATURE, 0, at + 3)
    raise InputError(
        f"{file.source}: damaged zip file: it has no end record; it may be cut off, copy or download it again"
    )


def _zip64_end(file: SourceFile, locator: int, lead: bytes, numbers: tuple[int, ...], comment: int) -> EndRecords:
    _, disk, position, disks = _LOCATOR.unpack(lead)
    if disk or disks != 1:
        raise InputError(f"{file.source}: damaged zip file: it claims to be one of several disks")
    if position + _END_64.size > locator:
        raise _misplaced(file)
    record = _END_64.unpack(file.read(position, _END_64.size))
    signature, length, made_by, needed, disk, start_disk, here, count, size, offset = record
    if signature != b"PK\x06\x06" or position + _UNCOUNTED_64 + length != locator:
        raise _misplaced(file)
    true_numbers = (0, 0, here, count, size, offset)
    # Each field of the old record holds the true number, or says "see the zip64 record".
    limits = (0xFFFF, 0xFFFF, *_SATURATED)
    agree = all(got in (true, limit) for got, true, limit in zip(numbers, true_numbers, limits, strict=True))
    if disk or start_disk or here != count or not agree:
        raise InputError(f"{file.source}: damaged zip file: its two end records do not agree")
    _check_extent(file, offset, size, position)
    saturated = tuple(map(min, true_numbers[2:], _SATURATED))
    torch_style = (
        numbers == (0, 0, *saturated)
        and (made_by, needed) == _TORCH_VERSIONS
        and length == _END_64.size - _UNCOUNTED_64
        and not comment
    )
    return EndRecords(offset, size, count, torch_style)


def _check_extent(file: SourceFile, offset: int, size: int, end: int) -> None:
    """Raise InputError unless the directory ends exactly where the end records start."""
    if size > MAX_DIRECTORY_BYTES:
        raise InputError(f"{file.source}: its zip directory has {size} bytes, more than {MAX_DIRECTORY_BYTES}")
    if offset + size == end:
        return
    if offset + size < end and size and file.read(end - size, 4) == b"PK\x01\x02":
        raise _misplaced(file)
    raise InputError(f"{file.source}: damaged zip file: its directory is not where the end record says")


def _misplaced(file: SourceFile) -> UnsupportedError:
    """The error for offsets that are too small: most likely several zip files are joined, as in a ``.distcp``."""
    return UnsupportedError(
        f"{file.source}: its zip directory is not where the end record says; it is damaged, or several zip "
        f"files joined together as in a .distcp shard: give the folder of a distributed checkpoint instead"
    )
