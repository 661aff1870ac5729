"""Reader of the files of ``torch.save`` since 1.6: a zip file of a pickle and one uncompressed record per storage.

It reads zip directories strictly, with zip64: where each record lies and where its CRC stands. The directory at the end
of a zip file repeats most of the header before each record and of the descriptor behind it. The reader compares all of
that. A field that nothing repeats must have the one value that torch writes, if torch wrote the file. So no flipped bit
of the directory or of the end records goes unnoticed, and restoring can patch every place that states a CRC.

Layouts are those of PKWARE's APPNOTE 6.3: 4.3.7 local header, 4.3.9 data descriptor, 4.3.12 central directory, 4.3.14
to 4.3.16 end records, 4.5.3 zip64 extra field.

``tree_of_head`` reads the tree of a torch file from its bytes outside of the tensors, and looks for no storage. It is
for reports over many files: ``read`` checks more, and takes three times as long.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ckpt8.checkpoint.readers.entries import check_shares, refuse_buckets
from ckpt8.checkpoint.readers.inert_pickle import StorageTable, load_pickle, longest_pickle
from ckpt8.checkpoint.readers.torch_rules import TorchCalls
from ckpt8.checkpoint.tree import OpenCheckpoint, StorageInfo, check_depth
from ckpt8.core.errors import InputError, UnsupportedError, require
from ckpt8.core.files.source_file import SourceFile, crc32
from ckpt8.core.text import shown

MAX_DIRECTORY_BYTES = 64 * 2**20
"""Room for about half a million records."""
END_SIGNATURE = b"PK\x05\x06"
_END = struct.Struct("<4s4H2IH")
_LOCATOR = struct.Struct("<4sIQI")
_END_64 = struct.Struct("<4sQ2H2I4Q")
_COUNTED_64 = _END_64.size - 12  # the length does not count the signature and the length field
_ALL_SATURATED = (0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF)


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
    require(
        not disk and not start_disk and here == count,
        f"{file.source}: damaged zip file: it claims to be one of several disks",
    )
    _check_extent(file, offset, size, position)
    return EndRecords(offset, size, count, torch_style=not comment)


def _find_end(file: SourceFile) -> tuple[int, int, tuple[int, ...]]:
    """The last end record whose comment ends with the file: position, comment length, numbers. Raises InputError."""
    span = min(file.source.length, _END.size + 0xFFFF)
    base = file.source.length - span
    tail = file.read(base, span)
    at = tail.rfind(END_SIGNATURE, 0, max(span - _END.size + len(END_SIGNATURE), 0))
    while at >= 0:
        _, *numbers, comment = _END.unpack_from(tail, at)
        if at + _END.size + comment == span:
            return base + at, comment, tuple(numbers)
        at = tail.rfind(END_SIGNATURE, 0, at + 3)
    raise InputError(
        f"{file.source}: damaged zip file: it has no end record; it may be cut off, copy or download it again"
    )


def _zip64_end(file: SourceFile, locator: int, lead: bytes, numbers: tuple[int, ...], comment: int) -> EndRecords:
    _, disk, position, disks = _LOCATOR.unpack(lead)
    require(not disk and disks == 1, f"{file.source}: damaged zip file: it claims to be one of several disks")
    record = file.read(position, _END_64.size) if position + _END_64.size <= locator else bytes(_END_64.size)
    signature, length, made_by, needed, disk, start_disk, here, count, size, offset = _END_64.unpack(record)
    if signature != b"PK\x06\x06" or position + _END_64.size - _COUNTED_64 + length != locator:
        raise _misplaced(file)
    true_numbers = (0, 0, here, count, size, offset)
    # Each field of the old record holds the true number, or says "see the zip64 record".
    limits = (0xFFFF, 0xFFFF, *_ALL_SATURATED)
    agree = all(got in (true, limit) for got, true, limit in zip(numbers, true_numbers, limits, strict=True))
    require(
        not disk and not start_disk and here == count and agree,
        f"{file.source}: damaged zip file: its two end records do not agree",
    )
    _check_extent(file, offset, size, position)
    torch_style = (
        numbers == (0, 0, *map(min, true_numbers[2:], _ALL_SATURATED))
        and (made_by, needed, length) == (0x031E, 45, _COUNTED_64)
        and not comment
    )
    return EndRecords(offset, size, count, torch_style)


def _check_extent(file: SourceFile, offset: int, size: int, end: int) -> None:
    """Raise InputError unless the directory ends exactly where the end records start."""
    require(
        size <= MAX_DIRECTORY_BYTES,
        f"{file.source}: its zip directory has {size} bytes, more than {MAX_DIRECTORY_BYTES}",
    )
    if offset + size < end and size and file.read(end - size, 4) == b"PK\x01\x02":
        raise _misplaced(file)
    require(offset + size == end, f"{file.source}: damaged zip file: its directory is not where the end record says")


def _misplaced(file: SourceFile) -> UnsupportedError:
    """The error for offsets that are too small: most likely several zip files are joined, as in a ``.distcp``."""
    return UnsupportedError(
        f"{file.source}: its zip directory is not where the end record says; it is damaged, or several zip "
        f"files joined together as in a .distcp shard: give the folder of a distributed checkpoint instead"
    )


LOCAL_SIGNATURE = b"PK\x03\x04"
STORED = 0
_ENCRYPTED = 0x2041  # encrypted, strongly encrypted, or local header masked
_HAS_DESCRIPTOR = 0x8
_SATURATED = 0xFFFFFFFF

_LOCAL = struct.Struct("<4s5H3I2H")
_LOCAL_CRC_AT = 14
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_DESCRIPTORS = (
    # Position of the CRC, layout: with and without signature, 64-bit and 32-bit sizes. Torch always signs.
    (4, struct.Struct("<4sIQQ")),
    (4, struct.Struct("<4sIII")),
    (0, struct.Struct("<IQQ")),
    (0, struct.Struct("<III")),
)


@dataclass(frozen=True, slots=True)
class ZipEntry:
    """One record. Offsets are bytes from the start of the source; sizes are in bytes.

    ``crc_fields`` are the offsets of all 4-byte little-endian fields that hold ``crc32``, the one in the
    directory first. ``end`` is the offset behind the record and its data descriptor.
    """

    name: str
    method: int
    crc32: int
    size: int
    compressed_size: int
    header_offset: int
    data_offset: int
    end: int
    crc_fields: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Central:
    """A directory entry with its zip64 values. ``crc_at`` is the place of its CRC in the source."""

    crc_at: int
    name: bytes
    needed: int
    shared: tuple[int, ...]  # flags, method, time, date: exactly as in the local header
    crc32: int
    size: int
    compressed_size: int
    header_offset: int
    bare: bool  # the fields that no other place repeats are 0, as torch writes them


_AROUND, _SMALL = 128, 1 << 16
"""Bytes of headers around the content of a record: more than any has that torch wrote; and content to fetch with it."""


def read_directory(file: SourceFile) -> list[ZipEntry]:
    """All records in the order of their offsets. Raises InputError for anything damaged or contradictory."""
    end = read_end_records(file)
    central = [*_parse_directory(file, file.read(end.offset, end.size), end.offset)]
    require(
        len(central) == end.count,
        f"{file.source}: damaged zip file: {end.count} records announced, {len(central)} listed",
    )
    file.expect(map(_first_needs, central))
    ahead = _ReadAhead(file)
    opened = [_open_record(ahead, record, end.offset) for record in central]
    # A record that someone added to torch's file with a zip tool may carry the tool's values.
    is_odd = any(by_torch and not record.bare for record, (_, by_torch) in zip(central, opened, strict=True))
    require(
        not is_odd and (end.torch_style or not all(by_torch for _, by_torch in opened)),
        f"{file.source}: damaged zip file: its directory holds values that torch never writes",
    )
    entries = sorted((entry for entry, _ in opened), key=lambda entry: entry.header_offset)
    _check_layout(file, entries)
    return entries


def _first_needs(record: _Central) -> tuple[int, int]:
    """Offset and length of what opening the file reads of a record: headers, and the whole of a small one.

    The descriptor of the record before lies in front of it.
    """
    start = max(0, record.header_offset - _AROUND)
    content = record.compressed_size if record.compressed_size <= _SMALL else 0
    return start, record.header_offset - start + _AROUND + len(record.name) + content


class _ReadAhead:
    """Reads of a file that follow each other closely: one call to the system serves many small records."""

    def __init__(self, file: SourceFile) -> None:
        self.file = file
        self._start = 0
        self._bytes = b""

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes of the file from ``offset``. Raises InputError."""
        first = offset - self._start
        if not 0 <= first <= len(self._bytes) - length:
            self._bytes = self.file.read(offset, max(length, min(self.file.ahead, self.file.source.length - offset)))
            self._start, first = offset, 0
        return self._bytes[first : first + length]


