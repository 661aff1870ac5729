"""The zip directory reader against what torch and zip tools write, and against every single flipped bit."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib

import pytest
import torch

from ckpt8.errors import InputError, UnsupportedError
from ckpt8.readers.base import ByteRange, SourceFile
from ckpt8.readers.zip_directory import find_prefix, read_directory
from ckpt8.readers.zip_end import read_end_records


def directory(path):
    file = SourceFile(ByteRange.of(path))
    try:
        return read_directory(file)
    finally:
        file.close()


def end_of(path):
    file = SourceFile(ByteRange.of(path))
    try:
        return read_end_records(file)
    finally:
        file.close()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "model.pt"
    torch.save({"a": torch.arange(10.0), "b": torch.zeros(0), "c": 1}, path)
    return path


@pytest.fixture
def without_crc(tmp_path):
    path = tmp_path / "nocrc.pt"
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"a": torch.arange(10.0)}, path)
    finally:
        torch.serialization.set_crc32_options(True)
    return path


@pytest.fixture
def zip64(tmp_path):
    """4.4 GB, of which a few kilobytes are on disk: torch skips the bytes of the storages."""
    path = tmp_path / "big.pt"
    with torch.serialization.skip_data():
        torch.save({"a": torch.ones(3), "x": torch.empty(1_100_000_000), "y": torch.ones(5)}, path)
    return path


def test_records_are_those_that_zipfile_sees(saved):
    entries = directory(saved)
    data = saved.read_bytes()
    with zipfile.ZipFile(saved) as archive:
        infos = archive.infolist()
        assert [entry.name for entry in entries] == [info.filename for info in infos]
        for entry, info in zip(entries, infos, strict=True):
            assert (entry.crc32, entry.size, entry.header_offset) == (info.CRC, info.file_size, info.header_offset)
            content = data[entry.data_offset : entry.data_offset + entry.size]
            assert content == archive.read(info)
            assert entry.crc32 == zlib.crc32(content)
    assert entries[0].name == "model/data.pkl"


def test_every_place_that_states_a_crc_is_listed(saved):
    """Changed bytes with all listed fields patched make a file that zipfile and torch accept."""
    entry = next(entry for entry in directory(saved) if entry.name == "model/data/0")
    data = bytearray(saved.read_bytes())
    assert len(entry.crc_fields) == 2
    for field in entry.crc_fields:
        assert struct.unpack_from("<I", data, field)[0] == entry.crc32
    assert data.count(struct.pack("<I", entry.crc32)) == 2
    changed = torch.arange(10.0).flip(0)
    content = bytes(changed.untyped_storage().tolist())
    data[entry.data_offset : entry.data_offset + entry.size] = content
    for field in entry.crc_fields:
        struct.pack_into("<I", data, field, zlib.crc32(content))
    saved.write_bytes(data)
    directory(saved)
    with zipfile.ZipFile(saved) as archive:
        assert archive.testzip() is None
    assert torch.equal(torch.load(saved)["a"], changed)


def sweep(path, start):
    """Flip each bit from ``start`` to the end of the file, in place; give the positions that went unnoticed."""
    unnoticed = []
    with path.open("r+b") as file:
        descriptor = file.fileno()
        tail = os.pread(descriptor, path.stat().st_size - start, start)
        for index, byte in enumerate(tail):
            for bit in range(8):
                os.pwrite(descriptor, bytes([byte ^ 1 << bit]), start + index)
                try:
                    directory(path)
                except InputError as exc:
                    assert str(exc).startswith(f"{path}: ")
                    assert "\n" not in str(exc)
                else:
                    unnoticed.append((start + index, bit))
            os.pwrite(descriptor, bytes([byte]), start + index)
    directory(path)
    return unnoticed


@pytest.mark.parametrize("kind", ["saved", "without_crc", "zip64"])
def test_every_flipped_bit_of_directory_and_end_records_is_noticed(kind, request):
    path = request.getfixturevalue(kind)
    assert sweep(path, end_of(path).offset) == []


def test_every_flipped_bit_of_a_data_descriptor_is_noticed(saved):
    entry = directory(saved)[0]
    start = entry.data_offset + entry.size
    data = saved.read_bytes()
    for index in range(start, entry.end):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[index] ^= 1 << bit
            saved.write_bytes(damaged)
            with pytest.raises(InputError, match="does not match its directory entry"):
                directory(saved)


def test_truncation_at_every_boundary_is_noticed(saved):
    data = saved.read_bytes()
    cuts = {0, 1, 3, len(data) - 1, end_of(saved).offset}
    for entry in directory(saved):
        cuts |= {entry.header_offset, entry.data_offset, entry.data_offset + entry.size, entry.end}
    cuts |= set(range(end_of(saved).offset, len(data)))
    for cut in cuts:
        saved.write_bytes(data[:cut])
        with pytest.raises(InputError, match=r"damaged zip file|not where the end record says"):
            directory(saved)


def test_trailing_or_leading_bytes_are_noticed(saved):
    data = saved.read_bytes()
    for wrong in (data + b"\0", b"\0" + data, data + data):
        saved.write_bytes(wrong)
        with pytest.raises(InputError):
            directory(saved)


def test_joined_zip_files_are_named(saved):
    data = saved.read_bytes()
    saved.write_bytes(data + data)
    with pytest.raises(UnsupportedError, match=r"\.distcp"):
        directory(saved)


def test_a_slice_is_a_source_of_its_own(saved, tmp_path):
    data = saved.read_bytes()
    joined = tmp_path / "joined"
    joined.write_bytes(b"x" * 100 + data + data)
    file = SourceFile(ByteRange(joined, 100, len(data)))
    try:
        assert read_directory(file) == directory(saved)
    finally:
        file.close()


def test_zip64_values_are_read(zip64):
    entries = {entry.name: entry for entry in directory(zip64)}
    assert entries["big/data/1"].size == 4_400_000_000
    assert entries["big/data/2"].data_offset > 2**32
    # The descriptor after a record of over 4 GB has 64-bit sizes, and the CRC still stands at its start.
    big = entries["big/data/1"]
    assert big.end - big.data_offset - big.size == 24
    assert big.crc_fields[1] == big.data_offset + big.size + 4


def write_zip(path, names, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for index, name in enumerate(names):
            archive.writestr(name, bytes([index]) * 50)


class Unseekable(io.RawIOBase):
    """Makes zipfile write data descriptors."""

    def __init__(self):
        self.data = bytearray()

    def writable(self):
        return True

    def write(self, data):
        self.data += data
        return len(data)


def test_files_of_other_zip_tools(tmp_path):
    path = tmp_path / "other.zip"
    write_zip(path, ["m/data.pkl", "m/data/0"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a comment"
    entries = directory(path)
    assert [(entry.name, entry.size, len(entry.crc_fields)) for entry in entries] == [
        ("m/data.pkl", 50, 2),
        ("m/data/0", 50, 2),
    ]
    stream = Unseekable()
    write_zip(stream, ["m/data.pkl"], compression=zipfile.ZIP_DEFLATED)
    path.write_bytes(stream.data)
    (entry,) = directory(path)
    assert (entry.method, entry.size) == (8, 50)
    assert entry.compressed_size < 50
    assert len(entry.crc_fields) == 2
    with zipfile.ZipFile(path, "w") as archive, archive.open("m/data.pkl", "w", force_zip64=True) as record:
        record.write(b"abc")
    assert directory(path)[0].crc32 == zlib.crc32(b"abc")


def test_a_record_added_to_a_file_of_torch(saved):
    before = directory(saved)
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("model/notes.txt", "x")
    assert [entry.name for entry in directory(saved)] == [*(entry.name for entry in before), "model/notes.txt"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicates_and_overlaps(tmp_path):
    path = tmp_path / "twice.zip"
    write_zip(path, ["m/data.pkl", "m/data.pkl"])
    with pytest.raises(InputError, match="'m/data.pkl' is listed twice"):
        directory(path)
    write_zip(path, ["m/aaaa"])
    data = bytearray(path.read_bytes())
    end = end_of(path)
    entry = data[end.offset : end.offset + end.size]
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, 2 * end.size, end.offset, 0)
    path.write_bytes(data[: end.offset] + entry + entry + tail)
    with pytest.raises(InputError, match="overlaps"):
        directory(path)


def patched(path, fields):
    """Write ``(offset, format, value)`` fields into a zip file."""
    data = bytearray(path.read_bytes())
    for offset, layout, value in fields:
        struct.pack_into(layout, data, offset, value)
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ([(6, "<H", 1), (8, "<H", 1)], "encrypted"),
        ([(20, "<I", 51), (24, "<I", 51)], "does not match"),
        ([(20, "<I", 2**31), (24, "<I", 2**31)], "does not match"),
        ([(24, "<I", 51)], "does not match"),
        ([(42, "<I", 2**31)], "does not match"),
        ([(34, "<H", 1)], "no valid sizes"),
        ([(42, "<I", 0xFFFFFFFF)], "no valid sizes"),
        ([(28, "<H", 5000)], "reaches past its end"),
    ],
)
def test_contradictions_of_a_plain_zip(tmp_path, fields, message):
    path = tmp_path / "plain.zip"
    write_zip(path, ["m/data.pkl"])
    start = end_of(path).offset
    patched(path, [(start + offset, layout, value) for offset, layout, value in fields])
    with pytest.raises(InputError, match=message):
        directory(path)


def test_end_record_limits(tmp_path, saved):
    path = tmp_path / "plain.zip"
    write_zip(path, ["m/data.pkl"])
    end = end_of(path)
    at = end.offset + end.size
    original = path.read_bytes()
    for fields, message in [
        ([(at + 4, "<H", 1)], "disks"),
        ([(at + 8, "<H", 2)], "disks"),
        ([(at + 8, "<H", 2), (at + 10, "<H", 2)], "2 records announced, 1 listed"),
        ([(at + 12, "<I", 2**28)], "directory has"),
        ([(at + 16, "<I", 0)], "not where the end record says"),
    ]:
        path.write_bytes(original)
        patched(path, fields)
        with pytest.raises(InputError, match=message):
            directory(path)


def test_prefix(tmp_path):
    path = tmp_path / "prefix.zip"
    for names, expected in [
        (["x/data.pkl", "x/version"], "x/"),
        (["x/version"], "no data.pkl"),
        (["x/data.pkl", "y/data.pkl"], "2 records named data.pkl"),
    ]:
        write_zip(path, names)
        file = SourceFile(ByteRange.of(path))
        try:
            entries = read_directory(file)
            if expected.endswith("/"):
                assert find_prefix(file, entries) == expected
            else:
                with pytest.raises(InputError, match=expected):
                    find_prefix(file, entries)
        finally:
            file.close()
