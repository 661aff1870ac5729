"""Files in the format before torch 1.6: rebuilt tensors equal torch.load's, and any damage is noticed."""

from __future__ import annotations

import io
import itertools
import pickle
import struct
from collections import OrderedDict
from contextlib import closing
from functools import partial

import pytest
import torch
from hostile_kit import Pickled

from ckpt8.checkpoint.readers import inert_pickle, open_checkpoint
from ckpt8.checkpoint.readers.torch_legacy import MAGIC, PROTOCOL_VERSION, sniff
from ckpt8.checkpoint.tree import format_path, iter_leaves
from ckpt8.core.errors import InputError, UnsupportedError
from ckpt8.core.files.source_file import ByteRange, SourceFile
from ckpt8.core.tensors import DType


def save(obj, path, **options):
    torch.save(obj, path, _use_new_zipfile_serialization=False, **options)
    return path


def objects():
    weight = torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "views": [weight, weight[2:4], weight.t(), weight[::2, 1:3]],
        "tied": (weight, OrderedDict(same=weight)),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "empty": torch.empty(0),
        "parameter": torch.nn.Parameter(torch.ones(3)),
    }


@pytest.mark.parametrize("protocol", [1, 2, 3, 4, 5])
def test_tensors_are_those_of_torch_load(tmp_path, compare, protocol):
    path = save(objects(), tmp_path / "c.pt", pickle_protocol=protocol)
    expected = torch.load(path, weights_only=False)
    with open_checkpoint(path) as checkpoint:
        compare(checkpoint, expected)
        assert checkpoint.format == "torch-legacy"
        storages = checkpoint.storages
        assert len({storage.key for storage in storages}) == len(storages)
        assert {storage.dtype for storage in storages} >= {DType.BFLOAT16, DType.BOOL, DType.FLOAT32}
        assert all(storage.crc32 is None and storage.crc_fields == () for storage in storages)
        assert storages[-1].offset + storages[-1].nbytes == checkpoint.size
        for before, after in itertools.pairwise(storages):
            assert after.offset == before.offset + before.nbytes + 8
        keys = {leaf.key for name, leaf in iter_leaves(checkpoint.tree) if name[0] in ("views", "tied")}
        assert len(keys) == 1


class Pid:
    def __init__(self, *parts):
        self.parts = parts


class Pickler(pickle.Pickler):
    def persistent_id(self, obj):
        return obj.parts if isinstance(obj, Pid) else None


def by_hand(tree, storages, *, magic=MAGIC, version=PROTOCOL_VERSION, little_endian=True, keys=None):
    """A legacy file from its parts; ``storages`` maps keys to (element count, bytes)."""
    stream = io.BytesIO()
    for part in (magic, version, {"protocol_version": version, "little_endian": little_endian}):
        pickle.dump(part, stream, protocol=2)
    Pickler(stream, protocol=2).dump(tree)
    pickle.dump(list(storages) if keys is None else keys, stream, protocol=2)
    for count, content in storages.values():
        stream.write(struct.pack("<q", count) + content)
    return stream.getvalue()


Rebuild = partial(Pickled, torch._utils._rebuild_tensor)


def view_file():
    """Storage views, as torch 0.2 wrote them: two views into one root of ten floats."""
    content = torch.arange(10.0)
    tree = {
        name: Rebuild(Pid("storage", torch.FloatStorage, "r", "cpu", 10, (name, start, size)), 1, (2,), (1,))
        for name, start, size in [("a", 2, 4), ("b", 6, 4)]
    }
    return tree, {"r": (10, bytes(content.untyped_storage().tolist()))}


def test_view_storages_place_their_tensors_in_the_root(tmp_path):
    path = tmp_path / "views.pt"
    path.write_bytes(by_hand(*view_file()))
    expected = torch.load(path, weights_only=False)
    assert expected["a"].tolist() == [3.0, 4.0]
    with open_checkpoint(path) as checkpoint:
        leaves = {format_path(name): leaf for name, leaf in iter_leaves(checkpoint.tree)}
        data = bytearray(40)
        checkpoint.read_into(checkpoint.storages[0].offset, memoryview(data))
        root = torch.frombuffer(data, dtype=torch.float32)
        for name, tensor in expected.items():
            ref = leaves[name]
            assert ref.key == "r"
            assert torch.equal(root.as_strided(ref.shape, ref.stride, ref.offset), tensor)