def find_prefix(file: SourceFile, entries: Sequence[ZipEntry]) -> str:
    """The folder, with its ``/``, of the one ``data.pkl``. Raises InputError unless there is exactly one."""
    names = [entry.name for entry in entries if entry.name.endswith("/data.pkl")]
    if len(names) != 1:
        content = "no data.pkl" if not names else f"{len(names)} records named data.pkl"
        raise InputError(f"{file.source}: a zip file with {content}; expected a file written by torch.save")
    return names[0].removesuffix("data.pkl")


def _parse_directory(file: SourceFile, data: bytes, offset: int) -> Iterator[_Central]:
    """The entries of a directory that lies at ``offset``. Raises InputError."""
    number = at = 0
    while at < len(data):
        if at + _CENTRAL.size > len(data) or data[at : at + 4] != b"PK\x01\x02":
            raise InputError(f"{file.source}: damaged zip file: directory entry {number} is unreadable")
        fields = _CENTRAL.unpack_from(data, at)
        _, made_by, needed, *shared, crc32, compressed, size = fields[:10]
        name_length, extra_length, comment_length, disk, internal, external, header = fields[10:]
        name_at = at + _CENTRAL.size
        extra_at = name_at + name_length
        end = extra_at + extra_length + comment_length
        if end > len(data):
            raise InputError(f"{file.source}: damaged zip file: a directory entry reaches past its end")
        sizes = _widen(data[extra_at : extra_at + extra_length], (size, compressed, header))
        if sizes is None or disk:
            raise InputError(f"{file.source}: damaged zip file: a directory entry has no valid sizes")
        is_bare = not (made_by or internal or external or comment_length)
        yield _Central(
            offset + at + 16,
            data[name_at:extra_at],
            needed,
            tuple(shared),
            crc32,
            sizes[0],
            sizes[1],
            sizes[2],
            is_bare,
        )
        number, at = number + 1, end


