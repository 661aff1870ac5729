"""The zip directory reader against what torch and zip tools write, and against every single flipped bit."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib

import pytest
import torch

from ckpt8.checkpoint.readers.torch_zip import read_directory, read_end_records
from ckpt8.core.errors import InputError, UnsupportedError
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


def test_a_local_header_beside_a_descriptor_states_nothing_or_the_truth(saved):
    before = next(entry for entry in directory(saved) if entry.name == "model/data/0")
    original = saved.read_bytes()
    at = before.header_offset + 14
    for crc32, compressed, size, fields in [
        (before.crc32, before.size, before.size, 3),
        (0, 0xFFFFFFFF, 0xFFFFFFFF, 2),
        (before.crc32 ^ 1, 0, 0, None),
        (0, before.size + 1, 0, None),
        (0, 0, before.size + 1, None),
    ]:
        data = bytearray(original)
        struct.pack_into("<3I", data, at, crc32, compressed, size)
        saved.write_bytes(data)
        if fields is None:
            with pytest.raises(InputError, match="does not match its directory entry"):
                directory(saved)
        else:
            found = next(entry for entry in directory(saved) if entry.name == "model/data/0")
            assert len(found.crc_fields) == fields
            assert (at in found.crc_fields) is (fields == 3)


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
                except InputError:
                    continue
                unnoticed.append((start + index, bit))
            os.pwrite(descriptor, bytes([byte]), start + index)
    directory(path)
    return unnoticed


@pytest.mark.slow
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


def test_a_saturated_count_is_not_taken_for_torchs(saved):
    """A real count of 0xFFFE is one bit away from "see the zip64 record"."""
    data = bytearray(saved.read_bytes())
    struct.pack_into("<HH", data, len(data) - 14, 0xFFFF, 0xFFFF)
    saved.write_bytes(data)
    with pytest.raises(InputError, match="torch never writes"):
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