def refused(path, content, message, error=InputError):
    path.write_bytes(content)
    with pytest.raises(error, match=message) as caught, open_checkpoint(path):
        pass
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")


def test_a_view_outside_its_root_or_a_tensor_outside_its_view(tmp_path):
    for view, offset in [(("v", 8, 4), 0), (("v", 2, 2), 1)]:
        pid = Pid("storage", torch.FloatStorage, "r", "cpu", 10, view)
        content = by_hand([Rebuild(pid, offset, (2,), (1,))], {"r": (10, bytes(40))})
        refused(tmp_path / "views.pt", content, "reaches")


def test_truncation_at_every_byte_and_trailing_bytes(tmp_path):
    path = save({"a": torch.arange(3.0), "b": torch.ones(2)}, tmp_path / "c.pt")
    data = path.read_bytes()
    for length in range(1, len(data)):
        refused(path, data[:length], ": ")
    refused(path, data + b"\0", "1 bytes follow the last storage")
    path.write_bytes(data)
    with open_checkpoint(path) as checkpoint:
        assert len(checkpoint.storages) == 2


def one():
    pid = Pid("storage", torch.FloatStorage, "k", "cpu", 2, None)
    return [Rebuild(pid, 0, (2,), (1,))], {"k": (2, bytes(8))}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"version": 1000}, InputError, "version is another"),
        ({"little_endian": False}, UnsupportedError, "big-endian"),
        ({"keys": []}, InputError, "list of storages"),
        ({"keys": ["k", "k"]}, InputError, "list of storages"),
        ({"keys": ["other"]}, InputError, "list of storages"),
        ({"keys": [["k"]]}, InputError, "malformed"),
        ({"keys": "k"}, InputError, "malformed"),
    ],
)
def test_contradictory_headers(tmp_path, options, error, message):
    refused(tmp_path / "c.pt", by_hand(*one(), **options), message, error)


@pytest.mark.parametrize(("count", "content"), [(3, bytes(12)), (-1, b""), (2**62, bytes(8)), (1, bytes(4))])
def test_contradictory_counts(tmp_path, count, content):
    content = by_hand(one()[0], {"k": (count, content)})
    refused(tmp_path / "c.pt", content, f"has {count} elements, its pickle says 2")


def test_the_pickles_are_capped(tmp_path, monkeypatch):
    path = tmp_path / "c.pt"
    path.write_bytes(by_hand(["x" * 1000], {}))
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tree == ["x" * 1000]
    monkeypatch.setattr(inert_pickle, "MAX_PICKLE_BYTES", 1000)
    with pytest.raises(InputError, match="bytes are announced"), open_checkpoint(path):
        pass


def sniffed(path):
    with closing(SourceFile(ByteRange.of(path))) as file:
        return sniff(file)


def test_sniffing_needs_the_whole_magic_number(tmp_path):
    path = save({"a": 1}, tmp_path / "c.pt")
    assert sniffed(path)
    path.write_bytes(by_hand(*one(), magic=MAGIC + 1))
    assert not sniffed(path)
    path.write_bytes(b"\x80")
    assert not sniffed(path)


def test_a_storage_saved_beside_its_tensor(tmp_path, compare):
    tensor = torch.arange(4, dtype=torch.uint8)
    path = save([tensor.untyped_storage(), tensor], tmp_path / "c.pt")
    with open_checkpoint(path) as checkpoint:
        assert [type(leaf).__name__ for _, leaf in iter_leaves(checkpoint.tree)] == ["StorageRef", "TensorRef"]
        assert [storage.nbytes for storage in checkpoint.storages] == [4]


def test_a_huge_storage_that_is_not_there(tmp_path):
    pid = Pid("storage", torch.FloatStorage, "k", "cpu", 2**40, None)
    refused(tmp_path / "c.pt", by_hand([pid], {"k": (2**40, bytes(8))}), "cut off inside storage 'k'")