def _widen(extra: bytes, values: tuple[int, ...]) -> tuple[int, ...] | None:
    """``values``, the saturated ones from the zip64 extra field in order; None when it lacks one of them."""
    at, needed = 0, values.count(_SATURATED)
    while needed and at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == 1 and 8 * needed <= length <= len(extra) - at - 4:
            wide = iter(struct.unpack_from(f"<{needed}Q", extra, at + 4))
            return tuple(next(wide) if value == _SATURATED else value for value in values)
        at += 4 + length
    return None if needed else values


def _open_record(ahead: _ReadAhead, record: _Central, limit: int) -> tuple[ZipEntry, bool]:
    """Compare a directory entry with its local header and data descriptor, which end before ``limit``.

    The second result is whether only torch writes such a local header: no version, no time, no date.
    """
    file = ahead.file
    name = record.name.decode("utf-8", "backslashreplace")
    if record.shared[0] & _ENCRYPTED:
        raise UnsupportedError(f"{file.source}: zip record {name!r} is encrypted; decrypt the file first")
    at = record.header_offset
    span = _LOCAL.size + len(record.name)
    if at + span > limit:
        raise _mismatch(file, name)
    head = ahead.read(at, span)
    signature, needed, *shared, crc32, compressed, size, name_length, extra_length = _LOCAL.unpack_from(head)
    data_offset = at + span + extra_length
    end = data_offset + record.compressed_size
    is_same = (
        signature == LOCAL_SIGNATURE
        and tuple(shared) == record.shared
        and name_length == len(record.name)
        and head[_LOCAL.size :] == record.name
    )
    by_torch = needed == 0 and shared[2:] == [0, 0]
    if not is_same or end > limit or (by_torch and needed != record.needed):
        raise _mismatch(file, name)
    crc_fields = [record.crc_at]
    sizes, true_sizes = (size, compressed), (record.size, record.compressed_size)
    if shared[0] & _HAS_DESCRIPTOR:
        descriptor = _find_descriptor(ahead, record, end, limit)
        if descriptor is None:
            raise _mismatch(file, name)
        crc_fields.append(descriptor[0])
        end = descriptor[1]
        # With a descriptor the local header may leave its fields empty, but a value that it states must be true.
        agree = all(stated in (true, 0, _SATURATED) for stated, true in zip(sizes, true_sizes, strict=True))
        agree = agree and crc32 in (0, record.crc32)
    else:
        extra = ahead.read(at + span, extra_length) if _SATURATED in sizes else b""
        agree = _widen(extra, sizes) == true_sizes and crc32 == record.crc32
    if crc32 or not shared[0] & _HAS_DESCRIPTOR:
        crc_fields.append(at + _LOCAL_CRC_AT)
    if not agree or (record.shared[1] == STORED and record.size != record.compressed_size):
        raise _mismatch(file, name)
    return ZipEntry(
        name=name,
        method=record.shared[1],
        crc32=record.crc32,
        size=record.size,
        compressed_size=record.compressed_size,
        header_offset=at,
        data_offset=data_offset,
        end=end,
        crc_fields=tuple(crc_fields),
    ), by_torch


