"""Mutations of zip files by record and field. What was changed is written with its checksum, so that it is read."""

from __future__ import annotations

import io
import random
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from functools import lru_cache

from fuzz_bytes import INTERESTING, mutate_bytes
from fuzz_pickle import mutate_pickle

_LOCAL = "<4s5H3I2H"
_CENTRAL = "<4s6H3I5H2I"
_END = "<4s4H2IH"
_LOCAL_FIELDS = ("signature", "needed", "flags", "method", "time", "date", "crc", "compressed", "size", "name", "extra")
_CENTRAL_FIELDS = (
    "signature", "made_by", "needed", "flags", "method", "time", "date", "crc", "compressed", "size", "name", "extra",
    "comment", "disk", "internal", "external", "header",
)  # fmt: skip
_END_FIELDS = ("signature", "disk", "start_disk", "here", "count", "bytes", "offset", "comment")


@dataclass
class Record:
    """A record and what its headers are to state instead of the truth."""

    name: bytes
    content: bytes
    local: dict[str, int] = field(default_factory=dict)
    central: dict[str, int] = field(default_factory=dict)
    extra: bytes = b""
    deflate: bool = False


def write_zip(records: list[Record], end: dict[str, int] | None = None, *, tail: bytes = b"") -> bytes:
    """A zip file as simple tools write it, with the fields that were asked for."""
    body, directory = bytearray(), bytearray()
    for record in records:
        content = zlib.compress(record.content, 9, -15) if record.deflate else record.content
        common = {
            "needed": 20, "flags": 0, "method": 8 if record.deflate else 0, "time": 0, "date": 33,
            "crc": zlib.crc32(record.content), "compressed": len(content), "size": len(record.content),
            "name": len(record.name), "extra": len(record.extra),
        }  # fmt: skip
        start = len(body)
        body += (
            _pack(_LOCAL, _LOCAL_FIELDS, b"PK\x03\x04", common | record.local) + record.name + record.extra + content
        )
        stated = {"made_by": 20, "comment": 0, "disk": 0, "internal": 0, "external": 0, "header": start}
        central = common | stated | record.central
        directory += _pack(_CENTRAL, _CENTRAL_FIELDS, b"PK\x01\x02", central) + record.name + record.extra
    count = len(records) & 0xFFFF
    fields = {"disk": 0, "start_disk": 0, "here": count, "count": count, "bytes": len(directory), "offset": len(body)}
    return bytes(
        body + directory + _pack(_END, _END_FIELDS, b"PK\x05\x06", fields | {"comment": len(tail)} | (end or {})) + tail
    )


def _pack(layout: str, names: tuple[str, ...], signature: bytes, values: dict[str, int]) -> bytes:
    widths = {"H": 2**16, "I": 2**32}
    codes = "".join(code * int(count or 1) for count, code in _codes(layout))
    numbers = [values[name] % widths[code] for name, code in zip(names[1:], codes, strict=True)]
    return struct.pack(layout, signature, *numbers)


def _codes(layout: str) -> list[tuple[str, str]]:
    found, count = [], ""
    for letter in layout[3:]:
        if letter.isdigit():
            count += letter
        else:
            found.append((count, letter))
            count = ""
    return found


@lru_cache(maxsize=64)
def read_zip(data: bytes) -> tuple[tuple[bytes, bytes], ...]:
    """(name, content) of every record of a valid file without compression."""
    found = []
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for info in archive.infolist():
            name, extra = struct.unpack_from("<HH", data, info.header_offset + 26)
            start = info.header_offset + 30 + name + extra
            found.append((info.filename.encode(), data[start : start + info.file_size]))
    return tuple(found)


def mutate_zip(rng: random.Random, data: bytes, other: bytes = b"") -> bytes:
    """A file with changed bytes, or with changed pickles, records, or fields of headers."""
    if rng.random() < 0.25:
        return mutate_bytes(rng, data, other)
    records = [Record(name, content) for name, content in read_zip(data)]
    end: dict[str, int] = {}
    tail = b""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind <= 4:
            _change_pickle(rng, records)
        elif kind <= 7:
            tail = _change_record(rng, records) or tail
        elif kind == 8 and records:
            chosen = rng.choice(records)
            place = rng.choice((chosen.local, chosen.central))
            place[rng.choice(_CENTRAL_FIELDS[1:-1] if place is chosen.central else _LOCAL_FIELDS[1:])] = _number(rng)
            if rng.random() < 0.3:
                chosen.central["header"] = _number(rng)
        else:
            end[rng.choice(_END_FIELDS[1:])] = _number(rng)
    return write_zip(records, end, tail=tail)


def _number(rng: random.Random) -> int:
    return rng.choice(INTERESTING) if rng.random() < 0.6 else rng.randrange(5000)


def _change_pickle(rng: random.Random, records: list[Record]) -> None:
    for record in records:
        if record.name.endswith(b"data.pkl"):
            try:
                record.content = mutate_pickle(rng, record.content)
            except ValueError:  # it was changed before into something that has no opcodes
                record.content = mutate_bytes(rng, record.content)


def _change_record(rng: random.Random, records: list[Record]) -> bytes:
    """Change a record as a whole; what it gives is a comment for the end of the file."""
    if not records:
        return b""
    at = rng.randrange(len(records))
    chosen = records[at]
    how = rng.randrange(10)
    if how == 0:
        del records[at]
    elif how == 1:
        records.insert(rng.randrange(len(records)), Record(chosen.name, chosen.content))
    elif how == 2:
        chosen.name = rng.choice(
            (b"", b"../x", b"/x", b"a/data.pkl", b"a\\b", b"\xff", chosen.name + b"x", b"x/" + chosen.name)
        )
    elif how == 3:
        chosen.content = mutate_bytes(rng, chosen.content)
    elif how == 4:
        chosen.content = chosen.content[: rng.randrange(len(chosen.content) + 1)]
    elif how == 5:
        other = rng.choice(records)
        chosen.content, other.content = other.content, chosen.content
    elif how == 6:
        chosen.deflate = True
    elif how == 7:
        size = struct.pack("<HHQQQ", 1, 24, *(_number(rng) for _ in range(3)))
        chosen.extra = rng.choice((size, size[:12], rng.randbytes(7), b"\xff\xff\xff\xff"))
        for key in rng.sample(("size", "compressed"), rng.randrange(1, 3)):
            chosen.central[key] = chosen.local[key] = 0xFFFFFFFF
    elif how == 8:
        records.append(
            Record(
                rng.choice((b"a/code/x", b"a/constants.pkl", b"archive/byteorder", b"x")),
                rng.choice((b"big", b"little", b"")),
            )
        )
    else:
        return rng.choice((b"comment", b"PK\x05\x06" * 50, b"PK\x05\x06" + bytes(18)))
    return b""
