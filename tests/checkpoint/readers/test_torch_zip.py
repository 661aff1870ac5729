"""Files of torch.save: every tensor rebuilt from the reader's storages equals what torch.load gives.

The zip directory against what torch and zip tools write, and against every single flipped bit.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from contextlib import closing
from functools import partial
from itertools import product

import pytest
import torch
from hostile_kit import Pickled

from ckpt8.checkpoint.readers import get_reader, match_reader, open_checkpoint
from ckpt8.checkpoint.readers.torch_zip import find_prefix, read_directory, read_end_records
from ckpt8.checkpoint.tree import Inert, format_path, iter_leaves
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType

PLAIN_DTYPES = [
    dtype for dtype in DType if hasattr(torch, dtype.label) and not dtype.label.startswith(("qint", "quint"))
]


def save(obj, path, *, crc=True, **options):
    torch.serialization.set_crc32_options(crc)
    try:
        torch.save(obj, path, **options)
    finally:
        torch.serialization.set_crc32_options(True)
    return path


@pytest.fixture
def five(tmp_path):
    """A file of one tensor of 20 bytes."""
    return save({"w": torch.arange(5.0)}, tmp_path / "c.pt")


def checkpoint_objects():
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    buffer = torch.ones(2)
    buffer.note = "an attribute"
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [weight, weight[2:4], weight.t(), weight[::2, 1:3], weight[3, 3]],
        "tied": (weight, OrderedDict(same=weight, alias=weight.view(30))),
        "expanded": torch.tensor([7.0]).expand(4, 3),
        "scalar": torch.tensor(3),
        "empty": [torch.empty(0), torch.empty(3, 0, 2), torch.zeros(0, dtype=torch.uint16)],
        "parameter": torch.nn.Parameter(torch.ones(3)),
        "attribute": buffer,
        "conjugate": torch.tensor([1 + 2j, 3j]),
        "size": torch.Size([2, 3]),
        "numbers": [1, 2.5, None, "text", b"bytes"],
    }


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_tensors_are_those_of_torch_load(tmp_path, compare, protocol):
    path = save(checkpoint_objects(), tmp_path / "c.pt", pickle_protocol=protocol)
    expected = torch.load(path, weights_only=False)
    with open_checkpoint(path) as checkpoint:
        names = compare(checkpoint, expected)
        assert checkpoint.format == "torch-zip"
        assert checkpoint.size == path.stat().st_size
        assert checkpoint.tree["size"] == (2, 3)
        assert checkpoint.tree["numbers"] == [1, 2.5, None, "text", b"bytes"]
        offsets = [storage.offset for storage in checkpoint.storages]
        assert offsets == sorted(offsets)
        tied = {leaf.key for path_, leaf in iter_leaves(checkpoint.tree) if path_[0] in ("views", "tied")}
        assert len(tied) == 1
        checkpoint.check_unchanged()
    assert "optimizer.state.0.exp_avg" in names
    assert "model.1.running_mean" in names


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=lambda dtype: dtype.label)
def test_every_dtype(tmp_path, compare, dtype):
    if dtype is DType.BOOL:
        raw = torch.tensor([True, False] * 16)
    else:
        raw = torch.arange(32, dtype=torch.uint8).view(dtype.torch)
    path = save({"a": raw, "b": raw[1:]}, tmp_path / "d.pt")
    with open_checkpoint(path) as checkpoint:
        assert compare(checkpoint, torch.load(path)) == ["a", "b"]
        (storage,) = checkpoint.storages
        # Types without a storage class of their own are saved over untyped storages.
        assert storage.dtype is (dtype if dtype.storage_class else DType.UINT8)
        assert storage.nbytes == 32


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_what_is_not_a_plain_tensor_stays_visible_as_storages(tmp_path):
    quantized = torch.quantize_per_tensor(torch.ones(4), 0.5, 0, torch.qint8)
    sparse = torch.eye(3).to_sparse()
    module = torch.nn.Linear(2, 2)
    path = save(
        {"q": quantized, "s": sparse, "storage": torch.ones(3).untyped_storage(), "module": module}, tmp_path / "x.pt"
    )
    with open_checkpoint(path) as checkpoint:
        found = {format_path(path_): type(leaf).__name__ for path_, leaf in iter_leaves(checkpoint.tree)}
        assert found == {
            "q.0": "StorageRef",
            "s.1.0": "TensorRef",
            "s.1.1": "TensorRef",
            "storage": "StorageRef",
            "module._parameters.weight": "TensorRef",
            "module._parameters.bias": "TensorRef",
        }
        assert type(checkpoint.tree["module"]) is Inert
        keys = {leaf.key for _, leaf in iter_leaves(checkpoint.tree)}
        assert keys == {storage.key for storage in checkpoint.storages}


def test_opening_executes_nothing(tmp_path):
    path = save({"w": torch.ones(2), "x": Pickled(os.mkdir, str(tmp_path / "ran"))}, tmp_path / "evil.pt")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tree["x"].name.endswith(".mkdir")
    assert not (tmp_path / "ran").exists()


def test_crcs_are_those_of_the_bytes(tmp_path):
    path = save({"w": torch.arange(5.0), "e": torch.empty(0)}, tmp_path / "c.pt")
    data = path.read_bytes()
    with open_checkpoint(path) as checkpoint:
        for storage in checkpoint.storages:
            assert storage.crc32 == zlib.crc32(data[storage.offset : storage.offset + storage.nbytes])
            assert len(storage.crc_fields) == 2
            for field in storage.crc_fields:
                assert struct.unpack_from("<I", data, field)[0] == storage.crc32


def test_crc_off_gives_no_crc_and_no_fields(tmp_path, compare):
    path = save({"w": torch.arange(5.0), "e": torch.empty(0)}, tmp_path / "c.pt", crc=False)
    with open_checkpoint(path) as checkpoint:
        compare(checkpoint, torch.load(path))
        by_size = {storage.nbytes: storage for storage in checkpoint.storages}
        assert (by_size[20].crc32, by_size[20].crc_fields) == (None, ())
        assert by_size[0].crc32 == 0


def test_a_source_can_be_a_slice(five, tmp_path, compare):
    data, joined = five.read_bytes(), tmp_path / "joined"
    joined.write_bytes(b"x" * 70 + data + b"y" * 30)
    with closing(SourceFile(ByteRange(joined, 70, len(data)))) as file:
        assert match_reader(file) is get_reader("torch-zip")
        compare(get_reader("torch-zip").read(file), torch.load(five))


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write the records anew, as a zip tool would; ``change`` maps their names to content, None to leave one out."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    records |= change
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            if content is not None:
                archive.writestr(name, content)


def test_a_file_that_a_zip_tool_wrote_again(five, compare):
    rewrite(five, {"c/unused/notes.txt": b"x", "c/data/99": b"never named"})
    with open_checkpoint(five) as checkpoint:
        compare(checkpoint, torch.load(five))
        assert [storage.key for storage in checkpoint.storages] == ["0"]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"c/byteorder": b"big"}, UnsupportedError, "big-endian"),
        ({"c/byteorder": b"pdp"}, InputError, "expected 'little'"),
        ({"c/byteorder": b"x" * 500}, InputError, "has 500 bytes"),
        ({"c/data/0": None}, InputError, "storage '0' is named in data.pkl but missing"),
        ({"c/data/0": b"x" * 19}, InputError, "19 bytes, but the pickle names it with 5 elements of float32"),
        ({"c/data/0": b"x" * 24}, InputError, "24 bytes, but the pickle names it with 5 elements"),
        ({"c/data.pkl": b"\x80\x02"}, InputError, "data.pkl: damaged pickle"),
        ({"c/data.pkl": b")" + b"\x85" * 2000 + b"."}, InputError, "nested deeper"),
        ({"c/constants.pkl": b"x"}, UnsupportedError, "TorchScript"),
        ({"c/code/a.py": b"x"}, UnsupportedError, "TorchScript"),
        ({"d/data.pkl": b"N."}, InputError, "2 records named data.pkl"),
        (None, UnsupportedError, r"compressed; load the file with torch\.load"),
    ],
)
def test_refusals(five, change, error, message):
    """Records that are missing or others; with None all are there, and compressed."""
    rewrite(five, change or {}, zipfile.ZIP_STORED if change else zipfile.ZIP_DEFLATED)
    with pytest.raises(error, match=message) as caught, open_checkpoint(five):
        pass
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{five}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder", ".data/serialization_id"])
def test_damage_in_a_small_record_is_noticed(five, name):
    with zipfile.ZipFile(five) as archive:
        content = archive.read(f"c/{name}")
    data = bytearray(five.read_bytes())
    data[data.index(content) + len(content) // 2] ^= 1
    five.write_bytes(data)
    with pytest.raises(InputError, match="its CRC does not match"), open_checkpoint(five):
        pass


def test_truncation_at_any_length_is_an_input_error(five):
    data = five.read_bytes()
    for length in range(0, len(data), 3):
        five.write_bytes(data[:length])
        what = "damaged zip file" if length >= 4 else ""
        with pytest.raises(InputError, match=f"^{five}: .*{what}"), open_checkpoint(five):
            pass


def directory(path, read=read_directory):
    with closing(SourceFile(ByteRange.of(path))) as file:
        return read(file)


end_of = partial(directory, read=read_end_records)


@pytest.fixture
def saved(tmp_path):
    return save({"a": torch.arange(10.0), "b": torch.zeros(0), "c": 1}, tmp_path / "model.pt")


@pytest.fixture
def without_crc(tmp_path):
    return save({"a": torch.arange(10.0)}, tmp_path / "nocrc.pt", crc=False)


@pytest.fixture
def zip64(tmp_path):
    """4.4 GB, of which a few kilobytes are on disk: torch skips the bytes of the storages."""
    with torch.serialization.skip_data():
        return save({"a": torch.ones(3), "x": torch.empty(1_100_000_000), "y": torch.ones(5)}, tmp_path / "big.pt")


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


def large(path):
    """The record of the tensor ``a``."""
    return next(entry for entry in directory(path) if entry.name == "model/data/0")


def test_every_place_that_states_a_crc_is_listed(saved):
    """Changed bytes with all listed fields patched make a file that zipfile and torch accept."""
    entry = large(saved)
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
    before, original = large(saved), saved.read_bytes()
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
            assert len(large(saved).crc_fields) == fields
            assert (at in large(saved).crc_fields) is (fields == 3)


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
    entry, data = directory(saved)[0], saved.read_bytes()
    for index, bit in product(range(entry.data_offset + entry.size, entry.end), range(8)):
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


def test_joined_zip_files_are_named(saved):
    data = saved.read_bytes()
    saved.write_bytes(data + data)
    with pytest.raises(UnsupportedError, match=r"\.distcp"):
        directory(saved)


def test_zip64_values_are_read(zip64):
    entries = {entry.name: entry for entry in directory(zip64)}
    assert entries["big/data/1"].size == 4_400_000_000
    assert entries["big/data/2"].data_offset > 2**32
    # The descriptor after a record of over 4 GB has 64-bit sizes, and the CRC still stands at its start.
    big = entries["big/data/1"]
    assert big.end - big.data_offset - big.size == 24
    assert big.crc_fields[1] == big.data_offset + big.size + 4


# Files of other tools, and fields that contradict each other


def write_zip(path, names, **options):
    with zipfile.ZipFile(path, "w", **options) as archive:
        for index, name in enumerate(names):
            archive.writestr(name, bytes([index]) * 50)
    return path


class Unseekable(io.BytesIO):
    """Makes zipfile write data descriptors."""

    def tell(self):
        raise OSError


def test_files_of_other_zip_tools(tmp_path):
    path = write_zip(tmp_path / "other.zip", ["m/data.pkl", "m/data/0"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.comment = b"a comment"
    entries = directory(path)
    assert [(entry.name, entry.size, len(entry.crc_fields)) for entry in entries] == [
        ("m/data.pkl", 50, 2),
        ("m/data/0", 50, 2),
    ]
    stream = Unseekable()
    write_zip(stream, ["m/data.pkl"], compression=zipfile.ZIP_DEFLATED)
    path.write_bytes(stream.getvalue())
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
    path = write_zip(tmp_path / "twice.zip", ["m/data.pkl", "m/data.pkl"])
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
    path = write_zip(tmp_path / "plain.zip", ["m/data.pkl"])
    start = end_of(path).offset
    patched(path, [(start + offset, layout, value) for offset, layout, value in fields])
    with pytest.raises(InputError, match=message):
        directory(path)


def test_end_record_limits(tmp_path):
    path = write_zip(tmp_path / "plain.zip", ["m/data.pkl"])
    end, original = end_of(path), path.read_bytes()
    at = end.offset + end.size
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

    def prefix(*names):
        write_zip(path, names)
        return directory(path, lambda file: find_prefix(file, read_directory(file)))

    assert prefix("x/data.pkl", "x/version") == "x/"
    with pytest.raises(InputError, match=r"no data\.pkl"):
        prefix("x/version")
    with pytest.raises(InputError, match=r"2 records named data\.pkl"):
        prefix("x/data.pkl", "y/data.pkl")
