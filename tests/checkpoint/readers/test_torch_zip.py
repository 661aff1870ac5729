"""Files of torch.save: every tensor rebuilt from the reader's storages equals what torch.load gives."""

from __future__ import annotations

import os
import struct
import zipfile
import zlib
from collections import OrderedDict
from contextlib import closing

import pytest
import torch

from ckpt8.checkpoint.readers import get_reader, match_reader, open_checkpoint
from ckpt8.checkpoint.tree import Inert, format_path, iter_leaves
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType

PLAIN_DTYPES = [
    dtype for dtype in DType if hasattr(torch, dtype.label) and not dtype.label.startswith(("qint", "quint"))
]


def save(obj, path, **options):
    torch.save(obj, path, **options)
    return path


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
        {"q": quantized, "s": sparse, "storage": torch.ones(3).untyped_storage(), "module": module},
        tmp_path / "x.pt",
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


class Command:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_opening_executes_nothing(tmp_path):
    path = save({"w": torch.ones(2), "x": Command(str(tmp_path / "ran"))}, tmp_path / "evil.pt")
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
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"w": torch.arange(5.0), "e": torch.empty(0)}, tmp_path / "c.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    with open_checkpoint(path) as checkpoint:
        compare(checkpoint, torch.load(path))
        by_size = {storage.nbytes: storage for storage in checkpoint.storages}
        assert (by_size[20].crc32, by_size[20].crc_fields) == (None, ())
        assert by_size[0].crc32 == 0


def test_a_source_can_be_a_slice(tmp_path, compare):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    data = path.read_bytes()
    joined = tmp_path / "joined"
    joined.write_bytes(b"x" * 70 + data + b"y" * 30)
    source = ByteRange(joined, 70, len(data))
    with closing(SourceFile(source)) as file:
        assert match_reader(file) is get_reader("torch-zip")
        compare(get_reader("torch-zip").read(file), torch.load(path))


def rewrite(path, change, compression=zipfile.ZIP_STORED):
    """Write the records anew, as a zip tool would; ``change`` maps their names to content, None to leave one out."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: archive.read(info) for info in archive.infolist()}
    records |= change
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in records.items():
            if content is not None:
                archive.writestr(name, content)


def test_a_file_that_a_zip_tool_wrote_again(tmp_path, compare):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    rewrite(path, {"c/unused/notes.txt": b"x", "c/data/99": b"never named"})
    with open_checkpoint(path) as checkpoint:
        compare(checkpoint, torch.load(path))
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
    ],
)
def test_refusals(tmp_path, change, error, message):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    rewrite(path, change)
    with pytest.raises(error, match=message) as caught, open_checkpoint(path):
        pass
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_compressed_records_are_refused(tmp_path):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    rewrite(path, {}, zipfile.ZIP_DEFLATED)
    with pytest.raises(UnsupportedError, match=r"compressed; load the file with torch\.load"), open_checkpoint(path):
        pass


def test_torchscript_is_refused(tmp_path):
    path = tmp_path / "script.pt"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("data.pkl", "code/__torch__.py", "constants.pkl", "version"):
            archive.writestr(f"script/{name}", b"\x80\x02N.")
    with pytest.raises(UnsupportedError, match="TorchScript"), open_checkpoint(path):
        pass


@pytest.mark.parametrize("name", ["data.pkl", "version", "byteorder", ".data/serialization_id"])
def test_damage_in_a_small_record_is_noticed(tmp_path, name):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    with zipfile.ZipFile(path) as archive:
        content = archive.read(f"c/{name}")
    data = bytearray(path.read_bytes())
    at = data.index(content)
    data[at + len(content) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="its CRC does not match"), open_checkpoint(path):
        pass


def test_truncation_at_any_length_is_an_input_error(tmp_path):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    data = path.read_bytes()
    for length in range(0, len(data), 3):
        path.write_bytes(data[:length])
        with pytest.raises(InputError) as caught, open_checkpoint(path):
            pass
        assert str(caught.value).startswith(f"{path}: ")
        if length >= 4:
            assert "damaged zip file" in str(caught.value)


def test_a_change_while_open_is_noticed(tmp_path):
    path = save({"w": torch.arange(5.0)}, tmp_path / "c.pt")
    with open_checkpoint(path) as checkpoint:
        checkpoint.check_unchanged()
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(InputError, match="changed while it was read"):
            checkpoint.check_unchanged()
