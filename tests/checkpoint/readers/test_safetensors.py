"""The safetensors reader: the same tensors as the library reads, and the same files refused."""

from __future__ import annotations

import json
import struct
from contextlib import closing

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import ckpt8
from ckpt8.checkpoint.meaning.roles import classify
from ckpt8.checkpoint.readers import open_checkpoint, safetensors
from ckpt8.checkpoint.readers.safetensors import DTYPES
from ckpt8.compressing.planning import make_plan
from ckpt8.compressing.policy import Policy
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType, Role

TORCH_DTYPES = [dtype for dtype in DTYPES.values() if dtype is not DType.FLOAT4_E2M1FN_X2]


def filled(dtype, *shape):
    count = dtype.itemsize
    for size in shape:
        count *= size
    content = torch.randint(0, 2 if dtype is DType.BOOL else 120, (count,), dtype=torch.uint8)
    return content.view(dtype.torch).view(shape)


@pytest.fixture
def every_dtype(tmp_path):
    tensors = {dtype.label: filled(dtype, 3, 8) for dtype in TORCH_DTYPES}
    tensors |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 4), 'a b/ü\n"': torch.arange(7), "": torch.ones(2)}
    path = tmp_path / "every.bin"
    save_file(tensors, path, metadata={"format": "pt", "note": "ü"})
    return path


def raw(header, data=b"", length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def test_tensors_are_those_of_the_library(every_dtype):
    expected = load_file(every_dtype)
    with open_checkpoint(every_dtype) as checkpoint:
        assert checkpoint.format == "safetensors"
        with safe_open(every_dtype, "pt") as file:
            assert set(checkpoint.tree) == set(file.keys())
        places = {storage.key: storage for storage in checkpoint.storages}
        for name, tensor in expected.items():
            ref = checkpoint.tree[name]
            assert (ref.shape, ref.dtype.torch) == (tuple(tensor.shape), tensor.dtype)
            assert ref.stride == tensor.stride() or not tensor.numel()
            buffer = bytearray(places[ref.key].nbytes)
            checkpoint.read_into(places[ref.key].offset, memoryview(buffer))
            assert buffer == bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def test_four_bit_floats_are_pairs(tmp_path):
    path = tmp_path / "f4.safetensors"
    path.write_bytes(raw({"w": {"dtype": "F4", "shape": [4, 6], "data_offsets": [0, 12]}}, bytes(range(12))))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tree["w"].shape == (4, 3)
        assert checkpoint.tree["w"].dtype is DType.FLOAT4_E2M1FN_X2
    ckpt8.compress(path)
    assert ckpt8.load(path.with_suffix(".ckpt8"))["w"].shape == (4, 3)
    path.write_bytes(raw({"w": {"dtype": "F4", "shape": [2, 3], "data_offsets": [0, 3]}}, bytes(3)))
    with pytest.raises(UnsupportedError, match="odd length"), open_checkpoint(path):
        pass


def test_roles_are_weights_unless_it_is_an_optimizer(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(80, 80), "n": torch.arange(4), "running_mean": torch.ones(70_000)}, path)
    with open_checkpoint(path) as checkpoint:
        streams = {s.spec.name: s for s in make_plan(checkpoint, Policy()).streams}
        assert {name: s.codec.id for name, s in streams.items()} == {
            "w": "split24/1",
            "n": "lossless/1",
            "running_mean": "lossless/1",
        }
    moment = torch.rand(80, 80)
    state = {"exp_avg": moment, "exp_avg_sq": moment * moment, "step": torch.tensor(3.0), "master_param": moment}
    save_file({f"state.{k}.{key}": value.clone() for k in (0, 1) for key, value in state.items()}, path)
    with open_checkpoint(path) as checkpoint:
        structure = classify(checkpoint.tree)
        roles = {tensor.name: tensor.role for tensor in structure.tensors}
        assert roles["state.0.exp_avg"] is Role.MOMENT1
        assert roles["state.1.exp_avg_sq"] is Role.MOMENT2
        assert roles["state.1.step"] is Role.OTHER
        assert roles["state.1.master_param"] is Role.WEIGHT
        assert [p.name for p in structure.parameters] == ["state.0", "state.1"]
        units = [unit for unit in make_plan(checkpoint, Policy()).units if unit.parameter]
        assert [len(unit.streams) for unit in units] == [2, 2]
    ckpt8.compress(path)
    assert not ckpt8.verify(path.with_suffix(".ckpt8"), path).failures
    with pytest.raises(ckpt8.core.errors.UsageError, match="no model state dict"):
        ckpt8.resume(path, model=torch.nn.Linear(2, 2))