def _mismatch(file: SourceFile, name: str) -> InputError:
    return InputError(f"{file.source}: damaged zip file: record {name!r} does not match its directory entry")


def _find_descriptor(ahead: _ReadAhead, record: _Central, at: int, limit: int) -> tuple[int, int] | None:
    """The offsets of the CRC and of the end of the data descriptor at ``at``; None where there is none."""
    tail = ahead.read(at, min(_DESCRIPTORS[0][1].size, limit - at))
    wanted = (record.crc32, record.compressed_size, record.size)
    for crc_at, layout in _DESCRIPTORS:
        fields = layout.unpack_from(tail) if layout.size <= len(tail) else ()
        if fields[-3:] == wanted and fields[:-3] in ((), (b"PK\x07\x08",)):
            return at + crc_at, at + layout.size
    return None


def _check_layout(file: SourceFile, entries: Sequence[ZipEntry]) -> None:
    """Raise InputError for records that share a name or a byte. ``entries`` are in the order of their offsets."""
    names: set[str] = set()
    end = 0
    for entry in entries:
        if entry.header_offset < end or entry.name in names:
            what = "overlaps the one before it" if entry.header_offset < end else "is listed twice"
            raise InputError(f"{file.source}: damaged zip file: record {entry.name!r} {what}")
        names.add(entry.name)
        end = entry.end


MAX_SMALL_RECORD_BYTES = 64 * 2**20
"""The longest record besides storages whose CRC the reader checks."""
_PICKLE_MARK = b"/data.pkl"


def sniff(file: SourceFile) -> bool:
    """Whether this is a zip file with a ``data.pkl``, or one too damaged to tell: ``read`` says why."""
    if file.source.length < len(LOCAL_SIGNATURE) or file.read(0, len(LOCAL_SIGNATURE)) != LOCAL_SIGNATURE:
        return False
    try:
        end = read_end_records(file)
    except InputError:
        return True
    return _PICKLE_MARK in file.read(end.offset, end.size)


def read(file: SourceFile, calls: TorchCalls | None = None) -> OpenCheckpoint:
    """The structure of the file. ``calls`` judge what ``torch.load`` would do with it.

    Raises InputError when it is damaged, UnsupportedError for TorchScript or compression.
    """
    entries = read_directory(file)
    prefix = find_prefix(file, entries)
    if calls is not None:
        _check_for_torch(file, entries)
    records = {entry.name.removeprefix(prefix): entry for entry in entries if entry.name.startswith(prefix)}
    require(
        "constants.pkl" not in records and not any(name.startswith("code/") for name in records),
        f"{file.source}: a TorchScript archive; save the state dict of the model with torch.save instead",
        UnsupportedError,
    )
    order = _read_stored(file, records["byteorder"], len("little")) if "byteorder" in records else b"little"
    require(
        order != b"big",
        f"{file.source}: saved on a big-endian machine; load and save it again with torch",
        UnsupportedError,
    )
    require(order == b"little", f"{file.source}: record byteorder holds {shown(order)}, expected 'little'")
    table = StorageTable(f"{file.source}: data.pkl")
    pickle = _read_stored(file, records["data.pkl"], longest_pickle(file))
    names: set[str] = set()
    tree = load_pickle(
        io.BytesIO(pickle), len(pickle), table.label, table.load, names=names, stored=file.stored, calls=calls
    )
    check_depth(tree, table.label)
    if table.declared and calls is None:
        check_shares(tree, names, str(file.source))
        refuse_buckets(tree, str(file.source))
    known = {"data.pkl", *(f"data/{key}" for key in table.declared)}
    for name, entry in records.items():
        if name not in known and entry.method == STORED and entry.size <= MAX_SMALL_RECORD_BYTES:
            _read_stored(file, entry, MAX_SMALL_RECORD_BYTES)
    return OpenCheckpoint("torch-zip", file, _storages(file, table, records), tree, names)


