"""Zip files that other tools wrote, and those whose fields contradict each other."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib

import pytest
import torch

from ckpt8.checkpoint.readers.torch_zip import find_prefix, read_directory, read_end_records
from ckpt8.core.errors import InputError
from ckpt8.core.files.source_file import ByteRange, SourceFile


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


def test_a_record_added_to_a_file_of_torch(tmp_path):
    saved = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, saved)
    before = directory(saved)
    with zipfile.ZipFile(saved, "a") as archive:
        archive.writestr("model/notes.txt", "x")
    assert [entry.name for entry in directory(saved)] == [*(entry.name for entry in before), "model/notes.txt"]


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_duplicates_and_overlaps(tmp_path):
    path = tmp_path / "twice.zip"
    write_zip(path, ["m/data.pkl", "m/data.pkl"])
    with pytest.raises(InputError, match=r"'m/data\.pkl' is listed twice"):
        directory(path)
    write_zip(path, ["m/aaaa"])
    data = bytearray(path.read_bytes())
    end = end_of(path)
    entry = data[end.offset : end.offset + end.size]
    tail = struct.pack("<4s4H2IH", b"PK\5\6", 0, 0, 2, 2, 2 * end.size, end.offset, 0)
    path.write_bytes(data[: end.offset] + entry + entry + tail)
    with pytest.raises(InputError, match="' overlaps the one before"):
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


def test_end_record_limits(tmp_path):
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