ONE = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
HOSTILE = {
    "a header longer than the file": (raw(b"{}", length=1 << 20), "cut off inside the header"),
    "not JSON": (raw(b"{'w': 1}"), "is not valid JSON"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "is not valid JSON"),
    "nested without end": (raw(b'{"a":' + b"[" * 100_000), "is not valid JSON"),
    "NaN": (raw(b'{"__metadata__": NaN}'), "is not valid JSON"),
    "a name twice": (
        raw(b'{"w":' + json.dumps(ONE).encode() + b',"w":' + json.dumps(ONE).encode() + b"}", bytes(8)),
        "a key occurs twice",
    ),
    "metadata of numbers": (raw({"__metadata__": {"a": 1}}), "does not map names to texts"),
    "metadata in a list": (raw({"__metadata__": []}), "does not map names to texts"),
    "no shape": (raw({"w": {"dtype": "F32", "data_offsets": [0, 8]}}, bytes(8)), "entry is malformed"),
    "a number for an entry": (raw({"w": 3}), "entry is malformed"),
    "three offsets": (raw({"w": ONE | {"data_offsets": [0, 4, 8]}}, bytes(8)), "entry is malformed"),
    "a fraction": (raw({"w": ONE | {"shape": [2.0]}}, bytes(8)), "are not counts"),
    "a boolean": (raw({"w": ONE | {"shape": [2, True]}}, bytes(8)), "are not counts"),
    "a negative size": (raw({"w": ONE | {"shape": [-2]}}, bytes(8)), "are not counts"),
    "a negative offset": (raw({"w": ONE | {"data_offsets": [-8, 0]}}, bytes(8)), "are not counts"),
    "a huge size": (raw({"w": ONE | {"shape": [1 << 63]}}, bytes(8)), "are not counts"),
    "a product beyond 64 bits": (
        raw({"w": ONE | {"shape": [1 << 62, 1 << 62]}}, bytes(8)),
        "does not have the 8 bytes",
    ),
    "offsets backwards": (raw({"w": ONE | {"shape": [0], "data_offsets": [8, 0]}}, bytes(8)), "does not have the -8"),
    "a shape of another size": (raw({"w": ONE | {"shape": [3]}}, bytes(8)), "does not have the 8 bytes"),
    "an overlap": (raw({"a": ONE, "b": ONE}, bytes(8)), "'b' overlaps"),
    "a hole": (raw({"a": ONE, "b": ONE | {"data_offsets": [12, 20]}}, bytes(20)), "'b' leaves a hole"),
    "a hole at the start": (raw({"a": ONE | {"data_offsets": [4, 12]}}, bytes(12)), "'a' leaves a hole"),
    "a file that ends early": (raw({"a": ONE}, bytes(7)), "cut off"),
    "bytes at the end": (raw({"a": ONE}, bytes(9)), "1 bytes follow the last tensor"),
}


LENIENT = ("a name twice",)
"""The library takes the last of two entries, of which only one can be what was meant."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_refused(kind, tmp_path):
    content, message = HOSTILE[kind]
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught, open_checkpoint(path):
        pass
    assert type(caught.value) is InputError
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    if kind not in LENIENT:
        with pytest.raises((SafetensorError, ValueError)), safe_open(path, "pt"):
            pass


@pytest.mark.parametrize("label", ["F6_E2M3", "F2", "f32", "X" * 500])
def test_unknown_element_types_are_named(label, tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw({"some.weight": ONE | {"dtype": label}}, bytes(8)))
    with pytest.raises(UnsupportedError, match=r"'some\.weight': element type") as caught, open_checkpoint(path):
        pass
    assert len(str(caught.value)) < 300


def test_a_header_over_the_limit_is_not_read(tmp_path, monkeypatch):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 100_000_001) + b"{")
        file.truncate(200_000_000)
    with pytest.raises(InputError, match="of an unknown format"), open_checkpoint(path):
        pass
    monkeypatch.setattr(safetensors, "MAX_HEADER", 10)
    with closing(SourceFile(ByteRange.of(path))) as file, pytest.raises(InputError, match="is over 10"):
        safetensors.read(file)


def test_a_header_padded_with_spaces_and_without_tensors(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(raw(json.dumps({"w": ONE}).encode() + b" " * 13, bytes(8)))
    ckpt8.compress(path)
    assert ckpt8.restore(path.with_suffix(".ckpt8"), tmp_path / "back").read_bytes() == path.read_bytes()
    path.write_bytes(raw(b"{}"))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tree == {}
    with pytest.raises(InputError, match="holds no tensors"):
        ckpt8.compress(path, force=True)