def _check_for_torch(file: SourceFile, entries: Sequence[ZipEntry]) -> None:
    """Raise InputError where torch's own zip library could read another pickle than this reader, or inflate a record.

    That library ignores the case of names, and takes the last signature of an end record, even one in a comment.
    """
    end = file.read(file.source.length - _END.size, _END.size)
    require(
        end.startswith(END_SIGNATURE) and end.endswith(b"\0\0"),
        f"{file.source}: a zip file with a comment, which torch.save never writes",
    )
    require(
        len({entry.name.lower() for entry in entries}) >= len(entries),
        f"{file.source}: a zip file with records that only differ in case, which torch takes for one",
    )
    for entry in entries:
        _require_stored(file, entry)


def _read_stored(file: SourceFile, entry: ZipEntry, limit: int) -> bytes:
    """The content of a small record, with its CRC checked. Raises InputError."""
    _require_stored(file, entry)
    if entry.size > limit:
        raise InputError(f"{file.source}: record {shown(entry.name)} has {entry.size} bytes, more than {limit}")
    content = file.read(entry.data_offset, entry.size)
    # 0 is what torch writes when set_crc32_options switched CRCs off.
    if entry.crc32 and crc32(content) != entry.crc32:
        raise InputError(f"{file.source}: record {shown(entry.name)} is damaged: its CRC does not match")
    return content


def _require_stored(file: SourceFile, entry: ZipEntry) -> None:
    if entry.method != STORED:
        raise UnsupportedError(
            f"{file.source}: zip record {shown(entry.name)} is compressed; "
            f"load the file with torch.load and write it again with torch.save"
        )


def _storages(file: SourceFile, table: StorageTable, records: Mapping[str, ZipEntry]) -> Sequence[StorageInfo]:
    """The storages that the pickle names, in the order of the file. Raises InputError where one is missing."""
    storages = []
    for key in table.declared:
        entry = records.get(f"data/{key}")
        if entry is None:
            raise InputError(f"{file.source}: storage {shown(key)} is named in data.pkl but missing from the file")
        _require_stored(file, entry)
        is_stated = entry.crc32 or not entry.size
        fields = (entry.crc32, entry.crc_fields) if is_stated else (None, (), entry.crc_fields)
        storages.append(StorageInfo(key, table.dtype_for(key, entry.size), entry.data_offset, entry.size, *fields))
    return sorted(storages, key=lambda storage: (storage.offset, storage.key))


def tree_of_head(format_id: str, head: bytes, where: str) -> Any:
    """The tree of a file of the format, which begins with the bytes ``head``; None for formats without values.

    Raises InputError, also where the head ends within the pickle.
    """
    stream = io.BytesIO(head)
    if format_id == "torch-zip":
        stream.seek(_start_of_pickle(head, where))
    elif format_id == "torch-legacy":
        for _ in ("magic number", "version", "system"):
            load_pickle(stream, len(head), where)
    else:
        return None
    return load_pickle(stream, len(head), where, StorageTable(where).load)


def _start_of_pickle(head: bytes, where: str) -> int:
    name = head.find(_PICKLE_MARK)
    at = head.rfind(LOCAL_SIGNATURE, 0, max(name, 0))
    if at >= 0 and at + _LOCAL.size <= name:
        name_length, extra_length = map(int, _LOCAL.unpack_from(head, at)[-2:])
        if at + _LOCAL.size + name_length == name + len(_PICKLE_MARK):
            return name + len(_PICKLE_MARK) + extra_length
    raise InputError(f"{where}: has no data.pkl at its start")
